"""Leaves each patch of a library out once, and prints whether its test fails without it, in half an hour:

    python tests/without_patches.py [NAME ...]

A test that passes says that the patch is needed no more, or that the test does not show the need. Returns how many.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from dsft.runtime.patches import WITHOUT

TESTS = {
    "training/test_async_save.py::test_a_checkpoint_that_is_written_later_holds_the_step_it_is_of": (
        "weights_later",
        "adapters_later",
    ),
    "models/test_embeddings.py::test_rows_of_new_tokens_are_trained_saved_and_merged": ("token_rows",),
    "training/test_zero_1_2.py::test_a_training_imports_inductor_for_muon_alone": ("muon_kernels",),
    "training/test_zero_0.py::test_a_micro_batch_walks_through_no_modules": ("quick_zero_grad", "quick_train"),
    "training/test_zero_0.py::test_a_single_rank_copies_no_gradients_to_reduce_them": ("one_rank_reduces_none",),
    "training/test_zero_0.py::test_the_first_step_in_bfloat16_is_the_first_of_adam": ("first_step_of_zeros",),
    "training/test_skipped_steps.py::test_a_training_in_fp16_takes_the_steps_and_logs_the_norms_of_fp32": (
        "fp16_loss_scale",
        "kept_norm",
    ),
    "training/test_zero_0.py::test_a_scale_of_fp16_that_grows_changes_no_step": (
        "fp16_scale_update",
        "fp16_scaled_step",
        "fp16_norm",
    ),
    "training/test_zero_1_2.py::test_a_single_rank_reduces_no_gradients_and_trains_to_the_same_bits": (
        "one_rank_divides_none",
    ),
    "training/test_zero_1_2.py::test_several_ranks_search_no_gradients_for_infinite_numbers": ("no_overflow_search",),
    "training/test_partial_offload.py::test_sub_groups_on_the_gpu_follow_the_schedule_and_go_on_from_a_checkpoint": (
        "partial_offload",
    ),
    "training/test_host_waits.py::test_deepspeed_waits_for_the_device_only_where_gradients_are_reduced": (
        "reduces_unwaited",
    ),
    "training/test_host_waits.py::test_an_optimizer_step_waits_for_two_collectives_and_a_micro_batch_for_none": (
        "positions_on_gpu",
    ),
    "training/test_metrics.py::test_ranks_report_what_they_wait_for_in_collectives": ("timed_collectives",),
    "training/test_failing_writes.py::test_every_write_of_a_save_may_fail": (
        "shards_hashed",
        "shard_folders",
        "recovery_script",
        "latest_after",
    ),
    "watchdog/test_slow_saves.py::test_no_rank_waits_in_a_collective_while_another_writes": (
        "commit_together",
        "gather_together",
    ),
    "runtime/test_patches.py::test_a_copy_of_states_that_fails_is_noted_while_a_checkpoint_is_saved": ("nvme_states",),
}
"""Test of tests/ -> the patches without any of which it fails."""


def main() -> None:
    os.chdir(ROOT)
    not_shown = 0
    # In one process: libraries, and the process from which ranks are forked, are loaded once.
    for test, name in [(test, name) for test, names in TESTS.items() for name in names]:
        if name not in (sys.argv[1:] or [name]):
            continue
        os.environ[WITHOUT], start = name, time.monotonic()
        with tempfile.TemporaryFile("w+") as log:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"])
            log.seek(0)
            last = (log.read().strip().splitlines() or [""])[-1]
        is_shown = code == pytest.ExitCode.TESTS_FAILED
        not_shown += not is_shown
        result = "fails without it" if is_shown else f"DOES NOT FAIL ({last})"
        print(f"{name}: {test.rpartition('::')[2]} {result}, {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(not_shown)


if __name__ == "__main__":
    main()
