"""`dsft convert`: a YAML file of axolotl, LLaMA-Factory or TRL becomes a run.yaml.

Options are renamed by `config/options.py`; what has no counterpart is named in the file and on the screen. No model,
data or GPU is needed.

dsft convert axolotl.yaml --out run.yaml
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsft.cli.commands import ConvertOptions
from dsft.config.options import HINTS, IGNORED_ARGUMENTS, REFUSED_ARGUMENTS, TrainConfig
from dsft.config.reader import make_config, own_names, read_yaml, training_types
from dsft.errors import UserError, raise_if_any
from dsft.runtime.console import show_text


def convert_file(options: ConvertOptions) -> None:
    """Writes the run.yaml.

    Raises:
        UserError: the file cannot be read, or the output exists.
    """
    output = Path(options.out)
    if output.exists():
        raise UserError(f"{output}: exists; name another file with --out")
    problems: list[str] = []
    given = read_yaml(options.file, problems)
    raise_if_any([problem.removeprefix("--config ") for problem in problems])
    values, remarks = converted(given or {})
    lines = [f"# Converted from {options.file} by dsft convert."]
    lines.append(yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else "")
    lines += [f"# {remark}" for remark in remarks]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    show_text(f"dsft: {output}: {len(values)} options")
    for remark in remarks:
        show_text(f"dsft: {remark}")
    config = shlex.quote(str(output))
    show_text(f"dsft: next: dsft preview --config {config}, then dsft plan --config {config}")


def converted(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns (dsft's options, a remark for each option that was renamed, left out, or cannot be used as it is)."""
    types = training_types()
    remarks: list[str] = []
    values: dict[str, Any] = {}
    for key, value in own_names(given, types, remarks).items():
        if value is None or value == "":
            continue
        if key == "adapter" and value in ("lora", "qlora"):  # axolotl
            values["method"] = value
        elif key in ("load_in_4bit", "load_in_8bit"):
            if value:
                values["method"] = "qlora"
                values["quantization"] = "nf4" if key == "load_in_4bit" else "int8"
        elif key == "finetuning_type":  # LLaMA-Factory
            values["method"] = value
        elif key == "use_peft" and value:  # TRL
            values.setdefault("method", "lora")
        elif key in ("datasets", "test_datasets") and isinstance(value, list):
            values["data" if key == "datasets" else "eval_data"] = [_source(each) for each in value]
        elif reason := REFUSED_ARGUMENTS.get(key) or IGNORED_ARGUMENTS.get(key) or HINTS.get(key):
            remarks.append(f"{key}: left out; {reason}")
        elif key not in types:
            remarks.append(f"{key}: left out; no counterpart")
        else:
            values[key] = value
    problems: list[str] = []
    make_config(TrainConfig, values, problems)
    remarks += [f"to do: {problem}" for problem in problems]
    return values, remarks


def _source(entry: Any) -> str:
    """Returns an entry of axolotl's `datasets` as one of `data`: NAME:CONFIG:SPLIT, or a file."""
    if not isinstance(entry, Mapping):
        return str(entry)
    if "data_files" in entry:
        files = entry["data_files"]
        return files if isinstance(files, str) else files[0]
    path = str(entry.get("path", ""))
    config = entry.get("name")
    split = entry.get("split")
    if config or split:
        return ":".join([path, config or "", split or ""]).rstrip(":")
    return path
