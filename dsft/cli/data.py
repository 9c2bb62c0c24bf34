"""Runs `dsft prepare` and `dsft preview`: makes the data of a training ready ahead of it, and shows it.

No GPU and no weights are needed. What is wrong with options and files is told before torch is loaded, which takes
seconds; samples.py does the work.

dsft prepare --config run.yaml
dsft preview --config run.yaml --samples 5
"""

from collections.abc import Sequence

from dsft.cli.commands import PrepareOptions, PreviewOptions
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import raise_if_any, without_second_errors
from dsft.run_setup.named_files import check_named_files
from dsft.runtime import quick_imports


def prepare_command(_options: PrepareOptions, argv: Sequence[str]) -> None:
    """Tokenises the data of a training ahead of it.

    Raises:
        UserError: with every problem of the options and the data.
    """
    config = _read(argv)
    if config.streaming:
        raise_if_any(["streaming keeps nothing, so there is nothing to prepare; leave streaming out"])
    with quick_imports():
        from dsft.cli.samples import prepare

    prepare(config)


def preview_command(options: PreviewOptions, argv: Sequence[str]) -> None:
    """Prints samples as the model will see them, and figures.

    Raises:
        UserError: with every problem of the options and the data.
    """
    config = _read(argv)
    with quick_imports():
        from dsft.cli.samples import preview

    preview(config, samples=options.samples)


def _read(argv: Sequence[str]) -> TrainConfig:
    problems: list[str] = []
    config = read_config(TrainConfig, argv, problems)
    needless = ("output_dir: missing", *(["model: missing"] if config.tokenizer else []))
    problems = [problem for problem in problems if not problem.startswith(needless)]
    raise_if_any([*problems, *without_second_errors(check_named_files(config), problems)])
    return config
