"""The page holds what is known of runs, however they ended, and loads nothing."""

import json
import re

import pytest

from dsft.cli.commands import ReportOptions
from dsft.cli.folders import run_report
from dsft.errors import UserError
from dsft.run_page.page import Curve, charts, draw, headline, read_runs, report, tables

HOSTILE = "</style><img src=http://127.0.0.1:9/x onerror=alert(1)>"


def write_run(folder, *, log=(), **sections):
    folder.mkdir(parents=True)
    config = {"model": "ns/model", "method": "full", "data": ["a.jsonl"], "output_dir": str(folder), "max_steps": 4}
    facts = {"config": config, "status": "done" if "results" in sections else "running", "data": {"rows": 1234}}
    (folder / "run.json").write_text(json.dumps(facts | sections))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    return folder


def logged(steps):
    log = [
        {
            "step": step,
            "num_input_tokens_seen": 100 * step,
            "loss": 4.0 / step,
            "learning_rate": 0.01,
            "grad_norm": None if step == 2 else 1.5,
            "train_runtime": 40.0 * step,
        }
        for step in range(1, steps + 1)
    ]
    for step, perplexity in ((1, 20.5), (steps, 12.1825)):
        log.append({"step": step, "num_input_tokens_seen": 100 * step, "eval_loss": 2.5, "eval_perplexity": perplexity})
    return [*log[:-1], log[-1] | {"eval_perplexity_low": 11.5, "eval_perplexity_high": 13.25}]


def test_a_run_has_its_numbers_its_curves_and_loads_nothing(tmp_path):
    counts = {"rows": 5000, "fill_rate": 0.95}
    run = write_run(tmp_path / "run", log=logged(40), results={}, error="line 1\nline 2", machine=HOSTILE, data=counts)
    run_report(ReportOptions(runs=[str(run)]))
    html = (run / "report.html").read_text()
    assert "<td>5000</td>" in html
    assert HOSTILE not in html and "&lt;img src" in html and "line 1\nline 2" in html
    assert "<script" not in html and not re.search(r"(src|href)=", html.replace(HOSTILE, "").replace("img src", ""))
    (read,) = read_runs([str(run)])
    rows = dict(headline([read]).values)
    assert rows["held-out perplexity"] == "20.5 → 12.18" and rows["its interval"] == "11.5 to 13.25 (95 %)"
    assert rows["training loss"] == "4 → 0.1" and rows["tokens seen"] == "4,000" and rows["time"] == "27 min"
    titles = [chart["title"] for chart in charts([read])]
    assert titles[0] == "Loss, nats per token" and "Learning rate" in titles
    assert html.count("<svg") == len(titles)


def test_several_runs_share_charts_and_what_differs_is_a_table(tmp_path):
    folders = [write_run(tmp_path / name, log=logged(5)) for name in ("one", "two")]
    runs = read_runs([str(folder) for folder in folders])
    loss = charts(runs)[0]
    names = [f"{folder} {word}" for folder in folders for word in ("training", "held out")]
    assert [name for name, _ in loss["legend"]] == names
    differing = tables(runs)["What differs between the runs"]
    assert [*differing[""]] == ["output_dir"]


def test_a_run_that_was_killed_early_has_a_page_and_what_is_not_a_run_is_refused(tmp_path):
    new = write_run(tmp_path / "new")
    (new / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    (read,) = read_runs([str(new)])
    assert read.status == "killed" and read.points("loss") == [(1, 2.0)]
    assert report(str(new), out=str(tmp_path / "pages" / "page.html")).is_file()
    with pytest.raises(UserError, match="is not a run folder"):
        report(str(tmp_path))


@pytest.mark.parametrize("ys", [[3.0], [2.0, 2.0], [0.0, 1e-5], [1.0, 1e6], [-1.0, 5.0]])
def test_axes_have_ticks_and_all_points_are_inside_of_the_picture(ys):
    points = [(1e6 * place, y) for place, y in enumerate(ys)]
    svg = draw([Curve(name="<run>", points=points, colour=0, has_dots=True)])
    assert svg.count("<text") >= 2 and "&lt;run&gt;" in svg
    for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg):
        assert 0 < float(x) < 520 and 0 < float(y) < 250
