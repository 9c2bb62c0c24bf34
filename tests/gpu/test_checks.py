"""`scripts/test --gpu`: claims that hold and that do not, limits, skip reasons, what is written; whole on CPU ranks."""

import dataclasses
import json
import socket
import subprocess
import sys

import psutil
import pytest
import torch
from conftest import ROOT, grid, read_json
from safetensors.torch import save_file
from transformers import LlamaConfig

from dsft.config.options import TrainConfig
from dsft.models.measure import measure_model
from dsft.runtime.hardware import Machine
from dsft.setup.decide import TrainingRun, job_of, plan_run
from dsft.units import GiB
from gpu import __main__ as command
from gpu import examine, faults, files
from gpu.check import Check, Row, Setting
from gpu.checks import CHECKS, FILES
from gpu.perplexities import same_bits
from gpu.ranks import OwnMemory
from gpu.share import same_training
from gpu.speeds import masks
from gpu.table import has_failures, measured_rows, table, without_names, write_results
from gpu.trainings import compared

H100 = Machine(
    nodes=1, ranks_per_node=2, device_bytes=79 * GiB, host_bytes=500 * GiB, has_gpu=True, gpu_type="NVIDIA H100 80GB"
)


@pytest.fixture
def setting(tmp_path):
    return Setting(folder=str(tmp_path), ranks=2, has_gpu=False, tiny=True)


def run_json(**ratios: float) -> dict:
    """A run.json whose figures were measured at these ratios of the plan."""
    figures = {
        "GPU memory allocated": 10 * GiB,
        "GPU memory reserved": 12 * GiB,
        "host memory of a node": 5 * GiB,
        "time of a step": 2.0,
    }
    check = {
        name: {"predicted": value, "measured": value * ratio}
        for (name, value), ratio in zip(figures.items(), ratios.values(), strict=True)
    }
    log = [{"loss": 3.0, "mfu": 0.41}]
    results = {"plan_check": check, "log": log}
    return {"results": results, "plan": {"reason": "asked for"}}


def test_a_training_near_its_plan_holds_the_claims_and_one_beside_it_does_not():
    good = list(compared(run_json(gpu=1.05, reserved=2.0, host=9.0, time=0.9), tiny=False))
    assert [row.ok for row in good] == [True, None, None], "host memory is no claim where a GPU's is measured"
    assert good[0].predicted == "10 GiB" and good[1].measured == "24 GiB" and good[2].measured == "1.8 s, MFU 41%"
    bad = list(compared(run_json(gpu=1.2, reserved=1.0, host=1.0, time=1.3), tiny=False))
    assert [row.ok for row in bad] == [False, None, None]
    assert {row.ok for row in compared(run_json(gpu=1.2, reserved=1, host=1.0, time=1.3), tiny=True)} == {None, True}


def test_the_measured_rows_are_those_of_trainings():
    training = list(compared(run_json(gpu=1.05, reserved=2.0, host=9.0, time=0.9), tiny=False))
    text = measured_rows({"full-1": training, "links": [Row(claim="a rate", measured="1", ok=True)]})
    assert text.count("\n") == 0 and "--only full-1" in text
    cells = [cell.strip() for cell in text.strip("| ").split("|")]
    assert "10.00 planned, 10.50 measured" in cells and "2 planned, 1.8 measured" in cells
    del training[0].details["plan_check"]["time of a step"]
    assert "no time is planned" in measured_rows({"full-1": training})


def test_perplexity_that_differs_in_the_last_bit_is_not_the_same():
    first = {"nats": 100.0, "tokens": 10, "nats_per_token": 10.0, "blocks": {"nats": [60.0, 40.0]}}
    assert same_bits("twice", first, dict(first)).ok
    assert not same_bits("twice", first, first | {"nats": 100.00000000000001}).ok
    assert not same_bits("twice", first, first | {"blocks": {"nats": [40.0, 60.0]}}).ok


def test_host_memory_of_ranks_is_their_own_without_the_pages_of_mapped_files(tmp_path):
    """A rank reads 100 MB of a shard through a map, and makes 50 MB."""
    (tmp_path / "shard").write_bytes(bytes(10**8))
    script = """
import mmap, sys
shard = open(sys.argv[1], "rb")
pages = mmap.mmap(shard.fileno(), 0, prot=mmap.PROT_READ)
read, own = sum(pages[::4096]), b"1" * (5 * 10**7)
print("holds it", flush=True)
sys.stdin.read()
"""
    words = [sys.executable, "-c", script, tmp_path / "shard", "-m", "dsft.train"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline()
        memory = OwnMemory()
        memory.sample()
        rank.stdin.close()
    assert 5 * 10**7 <= memory.peak_bytes < 10**8


@pytest.mark.parametrize(
    ("way_out", "holds"),
    [
        ("the next smaller plan is ZeRO 1, by prediction 38.9 GiB: --zero 1", True),
        ("the next smaller plan is ZeRO 2, by prediction 244 GiB: --zero 2", False),
        ("no smaller plan is known: use more GPUs", False),
    ],
)
def test_out_of_memory_that_names_no_plan_that_fits_does_not_hold(setting, monkeypatch, way_out, holds):
    text = f"dsft: error: out of memory in training; 271 GiB were predicted, 79.1 GiB are available; {way_out}"
    monkeypatch.setattr(faults, "launch", lambda *_, **__: text)
    (row,) = faults.out_of_memory(setting)
    assert row.ok is holds


@pytest.mark.parametrize(
    "memory_bytes", grid([int(5.6 * GiB), files.NARROW_BYTES, files.WIDE_BYTES], [files.NARROW_BYTES])
)
def test_the_model_of_a_card_fits_in_the_trainings_of_the_checks(tmp_path, memory_bytes):
    LlamaConfig(**files.widths_for(memory_bytes), tie_word_embeddings=True).save_pretrained(tmp_path)
    card = dataclasses.replace(H100, ranks_per_node=1, device_bytes=memory_bytes, gpu_type="")
    for changes in ({"zero": "1"}, {"zero": "1", "method": "lora"}, {"zero": "2"}, {"zero": "3"}):
        training = {"per_device_train_batch_size": 2}
        options = TrainConfig(
            model=str(tmp_path / "config.json"), dtype="bfloat16", seq_len=2048, **changes, training=training
        )
        job = job_of(dataclasses.replace(options, tiled_loss=False), measure_model(options), masked=False)
        job = dataclasses.replace(job, attention="flash", checkpointing=changes["zero"] > "1")
        assert plan_run(TrainingRun(options=options, machine=card, job=job)).plan.fits


def test_packing_is_tried_on_the_device(setting, tiny):
    setting.path("base").symlink_to(tiny / "model")
    (packing,) = masks(setting)
    assert packing.ok is True


def checks_that_do(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(examine, "worker_command", lambda setting: list(words))


def test_a_check_that_hangs_is_ended_at_its_limit_and_the_next_one_runs(setting, monkeypatch):
    checks_that_do(monkeypatch, "sleep", "600")
    checks = [Check(name=name, run=iter, seconds=0.01) for name in ("first", "second")]
    results = dict(examine.run_checks(checks, setting, seconds=600))
    assert {name: rows[-1].ok for name, rows in results.items()} == {"first": False, "second": False}
    assert "not done after" in results["first"][-1].measured and has_failures(results)
    assert not setting.of("first").runs.exists()


def test_the_end_of_a_check_ends_all_that_it_started():
    worker = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(worker.stdout.readline()))
    assert child.is_running()
    examine.end_all(worker)
    assert not child.is_running() and worker.poll() is not None


def test_a_check_that_fails_keeps_its_rows_and_its_last_lines(setting, monkeypatch):
    row = Row(claim="first", measured="1", ok=True)
    setting.path("broken.jsonl").write_text(json.dumps(dataclasses.asdict(row)) + '\n{"claim": "cut')
    checks_that_do(monkeypatch, "sh", "-c", "echo 'dsft: error: no room' >&2; exit 2")
    first, last = examine.run_check(Check(name="broken", run=iter, seconds=100), setting.of("broken"), left=600)
    assert first == row
    assert last.ok is False and last.measured == "dsft: error: no room"
    assert last.details["last lines"] == ["dsft: error: no room"]


def test_a_check_that_cannot_run_or_has_no_time_left_says_so_and_is_no_failure(setting):
    checks = [
        Check(name="gpu", run=iter, seconds=1, lacks=lambda setting: "needs a GPU"),
        Check(name="late", run=iter, seconds=1),
    ]
    results = dict(examine.run_checks(checks, setting, seconds=0))
    assert results["gpu"][0].measured == "skipped: needs a GPU"
    assert "--minutes" in results["late"][0].measured and not has_failures(results)


def test_table_and_json_can_be_pasted_and_name_no_host(setting, tmp_path):
    leak = f"a | b\n{socket.gethostname()} in {setting.folder}/x"
    row = Row(claim="memory", predicted="1 GiB", measured=leak, ok=False, details={"last": [leak]})
    write_results({"full-1": [without_names(row, setting)]}, setting, tmp_path)
    text = (tmp_path / "gpu-check.md").read_text()
    assert text.splitlines()[0] == "| check | claim | predicted | measured | ok |"
    assert text.splitlines()[2].count("|") == 6 and "**no**" in text
    content = read_json(tmp_path / "gpu-check.json")
    assert content["checks"]["full-1"][0]["ok"] is False and content["versions"]["torch"]
    for written in (text, json.dumps(content)):
        assert socket.gethostname() not in written and setting.folder not in written


def test_a_host_whose_name_is_a_word_changes_no_claim_and_no_key(setting, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "train")
    monkeypatch.setattr(socket, "getfqdn", lambda: "train.local")
    row = Row(claim="it trains", measured="the training on train.local, train", details={"train": ["on train"]})
    expected = Row(claim="it trains", measured="the training on HOST, HOST", details={"train": ["on HOST"]})
    assert without_names(row, setting) == expected
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.local")
    row = Row(claim="", measured="node7:4242:4300 [0] NCCL WARN of node7.cluster.local")
    assert without_names(row, setting).measured == "HOST:4242:4300 [0] NCCL WARN of HOST"


def test_an_unknown_check_and_a_machine_without_gpus_are_refused(tmp_path, capsys):
    for words, message in ((["--only", "ful-1", "--tiny"], "'ful-1'"), ([], "--tiny")):
        with pytest.raises(SystemExit, match="2"):
            command.main([*words, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_a_failed_check_is_written_and_ends_the_command_with_code_1(tmp_path, monkeypatch, capsys):
    results = {"files": [Row(claim="made", measured="no room", ok=False)], "facts": [Row(claim="x", measured="y")]}
    monkeypatch.setattr(command, "run_checks", lambda *_, **__: results.items())
    with pytest.raises(SystemExit, match="1"):
        command.main(["--tiny", "--out", str(tmp_path)])
    assert "| files | made |  | no room | **no** |" in capsys.readouterr().out
    assert list(read_json(tmp_path / "gpu-check.json")["checks"]) == ["files"], "the others work on these files"


@pytest.mark.exhaustive
@pytest.mark.launch
@pytest.mark.timeout(4000)  # half an hour beside other work
def test_every_check_holds_on_cpu_ranks(run, tmp_path):
    """One of each kind: other stages of the same check take 2 minutes each on a busy machine, and find nothing else."""
    others = ("lora-1", "lora-3", "full-2", "full-3", "perplexity-again", "signal")
    names = [check.name for check in CHECKS if check.name not in others]
    words = [sys.executable, ROOT / "tests" / "gpu", "--tiny", "--minutes", "100", "--out", tmp_path, "--only", *names]
    result = run(words, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = read_json(tmp_path / "gpu-check.json")["checks"]
    assert list(checks) == [FILES.name, *names]
    rows = [(name, row) for name, rows in checks.items() for row in rows]
    skipped = {name for name, row in rows if row["measured"].startswith("skipped")}
    assert skipped == {"out-of-memory", "qlora"}
    assert all(any(row["ok"] for row in checks[name]) for name in checks.keys() - skipped)
    assert table({}).splitlines()[0] in result.stdout
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_nothing_else_is_checked_where_ranks_cannot_share_a_gpu(tmp_path, monkeypatch):
    refused = {"share": [Row(claim="", measured="Duplicate GPU detected", ok=False)], "share-stages": []}
    monkeypatch.setattr(command, "run_checks", lambda *_, **__: refused.items())
    with pytest.raises(SystemExit, match="1"):
        command.main(["--tiny", "--share", "4", "--out", str(tmp_path)])
    assert list(read_json(tmp_path / "gpu-check.json")["checks"]) == ["share"]


def test_a_loss_or_a_norm_beside_one_rank_is_not_the_same_training(setting):
    one_rank = {"loss": 2.0, "grad_norm": 1.0}
    cases = {"one": one_rank, "no norm": {"loss": 2.0}, "loss": one_rank | {"loss": 2.00001}}
    for name, entry in (cases | {"norm": one_rank | {"grad_norm": 1.00001}}).items():
        (setting.runs / name / "final").mkdir(parents=True)
        save_file({"weight": torch.ones(1)}, setting.runs / name / "final" / "model.safetensors")
        run = {"config": {"dtype": "float32"}, "results": {"log": [entry]}}
        (setting.runs / name / "run.json").write_text(json.dumps(run))
    held = {name: same_training(setting, name, "one", steps=1).ok for name in ("no norm", "loss", "norm")}
    assert held == {"no norm": True, "loss": False, "norm": False}


@pytest.mark.exhaustive
@pytest.mark.launch
def test_ranks_that_share_a_device_hold_on_cpu_ranks(run, tmp_path):
    """All stages on two hosts, and a fault; the other checks take half a minute to two minutes each."""
    words = ["--tiny", "--share", "4", "--minutes", "20", "--out", tmp_path, "--only", "share-stages"]
    result = run([sys.executable, ROOT / "tests" / "gpu", *words])
    assert result.returncode == 0, result.stdout + result.stderr
    checks = read_json(tmp_path / "gpu-check.json")["checks"]
    assert list(checks) == ["files", "share", "share-stages"]
    assert all(row["ok"] for rows in checks.values() for row in rows)
