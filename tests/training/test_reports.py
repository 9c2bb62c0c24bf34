"""What a training says of itself: tokens without padding, and that nothing is learnt."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import read_json
from ranks import train_all
from tiny import write_jsonl
from transformers import AutoModelForCausalLM, TrainerState

from dsft.data.epoch import BLANK, Collator, sequence
from dsft.training.callbacks import MetricsFile


def _sequence(length: int):
    return sequence(np.arange(1, length + 1), np.ones(length, bool))


@pytest.mark.parametrize("flash", [False, True])
def test_a_batch_tells_its_tokens_those_trained_and_its_positions(flash):
    packed = Collator(0, packed=True, flash=flash)([[_sequence(3), _sequence(4)], [_sequence(5)], [BLANK]])
    assert packed["num_tokens"].tolist() == [12, 12 - 3, 3 * 8]
    assert Collator(0)([[_sequence(3)], [_sequence(11)], [BLANK]])["num_tokens"].tolist() == [14, 14 - 2, 3 * 16]


def test_packed_rows_of_one_sequence_each_have_no_positions_and_so_no_mask():
    collate = Collator(0, packed=True)
    assert "position_ids" not in collate([[_sequence(16)], [_sequence(16)]])
    assert "position_ids" in collate([[_sequence(16)], [_sequence(8), _sequence(8)]])


def test_a_batch_has_a_mask_where_a_row_is_padded():
    assert "attention_mask" in Collator(0)([[_sequence(16)], [_sequence(15)]])
    assert "attention_mask" not in Collator(0)([[_sequence(16)], [_sequence(16)]])


@pytest.fixture(scope="module")
def runs(tiny, options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    rows = [{"prompt": "a b", "completion": " model" * number} for number in range(1, 12)]
    data = str(write_jsonl(folder / "pairs.jsonl", rows))
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    zeros = folder / "model of zeros"
    model.save_pretrained(zeros)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (zeros / name).write_bytes((tiny / "model" / name).read_bytes())
    common = {"data": data, "per_device_train_batch_size": 1, "logging_steps": 1}
    cases = {
        "packed": common | {"packing": True, "max_steps": None, "num_train_epochs": 2},
        "padded": common | {"max_steps": None, "num_train_epochs": 2},
        "zeros": common | {"model": str(zeros), "max_steps": 3, "zero": "1"},
        "learns": common | {"max_steps": 12},
        "every third": common | {"max_steps": 12, "logging_steps": 3},
        "data_seed 0": common | {"data_seed": 0, "eval_fraction": 0.3, "save_strategy": "steps", "save_steps": 2},
        "data_seed 42": common | {"data_seed": 42, "eval_fraction": 0.3},
        "seed 42": common | {"seed": 42, "eval_fraction": 0.3},
    }
    log = train_all(1, [options(folder / name, **changes) for name, changes in cases.items()], folder / "log")
    return folder, log


def test_each_log_entry_is_a_line_of_a_file_and_of_the_screen(runs):
    folder, screen = runs
    lines = [json.loads(line) for line in (folder / "learns" / "metrics.jsonl").read_text().splitlines()]
    log = read_json(folder / "learns" / "run.json")["results"]["log"]
    assert [(line["step"], line.get("loss")) for line in lines] == [(entry["step"], entry.get("loss")) for entry in log]
    assert lines[0]["peak_host_gib"] > 0 and lines[0].keys() == log[0].keys()
    assert re.search(r"^step +11 .* left \d+:\d\d:\d\d$", screen, re.MULTILINE) and "\r" not in screen


def test_a_run_that_resumes_continues_its_metrics_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    arguments, callback = SimpleNamespace(output_dir=str(tmp_path)), MetricsFile()
    callback.on_train_begin(arguments, TrainerState(global_step=2), None)
    callback.on_log(arguments, TrainerState(global_step=3, epoch=0.5), None, logs={"loss": 1.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "epoch": 0.5, "loss": 1.0},
    ]
    callback.on_train_begin(arguments, TrainerState(), None)
    assert path.read_text() == "", "another run"


def test_tokens_seen_and_trained_are_those_of_the_data_packed_or_padded(runs):
    folder, _ = runs
    for name in ("packed", "padded"):
        run = read_json(folder / name / "run.json")
        results, data = run["results"], run["data"]
        assert results["tokens_seen"] == 2 * data["tokens"], json.dumps(data)
        assert results["trained_tokens"] == 2 * data["trained_tokens"] < results["tokens_seen"]
        last = [entry for entry in results["log"] if "loss" in entry][-1]
        assert last["num_trained_tokens"] == results["trained_tokens"] and 0 <= last["padding_share"] < 1


def test_the_logged_loss_is_per_trained_token_of_its_interval_and_the_final_one_of_all(runs):
    folder, _ = runs
    each, some = (
        [entry for entry in read_json(folder / name / "run.json")["results"]["log"] if "loss" in entry]
        for name in ("learns", "every third")
    )
    trained = np.diff([0, *(entry["num_trained_tokens"] for entry in each)])
    nats = trained * [entry["loss"] for entry in each]
    assert len(set(trained)) > 2, "steps of one size would not tell"
    ends = [entry["step"] for entry in some]
    for start, end, entry in zip([0, *ends], ends, some, strict=False):
        assert entry["loss"] == pytest.approx(nats[start:end].sum() / trained[start:end].sum(), rel=1e-6)
    results = read_json(folder / "every third" / "run.json")["results"]
    assert results["train_loss"] == pytest.approx(nats.sum() / trained.sum(), rel=1e-6)


def test_the_final_model_is_for_all_that_the_umask_lets_read_and_generates_with_its_cache(runs):
    folder, _ = runs
    final = folder / "learns" / "final"
    assert read_json(final / "config.json")["use_cache"] is True
    readable = final.stat().st_mode & 0o444
    assert {path.name for path in final.iterdir() if path.stat().st_mode & 0o444 != readable} == set()


def test_data_seed_0_is_a_seed_like_any_other(runs):
    folder, _ = runs
    names = ("data_seed 0", "data_seed 42", "seed 42")
    results = [read_json(folder / name / "run.json")["results"] for name in names]
    losses = [[entry["loss"] for entry in result["log"] if "loss" in entry] for result in results]
    assert losses[0] != losses[1] == losses[2], "the order of the rows"
    held_out = [result["eval_perplexity"] for result in results]
    assert held_out[0] != held_out[1] == held_out[2], "the rows held out"
    manifest = read_json(folder / "data_seed 0" / "checkpoint-2" / "manifest.json")
    assert manifest["run_identity"]["seed of the order"] == 0, "else a resume without data_seed takes another order"


def test_a_gradient_of_0_and_a_loss_that_stays_at_guessing_are_said(runs):
    folder, log = runs
    warnings = {name: read_json(folder / name / "run.json")["results"]["warnings"] for name in ("zeros", "learns")}
    assert warnings["learns"] == []
    gradient, loss = warnings["zeros"]
    assert "the gradient norm is 0 at step 1" in gradient and "no better than uniform over 384 tokens" in loss
    assert log.count(f"dsft: warning: {gradient}") == log.count(f"dsft: warning: {loss}") == 1
