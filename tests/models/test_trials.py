"""Padded batches without an attention mask: where loss and gradients stay the same, and where the mask is kept."""

import dataclasses

import pytest
import torch
from conftest import grid
from tiny import ARCHITECTURES
from transformers import AutoModelForCausalLM

from dsft.config.options import TrainConfig
from dsft.data.batches import Collator
from dsft.models.size import measure_model
from dsft.models.trials import needs_mask
from dsft.run_setup.resolve import job_over_data

QUICK = ("llama", "gpt2", "mixtral")
WITH_EXPERTS = ("mixtral", "qwen2_moe")
"""What stands in the padding changes the order in which gradients of experts are added, with a mask too."""


def facts_of(architecture: str, folder, **changes):
    cls, values = ARCHITECTURES[architecture]
    cls(**(values | changes)).save_pretrained(folder)
    return measure_model(TrainConfig(model=str(folder / "config.json")))


def loss_and_gradients(model, batch) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**{name: batch[name] for name in batch if name != "num_tokens"}, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("architecture", grid(ARCHITECTURES, QUICK))
def test_loss_and_gradients_of_padded_rows_are_the_same_without_a_mask(architecture, tmp_path):
    assert not needs_mask(facts_of(architecture, tmp_path))
    cls, values = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cls(**values)).train()
    rows = [{"input_ids": torch.randint(5, 384, (length,)).numpy()} for length in (90, 48, 7)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    masked = loss_and_gradients(model, Collator(0)(rows))
    unmasked, other_padding = (loss_and_gradients(model, Collator(pad, masked=False)(rows)) for pad in (0, 4))
    for with_mask, without, other in zip(masked, unmasked, other_padding, strict=True):
        assert torch.equal(without, other) or architecture in WITH_EXPERTS
        for tensor in (without, other):
            torch.testing.assert_close(tensor, with_mask, rtol=0, atol=1e-5 * with_mask.abs().max().item())


def test_the_mask_is_kept_where_the_loss_counts_padding_or_attention_is_not_sdpa(tmp_path):
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert needs_mask(facts_of("mixtral", tmp_path, **balanced))
    assert needs_mask(dataclasses.replace(facts_of("llama", tmp_path), attn_implementation="flash_attention_2"))


def test_the_plan_of_padded_rows_has_no_mask_where_training_has_none(tmp_path):
    class Chats:  # a source of rows of any length
        class rules:
            is_text = False

    options, facts = TrainConfig(seq_len=64, dtype="float32"), facts_of("llama", tmp_path)
    assert job_over_data(options, facts, [Chats]).attention == "flash"
    assert job_over_data(options, facts, [Chats], masked=True).attention == "sdpa"
