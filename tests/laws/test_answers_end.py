"""A model that was trained on chats stops at the end of its turn, in plain transformers, however it is saved."""

import shutil

import pytest
import torch
from conftest import read_json
from ranks import train_all
from tiny import sentences, write_jsonl, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dsft.checkpoints.export import export, merge

TURN_END = "<|system|>"
"""A special token of the tokenizer that its model does not stop at: tiny.END alone is in generation_config.json."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}" + TURN_END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in zip(sentences(4, seed=1, longest=5), sentences(4, seed=2, longest=8), strict=True)
]

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    model = write_model(folder / "model", hidden_size=64, intermediate_size=128)
    data = write_jsonl(folder / "chats.jsonl", [{"messages": messages} for messages in CHATS])
    (folder / "template.jinja").write_text(TEMPLATE)
    common = {
        "model": str(model),
        "data": str(data),
        "chat_template": str(folder / "template.jinja"),
        "seq_len": 64,
        "global_batch_size": 4,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "cosine",
        "save_strategy": "no",
        "disable_tqdm": True,
        "zero": "0",
    }
    full = common | {"output_dir": str(folder / "full"), "learning_rate": 1e-2, "max_steps": 50}
    log = train_all(1, [full], folder / "log")
    assert f"trained answers end with {TURN_END}, which the model's generation_config did not stop at" in log
    shutil.copytree(folder / "full" / "final", folder / "base")  # knows the answers, and not that it stops after them
    (folder / "base" / "generation_config.json").write_text('{"eos_token_id": 0}')
    lora = {"model": str(folder / "base"), "method": "lora", "learning_rate": 1e-4, "max_steps": 2}
    assert "did not stop at" in train_all(1, [common | lora | {"output_dir": str(folder / "lora")}], folder / "log2")
    return folder


def assert_answers_verbatim(model, tokenizer, **options) -> None:
    for question, answer in CHATS:
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=60, **options)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(ids) == answer["content"] + TURN_END


def test_full_and_exported_models_stop_at_the_end_of_their_turn(trained, tmp_path):
    final = trained / "full" / "final"
    for folder in (final, export(str(trained / "full"), str(tmp_path / "exported"))):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.dtype == torch.float32 == model.dtype
        assert_answers_verbatim(model, tokenizer)
        assert read_json(folder / "generation_config.json")["eos_token_id"] == [0, 3]


def test_adapters_and_merged_models_stop_at_the_end_of_their_turn(trained, tmp_path):
    final = trained / "lora" / "final"
    merged = merge(str(trained / "lora"), str(tmp_path / "merged"))
    assert_answers_verbatim(AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged))
    # transformers reads the generation configuration of the base, and so it is named here.
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert_answers_verbatim(model, tokenizer, generation_config=GenerationConfig.from_pretrained(final))
