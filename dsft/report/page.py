"""`dsft report`: one HTML file about runs, from run.json and metrics.jsonl. It loads nothing, and needs no network.

A run that still runs, stopped early or was killed has less of both; the page shows what there is.
"""

import json
import re
from dataclasses import dataclass
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dsft.checkpoints.run_folder import METRICS, read_options_of_run, read_run, samples_in
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.perplexity.sums import in_words
from dsft.report.charts import NUM_COLOURS, Curve, draw
from dsft.runtime.disk import is_held
from dsft.units import in_digits

PAGE = "report.html"
CHARTS = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "tokens_per_second": "Tokens per second, all ranks",
    "data_wait_seconds": "Seconds of waiting for data, since the line before",
    "peak_gpu_gib": "Peak GPU memory of the fullest rank, GiB",
    "peak_host_gib": "Peak host memory of the fullest rank, GiB",
}
"""Metric -> title of its chart, beside those of loss and perplexity."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as it came."""

    name: str
    folder: Path
    facts: dict[str, Any]
    """The content of run.json."""
    log: list[dict[str, Any]]
    """The entries of metrics.jsonl, without what is NaN or infinite."""

    @property
    def status(self) -> str:
        """As the run has written it, or killed if it could not."""
        status = self.facts.get("status", "running")
        return "killed" if status == "running" and not is_held(self.folder) else status

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Tokens seen and value, of each entry that has the metric."""
        entries = [entry for entry in self.log if entry.get(metric) is not None]
        return [(entry.get("num_input_tokens_seen", entry["step"]), entry[metric]) for entry in entries]


def read_runs(folders: list[str]) -> list[Run]:
    """Read runs; they are named by their folders. Raises UserError if one is not a run, or cannot be read."""
    paths = [Path(folder).expanduser() for folder in dict.fromkeys(folders)]
    last_parts = [path.resolve().name for path in paths]
    are_unlike = len(set(last_parts)) == len(paths)
    runs = []
    for path, last_part in zip(paths, last_parts, strict=True):
        read_options_of_run(str(path))  # without them it is not a run of dsft
        log = []
        try:
            text = (path / METRICS).read_text(encoding="utf-8") if (path / METRICS).is_file() else ""
            for line in text.splitlines(keepends=True):
                if line.endswith("\n"):  # a kill may cut off the last one
                    entry = json.loads(line)
                    log.append({key: value for key, value in entry.items() if _is_shown(value)})
        except ValueError as error:
            raise UserError(f"{path}: {METRICS} cannot be read ({error})") from None
        name = last_part if are_unlike else str(path)
        runs.append(Run(name=name, folder=path, facts=read_run(str(path)), log=log))
    return runs


def _is_shown(value: Any) -> bool:
    return isinstance(value, str) or (value is not None and isfinite(value))


def write_report(folders: list[str], out: Path | None = None) -> Path:
    """Write the page, by default into the folder of the first run; returns its path."""
    runs = read_runs(folders)
    out = out or runs[0].folder / PAGE
    template = resources.files("dsft.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    html = environment.from_string(template).render(
        title=" · ".join(run.name for run in runs),
        headline=headline(runs),
        charts=charts(runs),
        tables=tables(runs),
        folded=folded(runs),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    return out


def headline(runs: list[Run]) -> list[list[str]]:
    """Return the rows at the top: a column for each run."""
    columns = []
    for run in runs:
        facts = run.facts
        results = facts.get("results") or {}
        losses = [value for _, value in run.points("loss")]
        evaluated = [entry for entry in run.log if "eval_perplexity" in entry]
        perplexity = "not measured"
        if evaluated:
            perplexity = in_digits(evaluated[-1]["eval_perplexity"])
            bounds = [evaluated[-1].get(f"eval_perplexity_{end}") for end in ("low", "high")]
            if None not in bounds:
                perplexity += f", {in_words(bounds)}"
            if len(evaluated) > 1:
                perplexity = f"{in_digits(evaluated[0]['eval_perplexity'])} → {perplexity}"
        newest = {name: value for entry in run.log for name, value in entry.items()}
        minutes, seconds = divmod(round(newest.get("train_runtime", 0)), 60)
        column = {
            "status": "\n".join(filter(None, [run.status, facts.get("error")])),
            "model": f"{facts['config']['model']}, {facts['config'].get('method', '')}",
            "held-out perplexity": perplexity,
            "training loss": f"{in_digits(losses[0])} → {in_digits(losses[-1])}" if losses else "",
            "optimizer steps": f"{newest['step']:,}" if run.log else "",
            "tokens seen": f"{newest.get('num_input_tokens_seen', 0):,}",
            "tokens per second": in_digits(newest.get("train_tokens_per_second", 0.0)),
            "time": f"{minutes // 60}:{minutes % 60:02}:{seconds:02} h",
            "machine": facts.get("machine", ""),
            "plan": (facts.get("plan") or {}).get("reason", ""),
            "started": facts.get("created", ""),
            "final model": results.get("final_model", ""),
            "warnings": "\n".join(results.get("warnings", [])),
        }
        columns.append(column)
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return [["", *(run.name for run in runs)], *(row for row in rows if any(row[1:]))]


def charts(runs: list[Run]) -> list[dict[str, Any]]:
    """Return title, SVG and legend of each chart that the runs have numbers for."""
    made = []

    def add(title: str, metrics: dict[str, str], *, is_log: bool = False) -> None:
        curves: list[Curve] = []
        for run in runs:
            for metric, kind in metrics.items():
                if points := run.points(metric):
                    name = " ".join(filter(None, [run.name if len(runs) > 1 else "", kind]))
                    is_held_out = metric.startswith("eval_")
                    is_noisy = not is_held_out and metric != "learning_rate"
                    colour = len(curves) % NUM_COLOURS
                    curves.append(
                        Curve(name=name, points=points, colour=colour, is_noisy=is_noisy, has_dots=is_held_out)
                    )
        if curves:
            legend = [(curve.name, curve.colour) for curve in curves if curve.name]
            made.append({"title": title, "svg": draw(curves, is_log=is_log), "legend": legend})

    add("Loss, nats per token", {"loss": "training", "eval_loss": "held out"})
    add("Held-out perplexity", {"eval_perplexity": ""}, is_log=True)
    logged = dict.fromkeys(name for run in runs for entry in run.log for name in entry)
    for kind, title in (("source", "Loss of each source"), ("eval", "Loss of each held-out set")):
        parts = {name: match[1] for name in logged if (match := re.fullmatch(f"{kind}_(.+)_loss", name))}
        add(title, parts)
    for metric, title in CHARTS.items():
        if metric != "peak_host_gib" or "peak_gpu_gib" not in logged:
            add(title, {metric: ""})
    return made


def tables(runs: list[Run]) -> dict[str, list[list[str]]]:
    """Return the other tables by their titles; those without a row are left out."""
    tables: dict[str, list[list[str]]] = {}
    configs = [run.facts["config"] for run in runs]
    for name in sorted(set().union(*configs)):
        cells = [str(config.get(name, "")) for config in configs]
        if len(set(cells)) > 1:
            tables.setdefault("What differs between the runs", []).append([name, *cells])
    for run in runs:
        samples = [(entry["step"], samples_in(entry)) for entry in run.log if samples_in(entry)]
        for step, answers in samples[:1] + samples[1:][-1:]:
            rows = tables.setdefault(f"Samples of {run.name}", [])
            rows += [[f"step {step:,}", prompt, answer] for prompt, answer in answers]
        counts = run.facts.get("data") or {}
        if counts:
            rows = [[name.replace("_", " "), f"{value}"] for name, value in counts.items() if value]
            tables[f"Training data of {run.name}"] = rows
    return tables


def folded(runs: list[Run]) -> dict[str, str]:
    """Return the texts that a click opens: the options, what dsft decided, DeepSpeed's configuration."""
    defaults = vars(TrainConfig())
    texts = {}
    for run in runs:
        config = run.facts["config"]
        given = {key: value for key, value in config.items() if defaults.get(key, ...) != value}
        decisions = [f"{each['name']}: {each['value']}   ({each['reason']})" for each in run.facts.get("decisions", [])]
        texts |= {
            f"Options of {run.name} that are not the defaults": _yaml(given),
            f"What dsft decided for {run.name}": "\n".join(decisions),
            f"DeepSpeed's configuration of {run.name}": _yaml(run.facts.get("deepspeed", {})),
            f"Versions of {run.name}": _yaml(run.facts.get("versions", {})),
        }
    return texts


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
