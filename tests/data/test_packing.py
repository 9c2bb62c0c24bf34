"""Samples that share a row: full rows, the loss and gradients of each sample alone, and architectures that cannot keep
them apart.
"""

import functools
from itertools import product

import numpy as np
import pytest
import torch
import transformers
from conftest import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, GATED, with_labels
from torch._higher_order_ops.flex_attention import math_attention
from transformers import masking_utils, modeling_utils
from transformers.integrations.flex_attention import WrappedFlexAttention

from dsft.data.epoch import (
    Collator,
    EpochSampler,
    best_fit,
    form_batches,
    repeated,
    sequence,
)
from dsft.models.chunked_head import next_tokens
from dsft.models.probes import RowRules, attention_like_eager, is_like_eager, isolation_problem
from dsft.units import IGNORED, padded_width


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_best_fit_places_every_sequence_once_and_within_the_room(lengths):
    lengths = np.array(lengths)
    rows = best_fit(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    totals = sorted(lengths[row].sum() for row in rows)
    assert totals[-1] <= 64
    # No two rows could be one, or the later of them would not have been begun.
    assert len(totals) < 2 or totals[0] + totals[1] > 64


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=100))
def test_batches_filled_by_tokens_hold_every_sequence_once_and_at_most_so_many_tokens(lengths):
    lengths = np.array(lengths)
    batches = form_batches(lengths, 128, RowRules())
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * padded_width(lengths[batch].max()) <= 128 for batch in batches)


def random_sequences(vocab: int, lengths: list[int], seed: int = 0) -> list[dict]:
    """With about half of the tokens trained."""
    rng = np.random.default_rng(seed)
    return [sequence(rng.integers(0, vocab, length), rng.random(length) < 0.5) for length in lengths]


def loss_and_gradients(model, batches: list[dict], trained: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Nats of all `batches` / `trained`, by the model's own loss."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**with_labels(batch), use_cache=False, num_items_in_batch=trained).loss
        loss.backward()
        total += loss.item()
    return total, {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


QUICK = ("llama", "gemma3", "gpt2", "mixtral")


@pytest.fixture
def flex_without_compiler(monkeypatch):
    """Lets flex attention compute by torch's own eager form, since its kernels have no backward on CPUs."""

    def eager(query, key, value, *, score_mod, block_mask, scale, **_):
        return math_attention(query, key, value, score_mod, block_mask.as_tuple(), scale, {})[0]

    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: eager)
    blocks = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **of: blocks(**of | {"_compile": False}))


@pytest.mark.parametrize(
    ("architecture", "form"),
    grid(
        [*product(ARCHITECTURES, ["rows", "flat"]), *product(("llama", "gemma3", "mixtral"), ["flex"])],
        [*product(QUICK, ["rows", "flat"]), ("llama", "flex"), ("gemma3", "flex"), ("mixtral", "flex")],
    ),
)
@pytest.mark.usefixtures("flex_without_compiler")
def test_packed_loss_and_gradients_are_those_of_the_samples_alone(architecture, form):
    """Two rows of samples, among them one longer than the sliding window where there is one; `flat` is the form for
    flash attention, here with SDPA; `flex` has its block masks.
    """
    cls, values = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    attention = {"attn_implementation": "flex_attention"} if form == "flex" else {}
    model = transformers.AutoModelForCausalLM.from_config(cls(**values), **attention).train()
    groups = [random_sequences(384, [17, 80, 5, 1]), random_sequences(384, [33, 64], seed=1)]
    trained = sum(int((item["labels"] != IGNORED).sum()) for group in groups for item in group)
    alone = loss_and_gradients(
        model,
        [Collator(0)([[item]]) for group in groups for item in group if (item["labels"] != IGNORED).any()],
        trained,
    )
    packed = Collator(0, packed=True, flash=form == "flat")(groups)
    assert packed["input_ids"].shape == ((1, 208) if form == "flat" else (2, 104)) and "attention_mask" not in packed
    loss, gradients = loss_and_gradients(model, [packed], trained)
    assert loss == pytest.approx(alone[0], rel=1e-5)
    assert gradients.keys() == alone[1].keys()
    for name, gradient in gradients.items():
        assert (gradient - alone[1][name]).norm() <= 1e-5 * max(alone[1][name].norm(), 1e-6), name


@pytest.mark.parametrize("architecture", grid(ARCHITECTURES, QUICK))
def test_architectures_that_keep_samples_apart_are_known_as_such(architecture):
    cls, values = ARCHITECTURES[architecture]
    for attention in (None, "eager"):
        assert (
            isolation_problem(
                cls(**values), attn_implementation=attention, device=torch.device("cpu"), dtype=torch.float32
            )
            is None
        )


BIG = GATED | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(**BIG), None),  # tried out small: the real one takes 280 GB
        (transformers.Gemma3TextConfig(num_hidden_layers=26), None),
        (transformers.DeepseekV3Config(num_hidden_layers=3, first_k_dense_replace=1), None),
        (
            transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=384, state_size=4),
            "tokens of one sample change",
        ),
        (transformers.Lfm2Config(**GATED | {"layer_types": ["conv", "full_attention"]}), "tokens of one sample change"),
        (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=384), "tokens of one sample change"),
    ],
    ids=["llama-70b", "gemma3", "deepseek-v3", "mamba", "lfm2", "bloom"],
)
def test_architectures_that_mix_tokens_otherwise_are_found_out(config, expected):
    problem = isolation_problem(config, attn_implementation=None, device=torch.device("cpu"), dtype=torch.float32)
    assert problem is None if expected is None else expected in problem, problem


@pytest.mark.usefixtures("flex_without_compiler")
def test_an_attention_that_replaces_eagers_has_its_loss_and_gradients(monkeypatch):
    """Samples of a row need not be apart: gpt-oss gives its masks no positions, whatever computes them."""
    assert attention_like_eager(transformers.LlamaConfig(**GATED), dtype="bfloat16") == "flex_attention"
    assert attention_like_eager(transformers.LlamaConfig(**GATED), dtype="float32") is None
    with_sinks = transformers.GptOssConfig(num_hidden_layers=2)
    assert attention_like_eager(with_sinks, dtype="bfloat16") is None, "flex attention has no sinks on CPUs"
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    for name, of_mask in (("as_eager", lambda mask: mask), ("without_mask", lambda mask: None)):
        monkeypatch.setitem(
            modeling_utils.ALL_ATTENTION_FUNCTIONS,
            name,
            lambda *args, of_mask=of_mask, **options: eager(*args[:4], of_mask(args[4]), **options),
        )
        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, masking_utils.eager_mask)
    for dtype in (torch.float32, torch.bfloat16):
        like_eager = functools.partial(
            is_like_eager, transformers.LlamaConfig(**GATED), device=torch.device("cpu"), dtype=dtype
        )
        assert like_eager("as_eager") and not like_eager("without_mask")


class Numbered:
    def __init__(self, lengths):
        self.lengths = np.array(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return index


def test_an_order_by_length_has_everything_once_and_pads_little():
    lengths = np.random.default_rng(0).integers(1, 1000, 1003)
    random, within, grouped = (
        EpochSampler(Numbered(lengths), per_step=16, seed=1, step=lambda: 0, strategy=strategy)
        for strategy in ("random", "batch_rebalance", "group_by_length")
    )
    assert [sorted(within.order(0)[start : start + 16]) for start in range(0, 1008, 16)] == [
        sorted(random.order(0)[start : start + 16]) for start in range(0, 1008, 16)
    ]
    assert sorted(grouped.order(0)) == sorted(random.order(0)) == list(range(1008))
    assert grouped.order(0) != grouped.order(1)
    assert grouped.order(0)[-5:] == list(range(1003, 1008))  # blank ones fill the last step
    filled = np.append(lengths, np.zeros(5, int))
    batches = [filled[order.order(0)].reshape(-1, 4) for order in (random, within, grouped)]
    shares = [1 - each.sum() / (4 * each.max(1)).sum() for each in batches]
    assert shares[2] < 0.03 < shares[1] < 0.2 < 0.3 < shares[0]


class Tokens:
    tokens, trained, weights = np.arange(6, dtype=np.int32), np.ones(6, bool), None


def test_weights_lie_where_their_tokens_do():
    """Padded, packed and laid flat; a sequence without weights has 1; batches of such sequences have no column."""
    ids = np.split(np.arange(10, 24), [5, 8])
    plain = [sequence(each, np.ones(len(each), bool)) for each in ids]
    weighted = np.concatenate([ids[0], ids[2]])
    some = [plain[1] if index == 1 else plain[index] | {"weights": ids[index].astype(np.float32)} for index in range(3)]
    for collate, items in (
        (Collator(0), lambda each: [each]),
        (Collator(0, packed=True), lambda each: [each[:2], each[2:]]),
        (Collator(0, packed=True, flash=True), lambda each: [each[:2], each[2:]]),
    ):
        batch = collate(items(some))
        ids_BT = batch["input_ids"]
        expected_BT = torch.where(torch.isin(ids_BT, torch.from_numpy(weighted)), ids_BT.float(), torch.ones(()))
        weights_BT = batch["shift_weights"]
        assert torch.equal(weights_BT, next_tokens(expected_BT)) and weights_BT.dtype == torch.float32
        assert "shift_weights" not in collate(items(plain))


def test_padding_is_masked_and_unlabelled():
    batch = Collator(pad_token_id=7)(
        [[sequence(np.array([1, 2, 3]), np.array([1, 1, 1]))], [sequence(np.array([4]), np.array([1]))]]
    )
    assert batch["input_ids"].shape == (2, 8) and batch["attention_mask"].sum(1).tolist() == [3, 1]
    assert batch["input_ids"][1].tolist() == [4] + [7] * 7
    assert (batch["shift_labels"] != IGNORED).sum(1).tolist() == [
        2,
        0,
    ]  # of each sequence the first token has nothing before it


@pytest.mark.parametrize("size", [2, 3])
def test_shares_of_a_batch_are_its_parts_with_the_next_token_of_each_position(size):
    items = [[sequence(np.arange(3, 3 + n), np.ones(n, bool), np.arange(n) / 2) for n in row] for row in ([3, 4], [6])]
    for packed in (False, True):
        make = functools.partial(Collator, packed=packed)
        shares = [make(7, place=place, shared_by=size)(items) for place in range(size)]
        together = {
            name: torch.cat([share[name] for share in shares], dim=1)
            for name in ("input_ids", "shift_labels", "shift_weights", "position_ids")
        }
        whole = make(7)(items)
        width, counts = whole["input_ids"].shape[1], sum(share["num_tokens"] for share in shares)
        assert torch.equal(together["input_ids"][:, :width], whole["input_ids"])
        for name in ("shift_labels", "shift_weights"):
            assert torch.equal(together[name][:, : width - 1], whole[name][:, : width - 1])
        assert counts[:2].tolist() == whole["num_tokens"][:2].tolist() and counts[2] == together["input_ids"].numel()
        assert ("row_positions" in shares[0]) == packed
        if packed:
            assert torch.equal(shares[-1]["row_positions"], together["position_ids"])
            assert torch.equal(together["position_ids"][:, :width], whole["position_ids"])
        else:
            assert together["position_ids"].tolist() == [[*range(together["input_ids"].shape[1])]] * 3


def test_ranks_that_share_batches_are_given_each_in_turn():
    assert [*repeated("abcde", 2, 3)] == [*"abababcdcdcdeee"]
    items, options = Numbered(np.arange(1, 7)), {"per_step": 2, "seed": 1, "step": lambda: 0, "micro_batch": 2}
    plain, shared = (EpochSampler(items, shared_by=number, **options) for number in (1, 2))
    assert len(shared) == len([*shared]) == 2 * len(plain)
    order = [*plain]
    assert [*shared] == [*order[:2], *order[:2], *order[2:4], *order[2:4], *order[4:], *order[4:]]
