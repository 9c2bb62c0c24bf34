"""One rule for a resume, on the same ranks and on others: which options it takes, and which it refuses to change."""

import shutil

import pytest
from conftest import read_json
from ranks import on_ranks, train_all, trained
from tiny import write_jsonl, write_model
from transformers import TrainerCallback

STEPS, SAVED_AT = 5, 2
CHANGED = {"learning_rate": 2e-3, "weight_decay": 0.5, "adam_beta1": 0.5}
REFUSED = {
    "seed of the order: 0 then, 42 now": {"data_seed": None},
    "order of data: drawn at random then, steps of like length now": {"train_sampling_strategy": "group_by_length"},
    "optimizer: adamw then, sgd now": {"optim": "sgd"},
    "dataloader_drop_last: False then, True now": {"dataloader_drop_last": True},
    "scale of adapter default": {"lora_alpha": 1},
    "content of the frozen weights": {"model": "another"},
}


class HalvesRate(TrainerCallback):
    """Halves the learning rate once, before the checkpoint."""

    def on_step_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        if state.global_step == SAVED_AT - 1:
            lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]


def _refusals(cases: list[dict]) -> list[str]:
    from dsft.errors import UserError

    messages = []
    for case in cases:
        try:
            trained(case)
            messages.append("trained")
        except UserError as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module")
def logs(options, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume-options")

    def case(name: str, micro: int, **changes) -> dict:
        return options(
            folder / name,
            **{"zero": "2", "max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": SAVED_AT}
            | {"save_total_limit": 9, "data_seed": 0, "per_device_train_batch_size": micro, "method": "lora"}
            | {"lr_scheduler_type": "linear"}
            | changes,
        )

    copied = shutil.copytree(tiny / "model", folder / "copied")
    resumed = {"resume_from_checkpoint": str(folder / "first" / f"checkpoint-{SAVED_AT}")}
    halves = {"callbacks": ["test_resume_options:HalvesRate"]}
    of_halved = {"resume_from_checkpoint": str(folder / "halved" / f"checkpoint-{SAVED_AT}")}
    outputs = train_all(
        1,
        [
            case("first", 4),
            case("same ranks", 4, **resumed, **CHANGED),
            case("unchanged", 4, **resumed),
            case("fused", 4, **resumed, optim="adamw_torch_fused"),
            case("copied base", 4, **resumed, model=str(copied)),
            case("halved", 4, **halves),
            case("halved, same ranks", 4, **halves, **of_halved),
            case("halved, another stage", 4, **halves, **of_halved, weight_decay=0.1, zero="3"),
        ],
        folder / "log-1",
    )
    others = [case("other ranks", 2, **resumed, **CHANGED), case("halved, other ranks", 2, **halves, **of_halved)]
    train_all(2, others, folder / "log-2")
    refused = [case(f"refused-{number}", 4, **(resumed | change)) for number, change in enumerate(REFUSED.values())]
    refused[-1]["model"] = str(write_model(folder / "another", seed=1))
    (refusals,) = on_ranks(1, _refusals, refused)
    ended = {path.parent.name: read_json(path) for path in folder.glob("*/run.json")}
    runs = {name: run["results"]["log"] for name, run in ended.items() if run["status"] == "done"}
    return {name: [entry for entry in log if "loss" in entry] for name, log in runs.items()} | {
        "refusals": refusals,
        "output": outputs,
    }


def values(log: list[dict], name: str) -> list[float]:
    return [entry[name] for entry in log if entry["step"] > SAVED_AT]


def test_a_resume_takes_the_options_of_a_step_on_the_same_ranks_as_on_others(logs):
    for name in ("loss", "grad_norm", "learning_rate"):
        assert values(logs["same ranks"], name) == pytest.approx(values(logs["other ranks"], name), rel=1e-4), name
    rates = [2e-3 * (STEPS - step) / STEPS for step in range(SAVED_AT, STEPS)]
    assert values(logs["same ranks"], "learning_rate") == pytest.approx(rates)
    assert values(logs["same ranks"], "loss")[1:] != pytest.approx(values(logs["first"], "loss")[1:], rel=1e-4)


def test_a_resume_says_what_it_takes(logs):
    assert "learning_rate 0.002 (0.01 before), weight_decay 0.5 (0.0 before), adam_beta1 0.5 (0.9" in logs["output"]


def test_a_resume_with_the_same_options_goes_on_with_the_same_bits(logs):
    for name in ("loss", "grad_norm", "learning_rate"):
        for run in ("unchanged", "copied base"):
            assert values(logs[run], name) == values(logs["first"], name), name
    assert values(logs["fused"], "loss") == pytest.approx(values(logs["first"], "loss"), rel=1e-5)


@pytest.mark.parametrize("run", ["same ranks", "other ranks", "another stage"])
def test_a_learning_rate_that_a_callback_has_changed_stays(logs, run):
    first = values(logs["halved"], "learning_rate")
    assert first == pytest.approx([rate / 2 for rate in values(logs["first"], "learning_rate")])
    assert values(logs[f"halved, {run}"], "learning_rate") == pytest.approx(first)


@pytest.mark.parametrize("named", REFUSED)
def test_a_resume_refuses_what_would_make_its_states_those_of_something_else(logs, named):
    assert named in logs["refusals"][list(REFUSED).index(named)]


def test_a_resume_on_another_day_renders_the_first_day_also_if_run_json_is_lost(options, tmp_path):
    model = write_model(tmp_path / "model", chat=True)
    template = model / "chat_template.jinja"
    template.write_text("{% set format = '%d %B' %}{{ strftime_now(format) }}" + template.read_text())
    turns = [{"role": "user", "content": "big"}, {"role": "assistant", "content": "small"}]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 8)
    given = {"model": str(model), "data": str(data), "save_strategy": "steps", "save_steps": 2}
    case = options(tmp_path / "run", **given)
    train_all(1, [case | {"chat_date": "2001-02-03"}], tmp_path / "log-1")
    (tmp_path / "run" / "run.json").unlink()
    train_all(1, [case | {"max_steps": 4, "resume_from_checkpoint": "auto"}], tmp_path / "log-2")
    run = read_json(tmp_path / "run" / "run.json")
    assert run["config"]["chat_date"] == "2001-02-03" and run["results"]["steps"] == 4
