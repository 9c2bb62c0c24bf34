"""Reads files before they are trusted: what was just saved is complete, a checkpoint is what its manifest lists."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from dsft.checkpoints.manifest import content_errors, files_of, share_of
from dsft.checkpoints.run_folder import sealed_checkpoint
from dsft.errors import raise_if_any
from dsft.models.model_folder import described_in, has_only_shards, is_step_folder
from dsft.models.weight_files import shapes_in
from dsft.runtime import distributed
from dsft.runtime.console import say


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the trained parameters by name, also where ZeRO-3 holds only a piece of each."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return shapes_of(trained)


def adapter_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """Return the parameters that an adapter's file holds, trained or frozen, by their names in the model."""
    named = dict(model.named_parameters())
    kept = get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    saved = {id(parameter) for parameter in kept.values()}
    return {name: each for name, each in named.items() if id(each) in saved or each.requires_grad}


def gathered(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return copies of parameters in host memory, on rank 0 alone, of which ZeRO-3 holds a piece on each rank.
    Collective.
    """
    copies = {}
    for name, parameter in parameters.items():
        with GatheredParameters([parameter]):
            if distributed.rank() == 0:
                copies[name] = parameter.detach().to("cpu", copy=True)
    return copies


def shapes_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of parameters, also where ZeRO-3 holds only a piece of each."""
    return {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}


def missing_weights(folder: Path, *, num_elements: int) -> list[str]:
    """List what the safetensors of a folder lack: a tensor is empty, or they have fewer than `num_elements`."""
    shapes = shapes_in(folder)
    for name, shape in shapes.items():
        if 0 in shape:
            return [f"{name} is empty on disk"]
    num_written = sum(math.prod(shape) for shape in shapes.values())
    if num_written < num_elements:
        return [f"{num_elements:,} trained elements expected, {num_written:,} written"]
    return []


def changed_files(checkpoint: str, *, weights_only: bool = False) -> list[str]:
    """Hash the files of a checkpoint, each rank its share, and return what has changed on any rank since they were
    written. Collective.
    `weights_only`: leave out DeepSpeed's shards, unless the weights lie in them.
    """
    folder = Path(described_in(checkpoint))
    files = files_of(folder)
    if weights_only and not has_only_shards(checkpoint):
        files = [file for file in files if not is_step_folder(str(file.parent))]
    start = time.monotonic()
    errors = content_errors(folder, share_of(files, reader=distributed.rank(), readers=distributed.world_size()))
    distributed.wait_long("verification")
    errors = distributed.from_all(errors)
    say(f"{folder}: hashed in {time.monotonic() - start:.3g} s")
    return errors


def verify_weights(model: str) -> None:
    """Hash all that loading the weights of `model` reads, where it is a checkpoint with a manifest. Collective.
    Raises UserError on every rank, with each file that has changed.
    """
    if distributed.on_rank_0(lambda: sealed_checkpoint(model)) is not None:
        errors = changed_files(model, weights_only=True)
        raise_if_any([f"{model}: {error}; it is damaged, use another" for error in errors])
