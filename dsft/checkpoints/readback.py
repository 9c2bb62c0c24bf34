"""Reads files back before they are trusted: what was just saved against memory, a checkpoint against its manifest."""

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from dsft.checkpoints.manifest import content_errors, files_of, shares_of_ranks
from dsft.checkpoints.run_folder import sealed_checkpoint
from dsft.errors import raise_if_any
from dsft.job import beat as watchdog
from dsft.models.model_folder import described_in, has_only_shards, is_read_pickle, is_step_folder
from dsft.models.weight_files import SafetensorsFiles, pickle_errors
from dsft.runtime import distributed
from dsft.runtime.console import say


class TensorsInMemory:
    """Gives tensors that are in memory already, as `SafetensorsFiles` those of a disk: `shapes`, and `read` by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.shapes, self.read = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__


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


def readback_errors(
    written: SafetensorsFiles | TensorsInMemory,
    memory: Mapping[str, torch.Tensor],
    *,
    sampled: int | None = None,
    num_elements: int = 0,
) -> list[str]:
    """List the problems of tensors `written` from `memory`: empty, too few, of another shape or content.

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


class Verification:
    """Hashes this rank's share of a checkpoint in a thread, while a training's data and model load."""

    def __init__(self, checkpoint: str, *, hashes: bool, weights_only: bool = False):
        """
        Args:
            hashes: else only the pickles are looked at.
            weights_only: leave out DeepSpeed's shards, unless the weights lie in them, and the look at pickles: who
                loads weights looks at theirs.
        """
        self.folder = Path(described_in(checkpoint))
        self.seconds, self._weights_only = 0.0, weights_only
        files = files_of(self.folder)
        if weights_only and not has_only_shards(checkpoint):
            files = [file for file in files if not is_step_folder(str(file.parent))]
        self._files = shares_of_ranks(files, distributed.world_size())[distributed.rank()]
        self._errors: list[str] = []
        self._thread = threading.Thread(target=self._hash, daemon=True)
        if hashes:
            self._thread.start()

    def _hash(self) -> None:
        start = time.monotonic()
        try:
            self._errors = content_errors(self.folder, self._files)
        except OSError as error:
            self._errors = [str(error)]
        self.seconds = time.monotonic() - start

    def errors(self) -> list[str]:
        """Return what has changed since the checkpoint was written, on any rank. Collective.
        Raises UserError where a pickle asks for a class that no checkpoint holds.
        """
        start = time.monotonic()
        while self._thread.is_alive():
            watchdog.heartbeat()
            self._thread.join(1)
        distributed.wait_long("verification")
        errors, waited = distributed.from_all(self._errors), time.monotonic() - start
        if self._thread.ident:
            say(f"{self.folder}: hashed in {self.seconds:.3g} s, {waited:.3g} s of them waited for")
        if not errors and not self._weights_only:
            distributed.raise_together(pickle_errors(file for file in self._files if is_read_pickle(file)))
        return errors


def verify_weights(model: str) -> None:
    """Hash all that loading the weights of `model` reads, where it is a checkpoint with a manifest. Collective.
    Raises UserError on every rank, with each file that has changed.
    """
    if distributed.on_rank_0(lambda: sealed_checkpoint(model)) is not None:
        errors = Verification(model, hashes=True, weights_only=True).errors()
        raise_if_any([f"{model}: {error}; it is damaged, use another" for error in errors])
