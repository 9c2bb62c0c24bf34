"""The first command of the README, as a user runs it (the environment is made already)."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, read_json
from ranks import run_entry
from test_notebook import execute, shown_perplexities
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.cli import quickstart
from dsft.cli.quickstart import HELD_OUT_PERCENT, split_of, standard_library_docs
from dsft.config.options import TrainConfig
from dsft.models.size import measure_model

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """What the quickstart's commands leave on forked ranks, where a training ends after 6 steps and a quarter
    of the held-out rows is evaluated; all of them lie in `whole` beside the folder.
    """
    folder = tmp_path_factory.mktemp("short") / "quickstart"
    entries = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
    for command in quickstart.STEPS.values():
        name, *words = command.format(folder=folder).split()
        words += ["--max_steps", 6] if name == "train" else []
        if name in entries:
            result = run_entry(entries[name], words, world=2)
        else:
            result = run_entry("dsft.cli.main", [name, *words])
        assert result.returncode == 0, result.stderr
        if name == "demo-data":
            for file in folder.glob("*/held_out.jsonl"):
                shutil.copytree(file.parent, folder.parent / "whole" / file.parent.name)
                rows = file.read_text().splitlines(keepends=True)
                file.write_text("".join(rows[: len(rows) // 4]))
        if name == "eval":
            quickstart.write_answers(folder)
    return folder


def test_no_held_out_module_was_trained_on(short):
    whole = short.parent / "whole"
    rows = {
        split: [json.loads(line) for line in (whole / "instructions" / f"{split}.jsonl").open()]
        for split in ("train", "held_out")
    }
    assert len(rows["train"]) > 2000 and 100 < len(rows["held_out"]) < len(rows["train"])
    modules = {name for name, _ in standard_library_docs()}
    held_out = {name for name in modules if split_of(f"module {name}") == "held_out"}
    assert 0.5 * HELD_OUT_PERCENT < 100 * len(held_out) / len(modules) < 2 * HELD_OUT_PERCENT
    for column in ("prompt", "completion"):
        assert not {row[column] for row in rows["train"]} & {row[column] for row in rows["held_out"]}
    text = (whole / "corpus" / "train.jsonl").read_text()
    held_out = [json.loads(line)["text"] for line in (whole / "corpus" / "held_out.jsonl").open()]
    assert len(held_out) > 20 and not [
        part
        for part in [row["completion"] for row in rows["held_out"]] + "\n\n".join(held_out).split("\n\n")
        if len(part) > 200 and json.dumps(part)[1:-1] in text
    ]


def test_the_demo_model_has_1_to_2_million_parameters(short):
    assert 1e6 < measure_model(TrainConfig(model=str(short / "model" / "config.json"))).size.num_params < 2e6


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["evaluate_checkpoints"])
def test_the_notebooks_run_on_what_the_quickstart_leaves(short, tmp_path, monkeypatch, name):
    run = short / "runs" / "full"
    outputs = execute(
        monkeypatch, run, short / "corpus" / "held_out.jsonl", notebook=ROOT / "notebooks" / f"{name}.ipynb",
        SEQ_LEN=512, OUT=tmp_path,
    )  # fmt: skip
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    if name == "evaluate_checkpoints":
        logged = read_json(run / "run.json")["results"]["eval_perplexity"]
        assert shown_perplexities(outputs)["final"] == pytest.approx(logged, rel=1e-3)


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["short", "whole"])
def test_quickstart_does_the_whole_job(run, capfd, tmp_path, request, is_whole):
    """Whole, as its user types it; in the quick tier as `short`."""
    if is_whole:
        folder = tmp_path / "quickstart"
        result = run(["dsft", "quickstart", folder], timeout=3000)
        assert result.returncode == 0, result.stdout + result.stderr
        out = result.stdout
    else:
        folder = request.getfixturevalue("short")
        quickstart.show_results(folder, start=0.0)
        out = capfd.readouterr().out
    runs = {name: read_json(folder / "runs" / name / "run.json") for name in ("full", "lora")}
    for content in runs.values():
        assert content["status"] == "done"
        before = next(entry["eval_perplexity"] for entry in content["results"]["log"] if "eval_perplexity" in entry)
        assert content["results"]["eval_perplexity"] < (0.98 if is_whole else 1) * before
    assert (
        runs["full"]["plan"]["zero"] == "3"
        and runs["lora"]["plan"]["zero"] in ("0", "1", "2")
        and "is the fastest that fits" in runs["lora"]["plan"]["reason"]
    )
    if is_whole:
        model, gzip = map(float, re.search(r"([\d.]+) bits per byte by the model, ([\d.]+) by gzip", out).groups())
        assert model < 0.95 * gzip
    results = {
        (Path(result["model"]).name, result["mode"]): result
        for result in read_json(folder / "perplexity" / "perplexity.json")["results"]
    }
    assert len(results) == 4
    merged = results["merged", "answers"]
    assert merged["perplexity"] == pytest.approx(runs["lora"]["results"]["eval_perplexity"], rel=1e-4)

    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    answer = model.generate(**tokenizer("Question: what does", return_tensors="pt"), max_new_tokens=5)
    assert answer.shape[1] > 5
    assert out.count("before LoRA:") == out.count("after LoRA:") == quickstart.NUM_QUESTIONS
    for part in ("perplexity", "tokens/s", "peak", "gzip -9", "report.html", "merged", "next"):
        assert part in out
    page = (folder / "report.html").read_text()
    assert page.count("<svg") > 4
