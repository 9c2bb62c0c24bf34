"""`dsft report` and `dsft compare`: a page about runs, and results of several models on the same texts against one."""

import dataclasses
import json
from pathlib import Path

from dsft.cli.commands import CompareOptions, ReportOptions
from dsft.perplexity.compare import compare_results, read_evaluations
from dsft.perplexity.results import finite
from dsft.report.page import write_report
from dsft.runtime.console import print_table, show_table, show_text


def run_report(options: ReportOptions) -> None:
    """Write the page. Raises UserError if a folder is not a run, or the page cannot be written."""
    out = Path(options.out).expanduser() if options.out else None
    show_text(f"dsft: written: {write_report(options.runs, out)}")


def run_compare(options: CompareOptions) -> None:
    """Print tables of comparisons, or one JSON object. Raises UserError if results are missing, or of other texts or
    windows.
    """
    comparisons = compare_results(read_evaluations(options.results), base=options.base, group_by=options.group_by)
    if options.json:
        print(json.dumps({"comparisons": finite([dataclasses.asdict(each) for each in comparisons])}))
        return
    show_table(comparisons.overview())
    for table in comparisons.tables():
        print_table(*table)
