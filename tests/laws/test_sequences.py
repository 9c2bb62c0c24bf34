"""Whatever sequence of training, saving, kills, resumes and other ranks: the losses are those of the uninterrupted
training.
"""

import json

import pytest
from conftest import ROOT


@pytest.mark.exhaustive
@pytest.mark.launch
def test_any_sequence_of_kills_and_changes_ends_as_the_uninterrupted_training(run, options, tmp_path):
    words = options(
        tmp_path / "unused",
        per_device_train_batch_size=2,
        global_batch_size=12,
        max_steps=10,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=3,
    )
    result = run(["python", ROOT / "tests/workers/sequences.py", tmp_path, json.dumps(words)], timeout=1200)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-5000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    print(counts)
    assert (
        counts["examples"] >= 5
        and counts["kills"] >= 8
        and counts["kills in saves"] >= 2
        and counts["changes of ranks"] >= 3
    )
    assert counts["steps lost at most"] <= 3  # a save every second step, and the step at the kill
