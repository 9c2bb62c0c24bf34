"""A schedule-free optimizer's average is what dsft evaluates and saves, and training goes on from its other point."""

import pytest
import torch
from conftest import grid, needed_cases, read_json
from ranks import on_ranks, train_all, trained
from safetensors.torch import load_file
from test_resume_options import _refusals
from tiny import write_texts
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from dsft.checkpoints.run_folder import FINAL
from dsft.models.weight_files import ZeroShards

STEPS, SAVED_AT, SEQUENCES = 6, 3, 4
OPTIMIZERS = {
    "adamw": ("AdamWScheduleFree", {"eps": 1e-4, "warmup_steps": 2}),
    "radam": ("RAdamScheduleFree", {"eps": 1e-4}),
    "sgd": ("SGDScheduleFree", {"warmup_steps": 2}),
}
"""Name after `schedule_free_` -> the package's class, and its arguments beside the learning rate."""
RUNS = {
    "zero 0 on 1 rank": (1, {"zero": "0"}),
    "zero 1 on 1 rank": (1, {"zero": "1"}),
    "zero 2 on 1 rank": (1, {"zero": "2"}),
    "zero 0 on 2 ranks": (2, {"zero": "0"}),
    "zero 1 on 2 ranks": (2, {"zero": "1"}),
    "zero 2 on 2 ranks": (2, {"zero": "2"}),
    "radam": (2, {"optim": "schedule_free_radam"}),
    "sgd": (2, {"optim": "schedule_free_sgd"}),
    "resumed on its 2 ranks": (2, {"from": "zero 2 on 2 ranks"}),
    "resumed from 2 ranks on 1": (1, {"zero": "1", "from": "zero 2 on 2 ranks"}),
    "resumed from 1 rank on 2": (2, {"from": "zero 1 on 1 rank"}),
    "resumed in zero 0": (2, {"zero": "0", "from": "zero 0 on 2 ranks"}),
}
"""Name -> number of ranks, options; `from` names the run whose checkpoint it goes on from."""
QUICK = ["zero 0 on 1 rank", "zero 2 on 2 ranks", "radam", "sgd", "resumed from 2 ranks on 1"]
OTHERS = {
    "bf16": (2, {"dtype": "bfloat16"}),
    "best": (
        2,
        {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True, "eval_steps": 3},
    ),
}


def _plain(options: dict, optimizers: dict) -> dict:
    """Train in plain PyTorch on what a dsft training saw, all of it in each step; weights and loss of the average."""
    import schedulefree

    trainer = trained(options)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(SEQUENCES)])
    batch.pop("num_tokens")
    results = {}
    for name, (kind, arguments) in optimizers.items():
        model = AutoModelForCausalLM.from_pretrained(options["model"])
        optimizer = getattr(schedulefree, kind)(model.parameters(), lr=options["learning_rate"], **arguments)
        for _ in range(STEPS):
            optimizer.train()
            model(**batch).loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        training_point = {key: weight.detach().clone() for key, weight in model.named_parameters()}
        optimizer.eval()
        with torch.no_grad():
            loss = model(**batch).loss.item()
        results[name] = (dict(model.named_parameters()), training_point, loss)
    return results


def _plain_and_refusals(seen: dict, optimizers: dict, refused: list[dict]) -> tuple[dict, list[str]]:
    return _plain(seen, optimizers), _refusals(refused)


@pytest.fixture(scope="module")
def runs(request, options, tmp_path_factory):
    needed = needed_cases(request)
    needed |= {RUNS[name][1].get("from") for name in needed & RUNS.keys()}
    folder = tmp_path_factory.mktemp("schedule-free")
    texts = str(write_texts(folder / "texts.jsonl", SEQUENCES, seed=3))

    def case(name: str, world: int, **changes) -> dict:
        words = {"optim": "schedule_free_adamw", "zero": "2", "max_steps": STEPS, "warmup_steps": 2}
        words |= {"lr_scheduler_type": "constant", "adam_epsilon": 1e-4, "adam_beta2": 0.999, "logging_steps": 1}
        words |= {"data": texts, "eval_data": texts, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 9}
        words |= {"save_strategy": "steps", "save_steps": SAVED_AT, "per_device_train_batch_size": SEQUENCES // world}
        return options(folder / name, **words | changes)

    log = ""
    for resumed in (False, True):
        for ranks in (1, 2):
            cases = []
            for name, (world, words) in (RUNS | OTHERS).items():
                if name in needed and world == ranks and ("from" in words) == resumed:
                    changes = {key: value for key, value in words.items() if key != "from"}
                    if resumed:
                        changes["resume_from_checkpoint"] = str(folder / words["from"] / f"checkpoint-{SAVED_AT}")
                    cases.append(case(name, world, **changes))
            log += train_all(ranks, cases, folder / f"log-{ranks}-{resumed}")
    seen = case("seen", 1, optim="sgd", max_steps=1, save_strategy="no")
    refused = {"3": {}, "2-offload": {}, "0": {"dtype": "bfloat16"}}
    cases = [case(f"refused {zero}", 1, zero=zero, **words) for zero, words in refused.items()]
    ((plain, refusals),) = on_ranks(1, _plain_and_refusals, seen, OPTIMIZERS, cases)
    return folder, log, plain, dict(zip(refused, refusals, strict=True))


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(RUNS, QUICK))
def test_the_final_model_and_its_loss_are_those_of_plain_pytorch(runs, name):
    folder, log, plain, _ = runs
    average, training_point, loss = plain[name if name in plain else "adamw"]
    run = folder / name
    assert (run / FINAL).is_dir(), log[-5000:]
    for file in (run / FINAL, run / f"checkpoint-{STEPS}"):
        weights = load_file(file / "model.safetensors")
        largest = max((weights[key] - average[key]).abs().max() for key in weights)
        assert largest < 1e-6, (file, largest)
    assert max((average[key] - training_point[key]).abs().max() for key in average) > 1e-5
    assert read_json(run / "run.json")["results"]["eval_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.cases("best")
def test_the_best_checkpoint_that_is_loaded_at_the_end_is_saved_as_it_is(runs):
    run = runs[0] / "best"
    final, best, last = (
        load_file(run / name / "model.safetensors") for name in (FINAL, f"checkpoint-{SAVED_AT}", f"checkpoint-{STEPS}")
    )
    assert all(torch.equal(final[name], best[name]) for name in best)
    assert not all(torch.equal(final[name], last[name]) for name in best)
    first = next(entry["eval_loss"] for entry in read_json(run / "run.json")["results"]["log"] if "eval_loss" in entry)
    assert read_json(run / "run.json")["results"]["eval_loss"] == pytest.approx(first, rel=1e-7)


@pytest.mark.cases("bf16")
def test_in_bfloat16_the_average_is_rounded_and_the_shards_hold_it_in_float32(runs):
    checkpoint = runs[0] / "bf16" / f"checkpoint-{STEPS}"
    weights, shards = load_file(checkpoint / "model.safetensors"), ZeroShards(checkpoint)
    assert shards.counters["train_mode"] is False and shards.counters["k"] == STEPS
    for name, weight in weights.items():
        assert torch.equal(shards.read(name).to(torch.bfloat16).view(weight.shape), weight), name
    assert any(not torch.equal(shards.read(name), shards.read(name, "z")) for name in weights)


@pytest.mark.cases()
@pytest.mark.parametrize(("zero", "why"), [("3", "each sub-group"), ("2-offload", "CPUAdam"), ("0", "zero gradients")])
def test_where_deepspeed_would_average_otherwise_it_is_refused_with_the_reason(runs, zero, why):
    refusal = runs[3][zero]
    assert f"optim=schedule_free_adamw cannot be combined with zero={zero}" in refusal and why in refusal, refusal
