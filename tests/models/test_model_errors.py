"""A model that cannot be trained or scored is refused in one sentence that says what is there and what to name."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import flags
from ranks import run_entry
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, GATED, write_jsonl, write_model

from dsft.api import evaluate
from dsft.checkpoints.run_folder import find_weights
from dsft.cli import data as data_command
from dsft.cli.commands import PreviewOptions
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.models.adapters import add_lora
from dsft.models.build import weight_problems
from dsft.models.measure import max_positions, measure_model
from dsft.models.model_folder import adapter_base, misnamed
from dsft.models.tokenizer import ids_beyond
from dsft.runtime.hardware import this_machine
from dsft.setup.decide import check_run

TWO_RANKS = this_machine(ranks_per_node=2)


@pytest.fixture
def problems_of(options, tmp_path):
    def check(**changes) -> list[str]:
        problems: list[str] = []
        config = make_config(TrainConfig, options(tmp_path / "run", **changes), problems)
        return list(check_run(config, TWO_RANKS, problems).problems)

    return check


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "PARENT/nowhere", "some/deep/path"])
def test_a_path_that_is_not_there_is_called_a_path(problems_of, tmp_path, name):
    name = name.replace("PARENT", str(tmp_path))
    for changes in ({"model": name}, {"tokenizer": name}):
        (key,) = changes
        problems = problems_of(**changes)
        assert len(problems) == 1 and f"{key}={name}: no such folder" in problems[0], problems
    problems = problems_of(method="lora", adapter=name)
    assert len(problems) == 1 and f"adapter={name}: no such folder" in problems[0], problems


def test_the_folder_of_a_run_leads_to_the_model_inside_it(problems_of, tiny, tmp_path):
    run, data = tmp_path / "runs", str(tiny / "texts.jsonl")
    for inside in ("checkpoint-5", "checkpoint-20", "checkpoint-100", "final"):
        shutil.copytree(tiny / "model", run / inside)
        if inside in ("checkpoint-100", "final"):
            for changes in ({"model": str(run)}, {"tokenizer": str(run)}, {"method": "lora", "adapter": str(run)}):
                problems = problems_of(**changes)
                assert len(problems) == 1 and str(run / inside) in problems[0], problems
            with pytest.raises(UserError) as raised:
                data_command.run(PreviewOptions(), ["--model", str(run), "--data", data])
            assert len(raised.value.problems) == 1 and str(run / inside) in raised.value.problems[0]


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_adapter_is_no_model_to_train_also_beside_weights(problems_of, tiny, tmp_path, method, has_weights):
    folder, base = tmp_path / "adapter", tiny / "model"
    adapted = add_lora(transformers.AutoModelForCausalLM.from_pretrained(base), TrainConfig(method="lora", lora_r=2))
    adapted.save_pretrained(folder)
    if has_weights:
        shutil.copytree(base, folder, dirs_exist_ok=True)
    problems = problems_of(model=str(folder), method=method)
    assert len(problems) == 1 and f"name both: model={base}, adapter={folder}." in problems[0], problems
    (folder / "adapter_config.json").unlink()
    if has_weights:
        assert not problems_of(model=str(folder), method=method)


def test_an_adapter_cannot_be_its_own_base(tiny, tmp_path):
    folder = shutil.copytree(tiny / "model", tmp_path / "both")
    adapted = add_lora(transformers.AutoModelForCausalLM.from_pretrained(folder), TrainConfig(method="lora", lora_r=2))
    adapted.save_pretrained(folder)
    with pytest.raises(UserError, match=f"{folder}/adapter_config.json: names its own folder as its base"):
        evaluate(model=str(folder), data=str(tiny / "texts.jsonl"), seq_len=32, progress=False)


def test_training_and_evaluation_take_as_many_tokens_as_there_are_positions(tiny, options, tmp_path):
    model = write_model(tmp_path / "model", "gpt2", n_positions=100)
    chosen = options(tmp_path / "run", model=str(model), seq_len=100, eval_fraction=0.2)
    result = run_entry("dsft.train", flags(chosen))
    assert result.returncode == 0, result.stderr
    configs = [transformers.AutoConfig.from_pretrained(folder) for folder in (model, tmp_path / "run" / "final")]
    assert len({max_positions(config) for config in configs}) == 1
    evaluation = {"model": str(model), "data": str(tiny / "texts.jsonl"), "mode": "windows", "progress": False}
    assert evaluate(**evaluation, seq_len=100).perplexity.tokens > 100
    with pytest.raises(UserError, match="seq_len=101 is beyond the 100 positions"):
        evaluate(**evaluation, seq_len=101)


def test_the_folder_of_a_named_adapter_is_pointed_out(tmp_path):
    """peft saves an adapter of a name of its own in a folder of that name."""
    (tmp_path / "out" / "policy").mkdir(parents=True)
    (tmp_path / "out" / "policy" / "adapter_config.json").write_text("{}")
    assert "contains no model; use" in misnamed("adapter", str(tmp_path / "out"))
    with pytest.raises(UserError, match="out/policy"):
        find_weights(str(tmp_path / "out"))


LLAMA_4 = (
    transformers.Llama4TextConfig,
    GATED
    | {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "moe_layers": [0, 1],
        "attention_chunk_size": 64,
        "layer_types": ["full_attention"] * 2,
    },
)


def test_lora_leaves_the_router_of_llama_4_as_it_is(options, problems_of, tmp_path, monkeypatch):
    """peft takes it for a linear layer, but it returns scores and logits."""
    monkeypatch.setitem(ARCHITECTURES, "llama4", LLAMA_4)
    model = write_model(tmp_path / "model", "llama4")
    problems = problems_of(model=str(model), method="lora", lora_target_modules=["router"])
    assert len(problems) == 1 and "'router' matches no layer" in problems[0], problems
    result = run_entry("dsft.train", flags(options(tmp_path / "run", model=str(model), method="lora", max_steps=1)))
    assert result.returncode == 0, result.stderr
    assert not any("router" in name for name in load_file(tmp_path / "run" / "final" / "adapter_model.safetensors"))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_generation_config_is_named_before_stops_are_lost(problems_of, tmp_path, content):
    model = write_model(tmp_path / "model")
    (model / "generation_config.json").write_text(content)
    (problem,) = problems_of(model=str(model))
    assert f"{model}/generation_config.json: cannot be read as JSON" in problem


def test_what_every_save_needs_is_tried_before_a_rank_starts(problems_of, tmp_path):
    model = write_model(tmp_path / "model", chat=True)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = [{"name": name, "template": "{{ messages }}"} for name in ("default", "tools/rag")]
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    problems = problems_of(model=str(model))
    assert len(problems) == 1, problems
    assert f"tokenizer {model}: cannot be saved (Invalid chat template name: 'tools/rag')" in problems[0]


def test_masks_in_old_files_are_no_weights(tmp_path):
    model = write_model(tmp_path / "model", "gpt2")
    tensors = load_file(model / "model.safetensors")
    tensors |= {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.attn.causal_mask": torch.ones(1, 1, 8, 8),
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert not weight_problems(str(model), measure_model(TrainConfig(model=str(model))))


def test_a_special_token_without_a_row_is_no_problem_and_another_token_is(tmp_path):
    """Gemma 3 1B has a token for images, and no row for it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_model(tmp_path / "model"))
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert not ids_beyond(tokenizer, rows)
    tokenizer.add_tokens(["<tool>"])
    assert "<tool>" in ids_beyond(tokenizer, rows)[0]


def test_data_with_a_token_without_a_row_are_refused(options, tmp_path):
    model = write_model(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    added = [f"<spare {number}>" for number in range(384 - len(tokenizer))] + ["<image>"]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.save_pretrained(model)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "a model <image> reads"}] * 9)
    words = {"model": str(model), "data": str(data), "seq_len": 8}
    with pytest.raises(UserError, match="no embedding for the token <image>"):
        evaluate(**words, progress=False)
    result = run_entry("dsft.train", flags(options(tmp_path / "run", **words)))
    assert result.returncode == 2 and "the token <image>" in result.stderr


def test_a_base_that_has_moved_is_named_by_its_key(tmp_path):
    base = write_model(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    add_lora(model, TrainConfig(method="lora", lora_r=2)).save_pretrained(tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    file = tmp_path / "adapter" / "adapter_config.json"
    for lost in (str(base), "runs/of/base"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": lost}))
        with pytest.raises(UserError, match=f"adapter_config.json: base_model_name_or_path={lost}: "):
            adapter_base(str(tmp_path / "adapter"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "../moved"}))
    assert adapter_base(str(tmp_path / "adapter")) == str(tmp_path / "adapter" / ".." / "moved")


def test_lora_leaves_out_what_peft_does_not_adapt_in_mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    adapted = add_lora(transformers.MambaForCausalLM(config), TrainConfig(method="lora", lora_r=2))
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert names and not any("out_proj" in name for name in names)
