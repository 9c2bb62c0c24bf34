"""How runs are named in a report, and whose model an evaluation is of."""

import json
import os

import pytest
from test_report import logged, write_evaluation, write_run

from dsft.errors import UserError
from dsft.report.runs import read_report


def write_checkpoint(run, step: int):
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    state = {"global_step": step, "num_input_tokens_seen": 100 * step, "epoch": 0.5}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a/run"], ["run"]),
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["a/run", "b/run", "a/other"], ["a/run", "b/run", "a/other"]),
        (["x/a/run", "y/a/run"], ["x/a/run", "y/a/run"]),
        (["a/one", "b/two", "a/one"], ["one", "two"]),
    ],
)
def test_runs_are_named_by_the_shortest_end_of_their_paths_that_tells_them_apart(tmp_path, folders, names):
    for folder in dict.fromkeys(folders):
        write_run(tmp_path / folder)
    assert [run.name for run in read_report([str(tmp_path / folder) for folder in folders]).runs] == names


@pytest.mark.parametrize("load_best", [False, True])
def test_a_result_is_of_the_run_whose_model_it_is_with_the_tokens_that_model_has_seen(tmp_path, load_best):
    config = {"model": "m", "method": "full", "output_dir": "x", "load_best_model_at_end": load_best}
    results = {"tokens_seen": 777, "best_checkpoint": str(tmp_path / "run" / "checkpoint-2")}
    run = write_run(tmp_path / "run", log=logged(4), config=config, results=results)
    saved = {step: write_checkpoint(run, step) for step in (2, 4)}
    write_run(tmp_path / "runner")  # its name begins with that of the run
    of_final = 200 if load_best else 777
    expected = {
        str(run): ("run", "final", of_final),
        str(run / "final"): ("run", "final", of_final),
        str(saved[2]): ("run", "checkpoint-2", 200),
        str(saved[4]): ("run", "checkpoint-4", 400),
        str(saved[4] / "global_step4"): ("run", "checkpoint-4/global_step4", 400),
        str(run / "exported"): ("run", "exported", None),
        str(tmp_path / "runner" / "final"): ("", str(tmp_path / "runner" / "final"), None),
        "ns/base": ("", "ns/base", None),
    }
    for number, (model, of_run) in enumerate(expected.items()):
        folder = write_evaluation(tmp_path / f"eval-{number}", model)
        (item, _) = read_report([str(run), str(folder)]).evaluations[:2]
        assert (item.run, item.model, item.tokens_seen) == of_run
        assert item.title == ("/".join(of_run[:2]) if of_run[0] else model)


def test_evaluations_beside_a_run_are_found_where_one_of_their_models_is_its_own(tmp_path):
    run = write_run(tmp_path / "runs" / "run")
    for folder, model in ((run / "eval", "ns/base"), (run.parent / "own", str(run)), (run.parent / "other", "ns/base")):
        write_evaluation(folder, model)
    assert {item.model for item in read_report([str(run)]).evaluations} == {"final"}
    named = read_report([str(run), str(run.parent / "other")]).evaluations
    assert [item.model for item in named] == ["ns/base", "ns/base", "final", "final"]


@pytest.mark.parametrize("content", ['{"perplexity": 5.2}', "no JSON", '{"results": [{"model": "m", "data": "d"}]}'])
def test_what_lies_beside_a_run_and_is_no_evaluation_is_noted_and_left_out(tmp_path, capsys, content):
    run, other = write_run(tmp_path / "runs" / "run"), tmp_path / "runs" / "of another tool"
    other.mkdir()
    (other / "perplexity.json").write_text(content)
    assert read_report([str(run)]).evaluations == []
    assert f"without what lies beside the runs: {other}: holds a perplexity.json" in capsys.readouterr().out
    with pytest.raises(UserError, match="of another tool: holds a perplexity.json .* cannot be read"):
        read_report([str(run), str(other)])


def test_folders_of_others_beside_a_run_are_not_looked_into(tmp_path, monkeypatch):
    """A folder that many share, such as /tmp, holds some that only their owners may read."""
    run = write_run(tmp_path / "runs" / "run")
    (run.parent / "private").mkdir()
    stat = os.stat

    def refused(path, *args, **kwargs):
        if "private/" in str(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)
    assert len(read_report([str(run)]).runs) == 1


def test_a_checkpoint_without_a_trainers_state_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", log=logged(4))
    for step in (2, 4):
        (write_checkpoint(run, step) / "manifest.json").write_text("{}")
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    assert [saved.step for saved in read_report([str(run)]).runs[0].checkpoints] == [2]


def test_a_checkpoint_has_the_perplexity_of_its_step_and_no_other(tmp_path):
    """With load_best_model_at_end the best model is evaluated once more after the last step."""
    of_best = {"step": 4, "eval_loss": 2.0, "eval_perplexity": 7.4}
    run = write_run(tmp_path / "run", log=[*logged(4), of_best])
    for step in (2, 4):
        write_checkpoint(run, step)
    first, last = read_report([str(run)]).runs[0].checkpoints
    assert (first.step, first.tokens_seen, first.evaluation) == (2, 200, {})
    assert (last.name, last.tokens_seen, last.evaluation["eval_perplexity"]) == ("checkpoint-4", 400, 12.1825)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "checkpoint-2/trainer_state.json"])
def test_a_damaged_file_is_one_error_with_the_folder(tmp_path, name):
    run = write_run(tmp_path / "run", log=logged(2))
    write_checkpoint(run, 2)
    (run / name).write_text("{\n")
    with pytest.raises(UserError, match="run: .*cannot be read"):
        read_report([str(run)])


@pytest.mark.parametrize(
    ("line", "is_read"), [("", True), ('{"prompt": "a\u2028b", "m": "c"}', True), ("[1]", False), ("{", False)]
)
def test_answers_of_another_form_are_named_with_their_line(tmp_path, line, is_read):
    run = write_run(tmp_path / "run")
    folder = write_evaluation(tmp_path / "eval", str(run))
    first = {"prompt": "what?", "m": "this"}
    (folder / "answers.jsonl").write_text(f"{json.dumps(first)}\n{line}\n", encoding="utf-8")
    if is_read:
        assert read_report([str(run)]).answers == [first, *([json.loads(line)] if line else [])]
    else:
        with pytest.raises(UserError, match=r"answers\.jsonl: line 2 is no JSON object of texts"):
            read_report([str(run)])
