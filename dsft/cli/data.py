"""`dsft prepare` and `dsft preview`: tokenise the data of a training in advance, and show it.

No GPU and no weights are needed. Problems of options and files are reported before torch is loaded.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsft.cli.commands import PrepareOptions, PreviewOptions
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import raise_if_any
from dsft.runtime import quick_imports
from dsft.runtime.console import show_text
from dsft.setup import check_named_files
from dsft.units import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dsft.data.training_data import TrainingData


def run(options: PrepareOptions | PreviewOptions, argv: Sequence[str]) -> None:
    """Tokenise the data of a training, or print samples of it. Raises UserError with every problem."""
    problems = []
    config = read_config(TrainConfig, argv, problems, also=type(options))
    needless = ("output_dir: missing", *(["model: missing"] if config.tokenizer else []))
    problems = [problem for problem in problems if not problem.startswith(needless)]
    check_named_files(config, problems)
    with quick_imports():
        from dsft.data.epoch import describe_counts
        from dsft.data.tokens import cache_folder
        from dsft.data.training_data import check_sources, load_training_data
        from dsft.models.tokenizer import add_tokens, check_tokenizer

    problems = []
    tokenizer = check_tokenizer(config, problems)
    if tokenizer and config.add_tokens:
        add_tokens(tokenizer, config.add_tokens, problems)
    sources = check_sources(config.data, config, tokenizer, key="data", problems=problems)
    held_out = check_sources(config.held_out_entries, config, tokenizer, key="eval_data", problems=problems)
    raise_if_any(problems)
    data = load_training_data(config, sources, held_out, tokenizer)
    show_text(f"dsft: {', '.join(map(str, sources))}: {describe_counts(data.counts)}")
    if data.held_out_counts:
        show_text(f"dsft: held out: {describe_counts(data.held_out_counts)}")
    for note in (*config.notes, *data.notes):
        show_text(f"dsft: note: {note}")
    if isinstance(options, PreviewOptions):
        _preview(data, tokenizer, samples=options.samples)
        return
    folder = cache_folder(config.data_cache)
    show_text(f"dsft: ready in {folder}; training with the same options and files takes it from there")


def preview(config: str | None = None, *, samples: int = 3, **options: Any) -> None:
    """Print samples of a training's data as the model will see them. Args: `config`: a YAML file."""
    words = ["--config", config] if config else []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    run(PreviewOptions(samples=samples), words)


def _preview(data: "TrainingData", tokenizer: "PreTrainedTokenizerBase", *, samples: int) -> None:
    """Print sequences as the model will see them, what is left out and why, and statistics."""
    import numpy as np

    items = data.items
    is_packed = items.groups is not None
    num_shown = min(samples, len(items))
    for index in np.linspace(0, len(items) - 1, num_shown, dtype=int).tolist():
        sequences = items[index]
        tokens = sum(len(sequence["input_ids"]) for sequence in sequences)
        trained = sum(int((sequence["labels"] != IGNORED).sum()) for sequence in sequences)
        of = f" of {len(sequences)} samples" if len(sequences) > 1 else ""
        show_text(f"{'row' if is_packed else 'sequence'} {index + 1}: {tokens} tokens{of}, {trained} trained")
        for sequence in sequences:
            text = ""
            weights = np.where(sequence["labels"] != IGNORED, sequence.get("weights", 1), 0)
            changes = np.flatnonzero(np.diff(weights)) + 1  # positions of tokens with another weight than before
            for ids in np.split(sequence["input_ids"], changes):
                weight = weights[0]
                weights = weights[len(ids) :]
                piece = tokenizer.decode(ids)
                if weight:
                    piece = f"⟦{piece}⟧"
                if weight not in (0, 1):
                    piece += f"×{weight:g}"
                text += piece
            show_text(f"{text}\n")
    show_text("trained tokens are between ⟦ and ⟧")
    for store in items.stores:
        for name, why in store.facts["first"].items():
            show_text(f"{store.counts[name]} {name.replace('_', ' ')}, the first: {why}")

    lengths = items.ends - items.starts
    median, most = np.quantile(lengths, [0.5, 0.95])
    show_text(f"lengths: {lengths.min()} shortest, {median:.0f} median, {most:.0f} for 95 %, {lengths.max()} longest")
    show_text(f"trained fraction: {data.counts['trained_tokens'] / data.counts['tokens']:.1%}")
