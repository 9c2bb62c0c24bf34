"""`dsft doctor`: what is wrong with nodes is named; the examination of this machine is real."""

import copy
import json
import os
import shlex
import socket
import subprocess
import sys

import pytest

from dsft.cli.commands import DoctorOptions
from dsft.cli.doctor import answers_of, examine
from dsft.doctor.between import check_between, check_measured, check_node
from dsft.doctor.node import node_facts, parse_gpus

SMI = """0, NVIDIA H100 80GB HBM3, 81559, 4, 570.86.15, 0
1, NVIDIA H100 80GB HBM3, 81559, 70000, 570.86.15, 3
2, NVIDIA GB10, [N/A], [N/A], 570.86.15, [N/A]
"""


@pytest.fixture(scope="module")
def facts() -> dict:
    return node_facts(slots=2)


def with_gpus(facts: dict, **changes: object) -> dict:
    changed = copy.deepcopy(facts)
    changed["versions"]["torch"] = "2.13.0"
    return changed | {"gpus": parse_gpus(SMI)[:2]} | changes


def test_gpus_are_read_with_their_memory_and_errors():
    gpus = parse_gpus(SMI)
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2]
    assert [gpu["ecc_errors"] for gpu in gpus] == [0, 3, 0]
    assert gpus[1]["used_bytes"] == 70_000 * 2**20 and gpus[2]["memory_bytes"] == 0


def test_every_gpu_of_the_node_s_ranks_is_looked_at(facts):
    errors = list(check_node("a", with_gpus(facts)))
    assert {(each.code, each.where) for each in errors} == {("gpu-errors", "a"), ("gpu-busy", "a")}
    assert all("GPU 1" in each.message for each in errors)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"gpu_error": "nvidia-smi: driver mismatch", "gpus": []}, "gpu-driver"),
        ({"slots": 3}, "slots"),
        ({"free_bytes": {"/dev/shm": 2**26}}, "shared-memory"),
        ({"free_bytes": {"/runs": 2**20}}, "disk"),
        ({"output_error": "/runs: Permission denied"}, "output-not-writable"),
        ({"interface_error": "NCCL_SOCKET_IFNAME=eth9, but the interfaces are lo"}, "interface"),
    ],
)
def test_what_is_wrong_with_a_node_is_named(facts, changes, code):
    gpus = parse_gpus(SMI)[:1] * 2
    assert code in {each.code for each in check_node("a", with_gpus(facts, gpus=gpus) | changes)}


def test_a_cpu_build_of_torch_beside_gpus_is_named(facts):
    changed = with_gpus(facts)
    changed["versions"]["torch"] = "2.13.0+cpu"
    assert "torch-without-cuda" in {each.code for each in check_node("a", changed)}


def test_nodes_that_differ_are_named(facts):
    nodes = {name: copy.deepcopy(facts) | {"host": name} for name in "abc"}
    nodes["b"]["versions"]["torch"] = "2.1.0"
    nodes["c"]["versions"]["dsft code"] = "other"
    offsets = {"a": 0.0, "b": 0.1, "c": 90.0}
    errors = {(each.code, each.where) for each in check_between(nodes, offsets)}
    assert errors == {("versions", "b"), ("code", "c"), ("clocks", "c")}
    assert list(check_between({}, {})) == [], "no node has answered"


def test_wrong_sums_stragglers_and_folders_that_are_not_shared_are_named():
    ranks = [
        {"rank": rank, "host": "ab"[rank // 2], "is_wrong": rank == 1, "sees_output": rank < 2, "flops": 1e12}
        for rank in range(4)
    ]
    ranks[3]["flops"] = 4e11
    errors = {(each.code, each.where) for each in check_measured(ranks)}
    assert errors == {("wrong-sum", "rank 1 on a"), ("output-not-shared", "b"), ("slow-rank", "rank 3 on b")}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'root@n1: Permission denied (publickey).' >&2; exit 255", "root@n1: Permission denied (publickey)."),
        ("exit 7", "exit code 7"),
        ("sleep 9", "no answer within 1 s"),
    ],
)
def test_a_node_that_does_not_answer_is_named_with_its_reason(script, message):
    finding = answers_of("n1", ["bash", "-c", script], seconds=1)
    assert (finding.code, finding.where, finding.message) == ("no-answer", "n1", message)


def test_a_shell_that_greets_without_a_new_line_hides_no_answer():
    question = {"output_dir": None, "quick": True}
    command = shlex.join([sys.executable, "-m", "dsft.doctor.node", "rank", json.dumps(question)])
    (answer,) = answers_of("n1", ["bash", "-c", f"printf Welcome; unset RANK; {command}"], seconds=60)
    assert "RANK expected" in answer["error"]


def test_this_machine_is_examined_with_two_ranks(tmp_path):
    report = examine(DoctorOptions(num_gpus=2), output_dir=str(tmp_path / "run"))
    assert not report.has_errors, report.findings
    assert sorted(each["rank"] for each in report.measured) == [0, 1]
    assert all(each["bytes_per_second"] > 0 and each["flops"] > 0 for each in report.measured)
    assert report.facts["localhost"]["host"] == socket.gethostname()
    assert list(tmp_path.iterdir()) == [], "a probe was left"


def test_a_port_in_use_ends_the_examination_with_an_error():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        report = examine(DoctorOptions(num_gpus=1, master_port=port, quick=True), output_dir="")
    assert [each.code for each in report.findings if each.severity == "error"] == ["master-port-busy"]
    assert report.has_errors and str(port) in report.findings[0].message


@pytest.mark.launch
def test_ranks_of_a_launcher_are_examined_without_ssh(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "dsft.cli.doctor", "--quick"]
    result = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("dsft doctor: 1 node, 2 ranks") == 1
