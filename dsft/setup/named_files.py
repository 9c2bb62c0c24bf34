"""Checks the files that options name, in a second: without torch and transformers.

A launch checks them before its launcher and ranks start, ranks of one machine before their rendezvous.
"""

from dsft.config import user_code
from dsft.config.deepspeed import read_zero_file
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.formats import format_rules
from dsft.data.sources import find_sources
from dsft.errors import UserError, raise_if_any, without_second_errors
from dsft.models.model_folder import missing
from dsft.runtime.distributed import ranks_per_node, world_size

NOT_NEEDED = ("output_dir: missing", "data: missing")
"""How problems begin that stop a training and not a plan."""


def check_before_rendezvous(options: TrainConfig | EvalConfig, problems: list[str]) -> None:
    """Raises UserError for problems of options and files, if all ranks are on one machine and see the same."""
    if ranks_per_node() == world_size():
        raise_if_any([*problems, *without_second_errors(check_named_files(options), problems)])


def check_named_files(options: TrainConfig | EvalConfig) -> list[str]:
    """Lists missing models, tokenizers, adapters and data, and unreadable files: the DeepSpeed JSON, the user's
    own code, the first rows of the data. What may be on the hub is not checked.
    """
    problems: list[str] = []
    models = [options.model] if isinstance(options, TrainConfig) else options.model
    named = [("model", name) for name in models] + [("tokenizer", options.tokenizer)]
    entries = {"data": options.data}
    if isinstance(options, TrainConfig):
        named.append(("adapter", options.adapter))
        entries["eval_data"] = options.held_out_entries
        if options.zero != "auto":
            read_zero_file(options.zero, problems)
    else:
        named.append(("reference", options.reference))
    problems += user_code.problems(options)
    problems += filter(None, (missing(key, name) for key, name in named if name))
    for key, names in entries.items():
        for source in find_sources(names, options, key=key, problems=problems):
            if source.hub:
                continue
            try:
                format_rules(source.first_rows(), options)
            except UserError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
            except ValueError as error:
                problems.append(f"{key}: {source.name}: {error}")
    return problems
