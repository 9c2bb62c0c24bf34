"""Packages that hold more than a language model: trained for text, what text does not reach kept as it was."""

import functools
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from conftest import grid, needed_cases
from packages import CAUSAL, DECODERS, IMAGE, package_config, write_package
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import PROBE, train_all
from safetensors.torch import load_file
from tiny import write_tokenizer
from transformers import AutoConfig

from dsft.api import evaluate
from dsft.checkpoints.export import export, merge
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.build import build_model, weight_problems
from dsft.models.measure import measure_model
from dsft.models.package import auto_class, from_config
from dsft.runtime.hardware import Machine
from dsft.setup.decide import check_run, resolve_offline
from dsft.units import GB

KINDS = [*CAUSAL, *IMAGE]
MACHINE = Machine(nodes=1, ranks_per_node=8, device_bytes=80 * GB, host_bytes=1000 * GB, has_gpu=True)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", grid([*KINDS, *DECODERS], ["qwen3_5", "gemma3", "llava", *DECODERS]))
def test_what_is_frozen_is_what_no_text_reaches(kind):
    model = from_config(package_config(kind)).train()
    ids = torch.randint(3, 100, (2, 16))
    if kind in DECODERS:  # GIT's own loss expects an image
        model(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean().backward()
    else:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, parameter in model.named_parameters() if parameter.grad is None}
    towers = any(part in name for name in frozen for part in ("visi", "visual", "audio", "vqmodel"))
    assert towers == (kind != "mistral4")


@pytest.mark.parametrize("kind", grid(KINDS, ["qwen3_5", "mllama", "gemma3", "mistral3"]))
def test_a_package_is_counted_and_loaded_as_it_is_planned(kind, tmp_path):
    folder = write_package(tmp_path / "model", kind)
    for method in ("full", "lora"):
        options = TrainConfig(model=str(folder), method=method, dtype="float32")
        facts = measure_model(options)
        assert not weight_problems(str(folder), facts)
        model = build_model(options, dtype="float32")
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert sum(parameter.numel() for parameter in model.parameters()) == facts.size.num_params
        assert sum(parameter.numel() for parameter in trained.values()) == facts.size.num_trainable
        assert not any(part in name for name in trained for part in ("vision", "visual", "audio"))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("t5", "no causal language model, which dsft trains"),
        ("florence2", "no causal language model, which dsft trains"),
        ("blip", "has no language model with a head"),
    ],
)
def test_what_is_no_language_model_is_refused_in_the_same_words_by_all(model_type, why, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    training = TrainConfig(model=str(tmp_path / "config.json"))
    problems = [p for p in check_run(training, MACHINE).problems if p.startswith("model=")]
    assert len(problems) == 1 and why in problems[0], problems
    with pytest.raises(UserError) as caught:
        resolve_offline(training, MACHINE)
    assert caught.value.problems == problems


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "mistral3"])
@torch.no_grad()
def test_an_adapter_of_a_package_s_tied_embedding_leaves_its_head_as_it_was(kind, tmp_path):
    """Mistral 3 says it in the package's config alone."""
    config = package_config(kind)
    config.tie_word_embeddings = True
    if kind == "qwen3_5":
        config.text_config.tie_word_embeddings = True
    from_config(config).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    new = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["embed_tokens"])
    adapted = get_peft_model(auto_class(config).from_pretrained(tmp_path / "model"), new).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    expected, out = adapted(input_ids=PROBE, use_cache=False).logits, tmp_path / "out"
    merge(str(tmp_path / "adapter"), str(out))
    logits = auto_class(config).from_pretrained(out).eval()(input_ids=PROBE, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


CASES = [f"{kind}-{method}-{zero}" for kind in KINDS for method in ("full", "lora") for zero in ("0", "3")]
CASES = [case for case in CASES if case not in ("emu3-full-3", "emu3-lora-3")]  # transformers cannot load it so


@pytest.fixture(scope="module")
def runs(request, tiny, options, tmp_path_factory):
    """Trains the cases of a kind that the selected tests need, all by the same ranks; gives the folder of the runs."""
    folder, cases = tmp_path_factory.mktemp("runs"), defaultdict(list)
    for name in sorted(needed_cases(request)):
        kind, method, zero = name.split("-")
        package = folder / f"model-{kind}"
        cases[kind].append(options(folder / name, model=str(package), method=method, zero=zero, weight_decay=0.1))

    @functools.cache
    def trained(kind: str) -> tuple[Path, str]:
        write_package(folder / f"model-{kind}", kind)
        return folder, train_all(2, cases[kind], folder / f"log-{kind}")

    return trained


@pytest.mark.launch
@pytest.mark.cases("{case}")
@pytest.mark.parametrize("case", grid(CASES, ["qwen3_5-full-3", "llava-lora-0"]))
def test_a_package_is_trained_and_stays_one(runs, case, tiny, tmp_path):
    kind, method, _ = case.split("-")
    folder, log = runs(kind)
    package, final, logits = folder / f"model-{kind}", folder / case / "final", folder / case / "logits.pt"
    assert logits.is_file(), log
    config = AutoConfig.from_pretrained(package)
    auto = auto_class(config)
    if method == "lora":
        plain = PeftModel.from_pretrained(auto.from_pretrained(package), final)
        assert not any("vis" in name for name in load_file(final / "adapter_model.safetensors"))
        export(str(final), str(tmp_path / "exported"))
        final = tmp_path / "exported"
    else:
        plain = auto.from_pretrained(final)
    trained = torch.load(logits)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(input_ids=PROBE, use_cache=False).logits, trained, atol=2e-5, rtol=1e-4)
        # What was exported, or saved, is the package that it was made from, with other weights in its language model.
        of_folder = auto.from_pretrained(final).eval()(input_ids=PROBE, use_cache=False).logits
        torch.testing.assert_close(of_folder, trained, atol=2e-5, rtol=1e-4)
    before, after = tensors_in(package), tensors_in(final)
    before = {name: tensor for name, tensor in before.items() if not name.startswith("mtp.")}  # is not loaded
    assert before.keys() == after.keys()
    assert type(AutoConfig.from_pretrained(final)) is type(config)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    towers = [name for name in before if "vis" in name or "audio" in name]
    assert unchanged >= set(towers) and len(unchanged) < len(before)
    _, info = auto.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    assert (final / "preprocessor_config.json").is_file() or kind == "mistral4"  # a language model alone
    result = evaluate(model=str(final), data=str(tiny / "held_out.jsonl"), seq_len=64, progress=False)
    assert 1 < result.perplexity.perplexity < 1000
