"""A turn's weight multiplies the loss of its tokens: trainings against plain PyTorch, from the chat to the weights."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import transformers
from conftest import grid, read_json
from peft import PeftModel
from ranks import on_ranks, trained
from safetensors.torch import load_file
from tiny import sentences, write_jsonl
from torch.nn import functional

from dsft.models import tiled_loss

pytestmark = pytest.mark.launch
WEIGHTS = (0.25, 1, None, 3, 0, 1.5)
"""Of the turns of chats, in this order again and again."""
RATE = 0.5
CASES = list(product([1, 2], ["0", "3"], ["full", "lora"], ["padded", "packed", "filled", "streamed"], [False, True]))
"""Ranks, ZeRO stage, method, what batches are made of, and whether the loss is computed in tiles."""
QUICK = [(2, "3", "full", "packed", True), (2, "0", "lora", "padded", False), (1, "0", "full", "streamed", False)]
KINDS = {
    "padded": {"global_batch_size": 16},
    "packed": {"packing": True, "global_batch_size": 16},
    "filled": {"batch_tokens": 100, "per_device_train_batch_size": None, "gradient_accumulation_steps": 16},
    "streamed": {"streaming": True, "shuffle_buffer": 1, "global_batch_size": 16},
}


def chats(number: int, *, seed: int = 0) -> list[dict]:
    """Chats of two turns; the last half have no weights, so that batches without any stand beside others."""
    texts, rows = iter(sentences(4 * number, seed=seed, longest=6)), []
    for row in range(number):
        messages = []
        for turn in range(2):
            weight = WEIGHTS[(2 * row + turn) % len(WEIGHTS)]
            given = {} if row >= number // 2 or weight is None else {"weight": weight}
            messages += [{"role": "user", "content": next(texts)}]
            messages += [{"role": "assistant", "content": next(texts)} | given]
        rows.append({"messages": messages})
    return rows


@dataclass
class ByHand:
    """Sums over chats, each run alone."""

    weighted: torch.Tensor
    """Nats times weights, with a graph."""
    nats: float
    tokens: int
    """Of a weight above 0."""


def by_hand(model, tokenizer, rows: list[dict]) -> ByHand:
    sums = ByHand(torch.zeros(()), 0.0, 0)
    for row in rows:
        ids, weights = [], []
        for message in row["messages"]:
            head = tokenizer.encode(f"<|{message['role']}|>")
            body = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
            ids += head + body
            weight = message.get("weight", 1) if message["role"] == "assistant" else 0
            weights += [0.0] * len(head) + [float(weight)] * len(body)
        logits_TV = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        nats_T = functional.cross_entropy(logits_TV, torch.tensor(ids[1:]), reduction="none")
        weights_T = torch.tensor(weights[1:])
        sums.weighted = sums.weighted + (nats_T * weights_T).sum()
        sums.nats += nats_T[weights_T > 0].sum().item()
        sums.tokens += int((weights_T > 0).sum())
    return sums


def train_in_tiles(options: dict) -> None:
    tiled_loss.TILE_LOGITS = 384 * 11  # 11 rows; the ranks end after this
    trained(options)


def logged(folder, name: str) -> list[float]:
    return [entry[name] for entry in read_json(folder / "run.json")["results"]["log"] if name in entry]


@pytest.mark.parametrize(("world", "zero", "method", "kind", "tiled"), grid(CASES, QUICK))
def test_a_step_and_its_gradients_are_those_by_hand(world, zero, method, kind, tiled, options, tiny, tmp_path):
    """One step of plain SGD over all chats, in micro batches of other numbers of tokens: weights move by gradients."""
    model_folder, rows = tiny / "chat", chats(16)
    case = options(
        tmp_path / "run",
        model=str(model_folder),
        data=str(write_jsonl(tmp_path / "chats.jsonl", rows)),
        zero=zero,
        method=method,
        tiled_loss=tiled,
        max_steps=1,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        dtype="float32",
        eval_data=str(tmp_path / "chats.jsonl"),
        data_cache=str(tmp_path / "cache"),
        lora_dropout=0.0 if method == "lora" else None,
        **KINDS[kind],
    )
    on_ranks(world, train_in_tiles, case, log=tmp_path / "log")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    if method == "lora":  # its A has no gradient in the first step, in which B is 0: it is the one that B was made with
        model = PeftModel.from_pretrained(model, tmp_path / "run" / "final", is_trainable=True)
        after = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_B" in name}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name)
            if "lora_B" in name:
                parameter.data.zero_()
    else:
        after = load_file(tmp_path / "run" / "final" / "model.safetensors")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in after}
    expected = by_hand(model, tokenizer, rows)
    (expected.weighted / expected.tokens).backward()
    parameters = dict(model.named_parameters())
    largest = max(parameters[name].grad.abs().max().item() for name in before)
    for name, start in before.items():
        torch.testing.assert_close(
            (start - after[name]) / RATE, parameters[name].grad, rtol=0, atol=1e-6 * max(1, largest)
        )
    assert len(before) > 10 and largest > 0.01
    assert logged(tmp_path / "run", "weighted_loss") == pytest.approx(
        [expected.weighted.item() / expected.tokens], rel=1e-6
    )
    assert logged(tmp_path / "run", "loss") == pytest.approx([expected.nats / expected.tokens], rel=1e-6)
    assert logged(tmp_path / "run", "num_trained_tokens") == [expected.tokens]
    assert not logged(tmp_path / "run", "aux_loss")
    final = (
        PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "run" / "final"
        )
        if method == "lora"
        else transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    )
    with torch.no_grad():
        held_out = by_hand(final, tokenizer, rows)
    assert logged(tmp_path / "run", "eval_loss") == pytest.approx([held_out.nats / held_out.tokens], rel=1e-6)
    assert logged(tmp_path / "run", "eval_tokens") == [held_out.tokens]


def test_a_run_goes_on_with_its_weights_on_fewer_ranks_and_not_with_others(options, tiny, tmp_path):
    case = options(
        tmp_path / "run",
        model=str(tiny / "chat"),
        data=str(write_jsonl(tmp_path / "chats.jsonl", chats(24))),
        zero="2",
        max_steps=4,
        global_batch_size=8,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=9,
        data_cache=str(tmp_path / "cache"),
    )
    on_ranks(2, train_in_tiles, case, log=tmp_path / "log")
    resume = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2")}
    on_ranks(1, train_in_tiles, case | resume | {"output_dir": str(tmp_path / "on")}, log=tmp_path / "on-log")
    whole, rest = (logged(tmp_path / name, "weighted_loss") for name in ("run", "on"))
    assert len(whole) == 4 and rest[-2:] == pytest.approx(whole[2:], rel=2e-5)
    rows = chats(24)
    rows[0]["messages"][1]["weight"] = 2
    other = {"data": str(write_jsonl(tmp_path / "others.jsonl", rows)), "output_dir": str(tmp_path / "other")}
    with pytest.raises(AssertionError, match="content of data"):
        on_ranks(1, train_in_tiles, case | resume | other, log=tmp_path / "other-log")


def test_chats_whose_weights_are_1_or_0_are_prepared_as_those_without(options, tiny, tmp_path):
    """Their store has no column of weights, and their losses the same bits as a run that names no weight."""
    rows = chats(8)
    for row in rows:
        for message in row["messages"][1::2]:
            message["weight"] = 1
    plain = [{"messages": [{key: m[key] for key in ("role", "content")} for m in row["messages"]]} for row in rows]
    losses = []
    for name, data in (("ones", rows), ("plain", plain)):
        case = options(
            tmp_path / name,
            model=str(tiny / "chat"),
            data=str(write_jsonl(tmp_path / f"{name}.jsonl", data)),
            data_cache=str(tmp_path / f"cache-{name}"),
            logging_steps=1,
        )
        on_ranks(1, train_in_tiles, case, log=tmp_path / "log")
        losses.append(logged(tmp_path / name, "loss"))
        assert not logged(tmp_path / name, "weighted_loss")
        assert not list((tmp_path / f"cache-{name}").rglob("weights.bin"))
    assert losses[0] == losses[1] and len(losses[0]) == 2
