"""Losses by source of what is trained and by name of what is held out: on any ranks those of the data itself."""

import json
import socket
import time

import pytest
import torch
import torch.distributed as dist
from conftest import grid, read_json
from ranks import on_ranks, train, train_all
from tiny import sentences, write_jsonl, write_model

from dsft.data.epoch import Collator
from dsft.training.metrics import Bottlenecks, RankTimes, Work

pytestmark = pytest.mark.launch
RUNS = ("files-1", "files-2", "resumed-1", "logits-2")


@pytest.fixture(scope="module")
def logs(options, tiny, tmp_path_factory):
    """Name of a run -> run.json's results; each step holds every row, and an evaluation precedes the first."""
    folder = tmp_path_factory.mktemp("sources")
    rows = {
        "red": [{"prompt": "red", "completion": f" {text}", "colour": "red"} for text in sentences(9, seed=1)],
        "blue": [{"prompt": "blue", "completion": f" {text}", "colour": "blue"} for text in sentences(5, seed=2)],
    }
    files = {name: str(write_jsonl(folder / f"{name}.jsonl", some)) for name, some in rows.items()}
    common = {"eval_data": files, "eval_on_start": True, "logging_steps": 1, "data_cache": str(folder / "cache")}
    per_rank = {1: {"per_device_train_batch_size": 16}, 2: {"gradient_accumulation_steps": 4}}
    save = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
    cases = {
        "files": {"data": [*files.values()]},
        "logits": {"data": [*files.values()], "tiled_loss": False, "zero": "3"},
    }
    for world in (2, 1):
        made = [name for name in cases if f"{name}-{world}" in RUNS]
        runs = [options(folder / f"{name}-{world}", **common | save | per_rank[world] | cases[name]) for name in made]
        if world == 1:
            resumes = {"resume_from_checkpoint": str(folder / "files-2" / "checkpoint-1")}
            runs.append(runs[0] | {"output_dir": str(folder / "resumed-1")} | resumes)
            weights = {"resume_weights_only": True, "per_device_train_batch_size": 4}
            runs.append(runs[0] | {"output_dir": str(folder / "smaller-1")} | resumes | weights)
        output = train_all(world, runs, folder / f"log-{world}")
    results = {name: read_json(folder / name / "run.json").get("results") for name in RUNS}
    assert all(results.values()), output
    return results | {"screen": output}


def test_a_resume_reports_what_other_ranks_or_another_batch_mean_for_the_learning_rate(logs):
    assert "1 rank now, 2 before; a step has 16 sequences as before" in logs["screen"]
    assert "a step has 4 sequences, 16 in the run of" in logs["screen"]
    assert "right here 0.5 times as large" in logs["screen"]


def test_named_sets_are_measured_apart_together_and_in_the_mean(logs):
    for entry in logs["files-2"]["log"]:
        if "eval_loss" in entry:
            tokens = [entry[f"eval_{name}_tokens"] for name in ("red", "blue")]
            losses = [entry[f"eval_{name}_loss"] for name in ("red", "blue")]
            pooled = sum(number * loss for number, loss in zip(tokens, losses, strict=True)) / sum(tokens)
            assert entry["eval_loss"] == pytest.approx(pooled, rel=1e-9) and entry["eval_tokens"] == sum(tokens)
            assert entry["eval_macro_loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)
            assert entry["eval_red_perplexity_low"] < entry["eval_red_perplexity"] < entry["eval_red_perplexity_high"]


def test_the_screen_names_sources_and_sets(logs):
    assert "red loss" in logs["screen"] and "macro perplexity" in logs["screen"]


def test_a_training_ends_early_by_any_metric_and_counts_on_after_a_resume(options, tiny, tmp_path):
    model = write_model(tmp_path / "model")
    words = {
        "model": str(model),
        "learning_rate": 1e-6,  # so that no evaluation is better by the threshold
        "eval_data": {"held": str(tiny / "held_out.jsonl"), "seen": str(tiny / "texts.jsonl")},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 9,
        "metric_for_best_model": "eval_held_perplexity",
        "early_stopping_patience": 3,
        "early_stopping_threshold": 1,
        "max_steps": 8,
    }
    resume = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    other = {"metric_for_best_model": "eval_seen_perplexity"}
    cases = [
        options(tmp_path / "whole", **words),
        options(tmp_path / "resumed", **words | resume | {"eval_on_start": True}),  # which counts no evaluation twice
        options(tmp_path / "other", **words | resume | other),
    ]
    output = train_all(1, cases, tmp_path / "log")
    steps = read_json(tmp_path / "other" / "run.json")["results"]["steps"]
    assert steps == 6 and output.count("as eval_seen_perplexity: the best is looked for from here on") == 1, output
    for name in ("whole", "resumed"):
        results = read_json(tmp_path / name / "run.json")["results"]
        assert results["steps"] == 4, output
        assert "eval_held_perplexity was not better in the last 3 evaluations" in results["stopped_early"]
    best = read_json(tmp_path / "whole" / "checkpoint-4" / "trainer_state.json")["best_metric"]
    perplexities = [entry["eval_held_perplexity"] for entry in results["log"] if "eval_held_perplexity" in entry]
    assert best == min(perplexities), "the smallest perplexity is the best"


def test_an_evaluation_that_compiles_leaves_no_seconds_and_no_collectives_in_the_interval():
    work = Work(torch.device("cpu"))
    work.collectives.append((1.0, 2.0))
    begun = work.begun
    with work.paused():
        time.sleep(0.01)
        work.leave_out(100.0)
        work.collectives.append((3.0, 9.0))
    assert begun + 0.01 <= work.begun < begun + 100 and work.times.forward == 0
    assert work.collectives == [(1.0, 2.0)]


def training_that_waits(options: dict) -> list[int]:
    """Rank 1 waits for each batch; returns the collectives of each step that were timed."""
    collate, send, timed = Collator.__call__, Work.send, []

    def slow_on_rank_1(*args):
        time.sleep(0.3 * dist.get_rank())
        return collate(*args)

    def sending(work, *args, **kwargs):
        send(work, *args, **kwargs)
        timed.append(len(work.collectives))

    Collator.__call__, Work.send = slow_on_rank_1, sending
    train(options)
    return timed


@pytest.mark.parametrize(("zero", "least"), grid([("1", 4), ("3", 10)], [("3", 10)]))
def test_ranks_report_what_they_wait_for_in_collectives(options, tmp_path, zero, least):
    """Those of DeepSpeed beside the two of a step. The rank that is slow waits for no other, and its host is named."""
    case = options(tmp_path / "run", zero=zero, max_steps=4, logging_steps=1, seq_len=32, max_skipped_steps=2)
    counts = on_ranks(2, training_that_waits, case, log=tmp_path / "log")
    assert min(map(min, counts)) >= least
    screen = (tmp_path / "log").read_text()
    assert screen.count(f"% of the time (longest on {socket.gethostname()}); raise dataloader_num_workers") == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "loss" in line][-1]
    assert last["slowest_rank"] == 1 and last["data_wait_share"] > 0.5 > last["network_share"] > 0


def test_the_network_is_named_where_two_lines_in_a_row_are_mostly_its(capsys):
    ranks = [RankTimes(host="a", data=0.0, forward=1.0, product=1.0)]
    bottlenecks = Bottlenecks(waits_in_forward=True)
    for share in (0.7, 0.1, 0.7, 0.7, 0.7):
        bottlenecks.note({"network_share": share, "data_wait_share": 0.0}, ranks, interval=1.0)
    assert capsys.readouterr().out.count("the network: 70% of the time") == 1
