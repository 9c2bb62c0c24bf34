"""Reads back what was written and compares it with what was in memory, before anything is called saved."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from dsft.checkpoints.tensor_sources import TensorsInMemory, TensorSource
from dsft.models.package import auto_class
from dsft.models.size import load_model_config


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the trained parameters by name, also where ZeRO-3 holds only a piece of each."""
    return {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def readback_errors(
    written: TensorSource, memory: Mapping[str, torch.Tensor], *, sampled: int | None = None, num_elements: int = 0
) -> list[str]:
    """List what is wrong with tensors `written` from `memory`: empty, too few, of another shape or content.

    Names may differ between memory and disk (experts are stored one by one): those tensors only count as elements.

    Args:
        sampled: how many tensors, spread evenly, are compared bit by bit; all by default.
        num_elements: that must have been written at least.
    """
    if empty := next((name for name, shape in written.shapes.items() if 0 in shape), None):
        return [f"{empty} is empty on disk"]
    if (num_written := sum(map(math.prod, written.shapes.values()))) < num_elements:
        return [f"{num_elements:,} trained elements expected, {num_written:,} written"]
    by_name = {name.replace(".default", ""): tensor for name, tensor in memory.items()}  # peft saves no adapter name
    names = [name for name in by_name if name in written.shapes]
    errors = [
        f"{name} is {list(written.shapes[name])} on disk, {list(by_name[name].shape)} in memory"
        for name in names
        if written.shapes[name] != tuple(by_name[name].shape)
    ]
    if errors or sampled == 0:
        return errors
    for name in names[:: max(1, len(names) // (sampled or len(names) or 1))]:
        tensor = written.read(name)
        if not torch.equal(tensor, by_name[name].detach().to("cpu", tensor.dtype)):
            errors.append(f"{name} reads back differently from what was in memory")
    return errors


def check_written(path: Path, written: TensorSource, memory: Mapping[str, torch.Tensor]) -> None:
    """Compare all of `memory` bit by bit with what was `written` to `path`.

    Raises:
        RuntimeError: naming the first tensor that differs.
    """
    num_elements = sum(tensor.numel() for tensor in memory.values())
    if errors := readback_errors(written, memory, num_elements=num_elements):
        raise RuntimeError(f"{path}: {errors[0]}")


@torch.no_grad()
def check_export(folder: Path, model: PreTrainedModel | None = None, *, trust_remote_code: bool = False) -> None:
    """Load `folder` as its user will: every weight must be there and, where a `model` is given, equal the model's.

    Raises:
        RuntimeError: naming the first weight that is missing or differs.
    """
    placement = {"device_map": "meta"} if model is None else {"dtype": model.dtype}
    config = load_model_config(str(folder), trust_remote_code=trust_remote_code)
    loaded, info = auto_class(config).from_pretrained(
        folder, output_loading_info=True, trust_remote_code=trust_remote_code, **placement
    )
    if missing := sorted(info["missing_keys"]):
        raise RuntimeError(
            f"{folder}: {len(missing)} weights are missing from what was written, the first is {missing[0]}"
        )
    if model is not None:
        check_written(folder, TensorsInMemory(dict(loaded.named_parameters())), dict(model.named_parameters()))
