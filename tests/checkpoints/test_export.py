import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packages import CAUSAL, IMAGE, package_config
from quantized import as_fp8, write_gguf
from safetensors.torch import load_file, save_file
from tiny import write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dsft.checkpoints.export import add_keys_of_transformers_4, export, merge
from dsft.checkpoints.run_folder import find_weights
from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError
from dsft.models.adapters import add_lora, unwrapped
from dsft.models.build import build_model
from dsft.models.weight_files import shapes_in, weight_bytes_in


@pytest.fixture
def adapter(tiny, tmp_path):
    """An adapter that changes the model: B is not zero as in a fresh one."""
    model = add_lora(AutoModelForCausalLM.from_pretrained(tiny / "model"), TrainConfig(method="lora", lora_r=4))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    from dsft.models.tokenizer import load_tokenizer

    load_tokenizer(TrainConfig(model=str(tiny / "model"))).save_pretrained(tmp_path / "adapter")
    return model, tmp_path / "adapter"


def test_a_gguf_file_becomes_the_folder_that_transformers_reads_out_of_it(tmp_path):
    base = write_model(tmp_path / "base", chat=True, intermediate_size=64)  # in blocks of 32
    file = write_gguf(base, tmp_path / "model.gguf", "Q8_0", **{"tokenizer.chat_template": "{{ messages }}"})
    unpacked = AutoModelForCausalLM.from_pretrained(export(file, str(tmp_path / "unpacked")))
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert unpacked.dtype == torch.float32 and not hasattr(unpacked.config, "quantization_config")
    torch.testing.assert_close(unpacked.float().state_dict(), read.state_dict(), rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "unpacked")
    text = "a model learns"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and tokenizer.chat_template == "{{ messages }}"
    assert unpacked.generation_config.eos_token_id == tokenizer.eos_token_id


def test_export_writes_the_asked_dtype_and_the_tokenizer(tiny, tmp_path):
    out = export(str(tiny / "model"), str(tmp_path / "half"), dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert (out / "tokenizer.json").is_file()
    assert {path.name for path in out.iterdir() if path.stat().st_mode & 0o444 != out.stat().st_mode & 0o444} == set()


def of_transformers_4(folder: Path, architecture: str) -> Path:
    """A model as transformers 4 saved it: rope_theta and rope_scaling, and a tokenizer class that is gone."""
    write_model(folder, architecture, chat=True)
    description = json.loads((folder / "config.json").read_text())
    del description["rope_parameters"]
    scaling = {"rope_type": "linear", "factor": 8.0}
    description |= {"rope_theta": 2e6, "rope_scaling": scaling}
    description |= {"rope_local_base_freq": 3e4} if architecture == "gemma3" else {}
    (folder / "config.json").write_text(json.dumps(description))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<|user|>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_an_export_has_the_keys_of_transformers_4_beside_the_new_ones(tmp_path, architecture):
    source = of_transformers_4(tmp_path / "model", architecture)
    out = export(str(source), str(tmp_path / "out"))
    for file in ("config.json", "tokenizer_config.json"):
        before, after = (json.loads((folder / file).read_text()) for folder in (source, out))
        for key in (
            "rope_theta",
            "rope_scaling",
            "rope_local_base_freq",
            "tokenizer_class",
            "additional_special_tokens",
        ):
            assert before.get(key) == after.get(key), key
    read = [AutoConfig.from_pretrained(folder).rope_parameters for folder in (source, out)]
    assert read[0] == read[1] and AutoTokenizer.from_pretrained(out).all_special_tokens == ["<|end|>", "<|user|>"]


def test_the_keys_of_transformers_4_leave_every_package_readable(tmp_path):
    """Gemma 4 refused to load with them."""
    for kind in [*CAUSAL, *IMAGE]:
        package_config(kind).save_pretrained(tmp_path / kind)
        before = AutoConfig.from_pretrained(tmp_path / kind)
        add_keys_of_transformers_4(tmp_path / kind, "")
        after = AutoConfig.from_pretrained(tmp_path / kind)
        for config in (before, after):
            config.rope = [config.get_text_config().rope_parameters, getattr(config, "rope_parameters", None)]
        assert before.rope == after.rope, kind


def test_keys_that_transformers_4_has_for_one_architecture(tmp_path):
    """It read GPT-NeoX with other angles, and refused Phi-3 with more than three keys of longrope."""
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    long_rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    for config, expected in (
        (transformers.GPTNeoXConfig(rope_parameters=rope), {"rotary_emb_base": 5e5, "rotary_pct": 0.5}),
        (transformers.Phi3Config(rope_parameters=long_rope), {"rope_scaling": {"type": "longrope", **factors}}),
    ):
        config.save_pretrained(tmp_path)
        add_keys_of_transformers_4(tmp_path, "")
        assert expected.items() <= json.loads((tmp_path / "config.json").read_text()).items()


@pytest.mark.exhaustive
def test_transformers_4_computes_the_same_from_an_export(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    packages = ["transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *packages], check=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(str(Path(transformers.__file__).parents[1]))  # torch and the like
    for architecture in ("llama", "gemma3"):
        out = export(str(of_transformers_4(tmp_path / architecture, architecture)), str(tmp_path / f"{architecture}-4"))
        program = (
            "import sys, torch, transformers\n"
            "assert transformers.__version__ == '4.57.6'\n"
            "ids = transformers.AutoTokenizer.from_pretrained(sys.argv[1])('a model learns', return_tensors='pt')\n"
            "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
            "torch.save(model(**ids).logits, sys.argv[1] + '/logits.pt')"
        )
        subprocess.run([python, "-c", program, out], check=True)
        ids = AutoTokenizer.from_pretrained(out)("a model learns", return_tensors="pt").input_ids
        torch.testing.assert_close(torch.load(out / "logits.pt"), AutoModelForCausalLM.from_pretrained(out)(ids).logits)


def test_pickled_weights_become_safetensors(adapter, tiny, tmp_path):
    """As adapters and models were published before safetensors; they are trained and evaluated as they are."""
    base = shutil.copytree(tiny / "model", tmp_path / "base")
    for folder, file in ((base, "pytorch_model.bin"), (adapter[1], "adapter_model.bin")):
        (safe,) = folder.glob("*.safetensors")
        torch.save(load_file(safe), folder / file)
    expected = load_file(merge(str(adapter[1]), str(tmp_path / "expected")) / "model.safetensors")
    for safe in (base / "model.safetensors", adapter[1] / "adapter_model.safetensors"):
        safe.unlink()
    written = load_file(export(str(base), str(tmp_path / "exported")) / "model.safetensors")
    kept = load_file(tiny / "model" / "model.safetensors")
    assert written.keys() == kept.keys() and all(torch.equal(written[name], kept[name]) for name in kept)
    merged = load_file(merge(str(adapter[1]), str(tmp_path / "merged")) / "model.safetensors")
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in merged)


def test_an_adapter_in_deepspeed_s_shards_is_merged_whether_they_or_their_checkpoint_are_named(adapter, tmp_path):
    model, folder = adapter
    expected = load_file(merge(str(folder), str(tmp_path / "expected")) / "model.safetensors")
    step = folder / "global_step2"
    step.mkdir()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.save({"module": trained}, step / "mp_rank_00_model_states.pt")  # as ZeRO 0 has it
    (folder / "adapter_model.safetensors").unlink()
    for source in (folder, step):
        out = merge(str(source), str(tmp_path / f"of-{source.name}"))
        torch.testing.assert_close(load_file(out / "model.safetensors"), expected)


def test_where_answers_stop_is_read_beside_an_adapter_and_beside_shards(adapter, tiny, tmp_path):
    _, folder = adapter
    shards = shutil.copytree(tiny / "model", tmp_path / "checkpoint-2")
    (shards / "model.safetensors").unlink()
    (shards / "global_step2").mkdir()
    weights = {"module": AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict()}
    torch.save(weights, shards / "global_step2" / "mp_rank_00_model_states.pt")
    for each in (folder, shards):
        (each / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    scored = [EvalConfig(model=str(each)) for each in (folder, shards, shards / "global_step2")]
    trained = TrainConfig(model=str(tiny / "model"), method="lora", adapter=str(folder))
    for options in (*scored, trained):
        assert unwrapped(build_model(options, dtype="float32")).generation_config.eos_token_id == [0, 3]
    for each in (folder, shards / "global_step2"):
        out = export(str(each), str(tmp_path / f"of-{each.name}"))
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 3]


@pytest.mark.parametrize("beside", ["one file", "an index"])
def test_weights_that_lie_beside_the_model_s_own_are_not_written(adapter, tiny, tmp_path, beside):
    """Mistral's repositories hold all weights a second time, under other names, in consolidated.safetensors."""
    base = tmp_path / "base"
    size = {"one file": "1GB", "an index": "40KB"}[beside]
    AutoModelForCausalLM.from_pretrained(tiny / "model").save_pretrained(base, max_shard_size=size)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(base)
    shapes = shapes_in(base)
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, base / "consolidated.safetensors")
    description = adapter[1] / "adapter_config.json"
    content = json.loads(description.read_text()) | {"base_model_name_or_path": str(base)}
    description.write_text(json.dumps(content))
    for source in (base, adapter[1]):
        assert shapes_in(export(str(source), str(tmp_path / f"of-{source.name}"))) == shapes
    assert weight_bytes_in(str(base)) < sum(file.stat().st_size for file in base.glob("*.safetensors"))
    if beside == "an index":
        next(base.glob("model-00001-*")).unlink()
        with pytest.raises(UserError, match=f"{base}: model-00001.* is not there, which model.safetensors.index.json"):
            export(str(base), str(tmp_path / "incomplete"))


def test_a_model_packed_as_fp8_is_exported_unpacked_where_memory_holds_that(tiny, tmp_path, monkeypatch):
    packed, unpacked = as_fp8(tiny / "model", tmp_path / "fp8")
    needed = sum(parameter.nbytes for parameter in unpacked.parameters())
    monkeypatch.setattr("dsft.checkpoints.export.free_host_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match="the full model takes .* GB of memory"):
        export(str(packed), str(tmp_path / "refused"))
    monkeypatch.setattr("dsft.checkpoints.export.free_host_bytes", lambda: needed)
    out = export(str(packed), str(tmp_path / "out"))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    read = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(read.state_dict(), unpacked.state_dict(), rtol=0, atol=0)


def test_what_cannot_be_read_is_named_in_one_line(adapter, tiny, tmp_path):
    cut = shutil.copytree(tiny / "model", tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((tiny / "model" / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{cut}: cannot be exported .*not fully covered"):
        export(str(cut), str(tmp_path / "out"))
    incomplete, tensors = tmp_path / "incomplete", load_file(tiny / "model" / "model.safetensors")
    shutil.copytree(tiny / "model", incomplete)
    del tensors["model.norm.weight"]
    save_file(tensors, incomplete / "model.safetensors", metadata={"format": "pt"})
    description = adapter[1] / "adapter_config.json"
    content = json.loads(description.read_text()) | {"base_model_name_or_path": str(incomplete)}
    description.write_text(json.dumps(content))
    for source in (incomplete, adapter[1]):
        with pytest.raises(UserError, match=f"model={incomplete}: 1 tensor of the model missing .*model.norm"):
            export(str(source), str(tmp_path / "out"))


def test_export_refuses_what_it_would_lose_or_cannot_find(tiny, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("x")
    for source, out, part in (
        (tiny / "model", tmp_path / "full", "choose a new folder"),
        (tmp_path / "no", tmp_path / "o", "is not a folder"),
        (tiny / "model", tmp_path / "out.gguf", "dsft writes a folder of safetensors"),
        (tiny / "model", f"{tmp_path}/out.GGUF/", "dsft writes a folder of safetensors"),
        (tmp_path / "full", tmp_path / "o", "neither safetensors"),
    ):
        with pytest.raises(UserError, match=part):
            export(str(source), str(out))
    with pytest.raises(UserError, match="is not an adapter"):
        merge(str(tiny / "model"), str(tmp_path / "o"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="neither a final model nor"):
        find_weights(str(tmp_path / "run"))


def test_a_failed_export_leaves_nothing(tiny, tmp_path):
    with pytest.raises(UserError, match="cannot be exported .*5 apples"):
        export(str(tiny / "model"), str(tmp_path / "new"), max_shard_size="5 apples")
    assert not [*tmp_path.iterdir()]


def test_the_base_of_an_adapter_is_found_from_any_working_folder(adapter, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny)
    model = build_model(TrainConfig(model="model", method="lora"), dtype="float32")
    model.save_pretrained(tmp_path / "relative")
    base = json.loads((tmp_path / "relative" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tiny / "model")
