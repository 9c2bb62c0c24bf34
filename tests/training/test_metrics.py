"""Losses by source of what is trained and by name of what is held out: on any ranks those of the data itself."""

import pytest
from conftest import read_json
from ranks import train_all
from tiny import sentences, write_jsonl, write_model

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
        output = train_all(world, runs, folder / f"log-{world}")
    results = {name: read_json(folder / name / "run.json").get("results") for name in RUNS}
    assert all(results.values()), output
    return results | {"screen": output}


def test_a_resume_reports_what_other_ranks_mean_for_the_learning_rate(logs):
    assert "1 rank now, 2 before; a step has 16 sequences as before" in logs["screen"]


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
    cases = [
        options(tmp_path / "whole", **words),
        options(tmp_path / "resumed", **words | resume | {"eval_on_start": True}),  # which counts no evaluation twice
    ]
    output = train_all(1, cases, tmp_path / "log")
    for name in ("whole", "resumed"):
        results = read_json(tmp_path / name / "run.json")["results"]
        assert results["steps"] == 4, output
        assert "eval_held_perplexity was not better in the last 3 evaluations" in results["stopped_early"]
    best = read_json(tmp_path / "whole" / "checkpoint-4" / "trainer_state.json")["best_metric"]
    perplexities = [entry["eval_held_perplexity"] for entry in results["log"] if "eval_held_perplexity" in entry]
    assert best == min(perplexities), "the smallest perplexity is the best"
