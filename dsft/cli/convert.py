"""`dsft convert`: a configuration of axolotl, LLaMA-Factory or TRL becomes a run.yaml.

What their options mean is data: `config/elsewhere.toml`. Here a file is read, each of its options is translated, by a
kind of `translated` where its value has another form, and what has no counterpart is named, in the file and on the
screen. No model, data or GPU is needed.

dsft convert axolotl.yaml --output run.yaml
dsft convert sft.sh --from trl        # a shell script with the command line
"""

import contextlib
import json
import re
import shlex
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsft.cli.commands import ConvertOptions
from dsft.config.elsewhere import DEFAULTS, OF, SAME_NAME, SUPERVISED, TEXT_ALONE, TRAINERS, Elsewhere
from dsft.config.options import EVALUATES, IGNORED_ARGUMENTS, REFUSED_ARGUMENTS, TrainConfig, argument_types
from dsft.config.reader import check_values, field_types, make_config, read_flags, read_text, read_yaml, training_types
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.chat_template import load_template
from dsft.runtime.console import show_text

SAME = {name: each for each in SAME_NAME for name in each.names.split()}
END = "\n...\n"
"""Of YAML, behind a value that is no list."""
OPERATORS = "<>|&;"
"""Of a shell, between commands and before files."""
COMMANDS = {"trl": "trl", "llamafactory-cli": "llamafactory", "axolotl": "axolotl"}
"""Program of a command line -> its trainer."""
Values = Mapping[str, Any]  # options by name: dsft's, or all that the other trainer is given


class CannotTrain(ValueError):
    """What a training does that dsft cannot do."""


def convert_file(options: ConvertOptions) -> None:
    """Write the run.yaml. Raises UserError where a file cannot be read or written, or the training is none that dsft
    can do.
    """
    output = Path(options.output)
    if output.exists():
        raise UserError(f"{output}: exists; name another file with --output")
    given, trainer = read_trainer_file(options.file)
    by_options = (name for name, known in TRAINERS.items() if given.keys() & set(known.split()))
    trainer = options.from_ or trainer or next(by_options, "")
    if not trainer:
        raise UserError(f"{options.file}: no options of {', '.join(TRAINERS)} in it; name the trainer with --from")
    converted = Converted(given, trainer)
    raise_if_any([f"{options.file}: {', '.join(names)}: {why}" for why, names in converted.reasons.items()])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(converted.text(source=options.file), encoding="utf-8")
    show_text(
        f"dsft: {output}: written: {len(converted.values)} options, from {len(given)} of {trainer} and its defaults"
    )
    for name, note in converted.notes:
        show_text(f"dsft: {name}: {note}")
    for problem in converted.problems:
        show_text(f"dsft: to do: {problem}")
    config = shlex.quote(str(output))
    show_text(f"dsft: next: dsft preview --config {config}, then dsft plan --config {config}")


def read_trainer_file(file: str) -> tuple[dict[str, Any], str]:
    """(options of a YAML file or of the command line in a shell script, the trainer that a command names). Raises
    UserError where it is unreadable, or its command trains otherwise than sft.
    """
    problems: list[str] = []
    if file.endswith((".yaml", ".yml", ".json")):
        given = read_yaml(file, problems)
        raise_if_any([problem.removeprefix("--config ") for problem in problems])
        return without_nulls(given or {}), ""
    try:
        text = read_text(file).replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    variables = dict(re.findall(r"^(?:export )?(\w+)=(\S+)$", text, re.MULTILINE))
    text = string.Template(text).safe_substitute(variables)
    lines = [line for line in text.splitlines() if " --" in line and not line.lstrip().startswith("#")]
    if len(lines) != 1:
        raise UserError(f"{file}: expected a .yaml file, or one command line with options; found {len(lines)}")
    words: list[str] = []
    lexer = shlex.shlex(re.sub(r"\s\d(?=[<>])", " ", lines[0]), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        for word in lexer:
            if not set(word) <= set(OPERATORS):
                words.append(word)
            elif any(each.startswith("--") for each in words):
                break  # > train.log 2>&1 | tee ...: no words of the training
            else:
                words = []  # cd folder && ...
    except ValueError as error:
        raise UserError(f"{file}: not a command line ({error})") from None
    trainer = next((COMMANDS[Path(word).name] for word in words if Path(word).name in COMMANDS), "")
    script = next((word for word in words if word.endswith(".py")), "")
    kind = Path(script).stem if script else "".join(words[words.index("trl") + 1 :][:1]) if "trl" in words else "sft"
    if trainer in ("", "trl") and (not kind.startswith("sft") or "vlm" in kind):
        raise UserError(f"{file}: {kind}: {TEXT_ALONE if 'vlm' in kind else SUPERVISED}; only sft is converted")
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    flags = read_flags([word for word in words[first:] if word != script], problems)
    raise_if_any([f"{file}: {problem}" for problem in problems])
    files = [word for word in words[:first] if word.endswith((".yaml", ".yml"))]  # axolotl train FILE --flags
    named = flags.pop("config", None) or next(iter(files), None)
    values = read_trainer_file(named)[0] if named else {}
    for name, value in flags.items():  # as a YAML file would hold it: numbers, true and false, JSON
        values[name] = value
        if isinstance(value, str):
            with contextlib.suppress(yaml.YAMLError):
                values[name] = yaml.safe_load(value)
    return without_nulls(values), trainer or "trl"


def without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """None, and the empty text that axolotl's files also have, stand for what is not given."""
    return {name: value for name, value in given.items() if value is not None and value != ""}


def left_out(why: str) -> str:
    """Why an option has none in dsft. Args: `why`: what its entry tells those who write it."""
    return "left out; " + why.removesuffix("; leave it out").removeprefix("leave it out").lstrip(";, ")


class Converted:
    """Options of dsft for those of another trainer, and what became of each."""

    def __init__(self, given: Mapping[str, Any], trainer: str):
        self.given, self.trainer = given, trainer
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        """Option of dsft -> those of the trainer that it comes from."""
        self.notes: list[tuple[str, str]] = []
        """(option of the trainer, what has no counterpart in it, or what to look at)."""
        self.reasons: dict[str, list[str]] = {}
        """Why dsft cannot train it -> options that ask for it."""
        order = [*SAME, *OF]  # the table's order: an adapter before what quantises its base, and the file by groups
        for name in sorted(given, key=lambda each: order.index(each) if each in order else len(order)):
            self._add(name, given[name])
        for name, value in DEFAULTS[trainer].items():
            self._add(name, value, is_default=True)
        # Take out what the options refuse one by one, or what has nothing to act on; keep what they lack together.
        for option, value in list(self.values.items()):
            problems: list[str] = []
            checked = check_values({option: value}, training_types(), problems)
            if option == "chat_template" and not problems:
                try:
                    load_template(str(value))
                except ValueError:
                    problems.append(f"{value}: no preset or file here; the tokenizer's own is taken")
            if problems:
                self._drop(option, "; ".join(problem.split(" (choose from")[0] for problem in problems))
            elif checked[option] is None:  # "none", which is dsft's default
                del self.values[option]
            else:
                self.values[option] = checked[option]
        if self.values.get("method", "full") == "full":
            for option in [each for each in self.values if each.startswith("lora_")]:
                self._drop(option, "all weights are trained", is_noted="default" not in self.origins[option])
        if not self.values.get("eval_data") and not self.values.get("eval_fraction"):
            for option, value in list(self.values.items()):
                if option in ("eval_strategy", "eval_steps") or value in EVALUATES.get(option, ()):
                    self._drop(option, "no held-out data is given")
        self.problems: list[str] = []
        """What is left to do: what a training would refuse of the options."""
        make_config(TrainConfig, self.values, self.problems)

    def _add(self, name: str, value: Any, *, is_default: bool = False) -> None:
        """Translate one option; a default takes the place of none that is given."""
        notes: list[str] = []
        elsewhere = SAME.get(name) or OF.get(name)
        options: Mapping[str, Any] = {}
        try:
            options = self._translated(name, value, elsewhere, notes)
        except CannotTrain as error:
            self.reasons.setdefault(str(error), []).append(name)
        except (ValueError, TypeError, AttributeError, KeyError):
            notes.append(f"{value!r} cannot be read as {self.trainer} has it")
        if is_default:
            options = {option: each for option, each in options.items() if option not in self.values}
        if not (options or notes or is_default or value in (False, 0) or name not in {*SAME, *OF}):
            notes += [] if elsewhere.is_refused else [left_out(elsewhere.how)]  # nothing vanishes in silence
        self.notes += [(name, note) for note in notes]
        for option, each in options.items():
            source = f"{self.trainer}'s default" if is_default else name
            before = self.origins.get(option)
            self.origins[option] = f"{before}, {source}" if before and source not in before.split(", ") else source
            self.values[option] = each

    def _translated(self, name: str, value: Any, elsewhere: Elsewhere | None, notes: list[str]) -> Mapping[str, Any]:
        """Options of dsft for one of the trainer's."""
        ours = [option for option in (elsewhere.ours.split() if elsewhere else [name]) if option in training_types()]
        if elsewhere is None and not ours:
            notes.append("no counterpart")
            return {}
        if elsewhere is None or elsewhere.becomes is None:
            why = IGNORED_ARGUMENTS.get(name) or (value and REFUSED_ARGUMENTS.get(name))
            if why or not ours:
                notes.append(left_out(why or elsewhere.how))
                return {}
            return {ours[0]: value}
        if isinstance(elsewhere.becomes, str):
            return translated(elsewhere.becomes, elsewhere.option, value, self.given, notes)
        if isinstance(value, (str, int, float)) and value in elsewhere.becomes:
            return elsewhere.becomes[value]
        if elsewhere.is_refused:
            self.reasons.setdefault(elsewhere.how, []).append(f"{name}={value}" if isinstance(value, str) else name)
        elif name in SAME:
            return {name: value}
        else:
            notes.append(f"{value}: no counterpart; {elsewhere.how}".rstrip("; "))
        return {}

    def _drop(self, option: str, reason: str, *, is_noted: bool = True) -> None:
        del self.values[option]
        if is_noted and (self.origins[option], reason) not in self.notes:
            self.notes.append((self.origins[option], reason))

    def text(self, *, source: str) -> str:
        """The run.yaml: options with the names that they come from, then all that was left out."""
        lines = [f"# {source}, as {self.trainer} has it, converted by dsft convert.", ""]
        order = [*field_types(TrainConfig), *argument_types()]
        for option in sorted(self.values, key=order.index):
            written = yaml.safe_dump(self.values[option], default_flow_style=True, width=10_000, allow_unicode=True)
            comment = "" if self.origins[option] == option else f"  # {self.origins[option]}"
            lines.append(f"{option}: {written.removesuffix(END).rstrip()}{comment}")
        if self.notes:
            lines += ["", "# Without a counterpart, or to look at:"]
            lines += [f"# {name}: {one_line(note)}" for name, note in self.notes]
        return "\n".join(lines) + "\n"


# Values of another form


def _items(value: Any) -> list[Any]:
    """A list, or what is written as one text with commas; axolotl and flags also leave commas at the ends of words."""
    words = [value] if isinstance(value, str) else value
    parts = [part for word in words for part in (word.split(",") if isinstance(word, str) else [word])]
    return [part.strip() if isinstance(part, str) else part for part in parts if part]


def translated(kind: str, option: str, value: Any, given: Values, notes: list[str]) -> Values:  # noqa: C901
    """Returns the options of dsft for one value, by the kind that elsewhere.toml has for its name.

    Args:
        option: of dsft, that it is for.
        given: all options of the other trainer.
        notes: to which is added what has no counterpart, or what to look at.
    """
    match kind:
        case "nothing":
            return {}
        case "text":
            return {option: str(value)}
        case "items":
            return {option: _items(value)}
        case "numbers":
            return {option: [float(item) for item in _items(value)]}
        case "percent":
            return {option: float(value) / 100}
        case "data" | "stream":
            return _data(option, value, notes) | ({"streaming": True} if kind == "stream" else {})
        case "listed_data":
            return _listed_data(option, value, given, notes)
        case "held_out":  # TRL evaluates on a split of the same data set, where it is asked to evaluate
            is_asked = str(given.get("eval_strategy", "no")) != "no" and "dataset_name" in given
            return {"eval_data": [given["dataset_name"]], "eval_split": value} if is_asked else {}
        case "share_of_rows":
            if float(value) < 1:
                return {option: float(value)} if float(value) else {}
            notes.append(f"{value} rows are held out there; eval_fraction is a share of them, such as 0.02")
        case "answers":
            if value == "" and not {"assistant_only_loss", "completion_only_loss"} & given.keys():
                notes.append("TRL learns all tokens of a chat by default, dsft the answers; train_on: all learns all")
            return {} if value == "" else {option: "answers" if value else "all"}
        case "peft":
            if value and "lora_target_modules" not in given:
                notes.append(
                    "without lora_target_modules TRL adapts what peft names for the model, often q_proj and v_proj"
                    " alone; dsft adapts every linear layer"
                )
            return {option: "lora"} if value else {}
        case "lora_alpha":
            return {option: value or 2 * int(given.get("lora_rank") or 8)}
        case "lora_target":
            return {option: ["all-linear"] if value == "all" else _items(value)}
        case "target_modules":
            if not (isinstance(value, str) and set("()[]*|\\") & set(value)):
                return {option: _items(value)}
            notes.append("a regular expression; write the names or their endings as a list")
        case "target_parameters":
            return {option: {"target_parameters": _items(value)}}
        case "unfrozen":
            if not given.get("adapter"):
                return {option: _items(value)}
            notes.append("left out; with an adapter all other weights stay as they are")
        case "total_batch":  # axolotl divides this by micro_batch_size, whatever the number of GPUs
            return {"gradient_accumulation_steps": max(int(value) // int(given.get("micro_batch_size") or 1), 1)}
        case "scheduler":  # axolotl ends a cosine at a share of the learning rate by an option of its own
            least = given.get("cosine_min_lr_ratio")
            if value != "cosine" or least is None:
                return {option: value}
            return {option: "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": float(least)}}
        case "steps":  # axolotl goes by these steps without a strategy; transformers by its strategy
            strategy = option.replace("_steps", "_strategy")
            is_implied = "base_model" in given and strategy not in given
            return {option: value} | ({strategy: "steps"} if is_implied else {})
        case "per_epoch":  # a share of all steps (axolotl/utils/config/__init__.py: 1 / (times x epochs))
            times, strategy = float(value) * float(given.get("num_epochs") or 1), option.replace("_steps", "_strategy")
            if 0 < times <= 1 and float(value) < 1:  # a share of 1 or more is a number of steps
                notes.append("at most once in the whole run; here at the end of each epoch")
            if not times:
                return {}
            if float(value) == 1 or times <= 1:
                return {strategy: "epoch"}
            return {strategy: "steps", option: round(1 / times, 6)}
        case "wandb":
            notes.append(f"set WANDB_PROJECT, WANDB_ENTITY or WANDB_NAME in the environment to {value}")
            return {option: "wandb"}
        case "deepspeed":  # a JSON of DeepSpeed's, or a configuration of accelerate's, by its name where it is not here
            if not isinstance(value, str):
                notes.append("write this object to a JSON file, and name it with zero")
            elif value.endswith(".json") and Path(value).is_file():
                return {"zero": value}
            elif (stem := Path(value).stem) == "multi_gpu":
                return {"zero": "0"}
            elif stage := re.search(r"z(?:ero)?_?([0-3])", stem):
                offload = "" if "offload" not in stem else "-offload-param" if "param" in stem else "-offload"
                notes.append(f"{value} is no file here; zero: {stage[1]}{offload} is dsft's own of that kind")
                return {"zero": stage[1] + offload}
            else:
                notes.append(f"{value} names no stage of ZeRO; zero: auto, the default, chooses one")
        case _:
            raise AssertionError(kind)
    return {}


def _data(option: str, value: Any, notes: list[str]) -> Values:
    """A list of data sets as axolotl and TRL have them, for `data` or `eval_data`."""
    names, forms = [], []
    for entry in _items(value) if isinstance(value, str) else value if isinstance(value, list) else [value]:
        entry = {"path": entry} if isinstance(entry, str) else entry
        name, files, split = entry.get("path"), entry.get("data_files"), entry.get("split") or "train"
        if isinstance(files, Mapping):  # split -> files of it
            if others := [each for each in files if each != split]:
                notes.append(f"data_files: {', '.join(map(str, others))} left out; eval_data takes what is held out")
            files, split = files.get(split), "train"
        if files and (not name or name in ("json", "csv", "parquet", "arrow", "text")):
            names += _items(files)
            name = _items(files)[0]
        elif Path(str(name)).exists() or re.search(r"\.(jsonl?|csv|parquet|arrow|txt)$", str(name)):
            names.append(name)
        else:
            names.append(_hub_name(name, entry.get("name"), split))
            split = "train"  # it is part of the name
            if files:
                notes.append(f"{name}: download its {', '.join(_items(files))} and name the file")
        if split != "train":
            notes.append(f"{name}: a file has no split; cut {split} out of it before")
        forms.append(_form(entry, name, notes))
    if any(form != forms[0] for form in forms):
        notes.append("its entries have several forms, and here all rows have one; bring them into one before")
    form = {key: each for form in forms for key, each in form.items()}
    return {option: names} | (form if option == "data" else {})


def _hub_name(name: str, config: str | None, split: str) -> str:
    """Returns NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."""
    parts = [name, config or "", split]
    return ":".join(parts[: 3 if split != "train" else 2 if config else 1])


def _form(entry: Values, name: str, notes: list[str]) -> Values:
    """How the rows of an entry are read, where their columns do not show it."""
    kind = entry.get("type")
    if isinstance(kind, dict):  # axolotl's own prompt: user_defined.py
        fields = {each: kind.get(f"field_{each}") or each for each in ("system", "instruction", "input", "output")}
        prompt = kind.get("format") or "{instruction} {input} "
        prompt = re.sub(r"{(\w+)}", lambda match: "{" + fields.get(match[1], match[1]) + "}", prompt)
        if system := kind.get("system_prompt"):
            prompt = f"{system}\n{prompt}"
        if kind.get("no_input_format"):
            notes.append(f"{name}: rows without {fields['input']} get the same prompt")
        return {"prompt_template": prompt, "completion_template": "{" + fields["output"] + "}"}
    messages = entry.get("field_messages")
    if messages not in (None, "messages", "conversations"):
        notes.append(f"{name}: rename the column {messages} to messages")
    keys = {each: entry.get(f"message_field_{each}") or each for each in ("role", "content")}
    keys |= entry.get("message_property_mappings") or {}
    if {keys["role"], keys["content"]} - {"role", "content", "from", "value"}:
        notes.append(f"{name}: rename the keys of its messages to role and content")
    if others := set(_items(entry.get("roles_to_train") or ())) - {"assistant", "gpt", "model"}:
        notes.append(f"{name}: roles_to_train {', '.join(sorted(others))}: dsft trains answers, or all (train_on)")
    notes += [f"{name}: {key}: no counterpart" for key in entry if key not in READ_OF_DATA.split()]
    family = re.split(r"[.:]", str(kind or ""))[0]
    if family in ("completion", "pretrain"):
        column = entry.get("field") or entry.get("text_column") or "text"
        return {"data_format": "text"} | ({"text_column": column} if column != "text" else {})
    if family not in ("", "alpaca", "chat_template", "sharegpt"):
        notes.append(f"{name}: type {kind}: dsft finds the form by the columns; else write prompt_template and"
                     " completion_template")  # fmt: skip
    return {}


READ_OF_DATA = """path type name split data_files ds_type field field_messages message_property_mappings
    message_field_role message_field_content roles field_thinking template_thinking_key text_column chat_template
    roles_to_train train_on_eos train_on_eot trust_remote_code columns"""
"""Keys of an entry that are read, or that are as dsft does it."""


def _listed_data(option: str, value: Any, given: Values, notes: list[str]) -> Values:
    """Names of LLaMA-Factory's dataset_info.json (data/README.md there) for `data` or `eval_data`."""
    folder = Path(str(given.get("dataset_dir") or "data"))
    listing = folder / "dataset_info.json"
    try:
        known = json.loads(listing.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
        notes.append(f"{', '.join(_items(value))}: named in {listing}, which is not here; name the files themselves")
    names, form = [], {}
    for name in _items(value):
        entry = known.get(name, {})
        columns = entry.get("columns", {})
        if entry.get("ranking") or {"images", "videos", "audios"} & columns.keys():
            raise CannotTrain(f"{name} of {listing} holds preferences or pictures, which dsft does not train")
        if place := entry.get("hf_hub_url"):
            names.append(_hub_name(place, entry.get("subset"), entry.get("split") or "train"))
        else:
            names.append(str(folder / entry["file_name"]) if "file_name" in entry else name)
        renamed = {each: theirs for each, theirs in columns.items() if theirs not in LISTED_COLUMNS.get(each, (each,))}
        if renamed.keys() == {"prompt"} and given.get("stage") == "pt":
            form = {"data_format": "text", "text_column": renamed["prompt"]}
        elif set(renamed.values()) - {"prompt", "completion"}:  # which are a form of dsft's own
            notes.append(f"{name}: rename its columns {', '.join(map(str, renamed.values()))}, see docs/data.md")
    return {option: names} | (form if option == "data" else {})


LISTED_COLUMNS = {
    "prompt": ("instruction",),
    "query": ("input",),
    "response": ("output",),
    "messages": ("conversations", "messages"),
    "system": ("system", "system_prompt"),
}
"""Key of `columns` in dataset_info.json -> the columns that dsft reads as it; others must have the key's name."""
