"""Every architecture is trained on nats per trained token of the step, however the step is cut into micro batches."""

import copy

import pytest
import torch
import transformers
from conftest import grid
from peft import LoraConfig, get_peft_model
from tiny import ARCHITECTURES, COMMON, GATED
from torch.nn import functional
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dsft.models.chunked_head import next_tokens, tile_loss
from dsft.models.probes import architecture_problems, one_thread, small_model
from dsft.training.loss import TokenLoss
from dsft.units import IGNORED

ROWS, LENGTH = 8, 24
IDS_BT = torch.randint(3, 128, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
# Rows train 23, 20, 17, ... of their tokens, the last 2: a mean of micro batches' means is another loss.
LABELS_BT = IDS_BT.masked_fill(torch.arange(LENGTH) < 1 + 3 * torch.arange(ROWS)[:, None], IGNORED)
QUICK = ("llama", "marian", "mixtral")
WITH_ROUTERS = {
    "mixtral": (transformers.MixtralConfig, ARCHITECTURES["mixtral"][1] | {"router_aux_loss_coef": 0.1}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, ARCHITECTURES["qwen2_moe"][1] | {"router_aux_loss_coef": 0.1}),
    "olmoe": (transformers.OlmoeConfig, GATED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "jetmoe": (transformers.JetMoeConfig, COMMON | {"kv_channels": 8, "intermediate_size": 48, "num_local_experts": 4}),
    "granitemoe": (transformers.GraniteMoeConfig, GATED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

TINY = {
    **dict.fromkeys(("d_model", "hidden_size", "emb_dim"), 32),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "max_target_positions"), 64),
    **{"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
OWN_LOSSES = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"), TINY),
    **dict.fromkeys(("pegasus", "plbart", "trocr", "whisper", "xlm"), TINY),
    "xlnet": {"vocab_size": 128, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "cpmant": {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48},
}
"""Architectures that take the mean of a micro batch themselves, most without a shift -> a tiny configuration."""


def step(
    model, rows: int, *, blank: int = 0, weights_BT: torch.Tensor | None = None, **options
) -> tuple[float, float, list[torch.Tensor]]:
    """The loss of one optimizer step over IDS_BT in micro batches of `rows`, with `blank` ones after them; its nats;
    and the gradients. Of `weights_BT`, the first micro batch has none where its are all 1.
    """
    token_loss = TokenLoss(model, **options)
    trained = (LABELS_BT != IGNORED).sum()
    batches = list(zip(IDS_BT.split(rows), LABELS_BT.split(rows), strict=True))
    batches += [(IDS_BT[:rows], torch.full_like(IDS_BT[:rows], IGNORED))] * blank
    model.zero_grad()
    losses, all_nats = [], []
    for number, (ids_BT, labels_BT) in enumerate(batches):
        tokens = ids_BT.numel() if number < ROWS // rows else 0
        counts = torch.tensor([tokens, int((labels_BT != IGNORED).sum())])
        inputs = {"input_ids": ids_BT, "shift_labels": next_tokens(labels_BT, IGNORED), "use_cache": False}
        if weights_BT is not None and tokens and (cut := weights_BT.split(rows)[number]).ne(1).any():
            inputs["shift_weights"] = next_tokens(cut)
        loss, nats = token_loss(model, inputs, counts, torch.tensor([IDS_BT.numel(), trained]))
        loss.backward()
        losses.append(loss.item())
        all_nats.append(nats[1].item())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return sum(losses), sum(all_nats) / trained.item(), gradients


def same(tensors: list[torch.Tensor], others: list[torch.Tensor], *, rel: float) -> bool:
    largest = max(tensor.abs().max() for tensor in tensors)
    return all(bool((a - b).abs().max() <= rel * largest) for a, b in zip(tensors, others, strict=True))


@one_thread()
@pytest.mark.parametrize("architecture", grid(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, QUICK))
def test_in_every_architecture_a_step_is_the_mean_of_its_tokens_in_one_micro_batch_and_in_four(architecture):
    try:
        torch.manual_seed(0)
        model = small_model(CONFIG_MAPPING[architecture]()).eval()
        logits_BTV = model(input_ids=IDS_BT, use_cache=False).logits.float()
        assert logits_BTV.shape[:2] == IDS_BT.shape
    except Exception as error:
        pytest.skip(f"no small one can be built and run: {type(error).__name__} {error}"[:200])
    if architecture_problems(architecture, CONFIG_MAPPING[architecture]()):
        pytest.skip("refused: its tokens see later ones")
    by_hand = functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), LABELS_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
    by_hand.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for rows, blank in ((ROWS, 0), (2, 0), (2, 1)):
        loss, nats, cut = step(model, rows, blank=blank)
        assert loss == pytest.approx(by_hand.item(), rel=1e-5) and nats == pytest.approx(loss, rel=1e-5)
        assert same(gradients, cut, rel=1e-4)


@one_thread()
@pytest.mark.parametrize("architecture", grid(OWN_LOSSES, ("marian", "whisper", "cpmant")))
def test_an_architecture_with_a_mean_of_its_own_is_trained_on_that_of_the_step_s_next_tokens(architecture):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[architecture](**OWN_LOSSES[architecture])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits_BTV = model(input_ids=IDS_BT, use_cache=False).logits[:, :-1].float()
    by_hand = functional.cross_entropy(logits_BTV.flatten(0, 1), LABELS_BT[:, 1:].flatten(), ignore_index=IGNORED)
    for rows, blank in ((ROWS, 0), (2, 0), (2, 1)):
        assert step(model, rows, blank=blank)[0] == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.mark.parametrize("architecture", WITH_ROUTERS)
def test_a_router_s_auxiliary_loss_counts_once_as_the_mean_over_micro_batches(architecture):
    cls, values = WITH_ROUTERS[architecture]
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(cls(**values, output_router_logits=True)).eval()
    model = copy.deepcopy(plain)

    def added(ids_BT, labels_BT) -> float:
        with torch.no_grad():
            outputs = plain(input_ids=ids_BT, labels=labels_BT)
            logits_BTV = outputs.logits[:, :-1].float()
            nats = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        return (outputs.loss - nats).item()

    for rows in (ROWS, 2, 1):
        terms = [added(*cut) for cut in zip(IDS_BT.split(rows), LABELS_BT.split(rows), strict=True)]
        loss, nats, _ = step(model, rows)
        assert loss - nats == pytest.approx(sum(terms) / len(terms), rel=2e-3) and loss - nats > 1e-3
        assert step(model, rows, blank=2)[0] == pytest.approx(loss, rel=1e-6)


WEIGHTS_BT = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(1)) * 3
WEIGHTS_BT[:2] = 1


@one_thread()
@pytest.mark.parametrize("form", ["logits", "smoothed", "tiled", "tiled adapters", "own loss", "router"])
def test_weights_multiply_nats_in_every_form_of_the_loss(form):
    """Loss and gradients as by hand, with what a router adds; blank and unweighted micro batches beside the others."""
    torch.manual_seed(0)
    cls, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**GATED)
    if form == "own loss":
        cls, config = transformers.MarianForCausalLM, CONFIG_MAPPING["marian"](**OWN_LOSSES["marian"])
    has_router = form == "router"
    if has_router:
        cls = transformers.MixtralForCausalLM
        config = transformers.MixtralConfig(**WITH_ROUTERS["mixtral"][1], output_router_logits=True)
    model = cls(config).eval()
    if form == "tiled adapters":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    smoothing, trained = 0.2 if form == "smoothed" else 0.0, (LABELS_BT[:, 1:] != IGNORED).sum()

    def by_hand(rows: int) -> tuple[float, float, list[torch.Tensor]]:
        model.zero_grad()
        weighted = nats = 0.0
        for ids_BT, labels_BT, weights_BT in zip(
            *(x.split(rows) for x in (IDS_BT, LABELS_BT, WEIGHTS_BT)), strict=True
        ):
            outputs = model(input_ids=ids_BT, use_cache=False)
            of_labels = outputs.logits[:, :-1].transpose(1, 2), labels_BT[:, 1:]
            nats_BT = functional.cross_entropy(*of_labels, reduction="none")  # the log's: they stay nats
            smoothed_BT = functional.cross_entropy(*of_labels, reduction="none", label_smoothing=smoothing)
            loss = (smoothed_BT * weights_BT[:, 1:]).sum() / trained
            loss = loss + 0.1 * outputs.aux_loss * rows / ROWS if has_router else loss
            loss.backward()
            weighted, nats = weighted + loss.item(), nats + nats_BT.sum().item()
        return weighted, nats / trained.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = {rows: by_hand(rows) for rows in (ROWS, 2)}
    if "tiled" in form:
        assert tile_loss(model, rows=7)
    for rows, blank in ((ROWS, 0), (2, 1)):
        loss, nats, gradients = step(model, rows, blank=blank, weights_BT=WEIGHTS_BT, label_smoothing=smoothing)
        assert loss == pytest.approx(expected[rows][0], rel=1e-6)
        assert nats == pytest.approx(expected[rows][1], rel=1e-6)
        assert same(expected[rows][2], gradients, rel=1e-5)
    assert abs(loss - nats) > 0.1


@one_thread()
def test_a_loss_of_one_s_own_that_is_the_usual_one_trains_as_the_usual_one():
    """Blank micro batches have zeros of all."""

    def usual(logits, labels):
        return functional.cross_entropy(logits, labels, reduction="none")

    torch.manual_seed(0)
    model = small_model(CONFIG_MAPPING["llama"]()).eval()
    plain, changed = (step(model, 2, blank=1, weights_BT=WEIGHTS_BT, compute_loss=each) for each in (None, usual))
    assert changed[:2] == pytest.approx(plain[:2], rel=1e-6) and same(plain[2], changed[2], rel=1e-6)


def test_label_smoothing_is_that_of_transformers():
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED)).eval()
    outputs = model(input_ids=IDS_BT)
    smoothed = LabelSmoother(epsilon=0.2)(outputs, LABELS_BT, shift_labels=True).item()
    loss, nats, _ = step(model, 2, label_smoothing=0.2)
    assert loss == pytest.approx(smoothed, rel=1e-5)
    assert nats == pytest.approx(step(model, 2)[1], rel=1e-6) and abs(loss - nats) > 1e-3
