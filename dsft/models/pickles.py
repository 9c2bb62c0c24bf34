"""Reads pickles (`*.pt`, `*.pth`, `*.bin`) without running what a stranger put into them.

A pickle is a program: whoever wrote it decides what reading it runs. torch's weights-only unpickler makes tensors,
plain containers and the classes it allows, and nothing else. Allowed are those that DeepSpeed 0.19.8 and
transformers' Trainer store. Safetensors are no pickles.
"""

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from dsft.errors import UserError, one_line, raise_if_any

WAY_OUT = "reading it may run any code; where you trust whoever wrote it, add --trust_checkpoint"
NEVER_READ = ("training_args.bin",)
"""What transformers' Trainer writes for people alone."""
FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""The first makes `torch.load(weights_only=False)` a weights-only load too (torch/serialization.py)."""
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:function|got) <class '([^']+)'>|unrecognized function (.+?)(?: which|$)")

_trusted: ContextVar[bool] = ContextVar("_trusted", default=False)


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
    import torch  # here, since folders without pickles are verified without it

    _allow_known_classes()
    try:
        # DeepSpeed writes the format before zip where its JSON asks for it.
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=not _trusted.get())
    except Exception as error:  # a broken pickle leads the unpickler into any error
        raise UserError(_explained(str(file), error)) from None


def is_read_pickle(file: Path) -> bool:
    """Return whether `file` is a pickle that some load of a model or a checkpoint reads."""
    return file.suffix in (".pt", ".pth", ".bin") and file.name not in NEVER_READ


def check_weight_files(folder: Path) -> None:
    """Check the `*.bin` of a model's or an adapter's folder that holds no safetensors, which are taken first.
    Raises UserError as `load_pickle`.
    """
    if not any(folder.glob("*.safetensors*")):
        raise_if_any(pickle_errors(file for file in sorted(folder.glob("*.bin")) if is_read_pickle(file)))


def pickle_errors(files: Iterable[Path]) -> list[str]:
    """List files that cannot be read, or ask for a class that no checkpoint holds.

    Trusted ones are not looked at: looking would run them.
    """
    errors: list[str] = []
    if _trusted.get():
        return errors
    for file in files:
        try:
            load_pickle(file)
        except UserError as error:
            errors += error.problems
    return errors


def _explained(file: str, error: BaseException) -> str:
    refused = _REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if not refused:
        return f"{file}: cannot be read ({type(error).__name__}: {one_line(error)})"
    return f"{file}: holds {next(filter(None, refused.groups()))}, which no checkpoint needs; {WAY_OUT}"


def _allow_known_classes() -> None:
    """Allow what DeepSpeed's shards hold beside tensors, and the numpy arrays of the Trainer's random states.

    For the rest of the process: `torch.serialization.safe_globals` takes away at its end what was allowed before.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    of_deepspeed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    of_numpy = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    of_python = [(_zero_stage, "builtins.getattr")]
    torch.serialization.add_safe_globals(of_deepspeed + of_numpy + of_python)


def _zero_stage(enum: type, name: str) -> Any:
    """Stand for getattr: some releases of Python (3.11.2) store a member of an enum as getattr(its class, its name)."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if enum is not ZeroStageEnum:
        raise pickle.UnpicklingError("GLOBAL getattr was not an allowed global")
    return ZeroStageEnum[name]
