"""`dsft plan --machine`: a plan for a machine that was measured elsewhere."""

import dataclasses
import json

import pytest

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machine, read_machines
from dsft.cli.plan_answers import describe_machine
from dsft.errors import UserError
from dsft.planner.calibration import gpus_key, keep, ranks_key, speeds_for
from dsft.planner.step_time import speeds_of
from dsft.runtime.hardware import Machine
from dsft.units import GiB

H100 = Machine(nodes=1, ranks_per_node=2, device_bytes=79 * GiB, host_bytes=500 * GiB, has_gpu=True, measured=True)


@pytest.mark.parametrize("card", ["NVIDIA H100 80GB", "a card in no table"])
def test_a_plan_elsewhere_counts_on_what_the_json_says(tmp_path, monkeypatch, card):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = dataclasses.replace(H100, gpu_type=card)
    keep("ranks", ranks_key(here, "bfloat16"), {"flops": 3e14, "link_bytes": 2e11})
    keep("outside", gpus_key(here), {"context_bytes": 100, "communicators_bytes": [10, 20, 30]})
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": describe_machine(here, dtype="bfloat16")}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine's cache"))
    machine = read_machine(path)
    assert dataclasses.replace(machine, carried={}) == dataclasses.replace(here, measured=False)
    assumed = speeds_of(machine, dtype="bfloat16")
    speeds = speeds_for(machine, dtype="bfloat16")
    assert (speeds.flops, speeds.link_bytes, speeds.nvme_bytes) == (3e14, 2e11, assumed.nvme_bytes)
    assert speeds.has_time_estimate and "measured there on" in speeds.source
    assert speeds.outside.measured and speeds.outside.total_bytes(2) == 120
    assert speeds_for(machine, dtype="float32").flops == speeds_of(machine, dtype="float32").flops
    with pytest.raises(UserError, match="--gpus 8xH100: --machine"):
        read_machines(PlanOptions(machine=str(path), gpus="8xH100"))
    (two,) = read_machines(PlanOptions(machine=str(path), nodes="2"))
    assert two == dataclasses.replace(machine, nodes=2)


def test_a_json_without_measured_rates_and_a_missing_one_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "machine.json"
    with pytest.raises(UserError, match=r"machine\.json: No such file"):
        read_machine(path)
    on_paper = dataclasses.replace(H100, measured=False)
    contents = (
        {},
        [],
        {"machine": {"carried": {}}},
        *({"machine": describe_machine(m, dtype="bfloat16")} for m in (H100, on_paper)),
    )
    for content in contents:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match="no measured rates in it; write it with"):
            read_machine(path)


@pytest.mark.exhaustive
def test_this_machine_is_measured_here_and_planned_for_elsewhere(run, tiny, tmp_path):
    words = ["dsft", "plan", "--model", tiny / "model", "--seq_len", "128"]
    here = run([*words, "--calibrate", "--json"], XDG_CACHE_HOME=str(tmp_path / "cache"))
    (tmp_path / "machine.json").write_text(here.stdout)
    there = run([*words, "--machine", tmp_path / "machine.json"], XDG_CACHE_HOME=str(tmp_path / "there"))
    assert "speeds: measured there on" in there.stdout
