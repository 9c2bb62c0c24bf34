"""Which optimizer is right at which ZeRO stage: its losses beside those of the plain optimizer on the whole model."""

import json

import pytest
import torch
import transformers
from conftest import grid
from ranks import on_ranks, trained
from test_resume_options import _refusals
from tiny import ARCHITECTURES, COMMON, with_labels, write_model, write_texts
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

STEPS, SEQUENCES, RATE = 4, 4, 1e-2
PLAIN = {
    "adamw_torch": lambda weights: torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=RATE),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=RATE),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=RATE),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0),
}
"""Value of `optim`, or type in a DeepSpeed JSON -> the same over whole weights."""


def plain_losses(seen: dict) -> dict[str, list[float]]:
    """The losses of plain PyTorch on what a dsft training saw, all of it in each step."""
    trainer = trained(seen)
    batch = with_labels(trainer.data_collator([trainer.train_dataset[row] for row in range(SEQUENCES)]))
    losses = {}
    for name, make in PLAIN.items():
        model = AutoModelForCausalLM.from_pretrained(seen["model"])
        optimizer = make(list(model.parameters()))
        losses[name] = []
        for _ in range(STEPS):
            loss = model(**batch).loss
            losses[name].append(loss.item())
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def logged_losses(cases: list[dict]) -> list[list[float]]:
    return [[entry["loss"] for entry in trained(case).state.log_history if "loss" in entry] for case in cases]


@pytest.fixture(scope="module")
def case(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    texts = str(write_texts(folder / "texts.jsonl", SEQUENCES, seed=3))

    def make(name: str, stage: str, world: int = 2, **changes) -> dict:
        words = {"max_steps": STEPS, "lr_scheduler_type": "constant", "learning_rate": RATE, "logging_steps": 1}
        words |= {"data": texts, "per_device_train_batch_size": SEQUENCES // world}
        if name[0].isupper():
            file = folder / f"{name}-{stage}.json"
            content = {
                "zero_optimization": {"stage": int(stage)},
                "optimizer": {"type": name, "params": {"torch_adam": True} if name == "AdamW" else {}},
            }
            file.write_text(json.dumps(content | {"zero_allow_untested_optimizer": True}))
            words["zero"] = str(file)
        else:
            words |= {"zero": stage, "optim": name}
        return options(folder / f"{name}-{stage}-{world}", **words | changes)

    return make


@pytest.mark.parametrize("stage", grid(["0", "1", "2", "3"], quick=["2"]))
def test_optimizers_step_as_over_whole_weights(case, stage):
    (plain,) = on_ranks(1, plain_losses, case("sgd", "0", 1, max_steps=1, overwrite=True))
    losses, _ = on_ranks(2, logged_losses, [case(name, stage) for name in PLAIN])
    for name, of_run in zip(PLAIN, losses, strict=True):
        assert of_run == pytest.approx(plain[name], rel=1e-5), name


def test_what_looks_at_whole_weights_is_refused_over_shards(case, tmp_path):
    muon = tmp_path / "muon.json"
    muon.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Muon", "params": {}}}))
    nadam = tmp_path / "nadam.json"
    nadam.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "NAdam", "params": {}}}))
    lion = tmp_path / "lion.json"
    lion.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion", "params": {}}}))
    refused = {
        "factors the moments of whole weights": case("adafactor", "2", 1),
        "fails in its first step over shards": case("adagrad", "2", 1),
        "set max_grad_norm: 0": case("sgd", "2", 1, zero=str(muon), optim=None),
        "zero_allow_untested_optimizer": case("sgd", "2", 1, zero=str(nadam), optim=None),
        "Lion needs a GPU": case("sgd", "2", 1, zero=str(lion), optim=None),
        "dtype=float16 cannot be combined with zero=0": case("sgd", "0", 1, dtype="float16"),
    }
    (messages,) = on_ranks(1, _refusals, list(refused.values()))
    for words, message in zip(refused, messages, strict=True):
        assert words in message, message


def test_recurrent_gemma_has_the_same_normalizer_under_zero_3(options, tmp_path, monkeypatch):
    config = {"lru_width": 48, "head_dim": 12, "num_key_value_heads": 1, "attention_window_size": 64}
    sizes = COMMON | {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 96}
    monkeypatch.setitem(ARCHITECTURES, "recurrent_gemma", (transformers.RecurrentGemmaConfig, sizes | config))
    model = str(write_model(tmp_path / "model", "recurrent_gemma"))
    cases = [options(tmp_path / zero, model=model, zero=zero, logging_steps=1) for zero in "03"]
    (losses,) = on_ranks(1, logged_losses, cases)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
