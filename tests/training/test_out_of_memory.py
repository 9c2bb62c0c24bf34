"""A training that really runs out of memory, by a limit on its process."""

import re

import pytest
from conftest import flags
from tiny import write_texts


@pytest.mark.launch
def test_out_of_memory_names_the_plan_the_peak_and_the_next_smaller_plan(run, options, tmp_path):
    data = write_texts(tmp_path / "long.jsonl", 4000)
    words = options(tmp_path / "run", data=str(data), per_device_train_batch_size=1024, zero="2")
    result = run(
        ["python", "tests/workers/little_memory.py", "600", *flags(words)], OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1"
    )
    assert result.returncode == 2, result.stderr[-3000:]
    (line,) = [line for line in result.stderr.splitlines() if "out of memory" in line]
    assert "out of memory in training" in line and "the plan is ZeRO 2, micro batch 1024 x 1 accumulated" in line
    predicted, taken = (float(re.search(rf"([\d.]+) GiB were {word}", line)[1]) for word in ("predicted", "taken"))
    assert predicted > 0.7 and taken > 0.5
    smaller = re.search(
        r"the next smaller plan is .*: (--zero \S+ --per_device_train_batch_size (\d+) --gradient_accumulation_steps"
        r" (\d+) --activation_checkpointing \w+)",
        line,
    )
    assert int(smaller[2]) * int(smaller[3]) == 1024, "as many sequences per step"
    again = run(
        [
            "python",
            "tests/workers/little_memory.py",
            "600",
            *flags(
                {key: value for key, value in words.items() if key not in ("per_device_train_batch_size", "zero")}
                | {"output_dir": tmp_path / "again"}
            ),
            *smaller[1].split(),
        ],
        OMP_NUM_THREADS="1",
        MALLOC_ARENA_MAX="1",
    )
    assert again.returncode == 0, again.stderr[-3000:]
