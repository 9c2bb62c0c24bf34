"""The files of a report."""

import pytest
from test_report import logged, write_run

from dsft.errors import UserError
from dsft.report.charts import COLOURS, charts
from dsft.report.page import write_report
from dsft.report.runs import read_report


@pytest.fixture
def report(tmp_path):
    """Of a run with two charts."""
    log = [{key: entry[key] for key in ("step", "loss", "eval_loss") if key in entry} for entry in logged(2)]
    return read_report([str(write_run(tmp_path / "run", log=log, plan=None, metrics={}))])


def test_a_report_is_a_page_and_a_picture_of_each_chart(report, tmp_path):
    pytest.importorskip("vl_convert", reason="dsft[report] is not installed")
    written = write_report(report, tmp_path / "new" / "page.html")
    page, *pictures = written
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    names = [chart.name for chart in charts(report, COLOURS)]
    assert names and [path.name for path in pictures] == [f"{name}.png" for name in names]
    assert {path.parent for path in pictures} == {tmp_path / "new" / "page"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_a_place_that_cannot_be_written_is_named(report, tmp_path):
    pytest.importorskip("vl_convert", reason="dsft[report] is not installed")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out .*file/page.html: cannot be written"):
        write_report(report, tmp_path / "file" / "page.html")
