"""Turns rows into token sequences with labels: text into windows, prompts with completions and chats with masks.

Every sequence is a dict of `input_ids` and `labels` (same length; -100 where nothing is learnt). Nothing is cut or dropped
without being counted: `Samples.counts` goes to run.json.
"""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dsft.problems import UserError

IGNORED = -100
"""Label of a token that is not scored (torch.nn.functional.cross_entropy's ignore_index)."""


@dataclass(kw_only=True)
class Samples:
    """Token sequences of one data set."""

    sequences: Dataset
    """Columns input_ids and labels, lists of the same length <= seq_len."""
    data_format: str
    counts: dict[str, int] = field(default_factory=dict)
    """rows, sequences, tokens, trained_tokens, truncated, dropped."""


def find_format(rows: Dataset, config, *, key: str) -> str:
    """The shape of the rows: text, prompt_completion or messages.

    Raises:
        UserError: listing the columns there are.
    """
    columns = set(rows.column_names)
    needed = {"messages": {"messages"}, "prompt_completion": {"prompt", "completion"}, "text": {config.text_column}}
    if config.data_format != "auto":
        missing = needed[config.data_format] - columns
        if missing:
            raise UserError([f"{key}: data_format={config.data_format} needs the column {', '.join(sorted(missing))}; there are {', '.join(rows.column_names)}"])
        return config.data_format
    for name, wanted in needed.items():
        if wanted <= columns:
            return name
    raise UserError([
        f"{key}: none of the columns messages, prompt and completion, or {config.text_column} is there; there are "
        f"{', '.join(rows.column_names)}. Name the text with text_column"
    ])


def check_rows(rows: Dataset, config, tokenizer: PreTrainedTokenizerBase | None, *, key: str, problems: list[str]) -> None:
    """Problems that the columns and the first row show already, before anything is tokenised."""
    try:
        data_format = find_format(rows, config, key=key)
    except UserError as error:
        problems += error.problems
        return
    if data_format == "messages" and tokenizer is not None and not tokenizer.chat_template:
        problems.append(f"{key}: the rows are chats, but the tokenizer {tokenizer.name_or_path} has no chat template; use a tokenizer of a chat model, or prompt and completion columns")
    for name in {"text": [config.text_column], "prompt_completion": ["prompt", "completion"], "messages": []}[data_format]:
        found = rows.features[name]
        if getattr(found, "dtype", None) not in ("string", "large_string"):
            problems.append(f"{key}: column {name!r} must hold text; it holds {getattr(found, 'dtype', found)}")
        elif missing := rows.data.column(name).null_count:
            problems.append(f"{key}: column {name!r} is missing in {missing} of {len(rows)} rows; remove or fill them")
    if data_format == "messages" and not _is_chat(rows[0]["messages"]):
        problems.append(f"{key}: column 'messages' must hold lists of {{role, content}}; row 1 does not")


def _is_chat(messages) -> bool:
    return isinstance(messages, list) and bool(messages) and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)


def build_samples(rows: Dataset, config, tokenizer: PreTrainedTokenizerBase, *, key: str, keep_all: bool = False) -> Samples:
    """Tokenised sequences of `rows`; cached by `datasets` under a fingerprint of rows, tokenizer and options.

    Args:
        keep_all: one sequence for each row, in order, also where it has no trained token (evaluation counts those).

    Raises:
        UserError: where a row is unusable under the options, or nothing is left to train on.
    """
    data_format = find_format(rows, config, key=key)
    options = {"tokenizer": tokenizer, "seq_len": config.seq_len}
    counts = {"rows": len(rows), "truncated": 0, "dropped": 0}
    if data_format == "text":
        options["text_column"] = config.text_column
        sequences = rows.map(_tokenize_text, batched=True, batch_size=1000, fn_kwargs=options, remove_columns=rows.column_names, desc=f"Tokenising {key}")
        # One last window per batch of 1000 documents is shorter; all other windows are full.
    else:
        function = _tokenize_pair if data_format == "prompt_completion" else _tokenize_chat
        marked = rows.map(_named, with_indices=True, fn_kwargs={"function": function, "tokenizer": tokenizer, "key": key}, remove_columns=rows.column_names, desc=f"Tokenising {key}")
        sequences = _apply_length_policy(marked, config, counts, key=key, keep_all=keep_all)
    lengths = [len(ids) for ids in sequences["input_ids"]]
    counts["sequences"] = len(sequences)
    counts["tokens"] = sum(lengths)
    counts["trained_tokens"] = sum(sum(label != IGNORED for label in labels[1:]) for labels in sequences["labels"])
    if counts["trained_tokens"] == 0:
        raise UserError([f"{key}: {len(rows)} rows give no token to train on (of {counts['tokens']} tokens, {counts['dropped']} sequences dropped)"])
    return Samples(sequences=sequences, data_format=data_format, counts=counts)


def _named(row: dict, index: int, *, function, tokenizer, key: str) -> dict:
    """`function(row)`; what is wrong with a row is said with its number."""
    try:
        return function(row, tokenizer=tokenizer)
    except (TypeError, KeyError, AttributeError, ValueError, TemplateError) as error:
        raise UserError([f"{key}: row {index + 1} cannot be used: {' '.join(str(error).split())[:300]}"]) from None


def _tokenize_text(batch: dict, *, tokenizer, seq_len: int, text_column: str) -> dict:
    """Documents, an end token after each, laid end to end and cut into windows of seq_len."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [token for text in batch[text_column] if text for token in tokenizer(text, verbose=False)["input_ids"] + end]
    windows = [ids[start : start + seq_len] for start in range(0, len(ids), seq_len)]
    return {"input_ids": windows, "labels": [list(window) for window in windows]}


def _tokenize_pair(row: dict, *, tokenizer) -> dict:
    """Prompt and completion as they stand, then the end token; the completion and the end token are trained on."""
    prompt = tokenizer(row["prompt"], verbose=False)["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]  # a tokenizer that closes each text must not close the prompt
    completion = tokenizer(row["completion"], add_special_tokens=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return {"input_ids": prompt + completion + end, "labels": [IGNORED] * len(prompt) + completion + end}


def _tokenize_chat(row: dict, *, tokenizer) -> dict:
    """A chat in the tokenizer's template; the assistants' turns are trained on.

    The span of a turn is found by rendering the chat up to it and including it, which must be prefixes of each other.
    """
    messages = row["messages"]
    if not _is_chat(messages):
        raise ValueError("messages must be a list of {role, content} with text in both")
    ids = _render(tokenizer, messages)
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], add_generation_prompt=True)
        through = _render(tokenizer, messages[: turn + 1])
        if through[: len(before)] != before or ids[: len(through)] != through:
            raise ValueError(
                "the chat template renders a conversation differently as it grows, so the assistant's tokens cannot be told apart; "
                "use prompt and completion columns"
            )
        labels[len(before) : len(through)] = ids[len(before) : len(through)]
    return {"input_ids": ids, "labels": labels}


def _render(tokenizer, messages: list[dict], **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"] if messages else []


def _apply_length_policy(sequences: Dataset, config, counts: dict[str, int], *, key: str, keep_all: bool) -> Dataset:
    seq_len = config.seq_len
    too_long = [i for i, ids in enumerate(sequences["input_ids"]) if len(ids) > seq_len]
    if too_long and config.too_long == "error":
        raise UserError([f"{key}: row {too_long[0] + 1} and {len(too_long) - 1} others are longer than seq_len={seq_len}; raise it, or set too_long to truncate or drop"])
    if too_long and (config.too_long == "truncate" or keep_all):
        counts["truncated"] = len(too_long)
        sequences = sequences.map(_cut, fn_kwargs={"seq_len": seq_len, "blank": config.too_long == "drop"}, desc="Truncating")
    if keep_all:
        return sequences
    # What has no trained token (its answer was cut off, or is empty) teaches nothing.
    keep = [
        i for i, (ids, labels) in enumerate(zip(sequences["input_ids"], sequences["labels"], strict=True))
        if len(ids) <= seq_len and any(label != IGNORED for label in labels[1:])
    ]
    counts["dropped"] = len(sequences) - len(keep)
    return sequences.select(keep) if counts["dropped"] else sequences


def _cut(row: dict, *, seq_len: int, blank: bool) -> dict:
    """A sequence cut to seq_len; with `blank`, one that was too long keeps no label."""
    labels = [IGNORED] * seq_len if blank and len(row["labels"]) > seq_len else row["labels"][:seq_len]
    return {"input_ids": row["input_ids"][:seq_len], "labels": labels}


class Collator:
    """Pads a list of sequences on the right to the longest, rounded up to a multiple of 8.

    Returns input_ids, attention_mask and labels of shape [batch, time]; padding has attention 0 and label -100, so the
    choice of the pad token changes no loss.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, sequences: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(sequence["input_ids"]) for sequence in sequences)
        width = -(-longest // 8) * 8
        shape = (len(sequences), width)
        ids_BT = torch.full(shape, self.pad_token_id, dtype=torch.long)
        mask_BT = torch.zeros(shape, dtype=torch.long)
        labels_BT = torch.full(shape, IGNORED, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            length = len(sequence["input_ids"])
            ids_BT[row, :length] = torch.tensor(sequence["input_ids"])
            mask_BT[row, :length] = 1
            labels_BT[row, :length] = torch.tensor(sequence["labels"])
        return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}
