"""A training whose process may take only so many MB more than it has at its start: argument 1, then the options of dsft
train.
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

import dsft.train
import dsft.training.run
from dsft.errors import ends_with_clear_errors
from dsft.runtime import distributed

M_ARENA_MAX = -8
"""Of mallopt (malloc.h of glibc): each thread would reserve 64 MB."""


@ends_with_clear_errors
def main() -> None:
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    distributed.start_ranks()
    taken = 1024 * int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[1]) * 10**6,) * 2)
    dsft.train.main(sys.argv[2:])
