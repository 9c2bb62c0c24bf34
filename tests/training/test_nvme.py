"""Weights and optimizer states on NVMe (`3-nvme`). DeepSpeed's transfers need libaio and pages that may be locked; here
plain reads and writes of the same files take their place, and all else is DeepSpeed's own.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, grid, read_json
from deepspeed import git_version_info
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.swap_tensor import (
    optimizer_utils,
    partitioned_optimizer_swapper,
    partitioned_param_swapper,
    pipelined_optimizer_swapper,
)
from ranks import on_ranks, trained
from tiny import write_model

import dsft
from dsft.checkpoints.export import export
from dsft.errors import UserError
from dsft.run_setup import arguments
from dsft.runtime.disk import RunLock

pytestmark = pytest.mark.launch

LEAST_BYTES = 1024
"""On NVMe lies what has at least as many; DeepSpeed's own 1 MiB is more than a tiny model's weights have."""


class PlainFiles:
    """Stands for DeepSpeed's `aio_handle`."""

    def __init__(self, **_):
        self.locked, self.number = [], 0

    def load(self, **_) -> "PlainFiles":  # what the builder of the operator is asked for
        return self

    @property
    def aio_handle(self) -> type:
        return PlainFiles

    def new_cpu_locked_tensor(self, numel: int, example: torch.Tensor) -> torch.Tensor:
        self.locked.append(torch.empty(numel, dtype=example.dtype))
        return self.locked[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == other.data_ptr() for other in self.locked)

    def async_pread(self, tensor: torch.Tensor, path: str, _: int) -> int:
        content = Path(path).read_bytes()
        assert len(content) >= tensor.nbytes
        tensor.copy_(torch.frombuffer(bytearray(content[: tensor.nbytes]), dtype=tensor.dtype))
        self.number += 1
        return 0

    def async_pwrite(self, tensor: torch.Tensor, path: str, _: int) -> int:
        Path(path).write_bytes(tensor.detach().numpy().tobytes())
        self.number += 1
        return 0

    def wait(self) -> int:
        done, self.number = self.number, 0
        return done


def with_plain_files(least_bytes: int = LEAST_BYTES) -> None:
    """`least_bytes`: of what the optimizer keeps there."""
    for module in (partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper):
        module.AsyncIOBuilder = PlainFiles
    git_version_info.installed_ops["async_io"] = True
    partitioned_param_swapper.MIN_AIO_BYTES, optimizer_utils.MIN_AIO_BYTES = LEAST_BYTES, least_bytes


@pytest.fixture
def nvme(tmp_path) -> str:
    """The JSON that dsft brings, with all weights in the folder `disk`, and transformers' and DeepSpeed's own numbers
    of what is fetched ahead and kept.
    """
    content = read_json(ROOT / "ds_configs" / "zero3_nvme.json")
    section = content["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        section[part]["nvme_path"] = str(tmp_path / "disk")
    section["offload_param"] |= {"buffer_size": 1000, "max_in_cpu": 0}
    section |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
    del section["stage3_max_reuse_distance"]
    content["aio"]["block_size"] = LEAST_BYTES
    (tmp_path / "disk").mkdir()
    path = tmp_path / "nvme.json"
    path.write_text(json.dumps(content))
    return str(path)


def with_section(file: str, optimizer: dict | None = None, **changes) -> str:
    """The same with another optimizer and other values in zero_optimization, whose sections are completed."""
    content = read_json(file)
    content["optimizer"] = optimizer or content["optimizer"]
    section = content["zero_optimization"]
    for name, value in changes.items():
        section[name] = section[name] | value if isinstance(value, dict) else value
    changed = Path(file).with_name(f"changed-{'-'.join(changes)}.json")
    changed.write_text(json.dumps(content))
    return str(changed)


def losses(options: dict, **how: int) -> list[float]:
    with_plain_files(**how)
    history = trained(options).state.log_history
    return [entry[name] for entry in history for name in ("loss", "eval_loss") if name in entry]


@pytest.fixture
def case(options, tiny, tmp_path):
    def make(name: str, **changes) -> dict:
        changes = {
            "max_steps": 4,
            "logging_steps": 1,
            "gradient_accumulation_steps": 2,
            "memory_check": False,
        } | changes
        evaluated = {"eval_data": str(tiny / "held_out.jsonl"), "eval_strategy": "steps", "eval_steps": 2}
        return options(tmp_path / name, **changes, **evaluated)

    return make


SAVING = {"save_strategy": "steps", "save_steps": 2}
KEPT_BY_ALL = {"stage3_param_persistence_threshold": "auto"}
"""Small weights are held in full on every rank, as in the JSON that dsft brings."""
IN_HOST_MEMORY = 2**30
"""So many bytes that the optimizer's states are too small for NVMe."""


# In full, and with the optimizer in memory, test_a_resume_finds_weights_wherever_they_lie has it: "come to NVMe".
@pytest.mark.parametrize("method", grid(["full", "lora"], ["lora"]))
def test_weights_on_nvme_find_a_buffer_and_train_as_those_on_a_rank(case, nvme, tmp_path, method):
    """Also with the numbers that transformers' manual has for NVMe."""
    manual = with_section(nvme, stage3_max_live_parameters=10**9, stage3_max_reuse_distance=10**9)
    on_nvme, on_rank = (
        on_ranks(1, losses, case(name, zero=file, method=method))[0] for name, file in (("nvme", manual), ("rank", "3"))
    )
    assert len([*tmp_path.glob("disk/zero_stage_3/float32params/rank0/*")]) > 5  # more than there are buffers
    assert on_nvme == pytest.approx(on_rank, rel=1e-5)


PIPELINED = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
SMALL_GROUPS = {"sub_group_size": 10_000}
MUON = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("ranks", "least_bytes", "section", "optimizer"),
    [
        pytest.param(1, LEAST_BYTES, SMALL_GROUPS | {"offload_optimizer": PIPELINED}, {}, id="pipelined"),
        # DeepSpeed compiles Muon's step, a minute on a CPU.
        pytest.param(1, LEAST_BYTES, {"reduce_scatter": False}, MUON, id="Muon", marks=pytest.mark.exhaustive),
        pytest.param(2, IN_HOST_MEMORY, KEPT_BY_ALL, {}, id="too small for NVMe"),
    ],
)
def test_a_resume_goes_on_with_the_moments(case, nvme, tmp_path, ranks, least_bytes, section, optimizer):
    file = with_section(nvme, optimizer, **section)
    left = tmp_path / "disk" / "zero_stage_3" / "optimizer" / "rank0" / "of_an_earlier_run.tensor.swp"
    left.parent.mkdir(parents=True)
    left.touch()
    how = functools.partial(losses, least_bytes=least_bytes)
    without_break = on_ranks(ranks, how, case("first", zero=file, **SAVING))[0]
    assert not [*tmp_path.glob(f"first/**/{left.name}")]
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    resumed = on_ranks(ranks, how, case("again", zero=file, resume_from_checkpoint=checkpoint))[0]
    assert resumed == pytest.approx(without_break, rel=5e-6)


IN_MEMORY = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        pytest.param(
            {}, {"offload_param": {"device": "cpu"}}, {"frozen": ["embed_tokens"]}, id="frozen weights leave NVMe"
        ),
        pytest.param(IN_MEMORY, IN_MEMORY, {}, id="stay on NVMe alone", marks=pytest.mark.exhaustive),
        pytest.param("3", IN_MEMORY, {}, id="come to NVMe"),
    ],
)
def test_a_resume_finds_weights_wherever_they_lie(case, nvme, tmp_path, then, now, words):
    zero = then if isinstance(then, str) else with_section(nvme, **then)
    without_break = on_ranks(1, losses, case("first", zero=zero, **words, **SAVING))[0]
    words = words | {"resume_from_checkpoint": str(tmp_path / "first" / "checkpoint-2")}
    resumed = on_ranks(1, losses, case("again", zero=with_section(nvme, **now), **words))[0]
    assert resumed == pytest.approx(without_break, rel=5e-6)


def scale_and_rates(options: dict) -> tuple[float, list[float]]:
    with_plain_files()
    CPU_Accelerator.is_fp16_supported = lambda self: True
    arguments.check_machine = lambda *_: []  # a CPU is too slow for users, not for this
    trainer = trained(options)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    return trainer.model_wrapped.optimizer.loss_scale, rates


def test_a_resume_goes_on_with_the_loss_scale_and_a_rate_that_is_a_state(case, nvme, tmp_path):
    content = read_json(nvme)
    content["fp16"] |= {"initial_scale_power": 6, "loss_scale_window": 1}
    Path(nvme).write_text(json.dumps(content))
    falling = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"}
    falling["lr_scheduler_kwargs"] = {"mode": "max", "factor": 0.5, "patience": 0}  # each evaluation halves the rate
    options = falling | {"zero": nvme, "dtype": "float16", "max_steps": 6}
    without_break = on_ranks(1, scale_and_rates, case("first", **options, **SAVING))[0]
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    assert on_ranks(1, scale_and_rates, case("again", **options, resume_from_checkpoint=checkpoint))[0] == without_break


def test_an_optimizer_that_lay_on_nvme_is_resumed_only_there(case, nvme, tiny, tmp_path):
    on_ranks(1, losses, case("first", zero=nvme, **SAVING))
    checkpoint = tmp_path / "first" / "checkpoint-2"
    with pytest.raises(AssertionError, match="only on the ranks and with the zero that it was saved with"):
        on_ranks(1, losses, case("elsewhere", zero="3-offload", resume_from_checkpoint=str(checkpoint)))
    shards, problem = next(checkpoint.glob("global_step*")), f"holds no weights; take the safetensors in {checkpoint}"
    with pytest.raises(UserError, match=problem):
        export(str(shards), str(tmp_path / "exported"))
    with pytest.raises(AssertionError, match=f"UserError: .*{problem}"):
        on_ranks(1, nats, shards, None, tiny / "held_out.jsonl", "0")


def test_two_trainings_do_not_write_the_same_files(case, nvme, tmp_path):
    lock = RunLock(tmp_path / "disk" / "rank0")
    lock.acquire()
    try:
        with pytest.raises(AssertionError, match=f"nvme_path={tmp_path}/disk/rank0: process .* is writing there now"):
            on_ranks(1, losses, case("second", zero=nvme))
    finally:
        lock.release()
    assert on_ranks(1, losses, case("second", zero=nvme))


def nats(model: Path, reference: Path | None, data: Path, zero: str) -> float:
    with_plain_files()
    names = {"model": str(model), "reference": reference and str(reference), "data": str(data), "zero": zero}
    return dsft.evaluate_perplexity(**names, seq_len=64, batch_tokens=256, progress=False).perplexity.nats


def test_an_evaluation_has_buffers_for_the_largest_weight_on_nvme_and_leaves_nothing_there(tiny, nvme, tmp_path):
    reference = write_model(tmp_path / "reference", seed=1)
    on_nvme, whole = (
        on_ranks(1, nats, tiny / "model", reference, tiny / "held_out.jsonl", zero)[0] for zero in (nvme, "0")
    )
    assert on_nvme == whole and not [*(tmp_path / "disk").iterdir()]
