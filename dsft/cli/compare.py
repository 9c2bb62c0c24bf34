"""Runs `dsft compare`: results of several models on the same texts against one of them."""

import dataclasses
import json

from dsft.cli.commands import CompareOptions
from dsft.perplexity.compare import compare_results, read_evaluations
from dsft.perplexity.results import finite
from dsft.runtime.console import print_table


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
