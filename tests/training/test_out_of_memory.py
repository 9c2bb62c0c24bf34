"""A training that really runs out of memory, by a limit on its process."""

import errno
import re
from contextlib import ExitStack
from itertools import product

import pytest
import torch
import torch.distributed
import transformers
from conftest import flags, grid, read_json
from ranks import run_entry, started_entry
from tiny import GATED, write_texts

from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import UserError
from dsft.runtime.hardware import Machine, memory_errors_explained, which_memory
from dsft.setup.decide import choose_plan, plan_run, resolve_offline
from dsft.training.run import out_of_memory_explained
from dsft.units import GB


@pytest.mark.launch
def test_out_of_memory_names_the_plan_the_peak_and_the_next_smaller_plan(options, tmp_path):
    data = write_texts(tmp_path / "long.jsonl", 4000)
    words = options(tmp_path / "run", data=str(data), per_device_train_batch_size=1024, zero="2")
    result = run_entry("workers.little_memory", ["600", *flags(words)])
    assert result.returncode == 2, result.stderr[-3000:]
    (line,) = [line for line in result.stderr.splitlines() if "out of memory" in line]
    assert "out of memory in training" in line and "the plan is ZeRO 2, checkpointing off, batch 1024 x 1" in line
    predicted = float(re.search(r"([\d.]+) GiB were predicted", line)[1])
    taken = float(re.search(r"the peak was ([\d.]+) GiB", line)[1])
    assert predicted > 0.7 and taken > 0.5
    smaller = re.search(
        r"the next smaller plan is .*: (--zero \S+ --per_device_train_batch_size (\d+) --gradient_accumulation_steps"
        r" (\d+) --activation_checkpointing \w+)",
        line,
    )
    assert int(smaller[2]) * int(smaller[3]) == 1024, "as many sequences per step"
    given = {key: value for key, value in words.items() if key not in ("per_device_train_batch_size", "zero")}
    given["output_dir"] = tmp_path / "again"
    again = run_entry("workers.little_memory", ["600", *flags(given), *smaller[1].split()])
    assert again.returncode == 0, again.stderr[-3000:]


PHASES = {
    "loading": "while loading",
    "forward": "in training",
    "backward": "in training",
    "step": "in training",
    "evaluation": "while evaluating",
    "save": "while saving",
}


AT_ONCE = 4
"""So many trainings, for they wait most of the time."""


@pytest.fixture(scope="module")
def failed(request, options, tiny, tmp_path_factory):
    """(phase, ZeRO, rank) -> (what was printed, the exit codes, the run's folder) of each selected case."""
    items = [item for item in request.session.items if item.path == request.path and "failed" in item.fixturenames]
    cases = [tuple(item.callspec.params[name] for name in ("phase", "zero", "rank")) for item in items]
    results = {}
    for first in range(0, len(cases), AT_ONCE):
        with ExitStack() as stack:
            started = {}
            for phase, zero, rank in cases[first : first + AT_ONCE]:
                run = tmp_path_factory.mktemp("failed") / "run"
                words = options(run, zero=zero, save_strategy="steps", save_steps=2, lost_timeout=60)
                words |= {"eval_data": str(tiny / "held_out.jsonl"), "eval_strategy": "steps", "eval_steps": 1}
                environment = {"FAILING_RANK": str(rank), "FAILING_PHASE": phase}
                start = started_entry("workers.failing_rank", flags(words), world=2, folder=run.parent, **environment)
                started[phase, zero, rank] = run, stack.enter_context(start)
            for case, (run, wait) in started.items():
                seen, codes = wait()
                results[case] = seen.stderr, codes, run
    return results


@pytest.mark.launch
@pytest.mark.parametrize(
    ("phase", "zero", "rank"),
    grid(
        [*product(PHASES, "3", (0, 1)), *product(["step"], "012", (1,)), ("save", "0", 0), ("save", "2", 1)],
        quick=[("loading", "3", 1), ("save", "3", 0)],  # in training it is the test above
    ),
)
def test_out_of_memory_on_one_rank_ends_all_with_its_cause_and_advice(failed, phase, zero, rank):
    """No collective in the explanation, which no other rank would join: the watchdog's limits are half an hour."""
    said, codes, run = failed[phase, zero, rank]
    (line,) = [line for line in said.splitlines() if "out of memory" in line and "dsft: error" in line]
    assert f"out of memory {PHASES[phase]} (this rank has no memory left): the plan is ZeRO {zero}" in line
    assert "smaller plan" in line and "no progress" not in said and "Traceback" not in said
    assert ("less with --per_device_eval_batch_size 1, here 8; " in line) == (phase == "evaluation")
    assert (f"rank {rank} on" in line) == (rank != 0) and codes[rank] == 2, (codes, said[-3000:])
    content = read_json(run / "run.json")
    assert (
        content["status"] == "failed" and f"rank {rank} on" in content["error"] and "out of memory" in content["error"]
    )


@pytest.mark.parametrize("batch", [{"per_device_train_batch_size": 64}, {"global_batch_size": 512}], ids=str)
def test_the_next_smaller_plan_goes_with_the_batch_that_was_asked_for(options, tmp_path, batch):
    """Its flags were refused beside global_batch_size."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32_000}
    transformers.LlamaConfig(**GATED | sizes).save_pretrained(tmp_path)
    words = {"model": str(tmp_path / "config.json"), "dtype": "bfloat16", "seq_len": 256}
    words = options(tmp_path / "run", **words | {"per_device_train_batch_size": None} | batch)
    machine = Machine(nodes=1, ranks_per_node=8, device_bytes=80 * GB, host_bytes=1000 * GB, has_gpu=True)
    run = resolve_offline(read_config(TrainConfig, flags(words), []), machine)
    run.plan = choose_plan(run.job, machine, zero="0").plan
    with pytest.raises(UserError, match="the next smaller plan is") as raised, out_of_memory_explained(run, "here"):
        raise MemoryError
    named = re.search(r"--zero .*", str(raised.value))[0].split()
    kept = {name: value for name, value in words.items() if f"--{name}" not in named}  # a flag goes over the file
    problems: list[str] = []
    smaller = resolve_offline(read_config(TrainConfig, [*flags(kept), *named], problems), machine)
    plan = plan_run(smaller, must_fit=False).plan
    assert problems == [] and plan.device_bytes < run.plan.device_bytes
    assert plan.tokens_per_step == run.plan.tokens_per_step, "as many sequences per step"


FORMS = {
    "torch's allocator": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
    "cuBLAS": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU"),
    "torch.compile": (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried"), "GPU"),
    "NCCL": (
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: Call"
            " to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
        "GPU",
    ),
    "the host": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        "host",
    ),
    "Python": (MemoryError(), "host"),
    "fork": (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
    "a worker of the data": (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "), "host"),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), None),
    "another error": (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_error_is_known_and_names_its_memory(form):
    error, memory = FORMS[form]
    assert which_memory(error) == memory
    with (
        pytest.raises(UserError if memory else type(error), match=f"out of memory in {memory}" if memory else None),
        memory_errors_explained(lambda error, memory: f"in {memory}"),
    ):
        raise error


def test_pinned_memory_is_the_host_s_though_the_driver_says_the_same_of_a_gpu():
    def pin_memory():
        raise torch.AcceleratorError("CUDA error: out of memory")

    with pytest.raises(RuntimeError) as raised:
        pin_memory()
    assert which_memory(raised.value) == "pinned host"
