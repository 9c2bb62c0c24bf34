"""Makes the data of a training ready ahead of it, and shows samples of it, for `dsft prepare` and `dsft preview`."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dsft.config.options import TrainConfig
from dsft.data.batches import PackedRows, Stream, describe_counts, sequence, sequences_in
from dsft.data.batches import Sequence as TokenSequence
from dsft.data.formats import FormattedSource
from dsft.data.prepare import cache_folder
from dsft.data.tokenization import tokenise
from dsft.data.training_data import TrainingData, check_sources, load_training_data
from dsft.errors import raise_if_any
from dsft.models.tokenizer import add_tokens, check_tokenizer
from dsft.runtime.console import show_table, show_text
from dsft.units import IGNORED, describe_value

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
    show_text(f"dsft: {', '.join(map(str, sources['data']))}: {describe_counts(data.counts)}")
    if data.held_out_counts:
        show_text(f"dsft: held out: {describe_counts(data.held_out_counts)}")
    for note in data.notes:
        show_text(f"dsft: note: {note}")
    folder = cache_folder(config.data_cache)
    show_text(f"dsft: ready in {folder}; training with the same options and files takes it from there")


def preview(config: TrainConfig, *, samples: int) -> None:
    """Prints samples as the model will see them, what is left out and why, and figures.

    Prompts with completions and chats are shown row by row, and then rows that are not trained as they stand in the
    data. Text, packed rows and streams are shown as the sequences that the model is given.

    Raises:
        UserError: with every problem of the tokenizer and the data.
    """
    sources, tokenizer, data = _load(config)
    console = Console(soft_wrap=True, highlight=False)
    marks = not console.is_terminal

    def spread(items: Any) -> list[int]:
        """Some of these, evenly spread."""
        return np.linspace(0, len(items) - 1, min(samples, len(items))).astype(int).tolist()

    def show(sequences: Iterable[TokenSequence]) -> None:
        """Decoded, special tokens included, with the trained ones green, or between ⟦ and ⟧; their weight follows where
        it is not 1.
        """
        for sample in sequences:
            text, trained = Text(), sample["labels"] != IGNORED
            weights = np.where(trained, sample.get("weights", 1), 0)
            edges = [0, *(np.flatnonzero(np.diff(weights)) + 1), len(weights)]
            for start, end in itertools.pairwise(edges):
                piece = tokenizer.decode(sample["input_ids"][start:end])
                if trained[start]:
                    text.append(f"⟦{piece}⟧" if marks else piece, style="green")
                    text.append("" if weights[start] == 1 else f"×{weights[start]:g}", style="bold")
                else:
                    text.append(piece, style="dim")
            console.print(text)
            console.print()

    items = list(itertools.islice(data.items, STREAMED)) if isinstance(data.items, Stream) else data.items
    is_packed = isinstance(items, PackedRows)
    by_row = (
        [] if is_packed or isinstance(items, list) else [each for each in sources["data"] if not each.rules.is_text]
    )

    # ---- rows spread over the first of each source, then as many that are left out or trained otherwise
    for formatted in by_row:
        batch = next(iter(formatted.batches()))
        rules = dataclasses.replace(formatted.rules, bad_rows="drop")
        rows = batch.rows[:SHOWN_ROWS]
        made = [tokenise(dataclasses.replace(batch, rows=[row]), rules, tokenizer) for row in rows]
        shown = spread(made)
        changed = [index for index, tokens in enumerate(made) if tokens.first and index not in shown]
        for index in [*shown, *changed[:samples]]:
            tokens, where = made[index], batch.where(rows[index])
            text = "left out"
            if len(tokens.ends):
                several = f" in {len(tokens.ends)} sequences" if len(tokens.ends) > 1 else ""
                text = f"{len(tokens.ids)} tokens{several}, {int(tokens.trained.sum())} trained"
            console.print(f"[bold]{escape(where)}[/bold]: {text}")
            for name, why in tokens.first.items():
                console.print(f"  {name.replace('_', ' ')}: {why.removeprefix(f'{where}: ')}", markup=False)
            columns = (tokens.ids, tokens.trained, tokens.weights)
            show(
                sequence(*(column if column is None else column[start:end] for column in columns))
                for start, end in itertools.pairwise([0, *tokens.ends.tolist()])
            )
        if len(changed) > samples:
            more = len(changed) - samples
            console.print(f"{more} more of the first {len(made)} rows are left out or trained otherwise")

    # ---- sequences
    for index in [] if by_row else spread(items):
        sequences = sequences_in([items[index]])
        tokens = sum(len(sample["input_ids"]) for sample in sequences)
        of = f" of {len(sequences)} samples" if len(sequences) > 1 else ""
        console.print(f"[bold]{'row' if is_packed else 'sequence'} {index + 1}[/bold]: {tokens} tokens{of}")
        show(sequences)

    # ---- figures
    console.print("trained tokens stand between ⟦ and ⟧" if marks else "trained tokens are [green]green[/green]")
    for name, entries in sources.items():
        if entries:
            console.print(f"{name}: {', '.join(map(str, entries))}", markup=False)
    if isinstance(items, list):  # the beginning of a stream
        lengths = np.array([len(sample["input_ids"]) for sample in sequences_in(items)])
    else:
        lengths = (items.sequences if is_packed else items).lengths
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
    show_table(table)
    for note in data.notes:
        console.print(f"note: {note}", markup=False)


def _load(config: TrainConfig) -> tuple[dict[str, list[FormattedSource]], PreTrainedTokenizerBase, TrainingData]:
    problems: list[str] = []
    tokenizer = check_tokenizer(config, problems)
    if tokenizer and config.add_tokens:
        add_tokens(tokenizer, config.add_tokens, problems)
    sources = {
        "data": check_sources(config.data, config, tokenizer, key="data", split=config.data_split, problems=problems),
        "eval_data": check_sources(
            config.held_out_entries, config, tokenizer, key="eval_data", split=config.eval_split, problems=problems
        ),
    }
    raise_if_any(problems)
    data = load_training_data(
        config, sources["data"], sources["eval_data"], tokenizer, pack=config.packing, flash=False
    )
    return sources, tokenizer, data
