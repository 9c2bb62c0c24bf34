"""Runs the checks: `scripts/test --gpu [--only CHECK ...]`. Writes a table to the screen and to files."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this folder's modules are `gpu.files`, not `files`

from dsft.errors import UserError
from dsft.runtime.hardware import default_ranks, has_gpu, require_seen_gpus
from gpu.check import Setting
from gpu.checks import CHECKS, FILES, SHARE, SHARE_CHECKS
from gpu.examine import run_checks
from gpu.table import Results, has_failures, line, measured_rows, table, without_names, write_results


def main(words: Sequence[str] | None = None) -> None:
    """Check, print and write; exit code 1 where a claim does not hold, 2 for an unexpected argument and where no GPU is
    seen and --tiny is missing.
    """
    parser = argparse.ArgumentParser(prog="scripts/test --gpu", description=sys.modules["gpu"].__doc__)
    names = [check.name for check in (*CHECKS, *SHARE_CHECKS)]
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks together (default 8)")
    parser.add_argument("--only", nargs="*", choices=names, metavar="CHECK", help=", ".join(names))
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model: no memory and time are claimed; CPU ranks too"
    )
    parser.add_argument("--share", type=int, default=0, choices=(2, 4, 8), help="ranks on one GPU, for share-... alone")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
    options = parser.parse_args(words)
    try:
        require_seen_gpus()
    except UserError as error:
        parser.error(str(error))
    if not has_gpu() and not options.tiny:
        parser.error("no GPU is seen here; --tiny goes the same way with a tiny model, on CPU ranks too")
    out = options.out.expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    first, checks = ([FILES, SHARE], SHARE_CHECKS) if options.share else ([FILES], CHECKS)
    chosen = [*first, *(check for check in checks if options.only is None or check.name in options.only)]
    with tempfile.TemporaryDirectory(dir=out, prefix="work-") as folder:
        ranks = 1 if options.share else default_ranks()
        setting = Setting(folder=folder, ranks=ranks, has_gpu=has_gpu(), tiny=options.tiny, share=options.share)
        results: Results = {}
        print(table(results), end="", flush=True)
        for name, rows in run_checks(chosen, setting, seconds=60 * options.minutes):
            results[name] = [without_names(row, setting) for row in rows]
            print("\n".join(line(name, row) for row in results[name]), flush=True)
            write_results(results, setting, out)  # what is known stays, whatever ends this process
            if name in (FILES.name, SHARE.name) and has_failures(results):
                break  # the others have nothing to work on
    if rows := measured_rows(results):
        print(f'\nMeasured rows, for the issue form "A result on a GPU":\n\n{rows}')
    print(f"\n{out}/gpu-check.md and gpu-check.json are written", file=sys.stderr)
    if has_failures(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
