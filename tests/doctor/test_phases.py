"""What one node does in each phase, by itself."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
import time

from conftest import ROOT
from torch.utils.cpp_extension import get_default_build_root

from dsft.doctor import phases
from dsft.doctor.phases import NodeFacts, file_content, typed
from dsft.runtime.hardware import cpu_count
from dsft.runtime.software import numeric_versions


def test_file_contents_are_told_apart_by_names_sizes_and_both_ends(tmp_path):
    (tmp_path / "a").mkdir()
    large = tmp_path / "a/large.bin"
    large.write_bytes(b"0" * (3 * phases.END_BYTES))
    (tmp_path / "a/checkpoint-1").mkdir()
    (tmp_path / "a/checkpoint-1/w").write_text("not compared")
    assert file_content(str(tmp_path / "nothing")) is None
    first = file_content(str(tmp_path / "a"))
    assert first.files == 1 and file_content(str(tmp_path / "a/*.bin")).bytes == 3 * phases.END_BYTES
    for change in (
        lambda: large.write_bytes(b"1" + b"0" * (3 * phases.END_BYTES - 1)),
        lambda: large.write_bytes(b"0" * (3 * phases.END_BYTES - 1) + b"1"),
        lambda: large.write_bytes(b"0"),
        lambda: large.rename(tmp_path / "a/other.bin"),
    ):
        change()
        assert file_content(str(tmp_path / "a")).hash != first.hash


def test_of_a_block_that_trickles_in_what_has_come_tells_the_rate(monkeypatch):
    """Else the examination ran out of time, and the node that asked was taken for dead."""
    monkeypatch.setattr(phases, "BLOCK_SECONDS", 0.3)
    sent = []

    def serve() -> None:
        caller, _ = server.accept()
        with caller, contextlib.suppress(OSError):
            caller.sendall(b"far\n")
            while asked := caller.recv(1):
                if asked == b"?":
                    caller.sendall(b"0.0\n")
                    continue
                for _ in range(phases.BLOCK_BYTES // 1024):
                    sent.append(caller.send(bytes(1024)))
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        target = {"kind": "open", "name": "far", "address": "127.0.0.1", "port": server.getsockname()[1]}
        connection = phases._connect(target)
        thread.join()
    assert connection.host == "far" and 0 < connection.bytes_per_second < phases.SLOWEST_LINK
    assert sum(sent) < phases.BLOCK_BYTES


def test_the_head_and_the_phases_need_no_torch_and_facts_travel_as_json():
    code = (
        "import dataclasses, json, sys; from contextlib import ExitStack; from dsft.doctor import examine, phases;"
        " print(json.dumps(dataclasses.asdict(phases.facts(ExitStack()))));"
        " assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    facts = typed(NodeFacts, json.loads(result.stdout))
    assert facts.versions["torch"] == importlib.metadata.version("torch")  # torch adds "+cu130" to its own
    assert facts.cores == cpu_count() and facts.slots >= 1
    assert json.loads(result.stdout) == json.loads(json.dumps(dataclasses.asdict(facts)))


def test_either_variable_keeps_a_node_from_the_hub_and_a_node_without_its_library_answers_too(tmp_path):
    code = (
        "import contextlib, sys; sys.modules |= dict.fromkeys(sys.argv[1:]); from dsft.doctor import phases;"
        " facts = phases.facts(contextlib.ExitStack()); print(facts.hub_offline, facts.caches['hub'])"
    )
    others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}

    def told(*missing: str, **variables: str) -> str:
        environment = others | {"HOME": str(tmp_path)} | variables
        command = [sys.executable, "-c", code, *missing]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert told(HF_HUB_CACHE="/cache", HF_HUB_OFFLINE="1") == "True /cache\n"
    assert told(HF_HUB_CACHE="/cache", TRANSFORMERS_OFFLINE="1") == "True /cache\n"
    # The command that the finding names.
    assert told(HF_HUB_CACHE="/cache", TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="0") == "False /cache\n"
    assert told("huggingface_hub") == f"False {tmp_path}/.cache/huggingface/hub\n"


def test_nodes_are_compared_by_the_versions_that_a_training_compares():
    """The doctor named Python's last digit, which no training refuses, but not another numpy, which each does."""
    assert phases.facts(contextlib.ExitStack()).versions.items() >= numeric_versions().items()


def test_the_disk_of_compiled_operators_is_the_one_that_torch_writes_to(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        if not folder:
            monkeypatch.delenv("XDG_CACHE_HOME")
        assert phases.cache_folders()["operators"] == get_default_build_root()
