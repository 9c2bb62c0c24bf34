"""Computes perplexity on any number of ranks: each token is scored once, and the result is bit-identical.

    windows --form_batches--> batches --score, one rank each--> nats of tokens --sum over ranks--> result

perplexity = exp(nats / tokens), where nats is the sum of -ln p(token | tokens before it in its window) over all scored
tokens, with log-softmax in fp32 for any dtype of the model. Batches depend only on the data. Nats of a token are
rounded to a multiple of 2^-28 and added up as integers, so that sums are exact in any order and grouping.

The logits of all positions never exist at once: they are computed in tiles (`models/chunked_head.py`). A head that can
run alone gets some rows of hidden states at a time; a model whose head cannot scores one window at a time.

A reference's predictions are compared over the vocabulary V, with logits z of the model and r of the reference:

    KL(reference || model) = sum_V p_r (ln p_r - ln p_z)      information that the model loses
    KL(model || reference) = sum_V p_z (ln p_z - ln p_r)
    same top               whether both have the same top token

Shape suffixes: B batch, T time, V vocabulary, N scored tokens, R those of one tile, K columns, C cells of `sum_tokens`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from dsft.data.epoch import form_batches
from dsft.job import beat as watchdog
from dsft.models.chunked_head import ROW_TILE, ChunkedHead, scored_rows
from dsft.models.probes import RowRules, row_rules
from dsft.models.sequence_parallel import ALONE, Team
from dsft.perplexity.modes import Windows
from dsft.perplexity.results import COLUMNS, Recorder
from dsft.perplexity.sums import STEPS, Perplexity, add_up
from dsft.runtime.console import progress_bar, say
from dsft.runtime.distributed import sum_over_ranks
from dsft.units import IGNORED

MOST_NATS = 1e4  # of a token: beyond it the model is broken, and integers would overflow
LEAST = -1e30  # below any logit except -inf, which a whole part of the vocabulary may have


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 without TF32 inside a `with`, regardless of the option `tf32` and the environment.

    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's images set, changes cuBLAS's own setting.
    """
    everywhere = torch.backends
    products = torch.backends.cuda.matmul
    before = everywhere.fp32_precision, products.fp32_precision
    everywhere.fp32_precision = products.fp32_precision = "ieee"
    try:
        yield
    finally:
        # "none" follows the global setting, also of a later training in this process.
        everywhere.fp32_precision = before[0]
        products.fp32_precision = "none"
        if products.fp32_precision != before[1]:
            products.fp32_precision = before[1]


_is_split: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a model's head can be computed alone, as found on all ranks."""


def can_be_split(scorer: ChunkedHead, device: torch.device) -> bool:
    """Return whether the head can be computed alone. Collective if the model is sharded; tried once per model, since
    sharded weights are gathered twice.
    """
    model = scorer.model
    if model not in _is_split:
        # Different tokens: a row of padding may be all zeros, for which every way of computing agrees.
        vocab_size = scorer.config.get_text_config().vocab_size
        spread = torch.arange(1, 9, device=device) * (vocab_size // 9)
        _is_split[model] = scorer.agrees(spread[None])
        if not _is_split[model]:
            say(
                f"note: the head of {type(model).__name__} cannot be computed in parts: windows are scored one by one,"
                " each with all its logits"
            )
    return _is_split[model]


@torch.no_grad()
@exact_products()
def evaluate_windows(
    model: nn.Module,
    windows: Windows,
    *,
    pad_token_id: int,
    batch_tokens: int,
    device: torch.device,
    collective_forward: bool,
    reference: nn.Module | None = None,
    recorder: Recorder | None = None,
    team: Team = ALONE,
    in_parts: bool = True,
    progress: bool = False,
) -> Perplexity:
    """Compute the perplexity of `model` on `windows`. Collective: every rank must call it.

    Args:
        batch_tokens: tokens of one forward, padding included; a longer window is a separate batch.
        collective_forward: the model is sharded (ZeRO-3), so ranks without work must take part in every forward.
        reference: predicts the same tokens, for `document_pairs` of the result.
        recorder: has the batches of an interrupted evaluation, and records new ones.
        team: the ranks that share each window.
        in_parts: compute heads alone if they can be; else every window is scored alone, with all its logits.

    Raises:
        TrainingStopped: if a document's loss is NaN or infinite, naming the first such document.
    """
    was_training = model.training
    models = [model] if reference is None else [model, reference]
    rules, *others = (row_rules(each.eval()) for each in models)
    for other in others:  # batches must suit all models
        rules = rules.joined(other)
    rules = dataclasses.replace(rules, multiple=team.size)
    dummy = torch.full((1, 8 * team.size), pad_token_id, device=device)
    scorers = [ChunkedHead(each) for each in models]
    for scorer in scorers:
        scorer.is_split = in_parts and can_be_split(scorer, device)
        if not scorer.is_split:
            batch_tokens = 1
    lengths_W = windows.lengths  # once: a pass over all windows
    batches = form_batches(lengths_W, batch_tokens, rules)
    num_columns = len(COLUMNS) if others else 1
    num_cells = len(windows.document_ends) + len(windows.spans)
    sums_KC = np.zeros((num_columns + 2, num_cells), np.int64)

    def scored(batch_BT):
        if team.size == 1:
            return score(scorers, batch_BT)
        with team.attention(model):
            columns_KN = score(scorers, team.share(batch_BT))
        return team.gather(columns_KN, batch_BT["targets"])

    # Teams (one rank each without sequence parallelism) take turns: with 2 teams and 5 batches, team 0 scores the
    # first, third and fifth, and in the third turn team 1 has none. The first rank of a team keeps the results.
    recorder = recorder or Recorder(windows)
    left = [index for index in range(len(batches)) if index not in recorder.scored_before]
    tokens = [int(lengths_W[batches[index]].sum()) for index in left]
    number, place_in_team, teams = team.position()
    with progress_bar(is_shown=progress, total=sum(tokens), desc="Perplexity", unit="token", unit_scale=True) as bar:
        for turn in range(0, len(left), teams):
            if turn + number < len(left):
                index = left[turn + number]
                batch = batches[index]
                tensors = collate(windows, batch, rules, pad_token_id)
                columns_KN = scored({name: tensor.to(device) for name, tensor in tensors.items()})
                if place_in_team == 0:
                    places = [windows.scored_places(window) for window in batch]
                    windows_N = np.repeat(batch, [len(each) for each in places])
                    places_N = np.concatenate(places)
                    cells, batch_sums = sum_tokens(windows, windows_N, places_N, columns_KN)
                    sums_KC[:, cells] += batch_sums
                    recorder.record(index, places_N, columns_KN[0], [cells.tolist(), batch_sums.tolist()])
            elif collective_forward:  # joins the collectives of the other ranks' batches
                scored({"input_ids": dummy, "targets": torch.full_like(dummy, IGNORED)})
            bar.update(sum(tokens[turn : turn + teams]))
            watchdog.heartbeat()
    recorder.close()
    model.train(was_training)
    sums_KC = sum_over_ranks(torch.from_numpy(sums_KC)).numpy()
    for cells, batch_sums in recorder.scored_before.values():
        sums_KC[:, cells] += np.array(batch_sums, np.int64)
    return add_up(windows, sums_KC, fed_tokens=sum(tokens))


def sum_tokens(
    windows: Windows, windows_N: np.ndarray, places_N: np.ndarray, columns_KN: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Sum the scored tokens of some windows by document and by window.

    Returns [C], the cells: indices of documents, then of windows, offset by the number of all documents; and [K + 2, C]
    int64, the sums of each: columns in steps of 2^-28, number of tokens, and number of NaN or infinite tokens.
    """
    is_sound_N = (columns_KN.abs() < MOST_NATS).all(dim=0)  # False for NaN
    steps_KN = (columns_KN * STEPS).where(is_sound_N, 0).long()
    rows_KN = torch.cat([steps_KN, torch.ones_like(steps_KN[:1]), ~is_sound_N[None]])
    cells_N = np.concatenate([windows.documents_of(places_N), len(windows.document_ends) + windows_N])
    cells, inverse = np.unique(cells_N, return_inverse=True)
    sums_KC = torch.zeros(len(rows_KN), len(cells), dtype=torch.int64)
    sums_KC.index_add_(1, torch.from_numpy(inverse), rows_KN.repeat(1, 2))
    return cells, sums_KC.numpy()


def collate(windows: Windows, batch: list[int], rules: RowRules, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return input_ids and targets [B, T], padded on the right: no token sees later ones, so no mask is needed."""
    start, end, _ = windows.spans[batch[0]]  # the longest
    shape = (len(batch), rules.width(end - start - 1))
    ids_BT = np.full(shape, pad_token_id, dtype=np.int64)
    targets_BT = np.full(shape, IGNORED, dtype=np.int64)
    for row, window in enumerate(batch):
        ids, targets = windows.inputs_and_targets(window)
        ids_BT[row, : len(ids)] = ids
        targets_BT[row, : len(ids)] = targets
    return {"input_ids": torch.from_numpy(ids_BT), "targets": torch.from_numpy(targets_BT)}


def score(scorers: list[ChunkedHead], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [K, N] float64 on the CPU for each scored token of a collated batch, row by row: its nats, and with a
    second scorer, the reference, all COLUMNS. Collective if a scorer is sharded.

    Values are rounded to multiples of 2^-28: their sums are exact in any order.
    """
    targets_BT = batch["targets"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    is_scored_BT = targets_BT != IGNORED
    outputs = [scorer.run(**inputs)[is_scored_BT] for scorer in scorers]
    columns = []
    with contextlib.ExitStack() as gathered:
        for scorer in scorers:
            gathered.enter_context(scorer.weights())
        rows = ROW_TILE[targets_BT.device.type]
        if len(scorers) > 1:  # a comparison in float64 needs several copies
            rows = max(1, scored_rows(scorers[0].config.get_text_config().vocab_size) // 8)
        parts = [each.split(rows) for each in (targets_BT[is_scored_BT], *outputs)]
        for targets_R, *outputs_R in zip(*parts, strict=True):
            if len(scorers) > 1:
                logits = [scorer.logits(output) for scorer, output in zip(scorers, outputs_R, strict=True)]
                columns_KR = compare_logits(*logits, targets_R)
            else:
                columns_KR = negative_log_likelihood(scorers[0].tiles(*outputs_R), targets_R)[None]
            columns.append(columns_KR.double().cpu())
    return torch.cat(columns, dim=1).mul_(STEPS).round_().div_(STEPS)


def negative_log_likelihood(parts: Iterable[torch.Tensor], targets_R: torch.Tensor) -> torch.Tensor:
    """Return [R] in fp32: log-sum-exp over the vocabulary minus the target's logit.

    Args:
        parts: fp32 logits, [R, W] for one part of the vocabulary after the other; overwritten, since a copy would cost
            as much as the head.
    """
    log_sums = []
    start = 0
    wanted_R = torch.zeros(len(targets_R), device=targets_R.device)
    for logits_RW in parts:
        column_R = targets_R - start
        start += logits_RW.shape[1]
        is_here_R = (column_R >= 0) & (targets_R < start)
        at_column_R = logits_RW.gather(1, column_R.where(is_here_R, 0)[:, None])[:, 0]
        wanted_R = torch.where(is_here_R, at_column_R, wanted_R)
        largest_R1 = logits_RW.amax(dim=1, keepdim=True).clamp_(min=LEAST)
        sums_R = logits_RW.sub_(largest_R1).exp_().sum(dim=1)
        log_sums.append(largest_R1[:, 0] + sums_R.log())
    return torch.stack(log_sums).logsumexp(dim=0) - wanted_R


def compare_logits(logits_RV: torch.Tensor, reference_RV: torch.Tensor, targets_R: torch.Tensor) -> torch.Tensor:
    """Return [K, R] float64: the COLUMNS of `results.py` for each token."""
    log_p_RV = logits_RV.double().log_softmax(dim=1)
    log_r_RV = reference_RV.double().log_softmax(dim=1)
    columns = (
        -log_p_RV.gather(1, targets_R[:, None])[:, 0],
        -log_r_RV.gather(1, targets_R[:, None])[:, 0],
        divergence(log_r_RV, log_p_RV),
        divergence(log_p_RV, log_r_RV),
        (log_p_RV.argmax(dim=1) == log_r_RV.argmax(dim=1)).double(),
    )
    return torch.stack(columns)


def divergence(log_a_RV: torch.Tensor, log_b_RV: torch.Tensor) -> torch.Tensor:
    """Return KL(a || b) of each row, in nats; tokens with probability 0 in `a` add nothing."""
    terms_RV = log_a_RV.exp() * (log_a_RV - log_b_RV)
    return terms_RV.where(log_a_RV != -math.inf, 0.0).sum(dim=1)
