"""Scoring: exact products, and heads that cannot be computed in parts."""

import json
import shutil

import numpy as np
import pytest
import torch
from ranks import on_ranks
from tiny import ARCHITECTURES
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dsft.api import evaluate
from dsft.config.options import EvalConfig
from dsft.data.batches import sequence
from dsft.models.tiles import VOCAB_TILE, ChunkedHead
from dsft.perplexity import scoring
from dsft.perplexity.results import Recorder
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.windows import Windows, windows_of_sequences
from dsft.units import IGNORED

SLICE = 5000
"""Logits of one forward here: 13 positions of one row with 384 entries."""


def scored(options: dict) -> dict:
    """Nats of documents, columns of pairs, and the most logits that a forward made, with a head that is not split."""
    made, make_logits = [], scoring._logits

    def counted(*args) -> torch.Tensor:
        logits = make_logits(*args)
        made.append(logits.numel())
        return logits

    scoring.SLICE_LOGITS, scoring._logits = SLICE, counted
    ChunkedHead.agrees = lambda self, ids_BT: False
    nats, pairs = _in_parts(options)
    return {"nats": nats, "pairs": pairs, "most": max(made)}


def _in_parts(options: dict) -> tuple[list, list]:
    result = next(evaluate(EvalConfig(**options))).perplexity
    return result.document_nats.tolist(), np.asarray(result.document_pairs).tolist()


@pytest.mark.parametrize("has_reference", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_slices_of_positions_give_the_same_on_any_number_of_ranks(tiny, tmp_path, has_reference):
    options = {"model": [str(tiny / "model")], "data": [str(tiny / "held_out.jsonl")], "mode": "rolling"}
    options |= {"seq_len": 32, "batch_tokens": 200, "zero": "0"}
    if has_reference:
        folder = shutil.copytree(tiny / "model", tmp_path / "other")
        other = AutoModelForCausalLM.from_pretrained(folder)
        other.get_output_embeddings().weight.data.mul_(1.1)
        other.save_pretrained(folder)
        options["reference"] = str(folder)
    (expected,) = on_ranks(1, scored, options)
    assert 0 < expected["most"] <= SLICE
    ((nats, pairs),) = on_ranks(1, _in_parts, options)
    np.testing.assert_allclose(expected["nats"], nats, rtol=1e-5)
    np.testing.assert_allclose(expected["pairs"], pairs, rtol=1e-4, atol=1e-4)
    gathers = tmp_path / "zero.json"  # also small parameters are gathered for each forward
    gathers.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    for zero in ("0", str(gathers)):
        for of_rank in on_ranks(2, scored, options | {"zero": zero}):
            assert of_rank == expected | {"most": of_rank["most"]} and of_rank["most"] <= SLICE


def test_a_head_in_parts_slices_of_positions_and_all_logits_are_compared_side_by_side(monkeypatch):
    """The third model's forward knows no `logits_to_keep`, as TrOCR's."""

    class MakesAllLogits(LlamaForCausalLM):
        def forward(self, input_ids=None, use_cache=None):
            return super().forward(input_ids=input_ids, use_cache=use_cache)

    config, values = ARCHITECTURES["llama"]
    torch.manual_seed(0)
    models = [cls(config(**values)).eval() for cls in (LlamaForCausalLM, LlamaForCausalLM, MakesAllLogits)]
    batch = {"input_ids": torch.randint(1, 384, (3, 20)), "targets": torch.randint(1, 384, (3, 20))}
    batch["targets"][:, ::3] = batch["targets"][1, 4:] = IGNORED
    monkeypatch.setattr(scoring, "SLICE_LOGITS", 7 * 3 * 384)  # 7, 7 and 6 of 20 positions
    numbers, make_logits = [], scoring._logits
    monkeypatch.setattr(scoring, "_logits", lambda *args: numbers.append(args[2]) or make_logits(*args))

    in_parts, wanted = ChunkedHead(models[0], VOCAB_TILE["cpu"]), batch["targets"] != IGNORED
    with torch.no_grad():
        for pair, scorers in (((0, 1), [in_parts, models[1]]), ((1, 2), models[1:]), ((2, 0), [models[2], in_parts])):
            scored_KN = scoring.score(scorers, batch)
            for number, scored_N in zip(pair, scored_KN, strict=False):  # nats of both, then how they differ
                logits = models[number](input_ids=batch["input_ids"]).logits[wanted]
                expected = torch.nn.functional.cross_entropy(logits, batch["targets"][wanted], reduction="none")
                torch.testing.assert_close(scored_N, expected.double(), rtol=1e-5, atol=1e-6)
    # The third model alone makes all logits at once; beside another it is cut where that one is.
    assert [positions.start for positions in numbers] == [0, 7, 14, 0, 0, 7, 7, 14, 14, 0]


class Looks(torch.nn.Module):
    """Keeps how float32 is multiplied when it is about to be scored."""

    def eval(self):
        self.seen = (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
        raise InterruptedError


def evaluated(model: torch.nn.Module, windows: Windows, recorder: Recorder | None = None) -> None:
    how = {"pad_token_id": 0, "batch_tokens": 8, "device": torch.device("cpu"), "collective_forward": False}
    evaluate_windows(model, windows, recorder=recorder, **how)


@pytest.mark.parametrize("everywhere", ["tf32", "none"])
@pytest.mark.parametrize("products", ["tf32", "ieee"])
def test_an_evaluation_multiplies_exactly_and_training_goes_on_as_before(everywhere, products):
    settings = torch.backends, torch.backends.cuda.matmul
    before = [setting.fp32_precision for setting in settings]
    model, windows = Looks(), windows_of_sequences([sequence(np.arange(8), np.ones(8, bool))])
    try:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = everywhere, products
        with pytest.raises(InterruptedError):
            evaluated(model, windows)
        assert model.seen == ("ieee", "ieee")
        assert [setting.fp32_precision for setting in settings] == [everywhere, products]
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def test_products_follow_what_a_later_training_sets_everywhere():
    model, windows = Looks(), windows_of_sequences([sequence(np.arange(8), np.ones(8, bool))])
    products, before = torch.backends.cuda.matmul, torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"  # as the option tf32 does
        with pytest.raises(InterruptedError):
            evaluated(model, windows)
        assert products.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert products.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision, products.fp32_precision = before, "none"


def test_passes_over_all_windows_and_documents_do_not_grow_with_the_batches(tiny, tmp_path, monkeypatch):
    """A pass for each batch took minutes to the first batch of a corpus of 1 GiB."""
    passes = []

    def counted(name: str) -> property:
        whole = getattr(Windows, name).fget
        return property(lambda self: passes.append(name) or whole(self))

    for name in ("lengths", "document_starts"):
        monkeypatch.setattr(Windows, name, counted(name))
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    taken = {}
    for number in (2, 12):
        windows = windows_of_sequences([sequence(np.arange(8), np.ones(8, bool))] * number)
        evaluated(model, windows, Recorder(windows, tokens=tmp_path / str(number)))
        taken[number], passes[:] = sorted(passes), []
    assert taken[2] == taken[12] and {*taken[2]} == {"lengths", "document_starts"}
