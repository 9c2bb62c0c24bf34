"""A report's page: its tables and texts, and the file that holds them with the charts, which are PNGs beside it too.

The page loads nothing: it holds Vega-Lite (about 0.9 MB) as vl-convert bundles it. vl-convert also draws the PNGs,
without a browser.
"""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dsft.checkpoints.run_folder import WEIGHTS_ONLY, samples_in
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.perplexity.sums import exp, in_words
from dsft.report.charts import COLOURS, ON_PAGE, SMOOTHED, charts
from dsft.report.runs import Report, Run
from dsft.units import GiB, describe_value, in_digits

SHOWN_DOCUMENTS = 5
SHOWN_SAMPLES = 6  # answers to a prompt, evenly spread over a run's evaluations
STATUS = {
    "stopped": "stopped by an error",
    "preempted": "preempted: saved and exited on request",
    "killed": "killed before it could record its exit",
}
"""Where it says more than the word that a run has written: done, failed, running."""
COUNTS = {
    "left_out_by_map_row": "rows left out by map_row",
    "weighted_tokens": "trained tokens of weights other than 1",
    "dropped_long": "dropped: too long",
    "dropped_untrained": "dropped: nothing to train",
    "dropped_empty": "dropped: empty",
    "dropped_bad": "dropped: unreadable",
    "rendered_apart": "answers in sequences of their own",
    "unrendered": "chats not rendered whole",
    "empty_thinking": "chats with untrained empty thinking",
    "fill_rate": "share of packed rows that is filled",
    "passes": "epochs of each source",
}
"""Counts of run.json -> their words, where these are not the name itself."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under a title; the first cell of a row is its name."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    is_by_run: bool = False  # a column for each run, or model: where the page is narrow, cells stand below each other


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Text that is opened and closed by a click; print shows what is open."""

    title: str
    text: str
    is_open: bool = False


def write_report(report: Report, out: Path) -> list[Path]:
    """Write the page, and the PNGs into a folder named like it; returns their paths, the page first."""
    try:
        import vl_convert
    except ImportError as error:
        raise UserError(
            f"dsft report: the package {error.name} is not installed; pip install vl-convert-python, or dsft[report]"
        ) from None
    if not out.suffix:
        raise UserError(f"--out {out}: needs an ending, such as {out}.html; its charts go to the folder {out}")
    folder = out.with_suffix("")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        html = page_html(report, bundle=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed"))
        out.write_text(html, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        pictures = []
        for chart in charts(report, COLOURS):
            spec = chart.spec | {"width": 640, "background": COLOURS["paper"], "title": chart.title}
            pictures.append(folder / f"{chart.name}.png")
            pictures[-1].write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    return [out, *pictures]


def page_html(report: Report, *, bundle: str) -> str:
    """Return the page; `bundle` is the JavaScript that sets window.vegaEmbed."""
    import jinja2

    on_page = charts(report, ON_PAGE)
    text = resources.files("dsft.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text).render(
        title=" · ".join(run.name for run in report.runs),
        headline=headline(report),
        charts=on_page,
        tables=tables(report),
        folded=folded(report),
        colours=COLOURS,
        smoothed=SMOOTHED,
        # Inside a script element "</script>" in a run's name would end it.
        specs=json.dumps({chart.name: chart.spec for chart in on_page}).replace("<", "\\u003c"),
        bundle=bundle,
    )


def headline(report: Report) -> Table:
    """Make the table at the top: a column for each run."""
    columns = []
    for run in report.runs:
        facts, results, losses = run.facts, run.results, run.values("loss")
        status = STATUS.get(run.status, run.status)
        evaluated = [entry for entry in run.log if "eval_perplexity" in entry]
        perplexity = _with_interval(evaluated[-1]) if evaluated else "not measured"
        if len(evaluated) > 1:
            perplexity = f"{in_digits(evaluated[0]['eval_perplexity'])} → {perplexity}"
        stalls = {name: value for name, value in run.seconds.items() if name != "training"}
        hours, rest = divmod(round(run.total_seconds), 3600)
        time = f"{hours}:{rest // 60:02}:{rest % 60:02} h" if hours else f"{rest // 60}:{rest % 60:02} min"
        shown = {
            name: f"{in_digits(values[-1])} {how['unit']}".strip() if (values := run.values(metric)) else ""
            for metric, how in report.metrics.items()
            if (name := how["row"])
        }
        column = {
            "status": f"{status}\n{facts['error']}" if facts.get("error") else status,
            "model": f"{facts['config']['model']}, {facts['config']['method']}",
            "held-out perplexity": perplexity,
            "training loss": f"{in_digits(losses[0])} → {in_digits(losses[-1])}" if losses else "",
            "optimizer steps": _count(run.log[-1]["step"] if run.log else None),
            "tokens seen": _count(max(run.values("num_input_tokens_seen"), default=None)),
            **shown,
            "time": time if run.total_seconds else "",
            "stalls": ", ".join(f"{name} {value:,.1f} s" for name, value in stalls.items() if value),
            "machine": facts.get("machine", ""),
            "started": facts.get("created", "").replace("T", " ").replace("+00:00", " UTC"),
            "final model": results.get("final_model", ""),
            "warnings": "\n".join(results.get("warnings", [])),
        }
        columns.append(column)
    return _table("", report.runs, {name: [column[name] for column in columns] for name in columns[0]})


def tables(report: Report) -> list[Table]:
    """Make the other tables; those without a row are left out."""
    runs, made = report.runs, []

    def add(title: str, header: list[str], cells: list[list[str]], **more: Any) -> None:
        made.append(Table(title=title, header=["", *header], rows=cells, **more))

    configs = [run.facts["config"] for run in runs]
    rows = {name: [_short(config.get(name)) for config in configs] for name in sorted(set().union(*configs))}
    changed = {name: cells for name, cells in rows.items() if len(set(cells)) > 1}
    made.append(_table("What differs between the runs", runs, changed))

    # Each source of what was trained: its loss in the first and the last line, and its trained tokens.
    rows = {}
    for part, metric in report.parts("source").items():
        rows[part] = []
        for run in runs:
            losses, of_lines = run.values(metric), run.values(metric.removesuffix("loss") + "tokens")
            # The last steps before a stop or a kill have no line of the log; the end has their sums too.
            tokens = run.results.get("sources", {}).get(part, {}).get("trained_tokens") or int(sum(of_lines))
            cell = f"loss {in_digits(losses[0])} → {in_digits(losses[-1])}, {tokens:,} tokens" if losses else ""
            rows[part].append(cell)
    made.append(_table("Sources of the training", runs, rows))

    # Each held-out set.
    rows = {}
    for part, metric in report.parts("eval").items():
        name = metric.removesuffix("loss") + "perplexity"
        evaluated = [[entry for entry in run.log if name in entry] for run in runs]
        rows[part] = [
            f"{in_digits(of_run[0][name])} → {_with_interval(of_run[-1], name)}" if of_run else ""
            for of_run in evaluated
        ]
    made.append(_table("Held-out perplexity by set", runs, rows, note="macro: exp of the mean of the sets' losses."))

    cells = []
    for run in runs:
        for saved in run.checkpoints:
            held_out = _with_interval(saved.evaluation) if saved.evaluation else ""
            name = f"{run.name}/{saved.name}" if len(runs) > 1 else saved.name
            cells.append([name, _count(saved.step), _count(saved.tokens_seen), held_out])
    add("Checkpoints", ["step", "tokens seen", "held-out perplexity"], cells)

    cells = []
    for item in report.evaluations:
        facts, texts = item.report, {"perplexity": "", "bits_per_byte": ""}
        for name in filter(facts.get, texts):
            bounds = facts.get("interval", {}).get(name)
            known = f", {in_words(bounds)}" if bounds and None not in bounds else ""
            texts[name] = f"{facts[name]:,.4f}{known}"
        tokens = f"{facts['tokens']:,} of {facts['documents']:,} documents"
        cells.append([item.title, facts["data"], facts.get("protocol") or facts["mode"], *texts.values(), tokens])
    header = ["data", "mode", "perplexity", "bits per byte", "tokens"]
    add("Perplexity, measured by dsft eval", header, cells)

    names = list(dict.fromkeys(name for row in report.answers for name in row))
    cells = [[row.get(name, "") for name in names] for row in report.answers]
    add("Sample answers", names[1:], cells, is_by_run=True)

    cells = []
    for run in runs:
        sampled = [(entry["step"], samples) for entry in run.log if (samples := samples_in(entry))]
        last, parts = len(sampled) - 1, SHOWN_SAMPLES - 1
        shown = [sampled[index] for index in sorted({last * part // parts for part in range(parts + 1)}) if sampled]
        for number in range(max((len(samples) for _, samples in shown), default=0)):
            for step, samples in shown:
                for prompt, answer in samples[number : number + 1]:  # a resume may have fewer
                    cells.append([f"{run.name}: {prompt}" if len(runs) > 1 else prompt, _count(step), answer])
    add("Samples while training", ["step", "answer"], cells)

    # The documents with the most and the fewest nats per token, of each evaluation.
    for item in report.evaluations:
        count, cells = min(SHOWN_DOCUMENTS, len(item.documents) // 2), []
        for end, documents in (("worst", item.documents[::-1][:count]), ("best", item.documents[:count])):
            for row in documents:
                loss = row["nats"] / row["tokens"]
                cells.append([end, f"{row['document']:,}", f"{row['tokens']:,}", f"{loss:.4f}", in_digits(exp(loss))])
        note = f"{item.report['data']}, {item.title}. Documents are counted from 0, as in documents.parquet."
        add("Worst and best documents", ["document", "tokens", "nats per token", "perplexity"], cells, note=note)

    for key, option, title in (("data", "data", "Training data"), ("held_out", "eval_data", "Held-out data")):
        counts = [run.facts.get(key) or {} for run in runs]
        if any(counts):
            rows = {"from": [_short(config.get(option)) for config in configs]}
            for name in dict.fromkeys(name for count in counts for name in count):
                cells = [describe_value(count[name]) if count.get(name) else "" for count in counts]
                rows[COUNTS.get(name, name.replace("_", " "))] = cells
            made.append(_table(title, runs, rows))

    # Predictions beside what was measured.
    rows = {"chosen": [(run.facts.get("plan") or {}).get("reason", "") for run in runs]}
    checks = [run.results.get("plan_check", {}) for run in runs]
    pairs = dict.fromkeys((when, name) for each in checks for when in each for name in each[when])
    for when, name in pairs:
        scale, unit = (1, "s") if name.startswith("time") else (GiB, "GiB")
        rows[f"{name}, {when}"] = [
            f"predicted {check['predicted'] / scale:.3g} {unit}, measured {check['measured'] / scale:.3g} {unit}"
            f" ({check['error']:+.0%})"
            if (check := each.get(when, {}).get(name))
            else ""
            for each in checks
        ]
    made.append(_table("The plan", runs, rows))

    versions = [run.facts.get("versions") or {} for run in runs]
    names = dict.fromkeys(name for known in versions for name in known)
    rows = {name: [known.get(name) or "" for known in versions] for name in names}
    rows["dsft's commit"] = [(run.facts.get("git_commit") or "")[:12] for run in runs]
    made.append(_table("Versions", runs, rows))
    return [table for table in made if table.rows]


def folded(report: Report) -> list[Folded]:
    """Make the texts about each run: how to run it again, its whole configuration, DeepSpeed's."""
    defaults, texts = vars(TrainConfig()), []
    for run in report.runs:
        name = f" · {run.name}" if len(report.runs) > 1 else ""
        config, plan, decisions = run.facts["config"], run.facts.get("plan") or {}, run.facts.get("decisions", [])
        # The options that are not the defaults, as a file, and the command that takes it. Of a checkpoint's weights
        # alone: the model or adapter that they are.
        decided = (item["name"] for item in decisions if item["reason"] != WEIGHTS_ONLY)
        left_out = {"overwrite", "resume_from_checkpoint", WEIGHTS_ONLY, *decided}
        given = {key: value for key, value in config.items() if key not in left_out and defaults.get(key, ...) != value}
        world, per_node = run.facts.get("world_size", 1), plan.get("ranks_per_node", 1)
        start = "dsft train" if world == per_node else "dsft launch train --hostfile HOSTS"
        command = (
            f"# run.yaml; relative paths start where the training was started\n{_yaml(given)}\n# {world} ranks\n"
            f"{start} --config run.yaml --num_gpus {per_node} --output_dir NEW"
        )
        texts.append(Folded(title=f"The command to reproduce{name}", text=command, is_open=True))
        if decisions:
            lines = [f"{item['name']}: {item['value']}   ({item['reason']})" for item in decisions]
            texts.append(Folded(title=f"Decided by dsft{name}", text="\n".join(lines)))
        texts.append(Folded(title=f"All options{name}", text=_yaml(config)))
        texts.append(Folded(title=f"DeepSpeed's configuration{name}", text=_yaml(run.facts.get("deepspeed", {}))))
    return texts


def _table(title: str, runs: list[Run], rows: dict[str, list[str]], note: str = "") -> Table:
    """A column for each run; rows of empty cells are left out."""
    kept = [[name, *cells] for name, cells in rows.items() if any(cells)]
    header = ["", *(run.name for run in runs)]
    return Table(title=title, header=header, rows=kept, note=note, is_by_run=True)


def _with_interval(entry: dict[str, float], name: str = "eval_perplexity") -> str:
    bounds = [entry.get(f"{name}_{end}") for end in ("low", "high")]
    return in_digits(entry[name]) + (f", {in_words(bounds)}" if None not in bounds else "")


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(_whole(values), sort_keys=False, allow_unicode=True, width=100)


def _short(value: Any) -> str:
    value = _whole(value)
    if isinstance(value, dict):
        value = [f"{name}: {each}" for name, each in value.items()]
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _whole(value: Any) -> Any:
    """Write whole numbers without .0, which transformers' fields of counts or shares have: eval_steps 400.0."""
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
