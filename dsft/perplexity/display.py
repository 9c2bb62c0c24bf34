"""Shows results in notebooks: tables of HTML, and frames of pandas."""

import html
from collections.abc import Mapping
from typing import Any

STYLE = "text-align:left;vertical-align:top;white-space:pre-wrap;max-width:60em;overflow-wrap:anywhere"


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table of names and values under a title."""
    body = "".join(
        f'<tr><th style="{STYLE}">{html.escape(name)}</th><td style="{STYLE}">{html.escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption><b>{html.escape(title)}</b></caption><tbody>{body}</tbody></table>"


def frame(columns: Any) -> Any:
    """Return a pandas.DataFrame of columns, or of rows that are dictionaries."""
    import pandas  # takes a second, and comes with datasets

    return pandas.DataFrame(columns)
