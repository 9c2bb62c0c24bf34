"""`dsft prepare` and `dsft preview`: make the data of a training ready ahead of it, and show it.

No GPU and no weights are needed. Problems of options and files are reported before torch is loaded, which takes
seconds.

dsft prepare --config run.yaml
dsft preview --config run.yaml --samples 5
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dsft.cli.commands import PrepareOptions, PreviewOptions
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import raise_if_any, without_second_errors
from dsft.run_setup.named_files import check_named_files
from dsft.runtime import quick_imports
from dsft.runtime.console import show_table, show_text
from dsft.units import IGNORED, describe_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dsft.data.formats import FormattedSource
    from dsft.data.training_data import TrainingData

SHOWN_ROWS = 200
"""Of each source, of which some are shown."""


def run(options: PrepareOptions | PreviewOptions, argv: Sequence[str]) -> None:
    """Tokenise the data of a training ahead of it, or print samples as the model will see them, and figures. Raises
    UserError with every problem of the options, the tokenizer and the data.
    """
    problems: list[str] = []
    config = read_config(TrainConfig, argv, problems, also=type(options))
    needless = ("output_dir: missing", *(["model: missing"] if config.tokenizer else []))
    problems = [problem for problem in problems if not problem.startswith(needless)]
    raise_if_any([*problems, *without_second_errors(check_named_files(config), problems)])
    is_preview = isinstance(options, PreviewOptions)
    with quick_imports():
        from dsft.data.batches import describe_counts
        from dsft.data.prepare import cache_folder
        from dsft.data.training_data import check_sources, load_training_data, shares_of_rows
        from dsft.models.tokenizer import add_tokens, check_tokenizer

    problems = []
    tokenizer = check_tokenizer(config, problems)
    if tokenizer and config.add_tokens:
        add_tokens(tokenizer, config.add_tokens, problems)
    sources = {
        key: check_sources(entries, config, tokenizer, key=key, problems=problems)
        for key, entries in (("data", config.data), ("eval_data", config.held_out_entries))
    }
    raise_if_any(problems)
    data = load_training_data(config, *sources.values(), tokenizer)
    if is_preview:
        trained, _ = shares_of_rows(config)
        sources["data"] = [dataclasses.replace(each, held_out=trained) for each in sources["data"]]
        return _preview(sources, tokenizer, data, samples=options.samples)
    show_text(f"dsft: {', '.join(map(str, sources['data']))}: {describe_counts(data.counts)}")
    if data.held_out_counts:
        show_text(f"dsft: held out: {describe_counts(data.held_out_counts)}")
    for note in data.notes:
        show_text(f"dsft: note: {note}")
    folder = cache_folder(config.data_cache)
    show_text(f"dsft: ready in {folder}; training with the same options and files takes it from there")


def _preview(
    sources: "dict[str, list[FormattedSource]]",
    tokenizer: "PreTrainedTokenizerBase",
    data: "TrainingData",
    *,
    samples: int,
) -> None:
    """Print samples as the model will see them, what is left out and why, and figures.

    Prompts with completions and chats are shown row by row, and then rows that are not trained as they stand in the
    data. Text and packed rows are shown as the sequences that the model is given.
    """
    import numpy as np
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from dsft.data.batches import PackedRows, sequence, sequences_in
    from dsft.data.tokenization import tokenise

    console = Console(soft_wrap=True, highlight=False)
    marks = not console.is_terminal

    def spread(items: Any) -> list[int]:
        """Some of these, evenly spread."""
        return np.linspace(0, len(items) - 1, min(samples, len(items))).astype(int).tolist()

    def show(sequences: Iterable[dict[str, Any]]) -> None:
        """Decoded; trained tokens are green, or between ⟦ and ⟧, and their weight follows where it is not 1."""
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

    items = data.items
    is_packed = isinstance(items, PackedRows)
    by_row = [] if is_packed else [each for each in sources["data"] if not each.rules.is_text]

    # ---- rows spread over the first of each source, then as many that are left out or trained otherwise
    for formatted in by_row:
        batch = next(batch for batch in formatted.batches() if batch.rows)
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
    lengths = (items.sequences if is_packed else items).lengths
    table = Table("", "", show_header=False)
    table.add_row(
        "lengths",
        f"{lengths.min()} shortest, {np.median(lengths):.0f} median, {np.quantile(lengths, 0.95):.0f} for 95 %,"
        f" {lengths.max()} longest",
    )
    table.add_row("trained fraction", f"{data.counts['trained_tokens'] / data.counts['tokens']:.1%}")
    for head, counts in {"": data.counts, "held out: ": data.held_out_counts or {}}.items():
        for name, value in counts.items():
            if value:
                table.add_row(head + name.replace("_", " "), describe_value(value))
    show_table(table)
    for note in data.notes:
        console.print(f"note: {note}", markup=False)
