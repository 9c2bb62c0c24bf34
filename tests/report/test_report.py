"""`dsft report`: the page holds what is known of runs, however they ended, and loads nothing."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pyarrow
import pyarrow.parquet
import pytest

from dsft.cli.commands import ReportOptions
from dsft.cli.report import run_report
from dsft.errors import UserError
from dsft.report.charts import COLOURS, charts, largest_parts, time_parts
from dsft.report.page import folded, headline, page_html, tables
from dsft.report.runs import read_report
from dsft.training.metrics import METRICS

HOSTILE = "</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
TERMS = [
    ("weights", 40, "always"),
    ("gradients", 30, "always"),
    ("optimizer state", 80, "always"),
    ("logits and loss", 20, "compute"),
    ("saved activations", 25, "compute"),
    ("step transient", 10, "step"),
]


def write_run(folder, *, log=(), **sections):
    """A run's folder as a training writes it, of GPU ranks."""
    folder.mkdir(parents=True)
    terms = [
        {"name": name, "num_bytes": gib << 30, "phase": phase, "place": "device", "formula": f"{gib} GiB"}
        for name, gib, phase in TERMS
    ]
    facts = {
        "created": "2026-01-02T03:04:05+00:00",
        "config": {
            "model": "ns/model",
            "method": "full",
            "data": ["a.jsonl"],
            "output_dir": str(folder),
            "max_steps": 4,
        },
        "plan": {"has_gpu": True, "ranks_per_node": 8, "terms": terms, "reason": "ZeRO 3 fits."},
        "decisions": [{"name": "dtype", "value": "bfloat16", "reason": "auto"}],
        "machine": "1 node x 8 GPUs",
        "metrics": {metric.name: vars(metric.in_report) for metric in METRICS if metric.in_report},
        "versions": {"torch": "2.13.0"},
        "world_size": 8,
        "data": {"rows": 1234, "tokens": 56789},
        "status": "done" if "results" in sections else "running",
    }
    (folder / "run.json").write_text(json.dumps(facts | sections))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    return folder


def logged(steps, *, evaluated=True):
    log = [
        {"step": step, "num_input_tokens_seen": 100 * step, "loss": 4.0 / step, "learning_rate": 0.01, "grad_norm": 1.5}
        | {
            "train_runtime": 10.0 * step,
            "train_tokens_per_second": 50.0,
            "tokens_per_second": 60.0,
            "peak_gpu_gib": 20.0,
        }
        | {"data_wait_seconds": 1.5}
        for step in range(1, steps + 1)
    ]
    last = {"step": steps, "num_input_tokens_seen": 100 * steps, "eval_loss": 2.5, "eval_perplexity": 12.1825}
    interval = {"eval_perplexity_low": 11.5, "eval_perplexity_high": 13.25, "eval_runtime": 5.0}
    return [*log, last | interval] if evaluated else log


def write_evaluation(folder, model):
    """The results of one model over three documents, the second of which is the hardest."""
    folder.mkdir()
    nats = [4.0, 30.0, 8.0]
    columns = {"nats": nats, "tokens": [2, 5, 4], "bytes": [8, 20, 16], "words": [2, 5, 4], "document": [0, 1, 2]}
    names = {"model": [model] * 3, "data": ["held.jsonl"] * 3, "protocol": [""] * 3}
    pyarrow.parquet.write_table(pyarrow.table(names | columns), folder / "documents.parquet")
    report = {"model": model, "data": "held.jsonl", "mode": "windows", "perplexity": 45.5, "tokens": 11, "documents": 3}
    report |= {
        "protocol": None,
        "nats": sum(nats),
        "bits_per_byte": 1.377,
        "interval": {"perplexity": [40.25, 50.5]},
        "divergence": None,
    }
    of_one_document = {"data": "one.jsonl", "interval": {"perplexity": [None, None]}}
    (folder / "perplexity.json").write_text(json.dumps({"results": [report, report | of_one_document]}))
    return folder


def texts(report):
    """All text of a report's tables."""
    cells = [
        cell for table in (headline(report), *tables(report)) for row in [table.header, *table.rows] for cell in row
    ]
    return "\n".join([*cells, *(item.text for item in folded(report))])


class Loads(HTMLParser):
    """Collects what a page would load, and its elements."""

    def __init__(self, html):
        super().__init__()
        self.loaded, self.elements, self.policy = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.loaded += [
            (tag, name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]


@pytest.fixture
def two_runs(tmp_path):
    """A finished run with an evaluation of its final model beside it, and one that a NaN stopped."""
    checks = {"over the full training": {"GPU memory allocated": {"predicted": 195 << 30, "measured": 200 << 30}}}
    checks["over the full training"]["GPU memory allocated"]["error"] = -0.025
    held = {"predicted": 150 << 30, "measured": 160 << 30, "error": -0.0625}
    checks["over the full training"]["GPU memory between steps"] = held
    results = {"seconds": 100.0, "tokens_seen": 400, "plan_check": checks, "saves": {"seconds": 10.0}}
    config = {"model": HOSTILE, "method": "lora", "data": ["a.jsonl"], "output_dir": "x", "max_steps": 8}
    good = write_run(tmp_path / "runs" / "good", log=logged(4), status="done", results=results)
    bad = write_run(
        tmp_path / "runs" / "bad", log=logged(2), status="stopped", error="the loss is NaN at step 3", config=config
    )
    with (bad / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.5, "grad_norm": Infinity, "num_input_tokens_seen": 300}\n')
    answers = write_evaluation(tmp_path / "runs" / "eval", str(good / "final")) / "answers.jsonl"
    answers.write_text('{"prompt": "what is a token?", "before": "a piece of text", "after": "a part"}\n')
    return [str(good), str(bad)]


def test_a_page_of_runs_holds_what_is_known_and_can_load_nothing(two_runs):
    report = read_report(two_runs)
    html = page_html(report, bundle="/* vega */")
    page = Loads(html)
    assert page.loaded == [] and not {"img", "link", "iframe", "object"} & set(page.elements)
    assert page.policy.startswith("default-src 'none'") and "connect" not in page.policy
    assert html.count("</script>") == page.elements.count("script") == 2, "a model's name ends no script"
    held = texts(report)
    for text in (
        *(
            "the loss is NaN at step 3",
            "12.18, 11.5 to 13.25 (95 %)",
            "45.5000, 40.25 to 50.5 (95 %)",
            "1,234",
            "56,789",
        ),
        *("predicted 195 GiB, measured 200 GiB (-2%)", "2.13.0", "bfloat16   (auto)", "ZeRO 3 fits."),
        "dsft train --config run.yaml --num_gpus 8 --output_dir NEW",
        "what is a token?\na piece of text\na part",
    ):
        assert text in held, text
    differences = next(table for table in tables(report) if table.title.startswith("What differs"))
    assert [row[0] for row in differences.rows] == ["max_steps", "method", "model", "output_dir"]
    documents = next(table for table in tables(report) if table.title.startswith("Worst"))
    assert [row[:4] for row in documents.rows] == [["worst", "1", "5", "6.0000"], ["best", "0", "2", "2.0000"]]


def test_each_chart_has_its_points_with_tokens_and_units(two_runs):
    drawn = {chart.name: chart.spec for chart in charts(read_report(two_runs), COLOURS)}
    assert {"loss", "perplexity", "learning_rate", "grad_norm", "peak_gpu_gib", "memory", "time"} <= drawn.keys()
    points = drawn["loss"]["layer"][0]["data"]["values"]
    assert [(point["run"], point["tokens"], point["value"]) for point in points[:2]] == [
        ("good", 100, 4.0),
        ("good", 200, 2.0),
    ]
    measured = drawn["perplexity"]["layer"][-1]["data"]["values"]
    assert [(point["tokens"], point["value"], point.get("low"), point.get("high")) for point in measured] == [
        (400, 45.5, 40.25, 50.5),
        (400, 45.5, None, None),
    ]
    json.dumps(drawn, allow_nan=False)  # a browser would draw an axis without an end
    bars = drawn["memory"]["data"]["values"]
    planned = {row["part"]: row["value"] for row in bars if row["bar"] == "good: planned"}
    assert planned == {
        "optimizer state": 80,
        "weights": 40,
        "gradients": 30,
        "saved activations": 25,
        "other components": 20,
    }, "without what the step alone takes, which is less than a micro batch"
    assert [(row["part"], row["value"]) for row in bars if row["bar"] == "good: measured"] == [
        ("held between steps", 160),
        ("added by a step", 40),
    ]
    colours = drawn["memory"]["encoding"]["color"]["scale"]
    assert len(set(colours["range"])) == len(colours["domain"]) == 7


def test_the_switch_smooths_noisy_lines_and_nothing_that_was_measured_once(two_runs):
    drawn = {chart.name: chart.spec for chart in charts(read_report(two_runs), COLOURS)}
    smoothed = {
        name: [layer["data"]["values"][0].get("step") for layer in spec["layer"] if "transform" in layer]
        for name, spec in drawn.items()
        if "layer" in spec
    }
    assert {name for name, layers in smoothed.items() if layers} == {
        "loss",
        "grad_norm",
        "tokens_per_second",
        "data_wait_seconds",
    }
    assert len(smoothed["loss"]) == 1, "the training's line, not what was held out"
    assert all(spec["params"] == [{"name": "smooth", "value": False}] for spec in drawn.values())
    assert drawn["perplexity"]["encoding"]["y"]["scale"]["type"] == "log"


def test_whole_numbers_are_shown_without_a_point(tmp_path):
    config = {
        "model": "m",
        "method": "full",
        "data": ["a"],
        "output_dir": "x",
        "eval_steps": 400.0,
        "warmup_steps": 0.1,
    }
    shown = texts(read_report([str(write_run(tmp_path / "run", config=config, deepspeed={"clip": 1.0}))]))
    assert "eval_steps: 400\n" in shown and "warmup_steps: 0.1\n" in shown and "clip: 1\n" in shown


def test_a_path_breaks_behind_a_slash_alone(tmp_path):
    run = write_run(tmp_path / "run", results={"final_model": "runs/a-long-name/final"})
    assert "runs/<wbr>a-long-name/<wbr>final</td>" in page_html(read_report([str(run)]), bundle="")


@pytest.mark.parametrize(
    ("sections", "log", "expected"),
    [
        ({"plan": None, "versions": None, "data": None}, [], "killed before it could record its exit"),
        ({"status": "preempted", "results": {"log": []}}, logged(3, evaluated=False), "not measured"),
        ({"results": {"plan_check": {}, "tokens_seen": 0}}, logged(1), "12.18"),
    ],
)
def test_runs_without_an_end_or_an_evaluation_give_a_page(tmp_path, sections, log, expected):
    report = read_report([str(write_run(tmp_path / "run", log=log, **sections))])
    assert expected in page_html(report, bundle="") and expected in texts(report)


def test_a_log_cut_off_by_a_kill_and_one_of_two_attempts(tmp_path):
    folder = write_run(tmp_path / "run", log=[*logged(4), *logged(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    run = read_report([str(folder)]).runs[0]
    assert len(run.log) == 8
    assert {row["part"]: row["value"] for row in time_parts(run)} == {
        "training": 7.0,
        "waiting for data": 3.0,
        "evaluation": 10.0,
    }
    assert "waiting for data 3.0 s, evaluation 10.0 s" in texts(read_report([str(folder)]))


def test_what_is_no_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: holds neither run.json nor perplexity.json"):
        read_report([str(tmp_path / "empty")])
    with pytest.raises(UserError, match="no run is named"):
        read_report([str(write_evaluation(tmp_path / "eval", "ns/model"))])


def test_without_the_package_the_error_names_the_command_to_install_it(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match="pip install vl-convert-python"):
        run_report(ReportOptions([str(folder)], out=str(tmp_path / "report.html")))
    assert not (tmp_path / "report.html").exists()


def test_smaller_parts_are_added_up_for_each_bar():
    rows = [{"bar": bar, "part": str(part), "value": part, "detail": ""} for bar in "ab" for part in range(1, 8)]
    parts = {(row["bar"], row["part"]): row["value"] for row in largest_parts(rows)}
    assert parts.pop(("a", "other components")) == parts.pop(("b", "other components")) == 1 + 2 + 3
    assert sorted(parts) == [(bar, part) for bar in "ab" for part in "4567"]


@pytest.mark.exhaustive
def test_a_browser_shows_every_chart_without_an_error_or_a_request(two_runs, tmp_path, capsys):
    """The policy in the page makes a console error of any request that it would make."""
    pytest.importorskip("vl_convert", reason="dsft[report] is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    page = tmp_path / "new" / "report.html"
    run_report(ReportOptions(two_runs, out=str(page)))
    pictures = sorted(path.name for path in (tmp_path / "new" / "report").iterdir())
    assert len(pictures) == 9 and f"{len(pictures)} PNGs" in capsys.readouterr().out
    assert (tmp_path / "new" / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom", f"file://{page}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'data-ready="yes"' in result.stdout
    assert len(re.findall(r'<svg[^>]* class="marks"', result.stdout)) == len(pictures)
