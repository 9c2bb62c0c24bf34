"""Draws a report's charts as Vega-Lite specifications: plain data, which vl-convert and vega-embed render.

A chart's colour is the run, everywhere. Colours are names of the palette: CSS variables in the page, so that light,
dark and print need no second drawing, and plain colours in PNGs.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsft.planner.zero_layout import FULL_TRAINING, OVERHEAD
from dsft.report.runs import Report, Run
from dsft.units import GiB

COLOURS = {
    "ink": "#1f2933",
    "muted": "#5f6b7a",
    "grid": "#e4e7eb",
    "paper": "#ffffff",
    "series-1": "#2563a8",
    "series-2": "#c2571a",
    "series-3": "#2e7d4f",
    "series-4": "#8446a6",
    "series-5": "#b0891b",
    "series-6": "#5f6b7a",
}
"""The light palette, by the names of the page's CSS variables."""
ON_PAGE = {name: f"var(--{name})" for name in COLOURS}
MOST_PARTS = 4
"""Components shown by name; the smaller ones of a bar are added up."""
OTHERS = "other components"
MEASURED = {"measured": "muted", "held between steps": "muted", "added by a step": "ink"}
"""Parts of the measured bar -> their colours: the sum alone, or what a GPU's allocator can distinguish."""
BELOW = {"title": None, "orient": "bottom"}
ZERO = "datum.value == 0 ? '0' : datum.label"
"""A label for 0 without the prefix of its neighbours, 0k."""
MOST_POINTS = 1_500
"""A line of more points is thinned; nobody sees the others."""

Palette = dict[str, str]
Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of the page."""

    name: str
    """Of its PNG."""
    title: str
    caption: str
    spec: Spec


def charts(report: Report, palette: Palette) -> list[Chart]:
    """Draw every chart that the runs have data for."""
    drawn = {
        name: shown
        for name, shown in report.metrics.items()
        if shown["chart"] and not any(run.values(shown["unless"]) for run in report.runs)
    }
    made = (
        _loss(report, palette),
        _perplexity(report, palette),
        *(_line(report, palette, name, shown) for name, shown in drawn.items()),
        _bars(report, palette, memory_parts, "memory", "Memory, planned against measured", "GiB"),
        _bars(report, palette, time_parts, "time", "Where the time went", "minutes"),
    )
    return [chart for chart in made if chart]


def _loss(report: Report, palette: Palette) -> Chart | None:
    trained = _points(report.runs, "loss", "value")
    held_out = _points(report.runs, "eval_loss", "value")
    if not trained + held_out:
        return None
    layers = [
        {"data": {"values": trained}, "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.75}, **_tips("loss")},
        {"data": {"values": held_out}, "mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5}},
        {"data": {"values": held_out}, "mark": {"type": "point", "filled": True, "size": 45}, **_tips("held-out loss")},
    ]
    spec = _over_tokens(report, palette, layers, y="loss, nats per token")
    caption = "Line: training. Dashes and points: held out." if held_out else "Training; nothing was held out."
    return Chart(name="loss", title="Loss", caption=caption, spec=spec)


def _perplexity(report: Report, palette: Palette) -> Chart | None:
    """Held-out perplexity as training logged it, and results of dsft eval; both with their intervals."""
    bounds = {"eval_perplexity_low": "low", "eval_perplexity_high": "high"}
    logged = _points(report.runs, "eval_perplexity", "value", **bounds)
    measured = [
        {"run": item.run, "tokens": item.tokens_seen, "model": item.model, "data": item.report["data"]}
        | {"value": item.report["perplexity"]}
        # A single document has no interval.
        | {
            name: bound
            for name, bound in zip(("low", "high"), item.report.get("interval", {}).get("perplexity", ()), strict=False)
            if bound is not None
        }
        for item in report.evaluations
        if item.tokens_seen is not None
    ]
    values = [point["value"] for point in logged + measured]
    if not values:
        return None
    interval = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
    tips = _tips("perplexity", "low", "high", "model", "data")
    layers = [
        {"data": {"values": logged}, "mark": {"type": "area", "opacity": 0.15}, "encoding": interval},
        {"data": {"values": logged}, "mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5}},
        {"data": {"values": logged}, "mark": {"type": "point", "filled": True, "size": 45}, **_tips("perplexity")},
        {"data": {"values": measured}, "mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": interval},
        {"data": {"values": measured}, "mark": {"type": "square", "filled": True, "size": 60, "opacity": 1}, **tips},
    ]
    is_wide_range = max(values) > 20 * min(values)
    scale = {"type": "log" if is_wide_range else "linear", "zero": False}
    title = "perplexity (log scale)" if is_wide_range else "perplexity"
    spec = _over_tokens(report, palette, layers, y=title, number=",~r", scale=scale)
    caption = "Points: held out, as training measured it, with 95 % interval."
    if measured:
        caption += " Squares: dsft eval, on the data that the table below names."
    return Chart(name="perplexity", title="Perplexity", caption=caption, spec=spec)


def _line(report: Report, palette: Palette, metric: str, shown: dict[str, Any]) -> Chart | None:
    points = _points(report.runs, metric, "value")
    if not points:
        return None
    layers = [{"data": {"values": points}, "mark": {"type": "line", "strokeWidth": 1.5}, **_tips(shown["axis"])}]
    scale = {"zero": shown["from_zero"]}
    spec = _over_tokens(report, palette, layers, y=shown["axis"], number=shown["number"], scale=scale)
    return Chart(name=metric, title=shown["chart"], caption="", spec=spec)


Parts = Callable[[Run], list[dict[str, Any]]]


def _bars(report: Report, palette: Palette, parts_of: Parts, name: str, title: str, x: str) -> Chart | None:
    """Draw one stacked bar for each of `bar`, a segment for each `part` in the order of the data."""
    many = len(report.runs) > 1
    rows = [
        row | {"bar": ": ".join(filter(None, (run.name if many or not row["bar"] else "", row["bar"])))}
        for run in report.runs
        for row in parts_of(run)
    ]
    if not rows:
        return None
    rows = largest_parts(rows)
    parts = list(dict.fromkeys(row["part"] for row in rows))
    rows = [row | {"order": parts.index(row["part"])} for row in rows]
    planned = [part for part in parts if part not in MEASURED]
    names = MEASURED | {part: f"series-{index % 5 + 1}" for index, part in enumerate(planned)}
    encoding = {
        "y": {
            "field": "bar",
            "type": "nominal",
            "sort": None,
            "title": None,
            "axis": {"grid": False, "labelLimit": 170, "ticks": False, "domain": False},
        },
        "x": {"field": "value", "type": "quantitative", "title": x, "stack": "zero", "axis": {"tickCount": 5}},
        "color": {
            "field": "part",
            "type": "nominal",
            "sort": None,
            "scale": {"domain": parts, "range": [palette[names[part]] for part in parts]},
            "legend": BELOW | {"columns": 2, "labelFontSize": 11, "columnPadding": 6},
        },
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": [
            {"field": "part"},
            {"field": "value", "title": x, "format": ".3~f"},
            {"field": "detail", "title": "from"},
        ],
    }
    spec = _base(palette) | {
        "height": 30 * len({row["bar"] for row in rows}),
        "data": {"values": rows},
        "mark": {"type": "bar", "height": 20},
        "encoding": encoding,
    }
    captions = {
        "memory": "The plan's components at their peak, beside what was measured: on CPU ranks the sum alone, on GPUs"
        " also what a step adds. Components cannot be measured apart.",
        "time": "Since training was last started, without loading.",
    }
    return Chart(name=name, title=title, caption=captions[name], spec=spec)


def memory_parts(run: Run) -> list[dict[str, Any]]:
    """Return segments of bars, in GiB: the planned components that are alive at the peak, and what was measured.

    On GPUs that is what torch allocates on the fullest, split into what is held between steps and what a step adds; on
    CPU ranks the host memory of a node.
    """
    plan = run.facts.get("plan")
    if not plan:
        return []
    checks = run.results.get("plan_check", {})
    checked = checks.get(FULL_TRAINING) or next(iter(checks.values()), {})
    if plan["has_gpu"]:
        planned = {term["name"]: (term["num_bytes"], term["formula"]) for term in _peak_terms(plan, "device")}
        planned.pop(OVERHEAD, None)  # which torch does not allocate
    else:
        ranks = plan["ranks_per_node"]
        planned = {
            term["name"]: (ranks * term["num_bytes"], f"{ranks} ranks x ({term['formula']})")
            for term in _peak_terms(plan, "device")
        }
        planned |= {term["name"]: (term["num_bytes"], term["formula"]) for term in _peak_terms(plan, "host")}
    measured: dict[str, tuple[float, str]] = {}
    name, held_name = "GPU memory allocated" if plan["has_gpu"] else "host memory of a node", "GPU memory between steps"
    if name in checked:
        peak = checked[name]["measured"]
        measured = {"measured": (peak, name)}
        if held_name in checked:
            held = checked[held_name]["measured"]
            measured = {"held between steps": (held, held_name), "added by a step": (peak - held, f"{name}, less that")}
    return [
        {"bar": bar, "part": part, "value": num_bytes / GiB, "detail": detail}
        for bar, parts in (("planned", planned), ("measured", measured))
        for part, (num_bytes, detail) in parts.items()
    ]


def _peak_terms(plan: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """As planner/zero_layout.py: what is always there, with the larger of a micro batch and the optimizer's step."""
    terms = [term for term in plan["terms"] if term["place"] == place]
    by_phase = {phase: [term for term in terms if term["phase"] == phase] for phase in ("always", "compute", "step")}
    peak = max(by_phase["compute"], by_phase["step"], key=lambda terms: sum(term["num_bytes"] for term in terms))
    return by_phase["always"] + peak


def largest_parts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the largest components of all bars by name, largest first, and add up the smaller ones of each bar."""
    sizes: Counter[str] = Counter()
    for row in rows:
        if row["part"] not in MEASURED:
            sizes[row["part"]] = max(sizes[row["part"]], row["value"])
    named = [part for part, _ in sizes.most_common(MOST_PARTS)]
    others: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["part"] not in (*named, *MEASURED):
            other = others.setdefault(
                row["bar"], {"bar": row["bar"], "part": OTHERS, "value": 0.0, "detail": "smaller"}
            )
            other["value"] += row["value"]
    ranked = sorted((row for row in rows if row["part"] in named), key=lambda row: named.index(row["part"]))
    measured = [row for row in rows if row["part"] in MEASURED]
    order = list(dict.fromkeys(row["bar"] for row in rows))
    return sorted([*ranked, *others.values(), *measured], key=lambda row: order.index(row["bar"]))


def time_parts(run: Run) -> list[dict[str, Any]]:
    """Return the segments of one bar, in minutes; none before anything was timed."""
    attempt = run.last_attempt()
    evaluating = sum(entry.get("eval_runtime", 0.0) for entry in attempt)
    timed = [entry["train_runtime"] for entry in attempt if "train_runtime" in entry]
    seconds = run.results.get("seconds") or (timed[-1] if timed else None)
    if not seconds:
        return []
    saving = run.results.get("saves", {}).get("seconds", 0.0)
    waiting = sum(entry.get("data_wait_seconds", 0.0) for entry in attempt)
    training = max(seconds - evaluating - saving - waiting, 0.0)
    parts = {"training": training, "waiting for data": waiting, "evaluation": evaluating, "saving": saving}
    return [
        {"bar": "", "part": part, "value": value / 60, "detail": f"{value:,.0f} s"}
        for part, value in parts.items()
        if value
    ]


def _over_tokens(
    report: Report, palette: Palette, layers: list[Spec], *, y: str, number: str = "~g", scale: Spec | None = None
) -> Spec:
    """Put layers over the tokens seen, with a colour for each run and a legend where there are several."""
    names = [run.name for run in report.runs]
    series = [palette[f"series-{index % 6 + 1}"] for index in range(len(names))]
    legend = BELOW | {"columns": 3} if len(names) > 1 else None
    return _base(palette) | {
        "height": 220,
        "encoding": {
            "x": {
                "field": "tokens",
                "type": "quantitative",
                "title": "tokens seen",
                "axis": {"format": "~s", "labelExpr": ZERO, "grid": False, "tickCount": 5},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "title": y,
                "scale": scale or {"zero": False},
                "axis": {"format": number, "labelExpr": ZERO, "tickCount": 5},
            },
            "color": {
                "field": "run",
                "type": "nominal",
                "scale": {"domain": names, "range": series},
                "legend": legend,
            },
        },
        "layer": [layer for layer in layers if layer["data"]["values"]],
    }


def _tips(title: str, *more: str) -> Spec:
    fields = [
        {"field": "run"},
        {"field": "step", "format": ","},
        {"field": "tokens", "title": "tokens seen", "format": ","},
        {"field": "value", "title": title, "format": ".5~g"},
        *({"field": name} for name in more),
    ]
    return {"encoding": {"tooltip": [field for field in fields if field["field"] != "step" or not more]}}


def _points(runs: list[Run], metric: str, field: str, **more: str) -> list[dict[str, Any]]:
    """Return a point for each log entry with a metric: run, step, tokens, and the metric as `field`."""
    points = []
    for run in runs:
        entries = [entry for entry in run.log if entry.get(metric) is not None]
        every = -(-len(entries) // MOST_POINTS)
        kept = [entry for index, entry in enumerate(entries) if index % max(every, 1) == 0 or entry is entries[-1]]
        for entry in kept:
            fields = {metric: field} | more
            tokens = entry.get("num_input_tokens_seen", entry["step"])
            values = {name: entry[key] for key, name in fields.items() if key in entry}
            points.append({"run": run.name, "step": entry["step"], "tokens": tokens} | values)
    return points


def _base(palette: Palette) -> Spec:
    text = {"labelColor": palette["muted"], "titleColor": palette["ink"], "labelFontSize": 12, "titleFontSize": 12}
    lines = {"gridColor": palette["grid"], "domainColor": palette["grid"], "tickColor": palette["grid"]}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "background": None,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": {
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": text | lines | {"titleFontWeight": "normal", "titlePadding": 8},
            "legend": {"labelColor": palette["ink"], "labelFontSize": 12, "symbolOpacity": 1},
            "title": {"anchor": "start", "color": palette["ink"], "fontSize": 14, "fontWeight": 600, "offset": 12},
        },
    }
