"""Whatever sequence of {train some steps, save, kill, resume, change ranks}: the losses are those of the uninterrupted
training.
"""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from conftest import read_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import on_ranks, train

from dsft.checkpoints.manifest import checkpoints, integrity_errors

pytestmark = [pytest.mark.launch, pytest.mark.exhaustive]
SEGMENT = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.booleans(), st.sampled_from(["1", "2", "3"]))
"""(ranks, steps to wait for before the kill, whether to wait for a save too, ZeRO stage)."""


def losses(out: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_json(out / "run.json")["results"]["log"] if "loss" in entry}


def steps_in(log: Path) -> int:
    return log.read_text(errors="replace").count("\nstep ") if log.is_file() else 0


def newest(out: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in checkpoints(out)), default=0)


def segments_ended_by_kills(out: Path, options: dict, segments: list, counts: Counter) -> None:
    """One training after the other in `out`, each resumed from what the one before has left."""
    log, before = out.with_suffix(".log"), 0
    for number, (world, steps, in_save, zero) in enumerate(segments):
        first_step, saved = steps_in(log), newest(out)

        def is_time(first_step=first_step, steps=steps, in_save=in_save) -> bool:
            return steps_in(log) >= first_step + steps and (not in_save or any((out / ".saving").glob("*/*")))

        ended = on_ranks(world, train, options | {"zero": zero}, log=log, kill_when=is_time, seed=number)
        counts["changes of ranks"] += before not in (0, world)
        if ended is None:
            counts["kills"] += 1
            counts["kills in saves"] += in_save
            lost = steps_in(log) - first_step - (newest(out) - saved)
            counts["steps lost at most"] = max(counts["steps lost at most"], lost)
        before = world
        assert all(integrity_errors(folder, hash_tensors=True) == [] for folder in checkpoints(out))


def test_any_sequence_of_kills_and_changes_ends_as_the_uninterrupted_training(options, tmp_path):
    common = options(
        tmp_path / "uninterrupted",
        global_batch_size=12,
        max_steps=10,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=3,
        zero="2",
    )
    on_ranks(2, train, common)
    expected, counts = losses(tmp_path / "uninterrupted"), Counter()

    @settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(SEGMENT, min_size=2, max_size=3), st.sampled_from([1, 2, 3]))
    def check(segments: list, last: int) -> None:
        out = tmp_path / f"run-{counts['examples']}"
        counts["examples"] += 1
        resuming = common | {"output_dir": str(out), "resume_from_checkpoint": "auto"}
        segments_ended_by_kills(out, resuming, segments, counts)
        on_ranks(last, train, resuming)
        assert losses(out) == pytest.approx(expected, rel=1e-4)
        assert not (out / ".saving").exists() and read_json(out / "run.json")["status"] == "done"
        shutil.rmtree(out)

    check()
    assert (
        counts["examples"] >= 5
        and counts["kills"] >= 8
        and counts["kills in saves"] >= 2
        and counts["changes of ranks"] >= 3
    ), counts
    assert counts["steps lost at most"] <= 3, counts  # a save every second step, and the step at the kill
