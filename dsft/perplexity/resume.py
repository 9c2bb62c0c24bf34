"""Results of an evaluation while it runs, so that one that is interrupted continues where it was.

Each rank appends a line for each batch it scored to a file of its own, below a folder named by the fingerprint of
model, data and options.
Batches do not depend on the number of ranks, so another number may continue.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsft.perplexity.windows import Windows
from dsft.runtime import distributed

SAMPLED_BYTES = 1 << 20


def fingerprint(model: str, windows: Windows, options: dict[str, Any]) -> str:
    """Hash of the model's files, the tokens with their windows, and the options that change a result."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    digest.update(model_hash(model).encode())
    for array in (windows.tokens, windows.scorable, windows.document_starts, windows.spans):
        digest.update(array.tobytes())
    return digest.hexdigest()


def model_hash(model: str) -> str:
    """Hash of names, sizes and the first and last MiB of a folder's files; of the name alone where it is no folder
    here.
    """
    digest = hashlib.sha256()
    path = Path(model)
    if not path.is_dir():
        digest.update(path.read_bytes() if path.is_file() else model.encode())
    for file in sorted(path.rglob("*.*")) if path.is_dir() else ():
        if file.suffix in (".safetensors", ".bin", ".pt", ".json"):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path)} {size}".encode())
            with file.open("rb") as content:
                digest.update(content.read(SAMPLED_BYTES))
                content.seek(max(0, size - SAMPLED_BYTES))
                digest.update(content.read())
    return digest.hexdigest()


class PartialResults:
    """Lines of scored batches below `folder`. Collective: every rank makes one."""

    def __init__(self, folder: Path, key: str):
        self.folder = folder / "partial" / key[:32]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.done = self._read()
        self.file = (self.folder / f"rank-{distributed.rank()}.jsonl").open("a", encoding="utf-8")

    def _read(self) -> dict[int, list[float]]:
        """Batch index -> nats of its pieces, the union over all ranks (nodes may not share the folder), before anyone
        appends.
        """
        found: dict[int, list[float]] = {}
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    batch, nats = json.loads(line)
                except ValueError:
                    continue  # the line that was being written when the rank was killed
                found[batch] = nats
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, found)
            found = {batch: nats for one in everyone for batch, nats in one.items()}
        return found

    def save(self, batch: int, nats: list[float]) -> None:
        """Append one batch; Python's repr of a float, as JSON has it, gives the same bits back."""
        self.file.write(f"\n{json.dumps([batch, nats])}")
        self.file.flush()

    def remove(self) -> None:
        """The result is known: the lines are not needed any more. Collective."""
        self.file.close()
        if dist.is_initialized():
            dist.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)  # on every rank, since nodes may not share the folder
