"""What all ranks tell each other of each optimizer step: one collective, which is read a step later, so that the host
waits for no work that a GPU is still at.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsft.runtime.distributed import add_over_ranks


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Sums over all ranks and micro batches of one optimizer step."""

    step: int
    bad: int
    """Losses that are NaN or infinite."""
    tokens: int
    """Without padding."""
    trained: int
    positions: int
    """With padding."""
    weighted: float
    """Nats of the trained tokens, times their weights."""
    nats: float
    """Of the trained tokens, without."""
    objective: float
    """What is trained times the trained tokens: `weighted`, and what the model adds to them."""
    asked: int
    """Ranks that were asked to stop."""
    due: int
    """Ranks for which a save is due."""
    passes: list[tuple[Any, Any]]
    """Marks before and after this rank's forward passes."""


class StepReports:
    """The reports that were sent and not read yet."""

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(9, dtype=torch.float64, device=device)  # counts too are exact
        self._sent: deque[tuple[int, Callable[[], list[float]], list]] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, objective: torch.Tensor, nats: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Count a micro batch; `num_tokens` are its tokens without padding, trained tokens and positions, `nats` [2]
        are with and without weights.
        """
        self._sums[:7] += torch.cat([(~objective.isfinite()).view(1), num_tokens, nats, objective.view(1)])

    def send(self, step: int, *, asked: bool, due: bool, passes: list[tuple[Any, Any]]) -> None:
        """Tell all ranks of what was counted since the last step. Collective."""
        self._sums[7], self._sums[8] = asked, due
        add_over_ranks(self._sums)
        self._sent.append((step, _on_host(self._sums), passes))
        self._sums.zero_()

    def read(self) -> StepReport:
        """Read the oldest report; waits until the step's work is done."""
        step, sums, passes = self._sent.popleft()
        bad, tokens, trained, positions, weighted, nats, objective, asked, due = sums()
        return StepReport(
            step=step,
            bad=int(bad),
            tokens=int(tokens),
            trained=int(trained),
            positions=int(positions),
            weighted=weighted,
            nats=nats,
            objective=objective,
            asked=int(asked),
            due=int(due),
            passes=passes,
        )


def _on_host(values: torch.Tensor) -> Callable[[], list[float]]:
    """Begin a copy to pinned memory; the function that is returned waits for it."""
    if not values.is_cuda:
        return values.clone().tolist
    copy = values.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        return copy.tolist()

    return wait
