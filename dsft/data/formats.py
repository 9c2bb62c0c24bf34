"""What a row is, by its columns or as the user says, and its one form for tokenising: text, prompt with completion, or
a chat.

- text: the text column.
- prompt_completion: `prompt` and `completion`; both texts, or both lists of messages.
- messages: `messages`, a list of {role, content} (system, user, assistant, tool), with `tools` beside it where there
  are any.
- sharegpt: `conversations`, a list of {from, value}.
- alpaca: `instruction`, `output`, and `input` and `system` where there are any. A chat where the tokenizer has a
  template, else headed paragraphs.
- template: the user's own `prompt_template` and `completion_template`.
"""

import json
import string
from dataclasses import dataclass, field
from typing import Any

from dsft.data.readers import BEGUN, GOES_ON

SHAPES = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
    "prompt_completion": {"prompt", "completion"},
}
"""Shape -> the columns that show it, in the order of trying; the text column comes last."""
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Speakers in ShareGPT's form, as vicuna's data, OpenChat, Hermes and LLaMA-Factory name them."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str
    begun: bool = False
    goes_on: bool = False
    """A piece of a document; see files.py."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    messages: list[dict[str, Any]]
    tools: list[Any] = field(default_factory=list)
    answers_from: int = 0
    """Assistant turns before this message are given, not learnt (the prompt of a prompt with completion)."""


class EmptyAnswer(ValueError):
    """A row whose answer has no character: there is nothing to learn."""


def find_format(columns: list[str], config: Any) -> str:
    """
    Raises:
        ValueError: listing the columns there are.
    """
    if config.data_format != "auto":
        needed = (
            template_columns(config)
            if config.data_format == "template"
            else {config.text_column}
            if config.data_format == "text"
            else SHAPES[config.data_format]
        )
        if missing := needed - set(columns):
            raise ValueError(
                f"data_format={config.data_format} needs the column {', '.join(sorted(missing))}; there are"
                f" {', '.join(columns)}"
            )
        return config.data_format
    if config.completion_template:
        if missing := template_columns(config) - set(columns):
            raise ValueError(
                f"the template names the column {', '.join(sorted(missing))}; there are {', '.join(columns)}"
            )
        return "template"
    for shape, wanted in [*SHAPES.items(), ("text", {config.text_column})]:
        if wanted <= set(columns):
            return shape
    known = "; ".join(", ".join(sorted(wanted)) for wanted in SHAPES.values())
    raise ValueError(
        f"columns of no known shape ({known}; {config.text_column}); there are {', '.join(columns)}. Name the text with"
        " text_column, or write a completion_template"
    )


def template_columns(config: Any) -> set[str]:
    """The columns that the user's templates name.

    Raises:
        ValueError: where a template is none.
    """
    names = set()
    for key in ("prompt_template", "completion_template"):
        template = getattr(config, key) or ""
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(
                f"{key}={template!r}: {error}; write columns as {{name}}, and braces themselves as {{{{ and }}}}"
            ) from None
        for _, name, form, conversion in parts:
            if name is not None and (not name.isidentifier() or form or conversion):
                raise ValueError(f"{key}={template!r}: {{{name}}} must be the plain name of a column")
            names |= {name} - {None}
    return names


def canonical(row: dict[str, Any], shape: str, config: Any, *, has_template: bool) -> Text | Pair | Chat:
    """
    Args:
        has_template: whether the tokenizer can render chats.

    Raises:
        EmptyAnswer, ValueError: what is wrong with the row.
    """
    sample = _canonical(row, shape, config, has_template=has_template)
    texts = (
        [sample.text]
        if isinstance(sample, Text)
        else (
            [sample.prompt, sample.completion]
            if isinstance(sample, Pair)
            else [message["content"] or "" for message in sample.messages]
        )
    )
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"holds half of a surrogate pair at character {error.start + 1}, which is no text in UTF-8"
            ) from None
    return sample


def _canonical(row: dict[str, Any], shape: str, config: Any, *, has_template: bool) -> Text | Pair | Chat:
    if shape == "text":
        return Text(
            text=_text(row, config.text_column, empty=True),
            begun=row.get(BEGUN, False),
            goes_on=row.get(GOES_ON, False),
        )
    if shape == "template":
        return _from_template(row, config)
    if shape == "prompt_completion":
        if config.of_chats:
            if not (isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list)):
                raise ValueError("prompt and completion must be lists of messages, as in the rows before")
            return _chat(row["prompt"] + row["completion"], row, answers_from=len(row["prompt"]))
        return _pair(_text(row, "prompt", empty=True), _text(row, "completion", empty=True))
    if shape == "alpaca":
        return _from_alpaca(row, has_template)
    if shape == "sharegpt":
        return _from_sharegpt(row)
    return _chat(row.get("messages"), row)


def _text(row: dict[str, Any], column: str, *, empty: bool = False) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise ValueError(
            f"column {column!r} is missing"
            if value is None
            else f"column {column!r} must hold text; it holds {type(value).__name__}"
        )
    if not value and not empty:
        raise ValueError(f"column {column!r} is empty")
    return value


def _pair(prompt: str, completion: str) -> Pair:
    if not completion.strip():
        raise EmptyAnswer("the completion is empty")
    return Pair(prompt=prompt, completion=completion)


def _from_template(row: dict[str, Any], config: Any) -> Text | Pair:
    values = {
        name: row[name] if isinstance(row.get(name), (str, int, float)) else _text(row, name)
        for name in template_columns(config)
    }
    completion = config.completion_template.format(**values)
    return (
        _pair(config.prompt_template.format(**values), completion) if config.prompt_template else Text(text=completion)
    )


def _from_alpaca(row: dict[str, Any], has_template: bool) -> Pair | Chat:
    instruction, output = _text(row, "instruction"), _text(row, "output", empty=True)
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise ValueError(f"column 'input' must hold text; it holds {type(given).__name__}")
    system = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    if has_template:
        question = f"{instruction}\n{given}" if given else instruction
        return _chat([*system, {"role": "user", "content": question}, {"role": "assistant", "content": output}], {})
    # The headings of github.com/tatsu-lab/stanford_alpaca.
    parts = [system[0]["content"]] if system else []
    parts += [f"### Instruction:\n{instruction}", *([f"### Input:\n{given}"] if given else []), "### Response:\n"]
    return _pair("\n\n".join(parts), output)


def _from_sharegpt(row: dict[str, Any]) -> Chat:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations must be a list of {from, value}")
    if turns and all("role" in turn for turn in turns):
        return _chat(turns, row)
    messages = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn.get("from"), str) or turn["from"] not in SHAREGPT_ROLES:
            raise ValueError(f"turn {number} is from {turn.get('from')!r}; known are {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")})
    return _chat(messages, row)


def _chat(messages: Any, row: dict[str, Any], *, answers_from: int = 0) -> Chat:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of {role, content}")
    before = None
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"message {number} ({role}) must hold text; it holds"
                f" {'nothing' if content is None else type(content).__name__}"
            )
        if role in ("system", "developer") and before not in (None, "system", "developer"):
            raise ValueError(f"message {number} is of the {role}, after a {before}: roles are out of order")
        if role == before and role in ("user", "assistant"):
            raise ValueError(
                f"messages {number - 1} and {number} are both of the {role}: roles are out of order; join them"
            )
        if role == "tool" and before not in ("assistant", "tool"):
            raise ValueError(
                f"message {number} is of a tool, after {'nothing' if before is None else f'a {before}'}: roles are out"
                " of order"
            )
        if (
            role == "assistant"
            and number > answers_from
            and not (content or "").strip()
            and not message.get("tool_calls")
        ):
            raise EmptyAnswer(f"message {number}, an assistant's, is empty")
        before = role
    if not any(message["role"] == "assistant" for message in messages[answers_from:]):
        raise EmptyAnswer("no turn of an assistant")
    return Chat(messages=messages, tools=_tools(row.get("tools")), answers_from=answers_from)


def _tools(value: Any) -> list[Any]:
    """A list, or the same as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"tools is no JSON ({error})") from None
    if not value:
        return []
    if not isinstance(value, list):
        raise ValueError(f"tools must be a list; it is a {type(value).__name__}")
    return value


def text_of(sample: Text | Pair | Chat) -> str:
    """What of a sample can be scored, as text: for bytes and words."""
    if isinstance(sample, Text):
        return sample.text
    if isinstance(sample, Pair):
        return sample.completion
    return "".join(
        message["content"] or "" for message in sample.messages[sample.answers_from :] if message["role"] == "assistant"
    )
