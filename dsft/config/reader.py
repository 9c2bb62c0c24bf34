"""Reads options from one YAML file and command-line flags, with the same names in both: one reader for all commands.

Every value is checked against its field's type and bounds, and options against each other; all problems are collected.
A repeated flag extends a list and is a problem for other types; a repeated YAML key is always a problem. `setup` checks
what needs the model, the data, the machine or the DeepSpeed JSON.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Collection, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from dsft.config.options import (
    HALF_PRECISION,
    HINTS,
    OURS,
    REFUSED_ARGUMENTS,
    REFUSED_OPTIMIZERS,
    REMOVED_OPTIONS,
    SAME_VALUES,
    EvalConfig,
    TimeoutFields,
    TrainConfig,
    argument_types,
)
from dsft.errors import UserError, nearest, one_line, raise_if_any, without_second_errors

PATHS = ("output_dir", "model", "tokenizer", "adapter", "reference", "run", "resume_from_checkpoint")
"""Options that are paths, in which ~ is expanded: no shell has done it for a YAML file."""
Values = dict[str, Any]
"""Values, or types, of options by name."""
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}
"""Type -> the name of its values in messages."""
EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)e[-+]?[0-9]+", re.IGNORECASE)
"""A number such as 1e-6, which YAML 1.1 reads as a text."""
MOST = 10**9  # for every whole number: larger ones are slips, and counters of libraries overflow
MOST_CHOICES = 20
"""Of an error; of more, such as 41 optimizers, it shows the nearest."""
MORE_THAN_0 = sys.float_info.min
LESS_THAN_1 = 1 - sys.float_info.epsilon
_BOUNDS = {
    # The sequences of a step are kept in memory.
    """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps global_batch_size""": (
        1,
        10**7,
        "be at least 1 and at most 10,000,000",
    ),
    "num_train_epochs": (MORE_THAN_0, 10**6, "be more than 0 and at most 1,000,000"),
    "neftune_noise_alpha": (0, 1000, "be at least 0 and at most 1,000"),
    "num_gpus": (1, 1024, "be 1 to 1,024, on each node; leave it out for all"),
    "master_port": (0, 2**16 - 1, f"be at least 0 and less than {2**16:,}"),
    # Each is a process, beside every rank.
    "dataloader_num_workers": (0, 256, "be at least 0 and at most 256"),
    """lora_r lora_alpha max_documents stride sequence_parallel ddp_timeout dataloader_prefetch_factor
    early_stopping_patience max_skipped_steps max_new_tokens nodes batch_tokens""": (1, math.inf, "be at least 1"),
    "logging_steps save_steps eval_steps save_minutes loraplus_lr_ratio": (MORE_THAN_0, math.inf, "be more than 0"),
    """learning_rate weight_decay warmup_steps max_grad_norm adam_epsilon samples eval_delay verify generate_samples
    temperature early_stopping_threshold router_aux_loss max_restarts""": (
        0,
        math.inf,
        "not be negative",
    ),
    "eval_fraction lora_dropout adam_beta1 adam_beta2 label_smoothing_factor": (
        0,
        LESS_THAN_1,
        "be at least 0 and less than 1",
    ),
    "seed data_seed": (0, 2**32 - 1, f"be at least 0 and less than {2**32}"),
    "seq_len": (2, math.inf, "be at least 2: one token of context and one to predict"),
    "max_steps": (-1, math.inf, "be at least 1, or -1 to go by num_train_epochs"),
    " ".join(timeout.name for timeout in dataclasses.fields(TimeoutFields)): (
        MORE_THAN_0,
        10**6,
        "be more than 0 and at most 1,000,000 seconds",
    ),
}
BOUNDS = {name: bound for names, bound in _BOUNDS.items() for name in names.split()}
"""Option -> smallest and largest value, and the text "must ..." of the error."""
EXCLUSIVE = {
    "global_batch_size gradient_accumulation_steps": "global_batch_size and gradient_accumulation_steps are both set;"
    " keep one, the other follows",
    "compute_loss label_smoothing_factor": "compute_loss and label_smoothing_factor are both set; smooth labels in your"
    " own loss",
    "load_best_model_at_end save_only_model": "load_best_model_at_end needs complete checkpoints; set save_only_model:"
    " false",
    "bf16 fp16": "bf16 and fp16 are both true; keep one",
    "packing train_sampling_strategy": "packing and train_sampling_strategy are both set; keep one",
}
"""Options that exclude each other -> why."""
NEEDED = {
    "prompt_template completion_template": "prompt_template needs completion_template: what is trained on",
    "generate_samples has_held_out": "generate_samples: samples are made at evaluations; set eval_data or"
    " eval_fraction",
    "early_stopping_patience has_held_out": "early_stopping_patience needs held-out data; set eval_data or"
    " eval_fraction",
    "early_stopping_threshold early_stopping_patience": "early_stopping_threshold needs early_stopping_patience",
    "dataloader_persistent_workers dataloader_num_workers": "dataloader_persistent_workers needs"
    " dataloader_num_workers of at least 1",
    "save_tokens output_dir": "save_tokens needs output_dir: the folder to keep the tokens in",
}
"""Option and the one that it needs -> the error."""
NOT_NEEDED = ("output_dir: missing", "data: missing")
"""How problems begin that stop a training and not a plan."""


def read_config(cls: type, argv: Sequence[str], problems: list[str], *, also: type | None = None) -> Any:
    """Reads a `cls` from `argv` and its `--config FILE`; faults go to `problems`, of an unreadable file that one alone.
    Hints for unknown options include those of the class `also`.
    """
    values = read_values(argv, problems)
    return cls() if values is None else make_config(cls, values, problems, also=also)


def make_config(cls: type, values: Values, problems: list[str], *, also: type | None = None) -> Any:
    """Makes a checked `cls` of options by name; faults go to `problems`."""
    dsft_types = field_types(cls)
    all_types = training_types() if cls is TrainConfig else dsft_types
    notes = []
    values = own_names(values, all_types, notes)
    refused = []
    checked = check_values(values, all_types, refused, also=also)
    options = {"notes": tuple(notes)}
    training = {}
    for name, value in checked.items():
        (options if name in dsft_types else training)[name] = value
    if cls is TrainConfig:
        options["training"] = training
    config = cls(**options)
    problems += refused + without_second_errors(check_config(config), refused)
    return config


def options_of(cls: type) -> dict[str, dataclasses.Field]:
    """Option as users write it -> its field; --from has the field `from_`, since `from` is a keyword of Python."""
    fields = [field for field in dataclasses.fields(cls) if field.metadata.get("option", True)]
    return {field.name.removesuffix("_"): field for field in fields}


def field_types(*classes: type) -> Values:
    """Maps the options among the fields of `classes` to their types; earlier classes win."""
    hints = {}
    for cls in reversed(classes):
        annotations = typing.get_type_hints(cls)
        hints |= {name: annotations[field.name] for name, field in options_of(cls).items()}
    return hints


def training_types() -> Values:
    """Maps all options of a training, including those of transformers.TrainingArguments, to their types."""
    return argument_types() | field_types(TrainConfig)


def read_file_and_flags(argv: Sequence[str], problems: list[str]) -> tuple[Values | None, Values]:
    """Returns the options of `--config FILE` (or of a YAML file as the only word) and those of all other flags,
    unchecked; None for a file that cannot be read. Raises UserError for any other word,
    and for a file of another trainer.
    """
    flags, words = read_flags(argv)
    for word in words:
        if "config" in flags or not word.endswith((".yaml", ".yml")):
            raise UserError(f"unexpected argument {word!r}; options are written --key value")
        flags["config"] = word
    path = flags.pop("config", None)
    if path is None:
        return {}, flags
    if isinstance(path, str):
        values = read_yaml(path, problems)
        foreign = sorted((OURS.keys() | HINTS.keys()) & (values or {}).keys())
        if len(foreign) >= 3 and HINTS.keys() & foreign:
            raise UserError(
                f"{path}: options of another trainer: {', '.join(foreign)}; dsft convert {path} writes a run.yaml of"
                " them"
            )
        return values, flags
    problems.append("--config: needs the path of one YAML file")
    return None, flags


def read_values(argv: Sequence[str], problems: list[str]) -> Values | None:
    """Returns the options of read_file_and_flags together, of which flags win; None if the file cannot be read."""
    in_file, flags = read_file_and_flags(argv, problems)
    return None if in_file is None else in_file | flags


def read_yaml(path: str, problems: list[str]) -> Values | None:
    """Returns the mapping in a YAML file; None if it is unreadable or malformed, which goes to `problems`."""
    try:
        content = yaml.load(read_text(path), _Loader)
    except OSError as error:
        problems.append(f"--config {path}: cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        problems.append(f"--config {path}: not valid UTF-8 ({error.reason} at byte {error.start})")
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: `!!int x`
        text = one_line(error).replace(' in "<unicode string>"', "")
        if isinstance(error, yaml.YAMLError):
            text += (
                "; a line is 'key: value', indented with spaces; a value with ': ' in it, or *, { or [ in front, needs"
                " quotes"
            )
        problems.append(f"--config {path}: not valid YAML: {text}")
    else:
        if content is None:
            return {}
        if isinstance(content, dict):
            return {str(key): value for key, value in content.items()}
        problems.append(f"--config {path}: must contain 'key: value' lines, found a {type(content).__name__}")
    return None


MOST_ALIASES = 10
"""Of a YAML file: nested aliases can expand to more than fits into memory."""


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, of which PyYAML silently takes the last, and more than MOST_ALIASES aliases."""

    num_aliases = 0

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            self.num_aliases += 1
            if self.num_aliases > MOST_ALIASES:
                line = self.peek_event().start_mark.line + 1
                raise ValueError(f"line {line}: more than {MOST_ALIASES} aliases (*name); write them out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        lines = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in lines:
                raise ValueError(f"line {line}: duplicate key {name}, first on line {lines[name]}; keep one")
            lines[name] = line
        return super().construct_mapping(node, deep)


# A timestamp stays a text.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


class Repeated(list):
    """All values of a repeated flag."""


def read_flags(argv: Sequence[str], types_by_name: Values | None = None) -> tuple[Values, list[str]]:
    """Returns (values of the flags in `argv`, all other words). `--key value` and `--key=value` are texts, `--key a b`
    is a list, and a bare `--key` is true.

    Args:
        types_by_name: the flags to read, by default all. After a switch only true or false is its value, after a list
            all words up to the next flag, after others one word.
    """
    occurrences: dict[str, list[list[str]]] = {}
    left = []
    values = left
    hint = None
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            hint = list[str] if types_by_name is None else types_by_name.get(name)
            if hint is None:  # of another command
                values = left
                left.append(word)
            else:
                values = [value] if equals else []
                occurrences.setdefault(name, []).append(values)
        else:
            has_its_word = values and not takes_list(hint)
            is_after_switch = hint is bool and word.lower() not in BOOLEANS
            if has_its_word or is_after_switch:
                values = left
            values.append(word)
    # The deepspeed launcher passes --local_rank=N, and also sets LOCAL_RANK.
    occurrences.pop("local_rank", None)
    flags = {}
    for name, lists in occurrences.items():
        words = [word for values in lists for word in values or [True]]
        if len(lists) > 1:
            flags[name] = Repeated(words)
        else:
            flags[name] = words if len(words) > 1 else words[0]
    return flags, left


def read_options(cls: type, argv: Sequence[str], problems: list[str]) -> tuple[Values, list[str]]:
    """(checked values of the fields of `cls` that flags in `argv` set, all other words)."""
    types_by_name = field_types(cls)
    flags, left = read_flags(argv, types_by_name)
    return check_values(flags, types_by_name, problems), left


def read_command(cls: type, argv: Sequence[str]) -> Any:
    """Makes a `cls` from the words of a command, of which fields that are not keyword-only are positional. Raises
    UserError with all unusable and missing words.
    """
    problems = []
    values, left = read_options(cls, argv, problems)
    types_by_name = field_types(cls)
    fields = options_of(cls)
    problems += [f"{word}: {describe_unknown(word, fields)}" for word in left if word.startswith("--")]
    raise_if_any(problems)  # first, since the next word may be the value of an unknown option
    words = left
    positional = [name for name, field in fields.items() if not field.kw_only and name not in values]
    if words and positional and takes_list(types_by_name[positional[0]]):
        words = [words]
    values |= check_values(dict(zip(positional, words, strict=False)), types_by_name, problems)
    problems += [f"unexpected argument {word!r}; options are written --key value" for word in words[len(positional) :]]
    raise_if_any(problems)
    try:
        return cls(**{fields[name].name: value for name, value in values.items()})
    except TypeError as error:  # a required one is missing
        names = re.findall(r"'(\w+)'", str(error))
        raise UserError(f"--{' and --'.join(names)} must be given") from None


def check_values(values: Values, types_by_name: Values, problems: list[str], *, also: type | None = None) -> Values:
    """Returns `values` converted to their fields' types; unknown keys and wrong types go to `problems`."""
    checked = {}
    for key, value in values.items():
        if key not in types_by_name:
            known = [*types_by_name, *(field_types(also) if also else ())]
            problems.append(f"{key}: {describe_unknown(key, known)}")
            continue
        hint = types_by_name[key]
        value = SAME_VALUES.get((key, str(value).lower()), value)  # of other trainers
        has_null = hint is Any or type(None) in typing.get_args(hint)
        if value is None and not has_null:
            continue  # null in YAML is an unset option
        try:
            checked[key] = convert(value, hint)
        except ValueError as error:
            problems.append(f"{key}: {'needs a value: ' if value is True else ''}{error}")
    for key in PATHS:
        value = checked.get(key)
        if isinstance(value, list):
            checked[key] = [os.path.expanduser(path) for path in value]
        elif value:
            checked[key] = os.path.expanduser(value)
    for key in types_by_name:  # in one order, for YAML and flags
        problems += check_bounds(key, checked.get(key))
    return checked


def own_names(values: Values, known: Collection[str], notes: list[str]) -> Values:
    """Returns the options with the names of other trainers replaced by dsft's, unless those are given too."""
    renamed = {}
    for key, value in values.items():
        name = OURS.get(key)
        if key not in known and name in known and name not in values and name not in renamed:
            notes.append(f"{key}: read as {name}")
            key = name
        renamed[key] = value
    return renamed


def describe_unknown(word: str, known: Collection[str]) -> str:
    """Returns what an unknown option, in a file or as a flag, was once or may mean."""
    key = word.removeprefix("--").partition("=")[0].replace("-", "_")
    if key in REMOVED_OPTIONS:
        return f"removed; {REMOVED_OPTIONS[key]}"
    if key in HINTS:
        return f"unknown key; {HINTS[key]}"
    if OURS.get(key) in known:
        return f"unknown key; {OURS[key]} is set too, and has the same meaning: keep one"
    return f"unknown key{nearest(key, known) or '; --help all lists every option'}"


def takes_list(hint: Any) -> bool:
    return any(typing.get_origin(member) is list for member in (hint, *typing.get_args(hint)))


def convert(value: Any, hint: Any) -> Any:
    """Converts a value of a YAML file, or the words of a flag, to its field's type; ValueError says what is allowed."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if isinstance(value, Repeated) and not takes_list(hint):
        raise ValueError(f"given {len(value)} times ({', '.join(map(str, value))}); keep one")
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_to_one_of(value, arguments)
    if origin is typing.Literal:
        return _choice(value, arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice(value, [str(member.value) for member in hint])
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [convert(item, arguments[0] if arguments else Any) for item in items]
    if origin is dict or hint is dict:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = yaml.load(value, _Loader)  # JSON, or {key: text} as in a file
            except (yaml.YAMLError, RecursionError) as error:
                raise ValueError(f"neither JSON nor YAML ({one_line(error)})") from None
        if not isinstance(value, dict):
            raise ValueError(
                f"expected a mapping such as '{{user: question, assistant: answer}}' for columns, got {value!r}"
            )
        key_type, value_type = arguments or (Any, Any)
        converted = {}
        for key, item in value.items():
            if value_type is Any and isinstance(item, str) and EXPONENT.fullmatch(item):
                item = float(item)
            converted[convert(key, key_type)] = convert(item, value_type)
        return converted
    return _convert_scalar(value, hint)


def _convert_to_one_of(value: Any, members: Sequence[Any]) -> Any:
    errors = []
    # An enumeration restricts the text beside it. Texts and lists accept nearly everything, so they come last.
    enums = [each for each in members if isinstance(each, type) and issubclass(each, Enum)]
    if enums and value is not None:
        members = enums
    if value == "none" and str in members:  # report_to and run_name of most scripts
        return value
    for member in sorted(members, key=lambda each: (typing.get_origin(each) is list, each is str, each is float)):
        try:
            return convert(value, member)
        except ValueError as error:
            if member is not type(None):
                errors.append(str(error))
    raise ValueError("; ".join(dict.fromkeys(errors)))


def _choice(value: Any, choices: Sequence[Any]) -> Any:
    text = str(getattr(value, "value", value))
    if value is False and "no" in choices:  # YAML reads a bare `no` as false
        return "no"
    names = [str(choice) for choice in choices]
    if text in names:
        return choices[names.index(text)]
    shown = names
    if len(names) > MOST_CHOICES:
        alike = [name for name in names if text in name] or difflib.get_close_matches(text, names, n=5, cutoff=0)
        shown = [*alike[:5], "..."]
    raise ValueError(f"invalid choice: {text!r} (choose from {', '.join(shown)}){nearest(text, names)}")


def _convert_scalar(value: Any, hint: type) -> Any:
    if hint is str and isinstance(value, float):  # YAML reads a revision 1.10 as 1.1
        raise ValueError(f"expected {SCALARS[str]}, got the number {value}; write it in quotes")
    try:
        if hint is bool:
            return value if isinstance(value, bool) else BOOLEANS[value.lower()]
        if hint is str and not isinstance(value, (dict, list, bool, type(None))):
            return str(value)
        if hint is type(None) and (value is None or value.lower() in ("none", "null")):
            return None
        if hint is int and (type(value) is int or "_" not in value):  # not a bool; int() accepts 1_000
            return int(value)
        if hint is float and not isinstance(value, bool):
            number = float(value)  # also `1e-4`, which PyYAML reads as a text
            if math.isfinite(number):
                return number
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        pass
    raise ValueError(f"expected {SCALARS[hint]}, got {value!r}")


def check_bounds(name: str, value: Any) -> list[str]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return []
    least, most, text = BOUNDS.get(name, (-math.inf, math.inf, ""))
    if not least <= value <= most or (name, value) == ("max_steps", 0):
        return [f"{name}={value}: must {text}"]
    if isinstance(value, int) and abs(value) > MOST and name not in ("seed", "data_seed"):
        return [f"{name}={value}: must be at most {MOST:,}"]
    return []


def check_config(options: TrainConfig | EvalConfig) -> list[str]:
    """Lists contradictions among the options."""
    problems = []
    if not options.model:
        problems.append("model: missing; name a hub id, a local folder or a config.json")
    if not options.data:
        problems.append(
            "data: missing; name a file, a folder, a glob or a hub data set; dsft eval --run RUN needs none"
        )
    for names, why in EXCLUSIVE.items():
        if all(options.value(name) for name in names.split()):
            problems.append(why)
    for names, why in NEEDED.items():
        name, needed = names.split()
        if options.value(name) and not options.value(needed):
            problems.append(why)
    if options.data_format == "template" and not options.completion_template:
        problems.append("data_format=template needs completion_template")
    if options.completion_template and options.data_format not in ("auto", "template"):
        problems.append(f"completion_template contradicts data_format={options.data_format}; keep one")
    if isinstance(options, TrainConfig):
        return problems + _check_training(options)
    return problems + _check_evaluation(options)


def _check_training(options: TrainConfig) -> list[str]:
    problems = []
    training = options.training
    if not training.get("output_dir"):
        problems.append("output_dir: missing; name the folder of this run, for example runs/first")
    problems += [f"{key}: {why}" for key, why in REFUSED_ARGUMENTS.items() if training.get(key)]
    optimizer = training.get("optim")
    if optimizer in REFUSED_OPTIMIZERS:
        problems.append(f"optim={optimizer}: {REFUSED_OPTIMIZERS[optimizer]}")
    for name in options.held_out_names:
        if name == "macro" or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            problems.append(
                f"eval_data: {name!r} cannot name a set; use letters, digits, _ and -, and not the word macro,"
                " which is the mean of all sets"
            )
    sets = [f"{name}_" for name in (*options.held_out_names, "macro")] if options.held_out_names else []
    known = [name + metric for name in ("", *sets) for metric in ("loss", "perplexity")]
    metric = training.get("metric_for_best_model")
    if metric and metric.removeprefix("eval_") not in known:
        problems.append(f"metric_for_best_model={metric}: choose from {', '.join(known)}{nearest(metric, known)}")
    if options.early_stopping_patience is not None and training.get("eval_strategy") == "no":
        problems.append("early_stopping_patience needs evaluations; leave eval_strategy: no out")
    for name in ("trainable", "frozen", "learning_rates"):
        for pattern in getattr(options, name):
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"{name}: {pattern!r} is not a regular expression ({error})")
    for pattern, factor in options.learning_rates.items():
        if not 0 < factor <= MOST:
            problems.append(f"learning_rates: {pattern}: {factor}: must be more than 0; frozen trains nothing")
    if options.method == "full" and options.adapter:
        problems.append(f"adapter={options.adapter} needs method lora or qlora; method is full")
    for flag, dtype in HALF_PRECISION.items():
        if training.get(flag) and options.dtype not in ("auto", dtype):
            problems.append(f"dtype={options.dtype} contradicts {flag}=true; keep one")
    return problems


def _check_evaluation(options: EvalConfig) -> list[str]:
    problems = []
    for name in ("model", "data", "quantization", "group_by"):
        values = getattr(options, name)
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        problems += [f"{name}: {value} is named twice; name it once" for value in twice]
    # A protocol may take its length from the model, and checks the stride itself.
    if not options.protocol and (options.stride or 0) >= options.seq_len:
        problems.append(
            f"stride={options.stride}: must be at least 1 and less than seq_len={options.seq_len}, so that every token"
            " has context"
        )
    if not options.protocol and (options.batch_tokens or math.inf) < options.seq_len:
        problems.append(
            f"batch_tokens={options.batch_tokens} is less than seq_len={options.seq_len}: one window must fit; raise"
            " batch_tokens"
        )
    if options.bad_rows != "error":
        problems.append(f"bad_rows={options.bad_rows}: an evaluation scores every row; fix or remove the bad ones")
    return problems


def read_text(path: str | Path) -> str:
    """Returns the text of a file. Raises OSError or UnicodeDecodeError if it cannot be read."""
    # Without the byte order mark of Windows editors, which a chat template would render in each chat.
    return Path(path).expanduser().read_text(encoding="utf-8-sig")
