"""New tokens: one id each, with rows of embedding and head that begin at the mean, are trained, saved and merged."""

from pathlib import Path

import pytest
import torch
from conftest import grid, needed_cases
from peft import PeftModel
from ranks import PROBE, train_all
from tiny import write_jsonl, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import evaluate
from dsft.checkpoints.export import export
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.models.adapters import add_lora, grow_embeddings
from dsft.models.tokenizer import add_tokens, check_tokenizer
from dsft.runtime.hardware import this_machine
from dsft.setup.decide import check_run

TOKENS = ["<tool>", "<|im_start|>"]
FIRST, ROWS = 349, 384
"""Tokens of the tests' tokenizer, and of it with two more, rounded up to a multiple of 64."""
CASES = [(base, method, zero) for base in ("untied", "tied", "gpt2") for method in ("full", "lora") for zero in "0123"]
QUICK = [("untied", "full", "3"), ("tied", "lora", "2")]


@pytest.fixture(scope="module")
def runs(request, options, tmp_path_factory) -> Path:
    folder, needed, cases = tmp_path_factory.mktemp("tokens"), needed_cases(request), []
    write_model(folder / "model-untied", tie_word_embeddings=False, vocab_size=FIRST)
    write_model(folder / "model-tied", tie_word_embeddings=True, vocab_size=FIRST)
    write_model(folder / "model-gpt2", "gpt2", vocab_size=FIRST)
    rows = [{"text": f"<tool> say {number} <tool> <|im_start|> and more of it"} for number in range(40)]
    data = str(write_jsonl(folder / "texts.jsonl", rows))
    for base, method, zero in CASES:
        changes = {"model": str(folder / f"model-{base}"), "method": method, "zero": zero, "data": data}
        cases.append(options(folder / f"{base}-{method}-{zero}", add_tokens=TOKENS, **changes))
    changes = {"model": str(folder / "model-tied"), "method": "lora", "zero": "2", "data": data}
    cases.append(options(folder / "continued", adapter=str(folder / "tied-lora-2" / "final"), **changes))
    train_all(2, [case for case in cases if Path(case["output_dir"]).name in needed], folder / "log.txt")
    return folder


@pytest.mark.launch
@pytest.mark.cases("{base}-{method}-{zero}")
@pytest.mark.parametrize(("base", "method", "zero"), grid(CASES, QUICK))
def test_rows_of_new_tokens_are_trained_saved_and_merged(runs, base, method, zero):
    run, probe = runs / f"{base}-{method}-{zero}", torch.cat([PROBE, torch.tensor([[FIRST, FIRST + 1]])], dim=1)
    assert (run / "logits.pt").is_file(), (runs / "log.txt").read_text()[-5000:]
    trained = torch.load(run / "logits.pt")
    assert trained.shape[-1] == ROWS
    exported = AutoModelForCausalLM.from_pretrained(export(str(run), f"{run}-out"))
    tokenizer = AutoTokenizer.from_pretrained(f"{run}-out")
    assert tokenizer("<tool><|im_start|>")["input_ids"] == [FIRST, FIRST + 1]
    embedding, head = exported.get_input_embeddings().weight, exported.get_output_embeddings().weight
    assert len(embedding) == len(head) == exported.config.vocab_size == ROWS
    assert (embedding is head) == (base != "untied")
    with torch.no_grad():
        torch.testing.assert_close(exported(PROBE).logits, trained, rtol=1e-4, atol=1e-4)
        if method == "lora":
            plain = AutoModelForCausalLM.from_pretrained(runs / f"model-{base}")
            old = plain.get_input_embeddings().weight.clone()
            plain.resize_token_embeddings(ROWS, mean_resizing=False)
            loaded = PeftModel.from_pretrained(plain, run / "final").eval()
            torch.testing.assert_close(loaded(probe).logits, exported(probe).logits, rtol=1e-4, atol=1e-4)
            assert torch.equal(embedding[:FIRST], old), "only new rows are trained"
            assert (run / "final" / "adapter_model.safetensors").stat().st_size < 4 * embedding.numel() * 4
    assert (embedding[FIRST] - embedding[FIRST + 2]).abs().max() > 1e-3, "a row is trained"
    text = str(runs / "texts.jsonl")
    scored = [
        evaluate(model=str(each), data=text, seq_len=64, progress=False).perplexity for each in (run, f"{run}-out")
    ]
    assert scored[0].nats == pytest.approx(scored[1].nats, rel=1e-5)


@pytest.mark.launch
def test_rows_that_a_checkpoint_has_trained_are_kept_where_its_weights_alone_are_taken(options, tmp_path):
    rows = [{"text": f"<tool> say {number} <tool> and more of it"} for number in range(20)]
    base = {"model": str(write_model(tmp_path / "model", vocab_size=FIRST)), "zero": "0", "optim": "sgd"}
    base |= {"data": str(write_jsonl(tmp_path / "texts.jsonl", rows)), "add_tokens": ["<tool>"]}
    first = options(tmp_path / "first", **base, save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "first" / "checkpoint-2"
    taken = {"model": str(checkpoint), "learning_rate": 0.0}
    more = {"add_tokens": ["<tool>", "<|im_start|>"]}
    cases = [first, first | taken | {"output_dir": str(tmp_path / "second")} | more]
    output = train_all(1, cases, tmp_path / "log.txt")
    assert (tmp_path / "second" / "final").is_dir(), output[-5000:]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
        for folder in (checkpoint, tmp_path / "second" / "final")
    )
    assert torch.equal(before[: FIRST + 1], after[: FIRST + 1])
    assert torch.allclose(after[FIRST + 1], torch.cat([before[: FIRST + 1], before[FIRST + 2 :]]).mean(0), atol=1e-6)


@pytest.mark.launch
@pytest.mark.cases("tied-lora-2", "continued")
def test_an_adapter_that_is_trained_further_keeps_its_tokens(runs):
    before, after = (AutoTokenizer.from_pretrained(runs / name / "final") for name in ("tied-lora-2", "continued"))
    assert before.get_vocab() == after.get_vocab() and after.get_vocab()["<tool>"] == FIRST


def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_refused(options, tmp_path, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = write_model(tmp_path / "model", vocab_size=FIRST)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(model)
    config = make_config(TrainConfig, options(tmp_path / "run", model=str(model), add_tokens=["<tool>"]), [])
    (problem,) = check_run(config, this_machine(ranks_per_node=1)).problems
    assert problem.endswith(
        f"has ids up to {FIRST} (<tool>), but the model has embeddings for {FIRST}; use the model's own tokenizer, or,"
        " if this is it, a copy without the tokens beyond (in added_tokens of its files)"
    )


def test_an_adapter_with_new_tokens_has_the_same_perplexity_sharded(tmp_path, tiny):
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model", vocab_size=FIRST))
    adapted = add_lora(model, TrainConfig(method="lora", lora_target_modules=["q_proj"]), [FIRST])
    adapted.save_pretrained(tmp_path / "adapter")
    options = {"data": str(tiny / "texts.jsonl"), "tokenizer": str(tiny / "model"), "seq_len": 64, "progress": False}
    whole, sharded = (evaluate(model=str(tmp_path / "adapter"), zero=zero, **options).perplexity.nats for zero in "03")
    assert sharded == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("is_tied", [True, False])
def test_new_rows_are_the_mean_of_the_others(tmp_path, is_tied):
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path, tie_word_embeddings=is_tied))
    before = [end.weight.clone() for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    grow_embeddings(model, [384, 385])
    for old, end in zip(before, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True):
        torch.testing.assert_close(end.weight[384:], old.mean(0).expand(64, -1))
        assert torch.equal(end.weight[:384], old)
    assert model.config.vocab_size == 448


def test_markers_of_a_template_become_special_tokens(tiny):
    config = TrainConfig(model=str(tiny / "model"), chat_template="chatml")
    tokenizer, problems = check_tokenizer(config, []), []
    added = add_tokens(tokenizer, ["markers", "<think>"], problems)
    assert tokenizer.convert_ids_to_tokens(added) == ["<|im_start|>", "<|im_end|>", "<think>"] and not problems
    text = tokenizer.decode(tokenizer("<|im_start|>a<think>")["input_ids"], skip_special_tokens=True)
    assert text == "a<think>"
    assert add_tokens(tokenizer, ["markers", "<think>"], problems) == []
    tokenizer.chat_template = {"default": "<|a|><|user|>", "tool_use": "<|b|>"}  # as repositories with tools have it
    added = add_tokens(tokenizer, ["markers"], problems)
    assert tokenizer.convert_ids_to_tokens(added) == ["<|a|>", "<|b|>"]
    tokenizer.chat_template = "<｜User｜>{{ messages }}<｜end▁of▁sentence｜>"  # DeepSeek's
    added = add_tokens(tokenizer, ["markers"], problems)
    assert tokenizer.convert_ids_to_tokens(added) == ["<｜User｜>", "<｜end▁of▁sentence｜>"] and not problems


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"add_tokens": [" "]}, "add_tokens: ' ' is not a text"),
        ({"add_tokens": ["markers"]}, "add_tokens: markers: no chat template has any"),
        (
            {"method": "lora", "lora_modules_to_save": ["embed_tokens"], "add_tokens": ["<a>"]},
            "lora_modules_to_save: embed_tokens: add_tokens trains the rows of new tokens; leave one out",
        ),
    ],
)
def test_what_cannot_become_a_token_is_refused(options, tmp_path, changes, problem):
    config = make_config(TrainConfig, options(tmp_path / "run", **changes), [])
    (first,) = check_run(config, this_machine(ranks_per_node=1)).problems
    assert first.startswith(problem)
