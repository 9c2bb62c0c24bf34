"""Builds the Trainer's inputs from the options: items, their collator, and their counts."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import DataFields, TrainConfig, shuffle_seed
from dsft.data.chats import TEMPLATE_ERRORS, chat_ids
from dsft.data.epoch import (
    Collator,
    Counts,
    Sequences,
    best_fit,
    count,
    describe_counts,
    sequences_of,
)
from dsft.data.formats import Chat, FormattedSource, format_rules, unused_columns
from dsft.data.sources import HeldOut, ending, find_sources
from dsft.data.tokens import cache_folder, encode_open, prepare, tokenise
from dsft.errors import UserError, one_line
from dsft.models.measure import ModelSize
from dsft.models.tokenizer import check_ids
from dsft.runtime import distributed
from dsft.runtime.distributed import SAME_FILES, require_agreement
from dsft.units import IGNORED, Batch

# Count of a store -> how these rows differ from the data.
ROW_NOTES = {
    "dropped_bad": "rows left out as bad",
    "weighted_tokens": "trained tokens with weights other than 1, by which their loss is multiplied (weighted_loss);"
    " loss and perplexity are without weights",
    "dropped_long": "rows are longer than seq_len and left out; raise seq_len, or set too_long to truncate or split",
    "unrendered": "chats not rendered whole",
    "unprompted": "chats with answers that no generation prompt of the chat template leads to, which are not trained",
    "rendered_apart": "answers trained in sequences of their own, since the chat template renders them otherwise once"
    " the chat goes on (it drops reasoning of earlier turns, say)",
    "empty_thinking": "chats with answers without reasoning, for which the chat template renders an empty think block;"
    " it is not trained (train_thinking: all does)",
}
UNUSED_TEMPLATE = (
    "the tokenizer has a chat template, but rows do not use it: a chat server prompts the model in another"
    " form than it is trained in. columns or as_chat: true makes chats of rows; dsft chat --raw continues text"
)
LONGEST_BEGINNING = 32  # tokens of a held-out text for a sample to continue
CHECKED_ROWS = 50  # of each source, read and tokenised before anything else


def check_sources(
    entries: list[str],
    config: DataFields,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    key: str,
    problems: list[str],
) -> list[FormattedSource]:
    """Returns the sources of the option `key` with their formats; adds problems of their first rows to `problems`."""
    sources = []
    for source in find_sources(entries, config, key=key, problems=problems):
        try:
            first_rows = source.first_rows()
            rows = first_rows[:CHECKED_ROWS]
            rules = format_rules(rows, config)
            if tokenizer is not None:
                if rules.form is Chat and not tokenizer.chat_template:
                    raise ValueError(
                        f"the rows are chats, but the tokenizer {tokenizer.name_or_path} has no chat template; name"
                        " one with chat_template (alpaca, chatml), use a tokenizer of a chat model, or prompt and"
                        " completion columns"
                    )
                if ending(rows[0].place) != ".txt":  # one long row
                    tokenise(rows, rules, tokenizer)
            grouping = getattr(config, "group_by", ())
            unused = tuple(name for name in unused_columns(first_rows, rules) if name not in grouping)
            sources.append(FormattedSource(source=source, rules=rules, unused=unused))
        except UserError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
        except ValueError as error:
            problems.append(f"{key}: {source.name}: {error}")
    return sources


@dataclass(frozen=True)
class Prompt:
    """A prompt that the model continues at each evaluation, as text and as tokens."""

    text: str
    ids: list[int]


def sample_prompts(
    config: TrainConfig,
    data: list[FormattedSource],
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequences | None = None,
) -> list[Prompt]:
    """Returns the prompts of `generate_samples`. A text is a user's turn if the data are chats; raises TEMPLATE_ERRORS
    if the chat template cannot render it. A number selects that many evenly spaced sequences of `held_out`: the tokens
    before the first trained one, or the beginning of a text.
    """
    if isinstance(config.generate_samples, list):
        texts = config.generate_samples
        if tokenizer.chat_template and any(each.rules.form is Chat for each in data):
            prompts = []
            for text in texts:
                message = {"role": "user", "content": text}
                prompts.append(Prompt(text, chat_ids(tokenizer, [message])))
            return prompts
        return [Prompt(*each) for each in zip(texts, encode_open(tokenizer, texts), strict=True)]
    if not held_out:
        return []
    # The last window of a text may have a single token, and no prompt before it.
    prompts = []
    usable = np.flatnonzero(held_out.lengths > 1)
    number = min(config.generate_samples, len(usable))
    for index in usable[np.linspace(0, len(usable) - 1, number).astype(int)]:
        (sequence,) = held_out[index]
        first = int(np.argmax(sequence["labels"] != IGNORED))
        if first <= 1:  # a text is trained whole
            first = min(LONGEST_BEGINNING, len(sequence["labels"]) // 2)
        ids = sequence["input_ids"][:first].tolist()
        prompts.append(Prompt(tokenizer.decode(ids, skip_special_tokens=True).strip(), ids))
    return prompts


def check_prompts(
    config: TrainConfig, data: list[FormattedSource], tokenizer: PreTrainedTokenizerBase, size: ModelSize
) -> list[str]:
    if not isinstance(config.generate_samples, list):
        return []
    try:
        prompts = sample_prompts(config, data, tokenizer)
    except TEMPLATE_ERRORS as error:
        return [f"generate_samples: the chat template raised: {one_line(error)}"]
    problems = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            check_ids(prompt.ids, tokenizer, size.vocab_size)
        except UserError as error:
            problems += [f"generate_samples: {problem}" for problem in error.problems]
        if not prompt.ids or (size.max_positions and len(prompt.ids) >= size.max_positions):
            problems.append(
                f"generate_samples: prompt {number} has {len(prompt.ids):,} tokens; it needs at least one, and fewer"
                " than the model's positions"
            )
    return problems


@dataclass(kw_only=True)
class TrainingData:
    items: Sequences
    collator: Collator
    held_out: Sequences | None
    counts: Counts
    held_out_counts: Counts | None
    uses_chat_template: bool = False  # whether all rows are chats
    prompts: list[Prompt] = field(default_factory=list)  # continued at each evaluation
    held_out_sets: tuple[str, ...] = ()  # names of the stores of `held_out`; empty if they have none
    strategy: str = "random"  # train_sampling_strategy of items that are single sequences
    notes: list[str] = field(default_factory=list)

    def require_a_full_step(self, batch: Batch) -> None:
        """Raises UserError if an epoch has no full step, for `dataloader_drop_last`."""
        if len(self.items) < batch.sequences:
            raise UserError(
                f"dataloader_drop_last: the data has {len(self.items):,} sequences, and a step needs"
                f" {batch.sequences:,}, so an epoch has no step; leave it out, or lower the batch size"
            )


def load_training_data(
    config: TrainConfig,
    data: list[FormattedSource],
    held_out: list[FormattedSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    flash: bool = False,
    masked: bool = True,
    place: int = 0,
    shared_by: int = 1,
) -> TrainingData:
    """Prepares the tokens and returns the Trainer's items. Every rank calls it; the first one prepares. The further
    arguments are those of `Collator`.
    """
    notes = []  # facts that the user may not expect
    unread = notes_on_unread([*data, *held_out])
    if config.eval_fraction and not config.eval_data:
        share = HeldOut(fraction=config.eval_fraction, seed=shuffle_seed(config.training), wanted=True)
        held_out = [replace(each, held_out=share) for each in data]
        data = [replace(each, held_out=replace(share, wanted=False)) for each in data]
    cache = cache_folder(config.data_cache)

    def stores_of(sources):
        shown = not config.training.get("disable_tqdm")  # by the process that prepares
        return [prepare(each, tokenizer, cache, show_progress=shown) for each in sources]

    held_out_stores = stores_of(held_out)
    held_out_sequences = held_out_counts = None
    if held_out_stores:
        if not any(store.counts["rows"] for store in held_out_stores):
            raise UserError(
                f"eval_fraction={config.eval_fraction} of the data is less than one row; raise it or set eval_data"
            )
        held_out_sequences = sequences_of(held_out_stores, seq_len=config.seq_len, keep_documents=False)
        held_out_counts = count(held_out_sequences)

    stores = stores_of(data)
    for store in stores:
        if not store.counts["trained_tokens"]:
            raise UserError(
                f"data: {store.facts['source']}: no trainable tokens in {store.counts['rows']} rows"
                f" ({describe_counts(store.counts) or 'all are held out'}); look for"
                " empty answers, and at too_long and train_on"
            )
    items = sequences_of(stores, seq_len=config.seq_len, keep_documents=config.packing)
    counts = count(items)
    strategy = config.training.get("train_sampling_strategy") or "batch_rebalance"
    if config.packing:
        strategy = "random"
        lengths = items.lengths
        items = replace(items, groups=best_fit(lengths, config.seq_len))
        counts["packed_rows"] = len(items)
        fill_rate = lengths.sum() / (len(items) * config.seq_len)
        counts["fill_rate"] = round(float(fill_rate), 4)
    are_chats = bool(tokenizer.chat_template) and all(each.rules.form is Chat for each in data)
    if tokenizer.eos_token_id is None and not are_chats:
        notes.append(
            f"the tokenizer {tokenizer.name_or_path} has no end token: the model will not stop by itself; add one to"
            " its files (tokenizer.eos_token = ..., save_pretrained)"
        )
    if tokenizer.chat_template and not are_chats:
        notes.append(UNUSED_TEMPLATE)
    for store in stores:
        for name, text in ROW_NOTES.items():
            number = store.counts[name]
            if number:
                first = store.facts["first"].get(name)
                first = f"; the first: {first}" if first else ""
                notes.append(f"{store.facts['source']}: {number:,} {text}{first}")
    # Nodes without a common cache have prepared separately, and their files may differ. Collective.
    distributed.wait_long("prepared")
    hashes = [store.facts["tokens_hash"] for store in [*stores, *held_out_stores]]
    require_agreement({SAME_FILES: {"content of data": " ".join(hashes)}})
    collator = Collator(
        tokenizer.pad_token_id,
        config.seq_len,
        masked=masked,
        packed=config.packing,
        flash=flash,
        place=place,
        shared_by=shared_by,
    )
    return TrainingData(
        items=items,
        collator=collator,
        held_out=held_out_sequences,
        counts=counts,
        held_out_counts=held_out_counts,
        uses_chat_template=are_chats,
        prompts=sample_prompts(config, data, tokenizer, held_out_sequences),
        held_out_sets=tuple(config.held_out_names),
        strategy=strategy,
        notes=notes + unread,
    )


def notes_on_unread(data: Iterable[FormattedSource]) -> list[str]:
    notes = []
    for each in data:
        if each.source.other_splits:
            notes.append(f"{each.source.name}: files of other splits not used: {', '.join(each.source.other_splits)}")
        if each.unused:
            notes.append(f"{each.source.name}: columns not used: {', '.join(each.unused)}")
    return notes
