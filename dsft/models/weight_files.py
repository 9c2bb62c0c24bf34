"""Reads files of weights: where they lie, what tensors they hold, pickles (`*.pt`, `*.pth`, `*.bin`) without running
what a stranger put into them, and by parameter those that DeepSpeed's ZeRO leaves in a checkpoint.

A pickle is a program: whoever wrote it decides what reading it runs. torch's weights-only unpickler makes tensors,
plain containers and the classes it allows, and nothing else. Allowed are those that DeepSpeed 0.19.8 and
transformers' Trainer store. Safetensors are no pickles.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import load_state_dict, str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.model_folder import MODEL_FILES, OPTIMIZER_FILES, is_read_pickle, located, number_in, step_folder

FILE_ERRORS = (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""What a file of weights, or its index, raises that was cut, or holds something else."""
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
SAMPLE_BYTES = 2**12
"""Of a block of a tensor that `weights_digest` reads."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""The first makes `torch.load(weights_only=False)` a weights-only load too (torch/serialization.py)."""
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:function|got) <class '([^']+)'>|unrecognized function (.+?)(?: which|$)")
_trusted: ContextVar[bool] = ContextVar("_trusted", default=False)

FP32 = "fp32"
"""Name of the trained weights themselves among the states of an optimizer."""
AVERAGING = ("train_mode", "k", "weight_sum", "lr_max")
"""Keys of a schedule-free optimizer's groups, of which its average is made."""
SMALL_ELEMENTS = 2**16
"""Tensors of fewer are loaded, not mapped: one that stays in host memory (a step count) would keep a file that is
removed.
"""


def find_files(name: str, candidates: tuple[str, ...], revision: str | None = None) -> list[str]:
    """Finds the first of `candidates` in a folder or on the hub, or all that an index names; none without any.
    Raises UserError, naming the index that cannot be read, or the file that it names and that is not there.
    """
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    with _named(name):
        path = next(filter(None, (cached_file(name, file, **options) for file in candidates)), None)
    if path is None or not path.endswith(".json"):
        return [path] if path else []
    with _named(path):
        files, _ = get_checkpoint_shard_files(name, path, revision=revision)
    if lost := [Path(file).name for file in files if not Path(file).is_file()]:
        raise UserError(f"{lost[0]} is not there, which {Path(path).name} names; copy or download it again")
    return files


def weight_bytes_in(model: str) -> int | None:
    """Bytes of the files that a folder's weights are loaded from; None where they are not all here."""
    files = []
    with contextlib.suppress(UserError):  # whoever loads them reports it
        files = find_files(model, WEIGHT_FILES) if Path(model).is_dir() else []
    return sum(Path(file).stat().st_size for file in files) or None


def safetensors_of(model: str, revision: str | None = None) -> list[Path]:
    """The safetensors that transformers loads a model from; others may lie beside them: the repositories of Mistral
    hold all weights a second time, under other names. Raises UserError where one that the index names is missing.
    """
    try:
        return [*map(Path, find_files(model, WEIGHT_FILES[:2], revision))]
    except UserError as error:
        raise UserError([f"{model}: {problem}" for problem in error.problems]) from None


class SafetensorsFiles:
    """Gives the tensors of files, and of the `*.safetensors` of folders."""

    def __init__(self, *paths: Path):
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        """uint8 for a dtype that transformers does not know: those (F8_E8M0) have numbers of one byte."""
        in_order = [sorted(path.glob("*.safetensors")) if path.is_dir() else [path] for path in paths]
        for file in itertools.chain(*in_order):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    tensor = tensors.get_slice(name)
                    self.files[name], self.shapes[name] = file, tuple(tensor.get_shape())
                    self.dtypes[name] = str_to_torch_dtype.get(tensor.get_dtype(), torch.uint8)

    def num_bytes(self, names: Iterable[str]) -> int:
        """Returns the bytes of some of the tensors."""
        return sum(math.prod(self.shapes[name]) * self.dtypes[name].itemsize for name in names)

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


def weights_digest(model: str, revision: str | None = None) -> str | None:
    """Hash a package's weights by samples: of safetensors name, dtype, shape and 3 x SAMPLE_BYTES of every tensor, the
    same however they are split into files; of other formats evenly spread blocks of every file. None where there are no
    such files, as in a folder with DeepSpeed's shards alone.
    """
    folder, gguf = located(model)
    candidates = ([gguf["gguf_file"]],) if gguf else (WEIGHT_FILES[:2], WEIGHT_FILES[2:])
    files = next(filter(None, (find_files(folder, tuple(names), revision) for names in candidates)), [])
    samples = {}
    for path in files:
        with _named(path), open(path, "rb") as file:
            size, blocks = Path(path).stat().st_size, 256
            spans = {f"{Path(path).name} {size}": (0, size)}
            if path.endswith(".safetensors"):
                blocks = 3
                start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(start - 8))
                header.pop("__metadata__", None)
                spans = {
                    f"{name} {tensor['dtype']} {tensor['shape']}": [start + offset for offset in tensor["data_offsets"]]
                    for name, tensor in header.items()
                }
            for key, (first, last) in spans.items():  # evenly spread blocks, both ends among them
                digest, length = hashlib.sha256(), min(SAMPLE_BYTES, last - first)
                for block in range(blocks):
                    file.seek(first + (last - first - length) * block // (blocks - 1))
                    digest.update(file.read(length))
                samples[key] = digest.hexdigest()
    if not samples:
        return None
    return hashlib.sha256(json.dumps(sorted(samples.items())).encode()).hexdigest()[:16]


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
    """Let every `torch.load` of this process, those of DeepSpeed and peft too, make only what checkpoints hold.
    Raises UserError, naming the class that a pickle asks for.
    `trust`: leave the libraries as they are: DeepSpeed's loads then run what a pickle contains.
    """
    token, before = _trusted.set(trust), {name: os.environ.get(name) for name in (FORCE, FORCE_NOT)}
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
    Raises UserError where it cannot be read, or asks for a class that no checkpoint holds.
    """
    _allow_known_classes()
    try:
        # DeepSpeed writes the format before zip where its JSON asks for it.
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=not _trusted.get())
    except Exception as error:  # a broken pickle leads the unpickler into any error
        raise UserError(_explained(str(file), error)) from None


def check_weight_files(folder: Path) -> None:
    """Check the `*.bin` of a model's or an adapter's folder that holds no safetensors, which are taken first.
    Raises UserError as `load_pickle`.
    """
    if not any(folder.glob("*.safetensors*")):
        raise_if_any(pickle_errors(file for file in sorted(folder.glob("*.bin")) if is_read_pickle(file)))


def pickle_errors(files: Iterable[Path]) -> list[str]:
    """List files that cannot be read, or ask for a class that no checkpoint holds. Trusted ones are not looked at:
    looking would run them.
    """
    errors: list[str] = []
    for file in () if _trusted.get() else files:
        try:
            load_pickle(file)
        except UserError as error:
            errors += error.problems
    return errors


def _explained(file: str, error: BaseException) -> str:
    refused = _REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if not refused:
        return f"{file}: cannot be read ({type(error).__name__}: {one_line(error)})"
    return (
        f"{file}: holds {next(filter(None, refused.groups()))}, which no checkpoint needs; reading it may run any code;"
        " where you trust whoever wrote it, add --trust_checkpoint"
    )


def _allow_known_classes() -> None:
    """Allow what DeepSpeed's shards hold beside tensors, and the numpy arrays of the Trainer's random states."""
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
        shards.read("lm_head.weight", "exp_avg")      all of it, flat, in float32
        shards.read("lm_head.weight", FP32, 0, 1000)  a piece

    Files are mapped, not loaded: only what is asked for comes into memory. The layout is that of DeepSpeed 0.19.8
    (checkpoint/ds_to_universal.py reads the same): stages 1 and 2 cut the concatenation of all parameters into equal
    parts, stage 3 cuts every parameter.
    Raises UserError where the files are no such checkpoint, cannot be read, or have a layout that is not supported.
    """

    def __init__(self, checkpoint: str | Path):
        self.folder = step_folder(checkpoint) or Path(checkpoint)
        files = sorted(self.folder.glob(OPTIMIZER_FILES), key=number_in)
        if not files:
            raise UserError(
                f"{checkpoint}: holds no optimizer states of ZeRO ({OPTIMIZER_FILES}), as checkpoints of stage 0 or"
                " saved with save_only_model do not"
            )
        if len({re.search(r"mp_rank_(\d+)", file.name)[1] for file in files}) > 1:
            raise UserError(
                f"{self.folder}: was saved with tensor parallelism; convert it with DeepSpeed's ds_to_universal.py"
            )
        self.world_size = len(files)
        file = min(self.folder.glob(MODEL_FILES), key=number_in, default=None)
        # Counters of the engine and, under "lr_scheduler", the state of a scheduler that DeepSpeed ran.
        self.model_state: dict[str, Any] = load_pickle(file) if file else {}
        if not self.model_state.get("param_shapes"):
            raise UserError(
                f"{file or self.folder / MODEL_FILES}: {'has no param_shapes' if file else 'is missing'}, which say"
                " how the shards are cut; take a checkpoint that was written in full"
            )
        groups = self.model_state["param_shapes"]  # of each trained parameter, as it is when gathered
        self.shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        self.step: int | None = None  # of the optimizer; None where it does not count
        self.counters: dict[str, Any] = {}  # what the optimizer keeps for a group (AVERAGING), the same for all
        self._pieces: dict[str, list[_Piece]] = {}
        for rank, file in enumerate(files):
            states = load_pickle(file)["optimizer_state_dict"]
            if rank == 0:
                self.loss_scaler = states.get("loss_scaler")
            is_stage_3 = states.get("zero_stage", 1) == 3
            weights = states["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
            optimizer = states["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
            spans = groups if is_stage_3 else states["param_slice_mappings"]
            first = optimizer["param_groups"][0]
            self.counters |= {name: first[name] for name in AVERAGING if name in first}
            of_groups = next((entry["step"] for entry in optimizer["param_groups"] if "step" in entry), None)
            for group, (flat, parameters) in enumerate(zip(weights, spans, strict=False)):
                state, offset = optimizer["state"].get(group, {}), 0
                step = state.get("step", of_groups)
                self.step = int(step) if step is not None else self.step
                # Of the last rank's weights the padding is cut off, of its states not: their shapes may differ.
                flats = {FP32: flat} | {
                    key: value for key, value in state.items() if torch.is_tensor(value) and value.dim() == flat.dim()
                }
                for name, span in parameters.items():
                    if is_stage_3:  # every parameter is cut, and the last ranks' parts are padded
                        numel = math.prod(span)
                        part = -(-numel // self.world_size)
                        piece = _Piece(flats, offset, min(part, max(0, numel - rank * part)))
                        offset += part
                    else:  # the concatenation is cut: a rank holds what falls into its part
                        piece = _Piece(flats, span.start, span.numel)
                    self._pieces.setdefault(name, []).append(piece)
                if is_stage_3 and offset != flat.numel():  # parts are as long as the number of ranks makes them
                    raise UserError(
                        f"{self.folder}: {file.name} was not written by one of {self.world_size} ranks; are the files"
                        " of all ranks there?"
                        if flat.numel()
                        else f"{self.folder}: its optimizer was on NVMe, and {file.name} holds no weights; take the"
                        f" safetensors in {self.folder.parent}"
                    )
        numels = {name: sum(piece.numel for piece in pieces) for name, pieces in self._pieces.items()}
        if absent := [name for name, shape in self.shapes.items() if numels.get(name, 0) != math.prod(shape)]:
            raise UserError(
                f"{self.folder}: {len(absent)} parameters are incomplete, the first is {absent[0]}; are the files"
                " of all ranks there?"
            )

    @property
    def states(self) -> set[str]:
        """Name the optimizer's states, such as exp_avg; FP32 is not among them."""
        return {key for pieces in self._pieces.values() for piece in pieces for key in piece.flats} - {FP32}

    def read(self, name: str, state: str = FP32, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read elements `start` to `stop` (default: all) of a parameter, flat, in float32, on the CPU."""
        stop = math.prod(self.shapes[name]) if stop is None else stop
        out, offset = torch.empty(max(0, stop - start), dtype=torch.float32), 0
        for piece in self._pieces[name]:
            first, last = max(start, offset), min(stop, offset + piece.numel)
            if first < last:
                source = piece.flats[state].narrow(0, piece.start + first - offset, last - first)
                out[first - start : last - start] = source
            offset += piece.numel
        return out
