"""What dsft spares DeepSpeed's optimizer of ZeRO 1 and 2."""

import json
import sys
from collections import Counter

import pytest
from conftest import flags, grid
from deepspeed import comm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from ranks import on_ranks, trained

from dsft.config.deepspeed import read_zero_file
from dsft.training import trainer

pytestmark = pytest.mark.launch


def counted(options: dict, is_patched: bool) -> tuple[int, int, list[float]]:
    """Numbers that a training reduces over its ranks, its searches for infinite gradients, and its losses."""
    if not is_patched:
        trainer.patch_engine = lambda engine, *, resumes: None
    elements, searches, search = [], [], DeepSpeedZeroOptimizer.has_overflow

    def counting(reduce):
        return lambda tensor, *args, **kwargs: (elements.append(tensor.numel()), reduce(tensor, *args, **kwargs))

    comm.all_reduce, comm.reduce = counting(comm.all_reduce), counting(comm.reduce)
    DeepSpeedZeroOptimizer.has_overflow = lambda *args, **kwargs: searches.append(1) or search(*args, **kwargs)
    history = trained(options).state.log_history
    return sum(elements), len(searches), [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize(("zero", "accumulation"), [("1", 1), ("2", 4)])  # 4 are added up in fp32
def test_a_single_rank_reduces_no_gradients_and_trains_to_the_same_bits(options, tmp_path, zero, accumulation):
    case = {"zero": zero, "dtype": "bfloat16", "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    patched, plain = (
        on_ranks(1, counted, options(tmp_path / str(is_patched), **case), is_patched)[0] for is_patched in (True, False)
    )
    steps = len(patched[2])
    assert patched == (2 * steps, 0, plain[2])  # one norm of the parameters that decay, one of the others
    assert plain[0] > 1000 * steps and plain[1] == steps


def test_several_ranks_search_no_gradients_for_infinite_numbers(options, tmp_path):
    case = options(tmp_path / "run", zero="1", dtype="bfloat16", logging_steps=1)
    for elements, searches, losses in on_ranks(2, counted, case, True):
        assert searches == 0 and elements > 1000 * len(losses)


def sent(cases: list[dict]) -> list[tuple[dict[str, int], list[float]]]:
    """Of each training: elements in all-reductions and in reductions to one rank, and the losses."""
    results, plain = [], {name: getattr(comm, name) for name in ("all_reduce", "reduce")}
    for options in cases:
        elements = Counter()
        for name, reduce in plain.items():

            def counting(tensor, *args, name=name, reduce=reduce, elements=elements, **kwargs):
                elements[name] += tensor.numel()
                return reduce(tensor, *args, **kwargs)

            setattr(comm, name, counting)
        history = trained(options).state.log_history
        results.append((elements, [entry["loss"] for entry in history if "loss" in entry]))
    return results


@pytest.mark.parametrize("stage", grid([1, 2], quick=[2]))
def test_gradients_that_go_to_one_rank_alone_are_half_the_bytes_and_train_to_the_same_bits(options, tmp_path, stage):
    """An all-reduce moves each element twice: to where it is added up, and back. Two ranks add up in one order."""
    cases = []
    for goes_to_all in (True, False):
        content = read_zero_file(str(stage), [])
        content["zero_optimization"] |= {"use_multi_rank_bucket_allreduce": goes_to_all, "reduce_bucket_size": 20_000}
        (tmp_path / f"{goes_to_all}.json").write_text(json.dumps(content))
        changes = {"zero": str(tmp_path / f"{goes_to_all}.json"), "dtype": "bfloat16", "max_steps": 3}
        cases.append(options(tmp_path / str(goes_to_all), logging_steps=1, gradient_accumulation_steps=2, **changes))
    for (to_all, losses), (to_one, same_losses) in on_ranks(2, sent, cases):
        assert losses == same_losses and len(losses) == 3
        gradients, norms = to_one["reduce"], to_one["all_reduce"]
        assert to_all == {"all_reduce": gradients + norms} and gradients > 1000 * norms


ASKS_FOR_MUON_AND_TRAINS = """
import os, sys
from dsft.train import main
from dsft.training.engine import import_muon
is_needed = lambda: "torch._inductor.compile_fx" in sys.modules
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    main()
    print(is_needed())
else:
    import_muon({"optimizer": {"type": "Muon"}})
    import deepspeed.runtime.zero.muon.muon_optimizer
    os._exit(not is_needed())
"""
"""Muon's in a fork, as DeepSpeed's engine does it later, without the training."""


def test_a_training_imports_inductor_for_muon_alone(run, options, tmp_path):
    words = flags(options(tmp_path / "run", zero="1"))
    # A process of its own: the tests' ranks have Muon imported.
    done = run([sys.executable, "-c", ASKS_FOR_MUON_AND_TRAINS, *words])
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["False"], done.stdout + done.stderr
