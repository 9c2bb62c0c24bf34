"""Renders chats in their template, and finds which of the tokens are an assistant's.

Where the template marks what is generated ({% generation %}), transformers says which tokens those are. Elsewhere the
chat is rendered up to each answer and including it, and the tokens of each must begin the tokens of the next; where
they do not, nothing is guessed.
"""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dsft.data.formats import Chat

_ACROSS = (
    "in the chat template's text a token reaches across the border of the answer, so it is neither the prompt's nor the"
    " answer's; let the prompt end with a special token or a line's end"
)
_MARKER = re.compile(r"\{%-?\s*generation\b")

Spans = list[tuple[int, int]]


def chat_tokens(chat: Chat, tokenizer: PreTrainedTokenizerBase, *, train_on: str) -> tuple[list[int], Spans]:
    """Returns (token ids, spans of them that are trained).

    Args:
        train_on: answers (all turns of assistants), last (the last of them) or all.

    Raises:
        ValueError: where the template leaves open which tokens are an answer's.
        jinja2.TemplateError: where it raises.
    """
    _check_tools(chat, tokenizer)
    if train_on == "all":
        ids = _render(tokenizer, chat, len(chat.messages))
        return ids, [(0, len(ids))]
    turns = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
    wanted = [turn for turn in turns if turn >= chat.answers_from]
    wanted = wanted[-1:] if train_on == "last" else wanted
    template = tokenizer.get_chat_template(tools=chat.tools or None)
    if _MARKER.search(template) and tokenizer.is_fast:  # others do not say which characters a token stands for
        return _marked(chat, tokenizer, template, turns, wanted)
    ids = _render(tokenizer, chat, len(chat.messages))
    return ids, [_span_of(turn, ids, chat, tokenizer) for turn in wanted]


def _check_tools(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises where the template does not render tools: it leaves them out in silence, and a call would be empty."""
    calls = any(message.get("tool_calls") for message in chat.messages)
    if not chat.tools and not calls:
        return
    without = [
        {name: value for name, value in message.items() if name != "tool_calls"} | {"content": message["content"] or ""}
        for message in chat.messages
    ]
    texts = [
        _render(tokenizer, variant, len(variant.messages), tokenize=False)
        for variant in (chat, replace(chat, tools=[]), replace(chat, messages=without))
    ]
    is_dropped = {"tools": bool(chat.tools) and texts[0] == texts[1], "tool_calls": calls and texts[0] == texts[2]}
    if dropped := [name for name in is_dropped if is_dropped[name]]:
        raise ValueError(
            f"the chat template does not render {' and '.join(dropped)}; name one that does with chat_template, or"
            " take them out of the data"
        )


def _marked(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, template: str, turns: list[int], wanted: list[int]
) -> tuple[list[int], Spans]:
    """Finds the tokens of the characters that transformers says are generated.

    Its own mask of tokens misses later turns where a token's first character is trimmed (char_to_token).
    """
    texts, stretches = render_jinja_template(
        [chat.messages],
        tools=chat.tools or None,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    if len(stretches[0]) < len(turns) or (len(stretches[0]) > len(turns) and wanted != turns):
        raise ValueError(
            f"the chat template marks {len(stretches[0])} stretches as generated, for {len(turns)} turns of the"
            " assistant, so they cannot be told apart"
        )
    encoded = tokenizer(texts[0], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = [_tokens_of(begin, end, encoded["offset_mapping"]) for begin, end in stretches[0]]
    return encoded["input_ids"], spans if wanted == turns else [spans[turns.index(turn)] for turn in wanted]


def _tokens_of(begin: int, end: int, offsets: list[tuple[int, int]]) -> tuple[int, int]:
    inside = [index for index, (first, last) in enumerate(offsets) if first < end and last > begin and first < last]
    if not inside:
        raise ValueError("the chat template marks a stretch of no characters as generated")
    if offsets[inside[0]][0] < begin or offsets[inside[-1]][1] > end:
        raise ValueError(_ACROSS)
    return inside[0], inside[-1] + 1


def _span_of(turn: int, ids: list[int], chat: Chat, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    before = _render(tokenizer, chat, turn, add_generation_prompt=True)
    through = ids if turn + 1 == len(chat.messages) else _render(tokenizer, chat, turn + 1)
    if through[: len(before)] == before and ids[: len(through)] == through and len(before) < len(through):
        return len(before), len(through)
    texts = [
        _render(tokenizer, chat, turn, tokenize=False, add_generation_prompt=True),
        _render(tokenizer, chat, turn + 1, tokenize=False),
        _render(tokenizer, chat, len(chat.messages), tokenize=False),
    ]
    if all(longer.startswith(shorter) for shorter, longer in pairwise(texts)):
        raise ValueError(f"message {turn + 1}: {_ACROSS}")
    way_out = (
        "use train_on: last, a template with {% generation %} markers (chat_template), or prompt and completion columns"
    )
    raise ValueError(
        f"message {turn + 1}: the chat template renders a conversation differently as it grows, so the assistant's"
        f" tokens cannot be told apart; {way_out}"
    )


def _render(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, turns: int, *, tokenize: bool = True, **options: Any
) -> Any:
    """Renders the first `turns` messages as ids, or as text."""
    options |= {"tools": chat.tools} if chat.tools else {}
    # A list of one chat: transformers looks into the first message of a chat alone, and there may be none before a
    # first answer.
    rendered = tokenizer.apply_chat_template(
        [chat.messages[:turns]], tokenize=tokenize, return_dict=tokenize, **options
    )
    return rendered["input_ids"][0] if tokenize else rendered[0]
