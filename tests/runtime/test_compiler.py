"""Offload needs a compiler: a machine without one says so before weights load."""

import pytest

from dsft.runtime import operators
from dsft.runtime.operators import offload_problems

OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
PARAMETERS = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def test_a_missing_compiler_is_named_where_the_optimizer_is_offloaded(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = offload_problems(OFFLOAD)
    assert "no-such-compiler is not there" in problem and "apt-get install g++" in problem
    assert offload_problems(PARAMETERS) == offload_problems({}) == []
    assert offload_problems(OFFLOAD | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}) == []


def test_a_compiler_without_a_header_is_named_by_its_complaint(monkeypatch, tmp_path):
    false = tmp_path / "c++"
    false.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2; exit 1\n")
    false.chmod(0o755)
    monkeypatch.setenv("CXX", str(false))
    assert "omp.h: No such file" in offload_problems(OFFLOAD)[0]


def test_what_was_compiled_before_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert offload_problems(OFFLOAD) == []


@pytest.mark.parametrize("words", ["", "c++ -O2", "env c++"])
def test_this_machine_compiles(monkeypatch, words):
    monkeypatch.setenv("CXX", words)
    assert offload_problems(OFFLOAD) == [] and operators.compile_error() == ""
