"""Chooses which sequences share a row, or a batch, so that it is full.

Best fit: the longest first, and into each row what fills it best (after best-fit decreasing; Ding et al., "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830, section 3).
"""

import numpy as np

from dsft.units import padded_width


def best_fit(lengths: np.ndarray, room: int) -> list[np.ndarray]:
    """Forms rows of indices with at most `room` tokens each. Every length must be at most `room`.

    Works on the counts of each length, so that its time grows with the number of different lengths (after Krell et al.,
    arXiv 2107.02027, section 3).
    """
    order = np.argsort(lengths, kind="stable")
    sizes, used, counts = np.unique(lengths[order], return_index=True, return_counts=True)
    left, rows = counts.copy(), []
    while left.any():
        fullest = _fullest_row(sizes, left.copy(), room)
        kinds = np.flatnonzero(fullest)
        assert len(kinds), "a sequence is longer than a row"  # else no round would take one, without end
        for _ in range(int((left[kinds] // fullest[kinds]).min())):
            rows.append(np.concatenate([order[used[kind] : used[kind] + fullest[kind]] for kind in kinds[::-1]]))
            used[kinds] += fullest[kinds]
            left[kinds] -= fullest[kinds]
    return rows


def _fullest_row(sizes: np.ndarray, left: np.ndarray, room: int) -> np.ndarray:
    """Fills one row; returns how many of each size it takes.

    It takes the largest that is left; then again and again the largest that fits, but the two that fit best where these
    fill the row better.

    Args:
        sizes: in order; `left` of each, which is changed.
    """
    row = np.zeros_like(left)
    while len(fitting := np.flatnonzero((left > 0) & (sizes <= room))):
        fitting_sizes = sizes[fitting]
        chosen = [fitting[-1]]
        if len(row.nonzero()[0]) and 2 * fitting_sizes[-1] >= room:
            partner = np.searchsorted(fitting_sizes, room - fitting_sizes, side="right") - 1
            partner -= (partner == np.arange(len(fitting_sizes))) & (left[fitting] == 1)
            pairs = np.where(partner >= 0, fitting_sizes + fitting_sizes[partner], 0)
            if pairs.max() > fitting_sizes[-1]:
                best = int(pairs.argmax())
                chosen = [fitting[best], fitting[partner[best]]]
        for kind in chosen:
            row[kind] += 1
            left[kind] -= 1
            room -= sizes[kind]
    return row


def batches_by_token_budget(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Forms batches of sequences of like length that take, padded to a multiple of 8, at most `tokens`.

    A longer sequence is a batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        if not batches or (len(batches[-1]) + 1) * width > tokens:
            batches.append([])
            width = padded_width(int(lengths[index]))
        batches[-1].append(index)
    return [np.array(batch) for batch in batches]
