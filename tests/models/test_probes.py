"""What trials find of an architecture: no token sees a later one, no row another; padding without a mask."""

import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import flags, grid
from ranks import on_ranks, run_entry
from tiny import ARCHITECTURES, COMMON, windows_of_sequences, with_labels, write_model, write_texts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dsft.api import evaluate, evaluate_all
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.epoch import Collator, sequence
from dsft.errors import UserError
from dsft.models.measure import measure_model
from dsft.models.probes import RowRules, architecture_problems, small_model, trains_in_tiles
from dsft.perplexity.scoring import evaluate_windows
from dsft.runtime.hardware import this_machine
from dsft.setup.decide import TrainingRun, decide_run
from dsft.units import IGNORED

QUICK = ("llama", "gpt2", "mixtral")
WITH_EXPERTS = ("mixtral", "qwen2_moe")
"""What stands in the padding changes the order in which gradients of experts are added, with a mask too."""


def facts_of(architecture: str, folder, **changes):
    cls, values = ARCHITECTURES[architecture]
    cls(**(values | changes)).save_pretrained(folder)
    return measure_model(TrainConfig(model=str(folder / "config.json")))


def loss_and_gradients(model, batch) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**with_labels(batch), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("architecture", grid(ARCHITECTURES, QUICK))
def test_loss_and_gradients_of_padded_rows_are_the_same_without_a_mask(architecture):
    cls, values = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cls(**values)).train()
    rows = [{"input_ids": torch.randint(5, 384, (length,)).numpy()} for length in (90, 48, 7)]
    rows = [[row | {"labels": row["input_ids"]}] for row in rows]
    masked = loss_and_gradients(model, Collator(0)(rows))
    unmasked, other_padding = (loss_and_gradients(model, Collator(pad, masked=False)(rows)) for pad in (0, 4))
    for with_mask, without, other in zip(masked, unmasked, other_padding, strict=True):
        assert torch.equal(without, other) or architecture in WITH_EXPERTS
        for tensor in (without, other):
            torch.testing.assert_close(tensor, with_mask, rtol=0, atol=1e-5 * with_mask.abs().max().item())


def test_the_mask_is_kept_where_the_loss_of_a_router_counts_padding(tmp_path):
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    options, facts = TrainConfig(seq_len=64, dtype="float32"), facts_of("mixtral", tmp_path, **balanced)
    decide_run(run := TrainingRun(options=options, machine=this_machine(), model=facts))
    assert run.masked


CPU = torch.device("cpu")
ENCODER = (transformers.BertConfig, COMMON | {"intermediate_size": 48})
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 6.0, 8.0, 9.0],
    }
}


def encoder(folder, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "bert", ENCODER)
    return write_model(folder, "bert")


def windows_of(lengths):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 120, (length,), generator=generator).numpy() for length in lengths]
    return windows_of_sequences([sequence(row, row > 0) for row in rows])


def nats(model, windows, batch_tokens: int):
    result = evaluate_windows(
        model, windows, pad_token_id=0, batch_tokens=batch_tokens, device=CPU, collective_forward=False
    )
    return torch.tensor(result.document_nats), result


@torch.no_grad()
def plain_nats(model, windows, window: int) -> float:
    """A window alone, with full logits and no padding."""
    ids, targets = (torch.from_numpy(array.astype("int64")) for array in windows.inputs_and_targets(window))
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()


def test_an_encoder_is_refused_in_training_and_evaluation(tiny, options, tmp_path, monkeypatch):
    model = encoder(tmp_path / "bert", monkeypatch)
    result = run_entry("dsft.train", flags(options(tmp_path / "run", model=str(model))))
    assert result.returncode == 2 and result.stderr.count("dsft: error:") == 1, result.stderr
    assert "its tokens see later ones" in result.stderr and "is_decoder" in result.stderr
    with pytest.raises(UserError, match="its tokens see later ones"):
        evaluate(model=str(model), data=str(tiny / "held_out.jsonl"), seq_len=32, progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(UserError, match="its tokens see later ones"):
        nats(loaded, windows_of([5, 9]), 64)


def test_rows_that_change_each_others_logits_are_scored_alone(capfd):
    model = small_model(transformers.LlamaConfig()).eval()
    model.model.embed_tokens.register_forward_hook(lambda _, __, hidden_BTH: hidden_BTH + hidden_BTH.mean(0))
    windows = windows_of([9, 33, 16, 24, 5, 33])
    plain = torch.tensor([plain_nats(model, windows, window) for window in range(6)], dtype=torch.float64)
    scored, _ = nats(model, windows, 1000)
    torch.testing.assert_close(scored, plain, rtol=1e-6, atol=1e-6)
    assert "each is a batch of its own" in capfd.readouterr().out


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longrope") / "phi3"
    return write_model(folder, "phi3", original_max_position_embeddings=64, **LONG)


QUICK_ARCHITECTURES = ("llama", "bert", "gpt2", "mixtral", "mamba", "reformer", "xlnet", "rwkv")


@pytest.mark.parametrize("architecture", grid(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, QUICK_ARCHITECTURES))
def test_in_every_architecture_a_row_scores_the_same_alone_and_in_a_batch(architecture):
    """Or it is refused, since its tokens see later ones."""
    try:
        torch.manual_seed(0)
        model = small_model(CONFIG_MAPPING[architecture]()).eval()
        model(input_ids=torch.ones(1, 9, dtype=torch.long), use_cache=False).logits[0]
    except Exception as error:
        pytest.skip(f"no small one can be built and run: {type(error).__name__} {error}"[:200])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # so that attention is not almost even
    windows = windows_of([9, 33, 16, 24, 5, 33])
    if architecture_problems(architecture, CONFIG_MAPPING[architecture]()):
        with pytest.raises(UserError, match="see later ones"):
            nats(model, windows, 8)
        return
    plain = torch.tensor([plain_nats(model, windows, window) for window in range(6)], dtype=torch.float64)
    for batch_tokens in (1, 1000):
        torch.testing.assert_close(nats(model, windows, batch_tokens)[0], plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_a_multiple_wide_holds_its_longest_row_and_lies_on_one_side_of_each_limit(seed):
    chance = random.Random(seed)
    limits = tuple(sorted(chance.sample(range(2, 100), k=chance.randint(0, 3))))
    rules = RowRules(limits=limits, alone=seed % 5 == 0, multiple=chance.choice([1, 2, 3, 8]))
    for longest in range(1, 120):
        width, shortest = rules.width(longest), -(-longest // rules.multiple) * rules.multiple
        assert width >= longest and width % rules.multiple == 0
        assert width == shortest or not rules.alone
        # Beyond a limit only where no multiple lies before it.
        assert width == shortest or not any(longest <= limit < width for limit in limits)
        assert not any(rules.share(longest, length) for length in range(1, longest)) or not rules.alone


@pytest.mark.parametrize("architecture", ["kimi_linear", "bailing_hybrid", "qwen3_next"])
def test_linear_attention_is_tried_at_small_sizes(architecture):
    """Where a size is not known, the trial fails, and its answer costs the memory of all logits."""
    config = CONFIG_MAPPING[architecture]()
    assert sum(weight.numel() for weight in small_model(config).parameters()) < 1_000_000
    assert trains_in_tiles(config)


def _sums(options: dict) -> tuple:
    result = next(evaluate_all(EvalConfig(**options))).perplexity
    return result.nats, result.document_nats.tolist()


def test_longrope_has_the_same_bits_on_1_and_2_ranks(phi, tmp_path):
    data = write_texts(tmp_path / "texts.jsonl", 30)
    options = {"model": [str(phi)], "data": [str(data)], "seq_len": 100, "mode": "rolling", "batch_tokens": 400}
    assert on_ranks(2, _sums, options) == [_sums(options)] * 2
    assert _sums(options)[0] == pytest.approx(_sums(options | {"batch_tokens": 8})[0], rel=1e-6)
