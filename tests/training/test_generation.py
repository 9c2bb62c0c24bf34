"""Samples of a training are what its model answers, on any ranks and stage, and change nothing of the training."""

import json
import shutil

import pytest
import torch
from conftest import flags, read_json
from deepspeed.runtime.zero import partition_parameters
from ranks import on_ranks, run_entry, train_all, trained
from tiny import sentences, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.checkpoints.run_folder import samples_in
from dsft.training import callbacks

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "broadcast")
SILENT = """
from transformers import LlamaForCausalLM

class Silent(LlamaForCausalLM):
    @classmethod
    def can_generate(cls):
        return False
"""
PROMPTS = ["the model reads", "a", "the big rank and the small step of the model"]


def train_and_count(cases: list[dict]) -> list[int]:
    """Train each; returns how many collectives this rank made while it generated each one's samples."""
    plain_generate, counts, number = callbacks.generate, [], 0
    places = [(partition_parameters.Init, "_all_gather"), *((torch.distributed, name) for name in COLLECTIVES)]

    def counted(plain):
        def call(*args, **kwargs):
            nonlocal number
            number += 1
            return plain(*args, **kwargs)

        return call

    def generate(*args, **kwargs):
        before = number
        answer = plain_generate(*args, **kwargs)
        counts[-1] += number - before
        return answer

    for owner, name in places:
        setattr(owner, name, counted(getattr(owner, name)))
    callbacks.generate = generate
    for case in cases:
        counts.append(0)
        trained(case)
    assert number
    return counts


def entries(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tiny, options, tmp_path_factory):
    """The folder of four trainings on 2 ranks, and the collectives of each rank while it generated."""
    folder = tmp_path_factory.mktemp("samples")
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
        for text in sentences(24, longest=8)
    ]
    chats = str(write_jsonl(folder / "chats.jsonl", rows))
    common = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "logging_steps": 1}
    of_texts = common | {"eval_data": str(tiny / "held_out.jsonl")}
    of_chats = common | {"model": str(tiny / "chat"), "data": chats, "eval_data": chats, "method": "lora"}
    cases = {
        "texts": of_texts | {"zero": "3", "generate_samples": PROMPTS},
        "no samples": of_texts | {"zero": "3"},
        "chats": of_chats | {"zero": "3", "generate_samples": 5},
        "given": of_chats | {"zero": "2", "generate_samples": PROMPTS, "report_to": "tensorboard"},
    }
    cases = [options(folder / name, **case) for name, case in cases.items()]
    return folder, on_ranks(2, train_and_count, cases)


def test_a_generation_config_that_transformers_finds_fault_with_is_saved_as_it_came(tiny, options, tmp_path):
    """Vicuna's, with a temperature and without do_sample: changed, it is refused when the model is saved."""
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    asked = {"eos_token_id": 1, "temperature": 0.9, "top_p": 0.6}
    (model / "generation_config.json").write_text(json.dumps(asked))
    run = tmp_path / "run"
    result = run_entry("dsft.train", flags(options(run, model=str(model), max_steps=1, save_strategy="steps")))
    assert result.returncode == 0, result.stderr
    for folder in (run / "checkpoint-1", run / "final"):
        saved = json.loads((folder / "generation_config.json").read_text())
        assert {name: saved[name] for name in ("temperature", "top_p")} == {"temperature": 0.9, "top_p": 0.6}
        assert saved["pad_token_id"] == 0, "of the tokenizer"


def test_a_model_that_cannot_generate_is_saved_without_a_generation_config(tiny, options, tmp_path):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    (model / "modeling_silent.py").write_text(SILENT)
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_silent.Silent"}, "architectures": ["Silent"]}
    (model / "config.json").write_text(json.dumps(read_json(model / "config.json") | code))
    (model / "generation_config.json").unlink()
    case = options(tmp_path / "run", model=str(model), trust_remote_code=True, max_steps=1)
    train_all(1, [case], tmp_path / "log")
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "final" / "generation_config.json").exists()


def test_a_rank_waits_for_no_other_while_it_generates(runs):
    assert runs[1] == [[0] * 4] * 2


@pytest.mark.parametrize("name", ["texts", "chats", "given"])
def test_the_last_samples_are_what_the_final_model_answers_in_plain_transformers(runs, name):
    folder, lines = runs[0] / name / "final", entries(runs[0] / name)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [len([*samples_in(line)]) for line in evaluated] == [5 if name == "chats" else 3] * 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt, answer in samples_in(evaluated[-1]):
        if name == "texts":
            ids = tokenizer(prompt)["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt.removeprefix("<|user|>")}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        made = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)
        assert answer == tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)


def test_samples_change_nothing_of_the_training(runs):
    with_samples, without = (
        [(line["loss"], line["grad_norm"]) for line in entries(runs[0] / name) if "grad_norm" in line]
        for name in ("texts", "no samples")
    )
    assert with_samples == without and len(without) == 2


def test_metrics_of_a_set_named_prompt_are_not_samples():
    assert [*samples_in({"eval_prompt_loss": 2.0, "eval_prompt_1": "p", "eval_answer_1": "a"})] == [("p", "a")]
