"""Freed memory of CPU ranks goes back to the system, so that a plan's bytes are what the system sees."""

import os
import platform
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
import sys, psutil
from dsft.runtime.hardware import give_back_freed_memory
if sys.argv[1] == "gives back":
    give_back_freed_memory()
del (large := [bytearray(30 * 2**20)])[:]  # from here on glibc takes blocks of this size from its heap
blocks = [bytearray(b"x" * 4 * 2**20) for _ in range(60)]
del blocks[::2]
print(psutil.Process().memory_info().rss // 2**20)
"""


def resident_mib(how: str, **variables: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, cwd=ROOT, env=kept | variables, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_half_of_the_blocks_freed_are_half_of_the_memory():
    kept, given_back = resident_mib("keeps"), resident_mib("gives back")
    assert kept - given_back > 90, "30 blocks of 4 MiB"
