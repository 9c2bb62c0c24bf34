"""`dsft report` and `dsft compare`: a page about runs, and results of several models on the same texts against one."""

import dataclasses
import json
from pathlib import Path

from dsft.cli.commands import CompareOptions, ReportOptions
from dsft.perplexity.compare import compare_results, read_evaluations
from dsft.perplexity.results import finite
from dsft.report.page import write_report
from dsft.report.runs import read_report
from dsft.runtime.console import print_table


def run_report(options: ReportOptions) -> None:
    """Write the page.

    Raises:
        UserError: where a folder holds no run, or the page cannot be written.
    """
    page, *pictures = write_report(read_report(options.runs), Path(options.out).expanduser())
    print(f"dsft: {page}: written, {page.stat().st_size / 1e6:.1f} MB; {len(pictures)} PNGs in {page.with_suffix('')}/")


def run_compare(options: CompareOptions) -> None:
    """Print a table for each model and data set, or one JSON object.

    Raises:
        UserError: where results are missing, or of other texts or windows.
    """
    comparisons = compare_results(read_evaluations(options.results), base=options.base)
    if options.json:
        print(json.dumps({"comparisons": finite([dataclasses.asdict(comparison) for comparison in comparisons])}))
        return
    for comparison in comparisons:
        print_table(comparison.title, comparison.summary())
