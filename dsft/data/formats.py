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
from dataclasses import dataclass, field
from typing import Any

from dsft.config.options import DataFields
from dsft.data.readers import Row

FORMATS = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
    "prompt_completion": {"prompt", "completion"},
}
"""Format -> the columns that show it, in the order of trying; the text column comes last."""
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
    starts_document: bool = True
    ends_document: bool = True
    """As of a Row."""


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


def format_rules(rows: list[Row], config: DataFields, *, keep_all: bool = False) -> FormatRules:
    """Finds the format of a source by the columns of its first rows.

    Raises:
        ValueError: listing the columns there are.
    """
    columns = dict.fromkeys(name for row in rows for name in row.values)
    names = ("text_column", "prompt_template", "completion_template", "train_on", "seq_len", "too_long", "bad_rows")
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
        texts = [message["content"] or "" for message in sample.messages]
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
    """Reads a list, or the same as JSON text."""
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
    """Returns the text of a sample that can be scored: for bytes and words."""
    if isinstance(sample, Text):
        return sample.text
    if isinstance(sample, Pair):
        return sample.completion
    return "".join(
        message["content"] or "" for message in sample.messages[sample.answers_from :] if message["role"] == "assistant"
    )
