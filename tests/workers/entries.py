"""Several entries of dsft, one after the other on the ranks of one launch: a start is what takes a launcher's time.

    <launcher> tests/workers/entries.py JOBS

JOBS is a JSON file: a list of [entry, [its words]]. Each entry runs as `__main__`, as the launcher would start it: as a
module where PYTHONPATH is set, else as a script. The last one must end its ranks
by an error.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from dsft.runtime import distributed

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    *launchers_words, jobs = sys.argv[1:]  # deepspeed's --local_rank
    # The last job is a bad configuration, which ends the ranks by itself.
    distributed.stop_ranks = distributed.wait_for_all
    for entry, words in json.loads(Path(jobs).read_text()):
        sys.argv = [entry, *launchers_words, *words]
        if "PYTHONPATH" in os.environ:
            runpy.run_module(f"dsft.{entry}", run_name="__main__")
        else:
            sys.path[0] = str(ROOT / "dsft")
            runpy.run_path(str(ROOT / "dsft" / f"{entry}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
