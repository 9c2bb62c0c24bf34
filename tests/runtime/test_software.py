"""Versions: the bounds of pyproject.toml are those that were tested, and others are named. Compiled operators: a
machine that cannot compile one says so before weights load, or takes torch's.
"""

import re
import tomllib

import pytest
from conftest import ROOT

from dsft.runtime import distributed, software
from dsft.runtime.software import TESTED_PACKAGES, nvcc_problem, offload_problems, untested_versions


def pinned(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / file).read_text(), re.MULTILINE))


OLDEST, NEWEST = (
    {name: pinned(file)[name] for name in TESTED_PACKAGES} for file in ("constraints-oldest.txt", "constraints.txt")
)


def test_the_lower_bounds_of_the_package_are_the_oldest_versions_that_are_tested():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(line.split(">=") for line in needed if ">=" in line)
    del bounds["gguf"]  # reads one kind of file
    assert bounds.keys() == {*TESTED_PACKAGES}
    assert all(OLDEST[name].startswith(bound) for name, bound in bounds.items())


def test_a_version_that_was_never_tested_is_named_with_those_that_were():
    assert untested_versions(OLDEST) == untested_versions(NEWEST) == []
    assert untested_versions(NEWEST | {"torch": f"{NEWEST['torch']}+cu130"}) == [], "PyPI's torch"
    for suffix in ("a0+nv25.9", ".post301"):
        assert untested_versions(NEWEST | {"torch": NEWEST["torch"] + suffix}) == [], "of NVIDIA's container, of conda"
    newer = untested_versions(NEWEST | {"deepspeed": "9.0", "torch": "2.13"})
    assert newer == [f"deepspeed 9.0 (tested up to {NEWEST['deepspeed']})"]


def test_this_environment_is_tested():
    assert untested_versions() == []


def test_a_copy_of_the_package_alone_names_no_version(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "PACKAGE", tmp_path / "dsft")
    assert untested_versions(NEWEST | {"peft": "99.0"}) == []


def test_a_run_says_at_its_start_what_was_never_tested(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "untested_versions", lambda: untested_versions(NEWEST | {"peft": "99.0"}))
    distributed.require_same_start({}, [])
    expected = f"warning: never tested with peft 99.0 (tested up to {NEWEST['peft']})"
    assert capsys.readouterr().out.count(expected) == 1


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
PARAMETERS = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_missing_compiler_is_named_where_the_optimizer_is_offloaded(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = offload_problems(OFFLOAD, has_gpu=False)
    assert "no-such-compiler is not there" in problem and "apt-get install g++" in problem
    assert offload_problems(PARAMETERS, has_gpu=False) == offload_problems({}, has_gpu=True) == []
    by_torch = OFFLOAD | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert offload_problems(by_torch, has_gpu=True) == []


@pytest.mark.usefixtures("nothing_compiled")
def test_missing_headers_of_python_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert f"{tmp_path}/Python.h is not there" in offload_problems(OFFLOAD, has_gpu=False)[0]


@pytest.mark.usefixtures("nothing_compiled")
def test_what_was_compiled_before_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert offload_problems(OFFLOAD, has_gpu=False) == []


def test_what_was_installed_compiled_needs_no_folder_to_compile_in(monkeypatch, tmp_path):
    from deepspeed.git_version_info import installed_ops

    monkeypatch.setitem(installed_ops, "cpu_adam", True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert offload_problems(OFFLOAD, has_gpu=False) == []


@pytest.mark.parametrize("words", ["", "c++ -O2", "env c++"])
@pytest.mark.usefixtures("nothing_compiled")
def test_this_machine_compiles(monkeypatch, words):
    monkeypatch.setenv("CXX", words)
    assert offload_problems(OFFLOAD, has_gpu=False) == [] and software.compile_error() == ""


def test_without_nvcc_an_optimizer_that_is_compiled_for_gpus_is_refused(monkeypatch):
    import torch.utils.cpp_extension

    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    (problem,) = offload_problems({"optimizer": {"type": "Lion"}}, has_gpu=True)
    assert "optimizer.type lion: nvcc cannot compile it" in problem and "CUDA_HOME does not exist" in problem
    for kind in ("SGD", "Muon"):
        assert offload_problems({"optimizer": {"type": kind}}, has_gpu=True) == []
    assert offload_problems({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, has_gpu=True) == []


def test_a_toolkit_of_another_cuda_is_named(tmp_path, monkeypatch):
    import torch.utils.cpp_extension

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "11.8 does not match the version torch was compiled with 13.0" in nvcc_problem()
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert nvcc_problem() == ""
