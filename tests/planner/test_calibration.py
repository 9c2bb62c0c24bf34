"""What measures the rates of ranks, on real ranks."""

import pytest
import torch
from ranks import on_ranks

from dsft.planner import calibration
from dsft.runtime.distributed import start_ranks


def rates(ranks: int) -> dict[str, float]:
    start_ranks()
    calibration.TIMED_NUMBERS["cpu"] = 1000  # which 3 does not divide, as it does not divide 1 GiB
    return calibration._collectives(torch.device("cpu"), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_are_measured_on_any_number_of_ranks(ranks):
    for measured in on_ranks(ranks, rates, ranks):
        assert set(measured) == {"collective_seconds", "link_bytes", "reduce_bytes", "all_reduce_bytes"}
        assert all(value > 0 for value in measured.values())
