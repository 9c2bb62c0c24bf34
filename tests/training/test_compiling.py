"""A training that compiles: its phase, its limit, and speeds without it. Dynamo alone compiles here, to be quick."""

import json

import pytest
from conftest import read_json
from ranks import on_ranks, train

from dsft.training import callbacks, metrics
from dsft.watchdog import client

pytestmark = pytest.mark.launch


def training_with_phases(options: dict) -> tuple[list[str], list[float]]:
    """The phases that the watchdog hears of, and the seconds that are left out of speeds."""
    phases, left_out = [], []
    set_phase, leave_out = client.set_phase, metrics.Work.leave_out

    def noting(phase: str) -> None:
        phases.append(phase)
        set_phase(phase)

    def leaving(work, seconds: float) -> None:
        left_out.append(seconds)
        leave_out(work, seconds)

    client.set_phase, metrics.Work.leave_out = noting, leaving
    callbacks.AGAIN_SECONDS = 0.05
    train(options)
    return phases, left_out


@pytest.fixture(scope="module")
def runs(options, tmp_path_factory):
    """Name -> (losses, [phases, seconds] of each rank, screen)."""
    folder = tmp_path_factory.mktemp("compiled")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "tiled_loss": False}
    runs_by_name = {}
    for name, changes in (
        ("eager", {}),
        ("compiled", compiled),
        ("beyond", compiled | {"compile_timeout": 0.01}),
    ):
        case = options(folder / name, max_steps=4, logging_steps=1, zero="2", **changes)
        heard = on_ranks(2, training_with_phases, case, log=folder / f"{name}.log")
        log = read_json(folder / name / "run.json")["results"]["log"]
        losses = [entry["loss"] for entry in log if "loss" in entry]
        runs_by_name[name] = losses, heard, (folder / f"{name}.log").read_text()
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
