"""`dsft init`: writes a commented run.yaml, whose options fit the first rows of the data.

dsft init --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl --method lora
"""

import itertools
import shlex
from pathlib import Path
from typing import Any

import yaml

from dsft.cli.commands import InitOptions
from dsft.config.options import LEARNING_RATES, TrainConfig
from dsft.data.formats import columns_line, format_rules, suggest_columns
from dsft.data.sources import Row, Source, ending, find_sources, read_file
from dsft.errors import UserError, raise_if_any
from dsft.runtime.console import show_text

TEMPLATE = Path(__file__).parent.parent / "quickstart" / "run.yaml"
FEW_ROWS = 200
RATE_OF_FEW_ROWS = "5e-4"
"""Of adapters, which few rows train for few steps."""
SMALL_BYTES = 2 << 20  # of data that is trained in small steps, several times
COUNTED_ROWS = 500


def run(options: InitOptions) -> None:
    """Write the file. Raises UserError if it exists, or the data cannot be read or are of no known shape."""
    path = Path(options.out)
    if path.exists():
        raise UserError(f"{path}: exists; name another file with --out")
    problems: list[str] = []
    sources = find_sources(options.data, TrainConfig(), key="data", problems=problems)
    raise_if_any(problems)
    shape = ""
    fraction = 0.02
    rate = f"{LEARNING_RATES[options.method]:g}".replace("e-0", "e-")
    epochs = 1
    batch = 64
    if sources[0].files:  # nothing is downloaded from the hub
        rows = list(itertools.islice(itertools.chain.from_iterable(map(read_file, sources[0].files)), COUNTED_ROWS))
        shape = _shape_lines(sources[0], rows)
        fraction = _held_out_share(sources[0], len(rows))
        if sources[0].size_bytes < SMALL_BYTES:
            epochs = 3
            batch = 8
            if len(rows) < FEW_ROWS:  # otherwise there would be too few steps for a change that is seen
                epochs = 10
                rate = rate if options.method == "full" else RATE_OF_FEW_ROWS
    held_out = f"eval_fraction: {fraction:<11} # held out and measured; or eval_data: held_out.jsonl"
    text = TEMPLATE.read_text(encoding="utf-8").format(
        path=shlex.quote(str(path)),
        model=_in_yaml(options.model),
        data=_in_yaml(options.data[0] if len(options.data) == 1 else options.data),
        shape=shape,
        held_out=held_out if fraction else "# eval_data: held_out.jsonl",
        output_dir=_in_yaml(options.output_dir),
        method=options.method,
        rate=rate,
        epochs=epochs,
        batch=batch,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    show_text(f"dsft: {path}: written; next: dsft preview --config {shlex.quote(str(path))}")


def _in_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _shape_lines(source: Source, rows: list[Row]) -> str:
    """Return the lines that the columns of the rows need, each with a line break before it; none for known formats."""
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
    """Return the share of the rows to hold out, at least one row; 0 if there is only one. `number`: at most
    COUNTED_ROWS. Of a text file the end is held out.
    """
    if number == COUNTED_ROWS:
        return 0.02
    if number >= 10 or ending(source.files[0]) == ".txt":
        return 0.1
    return 0.5 if number > 1 else 0.0
