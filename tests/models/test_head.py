"""Whether a head computed in parts is taken: by differences of rounding alone, and by all ranks or none."""

import pytest
import torch
from conftest import grid
from ranks import on_ranks
from transformers import AutoModelForCausalLM, BertConfig, FalconH1Config, Llama4TextConfig, OPTConfig, TrOCRConfig

from dsft.models.head import ChunkedHead, are_same_logits
from dsft.models.trials import small_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roundings_are_no_other_logits_and_another_scale_is(dtype):
    logits_NV = 5 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    # two steps at the largest logit, as sums in another order differ: far beyond 1 % of a logit near 0
    noise_NV = 2 * torch.finfo(dtype).eps * logits_NV.abs().amax(dim=1, keepdim=True) * torch.linspace(-1, 1, 1000)
    assert are_same_logits(logits_NV.to(dtype), (logits_NV + noise_NV).to(dtype))
    assert not are_same_logits(logits_NV.to(dtype), (1.1 * logits_NV).to(dtype))
    assert not are_same_logits(logits_NV.to(dtype), logits_NV.to(dtype)[:, 1:])
    assert not are_same_logits(logits_NV.to(dtype), torch.full_like(logits_NV, torch.nan).to(dtype))


@pytest.mark.parametrize("config", grid([FalconH1Config, Llama4TextConfig, OPTConfig], [Llama4TextConfig]))
def test_architectures_with_other_names_and_parts_need_no_plain_logits(config):
    assert ChunkedHead(small_model(config()).eval(), vocab_tile=100).agrees(torch.ones(1, 8, dtype=torch.long))


@pytest.mark.parametrize("config", grid([BertConfig(is_decoder=True), TrOCRConfig()], [BertConfig(is_decoder=True)]))
def test_where_the_head_is_not_beside_the_backbone_the_output_layer_gets_one_position(config):
    model = small_model(config).eval()
    head, shapes = ChunkedHead(model, vocab_tile=100), []
    ids_BT = torch.randint(3, 50, (2, 8))
    with torch.no_grad():
        plain_BTV = model(input_ids=ids_BT, use_cache=False).logits
        model.get_output_embeddings().register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
        hidden_BTH = head.run_backbone(input_ids=ids_BT)
        parts = [part.clone() for part in head.logits(hidden_BTH.flatten(0, 1))]
    assert shapes == [(2, 1, plain_BTV.shape[2])]
    torch.testing.assert_close(torch.cat(parts, dim=1), plain_BTV.flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert head.agrees(ids_BT[:1])


def agrees_where_rank_1_sees_another(model: str) -> bool:
    head = ChunkedHead(AutoModelForCausalLM.from_pretrained(model).eval(), vocab_tile=100)
    if torch.distributed.get_rank() == 1:
        logits = head.logits
        head.logits = lambda hidden: (part + 1 for part in logits(hidden))
    return head.agrees(torch.ones(1, 8, dtype=torch.long))


def test_ranks_that_differ_take_plain_logits_together(tiny):
    """Under ZeRO-3 the two ways run other collectives: ranks that went different ways would wait for each other."""
    assert on_ranks(2, agrees_where_rank_1_sees_another, str(tiny / "model")) == [False, False]
