"""The doctor's checks: every finding can fire and can stay silent, from facts alone; and one real examination of this
machine.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT, flags
from ranks import on_ranks, run_entry
from safetensors.torch import load_file, save_file

from dsft.checkpoints.manifest import TRAINER_STATE
from dsft.cli import doctor
from dsft.cli.commands import DoctorOptions
from dsft.cli.doctor import COLUMNS
from dsft.doctor import phases
from dsft.doctor.examine import Report, examine, machine_of, plan_on
from dsft.doctor.findings import (
    MESSAGES,
    Finding,
    RunFiles,
    check_clocks,
    check_disk,
    check_files,
    check_interfaces,
    check_master,
    check_names,
    check_network,
    check_node,
    check_patches,
    check_versions,
    differences,
    finding,
    read_run_files,
)
from dsft.doctor.links import Measured, check_answers, check_assumed, check_measured
from dsft.doctor.phases import Connection, FileContent, NodeFacts, Reached, parse_gpus, reach, typed
from dsft.errors import UserError
from dsft.planner.calibration import keep, links_key, speeds_file, speeds_for
from dsft.planner.step_time import GPUS, speeds_of
from dsft.runtime import distributed
from dsft.runtime.hardware import Machine, cpu_count
from dsft.runtime.launcher_env import Node, read_hosts, ssh_problem
from dsft.runtime.patches import PATCHES, Patch
from dsft.units import GiB

SMI = "0, NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06, 0\n1, NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06, [N/A]\n"


def node(name: str, **changes) -> NodeFacts:
    """Facts of a healthy node of two GPUs; keyword arguments replace facts, "a__b" those inside "a"."""
    number = int(name[1:])
    facts = {
        "host": name,
        "python_path": "/env/bin/python",
        "code_folder": "/checkout",
        "slots": 2,
        "open_port": 40000,
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "NCCL": "2.28",
            "GPU driver": "580.65.06",
            "GPU type": "H100",
            "dsft commit": "abc",
            "dsft code": "123",
        },
        "gpus": smi(),
        "torch_cuda": "13.0",
        "cpu_only": False,
        "visible_gpus": None,
        "cores": 16,
        "host_bytes": 100 * GiB,
        "available_bytes": 90 * GiB,
        "shm_bytes": 50 * GiB,
        "open_files": 65536,
        "locked_bytes": None,
        "disks": {"/cache": 900 * GiB, "runs/first": 900 * GiB},
        "caches": {"hub": "/cache"},
        "hub_offline": False,
        "clock_synchronized": True,
        "tools": {
            "c++": "/usr/bin/c++",
            "ninja": "/usr/bin/ninja",
            "Python.h": "/usr/include/Python.h",
            "libaio": "",
            "libaio.h": "",
            "nvcc": "/usr/local/cuda/bin/nvcc",
        },
        "network": {
            "addresses": [f"10.0.0.{number}"],
            "interfaces": {
                "lo": {"addresses": ["127.0.0.1"], "mtu": 65536, "mbit": 0},
                "eth0": {"addresses": [f"10.0.0.{number}"], "mtu": 9000, "mbit": 100000},
            },
            "own_name": [f"10.0.0.{number}"],
            "infiniband": ["mlx5_0"],
            "variables": {},
        },
    }
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = facts
        for key in outer:
            place = place[key]
        place[last] = value
    return typed(NodeFacts, json.loads(json.dumps(facts)))  # as it travels


def smi(old: str = "", new: str = "") -> dict:
    """What nvidia-smi says of the two GPUs, with a change, as it travels."""
    return dataclasses.asdict(parse_gpus(SMI.replace(old, new, 1)))


def nodes(**changes) -> dict[str, NodeFacts]:
    """Three nodes; the last with `changes`."""
    return {"n1": node("n1"), "n2": node("n2"), "n3": node("n3", **changes)}


def reached(**changes) -> dict[str, Reached]:
    """What n2 and n3 say of n1. Keyword arguments replace n3's answers: `master`, `open` and `name` are the host that
    answered there, or "!" and an error.
    """

    def answers(changes: dict) -> Reached:
        connections = []
        for kind in ("master", "open", "name"):
            host, _, error = changes.get(kind, "n1").partition("!")
            target = {"kind": kind, "name": "n1", "address": "10.0.0.1", "port": 29500}
            connections.append(Connection(**target, host=host, error=error, seconds=1e-5))
        return Reached(
            connections=connections,
            names={"n1": changes.get("resolved", ["10.0.0.1"])},
            outgoing="10.0.0.9",
            contents=dict.fromkeys(RUN.data),
            cached={"org/set": changes.get("cached", True)},
            config=changes.get("config", {"learning_rate": "0.1"}),
            sees_probe=changes.get("sees_probe", True),
        )

    return {"n2": answers({}), "n3": answers(changes)}


def measured(**changes) -> Measured:
    """Of three nodes of two ranks, all alike."""
    healthy = Measured(
        pairs={pair: {"bytes_per_second": 40e9, "seconds": 2e-5} for pair in ((0, 1), (0, 2), (1, 2))},
        inside=dict.fromkeys(range(3), 300e9),
        flops=dict.fromkeys(range(6), 6e14),
        collective_seconds=5e-5,
    )
    for name, value in changes.items():
        setattr(healthy, name, getattr(healthy, name) | value if isinstance(value, dict) else value)
    return healthy


NAMES, USED = ["n1", "n2", "n3"], {"n1": "eth0", "n2": "eth0", "n3": "eth0"}
WHERE = {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n3", 5: "n3"}
TWO = {0: "a", 1: "b"}
GPU_SPEEDS = SimpleNamespace(network_bytes=40e9, all_reduce_bytes=300e9, overlaps=True, source="data sheet")
SLOW = {"bytes_per_second": 4e9, "seconds": 1e-3}
RUN = RunFiles(data=["org/set"], output_dir="runs/first", config="run.yaml")
HERE, OTHER = FileContent(files=1, bytes=10, hash="a"), FileContent(files=1, bytes=10, hash="b")


def look(facts: NodeFacts, **options) -> list[Finding]:
    return list(check_node("n3", facts, **{"quick": False} | options))


def links(values: Measured) -> list[Finding]:
    return list(check_measured(values, WHERE, nodes(), USED))


def contents(files: RunFiles, first: FileContent | None, last: FileContent | None) -> list[Finding]:
    """Of the one source of a run, as n1 and n3 see it."""
    [source] = files.data + files.models
    seen = {
        name: dataclasses.replace(reached()["n3"], contents={source: content}, sees_probe=None)
        for name, content in {"n1": first, "n3": last}.items()
    }
    return list(check_files(files, "n1", nodes(), seen))


def configurations(files: RunFiles, **values: dict[str, str] | None) -> list[Finding]:
    """Of a run that has only a configuration file, with these values on the nodes."""
    seen = {name: dataclasses.replace(reached()["n3"], config=config) for name, config in values.items()}
    return list(check_files(files, "n1", nodes(), seen))


def broken_off(node: str, text: str, exit_code: int | None, *, banner: str = "") -> Finding:
    """Why a command over ssh broke off, as the doctor reports it; `banner` is what the node's port 22 says."""
    server, client = socket.socketpair()
    server.sendall(banner.encode())
    server.close()
    with mock.patch.object(socket, "create_connection", lambda *_, **__: client):
        why = ssh_problem(node, text, exit_code)
    return finding(why.code, why.node, why.message, why.fix)


def patched(if_changed: str) -> Patch:
    """A patch of other code than is installed."""
    target = "deepspeed.runtime.engine:DeepSpeedEngine.backward"
    return Patch(target=target, why="it is slow", seen={"0.1.0": "0"}, if_changed=if_changed)


CASES = {
    "unknown-host": lambda: [broken_off("n3", "ssh: Could not resolve hostname n3: Name or service not known", 255)],
    "host-unreachable": lambda: [broken_off("n3", "ssh: connect to host n3 port 22: No route to host", 255)],
    "mtu-path": lambda: [
        broken_off("n3", "Connection to 10.0.0.4 port 22 timed out", 255, banner="SSH-2.0-OpenSSH_9.2")
    ],
    "ssh-refused": lambda: [broken_off("n3", "ssh: connect to host n3 port 22: Connection refused", 255)],
    "ssh-password": lambda: [broken_off("n3", "root@n3: Permission denied (publickey,password).", 255)],
    "ssh-host-key": lambda: [
        broken_off("n3", "No ED25519 host key is known for n3\nHost key verification failed.", 255)
    ],
    "ssh-failed": lambda: [broken_off("n3", "kex_exchange_identification: read: Connection reset by peer", 255)],
    "no-folder": lambda: [broken_off("n3", "bash: line 1: cd: /work: No such file or directory", 1)],
    "no-python": lambda: [
        broken_off("n3", f"bash: line 1: {sys.executable}: No such file or directory", 127),
        broken_off("n3", f"env: {sys.executable}: No such file or directory", 1),
        broken_off("n3", "sh: 1: exec: not found", 127),
    ],
    "no-dsft": lambda: [
        broken_off(
            "n3",
            f"{sys.executable}: Error while finding module specification for 'dsft.doctor.phases'"
            " (ModuleNotFoundError: No module named 'dsft')",
            1,
        )
    ],
    "package-missing": lambda: [
        broken_off("n3", "ModuleNotFoundError: No module named 'psutil'", 1),
        *look(node("n3", versions__peft="missing")),
    ],
    "node-silent": lambda: [broken_off("n3", "no answer to 'facts' in time", None)],
    "gpu-driver": lambda: look(
        node(
            "n3", gpus={"error": "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch", "cards": []}
        )
    ),
    "torch-without-cuda": lambda: look(node("n3", torch_cuda="")),
    "driver-too-old": lambda: look(node("n3", gpus__driver="535.1")),
    "slots": lambda: look(node("n3", slots=3)) + look(node("n3", slots=17, cpu_only=True)),
    "idle-gpus": lambda: look(node("n3", slots=1)),
    "gpu-busy": lambda: look(node("n3", gpus=smi("81559, 4,", "81559, 40000,"))),
    "gpu-errors": lambda: look(node("n3", gpus=smi("06, 0", "06, 3"))),
    "memory-low": lambda: look(node("n3", available_bytes=9 * GiB)),
    "shared-memory": lambda: look(node("n3", shm_bytes=64 * 2**20)),
    "open-files": lambda: look(node("n3", open_files=1024)),
    "locked-memory": lambda: look(node("n3", locked_bytes=65536)),
    "compiler": lambda: look(node("n3", **{"tools__c++": ""})) + look(node("n3", compile_error="fatal error: omp.h")),
    "nvcc": lambda: look(node("n3", tools__nvcc="")),
    "libaio": lambda: look(node("n3"), nvme=True),
    "cache-disk": lambda: look(node("n3", disks={"/cache": GiB})),
    "patch-refused": lambda: check_patches("n3", [patched("refuse")]),
    "patch-changed": lambda: check_patches("n3", [patched("skip"), patched("keep")]),
    "hub-offline": lambda: check_files(RUN, "n1", nodes(hub_offline=True), reached(cached=False)),
    "hub-download": lambda: check_files(
        RUN, "n1", nodes() | {"n2": node("n2", hub_offline=True)}, reached(cached=False)
    ),
    "versions": lambda: check_versions(nodes(versions__torch="2.12.0")),
    "driver-versions": lambda: check_versions(nodes(**{"versions__GPU driver": "570.1"})),
    "code": lambda: check_versions(nodes(**{"versions__dsft code": "999"})),
    "clocks": lambda: check_clocks({"n1": 0.1, "n2": 0.2, "n3": -2.1}),
    "own-name": lambda: check_names(nodes(network__own_name=["127.0.1.1"]), {}),
    "name-unresolved": lambda: check_names(nodes(), reached(resolved=[])),
    "master-port-busy": lambda: check_master(
        "n1", "10.0.0.1", 29500, "in use by process 7 (python)", {}, port_asked=True
    ),
    "default-port-busy": lambda: check_master(
        "n1", "10.0.0.1", 29500, "in use by process 7 (python)", {}, port_asked=False
    ),
    "port-blocked": lambda: check_master("n1", "10.0.0.1", 29500, "", reached(master="!timeout"), port_asked=True),
    "master-address": lambda: check_master(
        "n1", "172.17.0.1", 29500, "", reached(master="!timeout", open="!timeout"), port_asked=True
    ),
    "network-blocked": lambda: check_network(nodes(), reached(open="!refused")),
    "wrong-machine": lambda: check_network(nodes(), reached(open="n7")),
    "mtu": lambda: check_interfaces(nodes(network__interfaces__eth0__mtu=1500), USED),
    "interface": lambda: check_interfaces(nodes(network__variables={"NCCL_SOCKET_IFNAME": "=ens5"}), USED),
    "interface-speed": lambda: check_interfaces(nodes(network__interfaces__eth0__mbit=1000), USED),
    "infiniband": lambda: check_interfaces(nodes(network__infiniband=[]), USED),
    "config-differs": lambda: [
        *check_files(RUN, "n1", nodes(), reached(config={"learning_rate": "0.2"})),
        *check_files(RUN, "n1", nodes(), reached(config=None)),
    ],
    "data-missing": lambda: contents(RunFiles(data=["/d/{t}.jsonl"]), HERE, None),
    "data-differs": lambda: contents(RunFiles(data=["/d/t.jsonl"]), HERE, OTHER),
    "model-missing": lambda: contents(RunFiles(models=["/models/m"]), None, None),
    "model-differs": lambda: contents(RunFiles(models=["/models/m"]), HERE, OTHER),
    "output-not-writable": lambda: check_files(RUN, "n1", nodes(output_error="Permission denied"), {}),
    "output-not-shared": lambda: check_files(RUN, "n1", nodes(), reached(sees_probe=False)),
    "disk": lambda: [
        *check_files(RUN, "n1", nodes(output_error="No space left on device"), {}),
        *check_disk(RUN, {"n3": node("n3")}, 1000 * GiB),
        *check_disk(RUN, {"n3": node("n3", disks={"runs/first": 2**20})}, None),
    ],
    "wrong-sum": lambda: links(measured(wrong=[4])),
    "packet-loss": lambda: links(measured(lost={0: 0.001, 2: 0.05})),
    "slow-link": lambda: links(
        measured(
            pairs={
                (0, 3): measured().pairs[0, 1],
                (1, 3): measured().pairs[0, 1],
                (2, 3): measured().pairs[0, 1],
                (1, 2): SLOW,
            },
            slow={(1, 2)},
        )
    ),
    "slow-node": lambda: links(measured(pairs={(0, 2): SLOW, (1, 2): SLOW}, slow={(0, 2)})),
    "slow-inside": lambda: links(measured(inside={2: 20e9})),
    "slow-rank": lambda: links(measured(flops={5: 3e14})),
    "below-assumed": lambda: check_assumed(measured(pairs={(1, 2): SLOW}), NAMES, GPU_SPEEDS),
    "smoke-failed": lambda: check_answers(
        dict.fromkeys(range(6), "joining the others"),
        [(5, "RuntimeError: NCCL"), *((rank, "timed out") for rank in range(5))],
        WHERE,
        {},
    ),
    "smoke-silent": lambda: check_answers(
        dict.fromkeys(range(5), "joining the others"), [(rank, "timed out") for rank in range(5)], WHERE, {}
    ),
}
MADE_ELSEWHERE = {"node-failed", "missing-ranks", "configuration", "plan", "plan-unknown", "smoke-skipped"}
"""By the code that talks to nodes, ranks and planner: below, and on real hosts in cluster/test_doctor.py."""


PLACES = {"master-port-busy": "n1", "default-port-busy": "n1", "slow-link": "n2"}
"""Code -> the place it names; else n3."""


def test_the_command_that_copies_the_code_names_its_checkout_wherever_the_doctor_is_started(tmp_path, monkeypatch):
    """With --delete, another folder would be emptied."""
    monkeypatch.chdir(tmp_path)
    assert f"rsync -a {ROOT}/ n3:{ROOT}/" in broken_off("n3", "No module named 'dsft'", 1).fix
    facts = nodes(**{"versions__dsft code": "999"})
    [code] = check_versions(
        facts | {"n1": dataclasses.replace(facts["n1"], code_folder=phases.facts(ExitStack()).code_folder)}
    )
    assert f"rsync -a --delete {ROOT}/ n3:{ROOT}/" in code.fix


@pytest.mark.parametrize("code", CASES)
def test_every_finding_fires_alone_and_names_the_place(code):
    findings = list(CASES[code]())
    assert {entry.code for entry in findings} == {code}
    for entry in findings:
        assert PLACES.get(code, "n3") in entry.where
        assert entry.message and entry.why == MESSAGES[code][1] and entry.fix


def test_a_slow_rank_is_left_out_by_the_number_of_its_gpu():
    """Not by its place among the node's ranks, where a filter chose others than the first GPUs."""
    facts = nodes() | {"n2": node("n2", slots=1, devices=[1])}
    where = {0: "n1", 1: "n1", 2: "n2", 3: "n3", 4: "n3"}
    slow = measured(flops={2: 3e14})
    [entry] = check_measured(slow, where, facts, USED)
    assert entry.where == "rank 2 on n2"
    assert "nvidia-smi -q -i 1 " in entry.fix and entry.fix.endswith("--exclude n2:1")


def test_a_gpu_that_the_run_leaves_out_may_be_busy():
    """Where two jobs share a node, plans had no more memory than the other job left on its GPU."""
    busy = {"slots": 1, "gpus": smi("81559, 4,", "81559, 80000,")}
    for devices, codes in (([1], ["idle-gpus"]), ([], ["gpu-busy", "idle-gpus"])):
        facts = node("n3", devices=devices, **busy)
        assert [entry.code for entry in look(facts)] == codes
        assert (machine_of({"n3": facts}).device_bytes > 79 * GiB) == bool(devices)


def test_tasks_of_srun_that_see_one_gpu_each_have_not_too_many_slots():
    alone = {"slots": 2, "ranks": [4, 5], "visible_gpus": "0"}
    assert look(node("n3", **alone)) == []
    for changes in ({"visible_gpus": None, "slots": 3}, {"ranks": []}):
        assert [entry.code for entry in look(node("n3", **alone | changes))] == ["slots"]


@pytest.mark.parametrize(
    ("variable", "value", "is_there"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "", True),  # as if it were not set
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "=eth0", False),
        ("GLOO_SOCKET_IFNAME", "lo,eth0", True),
        ("NCCL_IB_HCA", "mlx5", True),
    ],
)
def test_an_interface_is_there_as_its_library_reads_the_name(variable, value, is_there):
    codes = [entry.code for entry in check_interfaces(nodes(network__variables={variable: value}), USED)]
    assert codes == ([] if is_there else ["interface"])


def test_uneven_slots_are_planned_as_so_many_ranks():
    machine = machine_of({"n1": node("n1", slots=1), "n2": node("n2")})
    assert machine.world_size == 3 and "at most, 3 in all" in str(machine)
    assert machine_of({name: node(name) for name in ("n1", "n2")}).world_size == 4


def test_nodes_are_planned_with_the_network_that_their_ranks_would_read():
    """Else the doctor assumed the network of the GPU's data sheet, and planned otherwise than the training."""
    assert machine_of({"n1": node("n1", interconnect="nvlink+eth25")}).interconnect == "nvlink+eth25"


def test_nodes_are_planned_with_the_memory_that_programs_see():
    """nvidia-smi counts half a GiB of an H100 more, and the doctor found plans to fit that a training refuses."""
    assert machine_of({"n1": node("n1")}).device_bytes == GPUS["H100"].usable_bytes
    taken = machine_of({"n1": node("n1", gpus=smi("81559, 4,", "81559, 10000,"))}).device_bytes
    assert taken == (81559 - 10000) * 2**20


def test_of_two_clocks_none_is_blamed_without_a_reason():
    offsets = {"n1": 0.0, "n2": -100.0}
    [both] = check_clocks(offsets)
    assert both.where == "n1, n2" and "differ by 100 s" in both.message and "n1, n2" in both.fix
    [told] = check_clocks(offsets, not_synchronized=["n1"])
    assert "no time service keeps that of n1" in told.message and told.fix.startswith("on n1:")
    [odd] = check_clocks(offsets | {"n3": -100.0})
    assert odd.where == "n1" and "100 s ahead" in odd.message


def test_other_versions_are_replaced_by_a_command_that_works():
    [entry] = check_versions(nodes(versions__torch="2.13.0+cpu"))
    assert entry.fix.endswith("-m pip install -c constraints.txt -e .") and "torch==" not in entry.fix


def test_another_configuration_is_named_with_its_values_and_is_a_note_where_one_is_sent(tmp_path):
    (tmp_path / "run.yaml").write_text("# a comment\nlearning_rate: 0.10\nhub_token: secret\n")
    asked = {"targets": [], "names": [], "master": "127.0.0.1", "sources": [], "hub_names": [], "probe": ""}
    read = lambda name: reach(**asked, config=str(tmp_path / name)).config  # noqa: E731
    first = read("run.yaml")
    assert first == {"learning_rate": "0.1"} and read("no.yaml") is None
    files = RunFiles(config="run.yaml")
    [entry] = configurations(files, n1=first, n2={"learning_rate": "0.2"}, n3=None)
    assert entry.severity == "error" and entry.where == "n3, n2"
    assert entry.message == "run.yaml: it is not on n3; learning_rate is 0.1 on n1, 0.2 on n2"
    [entry] = configurations(dataclasses.replace(files, config_is_sent=True), n1=first, n2=None)
    assert entry.severity == "note"


@pytest.mark.parametrize("source", ["runs/model", "/models/m"])
def test_a_folder_is_copied_to_its_own_place(source):
    """`rsync -a runs/model n3:/here/runs/model` would make a runs/model/model there."""
    for findings in (contents(RunFiles(models=[source]), HERE, OTHER), contents(RunFiles(models=[source]), HERE, None)):
        assert f"rsync -aR --no-implied-dirs {Path(source).absolute()} n3:/;" in findings[0].fix


def test_no_finding_fires_on_healthy_nodes():
    facts = nodes()
    healthy = [entry for name, facts_of in facts.items() for entry in check_node(name, facts_of, quick=False)]
    healthy += [
        *check_patches("n1", PATCHES.values()),
        *check_versions(facts),
        *check_clocks({"n1": 0.0, "n2": 1.9}),
        *check_names(facts, reached()),
        *check_interfaces(facts, USED),
        *check_network(facts, reached()),
        *check_master("n1", "10.0.0.1", 29500, "", reached(), port_asked=True),
        *links(measured()),
        *check_assumed(measured(), NAMES, GPU_SPEEDS),
        *check_files(RUN, "n1", facts, reached()),
        *check_disk(RUN, facts, 10 * GiB),
        *contents(RunFiles(data=["/d"]), HERE, dataclasses.replace(HERE)),
        *check_answers(dict.fromkeys(range(6), "done"), [], WHERE, {}),
    ]
    assert healthy == []


def test_every_message_is_tested_and_explained_in_the_docs():
    assert CASES.keys() | MADE_ELSEWHERE == MESSAGES.keys()
    listed = re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", (ROOT / "docs/doctor.md").read_text(), re.MULTILINE)
    assert sorted(code for code, _ in listed) == sorted(MESSAGES)
    for code, severities in listed:
        fired = {entry.severity for entry in CASES[code]()} if code in CASES else set()
        seen = {severity[0].upper() for severity in {MESSAGES[code][0], *fired}}
        assert seen <= {*re.findall(r"\b[EWN]\b", severities)}, code


def test_a_name_on_the_hub_is_reported_once_for_all_its_splits():
    files, sources = RunFiles(data=["org/set:main:train", "org/set:main:test"]), {}
    for name, answer in reached(cached=False).items():
        sources[name] = dataclasses.replace(answer, contents=dict.fromkeys(files.data))
    [lacking] = check_files(files, "n1", nodes(), sources)
    assert (lacking.code, lacking.where) == ("hub-download", "n3")


def test_of_a_silent_rank_the_others_time_outs_are_not_reported():
    [silent] = check_answers({0: "joining the others"}, [(0, "timed out")], TWO, {})
    assert (silent.code, silent.where) == ("smoke-silent", "rank 1 on b") and "nothing" in silent.message
    last_words = {"b": "Traceback\nImportError: libcudart"}
    [failed] = check_answers({0: "joining the others"}, [(0, "timed out")], TWO, last_words)
    assert (failed.code, failed.where) == ("smoke-failed", "b") and "libcudart" in failed.message


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, [0, 1]),
        ({"cpu_only": True}, []),
        ({"torch_cuda": ""}, []),
        ({"visible_gpus": "1"}, [1]),
        ({"visible_gpus": ""}, []),
        ({"visible_gpus": "-1"}, []),
        ({"visible_gpus": "1, 0"}, [1, 0]),
        ({"visible_gpus": "0,-1,1"}, [0]),
        ({"visible_gpus": "GPU-8f1"}, [0]),
    ],
)
def test_gpus_that_ranks_would_use(changes, numbers):
    assert [gpu.index for gpu in node("n1", **changes).usable_gpus] == numbers


def test_same_files_under_unlike_git_states_are_the_same_code():
    facts = nodes(**{"versions__dsft commit": "abc+changes"})
    assert list(differences(facts)) == ["dsft commit"] and list(check_versions(facts)) == []


def test_a_link_or_node_is_named_only_where_it_stayed_slow_beside_the_fastest_pair():
    slow = {
        (0, 3): measured().pairs[0, 1],
        (1, 3): measured().pairs[0, 1],
        (2, 3): measured().pairs[0, 1],
        (1, 2): SLOW,
    }
    assert links(measured(pairs=slow, again={(1, 2)})) == []
    both = {(0, 2): SLOW, (1, 2): SLOW}
    assert links(measured(pairs=both, again={*both})) == []
    # One that was as fast as others when it was alone does not put the blame on its node.
    sound = {pair: measured().pairs[0, 1] for pair in ((0, 3), (1, 3))}
    [named] = links(measured(pairs=sound | both, again={*both}, slow={(1, 2)}))
    assert named.code == "slow-link"
    assert measured(pairs=slow, again={(0, 1)}).network_bytes == 40e9


def test_the_runs_files_are_read_from_yaml_and_flags(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\ndata: [a.jsonl, b.jsonl]\noutput_dir: runs/x\nzero: 3-nvme\n")
    files = read_run_files(
        ["--config", str(tmp_path / "run.yaml"), "--output_dir", "runs/y", "--save_strategy", "no", "--adapter", "l"]
    )
    expected = {"data": ["a.jsonl", "b.jsonl"], "models": ["m", "l"], "output_dir": "runs/y"}
    assert files == RunFiles(**expected, saves=False, nvme=True, config=str(tmp_path / "run.yaml"))
    assert read_run_files([]) == RunFiles()
    json_file = tmp_path / "zero.json"
    for device in ("cpu", "nvme"):
        json_file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}))
        assert read_run_files(["--zero", str(json_file)]).nvme == (device == "nvme")
    for given, saves in (("save_strategy: no", False), ("save_strategy: no\nsave_minutes: 5", True), ("", True)):
        (tmp_path / "run.yaml").write_text(given)
        assert read_run_files(["--config", str(tmp_path / "run.yaml")]).saves == saves, given
    # The run refuses an option that is given twice; what is looked at is one of them.
    assert read_run_files(["--output_dir", "a", "--output_dir", "b"]).output_dir == "a"
    assert read_run_files(["--config", "a", "--config", "b"]).config == "a"
    files, seen = RunFiles(output_dir=files.output_dir, saves=files.saves), {"n2": reached(sees_probe=False)["n3"]}
    assert next(check_files(files, "n1", {}, seen)).severity == "note", "local disks do where no checkpoint is written"


def test_host_files_are_read_as_deepspeed_reads_them(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# mine\na slots=4\nb slots=2\nc slots=2\n")
    read = lambda **options: [(node.name, node.slots, node.devices) for node in read_hosts(str(file), **options)]  # noqa: E731
    assert read() == [("a", 4, (0, 1, 2, 3)), ("b", 2, (0, 1)), ("c", 2, (0, 1))]
    assert read(include="c@a:1,3") == [("a", 2, (1, 3)), ("c", 2, (0, 1))] and read(exclude="a@b:0") == [
        ("b", 1, (1,)),
        ("c", 2, (0, 1)),
    ]
    assert read(num_nodes=2, num_gpus=1) == [("a", 1, (0,)), ("b", 1, (0,))]
    for options, words in (
        ({"include": "d"}, "--include d.*'d' not found.*a slots=4"),
        ({"include": "a:7"}, "No slot '7'"),
        ({"include": "a", "num_nodes": 1}, "cannot be combined"),
        ({"num_nodes": 4}, "--num_nodes 4: .*hosts names 3 hosts"),
    ):
        with pytest.raises(UserError, match=words):
            read(**options)
    for text, words in (
        ("a slots=x\n", "bad entry: a slots=x"),
        ("", "empty"),
        ("a slots=1\na slots=2\n", "multiple entries for a"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            read()
    with pytest.raises(UserError, match="no such file.*worker-1 slots=8"):
        read_hosts(str(tmp_path / "none"))


def test_measured_links_feed_plans_of_the_same_hosts_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine(
        nodes=2,
        ranks_per_node=2,
        device_bytes=8 * GiB,
        host_bytes=16 * GiB,
        has_gpu=False,
        measured=True,
        host_names=("a", "b"),
    )
    assumed = speeds_of(machine, dtype="float32")
    assert speeds_for(machine, dtype="float32") == assumed
    rates = {"network_bytes": 3e8, "link_bytes": 2e9, "collective_seconds": 1e-3}
    keep("links", links_key(["b", "a"]), rates)
    speeds = speeds_for(machine, dtype="float32")
    assert (speeds.network_bytes, speeds.link_bytes, speeds.all_reduce_bytes, speeds.collective_seconds) == (
        3e8,
        2e9,
        2e9,
        1e-3,
    ) and "measured by dsft doctor" in speeds.source
    for other in ({"host_names": ("a", "c")}, {"nodes": 1, "host_names": ("a",)}, {"host_names": ()}):
        assert speeds_for(Machine(**vars(machine) | other), dtype="float32") == assumed
    speeds_file().write_text('{"links": {"a,b": {"network_bytes": "?"}}}')
    assert speeds_for(machine, dtype="float32") == assumed


def _machine_of_uneven_nodes(*names: str) -> tuple[int, int, tuple[str, ...]]:
    import socket

    place = min(1, distributed.rank())
    socket.gethostname = lambda: (names or "ab")[place]  # with the next, all that one machine has once
    os.environ["LOCAL_WORLD_SIZE"] = "12"[place]
    machine = distributed.smallest_machine()
    return machine.nodes, machine.ranks_per_node, machine.host_names


def _machine_of_namesakes() -> tuple[int, int, tuple[str, ...]]:
    distributed.boot_id = lambda: f"of node {min(1, distributed.rank())}"
    return _machine_of_uneven_nodes("a", "a")


def _cores_of_bound_ranks() -> int:
    core = distributed.rank()
    os.sched_getaffinity = lambda pid: {core}  # as a launcher ties each rank to a core of its own
    return distributed.smallest_machine().cores


def test_a_node_has_the_cores_of_all_its_ranks():
    assert on_ranks(2, _cores_of_bound_ranks) == [min(2, cpu_count(range(2)))] * 2


def test_uneven_nodes_are_counted_by_host_on_every_rank():
    assert on_ranks(3, _machine_of_uneven_nodes) == [(2, 2, ("a", "b"))] * 3


def test_nodes_of_one_name_are_not_counted_as_one():
    assert on_ranks(3, _machine_of_namesakes) == [(2, 2, ("a",))] * 3


def test_a_pod_whose_cluster_counts_pods_examines_itself(monkeypatch):
    """Kubernetes' training operator sets RANK and WORLD_SIZE in each pod, without a launcher there."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    examined = []
    monkeypatch.setattr("dsft.doctor.smoke.examine_launched", lambda **_: pytest.fail("as a rank of a launcher"))
    monkeypatch.setattr(doctor, "examine", lambda nodes, listed, **_: examined.extend(listed) or Report(nodes=[]))
    doctor.run(DoctorOptions(json=True), [])
    assert examined == [Node(name="localhost", slots=None)]


def test_a_node_that_runs_another_version_of_dsft_is_named():
    class Others:
        """Nodes that answer with the facts of another version; no phase comes after."""

        lost, failures = {}, []

        def start(self, phase): ...

        def run(self, phase, inputs, **options):
            return {name: {"host": name, "of_a_later_version": 1} for name in inputs}

    report = examine(Others(), [Node(name="n3", slots=1)], argv=[], quick=True, port=None, master="")
    assert [(entry.code, entry.where) for entry in report.findings] == [("no-dsft", "n3")] and report.facts == {}


def test_the_doctor_counts_the_room_of_a_run_as_the_training_does(options, tmp_path):
    """Checkpoints that are replaced make room, and a DeepSpeed JSON may say how many there will be."""
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "scheduler": scheduler}))
    asked = options(tmp_path / "run", zero=str(file), max_steps=None, save_strategy="steps", save_steps=5)

    def written() -> int:
        report = Report(nodes=["n1"], quick=True, facts={"n1": node("n1", cpu_only=True)})
        num_bytes, _ = plan_on(report, flags(asked))
        assert report.findings == []
        return num_bytes

    fresh, folder = written(), tmp_path / "run" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / TRAINER_STATE).write_text("{}" + 998 * " ")
    assert fresh - written() == 1000
    asked["save_steps"] = 10
    assert written() < fresh - 1000, "one checkpoint of 10 steps, and not two"


def test_the_doctor_plans_a_run_that_starts_now_whose_weights_must_be_there(options, tiny, tmp_path):
    """What a plan on paper leaves out."""
    lost = Path(shutil.copytree(tiny / "model", tmp_path / "lost"))
    weights = load_file(lost / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lost / "model.safetensors", metadata={"format": "pt"})
    for model, findings in ((tiny / "model", []), (lost, ["configuration"])):
        report = Report(nodes=["n1"], quick=True, facts={"n1": node("n1", cpu_only=True)})
        plan_on(report, flags(options(tmp_path / "run", model=str(model), method="lora")))
        assert [finding.code for finding in report.findings] == findings, report.findings
        assert not findings or "1 tensor of the model missing from its weights" in report.findings[0].message


class Answering:
    """Nodes that answer two phases with these facts and connections."""

    lost, failures = {}, []

    def __init__(self, facts: dict[str, NodeFacts], connections: dict[str, Reached]):
        self.answers = {"facts": facts, "reach": connections}

    def start(self, phase): ...

    def end(self, phase): ...

    def run(self, phase, inputs, **options):
        return json.loads(json.dumps({name: dataclasses.asdict(each) for name, each in self.answers[phase].items()}))


@pytest.mark.parametrize(
    ("facts", "connections", "why_not"),
    [
        ({}, {}, ""),
        ({"network__interfaces__eth0__mtu": 1500, "clock_synchronized": False}, {}, ""),  # warnings alone
        ({}, {"open": "!refused"}, "the nodes do not reach each other"),
        ({"slots": 3}, {}, "there are more slots than GPUs"),
        ({"cpu_only": True}, {}, "some nodes have GPUs that ranks can use"),
    ],
    ids=["healthy", "warnings", "cut off", "too many slots", "without GPUs"],
)
@pytest.mark.parametrize("is_default_port_busy", [False, True])
def test_ranks_are_measured_where_they_can_meet(monkeypatch, facts, connections, why_not, is_default_port_busy):
    measured_on = []
    monkeypatch.setattr(
        "dsft.doctor.examine._measure", lambda nodes, report, *_: measured_on.append(report.facts) or []
    )
    busy = {"n1": node("n1", master_port_taken="in use by process 7 (python)")} if is_default_port_busy else {}
    there = Answering(nodes(**facts) | busy, reached(**connections))
    listed = [Node(name=name, slots=2) for name in NAMES]
    report = examine(there, listed, argv=[], quick=True, port=29500, master="")
    codes = {entry.code: entry.message for entry in report.findings}
    assert ("default-port-busy" in codes) == is_default_port_busy
    assert why_not in codes.get("smoke-skipped", "") and ("smoke-skipped" in codes) == bool(why_not)
    assert [list(examined) for examined in measured_on] == ([] if why_not else [NAMES])


class ManyNodes(Answering):
    """Healthy nodes, which reach what they are asked to, but for one of them the master's port."""

    def __init__(self, blocked: str):
        super().__init__({}, {})
        self.blocked = blocked

    def run(self, phase, inputs, **options):
        for name in inputs if phase == "facts" else ():
            self.answers[phase][name] = node(name)
        for name, asked in inputs.items() if phase == "reach" else ():
            connections = []
            for target in asked["targets"]:
                is_blocked = name == self.blocked and target["kind"] == "master"
                how = {"error": "timeout"} if is_blocked else {"host": target["name"]}
                connections.append(Connection(**target, **how))
            self.answers[phase][name] = dataclasses.replace(reached()["n2"], connections=connections)
        return super().run(phase, inputs, **options)


@pytest.mark.parametrize("number", [9, 16])
def test_of_many_nodes_any_whose_way_to_the_master_port_is_blocked_is_named(monkeypatch, number):
    """Also one that the first is no neighbour of."""
    monkeypatch.setattr("dsft.doctor.examine._measure", lambda *_: [])
    names = [f"n{place}" for place in range(1, number + 1)]
    for blocked in names[1:]:
        listed = [Node(name=name, slots=2) for name in names]
        report = examine(ManyNodes(blocked), listed, argv=[], quick=True, port=29500, master="")
        errors = [(entry.code, entry.where) for entry in report.findings if entry.severity == "error"]
        assert errors == [("port-blocked", f"{blocked} -> n1")]


@pytest.mark.parametrize("outgoing", ["10.0.0.1", "127.0.1.1", ""])
@pytest.mark.parametrize("master", ["", "10.0.0.1", "n1"])
def test_the_interface_of_the_first_node_is_known_by_whichever_name_ranks_reach_it(monkeypatch, master, outgoing):
    """`outgoing` is where that name leads on the node itself. Else another MTU was overlooked, and gloo not told."""
    monkeypatch.setattr("dsft.doctor.examine._measure", lambda *of_examination: seen.append(of_examination[3]) or [])
    seen, facts = [], nodes() | {"n1": node("n1", network__interfaces__eth0__mtu=1500)}
    connections = reached()
    connections["n1"] = dataclasses.replace(connections["n2"], connections=[])
    for name, answer in connections.items():
        address = outgoing if name == "n1" else facts[name].address
        connections[name] = dataclasses.replace(answer, outgoing=address)
    listed = [Node(name=name, slots=2) for name in NAMES]
    report = examine(Answering(facts, connections), listed, argv=[], quick=True, port=29500, master=master)
    assert [(entry.code, entry.where) for entry in report.findings] == [("mtu", "n1")] and seen == [USED]


@pytest.mark.launch
def test_this_machine_is_examined_measured_and_its_run_planned(options, tmp_path):
    """Also where a notebook's own process group, of one rank, has left its variables and holds the port."""
    with socket.socket() as notebook:
        notebook.bind(("", 0))
        notebook.listen()
        variables = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(notebook.getsockname()[1]),
        }
        words = ["doctor", "--num_gpus", "2", "--json", *flags(options(tmp_path / "run"))]
        result = run_entry("dsft.cli.main", words, folder=ROOT, XDG_CACHE_HOME=str(tmp_path), **variables)
    report = json.loads(result.stdout)
    assert report["ok"] and result.returncode == 0, report["findings"]
    assert "commit_together" in report["patches"]["deepspeed"]
    assert report["slots"] == {"localhost": 2} and "is the fastest that fits" in report["plan"]
    assert (
        report["links"]["inside_bytes_per_second"]["localhost"] > 1e6 and min(report["links"]["flops_of_ranks"]) > 1e8
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.launch
def test_faults_of_a_run_are_found_without_starting_it(options, tmp_path):
    bad = options(tmp_path / "run", learning_rate=-1, data="none.jsonl")
    words = ["doctor", "--num_gpus", "99", *flags(bad), "--quick"]
    result = run_entry("dsft.cli.main", words, folder=ROOT, XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 2 and "slots=99" in result.stdout and "[data-missing]" in result.stdout, result.stdout
    assert all(name in result.stdout for name in COLUMNS)
    words = ["doctor", "--json", *flags(options(tmp_path / "run", learning_rate=-1, zero="7"))]
    full = run_entry("dsft.cli.main", words, folder=ROOT, XDG_CACHE_HOME=str(tmp_path))
    messages = {entry["code"]: entry["message"] for entry in json.loads(full.stdout)["findings"]}
    assert full.returncode == 2 and "configuration" in messages


PATIENT_FOR_5_SECONDS = """
import sys
from dsft.cli.main import main
from dsft.doctor import smoke
smoke.JOIN_SECONDS = 5
main(sys.argv[1:])
"""


@pytest.mark.launch
def test_missing_ranks_are_named(run, tmp_path):
    """Rank 2 is there before rank 0, and waits for it as long as it usually does."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(distributed.free_port()),
    }
    other = subprocess.Popen(
        [sys.executable, "-m", "dsft.cli.doctor", "--quick"],
        cwd=ROOT,
        env=os.environ | environment | {"RANK": "2", "LOCAL_RANK": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    words = [sys.executable, "-c", PATIENT_FOR_5_SECONDS, "doctor", "--quick", "--json"]
    result = run(words, XDG_CACHE_HOME=str(tmp_path), **environment)
    assert other.wait(timeout=300) == 2 == result.returncode
    assert [(entry["code"], entry["where"]) for entry in json.loads(result.stdout)["findings"]] == [
        ("missing-ranks", "rank 1")
    ]


def test_what_a_finding_tells_to_run_is_one_word_for_the_shell_where_paths_have_spaces(monkeypatch, tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert (
        str(folder)
        in shlex.split(broken_off("n3", "cd: x: No such file or directory", 1).fix.partition("copy it: ")[2])[2]
    )
    facts = nodes(**{"versions__dsft code": "999"})
    facts = {name: dataclasses.replace(node, code_folder=str(folder)) for name, node in facts.items()}
    [code] = check_versions(facts)
    assert f"{folder}/" in shlex.split(code.fix)
    assert finding("mtu", "n1", "x", "y", severity="note").severity == "note"
