"""The first command of the README, as a user runs it (the environment is made already)."""

import struct

import pytest
from conftest import read_json
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.launch


def test_quickstart_does_the_whole_job(run, tmp_path):
    folder = tmp_path / "quickstart"
    result = run(["dsft", "quickstart", folder], timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = {name: read_json(folder / "runs" / name / "run.json") for name in ("full", "lora")}
    for content in runs.values():
        assert content["status"] == "done"
        before = next(entry["eval_perplexity"] for entry in content["results"]["log"] if "eval_perplexity" in entry)
        assert content["results"]["eval_perplexity"] < 0.98 * before
    assert (
        runs["full"]["plan"]["zero"] == "3"
        and runs["lora"]["plan"]["zero"] in ("0", "1", "2")
        and "is the fastest that fits" in runs["lora"]["plan"]["reason"]
    )
    assert runs["full"]["results"]["eval_perplexity"] < 1000  # of 4,096 words
    (merged,) = read_json(folder / "perplexity" / "perplexity.json")["results"]
    assert merged["perplexity"] == pytest.approx(runs["lora"]["results"]["eval_perplexity"], rel=1e-4)

    model = AutoModelForCausalLM.from_pretrained(folder / "merged")
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    answer = model.generate(**tokenizer("Question: what does", return_tensors="pt"), max_new_tokens=5)
    assert answer.shape[1] > 5
    png = (folder / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) > (600, 300)
    for part in ("perplexity", "tokens/s", "peak", "loss.png", "merged", "next"):
        assert part in result.stdout
