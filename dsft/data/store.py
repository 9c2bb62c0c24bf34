"""Keeps tokens on disk, read without loading them: a folder that is complete or not there.

tokens.bin    [F] uint16 or int32: all sequences (documents, where the data is text) end to end
trained.bin   [F] bool
weights.bin   [F] float32, by which the loss of each token is multiplied; only where it is neither 0 nor 1 for any
ends.bin      [S] int64
sources.bin   [S] uint16, numbers of facts["sources"]; only where source_column names what they are of
hashes.bin    [S] uint64, of the tokens; of the texts where an evaluation made them
document_bytes.bin, document_words.bin    [S] int64, of the texts; empty where only training reads the folder
facts.json    format, counts, what the tokens were made from, and the SHA-256 of tokens, trained and ends together
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dsft.data.tokenization import Tokens
from dsft.errors import UserError

FACTS = "facts.json"
COUNTS = (
    *(
        "rows",
        "left_out_by_map_row",
        "truncated",
        "split",
        "dropped_long",
        "dropped_untrained",
        "dropped_empty",
        "dropped_bad",
    ),
    *("rendered_apart", "unrendered", "empty_thinking", "trained_tokens", "weighted_tokens"),
)
"""What is counted of every source, in the order of the data line; `tokens` and `duplicates` follow. Of chats:
rendered_apart (sequences for answers that the template renders otherwise in a longer chat), unrendered, empty_thinking;
weighted_tokens are trained ones of a weight other than 1.
"""

MOST_SOURCES = 100
"""Each has a loss of its own in every line of the log."""


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _column(name: str, dtype: str = "") -> cached_property:
    """A file of a store, opened when it is asked for; `facts` know the dtype of tokens."""
    return cached_property(lambda store: _mapped(store.folder / f"{name}.bin", dtype or store.facts["dtype"]))


@dataclass(frozen=True)
class Store:
    """A finished folder."""

    folder: Path

    def __reduce__(self):
        """Processes of torch's loader open the files themselves."""
        return Store, (self.folder,)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """format, is_text, source, seconds, dtype, counts, first, tokens_hash, sources."""
        return json.loads((self.folder / FACTS).read_text(encoding="utf-8"))

    tokens = _column("tokens")
    trained = _column("trained", "bool")
    ends = _column("ends", "int64")
    hashes = _column("hashes", "uint64")
    sources = _column("sources", "uint16")
    document_bytes = _column("document_bytes", "int64")
    document_words = _column("document_words", "int64")

    @cached_property
    def weights(self) -> np.ndarray | None:
        path = self.folder / "weights.bin"
        return _mapped(path, "float32") if path.exists() else None

    @property
    def is_text(self) -> bool:
        """Documents, to be cut into windows; else samples that are sequences as they are."""
        return self.facts["is_text"]

    @property
    def counts(self) -> dict[str, int]:
        return self.facts["counts"]


class StoreWriter:
    """Writes a folder beside its place and puts it there when all is on disk.

    A killed writer leaves only `PLACE.partial`.
    """

    def __init__(self, place: Path, *, largest_id: int):
        self.place, self.partial = place, place.with_name(f"{place.name}.partial")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self.dtype = "uint16" if largest_id < 1 << 16 else "int32"
        self.files = {
            name: open(self.partial / f"{name}.bin", "wb")  # noqa: SIM115
            for name in ("tokens", "trained", "ends", "hashes", "sources", "document_bytes", "document_words")
        }
        self.counts: Counter = Counter()
        self.size = 0
        self.first: dict[str, str] = {}
        self.sources: dict[str, int] = {}

    def append(self, tokens: Tokens) -> None:
        tokens.ids.astype(self.dtype).tofile(self.files["tokens"])
        tokens.trained.tofile(self.files["trained"])
        if tokens.weights is not None and "weights" not in self.files:
            # The column begins with the tokens that are there already: their weight is 1 where they are trained.
            self.files["trained"].flush()
            self.files["weights"] = open(self.partial / "weights.bin", "wb")  # noqa: SIM115
            trained = _mapped(self.partial / "trained.bin", "bool")
            for start in range(0, self.size, 1 << 20):
                trained[start : min(start + (1 << 20), self.size)].astype(np.float32).tofile(self.files["weights"])
        if "weights" in self.files:
            weights = tokens.trained if tokens.weights is None else tokens.weights
            weights.astype(np.float32, copy=False).tofile(self.files["weights"])
        (tokens.ends + self.size).tofile(self.files["ends"])
        for name in ("hashes", "document_bytes", "document_words"):
            getattr(tokens, name).tofile(self.files[name])
        numbers = [self.sources.setdefault(name, len(self.sources)) for name in tokens.sources]
        if len(self.sources) > MOST_SOURCES:
            raise UserError(f"source_column: it has more than {MOST_SOURCES:,} values; name another column")
        np.array(numbers, np.uint16).tofile(self.files["sources"])
        self.size += len(tokens.ids)
        self.counts += tokens.counts
        self.counts["trained_tokens"] += int(tokens.trained.sum())
        self.first = tokens.first | self.first

    def finish(self, **facts: Any) -> Store:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        counts = {name: int(self.counts[name]) for name in COUNTS}
        hashes = _mapped(self.partial / "hashes.bin", "uint64")
        # A sixteenth of the hashes at a time, so that memory stays small.
        distinct = sum(len(np.unique(hashes[hashes >> np.uint64(60) == part])) for part in range(16))
        counts |= {"tokens": self.size, "duplicates": len(hashes) - distinct}
        content = hashlib.sha256()
        for name in ("tokens", "trained", "ends"):
            with open(self.partial / f"{name}.bin", "rb") as file:
                while piece := file.read(1 << 20):
                    content.update(piece)
        with open(self.partial / FACTS, "w", encoding="utf-8") as file:
            facts |= {"dtype": self.dtype, "counts": counts, "first": self.first, "tokens_hash": content.hexdigest()}
            facts["sources"] = [*self.sources]
            json.dump(facts, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self.partial.rename(self.place)
        return Store(self.place)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        """Removes what was not finished."""
        for file in self.files.values():
            file.close()
        shutil.rmtree(self.partial, ignore_errors=True)
