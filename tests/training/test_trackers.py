"""What W&B, MLflow and Trackio are told of a training, read back from what each writes without a network."""

import json
import struct
import sys
from pathlib import Path

import pytest
from conftest import flags
from ranks import run_entry
from transformers.integrations.integration_utils import rewrite_logs

from dsft.errors import EXIT_STOPPED

pytestmark = [pytest.mark.exhaustive, pytest.mark.launch]


BLOCK_BYTES = 32_768


def wandb_values(folder: Path) -> dict[str, float]:
    """Read the log of an offline run: LevelDB's format (doc/log_format.md there) behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, values, place, read = next(folder.glob("wandb/offline-run-*/*.wandb")).read_bytes(), {}, 7, b""
    while place + 7 <= len(content):
        _, size, kind = struct.unpack_from("<IHB", content, place)
        read += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            items = Record.FromString(read).history.item
            values |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            read = b""
        left = -place % BLOCK_BYTES
        place += left if left < 7 else 0  # no part begins in a block's last bytes
    return values


def mlflow_values(folder: Path) -> dict[str, float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return dict(rewrite_logs(run.data.metrics))


def trackio_values(folder: Path) -> dict[str, float]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("seen")
    return {name: value for line in SQLiteStorage.get_logs("seen", run) for name, value in line.items()}


ONLY_AT_THE_END = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""Of a full training: W&B and Trackio are not told of them, or as a summary."""
READERS = {"wandb": wandb_values, "mlflow": mlflow_values, "trackio": trackio_values}


@pytest.mark.parametrize("tracker", READERS)
def test_each_tracker_has_the_metrics_of_the_file_by_their_names(run, tracker, options, tmp_path, monkeypatch):
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "TRACKIO_DIR": tmp_path}
    variables |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: pip install {tracker}")
    case = {"max_steps": 3, "logging_steps": 1, "eval_fraction": 0.3, "zero": "2", "project": "seen"}
    case |= {"eval_strategy": "steps", "eval_steps": 2}  # so that the last step is evaluated when training has ended
    words = flags(options(tmp_path / "run", report_to=tracker, **case))
    result = run([sys.executable, "-m", "dsft.train", *words])  # W&B writes at the end of the process
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = {name: value for line in lines for name, value in line.items() if name not in ("step", *ONLY_AT_THE_END)}
    told = rewrite_logs(last)
    assert {"train/loss", "train/perplexity", "train/padding_share", "eval/perplexity"} <= told.keys()
    read = READERS[tracker](tmp_path)
    assert {name: read.get(name) for name in told} == pytest.approx(told)


def test_a_run_of_several_ranks_that_stops_itself_has_told_its_tracker(options, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    case = {"max_steps": 9, "logging_steps": 1, "learning_rate": 1e30, "zero": "2", "report_to": "wandb"}
    result = run_entry("dsft.train", flags(options(tmp_path / "run", **case)), world=2)
    assert result.returncode == EXIT_STOPPED, result.stderr
    assert wandb_values(tmp_path)["train/global_step"] == 1
