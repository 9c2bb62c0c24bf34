"""Which run a restarted launch resumes: its own, never the one that it was told to replace."""

import json

import pytest

from dsft.checkpoints.manifest import TRAINER_STATE, publish, staging_folder
from dsft.checkpoints.run_folder import last_checkpoint, read_run, write_run
from dsft.cluster.launch.run import asks_to_resume, resumed
from dsft.config.options import TrainConfig
from dsft.runtime.launcher_env import JOB


def save(output_dir, step: int) -> str:
    staged = staging_folder(output_dir, step)
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
    monkeypatch.setenv(JOB, "this job")
    assert last_checkpoint(config) == (None if overwrite else earlier)
    (tmp_path / "run.json").unlink()
    write_run(str(tmp_path), status="running")
    assert read_run(str(tmp_path))["job"] == "this job" and last_checkpoint(config) == earlier


def test_a_job_is_told_apart_only_where_its_user_did_not_ask_to_resume(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"overwrite": True}))
    assert not asks_to_resume(["--config", str(file), "--overwrite", "true"])
    assert asks_to_resume(resumed(["--config", str(file)])) and asks_to_resume(["--resume-from-checkpoint=auto"])
    file.write_text("resume_from_checkpoint: auto\n")
    assert asks_to_resume(["--config", str(file)]) and asks_to_resume([f"--config={file}"])
