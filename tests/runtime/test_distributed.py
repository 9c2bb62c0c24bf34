"""Ranks take their places in their own job alone."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from dsft.errors import UserError
from dsft.runtime import distributed
from dsft.runtime.distributed import check_job


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


@pytest.mark.parametrize(("ends", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_program_of_several_ranks_keeps_the_exit_code_of_its_own(ends, code):
    program = f"import sys, torch.distributed; from dsft.runtime import distributed; distributed.stop_at_exit(); {ends}"
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr


def test_deepspeed_gets_architectures_that_it_can_read(monkeypatch):
    environment = os.environ | {"TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX 10.0f", "WORLD_SIZE": "1"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(distributed, "has_gpu", lambda: True)
    distributed.set_library_variables()
    assert environment["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX 10.0"
