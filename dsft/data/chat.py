"""Chats in their template, and which of the tokens are an assistant's.

Where the template marks what is generated ({% generation %}), transformers says which tokens those are. Elsewhere the chat is rendered up to each answer
and including it, and the tokens of each must begin the tokens of the next; where they do not, nothing is guessed.
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dsft.data.shapes import Chat

PRESETS = {path.stem: path for path in (Path(__file__).parent / "templates").glob("*.jinja")}
_MARKER = re.compile(r"\{%-?\s*generation\b")

Spans = list[tuple[int, int]]


def load_template(name: str) -> str:
    """The text of a preset or a file.

    Raises:
        ValueError: where it is neither.
    """
    path = PRESETS.get(name, Path(name).expanduser())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is neither a file that can be read ({error}) nor one of the presets {', '.join(sorted(PRESETS))}") from None


def split_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """The template's markers of the form <|...|> or <..._of_turn> that the tokenizer cuts into several tokens."""
    markers = dict.fromkeys(re.findall(r"<\|\w+\|>|<\w+_of_\w+>", template))
    return [marker for marker in markers if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) > 1]


def chat_tokens(chat: Chat, tokenizer: PreTrainedTokenizerBase, *, train_on: str) -> tuple[list[int], Spans]:
    """(token ids, spans of them that are learnt).

    Args:
        train_on: answers (all turns of assistants), last (the last of them) or all.

    Raises:
        ValueError: where the template leaves open which tokens are an answer's.
        jinja2.TemplateError: where it raises.
    """
    if train_on == "all":
        ids = _render(tokenizer, chat, len(chat.messages))
        return ids, [(0, len(ids))]
    turns = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
    wanted = [turn for turn in turns if turn >= chat.answers_from]
    wanted = wanted[-1:] if train_on == "last" else wanted
    if _MARKER.search(tokenizer.chat_template):
        return _marked(chat, tokenizer, turns, wanted)
    ids = _render(tokenizer, chat, len(chat.messages))
    return ids, [_span_of(turn, ids, chat, tokenizer) for turn in wanted]


def _marked(chat: Chat, tokenizer: PreTrainedTokenizerBase, turns: list[int], wanted: list[int]) -> tuple[list[int], Spans]:
    try:
        rendered = tokenizer.apply_chat_template(chat.messages, tools=chat.tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    except OverflowError:  # of transformers, which looks for the character before the end of a stretch
        raise ValueError("the chat template marks a stretch of no characters as generated") from None
    mask = [0, *rendered["assistant_masks"], 0]
    edges = [index for index, (before, after) in enumerate(pairwise(mask)) if before != after]
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if not spans:
        raise ValueError("the chat template has generation markers, but marks no token of this chat")
    if wanted == turns:
        return rendered["input_ids"], spans
    if len(spans) != len(turns):
        raise ValueError(f"the chat template marks {len(spans)} stretches of tokens for {len(turns)} turns of the assistant, so one turn cannot be told from another; set train_on: answers")
    return rendered["input_ids"], [spans[turns.index(turn)] for turn in wanted]


def _span_of(turn: int, ids: list[int], chat: Chat, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    before = _render(tokenizer, chat, turn, add_generation_prompt=True)
    through = ids if turn + 1 == len(chat.messages) else _render(tokenizer, chat, turn + 1)
    if through[: len(before)] == before and ids[: len(through)] == through and len(before) < len(through):
        return len(before), len(through)
    texts = [_render(tokenizer, chat, turn, tokenize=False, add_generation_prompt=True), _render(tokenizer, chat, turn + 1, tokenize=False), _render(tokenizer, chat, len(chat.messages), tokenize=False)]
    if all(longer.startswith(shorter) for shorter, longer in pairwise(texts)):
        raise ValueError(f"message {turn + 1}: in the chat template's text a token reaches across the border of the answer, so it is neither the prompt's nor the answer's; let the prompt end with a special token or a line's end")
    way_out = "use train_on: last, a template with {% generation %} markers (chat_template), or prompt and completion columns"
    raise ValueError(f"message {turn + 1}: the chat template renders a conversation differently as it grows, so the assistant's tokens cannot be told apart; {way_out}")


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat, turns: int, *, tokenize: bool = True, **options: Any) -> Any:
    """The first `turns` messages as ids, or as text."""
    if not turns:
        return [] if tokenize else ""
    options |= {"tools": chat.tools} if chat.tools else {}
    rendered = tokenizer.apply_chat_template(chat.messages[:turns], tokenize=tokenize, return_dict=tokenize, **options)
    return rendered["input_ids"] if tokenize else rendered
