"""Compares the predictions of a model with those of a reference, token by token, without full logits.

For each scored token, over the vocabulary V with logits z of the model and r of the reference:

    KL(reference || model) = sum_V p_r (ln p_r - ln p_z)      the information that the model loses
    KL(model || reference) = sum_V p_z (ln p_z - ln p_r)
    same top               whether both have the same likeliest token
    change                 p_z - p_r of the token in the text

Both heads compute the same tile of the vocabulary at a time. Of each tile only sums are kept: with M the largest logit
so far, S = sum exp(r - M) and T = sum exp(r - M) (z - r), so that KL(reference || model) = ln S_z - ln S_r - T_r / S_r.

Shape suffixes: N scored tokens, W tile of the vocabulary, K columns, D documents.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from dsft.models.head import exp_in_place
from dsft.perplexity.results import Divergence
from dsft.perplexity.sums import Perplexity, exp
from dsft.runtime.distributed import sum_over_ranks

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
BINS = 1 << 15
"""Of changes from -1 to 1: quantiles are exact to 3e-5."""


class _Sums:
    """Holds the streamed sums of one of the two models: largest logit, S, T, likeliest and wanted token."""

    def __init__(self, targets_N: torch.Tensor):
        self.largest_N = torch.full(targets_N.shape, -math.inf, dtype=torch.float64, device=targets_N.device)
        self.sum_N, self.change_N, self.wanted_N = (torch.zeros_like(self.largest_N) for _ in range(3))
        self.top_N = torch.zeros_like(targets_N)

    def add(self, logits_NW: torch.Tensor, change_NW: torch.Tensor, targets_N: torch.Tensor, start: int) -> None:
        """Take a tile of logits, which begins at `start` of the vocabulary."""
        column_N = targets_N - start
        is_here_N = (column_N >= 0) & (column_N < logits_NW.shape[1])
        at_target_N = logits_NW.gather(1, column_N.where(is_here_N, 0)[:, None])[:, 0].double()
        self.wanted_N = torch.where(is_here_N, at_target_N, self.wanted_N)
        largest_N, top_N = logits_NW.max(dim=1)
        self.top_N = torch.where(largest_N > self.largest_N, top_N + start, self.top_N)
        before_N, self.largest_N = self.largest_N, torch.maximum(self.largest_N, largest_N.double())
        shrunk_N = (before_N - self.largest_N).exp()
        weights_NW = exp_in_place(logits_NW - self.largest_N.float()[:, None])
        self.sum_N = self.sum_N * shrunk_N + weights_NW.sum(dim=1).double()
        self.change_N = self.change_N * shrunk_N + weights_NW.mul_(change_NW).sum(dim=1).double()


def compare_logits(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], targets_N: torch.Tensor) -> torch.Tensor:
    """Return [K, N] float64: the COLUMNS of `results.py` of each token.

    Args:
        parts: logits [N, W] of the model and of the reference, of one tile of the vocabulary after the other.
    """
    model, reference, start = _Sums(targets_N), _Sums(targets_N), 0
    for logits_NW, reference_NW in parts:
        logits_NW, reference_NW = logits_NW.float(), reference_NW.float()
        change_NW = logits_NW - reference_NW
        model.add(logits_NW, change_NW, targets_N, start)
        reference.add(reference_NW, change_NW, targets_N, start)
        start += logits_NW.shape[1]
    log_sum_N, reference_log_sum_N = (sums.largest_N + sums.sum_N.log() for sums in (model, reference))
    gap_N = log_sum_N - reference_log_sum_N
    columns = (
        log_sum_N - model.wanted_N,
        reference_log_sum_N - reference.wanted_N,
        gap_N - reference.change_N / reference.sum_N,
        model.change_N / model.sum_N - gap_N,
        (model.top_N == reference.top_N).double(),
    )
    return torch.stack(columns)


class ChangeHistogram:
    """Counts the changes of the true tokens' probabilities on this rank, in memory that does not grow."""

    def __init__(self):
        self.counts = np.zeros(BINS + 1, dtype=np.int64)

    def update(self, _windows: list[int], columns_KN: np.ndarray) -> list[list[int]]:
        """Count the tokens of a batch; return bins and counts."""
        change_N = np.exp(-columns_KN[0]) - np.exp(-columns_KN[1])
        bins, counts = np.unique(np.rint((change_N + 1) / 2 * BINS).astype(np.int64), return_counts=True)
        recorded = [bins.tolist(), counts.tolist()]
        self.restore(recorded)
        return recorded

    def restore(self, recorded: list[list[int]]) -> None:
        """Count what `update` returned for a batch."""
        bins, counts = recorded
        self.counts[bins] += counts


def divergence_of(result: Perplexity, reference: str, histogram: ChangeHistogram) -> Divergence:
    """Add up the documents, and the changes of all ranks. Collective."""
    of_reference, kl, reverse_kl, same_top = (math.fsum(row_D) / result.tokens for row_D in result.document_pairs)
    # Over all ranks, each quantile as the middle of its bin.
    ends = np.cumsum(sum_over_ranks(torch.from_numpy(histogram.counts)).numpy())
    bins = np.searchsorted(ends, np.array(QUANTILES) * ends[-1]).tolist()
    return Divergence(
        reference=reference,
        reference_perplexity=exp(of_reference),
        kl=kl,
        reverse_kl=reverse_kl,
        same_top=same_top,
        change_quantiles={str(share): place / BINS * 2 - 1 for share, place in zip(QUANTILES, bins, strict=True)},
    )
