"""A report's page: each run in its column, a command that gives the same run again, and the files."""

import json

import pytest
import yaml
from conftest import flags
from test_report import logged, write_evaluation, write_run
from test_runs import write_checkpoint

from dsft.checkpoints.run_folder import WEIGHTS_ONLY
from dsft.config.options import Decision, TrainConfig
from dsft.config.reader import read_config
from dsft.errors import UserError
from dsft.report.charts import COLOURS, charts
from dsft.report.page import SHOWN_DOCUMENTS, folded, headline, tables, write_report
from dsft.report.runs import read_report


def column(folder, name: str = "") -> dict[str, str]:
    """Row -> cell of one run in the table at the top."""
    report = read_report([str(folder)])
    return {row[0]: row[1] for row in headline(report).rows}


def table(report, title: str):
    return next(each for each in tables(report) if each.title.startswith(title))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00 min"), (59, "0:59 min"), (61, "1:01 min"), (3599.6, "1:00:00 h"), (36_061, "10:01:01 h")],
)
def test_time_is_shown_in_minutes_and_from_an_hour_on_in_hours(tmp_path, seconds, shown):
    assert column(write_run(tmp_path / "run", results={"seconds": seconds}))["time"] == shown


def test_a_run_without_an_end_shows_the_time_of_its_log_and_one_without_a_log_none(tmp_path):
    assert column(write_run(tmp_path / "run", log=logged(7)))["time"] == "1:10 min"
    assert "time" not in column(write_run(tmp_path / "new"))


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_run_that_was_started_again_shows_its_new_attempt_and_not_the_earlier_end(tmp_path, status):
    saving = {"step": 2, "train_runtime": 20.0, "save_seconds": 4.0}
    earlier = {"seconds": 3661.0, "warnings": ["of then"], "saves": {"seconds": 90.0}}
    run = write_run(tmp_path / "run", log=[*logged(7), *logged(1), saving], status=status, results=earlier)
    shown = column(run)
    assert shown["time"] == "0:20 min" and "warnings" not in shown
    assert shown["stalls"] == "waiting for data 1.5 s, evaluation 10.0 s, saving 4.0 s"


def test_perplexity_goes_from_the_first_measurement_to_the_last_with_its_interval(tmp_path):
    first = {"step": 0, "eval_perplexity": 4096.4, "eval_perplexity_low": 4000.0, "eval_perplexity_high": 4200.0}
    assert column(write_run(tmp_path / "run", log=[first, *logged(2)]))["held-out perplexity"] == (
        "4,096 → 12.18, 11.5 to 13.25 (95 %)"
    )
    assert column(write_run(tmp_path / "one", log=logged(2)))["held-out perplexity"] == "12.18, 11.5 to 13.25 (95 %)"
    of_one_document = [{"step": 1, "eval_perplexity": 9.5}]
    assert column(write_run(tmp_path / "bare", log=of_one_document))["held-out perplexity"] == "9.5"


def test_sources_and_held_out_sets_have_a_row_each(tmp_path):
    log = [
        {"step": step, "source_a.b_loss": 8.0 / step, "source_a.b_tokens": 300 * step} | held_out
        for step, held_out in ((1, {"eval_code_loss": 2.0, "eval_code_perplexity": 7.4}), (2, {}))
    ]
    with_parts, without = write_run(tmp_path / "run", log=log), write_run(tmp_path / "other", log=logged(2))
    report = read_report([str(with_parts), str(without)])
    assert table(report, "Sources").rows == [["a.b", "loss 8 → 4, 900 tokens", ""]]
    assert table(report, "Held-out perplexity by set").rows == [["code", "7.4 → 7.4", ""]]
    assert not [each for each in tables(read_report([str(without)])) if each.title.startswith("Sources")]
    of_all = {"sources": {"a.b": {"trained_tokens": 1000, "nats": 4000.0}}}  # a stop came between two lines of the log
    ended = write_run(tmp_path / "ended", log=log, results=of_all)
    assert table(read_report([str(ended)]), "Sources").rows == [["a.b", "loss 8 → 4, 1,000 tokens"]]


def test_checkpoints_are_named_with_their_run_where_there_are_several(tmp_path):
    folders = [write_run(tmp_path / name, log=logged(4)) for name in ("a", "b")]
    for folder in folders:
        write_checkpoint(folder, 4)
    for number, names in ((1, ["checkpoint-4"]), (2, ["a/checkpoint-4", "b/checkpoint-4"])):
        report = read_report([str(folder) for folder in folders[:number]])
        rows = table(report, "Checkpoints").rows
        assert [row[0] for row in rows] == names
        assert {tuple(row[1:]) for row in rows} == {("4", "400", "12.18, 11.5 to 13.25 (95 %)")}


def test_every_count_of_the_data_has_a_row(tmp_path):
    counts = {"rows": 1200, "split": 0, "packed_rows": 30, "fill_rate": 0.925, "passes": [0.5, 2.0]}
    rows = table(read_report([str(write_run(tmp_path / "run", data=counts))]), "Training data").rows
    assert [row[1] for row in rows[1:]] == ["1,200", "30", "92.5%", "0.5, 2"]


def test_options_that_all_runs_share_do_not_differ(tmp_path):
    folders = [
        write_run(tmp_path / name, config={"model": "m", "method": "full", "output_dir": name} | more)
        for name, more in {"a": {}, "b": {"seed": 3}, "c": {}}.items()
    ]
    rows = table(read_report([str(folder) for folder in folders]), "What differs").rows
    assert rows == [["output_dir", "a", "b", "c"], ["seed", "", "3", ""]]
    alone = tables(read_report([str(folders[0])]))
    assert not [each for each in alone if each.title.startswith("What differs")]


@pytest.mark.parametrize("number", [1, 2, 5, 2 * SHOWN_DOCUMENTS + 3])
def test_worst_and_best_documents_share_none(tmp_path, number):
    run, folder = write_run(tmp_path / "run"), tmp_path / "eval"
    write_evaluation(folder, str(run))
    report = read_report([str(run)])
    for item in report.evaluations:
        item.documents[:] = [{"document": i, "tokens": 2, "nats": 2.0 * i} for i in range(number)]
    shown = [row for each in tables(report) if each.title.startswith("Worst") for row in each.rows]
    half = shown[: len(shown) // len(report.evaluations)]
    assert len(half) == 2 * min(SHOWN_DOCUMENTS, number // 2) and len({row[1] for row in half}) == len(half)
    assert number < 2 or (half[0][:2] == ["worst", str(number - 1)] and half[-1][0] == "best")


@pytest.mark.parametrize(("world", "per_node", "start"), [(8, 8, "dsft train"), (16, 8, "dsft launch train")])
def test_the_command_of_a_report_gives_the_options_of_the_run(tmp_path, world, per_node, start):
    words = {"model": "m", "data": ["a.jsonl", "b c.jsonl"], "output_dir": "runs/x", "seed": 7}
    words |= {"method": "lora", "lora_r": 4, "learning_rate": 3e-5, "packing": True, "prompt_template": "ü: {a}\n'"}
    words |= {"completion_template": "{b}", "max_steps": 9, "save_minutes": 2.5}
    problems: list[str] = []
    config = read_config(TrainConfig, _words(words), problems)
    plan = {"has_gpu": True, "ranks_per_node": per_node, "terms": [], "reason": "x"}
    decided = [{"name": "zero", "value": "3", "reason": "auto"}]
    recorded = json.loads(json.dumps({**vars(config), **config.training, "zero": "3", "overwrite": True}))
    recorded.pop("training")
    run = write_run(tmp_path / "run", config=recorded, plan=plan, world_size=world, decisions=decided)
    text = folded(read_report([str(run)]))[0].text
    (tmp_path / "run.yaml").write_text(text.partition("\n# ")[0])
    assert "zero" not in yaml.safe_load((tmp_path / "run.yaml").read_text())
    again = read_config(TrainConfig, ["--config", str(tmp_path / "run.yaml")], problems)
    assert (again, problems) == (config, [])
    assert f"# {world} ranks\n{start} " in text and f"--num_gpus {per_node} " in text


@pytest.mark.parametrize(("method", "option"), [("full", "model"), ("lora", "adapter")])
def test_the_command_of_a_run_that_took_a_checkpoints_weights_takes_them_as_its_model_or_adapter(
    tmp_path, method, option
):
    config = {"model": "ns/base", "method": method, "data": ["a"], "output_dir": "x", "resume_weights_only": True}
    config |= {option: "old/checkpoint-5"}
    decided = [
        Decision(option, "old/checkpoint-5", WEIGHTS_ONLY),
        Decision("resume_from_checkpoint", None, WEIGHTS_ONLY),
    ]
    run = write_run(tmp_path / "run", config=config, decisions=[vars(each) for each in decided])
    given = yaml.safe_load(folded(read_report([str(run)]))[0].text.partition("\n# ")[0])
    assert given[option] == "old/checkpoint-5" and given["model"] == config["model"]
    assert "resume_weights_only" not in given and "resume_from_checkpoint" not in given


def _words(options: dict) -> list[str]:
    lists = [word for key, value in options.items() if isinstance(value, list) for word in (f"--{key}", *value)]
    return [*map(str, lists), *flags({key: value for key, value in options.items() if not isinstance(value, list)})]


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


def test_a_page_without_an_ending_is_refused_before_it_is_written(report, tmp_path):
    """Its charts have a folder of the name without the ending."""
    pytest.importorskip("vl_convert", reason="dsft[report] is not installed")
    with pytest.raises(UserError, match=r"--out .*page: needs an ending, such as .*page\.html"):
        write_report(report, tmp_path / "page")
    assert not (tmp_path / "page").exists()
