"""`dsft doctor` on real hosts: each fault is made for real on one of them, and must be named with its place."""

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


def doctor(hosts, slots: list[int], folder: Path, *options) -> tuple[dict, set[tuple[str, str]]]:
    """(report, {(code, where)} of its errors) of `dsft doctor --hostfile` on the first host; nothing may be left."""
    hostfile = hosts.hostfile(folder / "hostfile", slots)
    result = hosts[0].run(["dsft", "doctor", "--hostfile", hostfile, "--json", *options])
    report = json.loads(result.stdout)
    assert result.returncode == (0 if report["ok"] else 2), result.stderr
    assert all(host.is_idle() for host in hosts)
    return report, {(each["code"], each["where"]) for each in report["findings"] if each["severity"] == "error"}


def inside(host, script: str) -> None:
    """Runs a script in a host's namespaces."""
    enter = ["nsenter", "--target", str(host.init_pid), "--net", "--uts", "--mount", "--pid", "--ipc", "--"]
    subprocess.run([*enter, "bash", "-ec", script], check=True, capture_output=True, text=True)


@contextmanager
def changed(host, script: str, back: str):
    """A change inside a host that is taken back."""
    inside(host, script)
    try:
        yield
    finally:
        inside(host, back)


def test_healthy_hosts_have_no_errors_and_are_measured(hosts, tmp_path):
    report, errors = doctor(hosts, [1, 2], tmp_path, "--output_dir", str(tmp_path / "run"))
    assert report["ok"] and errors == set(), report["findings"]
    assert len(report["facts"]) == 2 and len(report["measured"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["hostfile"], "a probe was left"


def test_faults_are_named_with_their_place(hosts, tmp_path):
    """A host without ssh, and a folder that is not shared."""
    with changed(
        hosts[1], "iptables -A INPUT -p tcp --dport 22 -j REJECT", "iptables -D INPUT -p tcp --dport 22 -j REJECT"
    ):
        report, errors = doctor(hosts, [1, 1], tmp_path, "--quick")
    assert [where for _, where in errors] == [hosts[1].name], report["findings"]
    (tmp_path / "runs").mkdir()
    mount = f"mount -t tmpfs none {tmp_path}/runs"
    with changed(hosts[1], mount, f"umount {tmp_path}/runs"):
        report, errors = doctor(hosts, [1, 1], tmp_path, "--quick", "--output_dir", f"{tmp_path}/runs")
    assert errors == {("output-not-shared", hosts[1].name)}, report["findings"]


@pytest.mark.exhaustive  # it waits until the join has timed out
def test_a_port_that_is_blocked_is_named(hosts, tmp_path):
    drop = "INPUT -p tcp --dport 29700 -j REJECT"
    with changed(hosts[0], f"iptables -A {drop}", f"iptables -D {drop}"):
        report, errors = doctor(hosts, [1, 1], tmp_path, "--quick", "--master_port", "29700")
    assert {("network-blocked", hosts[1].name), ("no-answer", hosts[1].name)} & errors, report["findings"]
