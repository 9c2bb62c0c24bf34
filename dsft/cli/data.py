"""Runs `dsft prepare` and `dsft preview`: makes the data of a training ready ahead of it, and shows it.

No GPU and no weights are needed. Problems of options and files are reported before torch is loaded, which takes
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


def run(options: PrepareOptions | PreviewOptions, argv: Sequence[str]) -> None:
    """Tokenises the data of a training ahead of it, or prints samples as the model will see them, and figures.

    Raises:
        UserError: with every problem of the options and the data.
    """
    problems: list[str] = []
    config = read_config(TrainConfig, argv, problems, also=type(options))
    needless = ("output_dir: missing", *(["model: missing"] if config.tokenizer else []))
    problems = [problem for problem in problems if not problem.startswith(needless)]
    raise_if_any([*problems, *without_second_errors(check_named_files(config), problems)])
    is_preview = isinstance(options, PreviewOptions)
    if config.streaming and not is_preview:
        raise_if_any(["streaming keeps nothing, so there is nothing to prepare; leave streaming out"])
    with quick_imports():
        from dsft.cli.samples import prepare, preview

    preview(config, samples=options.samples) if is_preview else prepare(config)
