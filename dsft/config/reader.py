"""Reads options from one YAML file and command-line flags, with the same names in both: one reader for all commands.

Every value is checked against its field's type and bounds, and options against each other; all problems are collected.
A flag given twice is one longer list where its field is a list, and a problem elsewhere; a YAML key given twice always
is one. What needs the model, the data, the machine or the DeepSpeed JSON is checked by `setup`.

"""

import dataclasses
import json
import math
import os
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from dsft.errors import UserError, limited_time, nearest, one_line, raise_if_any, without_second_errors

PATHS = ("output_dir", "model", "tokenizer", "adapter", "reference", "run", "resume_from_checkpoint")
"""Options of folders, in which ~ is the user's own: no shell has read the words of a file. Where other options name
one, its reader knows ~.
"""
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}
"""Type -> what a value of it is called."""
MOST = 10**9  # of every whole number: what is beyond is a slip, and counters of libraries overflow not far from there
MORE_THAN_0 = sys.float_info.min
LESS_THAN_1 = 1 - sys.float_info.epsilon
_BOUNDS = {
    # Sequences of a step are kept in memory.
    """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps global_batch_size""": (
        1,
        10**7,
        "be at least 1 and at most 10,000,000",
    ),
    "num_train_epochs": (MORE_THAN_0, 10**6, "be more than 0 and at most 1,000,000"),
    "neftune_noise_alpha": (0, 1000, "be at least 0 and at most 1,000"),
    "num_gpus": (1, 1024, "be 1 to 1,024, on each node; leave it out for all"),
    "num_nodes": (1, math.inf, "be at least 1; leave it out for all"),
    "master_port": (0, 2**16 - 1, f"be at least 0 and less than {2**16:,}"),
    # Each is a process of its own, beside every rank.
    "dataloader_num_workers": (0, 256, "be at least 0 and at most 256"),
    """lora_r lora_alpha max_documents stride sequence_parallel ddp_timeout dataloader_prefetch_factor
    early_stopping_patience max_skipped_steps max_new_tokens""": (1, math.inf, "be at least 1"),
    "logging_steps save_steps eval_steps save_minutes loraplus_lr_ratio": (MORE_THAN_0, math.inf, "be more than 0"),
    """learning_rate weight_decay warmup_steps max_grad_norm adam_epsilon samples eval_delay verify generate_samples
    temperature early_stopping_threshold router_aux_loss max_restarts wait_for_nodes""": (
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
"""Option -> its least and its largest value, and what it must do."""
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
"""Options of which only one can be set -> why."""
NEEDED = {
    "prompt_template completion_template": "prompt_template needs completion_template: what is trained on",
    "generate_samples has_held_out": "generate_samples: samples are made at evaluations; give eval_data or"
    " eval_fraction",
    "resume_weights_only resume_from_checkpoint": "resume_weights_only: name the checkpoint with"
    " resume_from_checkpoint",
    "early_stopping_patience has_held_out": "early_stopping_patience needs held-out data; give eval_data or"
    " eval_fraction",
    "early_stopping_threshold early_stopping_patience": "early_stopping_threshold needs early_stopping_patience",
    "dataloader_persistent_workers dataloader_num_workers": "dataloader_persistent_workers needs"
    " dataloader_num_workers of at least 1",
    "save_tokens output_dir": "save_tokens needs output_dir: the folder to keep the tokens in",
}
"""Option and the one that it needs -> why."""


def read_config(cls: type, argv: Sequence[str], problems: list[str], *, also: type | None = None) -> Any:
    """Reads the `cls` that `argv` (and its `--config FILE`) describe; faults go to `problems`. The defaults where the
    file cannot be read, of which nothing else is said then. A mistyped option may mean one of the class `also`.
    """
    values = read_file_and_flags(argv, problems)
    return cls() if values is None else make_config(cls, values, problems, also=also)


@limited_time("reading the options (aliases of YAML may be endless)")
def make_config(cls: type, values: dict[str, Any], problems: list[str], *, also: type | None = None) -> Any:
    """Makes the `cls` with these options by name, checked; faults go to `problems`."""
    dsft_types = field_types(cls)
    all_types = training_types() if cls is TrainConfig else dsft_types
    if values.get("resume_from_checkpoint") is True:  # the bare flag, and what transformers' own scripts take
        values = values | {"resume_from_checkpoint": "auto"}
    if values.get("report_to", "none") is None:
        values = {key: value for key, value in values.items() if key != "report_to"}
    notes: list[str] = []
    values = own_names(values, all_types, notes)
    refused: list[str] = []
    checked = check_values(values, all_types, refused, also=also)
    options = {key: value for key, value in checked.items() if key in dsft_types}
    if cls is TrainConfig:
        options["training"] = {key: value for key, value in checked.items() if key not in dsft_types}
    config = cls(**options, notes=tuple(notes))
    problems += refused + without_second_errors(check_config(config), refused)
    return config


def options_of(cls: type) -> dict[str, dataclasses.Field]:
    """Option as users write it -> its field; `from_` is the field of --from, which Python keeps for itself."""
    fields = [field for field in dataclasses.fields(cls) if field.metadata.get("option", True)]
    return {field.name.removesuffix("_"): field for field in fields}


def field_types(*classes: type) -> dict[str, Any]:
    """Maps names to type annotations for the options among the fields of `classes`; earlier classes win."""
    hints: dict[str, Any] = {}
    for cls in reversed(classes):
        annotations = typing.get_type_hints(cls)
        hints |= {name: annotations[field.name] for name, field in options_of(cls).items()}
    return hints


def training_types() -> dict[str, Any]:
    """Maps names to types of all options of a training, those of transformers.TrainingArguments included."""
    return argument_types() | field_types(TrainConfig)


def read_file_and_flags(argv: Sequence[str], problems: list[str]) -> dict[str, Any] | None:
    """Option -> value of `--config FILE` with all flags over it, unchecked; None if the file cannot be read."""
    flags = read_flags(argv, problems)
    values = read_named_file(flags, problems)
    return None if values is None else values | flags


def read_named_file(flags: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """Takes `--config FILE` out of the flags: the mapping in it, an empty one without; None if it is unreadable."""
    path = flags.pop("config", None)
    if path is None or isinstance(path, str):
        return {} if path is None else read_yaml(path, problems)
    problems.append("--config: needs the path of one YAML file")
    return None


def read_yaml(path: str, problems: list[str]) -> dict[str, Any] | None:
    """The mapping in a YAML file; None if it is unreadable or malformed, which goes to `problems` with its line."""
    try:
        loader = _Loader(read_text(path))
        content = loader.get_single_data()
    except OSError as error:
        problems.append(f"--config {path}: cannot be read ({error.strerror})")
        return None
    except UnicodeDecodeError as error:
        problems.append(f"--config {path}: not valid UTF-8 ({error.reason} at byte {error.start})")
        return None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: `!!int x`
        problems.append(f"--config {path}: not valid YAML: {one_line(error)}")
        return None
    problems += [f"--config {path}: {problem}" for problem in loader.problems]
    if content is None:
        return {}
    if not isinstance(content, dict):
        problems.append(f"--config {path}: must hold 'key: value' lines, found a {type(content).__name__}")
        return None
    return {str(key): value for key, value in content.items()}


class _Loader(yaml.SafeLoader):
    """Notes keys that are given twice, of which PyYAML takes the last without a word. A time stays a text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str):
        super().__init__(text)
        self.problems: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            first = lines.setdefault(str(key.value), line)
            if first != line:
                self.problems.append(f"line {line}: duplicate key {key.value}, first on line {first}; keep one")
        return super().construct_mapping(node, deep)


class Repeated(list):
    """All values of a flag that is given more than once."""


def read_flags(argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` (a list) and bare `--key` (true), as strings, lists and True."""
    occurrences: dict[str, list[list[str]]] = {}
    values: list[str] | None = None
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            occurrences.setdefault(key.replace("-", "_"), []).append(values)
        elif values is None:
            if word.endswith((".yaml", ".yml")):  # a lone file is the configuration
                occurrences.setdefault("config", []).append([word])
            else:
                problems.append(f"unexpected argument {word!r}; options are written --key value")
        else:
            values.append(word)
    # Every rank gets --local_rank=N from the deepspeed launcher, which also sets LOCAL_RANK.
    occurrences.pop("local_rank", None)
    flags: dict[str, Any] = {}
    for key, lists in occurrences.items():
        words = [word for values in lists for word in values or [True]]
        flags[key] = Repeated(words) if len(lists) > 1 else words if len(words) > 1 else words[0]
    return flags


def split_flags(argv: Sequence[str], types_by_name: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(words of `argv` that set the named fields, all other words in their order).

    A switch takes no value but true or false, a list all words up to the next flag, any other field one word.
    """
    taken: list[str] = []
    left: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        hint = types_by_name.get(name.replace("-", "_")) if word.startswith("--") else None
        if hint is None:
            left.append(word)
            continue
        taken.append(word)
        is_list = takes_list(hint)
        while not equals and words and not words[0].startswith("--"):
            if hint is bool and words[0].lower() not in BOOLEANS:
                break
            taken.append(words.pop(0))
            if not is_list:
                break
    return taken, left


def read_options(cls: type, argv: Sequence[str], problems: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(checked values of the fields of `cls` that flags in `argv` set, all other words)."""
    types_by_name = field_types(cls)
    taken, left = split_flags(argv, types_by_name)
    return check_values(read_flags(taken, problems), types_by_name, problems), left


def read_command(cls: type, argv: Sequence[str]) -> Any:
    """The `cls` that the words of a command describe. Its fields that are not keyword-only are positional words; a
    list takes all that are left.

    Raises:
        UserError: with every word that cannot be used and every required one that is missing.
    """
    problems: list[str] = []
    values, left = read_options(cls, argv, problems)
    types_by_name = field_types(cls)
    fields = options_of(cls)
    words: list[Any] = [word for word in left if not word.startswith("--")]
    for word in left:
        if word.startswith("--"):
            problems.append(f"{word}: unknown option{nearest(word, [f'--{name}' for name in fields])}")
    positional = [name for name, field in fields.items() if not field.kw_only and name not in values]
    if positional and words and takes_list(types_by_name[positional[0]]):
        words = [words]
    values |= check_values(dict(zip(positional, words, strict=False)), types_by_name, problems)
    raise_if_any(problems)
    problems += [f"{word}: unexpected argument" for word in words[len(positional) :]]
    raise_if_any(problems)
    try:
        return cls(**{fields[name].name: value for name, value in values.items()})
    except TypeError as error:  # a required one is missing
        raise UserError(one_line(error).partition(" ")[2]) from None


def check_values(
    values: Mapping[str, Any], types_by_name: Mapping[str, Any], problems: list[str], *, also: type | None = None
) -> dict[str, Any]:
    """`values` converted to their fields' types, with ~ in PATHS written out; unknown keys and wrong types go to
    `problems`.
    """
    checked = {}
    if len(HINTS.keys() & values.keys() - types_by_name.keys()) >= 3:
        problems.append("this looks like the file of another trainer: dsft convert FILE writes a run.yaml of it")
    for key, value in values.items():
        if value is None and key in types_by_name and not takes_none(types_by_name[key]):
            continue  # null in YAML: the option is not set
        if key in REMOVED_OPTIONS and key not in types_by_name:
            problems.append(f"{key}: removed; {REMOVED_OPTIONS[key]}")
            continue
        if key not in types_by_name:
            known = [*types_by_name, *(field_types(also) if also else ())]
            problems.append(f"{key}: unknown key{_hint(key, known)}")
            continue
        if isinstance(value, Repeated) and not takes_list(types_by_name[key]):
            problems.append(f"--{key} is given {len(value)} times ({', '.join(map(str, value))}); keep one")
            continue
        if isinstance(value, str):
            value = SAME_VALUES.get((key, value), value)  # of other trainers
        try:
            checked[key] = convert(value, types_by_name[key])
        except ValueError as error:
            problems.append(f"{key}: {'needs a value: ' if value is True else ''}{error}")
    for key in PATHS:
        path = checked.get(key)
        if isinstance(path, list):
            checked[key] = [os.path.expanduser(each) for each in path]
        elif isinstance(path, str):
            checked[key] = os.path.expanduser(path)
    for key in types_by_name:  # in one order, wherever the values stand
        problems += check_bounds(key, checked.get(key))
    return checked


def own_names(values: Mapping[str, Any], known: Collection[str], notes: list[str]) -> dict[str, Any]:
    """Returns the options with the names of other trainers replaced by dsft's, if those are not given as well."""
    renamed = {}
    for key, value in values.items():
        name = OURS.get(key)
        if key not in known and name in known and name not in values and name not in renamed:
            notes.append(f"{key}: read as {name}")
            renamed[name] = value
        else:
            renamed[key] = value
    return renamed


def _hint(key: str, known: list[str]) -> str:
    """Returns, after a semicolon, what an unknown option may mean; empty if nothing is similar."""
    if key in HINTS:
        return f"; {HINTS[key]}"
    if OURS.get(key) in known:
        return f"; {OURS[key]} is set too, and has the same meaning: keep one"
    return nearest(key, known)


def takes_none(hint: Any) -> bool:
    """Whether None is a value of its own for a field of this type; a text `none` is where it is a text."""
    return hint is Any or type(None) in (hint, *typing.get_args(hint))


def takes_list(hint: Any) -> bool:
    """Whether a field of this type can hold a list."""
    return any(typing.get_origin(member) in (list, Sequence) for member in (hint, *typing.get_args(hint)))


def _choice(value: Any, enums: list[type[Enum]], choices: Sequence[Any]) -> Any:
    """Returns the choice that `value` names, of a Literal or of an enumeration."""
    if enums:  # also of `IntervalStrategy | str`: the enumeration is the law
        choices = [str(member.value) for member in enums[0]]
        # YAML reads a bare `no` as false.
        value = "no" if value is False else str(getattr(value, "value", value))
    for choice in choices:
        # The type too: Literal[False] must not take a 0, nor Literal[0] a False.
        if (type(value) is type(choice) and value == choice) or (isinstance(value, str) and value == str(choice)):
            return choice
    names = [str(choice) for choice in choices]
    raise ValueError(f"invalid choice: {value!r} (choose from {', '.join(names)}){nearest(str(value), names)}")


def convert(value: Any, hint: Any) -> Any:
    """Converts a value of a YAML file, or the words of a flag, to the type of its field.

    Raises:
        ValueError: what was given, and what is allowed.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    is_union = origin in (typing.Union, types.UnionType)
    enums = [each for each in (arguments if is_union else (hint,)) if isinstance(each, type) and issubclass(each, Enum)]
    if hint is Any:
        return value
    if origin is typing.Literal or (enums and not (is_union and value is None)):
        return _choice(value, enums, arguments)
    if is_union:
        # A string fits `str` always and a list of one nearly always, so these come last.
        members = sorted(arguments, key=lambda each: (typing.get_origin(each) is list, each is str, each is float))
        if value == "none" and str in members:  # report_to and run_name of most scripts
            return value
        errors = []
        for member in members:
            try:
                return convert(value, member)
            except ValueError as error:
                if member is not type(None):
                    errors.append(str(error))
        raise ValueError("; ".join(dict.fromkeys(errors)))
    if origin in (list, Sequence):
        items = value if isinstance(value, list) else [value]
        return [convert(item, arguments[0] if arguments else Any) for item in items]
    if origin is dict or hint is dict:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value, object_pairs_hook=unique_keys)
            except DuplicateKey as error:
                raise ValueError(f"duplicate key {error}; keep one") from None
            except (json.JSONDecodeError, RecursionError):
                try:
                    value = yaml.safe_load(value)  # {key: text}, as in a file
                except (yaml.YAMLError, RecursionError) as error:
                    raise ValueError(f"neither JSON nor YAML ({one_line(error)})") from None
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping, got {value!r}")
        key_type, value_type = arguments or (Any, Any)
        return {convert(key, key_type): convert(item, value_type) for key, item in value.items()}
    if hint not in SCALARS:
        raise ValueError(f"cannot be set from a file or a flag ({hint})")
    if hint is str and isinstance(value, float):  # of YAML, which reads the revision 1.10 as 1.1
        raise ValueError(f"expected {SCALARS[str]}, got the number {value}; write it in quotes")
    try:
        if hint is bool:
            return value if isinstance(value, bool) else BOOLEANS[value.lower()]
        if hint is str and not isinstance(value, (dict, list, bool, type(None))):
            return str(value)
        if hint is type(None) and (value is None or value.lower() in ("none", "null")):
            return None
        if hint is int and (type(value) is int or "_" not in value):  # a bool is an int, too; int() would take 1_000
            return int(value)
        if hint is float and not isinstance(value, bool):
            number = float(value)  # also YAML's `1e-4`, which PyYAML reads as a string
            if math.isfinite(number):
                return number
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        pass
    raise ValueError(f"expected {SCALARS[hint]}, got {value!r}")


def check_bounds(name: str, value: Any) -> list[str]:
    """Lists why the option `name` cannot have this value, if it is a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return []
    least, most, text = BOUNDS.get(name, (-math.inf, math.inf, ""))
    is_no_step = name == "max_steps" and value == 0
    if not least <= value <= most or is_no_step:
        return [f"{name}={value}: must {text}"]
    if isinstance(value, int) and abs(value) > MOST and name not in ("seed", "data_seed"):
        return [f"{name}={value}: must be at most {MOST:,}"]
    return []


def check_config(options: TrainConfig | EvalConfig) -> list[str]:
    """Lists the contradictions of the options alone."""
    problems = []
    if not options.model:
        problems.append("model: missing; name a hub id, a local folder or a config.json")
    if not options.data:
        problems.append("data: missing; name a file, a folder, a glob or a hub data set")
    batch_tokens = options.value("batch_tokens")  # of an evaluation, whose protocol has a length of its own
    if batch_tokens is not None and batch_tokens < options.seq_len and not options.value("protocol"):
        problems.append(
            f"batch_tokens={batch_tokens} is less than seq_len={options.seq_len}: one window must fit; raise"
            " batch_tokens"
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
    if (optimizer := training.get("optim")) in REFUSED_OPTIMIZERS:
        problems.append(f"optim={optimizer}: {REFUSED_OPTIMIZERS[optimizer]}")
    for name in options.held_out_names:
        if name == "macro" or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            problems.append(
                f"eval_data: {name!r} cannot name a set; use letters, digits, _ and -, and another word than macro,"
                " which is the mean of all sets"
            )
    known = ["loss", "perplexity"]
    for name in (*options.held_out_names, "macro") if options.held_out_names else ():
        known += [f"{name}_loss", f"{name}_perplexity"]
    metric = training.get("metric_for_best_model")
    if metric and metric.removeprefix("eval_") not in known:
        problems.append(f"metric_for_best_model={metric}: evaluation gives {', '.join(known)}{nearest(metric, known)}")
    if options.early_stopping_patience is not None and training.get("eval_strategy") == "no":
        problems.append("early_stopping_patience needs evaluations; leave eval_strategy: no out")
    for name in ("trainable", "frozen", "learning_rates"):
        for pattern in getattr(options, name):
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"{name}: {pattern!r} is no regular expression ({error})")
    for pattern, factor in options.learning_rates.items():
        if not 0 < factor <= MOST:
            problems.append(f"learning_rates: {pattern}: {factor}: must be a number more than 0; frozen trains nothing")
    if options.method == "full" and options.adapter:
        problems.append(f"adapter={options.adapter} needs method lora or qlora; method is full")
    halves = {key: dtype for key, dtype in HALF_PRECISION.items() if training.get(key)}
    if halves and options.dtype not in ("auto", *halves.values()):
        problems.append(f"dtype={options.dtype} contradicts {next(iter(halves))}=true; keep one")
    return problems


def _check_evaluation(options: EvalConfig) -> list[str]:
    problems = [
        f"{name}: {value} is named twice; name it once"
        for name in ("model", "data", "quantization", "group_by")
        for value, times in Counter(getattr(options, name)).items()
        if times > 1
    ]
    # A protocol may have another length, of the model, and then checks it by itself.
    if not options.protocol and options.stride is not None and options.stride >= options.seq_len:
        problems.append(
            f"stride={options.stride}: must be at least 1 and less than seq_len={options.seq_len}, so that every token"
            " has context"
        )
    if options.bad_rows != "error":
        problems.append(f"bad_rows={options.bad_rows}: an evaluation scores every row; fix or remove the bad ones")
    return problems


class DuplicateKey(ValueError):
    """A key that one JSON object has twice: json.loads would take the last one without a word."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of a JSON object, for `object_pairs_hook` of json.loads.

    Raises:
        DuplicateKey: naming the first key that is there twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(repr(next(name for name in names if names.count(name) > 1)))
    return values


def read_text(path: str | Path) -> str:
    """The text of a file. Raises OSError, UnicodeDecodeError: it cannot be read."""
    # Without the mark that editors of Windows begin a file with: a chat template would render it in each chat.
    return Path(path).expanduser().read_text(encoding="utf-8-sig")
