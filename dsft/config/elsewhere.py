"""What other trainers call what dsft has: the data of `dsft convert`, of hints at unknown options, and of the table in
docs/migrating.md. The names are in elsewhere.toml; here is how their values are translated.
"""

import functools
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Values = Mapping[str, Any]  # options by name: dsft's, or all that the other trainer is given


class CannotTrain(ValueError):
    """What a training does that dsft cannot do."""


class Elsewhere(NamedTuple):
    """Options of others for one thing."""

    names: str  # separated by blanks
    ours: str  # options of dsft, of which a command has the first or another; none where dsft has no option for it
    how: str  # where the meaning or the form of the value differs, or what takes the place of an option
    becomes: Callable[[Any, Values, list[str]], Values] | Mapping[Any, Values] | None
    """(their value, all that is given, notes to append to) -> options of dsft; or by their value, of those that can be
    translated. By default the first of `ours` takes the value as it is."""
    is_refused: bool
    """Whether a training with it is none that dsft can do: a value that `becomes` does not translate ends the
    conversion."""


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

_TABLES = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))
_REFUSED: dict[str, str] = _TABLES["refused"]
SUPERVISED, TEXT_ALONE = _REFUSED["supervised"], _REFUSED["text_alone"]


def _read(table: str) -> tuple[Elsewhere, ...]:
    """The rows of a table of elsewhere.toml, in their order."""
    entries = []
    for names, row in _TABLES[table].items():
        ours, how, becomes, *_ = [row, "", None] if isinstance(row, str) else [*row, None]
        option = (ours or names).split()[0]
        if isinstance(becomes, str):
            becomes = functools.partial(translated, becomes, option)
        elif becomes is not None or how in _REFUSED:
            if becomes is None or "true" in becomes:
                becomes = {"false": {}} | (becomes or {})
            keys = {"true": True, "false": False} | {key: int(key) for key in becomes if key.isdigit()}
            becomes = {
                keys.get(key, key): options if isinstance(options, dict) else {option: options}
                for key, options in becomes.items()
            }
        entries.append(Elsewhere(names, ours, _REFUSED.get(how, how), becomes, is_refused=how in _REFUSED))
    return tuple(entries)


ELSEWHERE, SAME_NAME = _read("elsewhere"), _read("same_name")
"""Options that dsft has under another name or not at all; those to which others give another form of value."""
OF = {name: each for each in ELSEWHERE for name in each.names.split()}  # by each of the names
VALUES = {
    (name, value): each.how
    for each in SAME_NAME
    if isinstance(each.becomes, Mapping)
    for name in each.names.split()
    for value in each.becomes
    if isinstance(value, str)
}
"""(option of dsft, value that others give it) -> what is meant here."""

TRAINERS: dict[str, str] = _TABLES["trainers"]
"""Trainer that `dsft convert` reads -> options by which its files are known, in this order."""
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""What these trainers take where nothing is given, and dsft does not; empty where it is derived."""
