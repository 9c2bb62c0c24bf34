"""Which step is a run's last and which checkpoint its best, where a kill, a stop or a disk comes between."""

import signal
from pathlib import Path

import pytest
from conftest import read_json
from ranks import on_ranks, trained
from transformers import TrainerCallback

from dsft.checkpoints.manifest import checkpoints
from dsft.errors import Unsaved
from dsft.runtime import distributed
from dsft.training.trainer import PerplexityTrainer

BEST_IS_FIRST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


class AskedInStep2(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)


def _outcome(options: dict) -> str:
    distributed.listen_for_signals()  # forgets a signal of an earlier training
    try:
        return "nothing left" if trained(options) is None else "done"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _without(method: str, replacement, options: dict) -> str:
    """The outcome of a training in which a method of the trainer is another."""
    original = getattr(PerplexityTrainer, method)
    setattr(PerplexityTrainer, method, replacement)
    try:
        return _outcome(options)
    finally:
        setattr(PerplexityTrainer, method, original)


def _lose_final(trainer) -> None:
    raise Unsaved("final could not be saved: no room")


def _all(cases: dict[str, dict]) -> dict[str, list[str]]:
    again = {"resume_from_checkpoint": "auto"}
    lost = _without("save_final", _lose_final, cases["killed"])
    outcomes = {"killed": [lost, _outcome(cases["killed"] | again), _outcome(cases["killed"] | again)]}
    outcomes["early"] = [_without("save_final", _lose_final, cases["early"]), _outcome(cases["early"] | again)]
    for name in ("stopped", "mid-epoch"):
        outcomes[name] = [_outcome(cases[name] | {"callbacks": [AskedInStep2()]})]
    patience = {"early_stopping_patience": 1, "early_stopping_threshold": 99.0, "save_strategy": "steps"}
    outcomes["mid-epoch"].append(_outcome(cases["mid-epoch"] | again | patience | {"eval_strategy": "steps"}))
    return outcomes


@pytest.fixture(scope="module")
def runs(options, tiny, tmp_path_factory):
    """(the folder of the runs, name -> how each of its trainings ended)."""
    folder = tmp_path_factory.mktemp("runs")
    each_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    common = {"zero": "2", "lr_scheduler_type": "constant", "max_steps": 3, "logging_steps": 1, "seq_len": 32}
    common |= {"eval_data": str(tiny / "held_out.jsonl"), "save_total_limit": 9}
    best = common | each_step | BEST_IS_FIRST
    epochs = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_steps": 1, "eval_steps": 1, "max_steps": 8}
    patience = {"early_stopping_patience": 1, "early_stopping_threshold": 99.0, "max_steps": 8}
    cases = {
        "killed": best | {"save_total_limit": 1},
        "early": common | each_step | patience,
        "stopped": best | {"save_strategy": "best", "save_total_limit": 1, "max_steps": 8},
        "mid-epoch": common | epochs,
    }
    cases = {name: options(folder / name, **words) for name, words in cases.items()}
    (outcomes,) = on_ranks(1, _all, cases, log=folder / "log")
    return folder, outcomes


def results_of(run: Path) -> dict:
    return read_json(run / "run.json")["results"]


def names(run: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints(run)]


def test_a_run_without_its_final_model_writes_it_on_resume_and_takes_no_step_more(runs):
    folder, outcomes = runs
    assert outcomes["killed"][1:] == ["done", "nothing left"], outcomes
    assert results_of(folder / "killed")["steps"] == 3
    assert outcomes["early"][1] == "done" and results_of(folder / "early")["steps"] == 2, "at the end of its patience"
    assert names(folder / "early") == ["checkpoint-1", "checkpoint-2"]


def test_the_newest_checkpoint_and_the_best_stay_whatever_the_limit(runs):
    folder, outcomes = runs
    assert names(folder / "killed") == ["checkpoint-1", "checkpoint-3"]
    assert names(folder / "stopped") == ["checkpoint-1", "checkpoint-2"], "a stop saves, with save_strategy best too"
    stopped = f"asked to stop (Ctrl-C or a signal) after step 2: {folder}/stopped/checkpoint-2 is saved"
    assert outcomes["stopped"][0].startswith(f"Requeue: {stopped}")


def test_a_lost_final_model_is_exported_from_the_last_checkpoint(runs):
    folder, outcomes = runs
    run = folder / "early"
    assert outcomes["early"][0].endswith(f"dsft export {run}/checkpoint-2 {run}/final"), outcomes


def test_a_stop_in_an_epoch_does_not_end_the_epoch(runs):
    """Its end would evaluate, which early stopping counts, and save once more."""
    folder, outcomes = runs
    assert outcomes["mid-epoch"][0].startswith("Requeue"), outcomes
    log = results_of(folder / "mid-epoch")["log"]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [3, 4], "of the resume alone"


def test_a_resume_may_begin_early_stopping(runs):
    folder, outcomes = runs
    assert outcomes["mid-epoch"][1] == "done", outcomes
    assert results_of(folder / "mid-epoch")["steps"] == 4 and "checkpoint-4" in names(folder / "mid-epoch")
