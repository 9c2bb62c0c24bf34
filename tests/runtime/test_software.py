"""Versions: the bounds of pyproject.toml are those that were tested, and others are named. Compiled operators: a
machine that cannot compile one says so before weights load, or takes torch's.
"""

import re
import tomllib

from conftest import ROOT
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder

from dsft.runtime import distributed, software
from dsft.runtime.software import TESTED_PACKAGES, optimizer_problems, untested_versions, version_of


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
    assert untested_versions({name: version_of(name) for name in TESTED_PACKAGES}) == []


def test_a_run_says_at_its_start_what_was_never_tested(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "untested_versions", lambda _: untested_versions(NEWEST | {"peft": "99.0"}))
    distributed.require_same_start({}, [])
    expected = f"warning: never tested with peft 99.0 (tested up to {NEWEST['peft']})"
    assert capsys.readouterr().out.count(expected) == 1


def test_deepspeed_has_the_operators_of_offloaded_optimizers():
    for operator in ("CPUAdam", *software.ON_CPU.values()):
        assert get_accelerator().get_op_builder(f"{operator}Builder")


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
BY_TORCH = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


def no_compiler(*_, **__):
    raise RuntimeError("Error building extension")


def test_a_missing_compiler_is_named_if_the_optimizer_is_offloaded(monkeypatch):
    monkeypatch.setattr(OpBuilder, "load", no_compiler)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = optimizer_problems(OFFLOAD)
    assert "cannot compile DeepSpeed's CPUAdam (no-such-compiler is not there)" in problem
    assert "apt-get install g++" in problem
    parameters = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert optimizer_problems(parameters) == optimizer_problems(OFFLOAD | BY_TORCH) == []


def test_missing_headers_of_python_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert software.compile_error() == f"{tmp_path}/Python.h is not there"


def test_this_machine_compiles():
    assert software.compile_error() == ""


def test_without_nvcc_an_optimizer_that_is_compiled_for_gpus_is_refused():
    (problem,) = optimizer_problems({"optimizer": {"type": "Lion"}}, has_gpu=True)
    assert "cannot compile DeepSpeed's FusedLion" in problem
    for config in ({"optimizer": {"type": "SGD"}}, {"optimizer": {"type": "Muon"}}, BY_TORCH, {}):
        assert optimizer_problems(config, has_gpu=True) == []
