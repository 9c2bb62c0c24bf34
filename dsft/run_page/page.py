"""`dsft report`: one HTML file about runs, from run.json and metrics.jsonl. It is self-contained and needs no network.

A run that is running, stopped early or was killed has less of both; the page shows what there is.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy
import pandas
import yaml
from markupsafe import Markup

from dsft.checkpoints.run_folder import METRICS, read_options_of_run, read_run, samples_in
from dsft.errors import UserError
from dsft.perplexity.compare import compare_results, read_evaluations
from dsft.perplexity.results import REPORTS
from dsft.perplexity.sums import in_words
from dsft.runtime.disk import is_held
from dsft.units import in_digits, in_time

PAGE = "report.html"
CHARTS = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "tokens_per_second": "Tokens per second, all ranks",
    "data_wait_seconds": "Seconds of waiting for data, since the line before",
    "peak_gpu_gib": "Peak GPU memory of the fullest rank, GiB",
    "peak_host_gib": "Peak host memory of the fullest rank, GiB",
}
"""Metric -> title of its chart, without those of losses."""
WIDTH = 520
HEIGHT = 250
LEFT = 58
RIGHT = 14
TOP = 12
BOTTOM = 26
NUM_COLOURS = 6
MOST_POINTS = 600  # of a line; more cannot be seen
SMOOTHED = 11  # neighbouring points averaged for the thick line of a noisy metric
UNITS = {1e12: "T", 1e9: "B", 1e6: "M", 1e3: "k"}
Points = list[tuple[float, float]]
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def html_table(frame: pandas.DataFrame) -> Markup:
    # By default pandas would truncate long texts and escape line breaks.
    return Markup(frame.to_html(index=False, border=0, formatters=[str] * frame.shape[1]))


TEMPLATES.filters["table"] = html_table


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    folder: Path
    facts: dict[str, Any]
    """The content of run.json."""
    log: list[dict[str, Any]]
    """The entries of metrics.jsonl; None in place of NaN and infinite values."""

    @property
    def status(self) -> str:
        """The status in run.json, or killed if the run could not write it."""
        status = self.facts.get("status", "running")
        return "killed" if status == "running" and not is_held(self.folder) else status

    def points(self, metric: str) -> Points:
        """Return (tokens seen, value) of each entry with the metric."""
        entries = [entry for entry in self.log if entry.get(metric) is not None]
        return [(entry.get("num_input_tokens_seen", entry["step"]), entry[metric]) for entry in entries]


def read_runs(folders: Iterable[str]) -> list[Run]:
    """Read runs, which are named by their folders. Raises UserError if one is not a run, or cannot be read."""
    runs = []
    for folder in dict.fromkeys(folders):
        path = Path(folder).expanduser()
        read_options_of_run(str(path))  # raises if it is not a run of dsft
        log = read_log(path / METRICS)
        runs.append(Run(name=str(path), folder=path, facts=read_run(str(path)), log=log))
    return runs


def read_log(path: Path) -> list[dict[str, Any]]:
    entries = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a kill may truncate a line
            entries.append(json.loads(line, parse_constant=lambda _: None))
    return entries


def report(*folders: str, out: str | None = None) -> Path:
    """Write the page of runs, by default to the folder of the first one; return its path."""
    runs = read_runs(folders)
    path = Path(out).expanduser() if out else runs[0].folder / PAGE
    html = TEMPLATES.get_template("page.html.jinja").render(
        title=" · ".join(run.name for run in runs),
        headline=headline(runs),
        perplexities=perplexities(runs),
        charts=charts(runs),
        tables=tables(runs),
        folded=folded(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def headline(runs: list[Run]) -> pandas.DataFrame:
    """Return the table at the top: a column for each run."""
    frame = pandas.DataFrame({run.name: run_summary(run) for run in runs})
    has_text = (frame != "").any(axis=1)
    return frame[has_text].reset_index(names="")


def run_summary(run: Run) -> dict[str, str]:
    facts = run.facts
    plan = facts.get("plan") or {}
    results = facts.get("results") or {}
    newest = {}
    for entry in run.log:
        newest |= entry
    interval = [newest.get("eval_perplexity_low"), newest.get("eval_perplexity_high")]
    return {
        "status": "\n".join(filter(None, [run.status, facts.get("error")])),
        "model": f"{facts['config']['model']}, {facts['config'].get('method', '')}",
        "held-out perplexity": first_and_last(run.points("eval_perplexity")) or "not measured",
        "its interval": "" if None in interval else in_words(interval),
        "training loss": first_and_last(run.points("loss")),
        "optimizer steps": f"{newest.get('step', 0):,}",
        "tokens seen": f"{newest.get('num_input_tokens_seen', 0):,}",
        "tokens per second": in_digits(newest.get("train_tokens_per_second", 0.0)),
        "time": in_time(newest.get("train_runtime", 0)),
        "machine": facts.get("machine", ""),
        "plan": plan.get("reason", ""),
        "started": facts.get("created", ""),
        "warnings": "\n".join(results.get("warnings", [])),
    }


def first_and_last(points: Points) -> str:
    ends = dict.fromkeys(points[:1] + points[-1:])
    return " → ".join(in_digits(value) for _, value in ends)


def perplexities(runs: list[Run]) -> dict[str, pandas.DataFrame]:
    """Return a table for each folder with results of several models, in a run's folder or beside it."""
    folders = set()
    for run in runs:
        for place in (run.folder, run.folder.parent):
            folders.update(file.parent for file in place.glob(f"*/{REPORTS}"))
    tables = {}
    for folder in sorted(folders):
        try:
            comparisons = compare_results(read_evaluations([str(folder)]))
        except UserError:  # of one model, or of different texts
            continue
        tables[f"Perplexity: {folder}"] = pandas.DataFrame([each.row() for each in comparisons])
        examples = pandas.DataFrame(
            comparisons.examples(), columns=["model", "data", "document that", "number", "text"]
        )
        if not examples.empty:
            tables[f"Documents that changed most: {folder}"] = examples
    return tables


def tables(runs: list[Run]) -> dict[str, pandas.DataFrame]:
    """Return the other tables by title; those without rows are left out."""
    configs = pandas.DataFrame({run.name: run.facts["config"] for run in runs})
    configs = configs.fillna("").astype(str)
    is_differing = configs.nunique(axis=1) > 1
    tables = {"What differs between the runs": configs[is_differing].reset_index(names="")}
    for run in runs:
        samples = []
        for entry in run.log:
            samples += [(f"{entry['step']:,}", *sample) for sample in samples_in(entry)]
        tables[f"Samples of {run.name}"] = pandas.DataFrame(samples, columns=["step", "prompt", "answer"])
        data = run.facts.get("data") or {}
        counts = [(name.replace("_", " "), data[name]) for name in data if data[name]]
        tables[f"Training data of {run.name}"] = pandas.DataFrame(counts, columns=["", "number"], dtype=object)
    return {title: frame for title, frame in tables.items() if not frame.empty}


def folded(runs: list[Run]) -> dict[str, str]:
    """Return the texts that a click unfolds: these sections of each run's run.json."""
    texts = {}
    for run in runs:
        for section in ("config", "decisions", "deepspeed", "versions"):
            content = run.facts.get(section)
            text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
            texts[f"{section.capitalize()} of {run.name}"] = text
    return texts


def charts(runs: list[Run]) -> list[dict[str, Any]]:
    """Return title, SVG and legend of each chart for which the runs have values."""
    logged = dict.fromkeys(name for run in runs for entry in run.log for name in entry)
    titles = {"Loss, nats per token": {"loss": "training", "eval_loss": "held out"}}
    titles["Loss of each held-out set"] = {name: name for name in logged if re.fullmatch("eval_.+_loss", name)}
    titles |= {title: {metric: ""} for metric, title in CHARTS.items()}
    charts = []
    for title, metrics in titles.items():
        curves = curves_of(runs, metrics)
        if curves:
            legend = [(curve.name, curve.colour) for curve in curves if curve.name]
            charts.append({"title": title, "svg": draw(curves), "legend": legend})
    return charts


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    points: Points
    colour: int
    has_dots: bool = False
    """For few points: each has a dot with its values. Other curves are thin and pale, below the mean of neighbours."""


def curves_of(runs: list[Run], metrics: dict[str, str]) -> list[Curve]:
    """Return a curve for each run and each of its metrics among `metrics`, named by the metric's word."""
    curves = []
    for run in runs:
        for metric, word in metrics.items():
            points = run.points(metric)
            if points:
                curve = Curve(
                    name=f"{run.name} {word}".strip() if len(runs) > 1 else word,
                    points=points,
                    colour=len(curves) % NUM_COLOURS,
                    has_dots=metric.startswith("eval_"),
                )
                curves.append(curve)
    return curves


def draw(curves: list[Curve]) -> Markup:
    """Return the SVG of some curves; at least one must have a point."""
    points = numpy.concatenate([curve.points for curve in curves])
    first, low = points.min(axis=0)
    last, high = points.max(axis=0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0

    def across(x):
        return numpy.interp(x, [first, last], [LEFT, WIDTH - RIGHT])

    def up(y):
        return numpy.interp(y, [low - margin, high + margin], [HEIGHT - BOTTOM, TOP])

    lines = []
    dots = []
    for curve in curves:
        every = math.ceil(len(curve.points) / MOST_POINTS)
        xs, ys = numpy.transpose(curve.points[::every])
        if not curve.has_dots and len(ys) > SMOOTHED:
            places = zip(across(xs), up(ys), strict=True)
            lines.append((curve.colour, "1;opacity:.35", places))
            ys = pandas.Series(ys).rolling(SMOOTHED, center=True, min_periods=1).mean()
        places = zip(across(xs), up(ys), strict=True)
        lines.append((curve.colour, "2", places))
        if curve.has_dots:
            for x, y in curve.points:
                text = f"{curve.name}: {in_digits(y)} at {x:,.0f} tokens"
                dots.append((curve.colour, across(x), up(y), text))
    svg = TEMPLATES.get_template("chart.svg.jinja").render(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        rows=[(up(value), short(value)) for value in round_numbers(low, high)],
        columns=[(across(value), short(value)) for value in round_numbers(first, last)],
        lines=lines,
        dots=dots,
    )
    return Markup(svg)


def short(value: float) -> str:
    """Format a number of an axis: 1.5M, 20k, 0.003, 2e-05."""
    for unit, letter in UNITS.items():
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:.6g}"


def round_numbers(low: float, high: float) -> list[float]:
    """Return about five numbers from low to high, multiples of a step with one digit."""
    if low == high:
        return [low]
    step = float(f"{(high - low) / 4:.0e}")
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [step * number for number in range(first, last + 1)]
