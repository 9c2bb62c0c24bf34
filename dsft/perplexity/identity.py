"""Identifies what a result depends on, so that an evaluation that resumes or takes over results never mixes two models.

It is the files of the model (of an adapter and of its base), the tokens with their windows, the options, the versions
of the libraries, and the kind of device. Files of hundreds of gigabytes are sampled, and their times of change count.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from dsft.config.options import UNQUANTISED
from dsft.models.build import described_in, is_bare_config
from dsft.models.model_folder import adapter_base, has_only_shards, is_step_folder, located
from dsft.runtime import distributed
from dsft.runtime.hardware import has_gpu
from dsft.runtime.versions import versions

SCORING = 5
"""A change of code that changes nats, or what is kept of a result, raises it."""
LIBRARIES = ("dsft", "torch", "deepspeed", "transformers", "peft")
"""Whose versions can change nats."""
QUANTIZERS = ("bitsandbytes", "torchao", "gguf", "compressed-tensors", "gptqmodel", "optimum")
"""Whose versions can change those of a quantised model."""
READ_ENDINGS = (".safetensors", ".bin", ".pt", ".json", ".py")
"""Of files that loading a model reads. The text of a tokenizer counts through the tokens that it makes."""
RESULTS = ("perplexity.json",)
"""Files that an evaluation may write into a model's folder."""
EDGE_BYTES, BLOCK_BYTES, BLOCKS = 1 << 20, 1 << 14, 64
"""Read of each file: both ends, the whole header, and blocks that are evenly spread."""


def fingerprint(model: dict[str, str], windows: dict[str, str], options: dict[str, Any]) -> str:
    """Hash everything that a result depends on, over all ranks: nodes may hold copies of their own. Collective.

    Args:
        model: its `model_identity`.
        windows: their `hashes()`.
    """
    device = torch.cuda.get_device_name() if has_gpu() else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    quantizers = QUANTIZERS if options.get("quantization", UNQUANTISED) != UNQUANTISED else ()
    libraries = {name: version for name, version in versions(*quantizers).items() if name in (*LIBRARIES, *quantizers)}
    everywhere = sorted(set(distributed.from_all([json.dumps([model, device, libraries])])))
    content = json.dumps([SCORING, everywhere, options, windows], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def model_identity(model: str, *, revision: str | None, seed: int) -> dict[str, str]:
    """Identify a model: `content` is the same for a copy, `changed` is not.

    Args:
        revision: of a model on the hub, whose commit is its identity.
        seed: of the random weights where the model is a config.json alone.
    """
    content, changed = hashlib.sha256(), hashlib.sha256()
    if is_bare_config(model):
        content.update(f"seed {seed}".encode())
    for name in with_bases(model):
        if not Path(name).exists():
            content.update(f"{name} {_hub_commit(name, revision) or revision}".encode())
            continue
        for file in _files_read(Path(name)):
            facts = file.stat()
            content.update(f"{file.name} {facts.st_size}".encode())
            changed.update(f"{file.name} {facts.st_mtime_ns}".encode())
            for piece in _sample(file, facts.st_size):
                content.update(piece)
    return {"content": content.hexdigest(), "changed": changed.hexdigest()}


def with_bases(model: str) -> Iterator[str]:
    """Yield the model, and the base of each adapter down to a full model."""
    yield model
    base = adapter_base(described_in(model))
    if base:
        yield from with_bases(base)


def _hub_commit(name: str, revision: str | None) -> str | None:
    """Return the commit that the cache holds of a hub model. Its config is there: it has been measured."""
    repository, gguf = located(name)
    file = gguf.get("gguf_file", "config.json")
    path = try_to_load_from_cache(repository, file, revision=revision)
    return Path(path.removesuffix(file)).name if isinstance(path, str) else None


def _files_read(path: Path) -> list[Path]:
    """List the files that loading reads: of a folder, and of DeepSpeed's shards where they are its only weights."""
    if path.is_file():
        return [path]
    folder = Path(described_in(str(path)))
    files = [file for file in folder.iterdir() if file.suffix in READ_ENDINGS and file.name not in RESULTS]
    if is_step_folder(str(path)):
        files += path.rglob("*.pt")
    elif has_only_shards(str(path)):
        files += [*folder.glob("global_step*/*"), *folder.glob("latest")]
    return sorted(file for file in files if file.is_file())


def _sample(path: Path, size: int) -> Iterator[bytes]:
    """Read the header, both ends and evenly spread blocks of a file."""
    with path.open("rb") as file:
        start = file.read(min(size, EDGE_BYTES))
        yield start
        if path.suffix == ".safetensors":  # its first 8 bytes are the length of its header
            yield file.read(max(0, min(int.from_bytes(start[:8], "little"), size) - EDGE_BYTES))
        for block in range(BLOCKS):
            file.seek(size * block // BLOCKS)
            yield file.read(BLOCK_BYTES)
        file.seek(max(0, size - EDGE_BYTES))
        yield file.read()
