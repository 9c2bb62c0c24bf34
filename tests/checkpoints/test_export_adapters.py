"""Adapters that plain peft made: scored and merged as peft computes with them, or refused by name."""

import copy
import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from conftest import grid
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import PROBE, train_all
from safetensors.torch import load_file, save_file
from tiny import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.checkpoints.export import merge
from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError
from dsft.models.adapters import tokens_of
from dsft.models.build import adapter_problems, build_model, load_weights
from dsft.models.measure import load_model_config, measure_model
from dsft.models.tokenizer import load_tokenizer
from dsft.setup.evaluation import candidate_of

IDS = torch.arange(20)[None]
BASES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {}),
}
SHAPES = [
    ("llama", {}),
    ("llama", {"use_dora": True}),
    ("llama", {"init_lora_weights": "gaussian", "exclude_modules": ["q_proj"]}),
    ("llama", {"init_lora_weights": "eva"}),
    ("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("biased", {"bias": "all"}),
    ("gpt2", {"fan_in_fan_out": True}),
    ("llama", {"init_lora_weights": "pissa"}),
    ("llama", {"init_lora_weights": "olora"}),
    ("llama", {"init_lora_weights": "mica"}),
    ("llama", {"trainable_token_indices": [3, 5]}),
    ("llama", {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
    ("biased", {"lora_bias": True}),
    ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("tied", {"target_modules": ["lm_head"]}),
    ("tied", {"modules_to_save": ["embed_tokens"]}),
    ("tied", {"modules_to_save": ["lm_head"]}),
    ("tied", {"trainable_token_indices": [3, 5]}),
    ("mixtral", {}),
    ("mixtral", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
]
SOME = {"target_modules": ["q_proj", "v_proj"]}
TYPES = {
    "VeraConfig": SOME | {"r": 4},
    "OFTConfig": SOME | {"r": 0, "oft_block_size": 4},
    "BOFTConfig": SOME,
    "IA3Config": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LoHaConfig": SOME,
    "LoKrConfig": SOME,
    "FourierFTConfig": SOME | {"n_frequency": 20},
    "VBLoRAConfig": SOME | {"num_vectors": 8, "vector_length": 16, "r": 4},
    "RandLoraConfig": SOME,
    "HRAConfig": SOME,
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "TrainableTokensConfig": {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]},
    "C3AConfig": SOME | {"block_size": 8},
    "RoadConfig": SOME | {"group_size": 8},
    "WaveFTConfig": SOME | {"n_frequency": 20},
    "DeloraConfig": SOME,
    "MissConfig": SOME | {"r": 4},
    "GraloraConfig": SOME,
    "OSFConfig": SOME,
    "HiraConfig": SOME,
    "PeanutConfig": SOME,
    "PsoftConfig": SOME | {"r": 4},
    "TinyLoraConfig": SOME,
    "UniLoraConfig": SOME,
    "PveraConfig": SOME,
    "GLoraConfig": SOME,
    "DeftConfig": SOME,
    "SuperTuningConfig": SOME,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name, (architecture, changes) in BASES.items():
        write_model(folder / name, architecture, **changes)
    return folder


def base_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"} | options)


def base_of(folder: Path, rows: int | None):
    """The base as an adapter's owner has it: with other `rows` of its embedding and head."""
    torch.manual_seed(2)
    model = base_model(folder)
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def write_adapter(folder: Path, base: Path, config, *, std: float = 0.05, rows: int | None = None) -> Path:
    """Saves an adapter whose trained weights are not those of its start; no tokenizer lies beside it."""
    torch.manual_seed(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = get_peft_model(base_of(base, rows), config)
        for _, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * std)
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def assert_as_in_peft(adapter: Path, base: Path, out: Path, rows: int | None = None) -> None:
    """dsft scores and merges what a plain `PeftModel.from_pretrained` computes, and the adapter changes the model."""
    plain = base_of(base, rows)
    without = plain(IDS).logits
    expected = PeftModel.from_pretrained(plain, adapter).eval()(IDS).logits
    assert (expected - without).abs().max() > 1e-3
    assert adapter_problems(str(adapter), load_model_config(str(base)), key="model") == []
    scored = load_weights(str(adapter), dtype=torch.float32).eval()(IDS).logits
    torch.testing.assert_close(scored, expected, rtol=0, atol=0)
    merged = base_model(merge(str(adapter), str(out), max_shard_size="40KB"))(IDS).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(
    ("base", "options"),
    grid(SHAPES, quick=[case for case in SHAPES if "pissa" in case[1].values() or case[1].keys() & {"use_dora"}]),
)
def test_lora_is_scored_and_merged_as_in_peft(bases, tmp_path, base, options):
    write_adapter(tmp_path / "adapter", bases / base, lora(**options))
    assert_as_in_peft(tmp_path / "adapter", bases / base, tmp_path / "out")


RESIZED = [
    ("tied", 386, {"trainable_token_indices": [3, 385]}),
    ("llama", 380, {}),
    ("llama", 386, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", 386, {"trainable_token_indices": {"embed_tokens": [384, 385], "lm_head": [384, 385]}}),
    ("llama", 386, {"trainable_token_indices": [384, 385]}),
    ("tied", 386, {}),
    ("tied", 386, {"modules_to_save": ["embed_tokens"]}),
    ("llama", 386, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
]
"""Bases, rows of the embedding and head that the adapter was trained with, and options of the adapter."""


@pytest.mark.parametrize(("base", "rows", "options"), grid(RESIZED, quick=RESIZED[:3]))
def test_an_adapter_over_a_resized_vocabulary_brings_its_embedding(bases, tmp_path, base, rows, options):
    """peft saves embedding and head as a whole then, of a tied head the trained rows twice."""
    write_adapter(tmp_path / "adapter", bases / base, lora(**options), rows=rows)
    assert_as_in_peft(tmp_path / "adapter", bases / base, tmp_path / "out", rows)
    with torch.no_grad():  # also what the resized rows compute
        ids = torch.tensor([[rows - 1, 5, rows - 2]])
        expected = PeftModel.from_pretrained(base_of(bases / base, rows), tmp_path / "adapter").eval()(ids).logits
        merged = base_model(tmp_path / "out")(ids).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6 * max(1.0, expected.abs().max().item()))
    candidate = candidate_of(EvalConfig(model=str(tmp_path / "adapter"), data=["a"]), str(tmp_path / "adapter"), [])
    assert candidate.facts.size.vocab_size == rows


def test_an_adapter_that_was_saved_without_its_grown_head_is_refused(bases, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", bases / "llama", lora(target_modules=["embed_tokens"]), rows=386)
    scored, merged = errors_of(adapter, bases / "llama")
    assert all("saved without its lm_head" in message for message in (scored, merged))


def test_an_embedding_that_a_training_of_the_adapter_would_lose_is_refused(bases, tmp_path):
    known = {"model": str(bases / "llama"), "method": "lora"}
    for name, options in {"frozen": {}, "trained": {"modules_to_save": ["embed_tokens", "lm_head"]}}.items():
        write_adapter(tmp_path / name, bases / "llama", lora(**options), rows=386)
    measure_model(TrainConfig(**known, adapter=str(tmp_path / "trained")))
    with pytest.raises(UserError, match=r"has a model.embed_tokens of 386 rows, its base one of 384"):
        measure_model(TrainConfig(**known, adapter=str(tmp_path / "frozen")))


def of_type(name: str, options: dict):
    classes = {known.lower(): value for known, value in vars(peft).items()}
    if name.lower() not in classes:
        pytest.skip(f"this peft has no {name}")
    return classes[name.lower()](task_type="CAUSAL_LM", **options)


def test_an_adapter_of_trainable_tokens_takes_its_own_tokenizer_which_is_named_where_it_cannot_be_read(bases, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(bases / "tied")
    tokenizer.add_tokens(["<new>"])
    tokens = {"token_indices": [len(tokenizer) - 1], "target_modules": ["embed_tokens"]}
    folder = write_adapter(tmp_path / "adapter", bases / "tied", of_type("TrainableTokensConfig", tokens))
    tokenizer.save_pretrained(folder)
    options = TrainConfig(model=str(bases / "tied"), method="lora", adapter=str(folder))
    assert load_tokenizer(options).get_vocab()["<new>"] == len(tokenizer) - 1
    assert tokens_of(measure_model(options).adapters) == [len(tokenizer) - 1]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"tokenizer: none found for {folder}; set tokenizer"):
        load_tokenizer(options)


@pytest.mark.parametrize("name", grid(TYPES, quick=["OFTConfig", "IA3Config"]))
def test_other_adapters_are_merged_by_peft(bases, tmp_path, monkeypatch, name):
    # peft sets both, and leaves them where BOFT's kernel cannot be compiled (boft/layer.py, patch_environment). Later
    # launches of this process would compile DeepSpeed's operators again, by another compiler than the other ones.
    for variable in ("CC", "CXX"):
        monkeypatch.setenv(variable, "gcc")
    write_adapter(tmp_path / "adapter", bases / "llama", of_type(name, TYPES[name]))
    assert_as_in_peft(tmp_path / "adapter", bases / "llama", tmp_path / "out")


@pytest.fixture
def adapter(bases, tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter", bases / "llama", lora(target_modules=["q_proj"]))


def describe(adapter: Path, **changes) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def errors_of(adapter: Path, base: Path) -> tuple[str, str]:
    """What evaluation and merging say of an adapter before any work."""
    try:
        scored = "; ".join(adapter_problems(str(adapter), load_model_config(str(base)), key="model"))
    except UserError as error:
        scored = str(error)
    with pytest.raises(UserError) as caught:
        merge(str(adapter), str(adapter.with_name("out")))
    assert not list(adapter.parent.glob("out*")) and "\n" not in str(caught.value)
    return scored, str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "NEWEST"}, "an adapter of type NEWEST is not supported"),
        ({"peft_type": None}, "does not describe an adapter of peft"),
        ({"base_model_name_or_path": None}, "does not describe an adapter of peft"),
        ({"use_something_new": True}, "sets use_something_new, which the installed peft does not support"),
        ({"some_new_scaling": 2.0, "other": None}, "sets some_new_scaling, which the installed peft does not support"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "sets layer_replication, which dsft does not support"),
        ({"alora_invocation_tokens": [1, 2]}, "sets alora_invocation_tokens, which dsft does not support"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changed the base at its start"),
        ({"init_lora_weights": "corda"}, "init_lora_weights 'corda' changed the base at its start"),
        ({"use_dora": True}, "2 tensors of the adapter missing from its weights"),
    ],
)
def test_what_dsft_cannot_compute_with_is_refused_by_name(bases, adapter, changes, reason):
    describe(adapter, **changes)
    for message in errors_of(adapter, bases / "llama"):
        assert reason in message, message


def test_each_tensor_of_an_adapter_has_a_place_or_is_named(bases, adapter):
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        tensors | {"base_model.model.foreign.lora_A.weight": torch.zeros(4, 4)}, adapter / "adapter_model.safetensors"
    )
    for message in errors_of(adapter, bases / "llama"):
        assert "1 tensor of its weights have no place in the model" in message and "foreign" in message
    (adapter / "adapter_config.json").write_text("[]")
    for message in errors_of(adapter, bases / "llama"):
        assert "adapter_config.json: cannot be read as JSON (it is not an object)" in message
    second = write_adapter(adapter.with_name("second"), bases / "llama", lora(target_modules=["q_proj"]))
    (adapter / "adapter_config.json").write_text((second / "adapter_config.json").read_text())
    describe(second, base_model_name_or_path=str(adapter))
    assert "is an adapter itself" in errors_of(second, bases / "llama")[1]


def test_what_has_no_merged_form_is_scored_alone(bases, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", bases / "llama", lora(lora_bias=True))
    scored, merged = errors_of(adapter, bases / "llama")
    assert scored == "" and "lora_bias" in merged


def test_an_adapter_is_merged_and_scored_with_the_revision_of_its_base(tmp_path, monkeypatch):
    """A base on the hub may have changed since."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached, old, new = tmp_path / "hub" / "models--ns--base", "a" * 40, "b" * 40
    for commit in (old, new):
        write_model(cached / "snapshots" / commit, chat=True)
    expected = load_file(cached / "snapshots" / old / "model.safetensors")
    others = {name: tensor + 1 for name, tensor in expected.items()}
    save_file(others, cached / "snapshots" / new / "model.safetensors", metadata={"format": "pt"})
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(new)
    known = {"model": "ns/base", "revision": old, "method": "lora"}
    build_model(TrainConfig(**known), dtype="float32").save_pretrained(tmp_path / "adapter")

    merged = load_file(merge(str(tmp_path / "adapter"), str(tmp_path / "merged")) / "model.safetensors")
    candidate = candidate_of(EvalConfig(model=str(tmp_path / "adapter"), data=["a"]), str(tmp_path / "adapter"), [])
    scored = build_model(candidate.config, dtype="float32").get_base_model().state_dict()
    for tensors in (merged, {name.replace(".base_layer", ""): tensor for name, tensor in scored.items()}):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


OWN = {
    "dora-3": ("llama", {"use_dora": True, "zero": "3", "lora_modules_to_save": ["norm"]}),
    "ends-3": ("llama", {"lora_target_modules": ["embed_tokens", "lm_head", "q_proj"], "zero": "3"}),
    "tied-head-3": ("tied", {"lora_target_modules": ["lm_head"], "zero": "3"}),
    "tied-saved-embedding-3": ("tied", {"lora_modules_to_save": ["embed_tokens"], "zero": "3"}),
    "tied-saved-head-2": ("tied", {"lora_modules_to_save": ["lm_head"], "zero": "2"}),
    "tiled-head-2": ("llama", {"tiled_loss": True, "lora_target_modules": ["lm_head"], "zero": "2"}),
    "experts-3": ("mixtral", {"zero": "3"}),
    "continued-pissa-3": ("llama", {"adapter": lora(init_lora_weights="pissa"), "zero": "3"}),
    "continued-tokens-2": ("tied", {"adapter": lora(trainable_token_indices=[3, 5]), "zero": "2"}),
    "continued-IA3-2": ("llama", {"adapter": of_type("IA3Config", TYPES["IA3Config"]), "zero": "2"}),
}
"""What dsft trains itself, under which ZeRO stage, over which base."""


@pytest.mark.launch
@pytest.mark.parametrize(
    "names", grid(["tied-head-3 continued-pissa-3", " ".join(OWN)], quick=["tied-head-3 continued-pissa-3"])
)
def test_adapters_that_dsft_trains_compute_the_same_in_plain_peft(bases, tiny, options, tmp_path, names):
    cases = {}
    for name in names.split():
        base, changes = OWN[name]
        if config := changes.get("adapter"):
            adapter = write_adapter(tmp_path / f"adapter-{name}", bases / base, copy.deepcopy(config))
            changes = changes | {"adapter": str(adapter)}
        cases[name] = options(tmp_path / name, model=str(bases / base), method="lora", **changes)
    train_all(1, list(cases.values()), tmp_path / "log")
    for name, case in cases.items():
        base = base_model(Path(case["model"]))
        with torch.no_grad():
            before = base(PROBE).logits
            plain = PeftModel.from_pretrained(base, tmp_path / name / "final").eval()(PROBE).logits
            merged = base_model(merge(str(tmp_path / name), str(tmp_path / f"{name}-merged")))(PROBE).logits
        trained = torch.load(tmp_path / name / "logits.pt")
        assert (trained - before).abs().max() > 1e-3, name
        torch.testing.assert_close(plain, trained, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(merged, trained, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
