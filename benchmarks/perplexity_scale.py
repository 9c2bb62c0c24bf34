"""Rows of `perplexity_speed.py` beyond one pass over one model: KL to a reference, comparisons, and large corpora.

    python benchmarks/perplexity_speed.py --rows kl comparison corpus --out scale.json

- KL: one launch of both models over the same tiles, beside what is usual: a pass that saves the reference's logits
  (float32, a file for each window), and a pass that reads them. CPU milliseconds per token, memory, and bytes on disk.
- Comparison: CPU seconds of 10,000 resamples and the sign test, by the number of documents.
- Corpus: what a rank does with a prepared corpus before its first forward (windows, hashes, batches, pieces, the first
  batch), by the size of the text, four bytes a token, in documents of 500 tokens in the mean. Tokens are random and
  written as preparation does. Anonymous memory counts; pages of the mapped files are the system's cache.

Each measurement is a process of its own, forked.
"""

import dataclasses
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsft.data.token_store import Store, StoreWriter
from dsft.data.tokenization import Tokens
from dsft.models.row_rules import RowRules
from dsft.perplexity.compare import compare_pair
from dsft.perplexity.kl import COLUMNS
from dsft.perplexity.result import Evaluation
from dsft.perplexity.scoring import evaluate_windows, form_batches
from dsft.perplexity.sums import Perplexity, pieces_of
from dsft.perplexity.windows import Windows, disjoint_spans, of_corpus, of_documents, rolling_spans

BYTES_PER_TOKEN = 4
"""Of English text with a vocabulary of today."""
MEAN_TOKENS = 500
SEQ_LEN, BATCH_TOKENS = 1024, 4096
VOCABULARY = 50257
PART_TOKENS = 1 << 22


# --- KL --------------------------------------------------------------------------------------------------------------


def tiled_kl(models: tuple, windows: Windows, pad_token_id: int) -> float:
    """KL(reference || model) in nats per token, as dsft takes it."""
    result = evaluate_windows(
        models[0],
        windows,
        pad_token_id=pad_token_id,
        batch_tokens=BATCH_TOKENS,
        device=torch.device("cpu"),
        collective_forward=False,
        reference=models[1],
    )
    return math.fsum(result.document_pairs[COLUMNS.index("kl") - 1]) / result.tokens


@torch.no_grad()
def saved_logits_kl(models: tuple, windows: Windows, folder: Path) -> float:
    """The same with two passes: the reference's logits lie on disk between them."""
    folder.mkdir()
    model, reference = models
    kl, tokens = 0.0, 0
    for window in range(len(windows.spans)):
        ids, _ = windows.inputs_and_targets(window)
        logits = reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float()
        np.save(folder / f"{window}.npy", logits.numpy())
    for window in range(len(windows.spans)):
        ids, targets = windows.inputs_and_targets(window)
        scored = torch.from_numpy(targets >= 0)
        p = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0][scored].float().log_softmax(-1)
        q = torch.from_numpy(np.load(folder / f"{window}.npy"))[scored].log_softmax(-1)
        kl += torch.nn.functional.kl_div(p, q, reduction="sum", log_target=True).item()
        tokens += int(scored.sum())
    return kl / tokens


def another(model: torch.nn.Module) -> torch.nn.Module:
    """Move every weight a little: a model whose predictions are near."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.005)
    return model


# --- comparison ------------------------------------------------------------------------------------------------------


def comparison_seconds(documents: int) -> dict[str, float]:
    base, other = (_evaluation(name, seed, documents) for seed, name in enumerate(("base", "other")))
    start = time.process_time()
    comparison = compare_pair(base, other)
    return {"cpu_seconds": time.process_time() - start, "documents": documents, "resampled": comparison.resampled}


def _evaluation(name: str, seed: int, documents: int) -> Evaluation:
    tokens = np.random.default_rng(0).integers(5, 2 * MEAN_TOKENS, documents)
    nats = tokens * np.random.default_rng(seed + 1).normal(3.0, 0.3, documents)
    perplexity = Perplexity(
        nats=math.fsum(nats),
        tokens=int(tokens.sum()),
        document_nats=nats,
        document_tokens=tokens,
        document_bytes=tokens * BYTES_PER_TOKEN,
        document_words=tokens,
        document_pairs=np.zeros((0, documents)),
        block_nats=np.zeros(0),
        block_tokens=np.zeros(0, np.int64),
        windows_per_block=0,
        fed_tokens=int(tokens.sum()),
        reported_loss=math.fsum(nats) / int(tokens.sum()),
    )
    known: dict[str, Any] = {field.name: None for field in dataclasses.fields(Evaluation)}
    return Evaluation(
        **known
        | {"perplexity": perplexity, "model": name, "data": "data", "options": {}, "groups": {}}
        | {"hashes": {"texts": "", "tokens": "", "windows": ""}}
    )


# --- corpus ----------------------------------------------------------------------------------------------------------


def write_corpus(folder: Path, mebibytes: int) -> Path:
    """Write a prepared corpus of so much text."""
    rng, left = np.random.default_rng(0), mebibytes * 2**20 // BYTES_PER_TOKEN
    with StoreWriter(folder, largest_id=VOCABULARY - 1) as writer:
        while left:
            size = min(left, PART_TOKENS)
            left -= size
            ends = np.append(np.unique(rng.integers(1, size, size // MEAN_TOKENS)), size)
            sizes = np.diff(ends, prepend=0)
            writer.append(
                Tokens(
                    ids=rng.integers(0, VOCABULARY, size).astype(np.int32),
                    trained=np.ones(size, bool),
                    ends=ends,
                    hashes=rng.integers(0, 2**63, len(ends)).astype(np.uint64),
                    counts=Counter(rows=len(ends)),
                    document_bytes=sizes * BYTES_PER_TOKEN,
                    document_words=sizes,
                )
            )
        writer.finish(is_text=True)
    return folder


MODES: dict[str, Callable[[Store], Windows]] = {
    "windows": partial(of_corpus, spans_of=partial(disjoint_spans, length=SEQ_LEN)),
    "rolling": partial(of_documents, spans_of=partial(rolling_spans, length=SEQ_LEN)),
}


def to_the_first_batch(folder: Path, mode: str, memory: Callable[[str], int]) -> dict[str, float]:
    """Seconds and memory of a rank until its first batch can be fed.

    Args:
        memory: bytes of a field of /proc/self/status.
    """
    before = memory("RssAnon")
    wall, cpu = time.perf_counter(), time.process_time()
    windows = MODES[mode](Store(folder))
    assert windows.has_scored_tokens
    windows.hashes()
    batches = form_batches(windows.lengths, BATCH_TOKENS, RowRules())
    pieces = pieces_of(windows, batches)
    sums = np.zeros(pieces.ends[-1])
    places = pieces.places()
    for window in batches[0]:
        windows.inputs_and_targets(window)
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "anonymous_bytes": memory("RssAnon") - before,
        "windows": len(windows.spans),
        "documents": len(windows.document_ends),
        "tokens": len(windows.tokens),
        "pieces": len(sums),
        "batches": len(places),
    }


def corpus_rows(sizes: list[int], folder: Path, apart: Callable, memory: Callable[[str], int]) -> list[dict]:
    """Measure each size in each mode.

    Args:
        sizes: of the text, in MiB.
        apart: calls a function in a process of its own.
    """
    rows = []
    for mebibytes in sizes:
        store = write_corpus(folder / f"corpus-{mebibytes}", mebibytes)
        for mode in MODES:
            rows.append({"mebibytes": mebibytes, "mode": mode} | apart(to_the_first_batch, store, mode, memory))
        shutil.rmtree(store)
    return rows


def slope(rows: list[dict], mode: str) -> float:
    """Anonymous bytes of a rank for each byte of text, between the smallest and the largest size."""
    first, *_, last = (row for row in rows if row["mode"] == mode)
    return (last["anonymous_bytes"] - first["anonymous_bytes"]) / ((last["mebibytes"] - first["mebibytes"]) * 2**20)
