"""Ranks that share each sequence train what one rank alone trains, in every stage of ZeRO."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import grid, read_json
from ranks import on_ranks, train_all, trained
from safetensors.torch import load_file
from tiny import write_model, write_tokenizer

from dsft.config.deepspeed import read_zero_file
from dsft.errors import UserError

pytestmark = pytest.mark.launch
STEPS = 2
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e6}
"""Of which the weights move by the gradients themselves."""


def focal(logits, labels):
    nats = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-nats)) ** 2 * nats


EVERY_OTHER = {"every_n_layers": 2, "offload": True}
KINDS = {
    "padded": {},
    "packed": {"packing": True},
    "tiled": {"tiled_loss": True},
    "checkpointed": {"activation_checkpointing": True, "packing": True},
    "offloaded": {"activation_checkpointing": True, "activation_checkpointing_kwargs": EVERY_OTHER},
    "lora": {"method": "lora", "lora_r": 4},
    "own": {"compute_loss": focal},
    "json": {},
}
RANKS = {"2": (2, 2), "4by2": (4, 2), "4": (4, 4)}
"""Name -> ranks, and how many of them share a sequence. The tiny models have 4 heads and 2 key heads."""
CASES = [
    *(f"2-3-llama-{kind}" for kind in KINDS),
    *(f"2-{zero}-llama-padded" for zero in "012"),
    *(f"2-3-{architecture}-packed" for architecture in ("qwen3", "gpt2", "mixtral")),
    *(f"4by2-{zero}-llama-packed" for zero in "012"),
    *(f"4by2-3-llama-{kind}" for kind in ("padded", "packed", "checkpointed", "json")),
    *(f"4-3-llama-{kind}" for kind in ("padded", "lora", "own")),
]
"""Ranks, ZeRO stage, architecture, kind."""
QUICK = [*(f"2-3-llama-{kind}" for kind in ("padded", "packed", "tiled", "offloaded", "own")), "2-1-llama-padded"]
QUICK += ["2-3-mixtral-packed"]


@pytest.fixture(scope="module")
def runs(request, options, tiny, tmp_path_factory):
    """Trains what selected tests need, each case beside its like on one rank; returns the folder of all."""
    folder = tmp_path_factory.mktemp("long")
    models = {name: str(write_model(folder / name, name)) for name in ("llama", "qwen3", "gpt2", "mixtral")}
    specs = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    selected = [spec["case"] for spec in specs if "case" in spec]
    common = SGD | {"data": str(tiny / "pairs.jsonl"), "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    common |= {"eval_data": str(tiny / "pairs.jsonl"), "eval_strategy": "steps", "eval_steps": STEPS}

    def case(name: str, architecture: str, kind: str, micro: int, accumulation: int, **more) -> dict:
        of_batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
        return options(folder / name, model=models[architecture], **(common | of_batch | KINDS[kind] | more))

    for world in (1, 2, 4):
        work = {}
        for name in selected:
            ranks, zero, architecture, kind = name.split("-")
            number, shared_by = RANKS[ranks]
            teams = number // shared_by
            if world == 1:  # one micro batch where the others have several
                alone = f"1-{architecture}-{kind}"
                micro, accumulation = (None, 4) if kind == "budget" else (8, 1)
                work[alone] = case(alone, architecture, kind, micro, accumulation, zero="1")
            elif world == number:
                micro, accumulation = (None, 4 // teams) if kind == "budget" else (4 // teams, 2)
                if kind == "json":  # that says how many sequences a step has
                    written = read_zero_file(zero, []) | {"train_batch_size": 8}
                    (folder / f"{name}.json").write_text(json.dumps(written))
                    zero = str(folder / f"{name}.json")
                work[name] = case(name, architecture, kind, micro, accumulation, zero=zero, sequence_parallel=shared_by)
        if work:
            train_all(world, [*work.values()], folder / f"log-{world}")
    return folder


def log_of(run: Path, name: str) -> list[float]:
    results = read_json(run / "run.json")["results"]
    return [entry[name] for entry in results["log"] if "loss" in entry]


def moved(run: Path, base: Path) -> torch.Tensor:
    """What the training added to the weights."""
    (file,) = (run / "final").glob("*.safetensors")
    after, before = load_file(file), load_file(base / "model.safetensors")
    return torch.cat([(value - before.get(name, 0)).flatten() for name, value in sorted(after.items())])


@pytest.mark.parametrize("case", grid(CASES, QUICK))
def test_ranks_that_share_sequences_have_the_losses_and_gradients_of_one(runs, case):
    _, zero, architecture, kind = case.split("-")
    shared, alone = runs / case, runs / f"1-{architecture}-{kind}"
    names = ["loss"]
    if zero != "0":  # under which DeepSpeed keeps no norm in float32
        names.append("grad_norm")
    if kind == "own":
        names.append("own_loss")
    for name in names:
        assert log_of(shared, name) == pytest.approx(log_of(alone, name), rel=1e-4)
    results = [read_json(run / "run.json")["results"] for run in (shared, alone)]
    for name in ("tokens_seen", "trained_tokens", "eval_tokens"):
        assert results[0][name] == results[1][name]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-4)
    change, expected = (moved(run, runs / architecture) for run in (shared, alone))
    assert (change - expected).abs().max() < 1e-4 * expected.abs().max()


RESUMED = {"2-same": (2, 2), "2-alone": (2, 1), "4-by-2": (4, 2), "1-alone": (1, 1)}
"""Name -> ranks, and how many of them share a sequence, of what resumes a training on 2 ranks that share each."""


@pytest.fixture(scope="module")
def resumed(options, tiny, tmp_path_factory):
    """Trains 5 steps of an epoch of 8 in pairs of ranks, then from step 2 in other ways."""
    folder = tmp_path_factory.mktemp("resumed")

    def case(name: str, shared_by: int, **more) -> dict:
        batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "sequence_parallel": shared_by}
        steps = {"max_steps": 5, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "zero": "3"}
        steps["save_total_limit"] = 9
        return options(folder / name, data=str(tiny / "pairs.jsonl"), **batch, **steps, **more)

    checkpoint = {"resume_from_checkpoint": str(folder / "whole" / "checkpoint-2")}
    train_all(2, [case("whole", 2)], folder / "log")
    for world in sorted({world for world, _ in RESUMED.values()}):
        work = [case(name, size, **checkpoint) for name, (ranks, size) in RESUMED.items() if ranks == world]
        train_all(world, work, folder / f"log-{world}")
    return folder


@pytest.mark.parametrize("name", grid(RESUMED, []))
def test_a_resume_in_mid_epoch_on_other_ranks_goes_on_with_the_same_batches(resumed, name):
    logs = [log_of(resumed / run, "loss") for run in ("whole", name)]
    assert len(logs[0]) == len(logs[1]) == 5
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)


def refusals(cases: list[dict]) -> list[str]:
    said = []
    for options in cases:
        with pytest.raises(UserError) as refused:
            trained(options)
        said.append(str(refused.value))
    return said


def test_what_cannot_share_sequences_is_refused_before_weights_load(options, tiny, tmp_path):
    transformers.MambaConfig(vocab_size=384, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    write_tokenizer(tmp_path / "mamba")
    cases = {
        "must divide the number of ranks, which is 2": {"sequence_parallel": 3},
        "use sdpa or flash_attention_2": {"attn_implementation": "eager"},
        "torch_compile cannot be combined": {"torch_compile": True},
        "neftune_noise_alpha cannot be combined": {"neftune_noise_alpha": 5.0},
        "outside of attention": {
            "model": str(tmp_path / "mamba" / "config.json"),
            "tokenizer": str(tmp_path / "mamba"),
        },
    }
    work = [options(tmp_path / "run", **{"sequence_parallel": 2} | changes) for changes in cases.values()]
    for said in on_ranks(2, refusals, work):
        for words, text in zip(cases, said, strict=True):
            assert words in text and "sequence_parallel=" in text
