"""The head in parts: taken where it differs by rounding alone, by all ranks or none; tiles of loss, feed-forward."""

import copy
import dataclasses

import pytest
import torch
import transformers
from allocator import allocator_peak
from conftest import grid
from peft import LoraConfig, get_peft_model
from ranks import on_ranks
from tiny import ARCHITECTURES, COMMON, GATED
from transformers import AutoModelForCausalLM, BertConfig, FalconH1Config, Llama4TextConfig, OPTConfig, TrOCRConfig

from dsft.config.options import TrainConfig
from dsft.models import chunked_head
from dsft.models.chunked_head import ChunkedHead, are_same_logits, next_tokens, sums_of_nats, tile_loss
from dsft.models.measure import measure_model
from dsft.models.probes import small_model, trains_in_tiles
from dsft.runtime.hardware import this_machine
from dsft.setup.arguments import tiled_loss_decision
from dsft.setup.decide import TrainingRun, decide_run
from dsft.units import IGNORED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roundings_are_no_other_logits_and_another_scale_is(dtype):
    logits_NV = 5 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    # two steps at the largest logit, as sums in another order differ: far beyond 1 % of a logit near 0
    noise_NV = 2 * torch.finfo(dtype).eps * logits_NV.abs().amax(dim=1, keepdim=True) * torch.linspace(-1, 1, 1000)
    assert are_same_logits((logits_NV + noise_NV).to(dtype), logits_NV.to(dtype))
    assert not are_same_logits((1.1 * logits_NV).to(dtype), logits_NV.to(dtype))
    assert not are_same_logits(logits_NV.to(dtype)[:, 1:], logits_NV.to(dtype))
    assert not are_same_logits(torch.full_like(logits_NV, torch.nan).to(dtype), logits_NV.to(dtype))


@pytest.mark.parametrize("config", grid([FalconH1Config, Llama4TextConfig, OPTConfig], [Llama4TextConfig]))
def test_architectures_with_other_names_and_parts_need_no_plain_logits(config):
    assert ChunkedHead(small_model(config()).eval()).agrees(torch.ones(1, 8, dtype=torch.long))


@pytest.mark.parametrize("config", grid([BertConfig(is_decoder=True), TrOCRConfig()], [BertConfig(is_decoder=True)]))
def test_where_the_head_is_not_beside_the_backbone_the_output_layer_gets_one_position(config):
    model = small_model(config).eval()
    head, shapes = ChunkedHead(model), []
    ids_BT = torch.randint(3, 50, (2, 8))
    with torch.no_grad():
        plain_BTV = model(input_ids=ids_BT, use_cache=False).logits
        model.get_output_embeddings().register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
        logits_NV = head.logits(head.run(input_ids=ids_BT).flatten(0, 1))
    assert shapes == [(2, 1, plain_BTV.shape[2])]
    torch.testing.assert_close(logits_NV, plain_BTV.flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert head.agrees(ids_BT[:1])


def agrees_where_rank_1_sees_another(model: str) -> bool:
    head = ChunkedHead(AutoModelForCausalLM.from_pretrained(model).eval())
    if torch.distributed.get_rank() == 1:
        logits = head.logits
        head.logits = lambda hidden: logits(hidden) + 1
    return head.agrees(torch.ones(1, 8, dtype=torch.long))


def test_ranks_that_differ_take_plain_logits_together(tiny):
    """Under ZeRO-3 the two ways run other collectives: ranks that went different ways would wait for each other."""
    assert on_ranks(2, agrees_where_rank_1_sees_another, str(tiny / "model")) == [False, False]


CHANGED_LOGITS = {
    "gemma2": (transformers.Gemma2Config, GATED | {"head_dim": 8, "final_logit_softcapping": 0.5}),
    "granite": (transformers.GraniteConfig, GATED | {"logits_scaling": 0.1}),
    "cohere": (transformers.CohereConfig, GATED | {"logit_scale": 3.0}),
    "phi": (transformers.PhiConfig, COMMON | {"intermediate_size": 48}),  # a bias at the head
}
ALL = ARCHITECTURES | CHANGED_LOGITS
ADAPTERS = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
IDS_BT = torch.randint(5, 384, (3, 20), generator=torch.Generator().manual_seed(1))
TARGETS_BT = next_tokens(IDS_BT, IGNORED)
TARGETS_BT[torch.arange(20) < torch.tensor([[0], [7], [20]])] = IGNORED  # the last row has none


def model_of(architecture: str, **changes):
    cls, values = ALL[architecture]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(cls(**(values | changes))).train()


def summed(model, ids_BT: torch.Tensor, targets_BT: torch.Tensor, *, tiled: bool) -> torch.Tensor:
    if tiled:
        return model(input_ids=ids_BT, targets=targets_BT, use_cache=False)["sums"][0]
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return sums_of_nats(logits_BTV.float().flatten(0, 1), targets_BT.flatten())[0]


def loss_and_gradients(model, *, tiled: bool) -> list[torch.Tensor]:
    """After two micro batches, with the loss scaled as ranks and fp16 do."""
    model.zero_grad()
    for _ in range(2):
        loss = summed(model, IDS_BT, TARGETS_BT, tiled=tiled)
        (3 * loss).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("architecture", grid(ALL, ("llama", "gpt2", "gemma2", "cohere", "phi")))
def test_tiles_have_the_loss_and_gradients_of_all_logits(architecture, adapted):
    model = model_of(architecture)
    if adapted:
        model = get_peft_model(model, copy.deepcopy(ADAPTERS))
    plain, logits = loss_and_gradients(model, tiled=False), model(input_ids=IDS_BT).logits
    assert tile_loss(model, rows=7)
    for tiled, reference in zip(loss_and_gradients(model, tiled=True), plain, strict=True):
        torch.testing.assert_close(tiled, reference, rtol=0, atol=1e-5 * reference.abs().max().item())
    assert torch.equal(model(input_ids=IDS_BT).logits, logits)


def test_compiled_the_tiles_stay_outside_of_the_graph_before_them():
    model, graphs = model_of("llama"), []
    plain = loss_and_gradients(model, tiled=False)
    assert tile_loss(model, rows=7)

    def compile_nothing(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=compile_nothing)
    for tiled, reference in zip(loss_and_gradients(model, tiled=True), plain, strict=True):
        torch.testing.assert_close(tiled, reference, rtol=0, atol=1e-5 * reference.abs().max().item())
    assert len(graphs) == 1


def test_a_large_vocabulary_takes_a_fraction_of_the_memory(monkeypatch):
    """By torch's own record of a step of 512 tokens over 32,768 entries: log-softmax, its gradient and that of the
    logits of all rows, against those of 64 rows.
    """
    model, ids_BT = model_of("llama", vocab_size=32768), torch.ones(1, 512, dtype=torch.long)
    monkeypatch.setattr(chunked_head, "TILE_LOGITS", 64 * 32768)

    def step(tiled: bool):
        model.zero_grad()
        summed(model, ids_BT, ids_BT, tiled=tiled).backward()

    plain = allocator_peak(lambda: step(tiled=False))
    assert tile_loss(model)
    tiled = allocator_peak(lambda: step(tiled=True))
    assert plain > 12 * 512 * 32768
    assert tiled < plain / 5


def test_in_bf16_many_tokens_round_the_head_s_gradient_little_more_than_all_logits_do(monkeypatch):
    monkeypatch.setattr(chunked_head, "TILE_LOGITS", 16 * 384)  # 256 tiles, but for MOST_TILES
    ids_BT = torch.randint(0, 384, (16, 256), generator=torch.Generator().manual_seed(0))

    def head_gradient(model, tiled: bool = False) -> torch.Tensor:
        summed(model, ids_BT, ids_BT, tiled=tiled).backward()
        return model.lm_head.weight.grad.float()

    model = model_of("llama").bfloat16()
    exact = head_gradient(copy.deepcopy(model).float())
    plain = head_gradient(copy.deepcopy(model))
    assert tile_loss(model)
    assert (head_gradient(model, tiled=True) - exact).norm() < 2.5 * (plain - exact).norm()


def test_the_trial_says_no_where_the_loss_or_the_head_is_another(tmp_path):
    assert trains_in_tiles(ALL["llama"][0](**GATED))
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert not trains_in_tiles(ALL["mixtral"][0](**(ALL["mixtral"][1] | balanced)))
    transformers.LlamaConfig(**GATED).save_pretrained(tmp_path)
    options = TrainConfig(model=str(tmp_path / "config.json"), method="lora")
    for saved, has_plain_head in ([], True), (["lm_head"], False):
        facts = measure_model(dataclasses.replace(options, lora_modules_to_save=saved))
        assert facts.has_plain_head is has_plain_head


def test_tiles_are_taken_from_a_vocabulary_of_32_000_and_planned(tmp_path):
    transformers.LlamaConfig(**(GATED | {"vocab_size": 32000})).save_pretrained(tmp_path)
    facts = measure_model(TrainConfig(model=str(tmp_path / "config.json")))
    options = TrainConfig(seq_len=64, dtype="float32")
    assert tiled_loss_decision(options, facts).value
    for other in ({"tiled_loss": False}, {"dtype": "float16"}, {"training": {"label_smoothing_factor": 0.1}}):
        assert not tiled_loss_decision(dataclasses.replace(options, **other), facts).value
    for other in ({"method": "qlora"}, {"training": {"torch_compile": True}}, {"training": {"use_liger_kernel": True}}):
        assert tiled_loss_decision(dataclasses.replace(options, **other), facts).value
    small = dataclasses.replace(facts, size=dataclasses.replace(facts.size, vocab_size=31999))
    assert not tiled_loss_decision(options, small).value
    assert tiled_loss_decision(dataclasses.replace(options, tiled_loss=True), small).value
    decide_run(run := TrainingRun(options=options, machine=this_machine(), model=facts))
    assert run.options.tiled_loss is run.job.tiled_loss is True
