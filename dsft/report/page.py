"""Writes a report: one HTML page that loads nothing, and its charts as PNGs beside it.

The page holds Vega-Lite (about 0.9 MB) as vl-convert bundles it. vl-convert also draws the PNGs, without a browser.
"""

import json
from importlib import resources
from pathlib import Path

from dsft.errors import UserError
from dsft.report.charts import COLOURS, ON_PAGE, SMOOTHED, charts
from dsft.report.runs import Report
from dsft.report.tables import folded, headline, tables

PNG_SIZE = {"width": 640, "scale": 2}


def write_report(report: Report, out: Path) -> list[Path]:
    """Write the page, and the PNGs into a folder named like it; returns their paths, the page first.

    Raises:
        UserError: where vl-convert is not installed, or the folder cannot be written.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise UserError(
            f"dsft report: the package {error.name} is not installed; pip install vl-convert-python, or dsft[report]"
        ) from None
    html = page_html(report, bundle=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed"))
    folder = out.with_suffix("")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        pictures = []
        for chart in charts(report, COLOURS):
            spec = chart.spec | {"width": PNG_SIZE["width"], "background": COLOURS["paper"], "title": chart.title}
            pictures.append(folder / f"{chart.name}.png")
            pictures[-1].write_bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SIZE["scale"]))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    return [out, *pictures]


def page_html(report: Report, *, bundle: str) -> str:
    """Return the page, with the JavaScript that sets window.vegaEmbed."""
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
