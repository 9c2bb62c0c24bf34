"""`dsft init` writes a commented run.yaml, with options that fit the first rows of the data; `dsft convert` writes one
from a YAML file of axolotl, LLaMA-Factory or TRL, with the option names of `config/options.py`.

dsft init --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl --method lora
dsft convert axolotl.yaml --out run.yaml
"""

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsft.cli.commands import ConvertOptions, InitOptions
from dsft.config.options import HINTS, IGNORED_ARGUMENTS, LEARNING_RATES, REFUSED_ARGUMENTS, TrainConfig
from dsft.config.reader import make_config, own_names, read_yaml, training_types
from dsft.data.formats import columns_line, format_rules, suggest_columns
from dsft.data.sources import Row, Source, ending, find_sources, read_file
from dsft.errors import UserError, raise_if_any
from dsft.runtime.console import show_text

TEMPLATE = Path(__file__).parent.parent / "quickstart" / "run.yaml"
FEW_ROWS = 200
RATE_OF_FEW_ROWS = "5e-4"
"""For adapters, since few rows mean few steps."""
SMALL_BYTES = 2 << 20
"""Of few rows that are small: a text file is one row."""
COUNTED_ROWS = 500


def write_run_file(options: InitOptions) -> None:
    """Write the file. Raises UserError if the data cannot be read or have an unknown format, or the file exists."""
    path = Path(options.out)
    problems = []
    sources = find_sources(options.data, TrainConfig(), key="data", problems=problems)
    raise_if_any(problems)
    shape = ""
    held_out = 0.02
    rate = f"{LEARNING_RATES[options.method]:g}".replace("e-0", "e-")
    epochs = 3
    batch = "# global_batch_size: 64"
    if sources[0].files:  # no download from the hub
        all_rows = itertools.chain.from_iterable(map(read_file, sources[0].files))
        rows = list(itertools.islice(all_rows, COUNTED_ROWS))
        shape = _shape_lines(sources[0], rows)
        held_out = _held_out_share(sources[0], len(rows))
        if len(rows) < FEW_ROWS and sources[0].size_bytes < SMALL_BYTES:
            # With the defaults of dsft train there would be too few steps for a visible change.
            epochs = 10
            batch = "global_batch_size: 8"
            rate = rate if options.method == "full" else RATE_OF_FEW_ROWS
    evaluation = "# eval_data: held_out.jsonl"
    if held_out:
        evaluation = f"eval_fraction: {held_out:<11} # held out and measured; or eval_data: held_out.jsonl"
    config = shlex.quote(str(path))
    text = TEMPLATE.read_text(encoding="utf-8").format(
        path=config,
        model=_in_yaml(options.model),
        data=_in_yaml(options.data[0] if len(options.data) == 1 else options.data),
        shape=shape,
        held_out=evaluation,
        output_dir=_in_yaml(options.output_dir),
        method=options.method,
        rate=rate,
        epochs=epochs,
        batch=batch,
    )
    _write(path, text)
    show_text(f"dsft: {config}: written; next: dsft preview {config}, then dsft train {config}")


def _write(path: Path, text: str) -> None:
    """Write a new file. Raises UserError if it exists."""
    if path.exists():
        raise UserError(f"{path}: exists; name another file with --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _in_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _shape_lines(source: Source, rows: list[Row]) -> str:
    """Return the lines that the columns of the rows need, each after a line break; empty for known formats."""
    if not rows:
        raise UserError(f"data: {source.name} contains no rows")
    try:
        rules = format_rules(rows, TrainConfig())
    except ValueError as error:
        columns = suggest_columns(rows[0].values)
        if not columns:
            raise UserError(f"data: {source.name}: {error}") from None
        return f"\n{columns_line(columns)}"
    if rules.format == "prompt_completion" and not rules.has_chat_pairs:
        return "\n# as_chat: true          # a user's turn and an answer, in the template of a chat model"
    return ""


def _held_out_share(source: Source, number: int) -> float:
    """Return the share of the rows (at most COUNTED_ROWS) to hold out, at least one row; 0 if there is only one."""
    if number == COUNTED_ROWS:
        return 0.02
    if number >= 10 or ending(source.files[0]) == ".txt":
        return 0.1
    return 0.5 if number > 1 else 0.0


def convert_file(options: ConvertOptions) -> None:
    """Write the run.yaml. Raises UserError if the file cannot be read, or the output exists."""
    path = Path(options.out)
    problems = []
    given = read_yaml(options.file, problems)
    raise_if_any([problem.removeprefix("--config ") for problem in problems])
    if not given:
        raise UserError(f"{options.file}: contains no options")
    values, remarks = converted(given)
    lines = [f"# Converted from {options.file} by dsft convert.", ""]
    lines += yaml.safe_dump(values, sort_keys=False, allow_unicode=True).splitlines()
    lines += ["", *(f"# {remark}" for remark in remarks)]
    _write(path, "\n".join(lines) + "\n")
    config = shlex.quote(str(path))
    for line in (f"{config}: {len(values)} options", *remarks):
        show_text(f"dsft: {line}")
    show_text(f"dsft: next: dsft preview --config {config}, then dsft plan --config {config}")


def converted(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (dsft's options, a remark for each option that was renamed, left out, or cannot be used unchanged)."""
    types = training_types()
    remarks = []
    values = {}
    for key, value in own_names(given, types, remarks).items():
        if value is None or value == "":
            continue
        if key in ("adapter", "finetuning_type") and value in ("full", "lora", "qlora"):  # axolotl, LLaMA-Factory
            values["method"] = value
        elif key in ("load_in_4bit", "load_in_8bit"):
            if value:
                values["method"] = "qlora"
                values["quantization"] = "nf4" if key == "load_in_4bit" else "int8"
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
    problems = []
    make_config(TrainConfig, values, problems)
    remarks += [f"to do: {problem}" for problem in problems]
    return values, remarks


def _source(entry: Any) -> str:
    """Return an entry of axolotl's `datasets` as one of `data`: NAME:CONFIG:SPLIT, or a file."""
    if not isinstance(entry, Mapping):
        return str(entry)
    if "data_files" in entry:
        files = entry["data_files"]
        return files if isinstance(files, str) else files[0]
    parts = [str(entry.get(key) or "") for key in ("path", "name", "split")]
    return ":".join(parts).rstrip(":")
