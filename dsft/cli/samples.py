"""Makes the data of a training ready ahead of it, and shows samples of it, for `dsft prepare` and `dsft preview`."""

import dataclasses
import itertools
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dsft.config.options import TrainConfig
from dsft.data.batches import PackedRows, Stream, describe_counts, describe_value, sequence, sequences_in
from dsft.data.batches import Sequence as TokenSequence
from dsft.data.formats import FormattedSource
from dsft.data.prepare import cache_folder
from dsft.data.tokenization import tokenise
from dsft.data.training_data import TrainingData, check_sources, load_training_data
from dsft.errors import raise_if_any
from dsft.models.tokenizer import check_tokenizer
from dsft.runtime.console import show_table
from dsft.units import IGNORED

STREAMED = 1000
"""Sequences that the figures of a stream are of."""
SHOWN_ROWS = 200
"""Of each source, of which some are shown."""


def prepare(config: TrainConfig) -> None:
    """Tokenises the data of a training ahead of it.

    Raises:
        UserError: with every problem of the tokenizer and the data.
    """
    sources, _, data = _load(config)
    print(f"dsft: {', '.join(map(str, sources['data']))}: {describe_counts(data.counts)}")
    if data.held_out_counts:
        print(f"dsft: held out: {describe_counts(data.held_out_counts)}")
    for note in data.notes:
        print(f"dsft: note: {note}")
    folder = cache_folder(config.data_cache)
    print(f"dsft: ready in {folder}; training with the same options and files takes it from there")


def preview(config: TrainConfig, *, samples: int) -> None:
    """Prints samples as the model will see them, what is left out and why, and figures.

    Prompts with completions and chats are shown row by row, and then rows that are not trained as they stand in the
    data. Text, packed rows and streams are shown as the sequences that the model is given.

    Raises:
        UserError: with every problem of the tokenizer and the data.
    """
    sources, tokenizer, data = _load(config)
    console = Console(soft_wrap=True, highlight=False)
    items = list(itertools.islice(data.items, STREAMED)) if isinstance(data.items, Stream) else data.items
    rows_of = (
        [] if isinstance(items, list | PackedRows) else [each for each in sources["data"] if not each.rules.is_text]
    )
    for formatted in rows_of:
        _show_rows(formatted, tokenizer, console, samples=samples)
    indices = [] if rows_of else np.linspace(0, len(items) - 1, min(samples, len(items))).astype(int).tolist()
    for index in indices:
        sequences = sequences_in([items[index]])
        tokens = sum(len(sample["input_ids"]) for sample in sequences)
        console.print(
            f"[bold]{'row' if isinstance(items, PackedRows) else 'sequence'} {index + 1}[/bold]: {tokens}"
            f" tokens{f' of {len(sequences)} samples' if len(sequences) > 1 else ''}"
        )
        for sample in sequences:
            console.print(in_colour(sample, tokenizer, marks=not console.is_terminal))
            console.print()
    console.print(
        "trained tokens are [green]green[/green]" if console.is_terminal else "trained tokens stand between ⟦ and ⟧"
    )
    for name, entries in sources.items():
        if entries:
            console.print(f"{name}: {', '.join(map(str, entries))}", markup=False)
    show_table(_figures(items, data))
    for note in data.notes:
        console.print(f"note: {note}", markup=False)


def _show_rows(
    formatted: FormattedSource, tokenizer: PreTrainedTokenizerBase, console: Console, *, samples: int
) -> None:
    """Prints rows spread over the first of a source, then as many that are left out or trained otherwise."""
    batch = next(iter(formatted.batches()))
    rules = dataclasses.replace(formatted.rules, bad_rows="drop")
    made = [tokenise(dataclasses.replace(batch, rows=[row]), rules, tokenizer) for row in batch.rows[:SHOWN_ROWS]]
    shown = set(np.linspace(0, len(made) - 1, min(samples, len(made))).astype(int).tolist())
    changed = [index for index, tokens in enumerate(made) if tokens.first and index not in shown]
    for index in [*sorted(shown), *changed[:samples]]:
        tokens = made[index]
        head = f"[bold]{escape(batch.where(batch.rows[index]))}[/bold]: "
        if len(tokens.ends):
            several = f" in {len(tokens.ends)} sequences" if len(tokens.ends) > 1 else ""
            console.print(f"{head}{len(tokens.ids)} tokens{several}, {int(tokens.trained.sum())} trained")
        else:
            console.print(f"{head}left out")
        for name, why in tokens.first.items():
            reason = why.removeprefix(f"{batch.where(batch.rows[index])}: ")
            console.print(f"  {name.replace('_', ' ')}: {reason}", markup=False)
        for start, end in itertools.pairwise([0, *tokens.ends.tolist()]):
            columns = (tokens.ids, tokens.trained, tokens.weights)
            sample = sequence(*(column if column is None else column[start:end] for column in columns))
            console.print(in_colour(sample, tokenizer, marks=not console.is_terminal))
            console.print()
    if len(changed) > samples:
        console.print(f"{len(changed) - samples} more of the first {len(made)} rows are left out or trained otherwise")


def in_colour(sample: TokenSequence, tokenizer: PreTrainedTokenizerBase, *, marks: bool) -> Text:
    """Decodes the tokens, special ones included, with the trained ones green, or between ⟦ and ⟧ with `marks`; their
    weight follows where it is not 1.
    """
    text = Text()
    trained = sample["labels"] != IGNORED
    weights = np.where(trained, sample.get("weights", 1), 0)
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1), len(weights)]
    for start, end in itertools.pairwise(edges):
        piece = tokenizer.decode(sample["input_ids"][start:end])
        if not trained[start]:
            text.append(piece, style="dim")
        else:
            text.append(f"⟦{piece}⟧" if marks else piece, style="green")
            text.append("" if weights[start] == 1 else f"×{weights[start]:g}", style="bold")
    return text


def _load(config: TrainConfig) -> tuple[dict[str, list[FormattedSource]], PreTrainedTokenizerBase, TrainingData]:
    problems: list[str] = []
    tokenizer = check_tokenizer(config, problems)
    sources = {
        "data": check_sources(config.data, config, tokenizer, key="data", split=config.data_split, problems=problems),
        "eval_data": check_sources(
            config.eval_data, config, tokenizer, key="eval_data", split=config.eval_split, problems=problems
        ),
    }
    raise_if_any(problems)
    data = load_training_data(
        config, sources["data"], sources["eval_data"], tokenizer, pack=config.packing, flash=False
    )
    return sources, tokenizer, data


def _figures(items: Any, data: TrainingData) -> Table:
    if isinstance(items, list):  # the beginning of a stream
        lengths = np.array([len(sample["input_ids"]) for sample in sequences_in(items)])
    else:
        lengths = (items.sequences if isinstance(items, PackedRows) else items).lengths
    table = Table("", "", show_header=False)
    table.add_row(
        "lengths",
        f"{lengths.min()} shortest, {np.median(lengths):.0f} median, {np.quantile(lengths, 0.95):.0f} for 95 %,"
        f" {lengths.max()} longest",
    )
    if "tokens" in data.counts:
        table.add_row("trained fraction", f"{data.counts['trained_tokens'] / data.counts['tokens']:.1%}")
    for head, counts in {"": data.counts, "held out: ": data.held_out_counts or {}}.items():
        for name, value in counts.items():
            if value:
                table.add_row(head + name.replace("_", " "), describe_value(value))
    return table
