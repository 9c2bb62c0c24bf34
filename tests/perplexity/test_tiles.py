"""A model whose head cannot be computed in parts is scored without the logits of a whole batch."""

import json
import shutil

import numpy as np
import pytest
import torch
from ranks import on_ranks
from tiny import ARCHITECTURES
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dsft.config.options import EvalConfig
from dsft.models.head import VOCAB_TILE, ChunkedHead
from dsft.perplexity import scoring
from dsft.perplexity.evaluation import evaluate
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


@pytest.mark.parametrize("has_reference", [False, True])
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

    def nats(of_models, targets_N):
        logits = [torch.cat(list(of_model), dim=1) for of_model in of_models]
        return torch.stack([torch.nn.functional.cross_entropy(each, targets_N, reduction="none") for each in logits])

    with torch.no_grad():
        scorers = [ChunkedHead(models[0], VOCAB_TILE["cpu"]), *models[1:]]
        scored_KN = scoring.score_in_tiles(scorers, batch, nats, columns=3)
        assert [positions.start for positions in numbers] == [0, 0, 7, 7, 14, 14]
        wanted = batch["targets"] != IGNORED
        for model, scored_N in zip(models, scored_KN, strict=True):
            logits = model(input_ids=batch["input_ids"]).logits[wanted]
            expected = torch.nn.functional.cross_entropy(logits, batch["targets"][wanted], reduction="none")
            torch.testing.assert_close(scored_N, expected.double(), rtol=1e-5, atol=1e-6)
