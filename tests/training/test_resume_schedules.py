"""A resume goes on with the learning rate of its run, whatever keeps the schedule, on the same ranks and on others."""

import json

import pytest
from conftest import grid, needed_cases, read_json
from ranks import on_ranks, train_all
from test_resume_options import _refusals

STEPS, SAVED_AT = 6, 3
OF_DEEPSPEED = {
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": STEPS},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": STEPS},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2},
}
"""Schedulers of a DeepSpeed JSON -> their parameters."""
OF_WHAT_THEY_SEE = {
    "reduce_lr_on_plateau": {"mode": "max", "factor": 0.5, "patience": 0},  # a loss that falls is none that rises
    "greedy": {"mode": "min", "factor": 0.5, "patience": 0, "max_lr": 1.0},
}
NAMES = [*OF_DEEPSPEED, *OF_WHAT_THEY_SEE]
QUICK = ["OneCycle", "reduce_lr_on_plateau"]


@pytest.fixture(scope="module")
def logs(request, options, tiny, tmp_path_factory):
    names = [name for name in NAMES if name in needed_cases(request)]
    of_deepspeed = [name for name in names if name in OF_DEEPSPEED]
    folder = tmp_path_factory.mktemp("resume-schedules")

    def case(name: str, run: str, micro: int, *, factor: float = 1.0, **changes) -> dict:
        """The learning rate of the schedule is multiplied by `factor`."""
        words = {"zero": "2", "max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": SAVED_AT}
        words |= {"save_total_limit": 9, "per_device_train_batch_size": micro, "learning_rate": 1e-2 * factor}
        if name in OF_DEEPSPEED:
            of_rate = {key: value * factor for key, value in OF_DEEPSPEED[name].items() if key.endswith("_lr")}
            scheduler = {"type": name, "params": OF_DEEPSPEED[name] | of_rate}
            file = folder / f"{name}-{factor}.json"
            file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler}))
            words |= {"zero": str(file)}
        else:
            words |= {"lr_scheduler_type": name, "lr_scheduler_kwargs": OF_WHAT_THEY_SEE[name]}
            words |= {"eval_data": str(tiny / "held_out.jsonl"), "eval_strategy": "steps", "eval_steps": 1}
        return options(folder / f"{name} {run}", **words | changes)

    def resumed(name: str) -> dict:
        return {"resume_from_checkpoint": str(folder / f"{name} first" / f"checkpoint-{SAVED_AT}")}

    runs = [case(name, "first", 4) for name in names]
    runs += [case(name, "same ranks", 4, **resumed(name)) for name in names]
    runs += [case(name, "same ranks, halved", 4, factor=0.5, **resumed(name)) for name in of_deepspeed]
    output = train_all(1, runs, folder / "log-1")
    others = [case(name, "other ranks", 2, **resumed(name)) for name in names]
    others += [case(name, "other ranks, halved", 2, factor=0.5, **resumed(name)) for name in of_deepspeed]
    output += train_all(2, others, folder / "log-2")
    refused = {
        name: case(name, "refused", 4, factor=0.5, **resumed(name)) for name in names if name in OF_WHAT_THEY_SEE
    }
    (refusals,) = on_ranks(1, _refusals, [*refused.values()])
    logs = {path.parent.name: read_json(path).get("results", {"log": []})["log"] for path in folder.glob("*/run.json")}
    trained = {name: [entry for entry in log if "loss" in entry] for name, log in logs.items()}
    return trained | {"refusals": dict(zip(refused, refusals, strict=True)), "output": output}


def values(log: list[dict], name: str) -> list[float]:
    return [entry[name] for entry in log if entry["step"] > SAVED_AT]


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(NAMES, QUICK))
def test_a_resume_goes_on_with_the_schedule_on_the_same_ranks_and_on_others(logs, name):
    first = logs[f"{name} first"]
    assert len({entry["learning_rate"] for entry in first}) > 2, "a schedule that changes nothing shows nothing"
    for run in ("same ranks", "other ranks"):
        resumed = logs[f"{name} {run}"]
        assert resumed, logs["output"][-3000:]
        assert values(resumed, "learning_rate") == pytest.approx(values(first, "learning_rate"), rel=1e-9), run
        assert values(resumed, "loss") == pytest.approx(values(first, "loss"), rel=1e-4), run


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(OF_DEEPSPEED, QUICK[:1]))
def test_a_resume_takes_another_rate_of_a_deepspeed_schedule(logs, name):
    """From its next step on: the factors of the schedule go on."""
    halved = [rate / 2 for rate in values(logs[f"{name} first"], "learning_rate")]
    for run in ("same ranks, halved", "other ranks, halved"):
        assert values(logs[f"{name} {run}"], "learning_rate") == pytest.approx(halved), run


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(OF_WHAT_THEY_SEE, QUICK[1:]))
def test_a_resume_refuses_another_rate_of_a_schedule_whose_state_it_is(logs, name):
    assert "learning_rate: 0.01 then, 0.005 now" in logs["refusals"][name]
