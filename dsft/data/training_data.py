"""From the options to what the Trainer is given: items, their collator, and what is said of them in the log and in
run.json.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available

from dsft.data.batches import Collator, EpochSampler, PackedCollator, PaddedToFullSteps, padding_share
from dsft.data.formats import find_format
from dsft.data.packing import PackedRows, batches_by_token_budget, best_fit, isolation_problem
from dsft.data.prepare import HeldOut, cache_folder, prepare
from dsft.data.readers import BEGUN, GOES_ON
from dsft.data.sequences import Sequences, count, mix, sequences_of
from dsft.data.sources import Source, find_sources
from dsft.data.streaming import Stream
from dsft.data.token_store import Store
from dsft.data.tokenization import FormatRules, tokenise
from dsft.errors import UserError
from dsft.models.build import DTYPES
from dsft.models.tokenizer import split_tokens
from dsft.runtime import distributed
from dsft.runtime.hardware import has_gpu
from dsft.units import padded_width

CHECKED_ROWS = 50
"""Of each source, read and tokenised before anything else is done."""


@dataclass(frozen=True, kw_only=True)
class FormattedSource:
    """A source and how its rows are read."""

    source: Source
    rules: FormatRules

    def __str__(self) -> str:
        return f"{self.source.name} ({self.rules.shape})"


def check_sources(
    entries: list[str],
    config: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    key: str,
    split: str,
    problems: list[str],
    keep_all: bool = False,
) -> list[FormattedSource]:
    """The sources with their shapes; what their first rows show already goes to `problems`."""
    found = []
    for source in find_sources(entries, config, key=key, split=split, problems=problems):
        try:
            batch = source.first_batch()
            columns = dict.fromkeys(
                name for row in batch.rows[:CHECKED_ROWS] for name in row if name not in (BEGUN, GOES_ON)
            )
            rules = FormatRules.of(
                config, find_format(list(columns), config), first_row=batch.rows[0], keep_all=keep_all
            )
            if tokenizer is not None:
                _check_template(rules, tokenizer)
                tokenise(batch.select(range(min(CHECKED_ROWS, len(batch.rows)))), rules, tokenizer)
            found.append(FormattedSource(source=source, rules=rules))
        except UserError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
        except ValueError as error:
            problems.append(f"{key}: {source.name}: {error}")
    return found


def _check_template(rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> None:
    if (rules.shape in ("messages", "sharegpt") or rules.of_chats) and not tokenizer.chat_template:
        raise ValueError(
            f"the rows are chats, but the tokenizer {tokenizer.name_or_path} has no chat template; name one with"
            " chat_template, use a tokenizer of a chat model, or prompt and completion columns"
        )


@dataclass(kw_only=True)
class TrainingData:
    """What one training reads."""

    items: Sequences | PackedRows | Stream
    collator: Callable[[list], dict[str, Any]]
    held_out: Sequences | None
    counts: dict[str, Any]
    held_out_counts: dict[str, Any] | None
    grouped: Literal["no", "within steps", "among steps"]
    """Which sequences of like length go together, see EpochSampler."""
    notes: list[str] = field(default_factory=list)

    def count_padding(self, args: Any, world_size: int) -> None:
        """Into `counts`: padding_share of the first epoch, or fill_rate of the packed rows.

        Args:
            args: TrainingArguments.
        """
        if isinstance(self.items, Sequences):
            steps = PaddedToFullSteps(
                self.items, args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size
            )
            order = EpochSampler(steps, seed=args.data_seed or args.seed, step=lambda: 0, grouped=self.grouped).order(0)
            self.counts["padding_share"] = round(
                padding_share(order, steps.lengths, args.per_device_train_batch_size), 4
            )


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Whether and how samples share rows."""

    problem: str | None
    """Why they cannot, in this architecture."""
    attn_implementation: str | None
    """That can keep them apart; None for what transformers picks."""

    @property
    def flash(self) -> bool:
        return "flash" in (self.attn_implementation or "")


def try_packing(config: Any, model_config: PreTrainedConfig) -> Packing:
    """Flash attention where it is installed and can keep samples apart, else what the options or transformers say."""
    asked, half = config.attn_implementation, config.dtype != "float32"
    flash = ["flash_attention_2"] if asked is None and has_gpu() and half and is_flash_attn_2_available() else []
    for implementation in [*flash, asked]:
        on_gpu = "flash" in (implementation or "")
        problem = isolation_problem(
            model_config,
            attn_implementation=implementation,
            device=distributed.device() if on_gpu else torch.device("cpu"),
            dtype=DTYPES[config.dtype] if on_gpu else torch.float32,
            trust_remote_code=config.trust_remote_code,
        )
        if problem is None:
            break
    return Packing(problem=problem, attn_implementation=implementation)


def load_training_data(
    config: Any,
    data: list[FormattedSource],
    held_out: list[FormattedSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pack: bool,
    flash: bool,
) -> TrainingData:
    """Prepared tokens as the Trainer's items. Every rank calls it; who comes first prepares.

    Args:
        pack: whether samples share rows.
        flash: whether attention is flash attention, which is told where samples begin.

    Raises:
        UserError: naming file and line of what cannot be used.
    """
    seed = config.training.get("data_seed") or config.training.get("seed", 42)
    held_out_stores = _stores(held_out, config, tokenizer)
    if config.eval_fraction and not config.eval_data:
        held_out_stores = _stores(
            data, config, tokenizer, HeldOut(fraction=config.eval_fraction, seed=seed, wanted=True)
        )
        if not any(store.counts["rows"] for store in held_out_stores):
            raise UserError(
                [
                    f"eval_fraction={config.eval_fraction} of {', '.join(one.source.name for one in data)} is no row;"
                    " raise it or give eval_data"
                ]
            )
    held_out_sequences = (
        sequences_of(held_out_stores, seq_len=config.seq_len, whole_documents=False) if held_out_stores else None
    )
    of_held_out = {
        "held_out": held_out_sequences,
        "held_out_counts": held_out_stores and count(held_out_sequences, held_out_stores),
    }
    pad = tokenizer.pad_token_id
    notes = []
    if config.chat_template and (cut := split_tokens(tokenizer, tokenizer.chat_template)):
        notes.append(
            f"chat_template={config.chat_template}: the tokenizer {tokenizer.name_or_path} has no token for"
            f" {', '.join(cut)} and cuts {'it' if len(cut) == 1 else 'them'} into several; a template that fits it, or"
            " plain, is learnt faster"
        )
    if config.streaming:
        distributed.wait_long("prepared")
        stream = Stream(
            [(one.source, one.rules) for one in data],
            tokenizer,
            seq_len=config.seq_len,
            pack=pack,
            weights=config.data_weights,
            seed=seed,
            shuffle_buffer=config.shuffle_buffer,
        )
        return TrainingData(
            items=stream,
            collator=PackedCollator(pad, flash=flash) if pack else Collator(pad),
            counts=stream.counts,
            grouped="no",
            notes=notes,
            **of_held_out,
        )

    rest = (
        HeldOut(fraction=config.eval_fraction, seed=seed, wanted=False)
        if config.eval_fraction and not config.eval_data
        else None
    )
    stores = _stores(data, config, tokenizer, rest)
    if empty := [store.facts["source"] for store in stores if not len(store.ends)]:
        raise UserError(
            [
                f"eval_fraction={config.eval_fraction} leaves no row of {', '.join(empty)} to train on; lower it or"
                " give eval_data"
            ]
        )
    sequences = sequences_of(stores, seq_len=config.seq_len, whole_documents=pack)
    passes = None
    if config.data_weights:
        sequences, passes = mix(sequences, config.data_weights, seed=seed)
    counts = count(sequences, stores, passes=passes)
    notes += [
        f"{store.counts['dropped_bad']} rows of {store.facts['source']} are left out as bad; the first:"
        f" {store.facts['first_bad']}"
        for store in stores
        if store.counts["dropped_bad"]
    ]
    _same_everywhere([sequences, *([held_out_sequences] if held_out_sequences else [])])
    if pack:
        rows = PackedRows(sequences, best_fit(sequences.lengths, config.seq_len))
        counts |= {
            "packed_rows": len(rows),
            "fill_rate": round(float(sequences.lengths.sum() / (len(rows) * config.seq_len)), 4),
        }
        return TrainingData(
            items=rows,
            collator=PackedCollator(pad, flash=flash),
            counts=counts,
            grouped="no",
            notes=notes,
            **of_held_out,
        )
    if config.batch_tokens:
        batches = PackedRows(sequences, batches_by_token_budget(sequences.lengths, config.batch_tokens))
        widths = np.array([padded_width(sequences.lengths[group].max()) * len(group) for group in batches.groups])
        counts |= {
            "filled_batches": len(batches),
            "padding_share": round(float(1 - sequences.lengths.sum() / widths.sum()), 4),
        }
        return TrainingData(
            items=batches, collator=Collator(pad), counts=counts, grouped="no", notes=notes, **of_held_out
        )
    strategy = config.training.get("train_sampling_strategy")
    grouped = {None: "within steps", "group_by_length": "among steps"}.get(strategy, "no")
    return TrainingData(
        items=sequences, collator=Collator(pad), counts=counts, grouped=grouped, notes=notes, **of_held_out
    )


def _stores(
    data: list[FormattedSource], config: Any, tokenizer: PreTrainedTokenizerBase, held_out: HeldOut | None = None
) -> list[Store]:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank:
        time.sleep(0.2)  # so that on each node the rank comes first that shows its progress
    shows = local_rank == 0 and not config.training.get("disable_tqdm")
    return [
        prepare(one.source, one.rules, tokenizer, cache_folder(config), held_out=held_out, show=shows) for one in data
    ]


def _same_everywhere(parts: list[Sequences]) -> None:
    """Nodes that prepared for themselves must have come to the same. Collective.

    Raises:
        UserError: naming the hosts.
    """
    distributed.wait_long("prepared")
    mine = " ".join(part.identity["content of data"] for part in parts)
    hosts: dict[str, list[str]] = {}
    for host, theirs in distributed.from_all([(socket.gethostname(), mine)]):
        hosts.setdefault(theirs, []).append(host)
    if len(hosts) > 1:
        raise UserError(
            [
                "data: the hosts read different rows:"
                f" {'; '.join(', '.join(sorted(set(names))) for names in hosts.values())}; copy the same files to all"
                " of them"
            ]
        )
