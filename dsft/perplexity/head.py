"""Runs models on a batch of windows and hands out their logits tile by tile: those of all positions never exist.

A head that can be computed in parts (models/head.py) is given some rows of hidden states at a time. A model
whose head cannot runs several times, each time for some positions of the batch.

Shape suffixes: B batch, T time, S some positions, N scored tokens, W tile of the vocabulary, K columns.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from peft import PeftModel
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.models.head import ROW_TILE, VOCAB_TILE, ChunkedHead
from dsft.runtime.distributed import max_over_ranks
from dsft.units import IGNORED


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 without TF32 inside a `with`, whatever the option `tf32` or the environment says.

    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which images of NVIDIA set, speaks to cuBLAS's own setting.
    """
    settings = (torch.backends, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


SLICE_LOGITS = 2**28
"""Logits that a model whose head is not computed in parts makes in one forward: 1 GiB in fp32."""

Scorer = ChunkedHead | nn.Module
Tiles = Iterable[torch.Tensor]
"""Logits [N, W] of one tile of the vocabulary after the other."""


def score_in_tiles(
    scorers: list[Scorer],
    batch: dict[str, torch.Tensor],
    score_rows: Callable[[list[Tiles], torch.Tensor], torch.Tensor],
    *,
    columns: int,
) -> torch.Tensor:
    """Return [K, N] float64 on the CPU of each scored token of a collated batch, row by row.

    Collective where a model is sharded.

    Args:
        score_rows: is given the tiles of each scorer's logits and the targets [N], and returns [K, N].
        columns: K.
    """
    where_BT, rows = batch["targets"] != IGNORED, ROW_TILE[batch["targets"].device.type]
    columns_KBT = torch.zeros(columns, *where_BT.shape, dtype=torch.float64)
    for positions, outputs in _in_slices(scorers, batch):
        where_BS = where_BT[:, positions]
        parts = (each[where_BS].split(rows) for each in (batch["targets"][:, positions], *outputs))
        scored = [
            score_rows([_tiles(*pair) for pair in zip(scorers, of_scorers, strict=True)], wanted_N)
            for wanted_N, *of_scorers in zip(*parts, strict=True)
            if len(wanted_N)
        ]
        if scored:
            columns_KBS = torch.zeros(columns, *where_BS.shape, dtype=torch.float64)
            columns_KBS[:, where_BS.cpu()] = torch.cat(scored, dim=1).double().cpu()
            columns_KBT[:, :, positions] = columns_KBS
    return columns_KBT[:, where_BT.cpu()]


def _in_slices(scorers: list[Scorer], batch: dict[str, torch.Tensor]) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield some positions and, of each scorer, what its tiles are made of there: hidden states, or all logits."""
    given = {name: tensor for name, tensor in batch.items() if name != "targets"}
    hidden = {scorer: scorer.run_backbone(**given) for scorer in scorers if isinstance(scorer, ChunkedHead)}
    plain = [scorer for scorer in scorers if scorer not in hidden]
    width = given["input_ids"].shape[1]
    length = min((_positions_at_once(scorer, given) for scorer in plain), default=width)
    number = most = math.ceil(width / length)
    if plain and is_deepspeed_zero3_enabled():
        most = int(max_over_ranks(number))
    with contextlib.ExitStack() as gathered:
        for scorer in hidden:
            gathered.enter_context(scorer.weights())
        for start in range(0, width, length):
            here = slice(start, start + length)
            logits = {scorer: _logits(scorer, given, here) for scorer in plain}
            yield here, [logits[scorer] if scorer in logits else hidden[scorer][:, here] for scorer in scorers]
        for _ in range(number, most):
            # Every rank runs as many forwards. Its slices follow from its own batch alone, for the sake of the bits.
            for scorer in plain:
                _logits(scorer, given, slice(0, 1))


def _positions_at_once(model: nn.Module, given: dict[str, torch.Tensor]) -> int:
    """Return how many positions of each row have their logits made in one forward."""
    rows, width = given["input_ids"].shape
    if not _leaves_positions_out(model):
        return width
    return min(width, max(1, SLICE_LOGITS // (rows * _inner(model).config.get_text_config().vocab_size)))


def _logits(model: nn.Module, given: dict[str, torch.Tensor], positions: slice) -> torch.Tensor:
    if not _leaves_positions_out(model):
        return model(**given, use_cache=False).logits[:, positions]
    kept = torch.arange(given["input_ids"].shape[1], device=given["input_ids"].device)[positions]
    return model(**given, use_cache=False, logits_to_keep=kept).logits


def _leaves_positions_out(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(type(_inner(model)).forward).parameters


def _inner(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _tiles(scorer: Scorer, rows: torch.Tensor) -> Tiles:
    return scorer.logits(rows) if isinstance(scorer, ChunkedHead) else rows.split(VOCAB_TILE[rows.device.type], dim=1)
