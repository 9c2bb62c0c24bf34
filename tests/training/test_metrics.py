"""Losses by source of what is trained and by name of what is held out: on any ranks those of the data itself."""

import pytest
from conftest import read_json
from ranks import train_all
from tiny import sentences, write_jsonl, write_model

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def logs(options, tmp_path_factory):
    """(the screen, the log) of a training whose steps hold every row; an evaluation precedes the first."""
    folder = tmp_path_factory.mktemp("sources")
    rows = {
        "red": [{"prompt": "red", "completion": f" {text}", "colour": "red"} for text in sentences(9, seed=1)],
        "blue": [{"prompt": "blue", "completion": f" {text}", "colour": "blue"} for text in sentences(5, seed=2)],
    }
    files = {name: str(write_jsonl(folder / f"{name}.jsonl", some)) for name, some in rows.items()}
    words = {"data": [*files.values()], "eval_data": files, "eval_on_start": True, "gradient_accumulation_steps": 4}
    output = train_all(2, [options(folder / "run", **words)], folder / "log")
    return output, read_json(folder / "run" / "run.json")["results"]["log"]


def test_named_sets_are_measured_apart_together_and_in_the_mean(logs):
    for entry in logs[1]:
        if "eval_loss" in entry:
            tokens = [entry[f"eval_{name}_tokens"] for name in ("red", "blue")]
            losses = [entry[f"eval_{name}_loss"] for name in ("red", "blue")]
            pooled = sum(number * loss for number, loss in zip(tokens, losses, strict=True)) / sum(tokens)
            assert entry["eval_loss"] == pytest.approx(pooled, rel=1e-9) and entry["eval_tokens"] == sum(tokens)
            assert entry["eval_macro_loss"] == pytest.approx(sum(losses) / 2, rel=1e-9)
            assert entry["eval_red_perplexity_low"] < entry["eval_red_perplexity"] < entry["eval_red_perplexity_high"]


def test_the_screen_names_sources_and_sets(logs):
    assert "red loss" in logs[0] and "macro perplexity" in logs[0]


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
    assert output.count("eval_held_perplexity was not better in the last 3 evaluations, up to step 4") == 2
    best = read_json(tmp_path / "whole" / "checkpoint-4" / "trainer_state.json")["best_metric"]
    perplexities = [entry["eval_held_perplexity"] for entry in results["log"] if "eval_held_perplexity" in entry]
    assert best == min(perplexities), "the smallest perplexity is the best"
