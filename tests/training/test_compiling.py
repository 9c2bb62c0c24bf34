"""A training that compiles: its phase, its limit, and speeds without it. Dynamo alone compiles here, to be quick."""

import json

import pytest
import torch
from conftest import read_json
from ranks import on_ranks, train

from dsft.job import beat
from dsft.runtime import distributed
from dsft.training import callbacks, metrics

pytestmark = pytest.mark.launch


NEXT = "the next training begins"


def trainings_with_phases(cases: list[dict]) -> list[tuple[list[str], list[float]]]:
    """Of each the phases that the watchdog hears of, and the seconds that are left out of speeds."""
    heard = []
    for options in cases:
        torch.compiler.reset()  # or the third finds what the second has compiled
        if distributed.rank() == 0:
            print(NEXT, flush=True)
        with pytest.MonkeyPatch.context() as patches:
            heard.append(training_with_phases(options, patches))
    return heard


def training_with_phases(options: dict, patches: pytest.MonkeyPatch) -> tuple[list[str], list[float]]:
    phases, left_out = [], []
    set_phase, leave_out = beat.set_phase, metrics.Work.leave_out

    def noting(phase: str) -> None:
        phases.append(phase)
        set_phase(phase)

    def leaving(work, seconds: float) -> None:
        left_out.append(seconds)
        leave_out(work, seconds)

    patches.setattr(beat, "set_phase", noting)
    patches.setattr(metrics.Work, "leave_out", leaving)
    patches.setattr(callbacks, "AGAIN_SECONDS", 0.05)
    train(options)
    return phases, left_out


@pytest.fixture(scope="module")
def runs(options, tmp_path_factory):
    """Name -> (losses, [phases, seconds] of each rank, screen). All on the same ranks, which import Dynamo once."""
    folder = tmp_path_factory.mktemp("compiled")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "tiled_loss": False}
    changes = {"eager": {}, "compiled": compiled, "beyond": compiled | {"compile_timeout": 0.01}}
    cases = [options(folder / name, max_steps=4, logging_steps=1, zero="2", **changes[name]) for name in changes]
    heard = on_ranks(2, trainings_with_phases, cases, log=folder / "log")
    screens = (folder / "log").read_text().split(NEXT)[1:]
    runs_by_name = {}
    for name, heard_by_ranks, screen in zip(changes, zip(*heard, strict=True), screens, strict=True):
        log = read_json(folder / name / "run.json")["results"]["log"]
        losses = [entry["loss"] for entry in log if "loss" in entry]
        runs_by_name[name] = losses, heard_by_ranks, screen
    return runs_by_name


@pytest.mark.parametrize("name", ["compiled", "beyond"])
def test_a_compiled_training_has_the_losses_of_an_eager_one(runs, name):
    assert runs[name][0] == pytest.approx(runs["eager"][0], rel=1e-5)


def test_compiling_is_a_phase_of_its_own_and_outside_of_speeds(runs):
    for phases, left_out in runs["compiled"][1]:
        assert phases[phases.index("compiling") + 1] == "training" and min(left_out) > 0
    assert all("compiling" not in phases for phases, _ in runs["eager"][1])


def test_beyond_the_limit_a_training_goes_on_eagerly(runs):
    assert runs["beyond"][2].count("longer than compile_timeout=0.01 s: the training goes on without it") == 1
    assert "compile_timeout" not in runs["compiled"][2]


def test_a_step_of_a_training_that_compiles_may_take_as_much_longer(runs, tmp_path_factory):
    folder = next(tmp_path_factory.getbasetemp().glob("compiled*")) / "beyond"
    decisions = {each["name"]: each["value"] for each in json.loads((folder / "run.json").read_text())["decisions"]}
    assert decisions["step_timeout"] == pytest.approx(300.01)
