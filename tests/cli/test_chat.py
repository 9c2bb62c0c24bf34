"""`dsft chat` answers as plain transformers does, in the model's own chat template."""

import io
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.checkpoints.run_folder import write_run
from dsft.cli.main import main
from dsft.errors import EXIT_USER_ERROR
from dsft.models.tokenizer import _is_repeating, generate


def expected(folder, messages: list[dict], tokenizer=None) -> str:
    """What transformers answers with the likeliest tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(tokenizer or folder)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def chat(capsys, *words: object) -> str:
    capsys.readouterr()
    main(["chat", *map(str, words), "--max_new_tokens", "8"])
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """An adapter that changes the answers of tiny/chat."""
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(tiny / "chat")
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_one_turn_prints_what_transformers_answers_and_nothing_else(tiny, adapter, capsys, kind):
    folder = tiny / "chat" if kind == "full" else adapter
    system = {"role": "system", "content": "a big model"}
    for words, messages in {(): [user("the loss")], ("--system", "a big model"): [system, user("the loss")]}.items():
        answer = expected(folder, messages, tiny / "chat")
        assert answer and chat(capsys, folder, "--prompt", "the loss", *words) == answer + "\n"


def test_raw_continues_text_without_a_template(tiny, capsys):
    folder = tiny / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer("the loss", return_tensors="pt")
    made = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
    text = tokenizer.decode(made, skip_special_tokens=True)
    assert chat(capsys, folder, "--raw", "--prompt", "the loss") == text + "\n"


@pytest.mark.parametrize("used", [True, False])
def test_a_run_whose_rows_did_not_use_the_template_is_noted(tiny, tmp_path, capsys, used):
    shutil.copytree(tiny / "chat", tmp_path / "final")
    write_run(str(tmp_path), uses_chat_template=used)
    for words in ([], ["--raw"]):
        main(["chat", str(tmp_path / "final"), "--prompt", "the loss", "--max_new_tokens", "1", *words])
        assert ("--raw continues text" in capsys.readouterr().err) == (not used and not words)


def test_turns_follow_each_other_until_a_reset(tiny, capsys, monkeypatch):
    folder = tiny / "chat"
    lines = ["the loss", "a rank", "/what", "/reset", "a rank", "/quit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    system = {"role": "system", "content": "a big model"}
    first = expected(folder, [system, user("the loss")])
    second = expected(folder, [system, user("the loss"), {"role": "assistant", "content": first}, user("a rank")])
    rest = chat(capsys, folder, "--system", "a big model")
    for answer in (first, second, "dsft: /reset", expected(folder, [system, user("a rank")])):
        assert answer in rest
        rest = rest.partition(answer)[2]
    assert rest == "\n"


def test_an_answer_that_was_stopped_leaves_nothing_for_the_next(tiny, capsys, monkeypatch):
    stops = iter([True, False])

    def generated(model, tokenizer, ids, *, streamer, **how):
        for tokens in ([ids], tokenizer("a rank").input_ids):
            streamer.put(torch.tensor(tokens))
        if next(stops):
            raise KeyboardInterrupt
        streamer.end()
        return tokenizer("a rank").input_ids

    monkeypatch.setattr("dsft.models.tokenizer.generate", generated)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the loss\nthe end"))
    assert chat(capsys, tiny / "chat").splitlines()[-1] == "a rank"


def test_reasoning_that_a_response_template_finds_is_no_content_of_the_next_turn(tiny, tmp_path, capsys, monkeypatch):
    """Here all of an answer is reasoning."""
    folder = shutil.copytree(tiny / "chat", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = {"thinking": {"content": "text"}}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": "assistant", "fields": fields}
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the loss\na rank"))
    turns = [user("the loss"), {"role": "assistant", "content": ""}, user("a rank")]
    assert chat(capsys, folder).splitlines()[-1] == expected(folder, turns).splitlines()[-1]
    assert expected(folder, turns) != expected(
        folder, [turns[0], turns[1] | {"content": expected(folder, turns[:1])}, turns[2]]
    )


def test_the_analysis_of_gpt_oss_is_no_content_of_the_next_turn(tiny, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(tiny / "chat", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    forms = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
    tokenizer.add_tokens(list(forms), special_tokens=True)
    tokenizer.save_pretrained(folder)
    thought = "<|channel|>analysis<|message|>a big loss"
    answers = iter([f"{thought}<|end|><|start|>assistant<|channel|>final<|message|>a rank<|return|>", thought, ""])
    prompts = []

    def generated(model, tokenizer, ids, **how):
        prompts.append(ids)
        return tokenizer(next(answers), add_special_tokens=False).input_ids

    monkeypatch.setattr("dsft.models.tokenizer.generate", generated)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the loss\na rank\nthe end"))
    chat(capsys, folder)
    roles, texts = ("user", "assistant", "user", "assistant", "user"), ("the loss", "a rank", "a rank", "", "the end")
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompts[-1] == asked


@pytest.mark.parametrize(
    ("source", "words", "text"),
    [
        ("{tiny}/model", [], "its tokenizer has no chat template"),
        ("{tmp}", [], "{tmp}: contains neither safetensors nor pickles (*.bin) nor a DeepSpeed global_step folder"),
        ("{tmp}/away", [], "model={tmp}/away: no such folder or file"),
        ("{tiny}/chat", ["--prompt", "the " * 300], "and the model 256 positions; shorten --prompt"),
        ("{tiny}/chat", ["--chat_template", "chatmll"], "chat_template: chatmll is neither a file"),
        ("{tiny}/chat", ["--temperature", "-1"], "temperature=-1.0: must not be negative"),
    ],
)
def test_what_cannot_answer_is_named_in_one_line(tiny, tmp_path, capsys, source, words, text):
    names = {"tiny": tiny, "tmp": tmp_path}
    with pytest.raises(SystemExit) as end:
        main(["chat", source.format(**names), *(words if "--prompt" in words else [*words, "--prompt", "a"])])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == EXIT_USER_ERROR
    assert [line for line in lines if line.startswith("dsft: error")] == lines[-1:] and text.format(**names) in lines[
        -1
    ]


def test_a_phrase_that_repeats_ends_an_answer():
    assert _is_repeating([9, *[1, 2, 3] * 30])
    assert not _is_repeating([1, 2, 3] * 20)
    assert not _is_repeating([*range(90)])


def test_a_prompt_that_repeats_ends_no_answer(tiny):
    folder = tiny / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # the likeliest token is always 0
    model.generation_config.eos_token_id = None
    assert generate(model, tokenizer, [0] * 100, max_new_tokens=8) == [0] * 8
    assert len(generate(model, tokenizer, [0] * 100, max_new_tokens=90)) == 64
