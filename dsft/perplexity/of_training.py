"""Reads the options of an evaluation. A training (`--run`, or its file as `--config`) supplies model, tokenizer,
templates, data format and held-out data; options that the user sets in addition take precedence.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsft.checkpoints.run_folder import FINAL, is_run, path_of, read_options_of_run
from dsft.config.options import EvalConfig, TrainConfig, flagged_dtype, shuffle_seed
from dsft.config.reader import check_values, field_types, make_config, read_file_and_flags, training_types
from dsft.errors import UserError

SHARED = (
    *("dtype", "tokenizer", "revision", "trust_remote_code", "attn_implementation", "seed", "data_cache"),
    *("seq_len", "data_name", "data_format", "text_column", "columns", "as_chat", "map_row"),
    *("prompt_template", "completion_template", "chat_template"),
    *("train_on", "train_thinking", "drop_unrendered", "drop_keys", "chat_date", "too_long"),
)
"""Options that mean the same in training and evaluation, beside the model and the data."""
PATHS = ("tokenizer", "chat_template", "data_cache")  # those of SHARED that may be paths


def read_evaluation(argv: Sequence[str], problems: list[str], *, also: type | None = None) -> EvalConfig:
    """Read the options of `dsft eval`; errors are added to `problems`. `also`: as in read_config."""
    values, flags = read_file_and_flags(argv, problems)
    if values is None:  # without a readable file nothing else can be checked
        return EvalConfig()
    # A training's file sets an option that only training has; its model is the base until output_dir has a final one.
    if (training_types().keys() - field_types(EvalConfig).keys()).isdisjoint(values):
        return evaluation_config(values | flags, problems, also=also)
    values = check_values(values, training_types(), problems)
    implied = _of_training(values, values.get("output_dir"), problems, overridden=flags)
    return evaluation_config(flags, problems, also=also, implied=implied)


def evaluation_config(
    values: Mapping[str, Any],
    problems: list[str],
    *,
    also: type | None = None,
    implied: Mapping[str, Any] | None = None,
) -> EvalConfig:
    """Return the options of an evaluation from `values`, which take precedence over those `implied` by a training or by
    that of `run`.
    """
    has_seq_len = "seq_len" in values
    values = dict(implied or {}) | dict(values)
    run = values.get("run")
    if isinstance(run, str):
        run = os.path.expanduser(run)
        try:
            options = read_options_of_run(run)
        except UserError as error:
            raise UserError([*problems, *(f"run: {problem}" for problem in error.problems)]) from None
        if "model" not in values and not (Path(run) / FINAL).is_dir():
            problems.append(f"run={run}: has no final model yet; name a checkpoint with model")
        values = _of_training(options, run, problems, overridden=values) | values
    config = replace(make_config(EvalConfig, dict(values), problems, also=also), has_seq_len=has_seq_len)
    from dsft.perplexity.modes import mode_problems  # imports numpy, which a training's launch does not need

    problems += mode_problems(config)
    return config


def shared_options(options: Mapping[str, Any], run_folder: str | None = None) -> dict[str, Any]:
    """Return the options that an evaluation must share with a training; a run's paths are relative to the folder that
    it was started in.
    """
    shared = {}
    for name in SHARED:
        # Options missing in a training's file have training's default, which differs for too_long.
        value = options.get(name, getattr(TrainConfig, name, None))
        if value not in (None, ""):
            shared[name] = path_of(value, run_folder) if run_folder and name in PATHS else value
    if flagged := flagged_dtype(options):
        shared["dtype"] = flagged[0]
    return shared


def _of_training(
    options: Mapping[str, Any], output_dir: str | None, problems: list[str], *, overridden: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of an evaluation that a training's options imply."""
    run = output_dir if output_dir and is_run(output_dir) else None
    values = shared_options(options, run)
    if run and (Path(run) / FINAL).is_dir():
        values["model"] = run
    elif options.get("model"):
        values["model"] = options["model"]
    models = overridden.get("model", values.get("model"))
    for model in models if isinstance(models, list) else [models]:
        if run and isinstance(model, str) and Path(model).resolve().is_relative_to(Path(run).resolve()):
            # These weights are saved with the tokenizer of their training: with add_tokens, and the template.
            for name in ("tokenizer", "chat_template"):
                values.pop(name, None)
    if "data" in overridden:  # other data contains no rows that the training held out
        return values
    held_out = options.get("eval_data")
    fraction = options.get("eval_fraction")
    if held_out:
        entries = [*held_out.values()] if isinstance(held_out, dict) else held_out  # each is a separate data set
        values |= {"data": entries, "data_split": options.get("eval_split") or TrainConfig.eval_split}
    elif fraction:
        values |= {
            "data": options.get("data"),
            "data_split": options.get("data_split") or TrainConfig.data_split,
            "eval_fraction": fraction,
            "data_seed": shuffle_seed(options),
        }
    else:
        problems.append("data: the training has no held-out data (eval_data, eval_fraction); name some with data")
        values["data"] = options.get("data")
    if run:
        entries = values["data"]
        if not isinstance(entries, list):
            entries = [entries]
        values["data"] = [path_of(entry, run) for entry in entries]
    return values
