"""Finds the format of rows, by their columns or as the user says, and brings each row into one form for tokenising.

The forms are text, prompt with completion, and chat. The formats:

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dsft.config.options import DataFields
from dsft.data.sources import Batch, HeldOut, Row, Source, batches_of

FORMATS = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
    "prompt_completion": {"prompt", "completion"},
}
"""Format -> the columns that show it, in the order of trying; the text column comes last."""
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
"""Speakers in ShareGPT's form, as vicuna's data, OpenChat, Hermes and LLaMA-Factory name them, beside ROLES."""
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "tool_call",
    "tool_call": "tool_call",
}
"""Roles as OpenAI, LLaMA-Factory and ms-swift name them -> those of chat templates; the content of a tool_call is the
call as JSON, which becomes `tool_calls` of the assistant's turn.
"""
MOST_WEIGHT = 1_000_000
"""Of a message: beyond it fp32 sums of a step would lose its other tokens."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning, as transformers reads them."""

Message = dict[str, Any]
"""role, content (text); where there are any: reasoning_content, name, tool_call_id, tool_calls with arguments that are
objects, and weight where it is not 1 (0 for a turn that is not trained).
"""


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str
    starts_document: bool = True
    ends_document: bool = True
    """As of a Row."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    answers_from: int = 0
    """Assistant turns before this message are given, not learnt (the prompt of a prompt with completion)."""


class EmptyAnswer(ValueError):
    """A row whose answer has no character: there is nothing to learn."""


@dataclass(frozen=True, kw_only=True)
class FormatRules:
    """What decides the tokens of a row, beside the tokenizer; the fields are those of `DataFields`."""

    format: str
    text_column: str
    prompt_template: str | None
    completion_template: str | None
    train_on: str
    seq_len: int
    too_long: str
    bad_rows: str
    train_thinking: str = "auto"
    drop_unrendered: bool = False
    has_chat_pairs: bool = False
    """Whether prompts and completions are lists of messages."""
    keep_all: bool = False
    """One sequence for each row, in order, also for rows to be dropped (evaluation): those have no trained token."""

    @property
    def is_text(self) -> bool:
        """Documents of any length, all trained, to be laid end to end."""
        return self.format == "text" or (self.format == "template" and not self.prompt_template)

    @property
    def is_chat(self) -> bool:
        """Rows that only a tokenizer with a chat template can take."""
        return self.format in ("messages", "sharegpt") or self.has_chat_pairs


@dataclass(frozen=True, kw_only=True)
class FormattedSource:
    """A source and how its rows are read."""

    source: Source
    rules: FormatRules
    held_out: HeldOut | None = None
    """The share of the rows that is read; None for all of them."""

    def batches(self) -> Iterator[Batch]:
        """Reads the rows in order."""
        return batches_of(self.source, self.held_out)

    def __str__(self) -> str:
        return f"{self.source.name} ({self.rules.format})"


def format_rules(rows: list[Row], config: DataFields, *, keep_all: bool = False) -> FormatRules:
    """Finds the format of a source by the columns of its first rows.

    Raises:
        ValueError: listing the columns there are.
    """
    columns = dict.fromkeys(name for row in rows for name in row.values)
    names = ("text_column", "prompt_template", "completion_template", "train_on", "seq_len", "too_long", "bad_rows")
    names += ("train_thinking", "drop_unrendered")
    return FormatRules(
        format=find_format(list(columns), config),
        has_chat_pairs=isinstance(rows[0].values.get("completion"), list),
        keep_all=keep_all,
        **{name: getattr(config, name) for name in names},
    )


def find_format(columns: list[str], config: DataFields) -> str:
    """Finds the format by the columns, or as `data_format` says.

    Raises:
        ValueError: listing the columns there are.
    """
    if config.data_format != "auto":
        needed = (
            template_columns(config)
            if config.data_format == "template"
            else {config.text_column}
            if config.data_format == "text"
            else FORMATS[config.data_format]
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
    for name, wanted in [*FORMATS.items(), ("text", {config.text_column})]:
        if wanted <= set(columns):
            return name
    known = "; ".join(", ".join(sorted(wanted)) for wanted in FORMATS.values())
    raise ValueError(
        f"columns of no known format ({known}; {config.text_column}); there are {', '.join(columns)}. Name the text"
        " with text_column, or write a completion_template"
    )


def template_columns(config: DataFields | FormatRules) -> set[str]:
    """Lists the columns that the user's templates name.

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


def canonical(row: Row, rules: FormatRules, *, has_template: bool) -> Text | Pair | Chat:
    """Brings a row into its one form.

    Args:
        has_template: whether the tokenizer can render chats.

    Raises:
        EmptyAnswer, ValueError: what is wrong with the row.
    """
    sample = _canonical(row, rules, has_template)
    if isinstance(sample, Chat):
        texts = [message.get(key) or "" for message in sample.messages for key in ("content", "reasoning_content")]
    else:
        texts = [sample.text] if isinstance(sample, Text) else [sample.prompt, sample.completion]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"holds half of a surrogate pair at character {error.start + 1}, which is no text in UTF-8"
            ) from None
    return sample


def _canonical(row: Row, rules: FormatRules, has_template: bool) -> Text | Pair | Chat:
    values = row.values
    if rules.format == "text":
        return Text(
            text=_text(values, rules.text_column, empty=True),
            starts_document=row.starts_document,
            ends_document=row.ends_document,
        )
    if rules.format == "template":
        return _from_template(values, rules)
    if rules.format == "prompt_completion":
        if rules.has_chat_pairs:
            if not (isinstance(values.get("prompt"), list) and isinstance(values.get("completion"), list)):
                raise ValueError("prompt and completion must be lists of messages, as in the rows before")
            return _chat(values["prompt"] + values["completion"], values, answers_from=len(values["prompt"]))
        return _pair(_text(values, "prompt", empty=True), _text(values, "completion", empty=True))
    if rules.format == "alpaca":
        return _from_alpaca(values, has_template)
    if rules.format == "sharegpt":
        return _from_sharegpt(values)
    return _chat(values.get("messages"), values)


def _text(row: dict[str, Any], column: str, *, empty: bool = False) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        if value is None:
            raise ValueError(f"column {column!r} is {'null' if column in row else 'missing'}")
        raise ValueError(f"column {column!r} must hold text; it holds {type(value).__name__}")
    if not value and not empty:
        raise ValueError(f"column {column!r} is empty")
    return value


def _pair(prompt: str, completion: str) -> Pair:
    if not completion.strip():
        raise EmptyAnswer("the completion is empty")
    return Pair(prompt=prompt, completion=completion)


def _from_template(row: dict[str, Any], rules: FormatRules) -> Text | Pair:
    values = {
        name: row[name] if isinstance(row.get(name), (str, int, float)) else _text(row, name)
        for name in template_columns(rules)
    }
    completion = rules.completion_template.format(**values)
    return _pair(rules.prompt_template.format(**values), completion) if rules.prompt_template else Text(text=completion)


def _from_alpaca(row: dict[str, Any], has_template: bool) -> Pair | Chat:
    instruction, output = _text(row, "instruction"), _text(row, "output", empty=True)
    given, history = row.get("input") or "", row.get("history") or []
    if not isinstance(given, str):
        raise ValueError(f"column 'input' must hold text; it holds {type(given).__name__}")
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise ValueError("column 'history' must be a list of [instruction, output]")
    system = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    if has_template:
        question = f"{instruction}\n{given}" if given else instruction
        turns = [
            {"role": role, "content": text}
            for turn in [*history, (question, output)]
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return _chat([*system, *turns], {})
    if history:
        raise ValueError(
            "column 'history' holds earlier turns, which need a chat template; name one with chat_template"
        )
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
    known = ROLES | SHAREGPT_ROLES
    messages = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn.get("from"), str) or turn["from"] not in known:
            raise ValueError(
                f"turn {number} is from {turn.get('from')!r}; known are {', '.join(SHAREGPT_ROLES | ROLES)}"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append(rest | {"role": known[turn["from"]], "content": turn.get("value")})
    return _chat(messages, row)


def _chat(messages: Any, row: dict[str, Any], *, answers_from: int = 0) -> Chat:
    """Brings messages of every shape into one.

    Raises:
        EmptyAnswer, ValueError: what is wrong with a message.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of {role, content}")
    chat: list[Message] = []
    before, first_answer = None, 0
    for number, given in enumerate(messages, start=1):
        message, is_call = _message(given, number)
        role = message["role"]
        if role in ("system", "developer") and before not in (None, "system", "developer"):
            raise ValueError(f"message {number} is of the {role}, after a {before}: roles are out of order")
        if role == before == "user":
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
            and message.get("weight", 1)
            and not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))
        ):
            raise EmptyAnswer(f"message {number}, an assistant's, is empty")
        if is_call and before == "assistant" and number - 1 != answers_from:  # calls that stand beside the turn
            if message.get("weight", 1) != chat[-1].get("weight", 1):
                raise ValueError(f"message {number} ({given['role']}) has another weight than the turn it belongs to")
            chat[-1] = chat[-1] | {"tool_calls": [*chat[-1].get("tool_calls", []), *message["tool_calls"]]}
        else:
            chat.append(message)
        before = role
        if number == answers_from:
            first_answer = len(chat)
    answers = [message for message in chat[first_answer:] if message["role"] == "assistant"]
    if not answers:
        raise EmptyAnswer("no turn of an assistant")
    if not any(message.get("weight", 1) for message in answers):
        raise EmptyAnswer("every turn of an assistant has weight 0")
    return Chat(messages=chat, tools=_tools(row.get("tools")), answers_from=first_answer)


def _message(given: dict[str, Any], number: int) -> tuple[Message, bool]:
    """Returns (a message in the one form, whether it was a call with a role of its own)."""
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
    content, calls = given.get("content"), given.get("tool_calls") or []
    if isinstance(content, list):
        content = "".join(_part(part, f"message {number} ({role})") for part in content)
    is_call = ROLES[role] == "tool_call"
    if is_call:
        calls, content = _json(content, f"message {number} ({role}) must hold the call as JSON"), ""
        calls = calls if isinstance(calls, list) else [calls]
    elif given.get("function_call"):  # OpenAI's form before tool_calls
        calls = [{"function": given["function_call"]}]
    if not isinstance(calls, list):
        raise ValueError(f"message {number} ({role}): tool_calls must be a list; it is a {type(calls).__name__}")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(
            f"message {number} ({role}) must hold text; it holds"
            f" {'nothing' if content is None else type(content).__name__}"
        )
    message: Message = {"role": "assistant" if is_call else ROLES[role], "content": content or ""}
    if reasoning := next((given[key] for key in REASONING if given.get(key)), None):
        if not isinstance(reasoning, str):
            raise ValueError(f"message {number} ({role}): reasoning must be text; it is a {type(reasoning).__name__}")
        message["reasoning_content"] = reasoning
    message |= {key: given[key] for key in ("name", "tool_call_id") if given.get(key) is not None}
    if calls:
        message["tool_calls"] = [_call(call, f"message {number} ({role})") for call in calls]
    weight = 1 if given.get("weight") is None else given["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:  # NaN is not
        raise ValueError(
            f"message {number} ({role}) has the weight {weight!r:.40}; it must be a number from 0 (not trained) to"
            f" {MOST_WEIGHT:,}"
        )
    for key in ("train", "loss"):
        if not isinstance(given.get(key), bool | None):
            raise ValueError(f"message {number} ({role}): {key} is {given[key]!r:.40}; use true, false, or weight")
        weight = 0 if given.get(key) is False else weight
    return (message if weight == 1 else message | {"weight": weight}), is_call


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        part = part.get("text")
    if isinstance(part, dict):
        raise ValueError(f"{where} holds a part of the type {part.get('type')!r}; only text can be trained")
    if not isinstance(part, str):
        raise ValueError(f"{where} holds a part that is no text but {type(part).__name__}")
    return part


def _call(call: Any, where: str) -> dict[str, Any]:
    """Returns {type, function: {name, arguments as an object}}, and an id where there is one."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call must be {{function: {{name, arguments}}}}")
    arguments = function.get("arguments", function.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: the arguments of {function['name']} must be a JSON object")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of {function['name']} must be an object; they are {arguments!r:.80}")
    known = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return known | ({"id": call["id"]} if call.get("id") else {})


def dump_arguments(arguments: dict[str, Any]) -> str:
    """Writes a call's arguments as JSON text, as a server gives them."""
    return json.dumps(arguments, ensure_ascii=False)


def _json(text: Any, problem: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{problem} ({error})") from None


def _tools(value: Any) -> list[Any]:
    """Reads a list, or the same as JSON text."""
    if isinstance(value, str) and value.strip():
        value = _json(value, "tools is no JSON")
    if not value:
        return []
    if not isinstance(value, list):
        raise ValueError(f"tools must be a list; it is a {type(value).__name__}")
    return value


def text_of(sample: Text | Pair | Chat) -> str:
    """Returns the text of a sample that can be scored: for bytes and words."""
    if isinstance(sample, Text):
        return sample.text
    if isinstance(sample, Pair):
        return sample.completion
    return "".join(
        message["content"] or "" for message in sample.messages[sample.answers_from :] if message["role"] == "assistant"
    )
