"""Reads files of weights without loading them: where they lie, here or on the hub, and what tensors they hold."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dsft.errors import UserError, one_line
from dsft.models.model_folder import located
from dsft.models.pickles import load_pickle

FILE_ERRORS = (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""What a file of weights, or its index, raises that was cut, or holds something else."""
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
SAMPLE_BYTES = 2**12
"""Of a block of a tensor that `weights_digest` reads."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


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


def files_of_tensors(model: str, revision: str | None = None) -> dict[str, str]:
    """Returns, for each tensor of a package's safetensors, the file that holds it; nothing of other formats."""
    names = {}
    for file in find_files(model, WEIGHT_FILES[:2], revision):
        with _named(file), safe_open(file, framework="pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), file)
    return names


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
