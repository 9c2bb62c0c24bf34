"""`dsft plan --machine`: a plan for a machine that was measured elsewhere."""

import dataclasses
import json
import re

import pytest

from dsft.cli.commands import PlanOptions
from dsft.cli.main import main
from dsft.cli.plan import read_machine, read_machines
from dsft.cli.plan_answers import describe_machine
from dsft.errors import UserError
from dsft.planner.calibration import gpus_key, keep, ranks_key, speeds_for
from dsft.planner.step_time import speeds_of
from dsft.run_setup.resolve import auto_dtype
from dsft.runtime.hardware import Machine
from dsft.units import GB, GiB

H100 = Machine(nodes=1, ranks_per_node=2, device_bytes=79 * GiB, host_bytes=500 * GiB, has_gpu=True, measured=True)


@pytest.mark.parametrize("card", ["NVIDIA H100 80GB", "a card in no table"])
def test_a_plan_elsewhere_counts_on_what_the_json_says(tmp_path, monkeypatch, card):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = dataclasses.replace(H100, gpu_type=card)
    keep("ranks", ranks_key(here, "bfloat16"), {"flops": 3e14, "link_bytes": 2e11})
    keep("outside", gpus_key(here), {"context_bytes": 100, "communicators_bytes": [10, 20, 30]})
    path = tmp_path / "machine.json"
    named = dataclasses.replace(here, host_names=("a", "b"), nvme_path="/data")
    path.write_text(json.dumps({"machine": describe_machine(named, dtype="bfloat16")}))
    assert not {"a", "b", "/data"} & {*re.findall(r'"([^"]*)"', path.read_text())}, "hosts and folders stay here"
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


@pytest.mark.parametrize(("bits", "dtype"), [(16, "bfloat16"), (32, "float32")])
def test_a_card_in_no_table_computes_elsewhere_in_what_was_measured(bits, dtype):
    """By its memory alone it would be a V100, which has no bfloat16."""
    carried = {"bits": bits, "ranks": {"flops": 1e14, "date": "2026-01-01"}, "outside": None}
    there = dataclasses.replace(H100, gpu_type="NVIDIA GeForce RTX 4080", device_bytes=16 * GiB, measured=False)
    assert auto_dtype(dataclasses.replace(there, carried=carried)) == dtype
    assert auto_dtype(dataclasses.replace(there, gpu_type="NVIDIA V100-SXM2-16GB", carried=carried)) == "float32"


@pytest.mark.parametrize(
    ("hardware", "named"),
    [
        ({"gpus": "72xH100", "nodes": "1"}, ""),
        ({"gpus": "73xH100"}, "no node has more than 72 GPUs; use --nodes"),
        ({"gpus": "8xH100", "nodes": "12500"}, ""),
        ({"gpus": "8xH100", "nodes": "1,12501"}, "100,008 GPUs: the largest clusters have 100,000"),
        ({"gpus": "8xH100", "nodes": "0"}, "--nodes 0: write a number of at least 1"),
        ({"gpus": "8xH100", "nodes": "1,,2"}, "--nodes 1,,2: write a number"),
        ({"gpus": "8xH100", "gpu_type": "A100-40GB"}, "both name the card; keep one"),
        ({"gpus": "4x80GB", "gpu_type": "H100"}, ""),
        ({"gpus": "4xH100", "hostfile": "hosts"}, "hosts has at most 8 per node; make them the same"),
        ({"gpus": "8xH100", "hostfile": "hosts", "nodes": "2"}, "--hostfile hosts has 2; keep one"),
        ({"gpus": "8xH100", "hostfile": "hosts"}, ""),
    ],
    ids=str,
)
def test_impossible_hardware_is_refused_and_its_neighbour_is_taken(tmp_path, monkeypatch, hardware, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    if named:
        with pytest.raises(UserError, match=re.escape(named)):
            read_machines(PlanOptions(**hardware))
        return
    machines = read_machines(PlanOptions(**hardware))
    number = 2 if "hostfile" in hardware else int(hardware.get("nodes", 1))
    assert [machine.nodes for machine in machines] == [number]
    assert machines[0].host_names == (("a", "b") if "hostfile" in hardware else ())


def test_a_host_file_of_uneven_nodes_is_planned_with_as_many_ranks_as_it_starts(tmp_path):
    """As the doctor plans it, and the ranks of the training do."""
    (tmp_path / "hosts").write_text("a slots=4\nb slots=2\n")
    (machine,) = read_machines(PlanOptions(gpu_type="H100", hostfile=str(tmp_path / "hosts")))
    assert (machine.nodes, machine.ranks_per_node, machine.world_size) == (2, 4, 6)


@pytest.mark.parametrize("card", ["H100", "A100-40GB", "L4"])
def test_a_card_by_its_name_and_by_its_memory_is_one_machine(card):
    by_name, by_type = (read_machines(PlanOptions(**each)) for each in ({"gpus": f"4x{card}"}, {"gpu_type": card}))
    size = f"{by_name[0].device_bytes // 10**6}MB"
    (by_size,) = read_machines(PlanOptions(gpus=f"4x{size}", gpu_type=card))
    assert dataclasses.replace(by_type[0], ranks_per_node=4) == by_name[0] == by_size
    (small,) = read_machines(PlanOptions(gpus="4x10GB", gpu_type=card))
    assert small == dataclasses.replace(by_size, device_bytes=10 * GB), "a part of a card has the part's memory"


def test_options_about_a_machine_change_what_they_name_alone(tmp_path):
    (plain,) = read_machines(PlanOptions(gpus="8xH100"))
    changes = {
        "host_memory": ("768GB", {"host_bytes": 768 * GB}),
        "nvme": ("4TB", {"nvme_bytes": 4000 * GB}),
        "interconnect": ("ib400+nvlink", {"interconnect": "nvlink+ib400"}),  # within the node first
    }
    for name, (word, changed) in changes.items():
        assert read_machines(PlanOptions(gpus="8xH100", **{name: word})) == [dataclasses.replace(plain, **changed)]
    (here,) = read_machines(PlanOptions(gpus="8xH100", nvme=str(tmp_path)))
    assert here.nvme_path == str(tmp_path) and here.nvme_bytes > 0
    several = read_machines(PlanOptions(gpus="8xH100", nodes="1,2,8"))
    assert several == [dataclasses.replace(plain, nodes=number) for number in (1, 2, 8)]


@pytest.mark.exhaustive
def test_this_machine_is_measured_here_and_planned_for_elsewhere(run, tiny, tmp_path):
    words = ["dsft", "plan", "--model", tiny / "model", "--seq_len", "128"]
    here = run([*words, "--calibrate", "--json"], XDG_CACHE_HOME=str(tmp_path / "cache"))
    (tmp_path / "machine.json").write_text(here.stdout)
    there = run([*words, "--machine", tmp_path / "machine.json"], XDG_CACHE_HOME=str(tmp_path / "there"))
    assert "speeds: measured there on" in there.stdout


def test_more_ranks_to_a_sequence_than_there_are_is_one_line(capsys):
    words = ["--gpus", "1xH100", "--sequence_parallel", "2", "--tokens_per_step", "8192"]
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--model", "Qwen/Qwen2.5-0.5B", *words])
    assert caught.value.code == 2 and "sequence_parallel=2: must divide" in capsys.readouterr().err
