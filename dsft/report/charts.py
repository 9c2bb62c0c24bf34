"""Draws a report's charts as Vega-Lite specifications: plain data, which vl-convert and vega-embed render.

A chart's colour is the run, everywhere. Colours are names of the palette: CSS variables in the page, so that light,
dark and print need no second drawing, and plain colours in PNGs.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dsft.planner.zero_layout import FULL_TRAINING, OVERHEAD, Term, bytes_by_phase, phases_at_peak
from dsft.report.runs import Report, Run
from dsft.units import GiB

SERIES = ("#2563a8", "#c2571a", "#2e7d4f", "#8446a6", "#b0891b", "#5f6b7a")
COLOURS = {"ink": "#1f2933", "muted": "#5f6b7a", "grid": "#e4e7eb", "paper": "#ffffff"}
COLOURS |= {f"series-{number}": colour for number, colour in enumerate(SERIES, start=1)}
"""The light palette, by the names of the page's CSS variables."""
ON_PAGE = {name: f"var(--{name})" for name in COLOURS}
MOST_PARTS = 4  # components shown by name; the smaller ones of a bar are added up
OTHERS = "other components"
MEASURED = {"measured": "muted", "held between steps": "muted", "added by a step": "ink"}
"""Parts of the measured bar -> their colours: the sum alone, or what a GPU's allocator can distinguish."""
BELOW = {"title": None, "orient": "bottom"}
ZERO = "datum.value == 0 ? '0' : datum.label"  # a label for 0 without the prefix of its neighbours, 0k
MOST_POINTS = 1_500  # a line of more points is thinned; nobody sees the others
SMOOTH = "smooth"  # signal of each chart, which the page's switch sets
SMOOTHED = 11  # neighbouring points of a line, of which the page's switch shows the mean
TIMES = {"hours": 3600, "minutes": 60, "seconds": 1}
FEWEST = 5  # of a unit of time, for an axis in it
MEMORY = (
    "The plan's components at their peak, beside what was measured: on CPU ranks the sum alone, on GPUs also what a"
    " step adds. Components cannot be measured apart."
)
TIMED = "Since training was last started, without loading."
LINE = {"type": "line", "strokeWidth": 1.5}
DASHES = LINE | {"strokeDash": [4, 3]}
POINTS = {"type": "point", "filled": True, "size": 45}
SQUARES = {"type": "square", "filled": True, "size": 60, "opacity": 1}

Palette = dict[str, str]
Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of the page."""

    name: str  # of its PNG
    title: str
    caption: str
    spec: Spec


def charts(report: Report, palette: Palette) -> list[Chart]:
    """Draw every chart that the runs have data for."""
    runs = report.runs
    held_out = _points(runs, "eval_loss")
    losses = [
        _layer(_points(runs, "loss"), LINE | {"opacity": 0.75}, "loss", is_noisy=True),
        _layer(held_out, DASHES),
        _layer(held_out, POINTS, "held-out loss"),
    ]
    caption = "Line: training. Dashes and points: held out." if held_out else "Training; nothing was held out."
    made = [
        _over_tokens(report, palette, "loss", "Loss", losses, y="loss, nats per token", caption=caption),
        _perplexity(report, palette),
    ]
    for kind, title, lines in (
        ("source", "Loss by source", "of what is trained"),
        ("eval", "Held-out loss by set", "of what is held out; macro is the mean of the sets"),
    ):
        points = [
            point | {"run": f"{point['run']}: {part}" if len(runs) > 1 else part}
            for part, metric in report.parts(kind).items()
            for point in _points(runs, metric)
        ]
        is_noisy = kind == "source"
        layers = [_layer(points, LINE, "loss", is_noisy=is_noisy), *([] if is_noisy else [_layer(points, POINTS)])]
        names = list(dict.fromkeys(point["run"] for point in points))
        options = {"y": "loss, nats per token", "caption": f"Lines: {lines}.", "names": names}
        made.append(_over_tokens(report, palette, f"loss_by_{kind}", title, layers, **options))
    for name, shown in report.metrics.items():
        if shown["chart"] and not any(run.values(shown["unless"]) for run in runs):
            layers = [_layer(_points(runs, name), LINE, shown["axis"], is_noisy=shown.get("is_noisy", False))]
            scale = {"zero": shown["from_zero"]}
            options = {"y": shown["axis"], "number": shown["number"], "scale": scale}
            made.append(_over_tokens(report, palette, name, shown["chart"], layers, **options))
    longest = max(sum(run.seconds.values()) for run in runs)
    unit = next((unit for unit, seconds in TIMES.items() if longest >= FEWEST * seconds), "seconds")
    for name, title, x, scale, parts_of, caption in (
        ("memory", "Memory, planned against measured", "GiB", 1, memory_parts, MEMORY),
        ("time", "Where the time went", unit, TIMES[unit], time_parts, TIMED),
    ):
        rows = []
        for run in runs:
            for row in parts_of(run):
                bar = ": ".join(filter(None, (run.name if len(runs) > 1 or not row["bar"] else "", row["bar"])))
                rows.append(row | {"bar": bar, "value": row["value"] / scale})
        if rows:
            made.append(Chart(name=name, title=title, caption=caption, spec=_bars(largest_parts(rows), palette, x=x)))
    return [chart for chart in made if chart]


def _perplexity(report: Report, palette: Palette) -> Chart | None:
    """Held-out perplexity as training logged it, and results of dsft eval; both with their intervals."""
    logged = _points(report.runs, "eval_perplexity", eval_perplexity_low="low", eval_perplexity_high="high")
    measured = []
    for item in report.evaluations:
        if item.tokens_seen is not None:
            point = {"run": item.run, "tokens": item.tokens_seen, "model": item.model, "data": item.report["data"]}
            bounds = zip(("low", "high"), item.report.get("interval", {}).get("perplexity", ()), strict=False)
            point |= {name: bound for name, bound in bounds if bound is not None}  # a single document has no interval
            measured.append(point | {"value": item.report["perplexity"]})
    interval = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
    layers = [
        _layer(logged, {"type": "area", "opacity": 0.15}, **interval),
        _layer(logged, DASHES),
        _layer(logged, POINTS, "perplexity"),
        _layer(measured, {"type": "rule", "strokeWidth": 1.5}, **interval),
        _layer(measured, SQUARES, "perplexity", "low", "high", "model", "data"),
    ]
    caption = "Points: held out, as training measured it, with 95 % interval."
    if measured:
        caption += " Squares: dsft eval, on the data that the table below names."
    axis = {"y": "perplexity (log scale)", "number": ",~r", "scale": {"type": "log", "nice": False}}
    return _over_tokens(report, palette, "perplexity", "Perplexity", layers, caption=caption, **axis)


def _over_tokens(
    report: Report,
    palette: Palette,
    name: str,
    title: str,
    layers: list[Spec],
    *,
    y: str,
    caption: str = "",
    number: str = "~g",
    scale: Spec | None = None,
    names: list[str] | None = None,
) -> Chart | None:
    """Put the layers that have points over the tokens seen, a colour for each run, or each of `names`, and a legend
    where there are several; None where no layer has a point.
    """
    layers = [layer for layer in layers if layer["data"]["values"]]
    if not layers:
        return None
    names = names or [run.name for run in report.runs]
    series = [palette[f"series-{index % 6 + 1}"] for index in range(len(names))]
    legend = BELOW | {"columns": 3} if len(names) > 1 else None

    def number_axis(field: str, title: str, *, scale: Spec | None = None, **axis: Any) -> Spec:
        channel = {"field": field, "type": "quantitative", "title": title}
        return channel | ({"scale": scale} if scale else {}) | {"axis": axis | {"labelExpr": ZERO, "tickCount": 5}}

    scale_of_colour = {"domain": names, "range": series}
    encoding = {
        "x": number_axis("tokens", "tokens seen", format="~s", grid=False),
        "y": number_axis("value", y, scale=scale or {"zero": False}, format=number),
        "color": {"field": "run", "type": "nominal", "scale": scale_of_colour, "legend": legend},
    }
    spec = _base(palette) | {"height": 220, "encoding": encoding, "layer": layers}
    return Chart(name=name, title=title, caption=caption, spec=spec)


def _points(runs: list[Run], metric: str, **more: str) -> list[dict[str, Any]]:
    """Return a point for each log entry with a metric: run, step, tokens, the metric as value, and `more` metrics under
    their names in the point.
    """
    names, points = {metric: "value", **more}, []
    for run in runs:
        entries = [entry for entry in run.log if entry.get(metric) is not None]
        every = max(-(-len(entries) // MOST_POINTS), 1)
        for index, entry in enumerate(entries):
            if index % every == 0 or entry is entries[-1]:
                point = {"run": run.name, "step": entry["step"]}
                point["tokens"] = entry.get("num_input_tokens_seen", entry["step"])
                points.append(point | {name: entry[key] for key, name in names.items() if key in entry})
    return points


def _layer(
    points: list[dict[str, Any]], mark: Spec, title: str = "", *more: str, is_noisy: bool = False, **encoding: Spec
) -> Spec:
    """Return one mark for these points; with a title they have a tooltip, and with `more` these fields in it. The
    page's switch smooths one that is noisy.
    """
    transform = []
    if is_noisy:
        mean, beside = {"op": "mean", "field": "value", "as": "mean"}, SMOOTHED // 2
        in_order = {"groupby": ["run"], "sort": [{"field": "tokens"}]}
        transform = [
            {"window": [mean], "frame": [-beside, beside]} | in_order,
            {"calculate": f"{SMOOTH} ? datum.mean : datum.value", "as": "drawn"},
        ]
        encoding["y"] = {"field": "drawn", "type": "quantitative"}
    if title:
        encoding["tooltip"] = [
            {"field": "run"},
            *([] if more else [{"field": "step", "format": ","}]),
            {"field": "tokens", "title": "tokens seen", "format": ","},
            {"field": "value", "title": title, "format": ",.5~r"},
            *({"field": name} | ({"format": ",.4~g"} if name in ("low", "high") else {}) for name in more),
        ]
    layer = {"data": {"values": points}, "transform": transform, "mark": mark, "encoding": encoding}
    return {name: value for name, value in layer.items() if value}


def _bars(rows: list[dict[str, Any]], palette: Palette, *, x: str) -> Spec:
    """Draw one stacked bar for each of `bar`, a segment for each `part` in the order of the data."""
    parts = list(dict.fromkeys(row["part"] for row in rows))
    planned = [part for part in parts if part not in MEASURED]
    names = MEASURED | {part: f"series-{index % 5 + 1}" for index, part in enumerate(planned)}
    axis = {"grid": False, "labelLimit": 170, "ticks": False, "domain": False}
    value = {"field": "value", "title": x}
    encoding = {
        "y": {"field": "bar", "type": "nominal", "sort": None, "title": None, "axis": axis},
        "x": value | {"type": "quantitative", "stack": "zero", "axis": {"tickCount": 5, "format": "~g"}},
        "color": {
            "field": "part",
            "type": "nominal",
            "sort": None,
            "scale": {"domain": parts, "range": [palette[names[part]] for part in parts]},
            "legend": BELOW | {"columns": 2, "labelFontSize": 11, "columnPadding": 6},
        },
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": [{"field": "part"}, value | {"format": ".3~f"}, {"field": "detail", "title": "from"}],
    }
    return _base(palette) | {
        "height": 30 * len({row["bar"] for row in rows}),
        "data": {"values": [row | {"order": parts.index(row["part"])} for row in rows]},
        "mark": {"type": "bar", "height": 20},
        "encoding": encoding,
    }


def memory_parts(run: Run) -> list[dict[str, Any]]:
    """Return segments of bars, in GiB: the planned components alive at the peak, and what was measured: on GPUs what
    torch allocates on the fullest, held between steps and added by a step; on CPU ranks the host memory of a node.
    """
    plan = run.facts.get("plan")
    if not plan:
        return []
    planned: dict[str, tuple[float, str]] = {}
    is_gpu, ranks = plan["has_gpu"], plan["ranks_per_node"]
    terms = [Term(**term) for term in plan["terms"] if term["phase"] != "load"]  # measured without
    for place in ("device",) if is_gpu else ("device", "host"):
        alive = phases_at_peak(bytes_by_phase(terms, place))
        for term in (term for phase in alive for term in terms if (term.place, term.phase) == (place, phase)):
            is_of_ranks = place == "device" and not is_gpu
            formula = f"{ranks} ranks x ({term.formula})" if is_of_ranks else term.formula
            planned[term.name] = term.num_bytes * (ranks if is_of_ranks else 1), formula
    if is_gpu:
        planned.pop(OVERHEAD, None)  # which torch does not allocate
    checks = run.results.get("plan_check", {})
    checked = checks.get(FULL_TRAINING) or next(iter(checks.values()), {})
    measured: dict[str, tuple[float, str]] = {}
    name, held_name = "GPU memory allocated" if is_gpu else "host memory of a node", "GPU memory between steps"
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


def largest_parts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the largest components of all bars by name, largest first, and add up the smaller ones of each bar."""
    sizes: Counter[str] = Counter()
    for row in rows:
        if row["part"] not in MEASURED:
            sizes[row["part"]] = max(sizes[row["part"]], row["value"])
    named = [part for part, _ in sizes.most_common(MOST_PARTS)]
    kept = []
    for bar in dict.fromkeys(row["bar"] for row in rows):
        of_bar = [row for row in rows if row["bar"] == bar]
        kept += sorted((row for row in of_bar if row["part"] in named), key=lambda row: named.index(row["part"]))
        smaller = [row["value"] for row in of_bar if row["part"] not in (*named, *MEASURED)]
        if smaller:
            kept.append({"bar": bar, "part": OTHERS, "value": sum(smaller), "detail": "smaller"})
        kept += [row for row in of_bar if row["part"] in MEASURED]
    return kept


def time_parts(run: Run) -> list[dict[str, Any]]:
    """Return the segments of one bar, in seconds; none before anything was timed."""
    timed = {part: value for part, value in run.seconds.items() if value}
    return [{"bar": "", "part": part, "value": value, "detail": f"{value:,.1f} s"} for part, value in timed.items()]


def _base(palette: Palette) -> Spec:
    text = {"labelColor": palette["muted"], "titleColor": palette["ink"], "labelFontSize": 12, "titleFontSize": 12}
    lines = {"gridColor": palette["grid"], "domainColor": palette["grid"], "tickColor": palette["grid"]}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "background": None,
        "params": [{"name": SMOOTH, "value": False}],
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": {
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": text | lines | {"titleFontWeight": "normal", "titlePadding": 8},
            "legend": {"labelColor": palette["ink"], "labelFontSize": 12, "symbolOpacity": 1},
            "title": {"anchor": "start", "color": palette["ink"], "fontSize": 14, "fontWeight": 600, "offset": 12},
        },
    }
