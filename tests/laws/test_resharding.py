"""Trainings that resume on other ranks, in another ZeRO stage or with another offload equal uninterrupted ones."""

from itertools import product
from pathlib import Path

import pytest
from conftest import flags, grid, needed_cases, read_json
from ranks import run_entry, train_all
from tiny import write_jsonl

pytestmark = pytest.mark.launch
STAGES, METHODS = ("1", "2", "3"), ("full", "lora")
STEPS, SAVED_AT = 5, 3
SEQUENCES_PER_STEP = 12
"""Divisible by 1, 2 and 3 ranks. The data's 21 sequences are not: each epoch of 2 steps ends in one that is not full;
the save lies within the second epoch.
"""


@pytest.fixture(scope="module")
def losses(request, options, tiny, tmp_path_factory):
    """By name of a run: its losses from the first step after the save on; what all printed; the evaluations. Four
    worlds of ranks, each of many runs: those that selected tests need.
    """
    folder = tmp_path_factory.mktemp("resharding")

    def case(name: str, *, method: str, zero: str, source: str = "", **more) -> dict:
        resumed = (
            {"resume_from_checkpoint": str(folder / source / f"checkpoint-{SAVED_AT}")}
            if source
            else {"save_strategy": "steps", "save_steps": SAVED_AT, "save_total_limit": 9}
        )
        lora = {"lora_r": 4, "lora_dropout": 0.0} if method == "lora" else {}
        return options(
            folder / name,
            method=method,
            zero=zero,
            max_steps=STEPS,
            global_batch_size=SEQUENCES_PER_STEP,
            logging_steps=1,
            **{"weight_decay": 0.1} | resumed | lora | more,
        )

    def train(world: int, cases: list[dict]) -> None:
        cases = [case for case in cases if Path(case["output_dir"]).name in needed]
        made.update(Path(case["output_dir"]).name for case in cases)
        if not cases:
            return
        outputs.append(train_all(world, cases, folder / f"log-{len(outputs)}"))

    outputs: list[str] = []
    made: set[str] = set()
    needed = needed_cases(request)
    best = {
        "data": str(write_jsonl(folder / "unlike_held_out.jsonl", [{"text": "z" * 300}] * 40)),
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_data": str(tiny / "held_out.jsonl"),
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 9,
    }
    kinds = [(method, zero) for method in METHODS for zero in STAGES]
    train(
        2,
        [case(f"two-{method}-{zero}", method=method, zero=zero) for method, zero in kinds]
        + [case("best-of-two", method="full", zero="2", **best)]
        + [
            case("two-offload", method="full", zero="3-offload", weight_decay=0.0),
            case("two-plain", method="full", zero="3", weight_decay=0.0),
            case("two-bf16", method="full", zero="2", bf16=True),
        ],
    )
    train(
        1,
        [case("best-on-one", method="full", zero="1", source="best-of-two", **best)]
        + [case(f"one-{method}-{zero}", method=method, zero=zero) for method, zero in kinds]
        + [
            case(f"two-to-one-{method}-{zero}", method=method, zero=zero, source=f"two-{method}-{zero}")
            for method, zero in kinds
        ],
    )
    train(
        3,
        [
            case(f"two-to-three-{method}-{zero}", method=method, zero=zero, source=f"two-{method}-{zero}")
            for method, zero in kinds
        ],
    )
    train(
        2,
        [
            case(f"one-to-two-{method}-{zero}", method=method, zero=zero, source=f"one-{method}-{zero}")
            for method, zero in kinds
        ]
        + [
            *(
                case(f"{then}-becomes-{now}-{method}", method=method, zero=now, source=f"two-{method}-{then}")
                for method in METHODS
                for then, now in (("3", "2"), ("2", "3"), ("1", "3"))
            ),
            # DeepSpeed's optimizer for offload decays norms too: without weight_decay both are the same.
            *(
                case(f"offload-begins-{zero}", method="full", zero=zero, weight_decay=0.0, source="two-plain")
                for zero in ("2-offload", "3-offload")
            ),
            case("offload-ends", method="full", zero="2", weight_decay=0.0, source="two-offload"),
            case("bf16-becomes-3", method="full", zero="3", bf16=True, source="two-bf16"),
        ],
    )
    assert made == needed
    log = {
        path.parent.name: read_json(path)["results"]["log"]
        for path in folder.glob("*/run.json")
        if "results" in read_json(path)
    }
    return (
        {
            name: [entry["loss"] for entry in entries if "loss" in entry and entry["step"] > SAVED_AT]
            for name, entries in log.items()
        },
        "".join(outputs),
        {name: [entry for entry in entries if "eval_loss" in entry] for name, entries in log.items()},
    )


CHANGES = [("two-to-one", "two"), ("one-to-two", "one"), ("two-to-three", "two")]
QUICK_CHANGES = [
    ("two-to-one", "two", "3", "full"),
    ("one-to-two", "one", "1", "full"),
    ("two-to-three", "two", "2", "lora"),
]
"""These and the changes of stages begin with the same three runs."""


@pytest.mark.cases("{change}-{method}-{zero}", "{uninterrupted}-{method}-{zero}")
@pytest.mark.parametrize(
    ("change", "uninterrupted", "zero", "method"),
    grid([(*change, zero, method) for change, zero, method in product(CHANGES, STAGES, METHODS)], QUICK_CHANGES),
)
def test_a_training_resumes_on_other_ranks(losses, change, uninterrupted, method, zero):
    assert len(losses[0][f"{uninterrupted}-{method}-{zero}"]) == STEPS - SAVED_AT
    assert losses[0][f"{change}-{method}-{zero}"] == pytest.approx(
        losses[0][f"{uninterrupted}-{method}-{zero}"], rel=1e-4
    )


@pytest.mark.cases("{then}-becomes-{now}-{method}", "two-{method}-{then}")
@pytest.mark.parametrize(
    ("then", "now", "method"),
    grid(
        [(*stages, method) for stages, method in product([("3", "2"), ("2", "3"), ("1", "3")], METHODS)],
        [("3", "2", "full"), ("2", "3", "lora")],
    ),
)
def test_a_training_resumes_in_another_stage(losses, then, now, method):
    assert losses[0][f"{then}-becomes-{now}-{method}"] == pytest.approx(losses[0][f"two-{method}-{then}"], rel=1e-4)


OTHERS = [
    ("offload-begins-2-offload", "two-plain", 1e-4),
    ("offload-begins-3-offload", "two-plain", 1e-4),
    ("offload-ends", "two-offload", 1e-4),
    ("bf16-becomes-3", "two-bf16", 5e-3),
]


@pytest.mark.cases("{change}", "{uninterrupted}")
@pytest.mark.parametrize(("change", "uninterrupted", "bound"), grid(OTHERS, [OTHERS[1], OTHERS[3]]))
def test_a_training_resumes_with_another_offload_or_in_half_precision(losses, change, uninterrupted, bound):
    assert losses[0][change] == pytest.approx(losses[0][uninterrupted], rel=bound)


@pytest.mark.cases("one-full-1", "two-full-3")
def test_all_ranks_take_the_same_sequences(losses):
    assert losses[0]["one-full-1"] == pytest.approx(losses[0]["two-full-3"], rel=1e-4)


@pytest.mark.cases("best-of-two", "best-on-one")
def test_the_best_checkpoint_is_found_again_though_other_ranks_saved_it(losses):
    """Training on text unlike the held-out makes each step worse: the best one lies before the change, and the model at
    the end is that one's.
    """
    evaluations = losses[2]["best-on-one"]
    best = min(evaluations[:-1], key=lambda entry: entry["eval_loss"])
    assert (
        best["step"] <= SAVED_AT
        and evaluations[-1]["step"] == STEPS
        and evaluations[-1]["eval_loss"] == pytest.approx(best["eval_loss"], rel=1e-6)
    )


@pytest.mark.cases("two-full-3", "two-to-one-full-3", "3-becomes-2-full", "two-plain", "offload-begins-3-offload")
def test_the_change_is_logged(losses):
    assert (
        "resharded (ranks 2 -> 1)" in losses[1]
        and "(ZeRO stage 3 -> 2)" in losses[1]
        and "(offload False -> True)" in losses[1]
    )


@pytest.fixture(scope="module")
def foreign(tiny, tmp_path_factory):
    """Folder with checkpoints of transformers' Trainer under DeepSpeed, in stages 2 and 3 on 2 ranks."""
    folder = tmp_path_factory.mktemp("foreign")
    for zero in ("2", "3"):
        result = run_entry("workers.plain_trainer", [tiny / "model", folder / zero, zero], world=2)
        assert result.returncode == 0, result.stderr[-4000:]
    return folder


def test_a_checkpoint_of_another_tool_is_resumed(options, tiny, foreign, tmp_path):
    """With its optimizer on one rank, and from its weights alone."""
    common = {"zero": "2", "logging_steps": 1, "eval_data": str(tiny / "held_out.jsonl"), "eval_on_start": True}
    cases = [
        options(
            tmp_path / f"resumed-{zero}",
            max_steps=5,
            resume_from_checkpoint=str(foreign / zero / "checkpoint-2"),
            **common,
        )
        for zero in ("2", "3")
    ]
    shards = {"gathered": foreign / "3" / "checkpoint-2", "step": foreign / "3" / "checkpoint-2" / "global_step2"}
    cases += [options(tmp_path / name, max_steps=2, model=str(path), **common) for name, path in shards.items()]
    output = train_all(1, cases, tmp_path / "log")
    logs = {
        path.parent.name: [
            entry.get("loss") or entry["eval_loss"]
            for entry in read_json(path)["results"]["log"]
            if entry.keys() & {"loss", "eval_loss"}
        ]
        for path in tmp_path.glob("*/run.json")
    }
    assert set(logs) == {"resumed-2", "resumed-3", "gathered", "step"}, output
    assert output.count("it is another tool's") == 2
    assert logs["gathered"] == logs["step"] and logs["resumed-2"][0] == pytest.approx(
        logs["gathered"][0], rel=1e-6
    )  # held out, before the first step
    assert logs["resumed-2"] == pytest.approx(logs["resumed-3"], rel=1e-4) and len(logs["resumed-2"]) == 1 + 3 + 1


def test_shards_of_deepspeed_alone_need_a_description(options, foreign, tmp_path):
    words = flags(options(tmp_path / "run", model=str(foreign / "3" / "deepspeed_alone")))
    result = run_entry("dsft.train", words)
    assert result.returncode == 2 and "no causal language model can be built" in result.stderr, result.stderr
