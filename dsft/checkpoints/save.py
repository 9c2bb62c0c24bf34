"""Saves a checkpoint on all ranks: write to `.saving/`, hash, check, publish.

RUN/.saving/checkpoint-8/   every rank writes here
RUN/checkpoint-8/           renamed once rank 0 has checked it and written its manifest

A failure ends the run: the failed rank raises, and the others exit with its cause. Earlier checkpoints remain complete,
and what is incomplete in `.saving/` is discarded at the next start.

Saved files are checked against their hashes before they are used: `changed_files`, `verify_weights`.
"""

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from dsft.checkpoints.manifest import (
    STAGING,
    TRAINER_STATE,
    content_errors,
    discard,
    files_of,
    hash_and_sync,
    publish,
    share_of,
)
from dsft.checkpoints.run_folder import sealed_checkpoint
from dsft.errors import Unsaved, one_line, raise_if_any
from dsft.models.model_folder import OPTIMIZER_FILES, described_in, has_only_shards, is_step_folder
from dsft.models.weight_files import shapes_in
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import which_memory
from dsft.units import GB, JsonObject

DISK_ERRORS = re.compile(
    r"os error \d+"  # safetensors, written in Rust
    r"|PytorchStreamWriter|inline_container|iostream error|Parent directory .* does not exist"  # torch's zip writer
)
"""Disk errors of libraries that are not an OSError."""
Shapes = dict[str, tuple[int, ...]]  # of parameters by name


@dataclass
class Saves:
    """Counts a run's saves, for run.json."""

    number: int = 0
    seconds: float = 0.0
    largest_bytes: int = 0


class StagedSave:
    """One save of all ranks, a checkpoint or the final model, in `.saving/` until complete, counted in `saves`."""

    def __init__(self, folder: Path, saves: Saves):
        self.staged = folder.parent / STAGING / folder.name
        self.folder = folder
        self.saves = saves

    def run(
        self,
        write: Callable[[], None],
        check: Callable[[Path], list[str]],
        *,
        facts: JsonObject,
        needed_bytes: int,
    ) -> None:
        """Call `write` on every rank, and publish the files. Collective.

        Args:
            check: on rank 0: lists what is missing in the staged folder.
            facts: for the manifest, beside the files.
            needed_bytes: least size of the save, if it is the first.

        Raises:
            Unsaved: on a rank that could not write, or on all if something is missing.
        """
        start = time.monotonic()
        rank = distributed.rank()
        with failures_named(self.folder):
            # Leftovers of a killed save would be published with the rest.
            distributed.first_on_rank_0(functools.partial(discard, self.staged.parent))
            # safetensors memory-maps the file that it writes: a full disk would kill the process silently (SIGBUS).
            needed = max(needed_bytes, self.saves.largest_bytes)
            free = free_bytes(self.folder.parent) if rank == 0 else None
            if free is not None and free < needed:
                raise OSError(f"it takes {needed / GB:.3g} GB, and {free / GB:.3g} GB are free")
            write()
            distributed.wait_long("shards are written")
            files = self._hash()
            errors = check(self.staged) if rank == 0 else []
            if rank == 0 and not errors:
                publish(self.staged, facts | {"files": files})
        distributed.wait_long("checkpoint is published")
        if problems := distributed.from_all(errors):
            raise Unsaved(f"{self.folder.name} could not be saved: {'; '.join(problems)}")
        self.saves.number += 1
        self.saves.seconds += time.monotonic() - start
        size = sum(entry["size"] for entry in files.values())
        self.saves.largest_bytes = max(self.saves.largest_bytes, size)

    def _hash(self) -> dict[str, JsonObject]:
        """Return size and SHA-256 of each staged file by path; ranks that see rank 0's folder read a share each."""
        status = self.staged.stat() if self.staged.exists() else None
        folders = distributed.from_all([status and (distributed.this_node(), status.st_dev, status.st_ino)])
        readers = [number for number, folder in enumerate(folders) if folder == folders[0]]
        written = distributed.on_rank_0(functools.partial(files_of, self.staged))
        mine = []
        if distributed.rank() in readers:
            mine = share_of(written, reader=readers.index(distributed.rank()), readers=len(readers))
        hashed = [(str(path.relative_to(self.staged)), hash_and_sync(path)) for path in mine]
        distributed.wait_long("files are hashed")
        return dict(sorted(distributed.from_all(hashed)))


@contextlib.contextmanager
def failures_named(folder: Path) -> Iterator[None]:
    """Turn a disk error inside a `with` into `Unsaved`, naming what could not be saved."""
    try:
        yield
    except Exception as error:
        is_of_disk = isinstance(error, OSError) or DISK_ERRORS.search(str(error))
        if which_memory(error) or not is_of_disk:
            raise
        text = f"{folder.name} could not be saved: {one_line(error)}; earlier checkpoints are complete"
        raise Unsaved(text) from error


def missing_shards(folder: Path, world_size: int, *, sharded: bool) -> list[str]:
    """List the ranks' parts that a checkpoint lacks: optimizer shards under ZeRO, random states."""
    errors = []
    if not (folder / TRAINER_STATE).is_file():
        errors.append(f"{TRAINER_STATE} is missing")
    shards = len(list(folder.glob(f"global_step*/{OPTIMIZER_FILES}")))
    if sharded and shards < world_size:
        errors.append(f"{shards} of {world_size} ranks' optimizer states are there")
    states = len(list(folder.glob("rng_state*.pth")))
    if states < world_size:
        errors.append(f"{states} of {world_size} ranks' random states are there; do all nodes share the output folder?")
    return errors


def trained_shapes(model: nn.Module) -> Shapes:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return shapes_of(trained)


def adapter_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """Return the parameters in an adapter's file, trained or frozen, by their names in the model."""
    named = dict(model.named_parameters())
    kept = get_peft_model_state_dict(model, state_dict=named, save_embedding_layers=False)
    saved = {*kept.values()}
    return {name: each for name, each in named.items() if each in saved or each.requires_grad}


def gathered(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return copies of parameters in host memory, on rank 0 alone, gathered under ZeRO-3; tied ones are one copy.
    Collective under ZeRO-3.
    """
    copies = {}
    for parameter in dict.fromkeys(parameters.values()):
        with GatheredParameters([parameter]):
            if distributed.rank() == 0:
                copies[parameter] = parameter.detach().to("cpu", copy=True)
    return {name: copies[parameter] for name, parameter in parameters.items() if parameter in copies}


def shapes_of(parameters: Mapping[str, nn.Parameter]) -> Shapes:
    """Return the unsharded shapes of parameters, also under ZeRO-3."""
    return {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}


def missing_weights(folder: Path, *, num_elements: int) -> list[str]:
    """List problems of a folder's safetensors: empty tensors, or fewer than `num_elements` in total."""
    shapes = shapes_in(folder)
    for name, shape in shapes.items():
        if 0 in shape:
            return [f"{name} is empty on disk"]
    num_written = sum(math.prod(shape) for shape in shapes.values())
    if num_written < num_elements:
        return [f"{num_elements:,} trained elements expected, {num_written:,} written"]
    return []


def changed_files(checkpoint: str, *, weights_only: bool = False) -> list[str]:
    """Hash the files of a checkpoint, a share on each rank, and return those that changed since they were written.
    Collective. `weights_only`: leave out DeepSpeed's shards, unless they contain the weights.
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
    """Hash all files that loading the weights of `model` reads, if it is a checkpoint with a manifest. Collective.
    Raises UserError on every rank, with each file that has changed.
    """
    if distributed.on_rank_0(lambda: sealed_checkpoint(model)) is not None:
        errors = changed_files(model, weights_only=True)
        raise_if_any([f"{model}: {error}; it is damaged, use another" for error in errors])
