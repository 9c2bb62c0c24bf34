"""A run's folder: what stands in run.json, what a start resumes, what an overwrite removes, when a run is done,
and the card of its model."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from dsft.checkpoints.manifest import (
    MANIFEST,
    STAGING,
    TRAINER_STATE,
    checkpoints,
    hash_and_sync,
    integrity_errors,
    publish,
)
from dsft.checkpoints.run_folder import (
    check_output_dir,
    clear_run,
    is_finished,
    last_checkpoint,
    model_card,
    read_options_of_run,
    read_run,
    write_run,
)
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.run_page.page import read_runs
from dsft.runtime.launcher_env import LAUNCH


def save(output_dir, step: int) -> str:
    staged = output_dir / STAGING / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / TRAINER_STATE).write_text("{}")
    return str(publish(staged, {"step": step, "files": {}}))


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_restart_resumes_its_own_run_and_not_the_one_that_it_replaces(tmp_path, monkeypatch, overwrite):
    """The first attempt died while it loaded: the earlier run is still there."""
    training = {"output_dir": str(tmp_path), "resume_from_checkpoint": "auto"}
    config = TrainConfig(overwrite=overwrite, training=training)
    earlier = save(tmp_path, 5)
    write_run(str(tmp_path), status="done")
    assert last_checkpoint(config) == earlier, "asked for by the user, without a restart"
    monkeypatch.setenv(LAUNCH, "this job")
    assert last_checkpoint(config) == (None if overwrite else earlier)
    (tmp_path / "run.json").unlink()
    write_run(str(tmp_path), status="running")
    assert read_run(str(tmp_path))["job"] == "this job" and last_checkpoint(config) == earlier


def write_checkpoint(folder: Path, step: int, *, epoch: float | None = None, whole: bool = True) -> str:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": epoch}))
    (path / "model.safetensors").write_text("weights")
    files = {file.name: hash_and_sync(file) for file in path.iterdir()}
    (path / MANIFEST).write_text(json.dumps({"files": files}))
    if not whole:
        (path / "model.safetensors").write_text("w")
    return str(path)


def config(folder: Path, resume: str | bool | None = None, **changes) -> TrainConfig:
    return TrainConfig(training={"output_dir": str(folder), "resume_from_checkpoint": resume}, **changes)


def test_sections_of_run_json_are_added_and_replaced_and_the_first_write_stays_its_date(tmp_path):
    folder = tmp_path / "runs" / "first"
    write_run(str(folder), status="running", config={"seed": 1})
    created = read_run(str(folder))["created"]
    (folder / "run.json").write_text((folder / "run.json").read_text().replace(created, "2020-01-01T00:00:00+00:00"))
    write_run(str(folder), status="done", results={"steps": 2})
    expected = {
        "created": "2020-01-01T00:00:00+00:00",
        "status": "done",
        "config": {"seed": 1},
        "results": {"steps": 2},
    }
    assert expected.items() <= read_run(str(folder)).items()
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]


def test_an_overwrite_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    write_checkpoint(tmp_path, 5)
    write_run(str(tmp_path), status="done")
    for name in ("final", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    # Of the user, by such names: a file, copies of a checkpoint.
    (tmp_path / "checkpoint-list").touch()
    for name in ("checkpoint-5-copy", "checkpoint-best-5"):
        shutil.copytree(tmp_path / "checkpoint-5", tmp_path / name)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5"]
    clear_run(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("checkpoint-5-copy", "checkpoint-best-5", "checkpoint-list", "logs", "notes.txt")
    ]
    clear_run(str(tmp_path))  # nothing is left to remove


def test_a_run_resumes_where_it_was_asked_to(tmp_path, capsys):
    first, second = write_checkpoint(tmp_path, 5), write_checkpoint(tmp_path, 10)
    assert last_checkpoint(config(tmp_path)) is None
    assert last_checkpoint(config(tmp_path, "auto")) == second
    assert last_checkpoint(config(tmp_path, first)) == first
    assert last_checkpoint(config(tmp_path / "empty", "auto")) is None
    assert capsys.readouterr().out == "", "nothing was skipped or removed"


def test_an_incomplete_checkpoint_is_skipped_and_refused_where_it_was_named(tmp_path, capsys):
    good, broken = write_checkpoint(tmp_path, 5), write_checkpoint(tmp_path, 10, whole=False)
    assert last_checkpoint(config(tmp_path, "auto")) == good
    assert f"{broken} is incomplete and is skipped: model.safetensors has 1 bytes" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"resume_from_checkpoint={broken}: model.safetensors has 1 bytes"):
        last_checkpoint(config(tmp_path, broken))
    (Path(broken) / MANIFEST).unlink()
    assert last_checkpoint(config(tmp_path, "auto")) == good, "one that has lost its manifest is not another tool's"


@pytest.mark.parametrize("run", [None, '{"status": "running"}', "", "{", "7"])
def test_another_tools_checkpoint_is_resumed_as_often_as_it_is_needed_whatever_run_json_is(tmp_path, run):
    """The first attempt has written it, or a crash has left it empty."""
    (checkpoint := tmp_path / "checkpoint-5").mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 5}')
    if run is not None:
        (tmp_path / "run.json").write_text(run)
    assert last_checkpoint(config(tmp_path, "auto")) == str(checkpoint)
    write_run(str(tmp_path), status="running")
    assert last_checkpoint(config(tmp_path, "auto")) == str(checkpoint)
    assert read_run(str(tmp_path))["status"] == "running"


@pytest.mark.parametrize(
    ("step", "epoch", "training", "expected"),
    [
        (5, 0.5, {"max_steps": 5}, True),
        (4, 9.0, {"max_steps": 5}, False),  # max_steps goes before epochs
        (5, 2.9, {}, False),  # transformers' 3 epochs
        (5, 3.0, {}, True),
        (5, 1.0, {"num_train_epochs": 1, "max_steps": -1}, True),
        (5, 1.0, {"num_train_epochs": 2}, False),
        (5, None, {}, False),
    ],
)
def test_a_run_is_finished_by_its_steps_or_else_by_its_epochs(tmp_path, step, epoch, training, expected):
    assert is_finished(write_checkpoint(tmp_path, step, epoch=epoch), training) is expected


def test_a_run_that_stopped_early_is_finished_until_its_patience_is_raised(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 5, epoch=0.5)
    state = {"attributes": {"early_stopping_patience_counter": 3}}
    written = {"global_step": 5, "epoch": 0.5, "stateful_callbacks": {"EarlyStopping": state}}
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text(json.dumps(written))
    finished = [is_finished(checkpoint, {"max_steps": 9}, patience=patience) for patience in (2, 3, 4, None)]
    assert finished == [True, True, False, False]


OTHERS = ["[]", "null", "7", '"x"', "", "{"]


@pytest.mark.parametrize("content", OTHERS)
def test_a_run_json_that_holds_something_else_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    for read in (read_run, read_options_of_run, lambda folder: read_runs([folder])):
        with pytest.raises(UserError, match=r"run\.json"):
            read(str(tmp_path))


@pytest.mark.parametrize("content", [*OTHERS, "{}", '{"files": []}', '{"files": {"a": 1}}'])
def test_a_manifest_that_holds_something_else_is_named(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)
    assert integrity_errors(tmp_path) == [f"{MANIFEST} cannot be read"]


def test_the_card_names_base_data_options_and_measurements():
    run = {
        "config": {
            **{"model": "org/base", "method": "lora", "data": ["a.jsonl", "b.jsonl"], "learning_rate": 1e-4},
            **{"max_steps": -1, "global_batch_size": None, "seq_len": 64, "hub_token": "secret"},
            "adapter": "<img src=x>",
        },
        "machine": "2 x H100",
        "world_size": 2,
        "plan": {"reason": "ZeRO-2 is the fastest that fits"},
        "results": {"eval_perplexity": 12.34567891, "peak_gpu_gib": None, "steps": 8, "log": []},
        "versions": {"torch": "2.9", "bitsandbytes": None},
    }
    _, header, text = model_card(run, data="40 rows", held_out="10 rows").split("---\n", 2)
    assert yaml.safe_load(header) == {
        "base_model": "org/base",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["dsft", "deepspeed"],
    }
    assert "- adapter: &lt;img src=x&gt;\n" in text and "<img" not in text
    assert "`a.jsonl`, `b.jsonl`: 40 rows\n\nHeld out: 10 rows" in text
    assert "- learning_rate: 0.0001\n- seq_len: 64\n" in text and "- plan: ZeRO-2 is the fastest that fits\n" in text
    assert "\n\n- eval_perplexity: 12.3457\n- steps: 8\n\n" in text and "secret" not in text


@pytest.mark.parametrize("restarts", [False, True])
def test_overwrite_and_auto_are_refused_together_unless_dsft_launch_restarts(tmp_path, monkeypatch, restarts):
    monkeypatch.delenv(LAUNCH, raising=False)
    if restarts:
        monkeypatch.setenv(LAUNCH, "this job")
    problems: list[str] = []
    check_output_dir(config(tmp_path, "auto", overwrite=True), problems)
    assert ["are both set" in problem for problem in problems] == [True] * (not restarts)
