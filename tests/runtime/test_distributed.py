"""Ranks take their places in their own job alone."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from dsft.errors import UserError
from dsft.runtime import distributed
from dsft.runtime.distributed import check_job, require_agreement


def test_ranks_of_one_job_meet_in_any_order():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: check_job(store, "a", rank), (2, 1, 0)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_another_job_is_told_and_takes_no_place(rank, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store = HashStore()
    check_job(store, "a", 0)
    with pytest.raises(
        UserError, match="MASTER_PORT=29500 is used by another job, output_dir=a, and this is output_dir=b"
    ):
        check_job(store, "b", rank)
    check_job(store, "a", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_given_twice_is_told_so(rank):
    store = HashStore()
    for number in (0, 1):
        check_job(store, "a", number)
    with pytest.raises(UserError, match="is used by another process of this rank"):
        check_job(store, "a", rank)


def test_a_restart_in_the_same_store_is_a_new_meeting(monkeypatch):
    store = HashStore()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        for rank in (0, 1):
            check_job(store, "a", rank)


@pytest.mark.parametrize(
    ("variables", "known_as"),
    [
        ({}, "output_dir=runs/a"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "output_dir=runs/a"),
        ({"TORCHELASTIC_RUN_ID": "17"}, "rdzv_id=17"),
    ],
)
def test_a_job_is_known_by_its_launch_or_else_by_its_folder(monkeypatch, variables, known_as):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    store = HashStore()
    check_job(store, "another", 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"another job, output_dir=another, and this is {known_as};"):
        check_job(store, "runs/a", 1)


@pytest.mark.parametrize(
    ("ends", "code"),
    [("", 0), pytest.param("sys.exit()", 0, marks=pytest.mark.exhaustive), ("sys.exit(3)", 3), ("1 / 0", 1)],
)
def test_a_program_of_several_ranks_keeps_the_exit_code_of_its_own(ends, code):
    program = f"import sys, torch.distributed; from dsft.runtime import distributed; distributed.stop_at_exit(); {ends}"
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr


@pytest.mark.parametrize(
    ("hosts", "named"), [(5, "a on n0, n1, n2, n3, n4 (5 ranks)"), (7, " n4 and 2 more (7 ranks)")]
)
def test_a_value_of_many_hosts_names_five_of_them(monkeypatch, hosts, named):
    def from_all(values: list) -> list:
        if isinstance(values[0], str):  # a digest
            return [*values, "another"]
        [(_, _, mine)] = values
        other = {name: ("b", remedy) for name, (_, remedy) in mine.items()}
        return [*((f"n{number}", number, mine) for number in range(hosts)), ("last", hosts, other)]

    monkeypatch.setattr(distributed, "from_all", from_all)
    with pytest.raises(UserError) as raised:
        require_agreement({"copy it": {"option": "a", "same": None}})
    [problem] = [line for line in raised.value.problems if line.startswith("option ")]
    assert named in problem and f"b on last (rank {hosts}); copy it" in problem


def test_deepspeed_gets_architectures_that_it_can_read(monkeypatch):
    environment = os.environ | {"TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX 10.0f", "WORLD_SIZE": "1"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(distributed, "has_gpu", lambda: True)
    distributed.set_library_variables()
    assert environment["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX 10.0"
