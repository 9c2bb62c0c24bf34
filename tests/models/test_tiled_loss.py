"""The loss of tiles: the plain one's loss and gradients in a fraction of its memory, and where it is not taken."""

import copy
import dataclasses

import pytest
import torch
import transformers
from allocator import allocator_peak
from conftest import grid
from peft import LoraConfig, get_peft_model
from tiny import ARCHITECTURES, COMMON, GATED
from transformers import AutoModelForCausalLM

from dsft.config.options import TrainConfig
from dsft.models import head
from dsft.models.head import tile_loss
from dsft.models.size import measure_model
from dsft.models.trials import can_tile_loss
from dsft.run_setup.decisions import tiled_loss_decision
from dsft.run_setup.resolve import job_over_data
from dsft.units import IGNORED

CHANGED_LOGITS = {
    "gemma2": (transformers.Gemma2Config, GATED | {"head_dim": 8, "final_logit_softcapping": 0.5}),
    "granite": (transformers.GraniteConfig, GATED | {"logits_scaling": 0.1}),
    "cohere": (transformers.CohereConfig, GATED | {"logit_scale": 3.0}),
    "phi": (transformers.PhiConfig, COMMON | {"intermediate_size": 48}),  # a bias at the head
}
ALL = ARCHITECTURES | CHANGED_LOGITS
ADAPTERS = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
IDS_BT = torch.randint(5, 384, (3, 20), generator=torch.Generator().manual_seed(1))
LABELS_BT = IDS_BT.masked_fill(torch.arange(20) < torch.tensor([[0], [7], [20]]), IGNORED)  # the last row has none


def model_of(architecture: str, **changes):
    cls, values = ALL[architecture]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(cls(**(values | changes))).train()


def loss_and_gradients(model, **options) -> list[torch.Tensor]:
    """After two micro batches, with the loss scaled as ranks and fp16 do."""
    model.zero_grad()
    for _ in range(2):
        loss = model(input_ids=IDS_BT, labels=LABELS_BT, use_cache=False, **options).loss
        (3 * loss).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("architecture", grid(ALL, ("llama", "gpt2", "gemma2", "cohere", "phi")))
def test_tiles_have_the_loss_and_gradients_of_all_logits(architecture, adapted):
    model = model_of(architecture)
    if adapted:
        model = get_peft_model(model, copy.deepcopy(ADAPTERS))
    options = {"num_items_in_batch": torch.tensor(50)}
    plain, logits = loss_and_gradients(model, **options), model(input_ids=IDS_BT).logits
    assert tile_loss(model, rows=7)
    for tiled, reference in zip(loss_and_gradients(model, **options), plain, strict=True):
        torch.testing.assert_close(tiled, reference, rtol=0, atol=1e-5 * reference.abs().max().item())
    assert torch.equal(model(input_ids=IDS_BT).logits, logits)


def test_a_large_vocabulary_takes_a_fraction_of_the_memory(monkeypatch):
    """By torch's own record of a step of 512 tokens over 32,768 entries: log-softmax, its gradient and that of the
    logits of all rows, against those of 64 rows.
    """
    model, ids_BT = model_of("llama", vocab_size=32768), torch.ones(1, 512, dtype=torch.long)
    monkeypatch.setattr(head, "TILE_LOGITS", 64 * 32768)

    def step():
        model.zero_grad()
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()

    plain = allocator_peak(step)
    assert tile_loss(model)
    tiled = allocator_peak(step)
    assert plain > 12 * 512 * 32768
    assert tiled < plain / 5


def test_in_bf16_many_tokens_round_the_head_s_gradient_little_more_than_all_logits_do(monkeypatch):
    monkeypatch.setattr(head, "TILE_LOGITS", 16 * 384)  # 256 tiles, but for MOST_TILES
    ids_BT = torch.randint(0, 384, (16, 256), generator=torch.Generator().manual_seed(0))

    def head_gradient(model) -> torch.Tensor:
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        return model.lm_head.weight.grad.float()

    model = model_of("llama").bfloat16()
    exact = head_gradient(copy.deepcopy(model).float())
    plain = head_gradient(copy.deepcopy(model))
    assert tile_loss(model)
    assert (head_gradient(model) - exact).norm() < 2.5 * (plain - exact).norm()


def test_the_trial_says_no_where_the_loss_or_the_head_is_another(tmp_path):
    assert can_tile_loss(ALL["llama"][0](**GATED), adapters=ADAPTERS)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert not can_tile_loss(ALL["mixtral"][0](**(ALL["mixtral"][1] | balanced)))
    saved_head = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["lm_head"])
    assert not can_tile_loss(ALL["llama"][0](**GATED), adapters=saved_head)
    assert not can_tile_loss(transformers.OPTConfig(**COMMON))


def test_tiles_are_taken_from_a_vocabulary_of_32_000_and_planned(tmp_path):
    transformers.LlamaConfig(**(GATED | {"vocab_size": 32000})).save_pretrained(tmp_path)
    facts = measure_model(TrainConfig(model=str(tmp_path / "config.json")))
    options = TrainConfig(seq_len=64, dtype="float32")
    assert job_over_data(options, facts, []).tiled_loss
    for other in (
        {"tiled_loss": False},
        {"dtype": "float16"},
        {"method": "qlora"},
        {"training": {"use_liger_kernel": True}},
        {"training": {"label_smoothing_factor": 0.1}},
    ):
        assert not job_over_data(dataclasses.replace(options, **other), facts, []).tiled_loss
    small = dataclasses.replace(facts, size=dataclasses.replace(facts.size, vocab_size=31999))
    assert not tiled_loss_decision(options, small).value
    assert tiled_loss_decision(dataclasses.replace(options, tiled_loss=True), small).value
