"""`dsft gpu-check`: checks -> table on the screen and files, and the exit code."""

import sys
import tempfile
from pathlib import Path

from dsft.cli.commands import GpuCheckOptions
from dsft.cluster.gpu_check.check import Setting
from dsft.cluster.gpu_check.checks import CHECKS, FILES
from dsft.cluster.gpu_check.examine import run_checks
from dsft.cluster.gpu_check.table import Results, has_failures, line, table, without_names, write_results
from dsft.errors import UserError, nearest, raise_if_any
from dsft.runtime.hardware import default_ranks, has_gpu, require_seen_gpus


def run(options: GpuCheckOptions) -> None:
    """Check, print and write; ends with exit code 1 where a claim does not hold.

    Raises:
        UserError: for a name that is no check, or on a machine without a GPU unless --tiny is given.
    """
    names = [check.name for check in CHECKS]
    raise_if_any(
        [
            f"--only {name}: no such check{nearest(name, names)}; there are {', '.join(names)}"
            for name in options.only
            if name not in names
        ]
    )
    require_seen_gpus()
    if not has_gpu() and not options.tiny:
        raise UserError(["no GPU is seen here; --tiny goes the same way with a tiny model, on CPU ranks too"])
    out = Path(options.out).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [FILES, *(check for check in CHECKS if not options.only or check.name in options.only)]
    with tempfile.TemporaryDirectory(dir=out, prefix="work-") as folder:
        setting = Setting(folder=folder, ranks=default_ranks(), has_gpu=has_gpu(), tiny=options.tiny)
        results: Results = {}
        print(table(results), end="", flush=True)
        for name, rows in run_checks(chosen, setting, seconds=60 * options.minutes):
            results[name] = [without_names(row, setting) for row in rows]
            print("\n".join(line(name, row) for row in results[name]), flush=True)
            write_results(results, setting, out)  # what is known stays, whatever ends this process
            if name == FILES.name and has_failures(results):
                break  # the others have nothing to work on
    print(f"\ndsft: {out}/gpu-check.md and gpu-check.json are written", file=sys.stderr)
    if has_failures(results):
        sys.exit(1)
