"""What a run checks and decides before weights load: `decide.py` for a training, `evaluation.py` for an evaluation.

Here are the checks that take a second, without torch and transformers: of the files that options name. A launch makes
them before its launcher and ranks start, ranks of one machine before their rendezvous.
"""

from collections.abc import Sequence

from dsft.config import user_code
from dsft.config.deepspeed import read_zero_file
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.formats import format_rules
from dsft.data.sources import find_sources
from dsft.errors import UserError, raise_if_any, without_second_errors
from dsft.models.model_folder import hub_is_reachable, missing
from dsft.runtime.distributed import ranks_per_node, world_size


def check_before_rendezvous(options: TrainConfig | EvalConfig, problems: Sequence[str]) -> None:
    """Checks the options' files, if all ranks are on one machine and see the same."""
    if ranks_per_node() == world_size():
        check_named_files(options, problems)


def check_named_files(options: TrainConfig | EvalConfig, problems: Sequence[str]) -> None:
    """Raises UserError for `problems`, of reading the options, for missing models, tokenizers, adapters and data, and
    for unreadable files: the DeepSpeed JSON, the user's own code, the first rows of the data. What may be on the hub is
    not checked.
    """
    of_files = []
    entries = {"data": options.data}
    if isinstance(options, TrainConfig):
        named = {"model": [options.model], "adapter": [options.adapter], "tokenizer": [options.tokenizer]}
        entries["eval_data"] = options.held_out_entries
        if options.zero != "auto":
            read_zero_file(options.zero, of_files)
    else:
        named = {"model": options.model, "reference": [options.reference], "tokenizer": [options.tokenizer]}
    of_files += user_code.problems(options)
    for key, names in named.items():
        problems_of_key = [missing(key, name) for name in names if name]
        of_files += filter(None, problems_of_key)
    for key, names in entries.items():
        for source in find_sources(names, options, key=key, problems=of_files):
            if source.hub:
                hub_is_reachable()  # libraries would retry for half a minute
                continue
            try:
                format_rules(source.first_rows(), options)
            except UserError as error:
                of_files += [f"{key}: {problem}" for problem in error.problems]
            except ValueError as error:
                of_files.append(f"{key}: {source.name}: {error}")
    raise_if_any([*problems, *without_second_errors(of_files, problems)])
