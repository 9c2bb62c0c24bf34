"""Where each check of one machine begins to fire: right beyond its bound, and not at it."""

import pytest
from test_examine import RUN, node

from dsft.doctor.findings import (
    FEWEST_FILES,
    FEWEST_FREE_BYTES,
    FREE_CACHE_BYTES,
    SHARED_BYTES_PER_RANK,
    check_clocks,
    check_disk,
    check_node,
    spread,
)
from dsft.units import GiB

BOUNDS = {
    "slots": ({"slots": 2}, {"slots": 3}),
    "idle-gpus": ({"slots": 2}, {"slots": 1}),
    "slots of CPUs": ({"slots": 16, "cpu_only": True}, {"slots": 17, "cpu_only": True}),
    "memory-low": ({"available_bytes": 25 * GiB}, {"available_bytes": 25 * GiB - 1}),
    "shared-memory": ({"shm_bytes": 2 * SHARED_BYTES_PER_RANK}, {"shm_bytes": 2 * SHARED_BYTES_PER_RANK - 1}),
    "open-files": ({"open_files": FEWEST_FILES}, {"open_files": FEWEST_FILES - 1}),
    "cache-disk": ({"disks": {"/cache": FREE_CACHE_BYTES}}, {"disks": {"/cache": FREE_CACHE_BYTES - 1}}),
    "locked-memory": ({"locked_bytes": 65536, "network__infiniband": []}, {"locked_bytes": 65536}),
}
"""Finding -> (facts at the bound, facts beyond it); the node has 2 GPUs, 16 cores and 100 GiB."""


@pytest.mark.parametrize("name", BOUNDS)
def test_a_finding_begins_beyond_its_bound(name):
    at, beyond = (
        {entry.code for entry in check_node("n3", node("n3", **facts), quick=False)} for facts in BOUNDS[name]
    )
    code = name.removesuffix(" of CPUs")
    assert code not in at and beyond - at == {code}


@pytest.mark.parametrize(
    ("free", "needed", "codes"),
    [
        (10 * GiB, 10 * GiB, []),
        (10 * GiB - 1, 10 * GiB, ["error"]),
        (FEWEST_FREE_BYTES, None, []),
        (FEWEST_FREE_BYTES - 1, None, ["warning"]),
        (None, 10 * GiB, []),
    ],
)
def test_a_disk_is_too_small_for_what_is_written_or_nearly_full(free, needed, codes):
    facts = {"n3": node("n3", disks={RUN.output_dir: free})}
    assert [entry.severity for entry in check_disk(RUN, facts, needed)] == codes


def test_the_odd_nodes_are_those_that_differ_from_most_whatever_their_order():
    values = {"n1": "a", "n2": "b", "n3": "a", "n4": "a", "n5": "b"}
    assert spread({"torch": values})[0] == ["n2", "n5"]
    assert set(spread({"torch": dict(reversed(values.items()))})[0]) == {"n2", "n5"}
    odd, text = spread({"torch": values, "numpy": {"n1": "1", "n2": "1", "n3": "2", "n4": "1", "n5": "1"}})
    assert odd == ["n2", "n5", "n3"]
    assert text == "torch: a on n1, n3, n4, b on n2, n5; numpy: 1 on n1, n2, n4, n5, 2 on n3"
    assert spread({"torch": {"n1": "a", "n2": "b"}})[0] == ["n2"], "of equally many the first is usual"


@pytest.mark.parametrize("shift", [-1e6, 0.0, 3600.0])
def test_clocks_are_compared_with_each_other_whichever_is_counted_from(shift):
    offsets = {"n1": 0.0, "n2": 0.1, "n3": 30.0, "n4": -0.1}
    findings = list(check_clocks({name: offset + shift for name, offset in offsets.items()}))
    assert [(entry.code, entry.where) for entry in findings] == [("clocks", "n3")]
    assert not list(check_clocks({name: shift for name in offsets}))
