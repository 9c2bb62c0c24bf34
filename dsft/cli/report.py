"""`dsft report`: one page about one or several runs."""

from pathlib import Path

from dsft.cli.commands import ReportOptions
from dsft.report.page import write_report
from dsft.report.runs import read_report


def run_report(options: ReportOptions) -> None:
    """Write the page.

    Raises:
        UserError: where a folder holds no run, or the page cannot be written.
    """
    page, *pictures = write_report(read_report(options.runs), Path(options.out).expanduser())
    print(f"dsft: {page}: written, {page.stat().st_size / 1e6:.1f} MB; {len(pictures)} PNGs in {page.with_suffix('')}/")
