"""The Python API, for notebooks, with the names of the options.

import dsft
config = dsft.load_config("run.yaml", learning_rate=1e-4)
print(dsft.plan("runs/first/final"))
model = dsft.build_model(config, dtype="float32")
print(dsft.evaluate(model="runs/first", data="held_out.jsonl", seq_len=512))
print(dsft.compare("results", base="runs/first/final"))
print(dsft.chat("runs/first", "Which number follows 41?"))
run = dsft.read_run("runs/first")
"""

from collections.abc import Iterator, Sequence
from typing import Any

from dsft.config.options import EvalConfig, TrainConfig
from dsft.config.reader import make_config, read_yaml
from dsft.errors import raise_if_any
from dsft.perplexity.compare import Comparisons, compare_results, read_evaluations
from dsft.perplexity.evaluation import evaluate_models
from dsft.perplexity.modes import mode_problems
from dsft.perplexity.of_training import evaluation_config
from dsft.perplexity.results import Evaluation
from dsft.runtime import distributed
from dsft.runtime.console import set_up_screen
from dsft.runtime.distributed import only_run_in
from dsft.runtime.hardware import Machine, this_machine
from dsft.setup.decide import Choice, plan_run, resolve_offline
from dsft.setup.evaluation import check_evaluation


def load_config(path: str | None = None, **options: Any) -> TrainConfig:
    """Return the checked options of a YAML file; `options` override them. Raises UserError with every problem."""
    problems = []
    values = read_yaml(path, problems) if path else {}
    raise_if_any(problems)
    config = make_config(TrainConfig, values | options, problems)
    raise_if_any(problems)
    return config


def plan(model: str, *, machine: Machine | None = None, **options: Any) -> Choice:
    """Plan a training with these options, from the model's config alone, for `machine`, by default this one. Raises
    UserError if no model's config is found, or an option is impossible.
    """
    problems = []
    training = make_config(TrainConfig, {"model": model, **options}, problems)
    run = resolve_offline(training, machine or this_machine(), problems=problems)
    return plan_run(run, must_fit=False)


def evaluate(*, progress: bool = True, **options: Any) -> Evaluation:
    """Return the perplexity of one model on one data set, in this process or on all ranks if each calls it, with the
    options of `dsft eval`. Raises UserError with every problem; TrainingStopped if a loss is NaN or infinite.
    """
    set_up_screen()
    problems = []
    config = evaluation_config(options, problems)
    if max(len(each) for each in (config.model, config.data, config.quantization)) > 1:
        problems.append(
            "evaluate takes one model, one data set and one quantization; call it for each, or use dsft eval"
        )
    distributed.start_ranks()
    return next(evaluate_all(config, problems, progress=progress))


def evaluate_all(config: EvalConfig, problems: Sequence[str] = (), *, progress: bool = False) -> Iterator[Evaluation]:
    """Yield the perplexity of each of `config.model` on each of `config.data` as soon as it is complete.

    Collective, after `distributed.start_ranks()`. With an output_dir each is written before it is yielded, and results
    of an earlier evaluation there are reused.

    Args:
        problems: from reading the options, to be raised with the others.

    Raises:
        UserError: with all problems of the options, the data and the models' folders, on every rank, before anything is
            loaded; or if another evaluation, or a training, is writing to output_dir.
        TrainingStopped: if a loss is NaN or infinite.
    """
    with only_run_in(config.output_dir):
        checked = check_evaluation(config, [*problems, *mode_problems(config)])
        yield from evaluate_models(config, *checked, progress=progress)


def compare(*results: str | Evaluation, base: str | None = None, group_by: str | None = None) -> Comparisons:
    """Compare results with those of one model, in pairs of documents. Raises UserError if there are none, or they have
    other texts or windows.

    Args:
        results: results of `evaluate`, or folders that evaluations wrote.
        base: the model that all others are compared with, by its name in the results or the last parts of its path; by
            default the first.
        group_by: a grouping of the results; each group is compared separately.
    """
    evaluations = []
    for item in results:
        evaluations += [item] if isinstance(item, Evaluation) else read_evaluations([item])
    return compare_results(evaluations, base=base, group_by=group_by)
