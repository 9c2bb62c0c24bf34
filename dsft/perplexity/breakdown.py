"""Splits a result into groups of tokens: by source, column, position, frequency, role or turn.

Nats of tokens are multiples of 2^-28 (`scoring.py`), so sums of groups are exact: they are bit-identical on any number
of ranks, and those of one breakdown add up to the total, up to 33 million nats in a group.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import FormattedSource
from dsft.data.prepare import prepare
from dsft.errors import UserError, nearest
from dsft.perplexity.documents import Answers, Documents
from dsft.perplexity.results import groups_of
from dsft.perplexity.windows import Windows
from dsft.runtime.distributed import sum_over_ranks

MOST_GROUPS = 1_000
MOST_SUMS = 1 << 22
"""Documents x groups of a grouping whose sums are kept, for intervals: 64 MiB."""
LAST_TURN = 9
"""Later turns are counted with this one."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Assigns each scored token to a group."""

    name: str
    labels: list[str]
    groups_of: Callable[[int, np.ndarray], np.ndarray]
    """(window, places [N] of its scored tokens in `windows.tokens`) -> groups [N], numbers of labels."""


class Breakdown:
    """Adds up nats and tokens by group and document, on this rank."""

    def __init__(self, windows: Windows, groupings: list[Grouping]):
        self.windows, self.groupings = windows, groupings
        documents = len(windows.document_ends)
        self.sums = [
            np.zeros((2, documents if documents * len(grouping.labels) <= MOST_SUMS else 1, len(grouping.labels)))
            for grouping in groupings
        ]
        """[2, D, G] nats and tokens of each document in each group, for each grouping; [2, 1, G] where documents are
        too many.
        """

    def update(self, windows: list[int], columns_KN: np.ndarray) -> list[list[list[float]]]:
        """Add the tokens of a batch; return its sums of each grouping: places in [D, G], nats and tokens.

        Args:
            columns_KN: nats first.
        """
        places = [self.windows.scored_places(window) for window in windows]
        documents_N = np.searchsorted(self.windows.document_ends, np.concatenate(places), side="right")
        recorded = []
        for grouping, sums in zip(self.groupings, self.sums, strict=True):
            groups_N = np.concatenate([grouping.groups_of(*pair) for pair in zip(windows, places, strict=True)])
            sums_at_N = groups_N + len(grouping.labels) * np.minimum(documents_N, sums.shape[1] - 1)
            here, of_here_N = np.unique(sums_at_N, return_inverse=True)
            nats = np.bincount(of_here_N, columns_KN[0], len(here))
            recorded.append([here.tolist(), nats.tolist(), np.bincount(of_here_N, minlength=len(here)).tolist()])
        self.restore(recorded)
        return recorded

    def restore(self, recorded: list[list[list[float]]]) -> None:
        """Add what `update` returned for a batch."""
        for sums, (here, nats, tokens) in zip(self.sums, recorded, strict=True):
            sums.reshape(2, -1)[:, here] += [nats, tokens]

    def report(self) -> tuple[dict[str, list[dict[str, Any]]], dict[str, np.ndarray]]:
        """Return `groups` and `group_sums` of an Evaluation, over all ranks. Collective."""
        groups, sums_of = {}, {}
        for grouping, sums in zip(self.groupings, self.sums, strict=True):
            sums_2DG = sum_over_ranks(torch.from_numpy(sums)).numpy()
            groups[grouping.name], sums_2DG = groups_of(grouping.labels, sums_2DG)
            if sums_2DG.shape[1] == len(self.windows.document_ends):
                sums_of[grouping.name] = sums_2DG
        return groups, sums_of


def grouping(
    name: str,
    data: FormattedSource,
    tokenizer: PreTrainedTokenizerBase,
    windows: Windows,
    *,
    max_documents: int | None,
    cache: Path,
    source_column: str | None = None,
) -> Grouping:
    """Make the grouping that an entry of `group_by` names.

    Args:
        source_column: what `source` means; without, the file.

    Raises:
        UserError: where the data has no such column or no turns, or a column has too many values.
    """
    columns = dict.fromkeys(name for row in data.source.first_batch().rows for name in row.values)
    column = name if name in columns else source_column if name == "source" else None
    if column or name == "source":
        numbers: dict[str, int] = {}
        of_document = []
        for batch in Documents(max_documents=max_documents).batches(data.batches(), data.rules, tokenizer):
            for row in batch.rows:
                label = str(row.values.get(column, "(none)")) if column else batch.place
                of_document.append(numbers.setdefault(label, len(numbers)))
                if len(numbers) > MOST_GROUPS:
                    raise UserError(f"group_by={name}: the column has more than {MOST_GROUPS:,} values; name another")
        if len(of_document) != len(windows.document_ends):
            raise UserError(
                f"group_by={name}: protocol={windows.mode} joins all documents; use protocol lm-eval or dsft"
            )
        group_D = np.array(of_document, dtype=np.int64)
        return Grouping(
            name=name,
            labels=list(numbers),
            groups_of=lambda _, places: group_D[np.searchsorted(windows.document_ends, places, side="right")],
        )

    if name == "position":  # tokens before a token in its window, between powers of two
        longest = int((windows.spans[:, 1] - windows.spans[:, 0]).max())
        bounds = [2**power for power in range(longest.bit_length())]
        labels = ["1 token before"] + [f"{bound:,} to {2 * bound - 1:,} tokens before" for bound in bounds[1:]]
        starts_W = windows.spans[:, 0]
        return Grouping(
            name=name,
            labels=labels,
            groups_of=lambda window, places: np.searchsorted(bounds, places - starts_W[window], side="right") - 1,
        )

    if name == "frequency":  # occurrences of a token in this data, between powers of ten
        counts_V = np.zeros(0, dtype=np.int64)
        for start in range(0, len(windows.tokens), 1 << 20):  # a part at a time: the store may be larger than memory
            part_V = np.bincount(windows.tokens[start : start + (1 << 20)])
            shorter, longer = sorted((counts_V, part_V), key=len)
            counts_V = longer.copy()
            counts_V[: len(shorter)] += shorter
        bounds = [10**power for power in range(len(str(counts_V.max())))]
        class_V = np.searchsorted(bounds, counts_V, side="right") - 1
        return Grouping(
            name=name,
            labels=[f"token seen {bound:,} to {10 * bound - 1:,} times" for bound in bounds],
            groups_of=lambda _, places: class_V[windows.tokens[places]],
        )

    if name not in ("role", "turn"):
        known = ["source", "position", "frequency", "role", "turn", *columns]
        raise UserError(f"group_by={name}: invalid choice (choose from {', '.join(known)}){nearest(name, known)}")
    if data.rules.is_text:
        raise UserError(f"group_by={name}: texts have no turns; it is for prompts with completions and chats")
    rules = dataclasses.replace(data.rules, train_on="answers")  # whose mask marks the answers
    answers, masked = Answers(max_documents=max_documents), dataclasses.replace(data, rules=rules)
    is_answer = prepare(masked, tokenizer, cache, preparation=answers, show_progress=False).trained
    if name == "role":
        return Grouping(
            name=name,
            labels=["prompt", "answer"],
            groups_of=lambda _, places: is_answer[places].astype(np.int64),
        )

    def turn_of(window: int, places: np.ndarray) -> np.ndarray:
        """Number the answers; a prompt counts with the answer after it."""
        start, end = windows.spans[window, :2]
        is_answer_T = np.asarray(is_answer[start:end])
        begins_T = np.diff(is_answer_T.astype(np.int8), prepend=0) == 1
        turn_T = np.cumsum(begins_T) + ~is_answer_T
        return np.clip(turn_T[places - start], 1, LAST_TURN) - 1

    turns = [f"turn {number}" for number in range(1, LAST_TURN)]
    return Grouping(name=name, labels=[*turns, f"turn {LAST_TURN} and later"], groups_of=turn_of)
