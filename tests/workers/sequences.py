"""Sequences of {train some steps, save, kill, resume, change ranks}, drawn by hypothesis, each held against the
uninterrupted training.

A process of its own: what forks must not have run any torch operation before. Arguments: a folder, JSON of the options
of the training.
"""

import json
import shutil
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed  # noqa: F401
from forked_ranks import train

import dsft.train  # noqa: F401
from dsft.checkpoints.manifest import checkpoints, integrity_errors

FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
counts = {"examples": 0, "segments": 0, "kills": 0, "kills in saves": 0, "changes of ranks": 0, "steps lost at most": 0}
segment = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.booleans(), st.sampled_from(["1", "2", "3"]))
"""(ranks, steps to wait for before the kill, whether to wait for a save too, ZeRO stage)."""


def losses(out: Path) -> dict[int, float]:
    return {
        entry["step"]: entry["loss"]
        for entry in json.loads((out / "run.json").read_text())["results"]["log"]
        if "loss" in entry
    }


def steps_in(log: Path) -> int:
    return log.read_text(errors="replace").count("\nstep ") if log.is_file() else 0


def newest(out: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in checkpoints(out)), default=0)


whole = FOLDER / "whole"
assert train(2, OPTIONS | {"output_dir": str(whole), "zero": "2"}, FOLDER / "whole.log")
expected = losses(whole)


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(segment, min_size=2, max_size=3), st.sampled_from([1, 2, 3]))
def check(segments: list, last: int) -> None:
    out = FOLDER / f"run-{counts['examples']}"
    log, before = out.with_suffix(".log"), 0
    counts["examples"] += 1
    for number, (world, steps, in_save, zero) in enumerate(segments):
        began = steps_in(log)

        def is_time(began=began, steps=steps, in_save=in_save) -> bool:
            return steps_in(log) >= began + steps and (not in_save or any((out / ".saving").glob("*/*")))

        saved = newest(out)
        ended = train(
            world,
            OPTIONS | {"output_dir": str(out), "zero": zero, "resume_from_checkpoint": "auto"},
            log,
            kill_when=is_time,
            seed=number,
        )
        counts["segments"] += 1
        counts["changes of ranks"] += before not in (0, world)
        counts["kills"] += not ended
        counts["kills in saves"] += not ended and in_save
        counts["steps lost at most"] = max(
            counts["steps lost at most"], 0 if ended else steps_in(log) - began - (newest(out) - saved)
        )
        before = world
        assert all(integrity_errors(folder, hashes=True) == [] for folder in checkpoints(out))
    train(last, OPTIONS | {"output_dir": str(out), "zero": "2", "resume_from_checkpoint": "auto"}, log)
    found = losses(out)
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - loss) <= 1e-4 * loss for step, loss in expected.items()), (found, expected)
    assert not (out / ".saving").exists() and json.loads((out / "run.json").read_text())["status"] == "done"
    shutil.rmtree(out)


check()
print(json.dumps(counts))
