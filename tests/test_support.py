"""benchmarks/support.md is what the kept sessions hold, and a session holds what its runs wrote."""

import json
import sys

from conftest import ROOT, read_json
from ranks import train_all

sys.path.insert(0, str(ROOT / "scripts"))

import support


def test_the_page_is_what_the_sessions_hold():
    assert (ROOT / "benchmarks" / "support.md").read_text() == support.page() + "\n"


def test_a_fact_is_what_a_run_wrote_of_itself(options, tiny, tmp_path, monkeypatch):
    held_out = {"eval_data": str(tiny / "held_out.jsonl"), "eval_strategy": "steps", "eval_steps": 2}
    runs = {
        "lora": {"method": "lora", "use_dora": True, "zero": "3"} | held_out,
        "resumed": {"save_strategy": "steps", "save_steps": 2, "zero": "2"},
        "failed": {"learning_rate": 1e30, "max_steps": 30},
    }
    cases = [options(tmp_path / name, **changes) for name, changes in runs.items()]
    more = runs["resumed"] | {"max_steps": 4, "resume_from_checkpoint": "auto"}
    printed = train_all(2, [*cases, options(tmp_path / "resumed", **more)], tmp_path / "log")
    assert printed.count("resuming from") == 1 and read_json(tmp_path / "resumed" / "run.json")["status"] == "done"
    monkeypatch.setattr(support, "SESSIONS", tmp_path / "sessions")
    support.record("here", tmp_path, ["tests"], 1)
    session = json.loads((tmp_path / "sessions" / "here.json").read_text())
    facts = {fact["method"]: (fact["zero"], fact["ranks"], fact["deeds"]) for fact in session["facts"]}
    assert facts == {
        "DoRA": ("3", 2, ["train", "evaluate", "export"]),
        "full": ("2", 2, ["train", "resume", "export"]),
    }
    assert {fact["architecture"] for fact in session["facts"]} == {"llama"}
    assert session["versions"]["python"] == [sys.version.split()[0]]
    assert "| 3 |  |  | train (2), evaluate (2), export (2); 1 |  |" in support.page()
