"""Parameters and optimizer states come back from DeepSpeed's shards as they were cut, whole and in parts."""

import math
import random

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from dsft.errors import UserError
from dsft.models.model_folder import has_only_shards, step_folder
from dsft.models.pickles import ZeroShards


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
        assert torch.equal(shards.read(name), tensor.flatten())
        assert torch.equal(shards.read(name, "exp_avg"), 2 * tensor.flatten())
        for _ in range(5):
            start, stop = sorted(chance.choices(range(tensor.numel() + 1), k=2))
            assert torch.equal(shards.read(name, start=start, stop=stop), tensor.flatten()[start:stop])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_file_is_missing_is_noticed(tmp_path, stage):
    parameters = {"weight": torch.rand(4, 5), "bias": torch.rand(math.prod((3, 4)))}
    write_shards(tmp_path / "global_step5", parameters, world=3, stage=stage)
    (tmp_path / "global_step5" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UserError, match="are the files of all ranks there"):
        ZeroShards(tmp_path)


@pytest.mark.parametrize(
    ("name", "files", "is_so"),
    [
        ("checkpoint-2", ["global_step2/a.pt"], True),
        ("checkpoint-2", ["global_step2/a.pt", "model.safetensors"], False),
        ("checkpoint-2", ["global_step2/a.pt", "model.safetensors.index.json"], False),
        ("checkpoint-2", ["model.safetensors"], False),
        ("checkpoint-2", ["config.json"], False),
        ("global_step2", ["a.pt"], True),
        ("nowhere", [], False),
    ],
)
def test_weights_lie_in_shards_alone_where_no_others_are_beside_them(tmp_path, name, files, is_so):
    for file in files:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).touch()
    assert has_only_shards(str(tmp_path / name)) == is_so


def test_the_step_that_is_read_is_the_one_named_as_latest_or_the_newest(tmp_path):
    for step in (9, 10):
        (tmp_path / f"global_step{step}").mkdir()
    assert step_folder(tmp_path).name == "global_step10"
    (tmp_path / "latest").write_text("global_step9\n")
    assert step_folder(tmp_path).name == "global_step9"
    (tmp_path / "latest").write_text("global_step7")
    assert step_folder(tmp_path).name == "global_step10"
    (tmp_path / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert step_folder(tmp_path / "global_step10").name == "global_step10"
    assert step_folder(tmp_path / "nowhere") is None
