"""Weights and optimizer states on NVMe (`3-nvme`). DeepSpeed's transfers need libaio and pages that may be locked; here
plain reads and writes of the same files take their place, and all else is DeepSpeed's own.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, read_json
from deepspeed import git_version_info
from deepspeed.runtime.swap_tensor import (
    optimizer_utils,
    partitioned_optimizer_swapper,
    partitioned_param_swapper,
    pipelined_optimizer_swapper,
)
from ranks import on_ranks, trained

import dsft

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


@pytest.mark.parametrize("method", ["full", "lora"])
def test_weights_on_nvme_find_a_buffer_and_train_as_those_on_a_rank(case, nvme, tmp_path, method):
    on_nvme, on_rank = (
        on_ranks(1, losses, case(name, zero=file, method=method))[0] for name, file in (("nvme", nvme), ("rank", "3"))
    )
    assert len([*tmp_path.glob("disk/zero_stage_3/float32params/rank0/*")]) > 5  # more than there are buffers
    assert on_nvme == pytest.approx(on_rank, rel=1e-5)


@pytest.mark.parametrize("least_bytes", [LEAST_BYTES, 2**30])  # 2**30: the optimizer's states are too small for NVMe
def test_a_resume_goes_on_with_the_moments_on_nvme(case, nvme, tmp_path, least_bytes):
    saving = {"zero": nvme, "save_strategy": "steps", "save_steps": 2}
    how = functools.partial(losses, least_bytes=least_bytes)
    without_break = on_ranks(1, how, case("first", **saving))[0]
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    resumed = on_ranks(1, how, case("again", zero=nvme, resume_from_checkpoint=checkpoint))[0]
    assert resumed == pytest.approx(without_break, rel=1e-5)
    if least_bytes == LEAST_BYTES:
        with pytest.raises(AssertionError, match="without NVMe, which it was saved with"):
            on_ranks(1, losses, case("elsewhere", zero="3-offload", resume_from_checkpoint=checkpoint))


def nats(model: Path, data: Path, zero: str) -> float:
    with_plain_files()
    names = {"model": str(model), "data": str(data), "zero": zero}
    return dsft.evaluate_perplexity(**names, seq_len=64, batch_tokens=256, progress=False).perplexity.nats


def test_an_evaluation_has_buffers_for_the_largest_weight_on_nvme(tiny, nvme):
    on_nvme, whole = (on_ranks(1, nats, tiny / "model", tiny / "held_out.jsonl", zero)[0] for zero in (nvme, "0"))
    assert on_nvme == whole
