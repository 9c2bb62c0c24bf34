"""A training that compiles: its losses, its phase and its limit. Dynamo alone compiles here, to be quick."""

import pytest
import torch
from conftest import read_json
from ranks import on_ranks, train

from dsft.job import beat as client

pytestmark = pytest.mark.launch


def phases_of(cases: list[dict]) -> list[list[str]]:
    """The phases that the watchdog hears of, of each training."""
    heard = []
    for options in cases:
        torch.compiler.reset()
        phases = []
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(client, "set_phase", phases.append)
            train(options)
        heard.append(phases)
    return heard


def test_a_compiled_training_has_the_losses_of_an_eager_one_and_its_first_step_is_a_phase(options, tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "tiled_loss": False, "compile_timeout": 600.0}
    changes = {"eager": {}, "compiled": compiled}
    cases = [options(tmp_path / name, max_steps=4, logging_steps=1, zero="2", **changes[name]) for name in changes]
    eager, first = on_ranks(2, phases_of, cases)[0]
    assert "compiling" not in eager and first[first.index("compiling") + 1] == "training"
    runs = [read_json(tmp_path / name / "run.json") for name in changes]
    losses = [[entry["loss"] for entry in run["results"]["log"] if "loss" in entry] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    decided = {each["name"]: each["value"] for each in runs[1]["decisions"]}
    assert decided["step_timeout"] == 900.0
