"""Shows how the loss of the same tokens falls as their context grows: a row for each length, and a picture."""

import math
from collections import defaultdict
from pathlib import Path

from dsft.perplexity.intervals import LEVEL
from dsft.perplexity.result import Evaluation

PICTURE = "context_curve.png"
Curves = dict[tuple[str, str], list[Evaluation]]
"""Model and data -> the result of each length, shortest first."""


def context_curves(evaluations: list[Evaluation]) -> Curves:
    """Group the results of lengths of context."""
    curves: Curves = defaultdict(list)
    for evaluation in evaluations:
        curves[evaluation.model, evaluation.data].append(evaluation)
    return {
        names: sorted(results, key=lambda evaluation: evaluation.options["seq_len"])
        for names, results in curves.items()
    }


def curve_rows(results: list[Evaluation]) -> dict[str, str]:
    """Return the rows of a table: length -> perplexity, its interval, and the change from the length before."""
    rows, before = {}, None
    for evaluation in results:
        result, (low, high) = evaluation.perplexity, evaluation.intervals.perplexity
        change = "" if before is None else f", {result.loss - before:+.6f} nats per token"
        rows[f"{evaluation.options['seq_len']:,} tokens"] = (
            f"{result.perplexity:.4f} ({LEVEL:.0%} interval {low:.4f} to {high:.4f}){change}"
        )
        before = result.loss
    first = results[0].perplexity
    documents = first.documents - first.unscored_documents
    rows["scored"] = f"the last {first.tokens // documents:,} tokens of {documents:,} documents"
    if first.unscored_documents:
        rows["left out"] = f"{first.unscored_documents:,} shorter documents"
    return rows


def draw_curves(curves: Curves, path: Path) -> bool:
    """Draw perplexity against length of context; False where matplotlib is not installed (`pip install dsft[demo]`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # without a screen, and whatever backend the user has
    axes = figure.subplots()
    for (model, data), results in curves.items():
        lengths = [evaluation.options["seq_len"] for evaluation in results]
        values = [evaluation.perplexity.perplexity for evaluation in results]
        bounds = [evaluation.intervals.perplexity for evaluation in results]
        line = axes.plot(lengths, values, "o-", label=f"{Path(model).name}, {Path(data).name}")[0]
        if not any(math.isnan(low) for low, _ in bounds):
            axes.fill_between(lengths, *zip(*bounds, strict=True), color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="window, tokens", ylabel="perplexity of the last tokens")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
