"""What saving and resuming hold in host memory, and how long a collective may take, on two ranks."""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from allocator import allocator_peak
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from ranks import SECONDS, on_ranks, trained

from dsft.models.weight_files import mapped_resume
from dsft.training.trainer import PerplexityTrainer
from dsft.watchdog.processes import Process


def train_measured(options: dict) -> dict:
    """Train; return what its saves of the model took, and the limits of its groups."""
    saved, save_model = [], PerplexityTrainer.save_model

    def measured_save(*args, **kwargs):
        saved.append(allocator_peak(lambda: save_model(*args, **kwargs)))

    PerplexityTrainer.save_model = measured_save
    try:
        trainer = trained(options)
    finally:
        PerplexityTrainer.save_model = save_model
    weights = [parameter for parameter in trainer.model.parameters()]
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in dist.distributed_c10d._world.pg_map}
    return {
        "saved": saved,
        "limits": limits,
        "num_groups": len(dist.distributed_c10d._world.pg_map),
        "bytes": sum(parameter.nbytes for parameter in weights),
        "trained": sum(parameter.nbytes for parameter in weights if parameter.requires_grad),
    }


def train_all_measured(cases: list[dict]) -> list[dict]:
    return [train_measured(options) for options in cases]


@pytest.fixture(scope="module")
def measured(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    common = {"max_steps": 1, "zero": "2", "lora_r": 2}
    cases = [options(folder / method, method=method, **common) for method in ("lora", "full")]
    return on_ranks(2, train_all_measured, cases, log=folder / "log")


def test_saving_adapters_copies_adapters_alone_and_on_rank_0(measured):
    (lora, _), (lora_1, _) = measured
    # a copy, and what is written and read back of it
    assert 0 < max(lora["saved"]) < 5 * lora["trained"] < lora["bytes"] / 3
    assert lora_1["saved"] == [0]


def test_saving_a_model_copies_it_once_and_on_rank_0(measured):
    (_, full), (_, full_1) = measured
    assert full["trained"] == full["bytes"] and 0 < max(full["saved"]) < 3.5 * full["bytes"]
    assert full_1["saved"] == [0]


def test_groups_that_deepspeed_makes_have_the_limit_of_the_first(measured):
    for results in measured:
        for result in results:
            assert result["num_groups"] > 1 and result["limits"] == {timedelta(seconds=SECONDS)}


def is_of_file(tensor: torch.Tensor, path: Path) -> bool:
    """Whether a tensor's memory is the pages of a mapped file (man 5 proc)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(str(path))
    return False


def shard(folder):
    numbers = torch.arange(2**16, dtype=torch.float32)
    state = {0: {"exp_avg": numbers.clone(), "exp_avg_sq": numbers.clone(), "step": torch.tensor(3.0)}}
    content = {"zero_stage": 3, "fp32_flat_groups": [numbers], "optimizer_state_dict": {"state": state}}
    torch.save({"optimizer_state_dict": content}, folder / "shard.pt")
    return folder / "shard.pt"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_shard_is_mapped_while_a_run_resumes(on_gpu, tmp_path):
    """Without a GPU the moments become the optimizer's: as the file's pages they would keep a removed checkpoint."""
    path, weight = shard(tmp_path), torch.nn.Parameter(torch.zeros(2**16))
    optimizer = torch.optim.AdamW([weight])
    with mapped_resume(on_gpu=on_gpu):
        loaded = TorchCheckpointEngine().load(str(path), map_location="cpu")["optimizer_state_dict"]
        weights, read = loaded["fp32_flat_groups"][0], loaded["optimizer_state_dict"]["state"]
        assert is_of_file(weights, path) and is_of_file(read[0]["exp_avg"], path), "nothing is held twice"
        optimizer.load_state_dict({"state": read, "param_groups": optimizer.state_dict()["param_groups"]})
    moments = optimizer.state[weight]
    assert [is_of_file(moments[name], path) for name in ("exp_avg", "exp_avg_sq", "step")] == [on_gpu, on_gpu, False]
    assert weights[-1] == moments["exp_avg_sq"][-1] == 2**16 - 1 and moments["step"] == 3


def test_what_a_process_reads_and_writes_is_counted(tmp_path):
    process = Process.of(os.getpid())
    before = process.moved_bytes()
    (tmp_path / "a").write_bytes(bytes(2**22))
    written = process.moved_bytes()
    assert written - before >= 2**22
    shutil.copyfile(tmp_path / "a", os.devnull)
    assert process.moved_bytes() - written >= 2**22
