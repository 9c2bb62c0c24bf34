"""`dsft train`, `plan` and `doctor` give one answer: what is refused, and which plan, batch and bytes on disk. So do
`dsft eval` and `dsft plan --perplexity`.
"""

import dataclasses
import json
import random

import pytest
from conftest import flags, grid
from tiny import write_model

from dsft.cli.main import main
from dsft.config.options import EvalConfig, TrainConfig
from dsft.config.reader import read_config
from dsft.errors import UserError
from dsft.models.build import resolve_dtype
from dsft.perplexity import evaluation
from dsft.planner.choose import as_dict
from dsft.planner.evaluation import plan_evaluation
from dsft.run_setup.arguments import checkpoint_size
from dsft.run_setup.evaluation_checks import candidate_of
from dsft.run_setup.resolve import plan_run, resolve_offline, resolve_run
from dsft.runtime.hardware import default_ranks, this_machine

BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
DRAWN = {
    "zero": ["auto", "auto", "0", "1", "2", "3", "2-offload", "3-offload", "4"],
    "method": ["full", "full", "lora", "qlora"],
    "dtype": ["float32", "bfloat16", "auto", "float16"],
    "seq_len": [32, 64, 64, 300],
    BATCH: [None, 1, 2, 3],
    ACCUMULATION: [None, None, 1, 4],
    "global_batch_size": [None, None, 8, 9],
    "optim": [None, None, "sgd", "adafactor", "lion_32bit", "nonsense"],
    "activation_checkpointing": [None, True, False],
    "packing": [False, True],
    "tiled_loss": [None, True, False],
    "fp32_accumulation": [None, True, False],
    "use_liger_kernel": [None, None, None, True],
    "tf32": [None, None, None, True],
    "save_strategy": ["no", "steps"],
    "save_total_limit": [None, 1, 3],
    "sequence_parallel": [1, 1, 2, 3],
    "states": [*7 * (None,), "bfloat16"],
}
USUAL = 0.6
"""Share of options that keep their first value: with all drawn freely, nearly every job is refused."""


def drawn_job(seed: int) -> dict:
    chance = random.Random(seed)
    return {name: values[0] if chance.random() < USUAL else chance.choice(values) for name, values in DRAWN.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(write_model(folder / name, name)) for name in ("llama", "mixtral", "gpt2")]


@pytest.fixture(autouse=True)
def _no_process_group(monkeypatch):
    """Of another test of this process, with fewer ranks than the jobs have."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)


# 200 jobs, twenty a test; the quick tier has twenty others, whose activations are made up.
@pytest.mark.parametrize("first", grid(range(0, 220, 20), [0]))
def test_a_job_is_planned_and_trained_alike(options, models, tmp_path, first):
    machine = this_machine(ranks_per_node=2)
    answers = []
    for seed in range(first, first + 20):
        words = flags(options(tmp_path / "run", model=models[seed % 3], max_steps=10, save_steps=2, **drawn_job(seed)))
        trained = answer_of(lambda asked, problems: resolve_run(asked, machine=machine, problems=problems), words)
        planned = answer_of(lambda asked, problems: planned_run(asked, machine, problems), words)
        assert planned == trained, (seed, words)
        answers.append(isinstance(trained, list))
    assert 3 < sum(answers) < 17, "some are refused, some accepted"


def answer_of(decide, words: list[str]) -> list[str] | dict:
    """The problems, or the plan with its reason and the bytes that it writes."""
    problems: list[str] = []
    asked = read_config(TrainConfig, words, problems)
    try:
        run = decide(asked, problems)
    except UserError as error:
        return sorted(error.problems)
    return run if isinstance(run, dict) else answer(run.plan, run.reason, run.options, run.job.size)


def planned_run(asked: TrainConfig, machine, problems: list[str]) -> dict:
    run = resolve_offline(asked, machine, problems=problems)
    choice = plan_run(run.options, run.job, machine, zero_file=run.zero_file, must_fit=False)
    return answer(choice.plan, choice.reason, run.options, run.job.size)


def answer(plan, reason: str, options: TrainConfig, size) -> dict:
    written = checkpoint_size(options, size, plan.deepspeed_config).total_bytes
    return as_dict(plan) | {"reason": reason, "written": written, "zero": plan.zero}


SCORED = {
    "dtype": ["float32", "bfloat16", "auto"],
    "seq_len": [64, 61, 32, 300],
    "attn_implementation": [None, None, "eager"],
    "sequence_parallel": [1, 1, 2, 3],
}


@pytest.mark.parametrize("first", grid(range(0, 50, 10), [0]))
def test_an_evaluation_is_planned_as_it_is_run(models, tiny, capsys, monkeypatch, first):
    choices = []
    monkeypatch.setattr(
        evaluation,
        "plan_evaluation",
        lambda *args, **options: choices.append(plan_evaluation(*args, **options)) or choices[-1],
    )
    machine, refused = this_machine(ranks_per_node=default_ranks()), 0
    for seed in range(first, first + 10):
        chance = random.Random(seed)
        drawn = {name: chance.choice(values) for name, values in SCORED.items()}
        asked = {"model": models[seed % 3], "data": str(tiny / "pairs.jsonl"), **drawn}
        words = flags({name: value for name, value in asked.items() if value is not None})
        problems: list[str] = []
        config = read_config(EvalConfig, words, problems)
        scored = planned = None
        candidate = candidate_of(config, models[seed % 3], problems)
        if not problems:
            try:
                evaluation.choose_zero(candidate, machine, resolve_dtype(config.dtype))
                scored = choices[-1]
            except UserError:
                pass
        try:
            main(["plan", "--perplexity", "--json", *words])
            planned = json.loads(capsys.readouterr().out)
        except SystemExit:
            capsys.readouterr()
        assert (scored is None) == (planned is None), (seed, words, problems)
        refused += scored is None
        if scored:
            plan = json.loads(json.dumps(dataclasses.asdict(scored.plan)))
            assert planned["chosen"] == plan | {"reason": scored.reason}, (seed, words)
            assert planned["longest_window"] == scored.longest_window, (seed, words)
    assert 0 < refused < 10, "some are refused, some accepted"
