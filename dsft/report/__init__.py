"""The report: one HTML page about runs. The module itself is the function `dsft.report`."""

import sys
from pathlib import Path
from types import ModuleType


class _Report(ModuleType):
    def __call__(self, *runs: str, out: str | None = None) -> Path:
        """Write the page about runs, by default into the folder of the first one; returns its path."""
        from dsft.report.page import write_report

        return write_report(list(runs), out)


sys.modules[__name__].__class__ = _Report
