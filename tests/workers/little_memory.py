"""A training whose process may take only so many MB more than it has at its start: argument 1, then the options of dsft
train.
"""

import re
import resource
import sys
from pathlib import Path

import dsft.training.run  # noqa: F401  what a training loads is not counted
from dsft.errors import ends_with_clear_errors
from dsft.runtime import distributed
from dsft.train import main


@ends_with_clear_errors
def limited() -> None:
    distributed.start_ranks()
    taken = 1024 * int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[1]) * 10**6,) * 2)
    main(sys.argv[2:])


limited()
