"""Reads files of weights: where they are, what tensors they contain, pickles (`*.pt`, `*.pth`, `*.bin`) without running
what a stranger put into them, and by parameter those that DeepSpeed's ZeRO leaves in a checkpoint.

A pickle is a program: whoever wrote it decides what reading it runs. torch's weights-only unpickler makes tensors,
plain containers and the classes it allows, and nothing else. Allowed are those that DeepSpeed 0.19.8 and
transformers' Trainer store. Safetensors are not pickles.
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
from safetensors import SafetensorError, safe_open
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

FILE_ERRORS = (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""What a file of weights, or its index, raises that was cut, or contains something else."""
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt")
READ_ENDINGS = (*WEIGHT_ENDINGS, ".json", ".py")
HEADS = (".lm_head.weight", ".embed_out.weight", ".head.weight", ".output.weight", ".unembed.weight")
"""Ends of a head's name on disk, which transformers renames while it loads (conversion_mapping.py)."""
RESULTS = "perplexity.json"  # an evaluation may have written it beside the model
BLOCK_BYTES = 1 << 16
BLOCKS = 64
"""Of each file, evenly spread, that `model_identity` reads."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORCE_NOT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""The first makes `torch.load(weights_only=False)` a weights-only load too (torch/serialization.py)."""
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:function|got) <class '([^']+)'>|unrecognized function (.+?)(?: which|$)")
_trusted: ContextVar[bool] = ContextVar("_trusted", default=False)

FP32 = "fp32"
"""Name of the trained weights themselves among the states of an optimizer."""


def find_files(
    name: str, candidates: tuple[str, ...], revision: str | None = None, *, local_files_only: bool = False
) -> list[str]:
    """Finds the first of `candidates` in a folder or on the hub, or all that an index names; none without any.
    Raises UserError, naming the index that cannot be read, or the file that it names and that is not there.
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
    """Raises UserError if transformers, which reads `files` in order, would end with another copy of a tensor than the
    one in the file that the index names.
    """
    file_of = _last_files(files)
    for tensor, named in json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items():
        last = Path(file_of.get(tensor, named)).name
        if last != named:
            raise UserError(
                f"{tensor} is in {named}, which {Path(index).name} names, and in {last}, whose copy transformers would"
                " load; remove that copy"
            )


def _last_files(files: list[str]) -> dict[str, str]:
    """Returns the last of `files` that has a tensor, by its name."""
    file_of = {}
    for file in files:
        file_of |= dict.fromkeys(empty_tensors([file]), file)
    return file_of


def has_untied_head(model: str, tied: Mapping[str, str], revision: str | None = None) -> bool:
    """Whether the files of a model that are on this machine contain two different tensors that its class would tie.
    `tied`: name of a head in memory -> name of the embedding.
    """
    try:
        file_of = _last_files(find_files(model, WEIGHT_FILES, revision, local_files_only=True))
        for names in tied.items():
            tensors = [_tensor_like(name, file_of) for name in names if name.endswith(".weight")]
            if len(tensors) < 2 or any(tensor is None for tensor in tensors):
                continue
            head, embedding = tensors
            if head.shape == embedding.shape and not torch.equal(head, embedding):
                return True
    except UserError:  # whoever loads the files reports it
        return False
    return False


def _tensor_like(name: str, file_of: Mapping[str, str]) -> torch.Tensor | None:
    """Reads the tensor that has a name in memory; the prefixes on disk differ from those. None without any."""
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
    """Bytes of the files that a folder's weights are loaded from; None if they are not all here."""
    files = []
    with contextlib.suppress(UserError):  # whoever loads them reports it
        files = find_files(model, WEIGHT_FILES) if Path(model).is_dir() else []
    return sum(Path(file).stat().st_size for file in files) or None


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """Returns the shapes of the tensors in the `*.safetensors` of a folder, by name."""
    tensors = empty_tensors(sorted(map(str, folder.glob("*.safetensors"))))
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


def model_identity(
    model: str, *, revision: str | None, seed: int, endings: Collection[str] = READ_ENDINGS
) -> dict[str, str]:
    """Identify a model: `content` is the same for a copy, `changed` is not. Args: `revision`: of a model on the hub,
    whose commit is its identity; `seed`: of the random weights if the model is a config.json alone; `endings`: of the
    files that count.
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
        files = [path]
        for folder in {path, Path(described_in(name))} if path.is_dir() else ():
            inside = [*folder.glob("*"), *(step_folder(folder) or folder).glob("*")]  # others may be those of runs
            files += [file for file in inside if file.suffix in endings or file.name == "latest"]
        for file in sorted(file for file in set(files) if file.is_file() and file.name != RESULTS):
            size = file.stat().st_size
            content.update(f"{file.name} {size}".encode())
            changed.update(f"{file.name} {file.stat().st_mtime_ns}".encode())
            with file.open("rb") as opened:
                for block in range(BLOCKS):
                    opened.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                    content.update(opened.read(BLOCK_BYTES))
    return {"content": content.hexdigest(), "changed": changed.hexdigest()}


def empty_tensors(files: list[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the files on the meta device. Raises UserError, naming the file that cannot be read."""
    tensors = {}
    for file in files:
        with _named(file):
            if file.endswith(".bin"):
                tensors |= {name: tensor.to("meta") for name, tensor in load_pickle(Path(file)).items()}
            else:
                tensors |= load_state_dict(file, map_location="meta")
    return tensors


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """Turns what reading a file raises into an error that names it."""
    try:
        yield
    except UserError:
        raise
    except FILE_ERRORS as error:
        raise UserError(f"{Path(file).name}: cannot be read ({one_line(error)}); copy or download it again") from error


@contextlib.contextmanager
def safe_unpickling(*, trust: bool) -> Iterator[None]:
    """Let every `torch.load` of this process, those of DeepSpeed and peft too, make only what checkpoints contain.
    Raises UserError, naming the class that a pickle asks for.
    `trust`: leave the libraries as they are: DeepSpeed's loads then run what a pickle contains.
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
    """Load a file of `torch.save` onto the CPU, mapped where its format allows.
    Raises UserError if it cannot be read, or asks for a class that no checkpoint contains.
    """
    _allow_known_classes()
    try:
        # DeepSpeed writes the format before zip where its JSON asks for it.
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=not _trusted.get())
    except Exception as error:  # a broken pickle leads the unpickler into any error
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
    """Allow what DeepSpeed's shards contain beside tensors, and the numpy arrays of the Trainer's random states."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    of_deepspeed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    of_numpy = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    of_python = [(_zero_stage, "builtins.getattr")]
    # For the rest of the process: `safe_globals` takes away at its end what was allowed before.
    torch.serialization.add_safe_globals(of_deepspeed + of_numpy + of_python)


def _zero_stage(enum: type, name: str) -> Any:
    """Stand for getattr: some releases of Python (3.11.2) store a member of an enum as getattr(its class, its name)."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if enum is not ZeroStageEnum:
        raise pickle.UnpicklingError("GLOBAL getattr was not an allowed global")
    return ZeroStageEnum[name]


@dataclass(frozen=True)
class _Piece:
    """`numel` elements of a parameter, from `start` in each of the flat tensors of one file, by state."""

    flats: dict[str, torch.Tensor]
    start: int
    numel: int


class ZeroShards:
    """The trained parameters and optimizer states of a checkpoint of ZeRO stage 1, 2 or 3, whatever number of ranks
    wrote it.

        shards = ZeroShards("run/checkpoint-500")
        shards.read("lm_head.weight", "exp_avg", 0, 1000)  a piece, flat, in float32

    Files are mapped, not loaded: only what is asked for comes into memory. The layout is that of DeepSpeed 0.19.8
    (checkpoint/ds_to_universal.py reads the same): stages 1 and 2 cut the concatenation of all parameters into equal
    parts, stage 3 cuts every parameter.
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
        # Counters of the engine and, under "lr_scheduler", the state of a scheduler that DeepSpeed ran.
        self.model_state: dict[str, Any] = load_pickle(model_files[0])
        if not self.model_state.get("param_shapes"):
            raise UserError(f"{model_files[0]}: has no param_shapes, which say how the shards are cut; use another")
        groups = self.model_state["param_shapes"]  # of each trained parameter, as it is when gathered
        self.shapes: dict[str, tuple[int, ...]] = {}
        for group in groups:
            for name, shape in group.items():
                self.shapes[name] = tuple(shape)
        self.step: int | None = None  # of the optimizer; None if it does not count
        self._pieces: dict[str, list[_Piece]] = {}
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
                # Of the last rank's weights the padding is cut off, of its states not: their shapes may differ.
                flats = {FP32: flat}
                for key, value in state.items():
                    if torch.is_tensor(value) and value.dim() == flat.dim():
                        flats[key] = value
                offset = 0
                for name, span in parameters.items():
                    if is_stage_3:  # every parameter is cut, and the last ranks' parts are padded
                        numel = math.prod(span)
                        part = -(-numel // self.world_size)
                        piece = _Piece(flats, offset, min(part, max(0, numel - rank * part)))
                        offset += part
                    else:  # the concatenation is cut: a rank has what falls into its part
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
        """Name the optimizer's states, such as exp_avg; FP32 is not among them."""
        names = set()
        for pieces in self._pieces.values():
            for piece in pieces:
                names.update(piece.flats)
        return names - {FP32}

    def read(self, name: str, state: str, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of a parameter, as far as it has them, flat, in float32, on the CPU."""
        parts = [torch.empty(0)]
        offset = 0
        for piece in self._pieces[name]:
            first = max(start, offset)
            last = min(stop, offset + piece.numel)
            if first < last:
                parts.append(piece.flats[state].narrow(0, piece.start + first - offset, last - first).float())
            offset += piece.numel
        return torch.cat(parts)
