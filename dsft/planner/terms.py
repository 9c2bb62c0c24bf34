"""One part of a prediction: its bytes, when and where they are held, and the formula that gave them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["always", "compute", "step", "save", "load"]
"""always: from the first step to the last. compute: forward and backward of a micro batch. step: the optimizer's. save:
while a checkpoint is written. load: before training.
"""


@dataclass(frozen=True, kw_only=True)
class Term:
    """Memory of one kind."""

    name: str
    """What it holds: "bf16 weights", "gathered parameters", "logits and loss" ..."""
    num_bytes: int
    """place device: on one GPU (one rank, where ranks run on CPU). place host, nvme: on one node, all its ranks
    together.
    """
    formula: str
    """The arithmetic with its numbers, for `dsft plan --explain`."""
    phase: Phase = "always"
    place: Literal["device", "host", "nvme"] = "device"


def peak_bytes(terms: Iterable[Term], place: str) -> int:
    """The largest sum of what is alive together: the terms of "always" and those of one other phase."""
    by_phase: dict[str, int] = {"compute": 0, "step": 0, "save": 0, "load": 0}
    always = 0
    for term in terms:
        if term.place != place:
            continue
        if term.phase == "always":
            always += term.num_bytes
        else:
            by_phase[term.phase] += term.num_bytes
    # Loading comes before optimizer states and buffers exist, so it stands alone.
    return max(always + max(by_phase["compute"], by_phase["step"], by_phase["save"]), by_phase["load"])
