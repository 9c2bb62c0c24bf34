"""`dsft report` and `dsft compare`: a page about runs, and results of several models on the same texts against one."""

import dataclasses
import json
from pathlib import Path

from dsft.cli.commands import CompareOptions, ReportOptions
from dsft.errors import UserError
from dsft.perplexity.compare import compare_results, joined_seeds, read_evaluations
from dsft.perplexity.publish import agreement, read_card, table_of, write_card, written
from dsft.perplexity.results import finite
from dsft.report.page import write_report
from dsft.report.runs import read_report
from dsft.runtime.console import print_table, show_text
from dsft.units import plural


def run_report(options: ReportOptions) -> None:
    """Write the page. Raises UserError where a folder holds no run, or the page cannot be written."""
    page, *pictures = write_report(read_report(options.runs), Path(options.out).expanduser())
    show_text(
        f"dsft: {page}: written, {page.stat().st_size / 1e6:.1f} MB; {len(pictures)} PNGs in {page.with_suffix('')}/"
    )


def run_compare(options: CompareOptions) -> None:
    """Print tables of comparisons, one JSON object, or a paper's table; write a card, or compare with one. Raises
    UserError where results are missing, or of other texts or windows, or options do not go together.
    """
    names = ("base", "json", "format", "metric", "group_by", "seeds")
    given = [name for name in names if getattr(options, name) != getattr(CompareOptions, name, [])]
    is_card, is_table = options.card or options.against, not {"format", "metric"}.isdisjoint(given)
    ignored = [name for name in given if is_card or (is_table and name in ("base", "json"))]
    if ignored:
        reason = "card and against take results as they are" if is_card else "a table has no base, and is no JSON"
        raise UserError(f"{', '.join(ignored)}: not read here, {reason}; leave out what is not meant")
    evaluations = read_evaluations(options.results)
    if options.card:
        write_card(path := Path(options.card).expanduser(), evaluations)
        show_text(f"dsft: {path}: written, a card of {plural(len(evaluations), 'result')}")
    if options.against:
        cards = read_card(Path(options.against).expanduser())
        for table in [agreement(evaluation, cards, options.against) for evaluation in evaluations]:
            print_table(*table)
    if is_card:
        return
    evaluations = joined_seeds(evaluations, options.seeds)
    if is_table:
        columns, cells = table_of(evaluations, options.metric, options.group_by)
        print(written(columns, cells, metric=options.metric, format=options.format or "markdown"))
        return
    comparisons = compare_results(evaluations, base=options.base, group_by=options.group_by)
    if options.json:
        print(json.dumps({"comparisons": finite([dataclasses.asdict(comparison) for comparison in comparisons])}))
        return
    for table in comparisons.tables():
        print_table(*table)
