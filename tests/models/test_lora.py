"""What the lora_* options ask of peft: what trains is what plain peft loads and merges, and what cannot is refused."""

from pathlib import Path

import pytest
import torch
import transformers
from conftest import grid, needed_cases, read_json
from peft import PeftModel
from ranks import PROBE, train_all
from tiny import ARCHITECTURES, GATED, write_model
from transformers import AutoModelForCausalLM

from dsft.checkpoints.export import merge
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.measure import measure_model

QWEN3_MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BASES = {
    "llama": ARCHITECTURES["llama"],
    "mixtral": ARCHITECTURES["mixtral"],
    "qwen3_moe": (transformers.Qwen3MoeConfig, GATED | QWEN3_MOE),
    "qwen2_moe": ARCHITECTURES["qwen2_moe"],
    "biased": (transformers.LlamaConfig, GATED | {"attention_bias": True, "mlp_bias": True}),
}
SHAPES = {
    "plain": {},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "mica": {"init_lora_weights": "mica"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 7}, "exclude_modules": ["v_proj"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "bias": {"lora_bias": True},
}
STARTS = [("biased" if shape == "bias" else "llama", shape) for shape in SHAPES]
EXPERTS = [(base, shape) for base in ("mixtral", "qwen3_moe", "qwen2_moe") for shape in ("plain",)]
CASES = [(base, shape, zero) for base, shape in STARTS + EXPERTS for zero in "23"]
QUICK = [("llama", "pissa", "3"), ("llama", "tokens", "2"), ("qwen3_moe", "plain", "3")]


@pytest.fixture(scope="module")
def runs(request, options, tmp_path_factory) -> Path:
    folder, needed, cases = tmp_path_factory.mktemp("adapters"), needed_cases(request), []
    for name, (kind, values) in BASES.items():
        ARCHITECTURES.setdefault(name, (kind, values))
        if any(case.startswith(f"{name}-") for case in needed):
            write_model(folder / f"model-{name}", name)
    for base, shape, zero in CASES:
        changes = {"model": str(folder / f"model-{base}"), "method": "lora", "lora_r": 4, "zero": zero}
        cases.append(options(folder / f"{base}-{shape}-{zero}", lora_options=SHAPES[shape], **changes))
    train_all(2, [case for case in cases if Path(case["output_dir"]).name in needed], folder / "log.txt")
    return folder


@pytest.mark.launch
@pytest.mark.cases("{base}-{shape}-{zero}")
@pytest.mark.parametrize(("base", "shape", "zero"), grid(CASES, QUICK))
def test_adapters_of_every_shape_compute_the_same_in_plain_peft_and_merged(runs, base, shape, zero):
    run = runs / f"{base}-{shape}-{zero}"
    plain = AutoModelForCausalLM.from_pretrained(runs / f"model-{base}")
    with torch.no_grad():
        before = plain(PROBE).logits
        loaded = PeftModel.from_pretrained(plain, run / "final").eval()(PROBE).logits
        merged = AutoModelForCausalLM.from_pretrained(merge(str(run), f"{run}-merged")).eval()(PROBE).logits
    assert (run / "logits.pt").is_file(), (runs / "log.txt").read_text()[-5000:]
    trained = torch.load(run / "logits.pt")
    assert (trained - before).abs().max() > 1e-3
    torch.testing.assert_close(loaded, trained, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged, trained, rtol=1e-4, atol=1e-4)
    saved = read_json(run / "final" / "adapter_config.json")
    assert bool(saved["target_parameters"]) == base.endswith(("mixtral", "moe")), "fused experts are adapted by default"


REFUSED = {
    "lora_options: init_lora_weight is not a supported field of peft.LoraConfig; did you mean 'init_lora_weights'?": {
        "lora_options": {"init_lora_weight": "pissa"}
    },
    "lora_options: peft.tuners.lora.config.LoraConfig() got multiple values for keyword argument 'r'": {
        "lora_options": {"r": 8}
    },
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_peft_does_not_know_or_dsft_cannot_do_is_refused_by_name(tiny, problem):
    model = str(tiny / "model")
    with pytest.raises(UserError) as error:
        measure_model(TrainConfig(model=model, method="lora", **REFUSED[problem]))
    assert str(error.value).startswith(problem.replace("{model}", model))


def test_what_peft_cannot_adapt_experts_with_is_refused_unless_they_are_left_out(tmp_path):
    changes = {"lora_dropout": 0.1}
    model = str(write_model(tmp_path / "model", "qwen2_moe"))
    with pytest.raises(UserError, match="ParamWrapper"):
        measure_model(TrainConfig(model=model, method="lora", **changes))
    measure_model(TrainConfig(model=model, method="lora", lora_target_modules=["q_proj"], **changes))
