"""An evaluation that resumes has one model, and what is known is not scored again."""

import json
import shutil

import pytest
import torch
from conftest import grid, read_json
from ranks import run_entry
from tiny import write_model
from transformers import AutoModelForCausalLM

from dsft.api import evaluate_all
from dsft.config.options import EvalConfig
from dsft.models.probes import RowRules
from dsft.perplexity import scoring


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupt_after(monkeypatch):
    """Lets so many batches be scored; the next one is interrupted."""
    score, left = scoring.score, [10**9]

    def counted(*args):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return score(*args)

    monkeypatch.setattr(scoring, "score", counted)

    def set_left(batches: int) -> None:
        left[0] = batches

    return set_left


def eval_options(tiny, model, **changes) -> dict:
    data = str(tiny / "held_out.jsonl")
    return {"model": [str(model)], "data": [data], "seq_len": 32, "batch_tokens": 64, "zero": "0"} | changes


def nats(options: dict) -> list[float]:
    return [evaluation.perplexity.nats for evaluation in evaluate_all(EvalConfig(**options))]


def write_adapter(folder, base):
    """An adapter that changes nothing yet, over the model in `base`."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder)
    return folder


def change_weights(model) -> None:
    path = model / "model.safetensors"
    start = path.stat().st_size // 2
    with path.open("r+b") as file:  # neither the size nor the first or last MiB
        file.seek(start)
        file.write(b"\0" * 65_536)


@pytest.mark.parametrize("evaluated", grid(["model", "adapter"], ["adapter"]))
def test_an_evaluation_that_resumes_does_not_mix_two_models(tiny, tmp_path, interrupt_after, evaluated):
    base = write_model(tmp_path / "base", hidden_size=256, intermediate_size=512)
    model = write_adapter(tmp_path / "adapter", base) if evaluated == "adapter" else base
    options, out = eval_options(tiny, model, max_documents=20), str(tmp_path / "out")
    interrupt_after(4)
    with pytest.raises(Interrupted):
        nats(options | {"output_dir": out})
    change_weights(base)
    interrupt_after(10**9)
    assert nats(options | {"output_dir": out}) == nats(options)


def test_finished_models_of_a_list_are_taken_over(tiny, tmp_path, interrupt_after):
    models, out = [str(tiny / "model"), str(tiny / "chat")], tmp_path / "out"
    options = eval_options(tiny, tiny) | {"model": models}
    expected = [evaluation.perplexity for evaluation in evaluate_all(EvalConfig(**options))]
    options["output_dir"] = str(out)
    num_batches = len(scoring.form_batches(expected[0].document_tokens, 64, RowRules()))
    interrupted = evaluate_all(EvalConfig(**options))
    next(interrupted)
    interrupted.close()  # as a kill before the second model
    first = read_json(out / "perplexity.json")["results"]
    interrupt_after(2 * num_batches)  # enough for one model, were one scored from its beginning
    evaluations = list(evaluate_all(EvalConfig(**options)))
    for evaluation, wanted in zip(evaluations, expected, strict=True):
        assert evaluation.perplexity.nats == wanted.nats
        assert evaluation.perplexity.document_nats.tolist() == wanted.document_nats.tolist()
    results = read_json(out / "perplexity.json")["results"]
    assert results[0] == first[0] == json.loads(json.dumps(evaluations[0].report()))
    interrupt_after(0)
    assert [evaluation.is_known for evaluation in evaluate_all(EvalConfig(**options))] == [True, True]
    assert read_json(out / "perplexity.json")["results"] == results


def test_a_copy_has_the_result_of_what_it_is_a_copy_of_under_its_own_name(tiny, tmp_path, interrupt_after):
    options = eval_options(tiny, tiny / "model", output_dir=str(tmp_path / "out"))
    expected = nats(options)
    interrupt_after(0)
    copies = {"model": [str(shutil.copytree(tiny / "model", tmp_path / "model"))]}
    copies["data"] = [str(shutil.copy(tiny / "held_out.jsonl", tmp_path / "copy.jsonl"))]
    (known,) = evaluate_all(EvalConfig(**options | copies))
    assert ([known.model], [known.data], [known.perplexity.nats]) == (*copies.values(), expected)
    results = read_json(tmp_path / "out" / "perplexity.json")["results"]
    assert [report["data"] for report in results] == options["data"] + copies["data"]


def test_results_of_other_models_stay_and_a_changed_one_is_replaced(tiny, tmp_path):
    out, model = tmp_path / "out", shutil.copytree(tiny / "model", tmp_path / "model")
    for folder in (tiny / "chat", model):
        nats(eval_options(tiny, folder, output_dir=str(out)))
    with torch.no_grad():
        changed = AutoModelForCausalLM.from_pretrained(model)
        changed.get_input_embeddings().weight.mul_(2)
        changed.save_pretrained(model)
    (expected,) = nats(eval_options(tiny, model, output_dir=str(out)))
    results = read_json(out / "perplexity.json")["results"]
    assert [report["model"] for report in results] == [str(tiny / "chat"), str(model)]
    assert results[1]["nats"] == expected


def test_the_report_names_the_machine_of_the_whole_job(tiny, tmp_path):
    words = ["--model", tiny / "model", "--data", tiny / "held_out.jsonl", "--seq_len", 32, "--output_dir", tmp_path]
    done = run_entry("dsft.eval_ppl", words, world=3)
    assert done.returncode == 0, done.stderr
    (report,) = read_json(tmp_path / "perplexity.json")["results"]
    assert report["machine"].startswith("1 node x 3 CPU ranks") and report["ranks"] == 3
    assert done.stdout.count(f"{report['perplexity']:,.4f}") == 1
