"""`dsft plan`: options of a training and a machine -> what the training would decide.

What is wrong with the options is told before torch is loaded, which takes seconds; plan_answers.py does the work.
"""

import dataclasses
from collections.abc import Sequence

from dsft.cli.commands import PlanOptions
from dsft.cli.plan_machine import read_machines
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import raise_if_any, without_second_errors
from dsft.run_setup.named_files import NOT_NEEDED, check_named_files
from dsft.runtime.quick_imports import quick_imports


def run(options: PlanOptions, argv: Sequence[str]) -> None:
    """Print what a training with the options of `argv` would decide, or what else `options` ask for.

    Raises:
        UserError: with every problem of the options, of the machine, or of the model.
    """
    raise_if_any(_impossible_numbers(options))
    problems: list[str] = []
    training = read_config(TrainConfig, argv, problems, also=[field.name for field in dataclasses.fields(PlanOptions)])
    not_needed = (
        *NOT_NEEDED,
        *(["model: missing"] if options.largest else []),
        *(["batch_tokens and"] if options.perplexity else []),
    )
    problems = [problem for problem in problems if not problem.startswith(not_needed)]
    files = check_named_files(dataclasses.replace(training, data=[], eval_data=[]))  # a plan takes data that is to come
    raise_if_any([*problems, *without_second_errors(files, problems)])
    machines = read_machines(options)
    with quick_imports():
        from dsft.cli.plan_answers import answer

    answer(options, training, machines, words=tuple(argv))


def _impossible_numbers(options: PlanOptions) -> list[str]:
    return [
        f"--{name} {getattr(options, name)}: must be above 0"
        for name in ("tokens_per_step", "tokens", "dollars_per_gpu_hour", "sequence_parallel")
        if getattr(options, name) is not None and not getattr(options, name) > 0
    ]
