"""What a person sees of a training: calm lines without a terminal, one moving line on one."""

import dataclasses
import io
import json
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import flags, read_json
from ranks import run_entry
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsft.training.callbacks import Compute, LearningCheck, ProgressLog, Sums, Work, step_metrics

NOISE = (
    "tokenizer has new PAD",
    "Loading weights",
    "Writing model shards",
    "--calibrate",
    "steps mismatch",
    "CUDA runtime",
)
TOLD = ("loss", "perplexity", "grad_norm", "learning_rate", "peak_host_gib", "num_trained_tokens")
TOLD += ("data_wait_seconds", "padding_share")
LOGS = {"loss": 2.5, "learning_rate": 0.0012345, "grad_norm": 0.61725, "tokens_per_second": 1234.5}
LOGS |= {"peak_host_gib": 1.0335, "num_input_tokens_seen": 4096}


@pytest.fixture(scope="module")
def trained(tiny, options, tmp_path_factory):
    """(what two ranks printed to files, the run's folder) of a training with evaluation, checkpoint and TensorBoard."""
    folder = tmp_path_factory.mktemp("screen") / "run"
    chosen = {"max_steps": 4, "logging_steps": 1, "eval_fraction": 0.3, "save_strategy": "steps", "save_steps": 2}
    chosen |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    chosen |= {"report_to": "tensorboard", "disable_tqdm": None, "zero": "2"}  # without ZeRO there is no gradient norm
    result = run_entry("dsft.train", flags(options(folder, **chosen)), world=2)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr, folder


def test_without_a_terminal_there_are_plain_lines_and_no_noise(trained):
    screen, folder = trained
    logs = [path.read_text() for path in sorted((folder / "logs").iterdir())]
    assert len(logs) == 2
    for text in (screen, *logs):
        assert "\r" not in text and not [noise for noise in NOISE if noise in text]
    steps = [line for line in screen.splitlines() if line.startswith("step ")]
    assert len(steps) == 4 + 1, "one for each step, and one for the evaluation at the end"
    assert re.search(r"held-out loss [\d.]+  perplexity [\d.,]+, [\d.,]+ to [\d.,]+ \(95 %\)  ", steps[-1])
    assert "2 ranks connected; checking options, data and model" in screen
    assert re.search(r"^step +3 .* left \d+:\d\d:\d\d$", screen, re.MULTILINE)
    assert screen.count("dsft: measured") == screen.count("measured over the full training") == 1


def test_metrics_reach_the_file_and_tensorboard_by_the_same_names(trained):
    _, folder = trained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert {line["step"]: line["perplexity"] for line in lines if "loss" in line} == {
        step: math.exp(loss) for step, loss in losses.items()
    }
    assert [line["tokens_per_second"] > 0 for line in lines if "loss" in line] == [True] * 4
    assert lines[-1]["save_seconds"] == pytest.approx(read_json(folder / "run.json")["results"]["saves"]["seconds"])
    events = next(folder.rglob("events.out.tfevents.*"))
    board = EventAccumulator(str(events.parent)).Reload()
    for metric in TOLD:
        read = {event.step: event.value for event in board.Scalars(f"train/{metric}")}
        written = {line["step"]: line[metric] for line in lines if metric in line}
        assert {step: read[step] for step in losses} == pytest.approx({step: written[step] for step in losses})
    assert len(board.Scalars("eval/perplexity")) == 1


def test_of_a_gpu_speed_and_mfu_follow_from_the_tokens_per_second():
    sums = Sums(tokens=300_000.0, trained=100.0, positions=400_000.0, nats=250.0)
    gpus = Compute(num_gpus=4, flops_per_token=6e9, peak_flops=1e15, own_loss=False)
    metrics = step_metrics(sums, 1.5, gpus)
    assert metrics["loss"] == 2.5 and metrics["perplexity"] == math.exp(2.5) and metrics["padding_share"] == 0.25
    speeds = {"tokens_per_second": 200_000, "tokens_per_second_per_gpu": 50_000, "tflops_per_gpu": 300, "mfu": 0.3}
    assert {name: metrics[name] for name in speeds} == speeds
    assert "mfu" not in step_metrics(sums, 1.5, dataclasses.replace(gpus, peak_flops=0.0))
    assert "tflops_per_gpu" not in step_metrics(sums, 1.5, dataclasses.replace(gpus, num_gpus=0))


def test_the_time_of_steps_is_without_evaluations_and_saves():
    work = Work(torch.device("cpu"))
    begun = work.begun
    with work.paused():
        time.sleep(0.01)
    assert work.begun - begun >= 0.01


@pytest.mark.parametrize("own_loss", [False, True])
def test_steps_without_a_trained_token_have_no_loss_and_no_warning(own_loss):
    """The last window of a text, of one token, in a step of its own."""
    compute = Compute(num_gpus=0, flops_per_token=6e9, peak_flops=0.0, own_loss=own_loss)
    logs = {"grad_norm": 0.0} | step_metrics(Sums(tokens=1.0, positions=8.0), 0.5, compute)
    assert not {"loss", "perplexity", "own_loss"} & logs.keys() and logs["tokens_per_second"] == 2
    check = LearningCheck(384)
    check.on_log(None, SimpleNamespace(global_step=1), None, logs=logs)
    assert not check.warnings and not check.losses
    check.on_log(None, SimpleNamespace(global_step=1), None, logs=logs | {"loss": 2.5})
    assert "the gradient norm is 0 at step 1" in check.warnings[0]


def test_an_evaluation_has_its_interval_in_words(monkeypatch, capsys):
    logs = {"eval_loss": 7.4866, "eval_perplexity": 1784.9, "eval_tokens": 1234}
    bounds = {"eval_perplexity_low": 1740.2, "eval_perplexity_high": 1830.6}
    shown = [progress(io.StringIO(), monkeypatch, capsys, steps=1, logs=each) for each in (logs | bounds, logs)]
    assert "perplexity 1,785, 1,740 to 1,831 (95 %)  eval_tokens 1,234" in shown[0]
    assert "perplexity 1,785  eval_tokens 1,234" in shown[1]


def progress(stream, monkeypatch, capsys, *, steps=3, logs=LOGS):
    """What a training of `steps` steps shows, with standard error as `stream`."""
    monkeypatch.setattr(sys, "stderr", stream)
    callback, arguments = ProgressLog(), SimpleNamespace(disable_tqdm=False)
    state = SimpleNamespace(global_step=0, max_steps=steps, is_world_process_zero=True)
    callback.on_train_begin(arguments, state, None)
    for step in range(1, steps + 1):
        state.global_step = step
        callback.on_step_end(arguments, state, None)
        callback.on_log(arguments, state, None, logs=logs)
    callback.on_log(arguments, state, None, logs={"train_runtime": 3.0, "num_input_tokens_seen": 4096})
    callback.on_train_end(arguments, state, None)
    return capsys.readouterr().out


def test_lines_are_one_for_each_log_and_the_last_one_waits_for_nothing(monkeypatch, capsys):
    lines = progress(io.StringIO(), monkeypatch, capsys).splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert [" left " in line for line in lines] == [True, True, False]
