"""Rows of `perplexity_speed.py` beyond one pass over one model: KL to a reference, comparisons, and large corpora.

    python benchmarks/perplexity_speed.py --rows kl comparison corpus files --out scale.json

- KL: one launch of both models over the same tiles, beside what is usual: a pass that saves the reference's logits
  (float32, a file for each window), and a pass that reads them. CPU milliseconds per token, memory, and bytes on disk.
- Comparison: CPU seconds of intervals and the sign test, by the number of documents.
- Corpus: an evaluation of a small model on a prepared corpus until its first batches are scored, by the size of the
  text, four bytes a token, in documents of 500 tokens in the mean. Tokens are random, in a store as preparation writes
  it. Seconds until the first forward, and the peak of private memory (RssAnon, sampled) above that before the start,
  the same on every rank; pages of the mapped files are the system's cache.
- Files: the same from a file of text that is not prepared: one row of 100 MiB, 300 MiB of rows and of plain text, and
  protocol gptq over 15 and 30 MiB. Text is the lines of `--corpus_text` in a random order, again and again. Memory is
  that of the process and of the workers that tokenise, together.

Each measurement is a process of its own, forked.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase

from dsft.api import evaluate_all
from dsft.config.options import EvalConfig
from dsft.data.tokens import StoreWriter, Tokens, fingerprint
from dsft.perplexity import documents, scoring
from dsft.perplexity.compare import compare_pair
from dsft.perplexity.modes import Windows
from dsft.perplexity.results import COLUMNS, Evaluation
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.sums import Perplexity

BYTES_PER_TOKEN = 4
"""Of English text with a vocabulary of today."""
MEAN_TOKENS = 500
SEQ_LEN, BATCH_TOKENS = 1024, 4096
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


# --- profile ---------------------------------------------------------------------------------------------------------

KINDS = {
    "products": ("mm", "addmm", "bmm"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",),
    "exponentials of the head": ("exp_", "exp2_"),
    "largest, differences and sums of the head": ("amax", "sub_", "mul_", "sum"),
    "conversions and copies": ("copy_", "cat"),
}
"""ATen's operators by kind; those of norms, rotary positions and activations are among the rest."""


def shares_by_kind(run: Callable[[], Any]) -> dict[str, float]:
    """Profile `run` and return the share of each kind of operator in its time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    times = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in profile.key_averages()}
    total = sum(times.values())
    shares = {kind: sum(times.get(name, 0) for name in names) / total for kind, names in KINDS.items()}
    return shares | {"norms, rotary positions, activations and the rest": 1 - sum(shares.values())}


# --- comparison ------------------------------------------------------------------------------------------------------


def comparison_seconds(documents: int) -> dict[str, float]:
    base, other = (_evaluation(name, seed, documents) for seed, name in enumerate(("base", "other")))
    start = time.process_time()
    comparison = compare_pair(base, other)
    return {"cpu_seconds": time.process_time() - start, "documents": documents, "units": comparison.units}


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
        fed_tokens=int(tokens.sum()),
        reported_loss=math.fsum(nats) / int(tokens.sum()),
    )
    known: dict[str, Any] = {field.name: None for field in dataclasses.fields(Evaluation)}
    return Evaluation(
        **known
        | {"perplexity": perplexity, "model": name, "data": "data", "options": {}, "document_groups": {}}
        | {"hashes": {"texts": "", "tokens": "", "windows": ""}}
    )


# --- corpus ----------------------------------------------------------------------------------------------------------


def write_corpus(folder: Path, mebibytes: int, largest_id: int) -> None:
    """Write a prepared corpus of so much text."""
    rng, left = np.random.default_rng(0), mebibytes * 2**20 // BYTES_PER_TOKEN
    with StoreWriter(folder, largest_id=largest_id) as writer:
        while left:
            size = min(left, PART_TOKENS)
            left -= size
            ends = np.append(np.unique(rng.integers(1, size, size // MEAN_TOKENS)), size)
            sizes = np.diff(ends, prepend=0)
            writer.append(
                Tokens(
                    ids=rng.integers(0, largest_id, size).astype(np.int32),
                    trained=np.ones(size, bool),
                    ends=ends,
                    hashes=rng.integers(0, 2**63, len(ends)).astype(np.uint64),
                    counts=Counter(rows=len(ends)),
                    document_bytes=sizes * BYTES_PER_TOKEN,
                    document_words=sizes,
                )
            )
        writer.finish(source="made", is_text=True)


MODES = ("windows", "rolling")
FIRST_BATCHES = 8
ROWS = 2000
"""That the file of a corpus really has; the rest is a hole, since tokens come from the store."""


class Enough(Exception):
    """Ends an evaluation after its first batches."""


def options_of(model: Path, tokenizer: str, file: Path, **how: str) -> EvalConfig:
    options = {"model": [str(model)], "tokenizer": tokenizer, "data": [str(file)], "seq_len": SEQ_LEN} | how
    cache = str(file.parent / "cache")
    return EvalConfig(**options, batch_tokens=BATCH_TOKENS, data_cache=cache, dtype="float32")


def to_the_first_batches(options: EvalConfig, memory: Callable[[str], int]) -> dict:
    """Evaluate a corpus until its first batches are scored, as `dsft eval` does.

    Returns: seconds until the first forward, and the most private memory until the last of the first batches.

    Args:
        memory: bytes of a field of /proc/self/status.
    """
    forwards: list[float] = []
    score = scoring.score

    def counted(*batch) -> torch.Tensor:
        forwards.append(time.perf_counter())
        if len(forwards) > FIRST_BATCHES:
            raise Enough
        return score(*batch)

    def watch() -> None:
        while not done.wait(0.02):
            workers = 0
            for child in psutil.Process().children():  # that tokenise
                with contextlib.suppress(OSError, StopIteration):  # it has ended
                    workers += memory("RssAnon", child.pid)
            peak[0] = max(peak[0], memory("RssAnon") + workers)

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("RssAnon")
    peak, done = [before], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    scoring.score = counted
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        with contextlib.suppress(Enough):
            list(evaluate_all(options))
    finally:
        scoring.score = score
        cpu_seconds = time.process_time() - cpu
        done.set()
        watcher.join()
    return {
        "seconds_to_first_batch": forwards[0] - wall,
        "cpu_seconds": cpu_seconds,
        "private_bytes": peak[0] - before,
    }


def write_file(path: Path, mebibytes: int) -> Path:
    """Write a file of so many MiB, of which only the first rows are there."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            file.write(json.dumps({"text": " ".join(map(str, rng.integers(0, 999, MEAN_TOKENS)))}) + "\n")
        file.truncate(max(file.tell(), mebibytes * 2**20))
    return path


def write_prepared(options: EvalConfig, mebibytes: int, largest_id: int) -> dict:
    """Write the tokens of so much text where evaluations look for those of the file."""

    def prepared(data: Any, tokenizer: Any, cache: Path, **how: Any) -> None:
        place = cache / fingerprint(data, tokenizer, how["preparation"])
        write_corpus(place, mebibytes, largest_id)
        raise Enough

    documents.prepare = prepared
    with contextlib.suppress(Enough):
        list(evaluate_all(options))
    return {}


def write_small_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write the config.json of a model that takes no time."""
    sized = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=SEQ_LEN, **sized).save_pretrained(folder)
    return folder / "config.json"


FILES = (
    ("one row of jsonl", 100, {"mode": "windows"}),
    ("one row of jsonl", 100, {"mode": "rolling"}),
    ("jsonl", 300, {"mode": "windows"}),
    ("txt", 300, {"mode": "windows"}),
    ("txt", 15, {"protocol": "gptq"}),
    ("txt", 30, {"protocol": "gptq"}),
)
"""Kind of file, MiB of text, and how it is scored."""
LINES_OF_ROW = 10


def file_rows(
    folder: Path, tokenizer: PreTrainedTokenizerBase, text: str, apart: Callable, memory: Callable[[str], int]
) -> list[dict]:
    """Measure each of FILES. Args: `text`: whose lines the files are of."""
    model, rows, lines = write_small_model(folder / "small", tokenizer), [], text.splitlines(keepends=True)
    for kind, mebibytes, how in FILES:
        here = folder / f"file-{len(rows)}"
        here.mkdir()
        path, rng, size = here / f"corpus.{kind.split()[-1]}", np.random.default_rng(0), 0
        with path.open("w", encoding="utf-8") as file:
            if kind == "one row of jsonl":
                file.write('{"text": "')
            while size < mebibytes * 2**20:
                taken = "".join(lines[place] for place in rng.integers(0, len(lines), LINES_OF_ROW))
                size += len(taken.encode())
                row = {"jsonl": json.dumps({"text": taken}) + "\n", "txt": taken}
                file.write(row.get(kind, json.dumps(taken)[1:-1]))
            if kind == "one row of jsonl":
                file.write('"}\n')
        measured = apart(to_the_first_batches, options_of(model, tokenizer.name_or_path, path, **how), memory)
        rows.append({"file": kind, "mebibytes": mebibytes} | how | measured)
        shutil.rmtree(here)
    return rows


def corpus_rows(
    sizes: list[int], folder: Path, tokenizer: PreTrainedTokenizerBase, apart: Callable, memory: Callable[[str], int]
) -> list[dict]:
    """Measure each size in each mode.

    Args:
        sizes: of the text, in MiB.
        apart: calls a function in a process of its own.
    """
    model, rows = write_small_model(folder / "small", tokenizer), []
    for mebibytes in sizes:
        here = folder / f"corpus-{mebibytes}"
        here.mkdir()
        file = write_file(here / "corpus.jsonl", mebibytes)
        for mode in MODES:
            options = options_of(model, tokenizer.name_or_path, file, mode=mode)
            apart(write_prepared, options, mebibytes, len(tokenizer) - 1)
            rows.append({"mebibytes": mebibytes, "mode": mode} | apart(to_the_first_batches, options, memory))
        shutil.rmtree(here)
    return rows


def slope(rows: list[dict], mode: str) -> float:
    """Private bytes of a rank for each byte of text, between the smallest and the largest size."""
    first, *_, last = (row for row in rows if row["mode"] == mode)
    return (last["private_bytes"] - first["private_bytes"]) / ((last["mebibytes"] - first["mebibytes"]) * 2**20)
