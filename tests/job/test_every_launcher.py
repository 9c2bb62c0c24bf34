"""One start per launcher runs an evaluation, a training and a bad configuration; all agree with a single process."""

import json

import pytest
import torch
from conftest import LAUNCHERS, flags, grid, launch_words, read_json
from ranks import run_entry
from safetensors.torch import load_file

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def jobs(tiny, options):
    """Makes the three jobs below a folder: (evaluation, training, bad configuration), each (entry, words)."""

    def make(folder):
        evaluation = {"model": tiny / "model", "data": tiny / "held_out.jsonl", "seq_len": 64}
        training = options(folder / "run", global_batch_size=4)
        return (
            ("eval_ppl", flags(evaluation | {"output_dir": folder / "perplexity"})),
            ("train", flags(training)),
            ("train", flags(training | {"output_dir": str(folder / "bad"), "bogus": 1, "data": "nowhere.jsonl"})),
        )

    return make


@pytest.fixture(scope="module")
def single(jobs, tmp_path_factory):
    """Folder of the evaluation and the training in one process."""
    folder = tmp_path_factory.mktemp("single")
    for entry, words in jobs(folder)[:2]:
        result = run_entry(f"dsft.{entry}", words)
        assert result.returncode == 0, result.stderr
    return folder


# deepspeed starts the ranks of the quick test of cluster/test_launch.py; its exit codes are those of test_supervise.py.
@pytest.mark.parametrize("launcher", grid(LAUNCHERS, ["torchrun"]))
def test_evaluates_trains_and_refuses_bad_input_alike(run, jobs, single, tmp_path, launcher):
    (tmp_path / "jobs.json").write_text(json.dumps(jobs(tmp_path)))
    words = [
        word.replace("dsft/", "tests/workers/").replace("dsft.", "workers.")
        for word in launch_words(launcher, "entries")
    ]
    result = run([*words, tmp_path / "jobs.json"], **({"PYTHONPATH": "tests"} if launcher == "module" else {}))
    ranks = 1 if launcher == "python" else 2

    report, expected = (
        read_json(folder / "perplexity" / "perplexity.json")["results"][0] for folder in (tmp_path, single)
    )
    assert report["nats"] == expected["nats"] and report["ranks"] == ranks, result.stderr
    assert result.stdout.count("nats per token") == 1  # rank 0 alone prints

    content = read_json(tmp_path / "run" / "run.json")
    assert content["status"] == "done" and result.stdout.count(f"dsft: plan: 1 node x {ranks}") == 1, result.stderr
    if launcher == "accelerate":  # its file says the stage
        assert content["deepspeed"]["zero_optimization"]["stage"] == 3
    trained, known = (load_file(folder / "run" / "final" / "model.safetensors") for folder in (tmp_path, single))
    torch.testing.assert_close(trained, known, rtol=1e-4, atol=1e-5)

    # torchrun, also under accelerate, turns every exit code of a rank into 1 and reports the rank's own.
    agent = launcher in ("torchrun", "accelerate")
    assert result.returncode == (1 if agent else 2) and ("exitcode  : 2" in result.stderr) == agent, result.stderr
    assert result.stderr.count("dsft: error: bogus: unknown key") == 1
    assert result.stderr.count("dsft: error: data: nowhere.jsonl does not exist") == 1
    assert "Traceback (most recent call last)" not in result.stderr.split("dsft: error: bogus")[0]
    assert not (tmp_path / "bad").exists()
