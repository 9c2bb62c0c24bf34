"""A turn's weight multiplies the loss of its tokens: trainings against plain PyTorch, from the chat to the weights."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import transformers
from conftest import grid, read_json
from peft import PeftModel
from ranks import on_ranks, trained
from tiny import sentences, write_jsonl
from torch.nn import functional

from dsft.models import chunked_head

pytestmark = pytest.mark.launch
WEIGHTS = (0.25, 1, None, 3, 0, 1.5)
"""Of the turns of chats, in this order again and again."""
RATE = 0.5
CASES = list(product([1, 2], ["0", "3"], ["full", "lora"], [False, True]))
"""Ranks, ZeRO stage, method, and whether the first and the third kind of batch have their loss in tiles, or the others;
of each, batches of every kind.
"""
QUICK = [(2, "3", "full", True)]
KINDS = {
    "padded": {"global_batch_size": 16},
    "packed": {"packing": True, "global_batch_size": 16},
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


def train_in_tiles(cases: list[dict]) -> None:
    chunked_head.TILE_LOGITS = 384 * 11  # 11 rows; the ranks end after this
    for options in cases:
        trained(options)


def logged(folder, name: str) -> list[float]:
    return [entry[name] for entry in read_json(folder / "run.json")["results"]["log"] if name in entry]


@pytest.mark.parametrize(("world", "zero", "method", "tiles_odd"), grid(CASES, QUICK))
def test_a_step_and_its_gradients_are_those_by_hand(world, zero, method, tiles_odd, options, tiny, tmp_path):
    """One step of plain SGD over all chats, in micro batches of other numbers of tokens: weights move by gradients."""
    model_folder, rows = tiny / "chat", chats(16)
    cases = {
        kind: changes | {"tiled_loss": tiles_odd == (number % 2 == 0)}
        for number, (kind, changes) in enumerate(KINDS.items())
    }
    common = {
        "model": str(model_folder),
        "data": str(write_jsonl(tmp_path / "chats.jsonl", rows)),
        "eval_data": str(tmp_path / "chats.jsonl"),
        "zero": zero,
        "method": method,
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "dtype": "float32",
        "data_cache": str(tmp_path / "cache"),
        "lora_dropout": 0.0 if method == "lora" else None,
    }
    trainings = [options(tmp_path / name, **common | changes) for name, changes in cases.items()]
    on_ranks(world, train_in_tiles, trainings, log=tmp_path / "log")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    for name, changes in cases.items():
        run, final = tmp_path / name, tmp_path / name / "final"
        assert read_json(run / "run.json")["config"]["tiled_loss"] == changes["tiled_loss"]
        model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
        after = transformers.AutoModelForCausalLM.from_pretrained(model_folder if method == "lora" else final)
        if method == "lora":
            model, after = (PeftModel.from_pretrained(each, final, is_trainable=True) for each in (model, after))
            for parameter_name, parameter in model.named_parameters():
                # In the first step B is 0, so A has no gradient: A after it is the one that B's gradient was made with.
                parameter.requires_grad_("lora_B" in parameter_name)
                parameter.data.mul_("lora_B" not in parameter_name)
        before = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
        expected = by_hand(model, tokenizer, rows)
        (expected.weighted / expected.tokens).backward()
        gradients, moved = {key: p.grad for key, p in model.named_parameters()}, dict(after.named_parameters())
        largest = max(gradients[key].abs().max().item() for key in before)
        for key, start in before.items():
            gradient = (start - moved[key].detach()) / RATE
            torch.testing.assert_close(
                gradient, gradients[key], rtol=0, atol=1e-6 * max(1, largest), msg=f"{name} {key}"
            )
        assert len(before) > 10 and largest > 0.01
        weighted = expected.weighted.item() / expected.tokens
        assert logged(run, "weighted_loss") == pytest.approx([weighted], rel=1e-6), name
        assert logged(run, "loss") == pytest.approx([expected.nats / expected.tokens], rel=1e-6), name
        assert logged(run, "num_trained_tokens") == [expected.tokens]
        assert not logged(run, "aux_loss")
        with torch.no_grad():
            held_out = by_hand(after, tokenizer, rows)
        assert logged(run, "eval_loss") == pytest.approx([held_out.nats / held_out.tokens], rel=1e-6), name
        assert logged(run, "eval_tokens") == [held_out.tokens]


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
    on_ranks(2, train_in_tiles, [case], log=tmp_path / "log")
    resume = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2")}
    on_ranks(1, train_in_tiles, [case | resume | {"output_dir": str(tmp_path / "on")}], log=tmp_path / "on-log")
    whole, rest = (logged(tmp_path / name, "weighted_loss") for name in ("run", "on"))
    assert len(whole) == 4 and rest[-2:] == pytest.approx(whole[2:], rel=2e-5)
    rows = chats(24)
    rows[0]["messages"][1]["weight"] = 2
    other = {"data": str(write_jsonl(tmp_path / "others.jsonl", rows)), "output_dir": str(tmp_path / "other")}
    with pytest.raises(AssertionError, match="content of data"):
        on_ranks(1, train_in_tiles, [case | resume | other], log=tmp_path / "other-log")


def test_weights_keep_fp32_where_the_model_is_in_half_precision(options, tiny, tmp_path):
    """0.3 is 0.30078 in bf16."""
    rows = chats(8)
    for row in rows:
        for message in row["messages"][1::2]:
            message["weight"] = 0.3
    data = str(write_jsonl(tmp_path / "chats.jsonl", rows))
    changes = {"model": str(tiny / "chat"), "data": data, "dtype": "bfloat16", "logging_steps": 1}
    on_ranks(1, train_in_tiles, [options(tmp_path / "run", **changes)], log=tmp_path / "log")
    losses = [logged(tmp_path / "run", name) for name in ("weighted_loss", "loss")]
    assert losses[0] == pytest.approx([0.3 * loss for loss in losses[1]], rel=1e-5) and len(losses[0]) == 2


def test_chats_whose_weights_are_1_or_0_are_prepared_as_those_without(options, tiny, tmp_path):
    """Their losses have the same bits as those of a run that names no weight."""
    rows = chats(8)
    for row in rows:
        for message in row["messages"][1::2]:
            message["weight"] = 1
    plain = [{"messages": [{key: m[key] for key in ("role", "content")} for m in row["messages"]]} for row in rows]
    cases = [
        options(
            tmp_path / name,
            model=str(tiny / "chat"),
            data=str(write_jsonl(tmp_path / f"{name}.jsonl", data)),
            data_cache=str(tmp_path / f"cache-{name}"),
            logging_steps=1,
        )
        for name, data in (("ones", rows), ("plain", plain))
    ]
    on_ranks(1, train_in_tiles, cases, log=tmp_path / "log")
    losses = [logged(tmp_path / name, "loss") for name in ("ones", "plain")]
    assert not any(logged(tmp_path / name, "weighted_loss") for name in ("ones", "plain"))
    assert losses[0] == losses[1] and len(losses[0]) == 2
