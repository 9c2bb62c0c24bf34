"""Foreign code in pickles is refused, wherever a checkpoint or a model is read; what was written by dsft is read.
Parameters and optimizer states come back from DeepSpeed's shards as they were cut, whole and in parts.
"""

import json
import math
import os
import random
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import flags
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from ranks import run_entry, train_all
from safetensors.torch import load_file
from tiny import write_model
from transformers import AutoModelForCausalLM

from dsft.checkpoints.export import export
from dsft.checkpoints.manifest import MANIFEST, files_of, hash_and_sync, read_manifest, sealed
from dsft.checkpoints.run_folder import find_weights
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.adapters import add_lora
from dsft.models.build import check_weights, load_weights
from dsft.models.measure import measure_model
from dsft.models.model_folder import step_folder
from dsft.models.weight_files import FP32, ZeroShards, load_pickle, model_identity, safe_unpickling

STEP = "checkpoint-2/global_step2"


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.makedirs, (str(self.trace), 0o777, True)


class ByName:
    """Is stored as an attribute of a class."""

    def __init__(self, of: type, name: str):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def poison(file: Path, trace: Path, *, old_format: bool = False) -> None:
    """Add a payload to what a file of `torch.save` holds."""
    content = torch.load(file, map_location="cpu", weights_only=False)
    torch.save({**content, "added": Payload(trace)}, file, _use_new_zipfile_serialization=not old_format)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, options) -> Path:
    """Runs of 2 steps with a checkpoint each, in ZeRO 0 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    words = {"save_strategy": "steps", "save_steps": 2}
    train_all(2, [options(folder / zero, zero=zero, **words) for zero in ("0", "2")], folder / "log")
    return folder


@pytest.fixture
def copy(runs, tmp_path):
    """Copies a run of `runs` for a test to change."""
    return lambda zero: Path(shutil.copytree(runs / zero, tmp_path / zero))


SHARDS = ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_stage_that_is_stored_by_name_is_read_and_no_other_attribute(tmp_path, zip_format):
    """As Python 3.11.2 stores members of enums, and other releases do not."""
    file = tmp_path / "shard.pt"
    for of, name, said in [
        (ZeroStageEnum, "weights", None),
        (ZeroStageEnum, "__base__", "cannot be read"),
        (LossScaler, "__init__", r"shard\.pt: contains getattr, which checkpoints do not need"),
    ]:
        torch.save({"stage": ByName(of, name)}, file, _use_new_zipfile_serialization=zip_format)
        if said is None:
            assert load_pickle(file) == {"stage": ZeroStageEnum.weights}
        else:
            with pytest.raises(UserError, match=said):
                load_pickle(file)


@pytest.mark.launch
@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("old_format", [False, True])
def test_export_of_a_poisoned_shard_names_the_class_and_runs_nothing_unless_trusted(copy, tmp_path, name, old_format):
    run, trace = copy("2"), tmp_path / "trace"
    poison(run / STEP / name, trace, old_format=old_format)
    (run / "checkpoint-2" / "model.safetensors").unlink()
    (run / "checkpoint-2" / MANIFEST).unlink()  # with it the changed file is found before anything is read
    with pytest.raises(UserError, match=rf"{name}: contains \w+\.makedirs, .*--trust_checkpoint"):
        export(str(run / "checkpoint-2"), str(tmp_path / "out"))
    assert not trace.exists()
    # DeepSpeed maps optimizer states into memory, which torch refuses for the old format, after they were read here.
    with pytest.raises(UserError, match="mmap") if old_format and "optim" in name else nullcontext():
        export(str(run / "checkpoint-2"), str(tmp_path / "out"), trust_checkpoint=True)
    assert trace.exists()


@pytest.mark.launch
@pytest.mark.parametrize(("name", "is_ours"), [(SHARDS[1], True), (SHARDS[0], False)])
def test_a_resume_from_a_poisoned_file_ends_on_all_ranks_before_anything_runs(copy, options, tmp_path, name, is_ours):
    """DeepSpeed reads its shards itself on the ranks that wrote them; without a manifest dsft reads them."""
    run = copy("2")
    checkpoint = run / "checkpoint-2"
    poison(run / STEP / name, tmp_path / "trace")
    if is_ours:  # with a manifest that fits, as whoever changed it would write it
        files = {str(path.relative_to(checkpoint)): hash_and_sync(path) for path in files_of(checkpoint)}
        manifest = read_manifest(checkpoint) | {"files": files}
        (checkpoint / MANIFEST).write_text(json.dumps(sealed(manifest)))
    else:
        (checkpoint / MANIFEST).unlink()  # as of another tool
        (run / "final" / MANIFEST).unlink()
    words = flags(options(run, zero="2", max_steps=3, resume_from_checkpoint="auto", lost_timeout=10))
    codes: list[int] = []
    refused = run_entry("dsft.train", words, world=2, codes=codes)
    assert 0 not in codes and not (tmp_path / "trace").exists()
    if is_ours:
        assert codes[1] == 2, "the rank of that shard"
    else:
        assert f"{name}: contains" in refused.stderr and "--trust_checkpoint" in refused.stderr, refused.stderr


@pytest.mark.parametrize(("weights", "file"), [("model", "pytorch_model.bin"), ("adapter", "adapter_model.bin")])
def test_poisoned_weights_of_a_model_or_an_adapter_are_refused(tmp_path, weights, file):
    folder, trace = tmp_path / weights, tmp_path / "trace"
    base = write_model(tmp_path / "model")
    if weights == "adapter":
        add_lora(AutoModelForCausalLM.from_pretrained(base), TrainConfig(method="lora")).save_pretrained(folder)
    (safe,) = folder.glob("*.safetensors")
    torch.save(load_file(safe), folder / file)
    safe.unlink()
    poison(folder / file, trace)
    adapter = {"method": "lora", "adapter": str(folder)} if weights == "adapter" else {}
    options = TrainConfig(model=str(base), **adapter)
    (problem,) = check_weights(options, measure_model(options), local=True)
    assert re.search(rf"{file}: contains \w+\.makedirs", problem) and not trace.exists()


def test_a_forced_weights_only_load_ends_with_its_context(tmp_path, monkeypatch):
    torch.save({"added": Payload(tmp_path / "trace")}, tmp_path / "file.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for _ in range(2):
        with pytest.raises(UserError, match="makedirs"), safe_unpickling(trust=False):
            torch.load(tmp_path / "file.pt", weights_only=False)  # as DeepSpeed calls it
        with pytest.raises(UserError, match="makedirs"):
            load_pickle(tmp_path / "file.pt")
    assert not (tmp_path / "trace").exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "trace").exists()


def write_shards(folder, parameters: dict[str, torch.Tensor], *, world: int, stage: int) -> None:
    """Cut parameters among ranks as DeepSpeed's stage does, with twice their values as exp_avg."""
    folder.mkdir()
    shapes = [{name: tensor.shape for name, tensor in parameters.items()}]
    torch.save({"param_shapes": shapes}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    flats, spans = [], [{} for _ in range(world)]
    if stage == 3:  # every parameter is cut, and the last parts are padded
        for rank in range(world):
            parts = []
            for tensor in parameters.values():
                size = -(-tensor.numel() // world)
                part = tensor.flatten()[rank * size : (rank + 1) * size]
                parts.append(torch.cat([part, part.new_full((size - part.numel(),), torch.nan)]))
            flats.append(torch.cat(parts))
    else:  # the concatenation is cut
        whole = torch.cat([tensor.flatten() for tensor in parameters.values()])
        size = -(-whole.numel() // world)
        flats = [whole[rank * size : (rank + 1) * size] for rank in range(world)]
        begin = 0
        for name, tensor in parameters.items():
            for rank in range(world):
                first, last = max(begin, rank * size), min(begin + tensor.numel(), (rank + 1) * size)
                if first < last:
                    spans[rank][name] = fragment_address(start=first - rank * size, numel=last - first)
            begin += tensor.numel()
    for rank, flat in enumerate(flats):
        optimizer = {"param_groups": [{"step": 5}], "state": {0: {"exp_avg": 2 * flat}}}
        states = {"zero_stage": stage, "loss_scaler": float(rank + 1)}
        states["partition_count"] = world if stage == 3 else [world]
        if stage == 3:
            states |= {"fp32_flat_groups": [flat], "optimizer_state_dict": optimizer}
        else:
            states |= {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": optimizer}
            states["param_slice_mappings"] = [spans[rank]]
        torch.save({"optimizer_state_dict": states}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def drawn_parameters(seed: int) -> dict[str, torch.Tensor]:
    chance = random.Random(seed)
    shapes = [[chance.randint(1, 9) for _ in range(chance.randint(1, 3))] for _ in range(chance.randint(2, 5))]
    return {f"layer.{number}": torch.rand(shape) for number, shape in enumerate(shapes)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("seed", "world"), enumerate([1, 2, 3, 4, 11]))  # rank 10 comes after rank 9
def test_every_part_of_every_parameter_and_state_is_what_was_cut(tmp_path, seed, world, stage):
    parameters, chance = drawn_parameters(seed), random.Random(seed)
    write_shards(tmp_path / "global_step5", parameters, world=world, stage=stage)
    shards = ZeroShards(tmp_path)
    assert (shards.world_size, shards.step, shards.states, shards.loss_scaler) == (world, 5, {"exp_avg"}, 1.0)
    for name, tensor in parameters.items():
        assert shards.shapes[name] == tuple(tensor.shape)
        numel = tensor.numel()
        assert torch.equal(shards.read(name, FP32, 0, 2 * numel), tensor.flatten())
        assert torch.equal(shards.read(name, "exp_avg", 0, numel), 2 * tensor.flatten())
        for _ in range(5):
            start, stop = sorted(chance.choices(range(numel + 1), k=2))
            assert torch.equal(shards.read(name, FP32, start, stop), tensor.flatten()[start:stop])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_file_is_missing_is_noticed(tmp_path, stage):
    parameters = {"weight": torch.rand(4, 5), "bias": torch.rand(math.prod((3, 4)))}
    write_shards(tmp_path / "global_step5", parameters, world=3, stage=stage)
    (tmp_path / "global_step5" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UserError, match="are the files of all ranks there"):
        ZeroShards(tmp_path)


def test_a_copy_of_another_ranks_file_is_noticed(tmp_path):
    write_shards(tmp_path / "global_step5", {"weight": torch.rand(4, 5), "bias": torch.rand(12)}, world=3, stage=2)
    first, last = (tmp_path / "global_step5" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2))
    shutil.copy(first, last)
    with pytest.raises(UserError, match="elements of weight; are the files of all ranks there"):
        ZeroShards(tmp_path)


def test_shards_of_accelerate_s_save_state_are_read(tmp_path):
    """They lie in a folder of another name, which `latest` has."""
    folder = write_model(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model").mkdir()
    torch.save({"module": state}, folder / "pytorch_model" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("pytorch_model")
    before = model_identity(str(folder), revision=None, seed=0)["content"]
    loaded = load_weights(str(find_weights(str(folder))), dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    state["lm_head.weight"][0] = 0
    torch.save({"module": state}, folder / "pytorch_model" / "mp_rank_00_model_states.pt")
    assert model_identity(str(folder), revision=None, seed=0)["content"] != before


def test_the_step_that_is_read_is_the_one_named_as_latest_or_the_newest(tmp_path):
    for step in (9, 10):
        (tmp_path / f"global_step{step}").mkdir()
    assert step_folder(tmp_path).name == "global_step10"
    (tmp_path / "latest").write_text("global_step9\n")
    assert step_folder(tmp_path).name == "global_step9"
    for lost in ("global_step7", "", "\n", "..", "../.."):
        (tmp_path / "latest").write_text(lost)
        assert step_folder(tmp_path).name == "global_step10"
    (tmp_path / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert step_folder(tmp_path / "global_step10").name == "global_step10"
    assert step_folder(tmp_path / "nowhere") is None
