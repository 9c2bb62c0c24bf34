"""Freed memory of CPU ranks goes back to the system, so that a plan's bytes are what the system sees; where there is
plenty, it is kept for the next step.
"""

import os
import platform
import subprocess
import sys

import pytest
from conftest import ROOT

START = """
import resource, sys, psutil
from dsft.runtime.hardware import keep_freed_memory
if sys.argv[1] != "default":
    keep_freed_memory(keeps=sys.argv[1] == "keeps")
"""
HALF = """
del (large := [bytearray(30 * 2**20)])[:]  # from here on glibc takes blocks of this size from its heap
blocks = [bytearray(b"x" * 4 * 2**20) for _ in range(60)]
del blocks[::2]
print(psutil.Process().memory_info().rss // 2**20)
"""
STEPS = """
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x" * 4 * 2**20) for _ in range(20)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")


def result_of(program: str, how: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", START + program, how]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_half_of_the_blocks_freed_are_half_of_the_memory():
    kept, given_back = result_of(HALF, "default"), result_of(HALF, "gives back")
    assert kept - given_back > 90, "30 blocks of 4 MiB"


def test_a_step_of_kept_memory_asks_the_system_for_none():
    """By page faults; without the kernel's huge pages there are 20,480 in a step of 80 MiB."""
    default, kept = result_of(STEPS, "default"), result_of(STEPS, "keeps")
    assert default > 30 and kept < default / 4
