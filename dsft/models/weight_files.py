"""Finds weight files and their tensors, reads pickles (`*.pt`, `*.pth`, `*.bin`) without running code from them, and
reads DeepSpeed's ZeRO shards by parameter.

A pickle is a program: its author decides what reading it runs. torch's weights-only unpickler creates tensors, plain
containers and allowed classes, and nothing else. Allowed are those that DeepSpeed 0.19.8 and transformers' Trainer
store. Safetensors are not pickles.
"""

import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dsft.errors import UserError, one_line
from dsft.models.model_folder import (
    MODEL_FILES,
    OPTIMIZER_FILES,
    described_in,
    is_bare_config,
    located,
    number_in,
    step_folder,
    with_bases,
)
from dsft.units import plural

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt")
READ_ENDINGS = (*WEIGHT_ENDINGS, ".json", ".py")
# Suffixes of a head's name on disk, which transformers renames while loading (conversion_mapping.py).
HEADS = (".lm_head.weight", ".embed_out.weight", ".head.weight", ".output.weight", ".unembed.weight")
RESULTS = "perplexity.json"  # an evaluation may have written it beside the model
BLOCK_BYTES = 1 << 16
BLOCKS = 64  # evenly spaced blocks of each file that `model_identity` reads
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# The first turns `torch.load(weights_only=False)` into a weights-only load (torch/serialization.py).
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORCE_NOT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:function|got) <class '([^']+)'>|unrecognized function (.+?)(?: which|$)")
_trusted = ContextVar("_trusted", default=False)

FP32 = "fp32"  # name of the trained weights among the optimizer's states


def find_files(
    name: str, candidates: tuple[str, ...], revision: str | None = None, *, local_files_only: bool = False
) -> list[str]:
    """Returns the first of `candidates` in a folder or on the hub, or all files that an index names; empty without any.
    Raises UserError, naming the index that cannot be read, or the missing file that it lists.
    """
    options = {
        "revision": revision,
        "local_files_only": local_files_only,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": not local_files_only,
    }
    with _named(name):
        path = next(filter(None, (cached_file(name, file, **options) for file in candidates)), None)
    if path is None or not path.endswith(".json"):
        return [path] if path else []
    with _named(path):
        files, _ = get_checkpoint_shard_files(name, path, revision=revision, local_files_only=local_files_only)
    if lost := [Path(file).name for file in files if not Path(file).is_file()]:
        raise UserError(f"{lost[0]} is not there, which {Path(path).name} names; copy or download it again")
    _check_index(path, files)
    return files


def _check_index(index: str, files: list[str]) -> None:
    """Raises UserError if transformers, which reads `files` in order, would load a copy of a tensor from another file
    than the index names.
    """
    file_of = _last_files(files)
    folder = Path(index).parent
    for tensor, named in json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items():
        last = Path(file_of.get(tensor, folder / named))
        if last != folder / named:
            raise UserError(
                f"{tensor} is in {named}, which {Path(index).name} names, and in {last.name}, whose copy transformers"
                " would load; remove that copy"
            )


def _last_files(files: list[str]) -> dict[str, str]:
    """Maps each tensor's name to the last of `files` that contains it."""
    file_of = {}
    for file in files:
        file_of |= dict.fromkeys(empty_tensors([file]), file)
    return file_of


def has_untied_head(model: str, tied: Mapping[str, str], revision: str | None = None) -> bool:
    """Whether a model's files on this machine contain two different tensors that its class would tie.
    `tied`: name of a head in memory -> name of the embedding.
    """
    try:
        file_of = _last_files(find_files(model, WEIGHT_FILES, revision, local_files_only=True))
        for head_name, embedding_name in tied.items():
            head = _tensor_like(head_name, file_of) if head_name.endswith(".weight") else None
            if head is None:  # as in most files: the embedding, which is large, is not read
                continue
            embedding = _tensor_like(embedding_name, file_of)
            if embedding is not None and head.shape == embedding.shape and not torch.equal(head, embedding):
                return True
    except UserError:  # reported when the files are loaded
        return False
    return False


def _tensor_like(name: str, file_of: Mapping[str, str]) -> torch.Tensor | None:
    """Reads a tensor by its name in memory, whose prefix may differ on disk; None if there is none."""
    ends = HEADS if name.endswith("lm_head.weight") else "." + ".".join(name.split(".")[-2:])
    candidates = [each for each in file_of if f".{each}".endswith(ends)]
    if not candidates:
        return None
    on_disk = min(candidates, key=len)  # the others belong to towers
    file = file_of[on_disk]
    if not file.endswith(".safetensors"):
        return load_pickle(Path(file))[on_disk]
    with _named(file), safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(on_disk)


def weight_bytes_in(model: str) -> int | None:
    """Returns the bytes of the files that a folder's weights are loaded from; None if one is missing."""
    files = []
    with contextlib.suppress(UserError):  # reported when they are loaded
        files = find_files(model, WEIGHT_FILES) if Path(model).is_dir() else []
    return sum(Path(file).stat().st_size for file in files) or None


def shapes_in(folder: Path) -> dict[str, list[int]]:
    tensors = empty_tensors(sorted(map(str, folder.glob("*.safetensors"))))
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


def model_identity(
    model: str, *, revision: str | None, seed: int, endings: Collection[str] = READ_ENDINGS
) -> dict[str, str]:
    """Returns the identity of a model: `content` is the same for a copy, `changed` is not. `revision`: of a model on
    the hub, whose commit is its identity; `seed`: for random weights; `endings`: of the files that count.
    """
    content = hashlib.sha256()
    changed = hashlib.sha256()
    if is_bare_config(model):
        content.update(f"seed {seed}".encode())
    for name in with_bases(model):
        path = Path(name)
        if not path.exists():
            repository, gguf = located(name)
            file = gguf.get("gguf_file", "config.json")  # in the cache: the model has been measured
            cached = try_to_load_from_cache(repository, file, revision=revision)
            commit = Path(cached.removesuffix(file)).name if isinstance(cached, str) else revision
            content.update(f"{name} {commit}".encode())
            continue
        files = {path}
        if path.is_dir():
            folder = Path(described_in(name))
            # Deeper ones may belong to runs.
            shards = step_folder(folder) or folder
            inside = {*path.glob("*"), *folder.glob("*"), *shards.glob("*")}
            files = {file for file in inside if file.suffix in endings or file.name == "latest"}
        for file in sorted(files):
            if not file.is_file() or file.name == RESULTS:
                continue
            size = file.stat().st_size
            content.update(f"{file.name} {size}".encode())
            changed.update(f"{file.name} {file.stat().st_mtime_ns}".encode())
            with file.open("rb") as opened:
                for block in range(BLOCKS):
                    opened.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                    content.update(opened.read(BLOCK_BYTES))
    return {"content": content.hexdigest(), "changed": changed.hexdigest()}


def empty_tensors(files: list[str]) -> dict[str, torch.Tensor]:
    """Returns the files' tensors on the meta device. Raises UserError, naming the file that cannot be read."""
    tensors = {}
    for file in files:
        with _named(file):
            if file.endswith(".bin"):
                for name, tensor in load_pickle(Path(file)).items():
                    tensors[name] = tensor.to("meta")
            else:
                tensors |= load_state_dict(file, map_location="meta")
    return tensors


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """Turns errors of reading a file into a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a truncated file can raise any error
        raise UserError(
            f"{Path(file).name}: cannot be read ({one_line(error)}); copy or download it again (git lfs"
            " pull if git cloned it)"
        ) from error


@contextlib.contextmanager
def safe_unpickling(*, trust: bool) -> Iterator[None]:
    """Restricts every `torch.load` of this process, including DeepSpeed's and peft's, to the classes in checkpoints.
    Raises UserError, naming the class that a pickle asks for.
    `trust`: leaves the libraries unchanged: DeepSpeed's loads then run any code in a pickle.
    """
    token = _trusted.set(trust)
    before = {name: os.environ.get(name) for name in (FORCE, FORCE_NOT)}
    try:
        if not trust:
            _allow_known_classes()
            os.environ.pop(FORCE_NOT, None)
            os.environ[FORCE] = "1"
        yield
    except pickle.UnpicklingError as error:
        raise UserError(_explained("a file of the checkpoint", error)) from None
    finally:
        if not trust:
            os.environ.pop(FORCE, None)
            os.environ |= {name: value for name, value in before.items() if value is not None}
        _trusted.reset(token)


def load_pickle(file: Path) -> Any:
    """Loads a file of `torch.save` onto the CPU, memory-mapped if its format allows it.
    Raises UserError if it cannot be read, or asks for a class that checkpoints do not need.
    """
    _allow_known_classes()
    try:
        # DeepSpeed writes the older format without zip if its JSON asks for it.
        is_zip = zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", mmap=is_zip, weights_only=not _trusted.get())
    except Exception as error:  # a broken pickle can raise any error
        raise UserError(_explained(str(file), error)) from None


def _explained(file: str, error: BaseException) -> str:
    refused = _REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if not refused:
        return f"{file}: cannot be read ({type(error).__name__}: {one_line(error)})"
    return (
        f"{file}: contains {next(filter(None, refused.groups()))}, which checkpoints do not need; reading it may run"
        " any code; if you trust the source, add --trust_checkpoint"
    )


def _allow_known_classes() -> None:
    """Allows the classes in DeepSpeed's shards, and the numpy arrays of the Trainer's random states."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    of_deepspeed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    of_numpy = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    of_python = [(_zero_stage, "builtins.getattr")]
    # For the rest of the process: on exit `safe_globals` also removes what was allowed before it.
    torch.serialization.add_safe_globals(of_deepspeed + of_numpy + of_python)


def _zero_stage(enum: type, name: str) -> Any:
    """Replaces getattr: some releases of Python (3.11.2) pickle an enum member as getattr(its class, its name)."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if enum is not ZeroStageEnum:
        raise pickle.UnpicklingError("GLOBAL getattr was not an allowed global")
    return ZeroStageEnum[name]


@dataclass(frozen=True)
class _Piece:
    """`numel` elements of a parameter, from `start` in each flat tensor (one per state) of a file."""

    flats: dict[str, torch.Tensor]
    start: int
    numel: int


class ZeroShards:
    """The trained parameters and optimizer states of a checkpoint of ZeRO stage 1, 2 or 3, written by any number of
    ranks.

        shards = ZeroShards("run/checkpoint-500")
        shards.read("lm_head.weight", "exp_avg", 0, 1000)  a piece, flat, in float32

    Files are memory-mapped: only the requested elements are loaded. The layout is that of DeepSpeed 0.19.8
    (checkpoint/ds_to_universal.py reads the same): stages 1 and 2 split the concatenation of all parameters into equal
    parts, stage 3 splits every parameter.
    Raises UserError if the files are not such a checkpoint, cannot be read, or have a layout that is not supported.
    """

    def __init__(self, checkpoint: str | Path):
        self.folder = step_folder(checkpoint) or Path(checkpoint)
        files = sorted(self.folder.glob(OPTIMIZER_FILES), key=number_in)
        model_files = sorted(self.folder.glob(MODEL_FILES), key=number_in)
        if not files or not model_files:
            raise UserError(
                f"{checkpoint}: contains no ZeRO optimizer states ({OPTIMIZER_FILES}, {MODEL_FILES}): it is of stage 0"
                " or saved with save_only_model"
            )
        self.world_size = len(files)
        # The engine's counters and, under "lr_scheduler", the state of DeepSpeed's scheduler.
        self.model_state = load_pickle(model_files[0])
        if not self.model_state.get("param_shapes"):
            raise UserError(f"{model_files[0]}: has no param_shapes, which say how the shards are cut; use another")
        groups = self.model_state["param_shapes"]  # of each trained parameter, unsharded
        self.shapes = {}
        for group in groups:
            self.shapes |= group
        self.step = None  # of the optimizer; None if it does not count
        self._pieces = {}
        for rank, file in enumerate(files):
            states = load_pickle(file)["optimizer_state_dict"]
            if "partition_count" not in states:
                raise UserError(f"{file}: has no partition_count, the number of ranks that wrote it; use another")
            is_stage_3 = states.get("zero_stage", 1) == 3
            num_writers = states["partition_count"] if is_stage_3 else max(states["partition_count"])  # by group
            if num_writers != self.world_size:
                raise UserError(
                    f"{self.folder}: was written by {plural(num_writers, 'rank')}, and has the files of"
                    f" {self.world_size}; are the files of all ranks there?"
                )
            if rank == 0:
                self.loss_scaler = states.get("loss_scaler")
            if is_stage_3:
                weights = states["fp32_flat_groups"]
                optimizer = states["optimizer_state_dict"]
                spans = groups
            else:
                weights = states["single_partition_of_fp32_groups"]
                optimizer = states["base_optimizer_state"]
                spans = states["param_slice_mappings"]
            steps = [entry["step"] for entry in optimizer["param_groups"] if "step" in entry]
            for group, (flat, parameters) in enumerate(zip(weights, spans, strict=False)):
                state = optimizer["state"].get(group, {})
                if "step" in state:
                    steps.append(state["step"])
                # The last rank's weights are saved without padding, its states with it: their shapes may differ.
                flats = {FP32: flat}
                for key, value in state.items():
                    if torch.is_tensor(value) and value.dim() == flat.dim():
                        flats[key] = value
                offset = 0
                for name, span in parameters.items():
                    if is_stage_3:  # every parameter is split, and the last ranks' parts are padded
                        numel = math.prod(span)
                        part = -(-numel // self.world_size)
                        piece = _Piece(flats, offset, min(part, max(0, numel - rank * part)))
                        offset += part
                    else:  # the concatenation is split: a rank has the elements in its part
                        piece = _Piece(flats, span.start, span.numel)
                    self._pieces.setdefault(name, []).append(piece)
            if steps:
                self.step = int(steps[-1])
        for name, shape in self.shapes.items():
            numel = sum(piece.numel for piece in self._pieces.get(name, []))
            if numel != math.prod(shape):
                raise UserError(
                    f"{self.folder}: has {numel:,} of {math.prod(shape):,} elements of {name}; are the files of all"
                    " ranks there, each its own?"
                )

    @property
    def states(self) -> set[str]:
        names = set()
        for pieces in self._pieces.values():
            for piece in pieces:
                names.update(piece.flats)
        return names - {FP32}

    def read(self, name: str, state: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements `start` to `stop` of a parameter, as far as they exist, flat, in float32, on the CPU."""
        parts = [torch.empty(0)]
        offset = 0
        for piece in self._pieces[name]:
            first = max(start, offset)
            last = min(stop, offset + piece.numel)
            if first < last:
                flat = piece.flats[state]
                part = flat.narrow(0, piece.start + first - offset, last - first)
                parts.append(part.float())
            offset += piece.numel
        return torch.cat(parts)
