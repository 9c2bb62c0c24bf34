"""Finds the format of rows, by their columns or by `data_format`, and brings each row into one form for tokenising.

The forms are text, prompt with completion, and chat. Nothing of a chat is read by guess: a key of a message, or a
column that changes what a row means, is read or refused by name (`drop_keys` ignores it).
"""

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from dsft.config.options import DataFields, EvalConfig
from dsft.data.sources import Batch, HeldOut, Row, Source

COLUMNS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
"""Format -> the columns that show it, tried in this order; then the text column, see `_columns_of`."""
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions", "tool_defs", "available_tools")
CHAT_COLUMNS = (*SYSTEM_COLUMNS, *TOOL_COLUMNS)
"""Read beside the turns of every chat."""
MORE_COLUMNS = {"alpaca": ("input", "history", *SYSTEM_COLUMNS)}
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("function", "function_response", "ipython", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "tool_call"),
}
"""Roles as OpenAI, ShareGPT, LLaMA-Factory and ms-swift name them -> those of chat templates. The content of a
tool_call is the call as JSON, which becomes `tool_calls` of the assistant's turn.
"""
FOLLOWS = {
    "system": ({None, "system", "developer"}, "it must come first"),
    "developer": ({None, "system", "developer"}, "it must come first"),
    "user": ({None, "system", "developer", "assistant", "tool"}, "two messages of one role in a row; join them"),
    "tool": ({"assistant", "tool"}, "it must follow a turn of the assistant"),
}
"""Role -> (the roles that it may follow, None at the beginning; the problem otherwise). Two turns of an assistant in a
row are two answers.
"""
MOST_WEIGHT = 1_000_000  # of a message: beyond it fp32 sums of a step would lose its other tokens
REASONING = ("reasoning_content", "thinking", "reasoning")
TURN_FLAGS = (
    "train",
    "loss",
    "training",
    "label",
)  # false for a turn that is given and not trained (axolotl, ms-swift)
MESSAGE_KEYS = {
    *("role", "content", "from", "value", "name", "weight"),
    *("tool_calls", "tool_call_id", "function_call", *TURN_FLAGS, *REASONING),
}
VERDICTS = ("kto_tag", "label")  # columns of KTO (LLaMA-Factory, TRL): false marks an answer to be avoided
PICTURES = dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), "only text can be trained")
UNREADABLE = PICTURES | {
    "history": "earlier turns belong into the chat",
    "chat_template_kwargs": "every chat is rendered with the same arguments",
    **dict.fromkeys(CHAT_COLUMNS, "a prompt that is text has no place for it"),
}
"""Column -> why a row that has it is refused if its format does not read it."""
WAY_OUT = "take it out of the data, or name it in drop_keys, which ignores it"
NOTHING = (None, "", [], {})

Message = dict[str, Any]
"""role, content (text); where there are any: reasoning_content, name, tool_call_id, tool_calls with arguments that are
objects, and weight where it is not 1 (0 for a turn that is not trained).
"""


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str


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
    """What decides the tokens of a row, beside the tokenizer; most fields are those of `DataFields`."""

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
    drop_keys: tuple[str, ...] = ()
    chat_date: str | None = None
    has_chat_pairs: bool = False  # whether prompts and completions are lists of messages
    keep_all: bool = False
    """One sequence for each row, in order, also for rows to be dropped (evaluation): those have no trained token."""

    @property
    def forms(self) -> set[type]:
        """Text, Pair or Chat, that rows become; several if the tokenizer's chat template decides."""
        if self.format in ("messages", "sharegpt") or self.has_chat_pairs:
            return {Chat}
        if self.format == "alpaca":
            return {Chat, Pair}
        is_pair = self.format == "prompt_completion" or self.prompt_template
        return {Pair} if is_pair else {Text}

    @property
    def is_text(self) -> bool:
        """Documents of any length, all trained, to be laid end to end."""
        return self.forms == {Text}


@dataclass(frozen=True, kw_only=True)
class FormattedSource:
    """A source and how its rows are read."""

    source: Source
    rules: FormatRules
    held_out: HeldOut | None = None  # the share of the rows that is read; None for all of them
    unused: tuple[str, ...] = ()  # columns of the first rows that are not read

    def batches(self) -> Iterator[Batch]:
        """Reads the rows in order."""
        batches = self.source.batches()
        return self.held_out.batches(batches) if self.held_out else batches

    def __str__(self) -> str:
        return f"{self.source.name} ({self.rules.format})"


def _columns_of(name: str, config: DataFields | FormatRules) -> set[str]:
    """Lists the columns that a source of a format has."""
    if name == "template":
        return template_columns(config)
    return {*COLUMNS.get(name, (config.text_column,))}


def format_rules(rows: list[Row], config: DataFields) -> FormatRules:
    """Takes the rules of a source from the options, and its format from `data_format`, else from the columns of its
    first rows; ValueError lists the columns there are.
    """
    columns = list(dict.fromkeys(name for row in rows for name, value in row.values.items() if value is not None))
    name = config.data_format
    if name == "auto" and config.completion_template:  # the user's own, whatever other columns there are
        name = "template"
    if name == "auto":
        needed = {each: _columns_of(each, config) for each in (*COLUMNS, "text")}
        name = next((each for each in needed if needed[each] <= {*columns}), None)
        if name is None:
            formats = "; ".join(", ".join(sorted(each)) for each in needed.values())
            raise ValueError(
                f"columns of no known format ({formats}); there are {', '.join(columns)}. Name the text with"
                " text_column, or write a completion_template"
            )
    elif missing := _columns_of(name, config) - {*columns}:
        needs = "the template names" if config.data_format == "auto" else f"data_format={name} needs"
        raise ValueError(f"{needs} the column {', '.join(sorted(missing))}; there are {', '.join(columns)}")
    options = {option.name for option in fields(FormatRules)} & {option.name for option in fields(DataFields)}
    is_evaluation = isinstance(config, EvalConfig)
    values = {option: getattr(config, option) for option in options}
    read_for_groups = [column for column in columns_of_groups(config) if column in (*UNREADABLE, *VERDICTS)]
    return FormatRules(
        **values | {"drop_keys": (*config.drop_keys, *read_for_groups)},
        format=name,
        has_chat_pairs=name == "prompt_completion" and isinstance(rows[0].values.get("completion"), list),
        keep_all=is_evaluation,
    )


def columns_of_groups(config: DataFields) -> tuple[str, ...]:
    """Lists the columns that are read beside the text: as groups of an evaluation."""
    return tuple(getattr(config, "group_by", None) or ())


def canonical(row: Row, rules: FormatRules, *, has_template: bool) -> Text | Pair | Chat:
    """Brings a row into its one form.

    Args:
        has_template: whether the tokenizer can render chats.

    Raises:
        EmptyAnswer, ValueError: why the row cannot be used; also a column or key that is not read, and changes what the
            row's text or answer means.
    """
    ignored = read_columns(rules, has_template=has_template).union(rules.drop_keys)
    refused = PICTURES if rules.is_text else UNREADABLE
    for name, value in row.values.items():
        if name in ignored or rules.completion_template:  # the user's own names what it means
            continue
        if name in refused and value not in NOTHING:
            raise ValueError(f"column {name!r}: {refused[name]}; {WAY_OUT}")
        if name in VERDICTS and str(value).lower() == "false" and not rules.is_text:
            raise ValueError(f"column {name!r} is false, which marks an answer to be avoided (KTO); {WAY_OUT}")
    sample = _sample(row.values, rules, has_template=has_template)
    try:
        json.dumps(vars(sample), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds an unpaired surrogate, which UTF-8 cannot hold") from None
    return sample


def _sample(row: dict[str, Any], rules: FormatRules, *, has_template: bool) -> Text | Pair | Chat:
    match rules.format:
        case "messages":
            return _chat(row.get("messages"), row, rules)
        case "sharegpt":
            return _chat(row.get("conversations"), row, rules)
        case "alpaca":
            return _from_alpaca(row, rules, has_template=has_template)
        case "prompt_completion":
            return _from_prompt_completion(row, rules)
        case "template":
            return _from_template(row, rules)
    return Text(text=_column(row, rules.text_column, empty=True))


@lru_cache
def read_columns(rules: FormatRules, *, has_template: bool) -> frozenset[str]:
    """Returns the columns that are read of a source's rows, by `canonical` and for groups."""
    is_chat = Chat in rules.forms and (has_template or rules.forms == {Chat})
    beside = CHAT_COLUMNS if is_chat else ()
    return frozenset({*_columns_of(rules.format, rules), *MORE_COLUMNS.get(rules.format, ()), *beside})


def unused_columns(rows: list[Row], rules: FormatRules, *, has_template: bool) -> tuple[str, ...]:
    """Lists columns with a value that are read of none of the rows."""
    read = read_columns(rules, has_template=has_template).union(VERDICTS)
    names = dict.fromkeys(name for row in rows for name, value in row.values.items() if value not in NOTHING)
    return tuple(name for name in names if name not in read)


def text_of(sample: Text | Pair | Chat) -> str:
    """Returns the text of a sample that can be scored: for bytes and words."""
    if isinstance(sample, Text):
        return sample.text
    if isinstance(sample, Pair):
        return sample.completion
    answers = [message for message in sample.messages[sample.answers_from :] if message["role"] == "assistant"]
    return "".join(message["content"] for message in answers)


# Texts and pairs


def _column(row: dict[str, Any], name: str, *, empty: bool = False) -> str:
    """Reads a column that must hold text, and some of it unless it may be `empty`."""
    value = row.get(name)
    if value is None:
        raise ValueError(f"column {name!r} is {'null' if name in row else 'missing'}")
    if not isinstance(value, str):
        raise ValueError(f"column {name!r} must hold text; it holds {type(value).__name__}")
    if not value and not empty:
        raise ValueError(f"column {name!r} is empty")
    return value


def _pair(prompt: str, completion: str) -> Pair:
    if not completion.strip():
        raise EmptyAnswer("the completion is empty")
    return Pair(prompt=prompt, completion=completion)


def _from_template(row: dict[str, Any], rules: FormatRules) -> Text | Pair:
    for name in template_columns(rules):
        if not isinstance(row.get(name), int | float):
            _column(row, name)
    completion = rules.completion_template.format(**row)
    if rules.prompt_template:
        return _pair(rules.prompt_template.format(**row), completion)
    return Text(text=completion)


def template_columns(config: DataFields | FormatRules) -> set[str]:
    """Lists the columns that the user's templates name."""
    names = set()
    for key in ("prompt_template", "completion_template"):
        template = getattr(config, key) or ""
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(
                f"{key}={template!r}: {error}; write columns as {{name}}, and braces themselves as {{{{ and }}}}"
            ) from None
        names |= {name for _, name, _, _ in parts if name is not None}
    return names


def _from_prompt_completion(row: dict[str, Any], rules: FormatRules) -> Pair | Chat:
    if not rules.has_chat_pairs:
        return _pair(_column(row, "prompt", empty=True), _column(row, "completion", empty=True))
    prompt, completion = row.get("prompt"), row.get("completion")
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise ValueError("prompt and completion must be lists of messages, as in the rows before")
    return _chat(prompt + completion, row, rules, answers_from=len(prompt))


def _from_alpaca(row: dict[str, Any], rules: FormatRules, *, has_template: bool) -> Pair | Chat:
    instruction, output = _column(row, "instruction", empty=True), _column(row, "output", empty=True)
    given = _column(row, "input", empty=True) if row.get("input") else ""
    history = row.get("history") or []
    if not instruction:  # the question may stand in input
        instruction, given = given, ""
    if not instruction:
        raise ValueError("column 'instruction' is empty")
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise ValueError("column 'history' must be a list of [instruction, output]")
    if has_template:
        messages = []
        for question, answer in [*history, (f"{instruction}\n{given}" if given else instruction, output)]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return _chat(messages, row, rules)
    if history:
        raise ValueError(
            "column 'history' holds earlier turns, which need a chat template; name one with chat_template"
        )
    # The headings of github.com/tatsu-lab/stanford_alpaca.
    parts = [_system(row), f"### Instruction:\n{instruction}", given and f"### Input:\n{given}", "### Response:\n"]
    return _pair("\n\n".join(filter(None, parts)), output)


# Chats


def _system(row: dict[str, Any]) -> str:
    """Reads the column of the system message; empty if there is none."""
    names = [name for name in SYSTEM_COLUMNS if row.get(name)]
    return _column(row, names[0]) if names else ""


def _chat(messages: Any, row: dict[str, Any], rules: FormatRules, *, answers_from: int = 0) -> Chat:
    """Brings messages of every shape into one, with what stands beside them in the row."""
    messages = _parsed(messages, "messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(given, dict) for given in messages):
        raise ValueError("messages must be a list of {role, content}")
    tools = _tools(row)
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    schemas = {function.get("name"): function.get("parameters") for function in functions}
    chat: list[Message] = []
    before, first_answer, thought = None, 0, ""
    for number, given in enumerate(messages, start=1):
        ignored = {*rules.drop_keys} - MESSAGE_KEYS
        given = {key: value for key, value in given.items() if value is not None and key not in ignored}
        if given.get("channel") == "analysis":
            thought += _text(given.get("content"), f"message {number}")
            continue
        given = _without_channel(given)
        if thought:
            given["reasoning_content"] = thought
        message, is_call = _message(given, number, schemas)
        role = message["role"]
        if thought and role != "assistant":
            raise ValueError(f"message {number - 1} is of the channel analysis, and no answer follows it")
        thought = ""
        allowed, problem = FOLLOWS.get(role, ({before}, ""))
        if before not in allowed:
            follows = f"a message of the {before}" if before else "nothing"
            raise ValueError(f"message {number} ({role}) follows {follows}: {problem}")
        has_answer = message["content"].strip() or "tool_calls" in message or "reasoning_content" in message
        if role == "assistant" and number > answers_from and message.get("weight", 1) and not has_answer:
            raise EmptyAnswer(f"message {number}, an assistant's, is empty")
        is_beside = is_call and before == "assistant" and number - 1 != answers_from
        if is_beside and "reasoning_content" not in message and message.get("weight") == chat[-1].get("weight"):
            chat[-1].setdefault("tool_calls", []).extend(message["tool_calls"])  # of the turn before
        else:
            chat.append(message)
        before = role
        if number == answers_from:
            first_answer = len(chat)
    if thought:
        raise ValueError(f"message {len(messages)} is of the channel analysis, and no answer follows it")
    answers = [message for message in chat[first_answer:] if message["role"] == "assistant"]
    if not any(message.get("weight", 1) for message in answers):
        raise EmptyAnswer("no turn of an assistant, or each has weight 0")
    if system := _system(row):
        if chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": system})
            first_answer += bool(first_answer)
        elif chat[0]["content"] != system:
            raise ValueError("the system message differs from the column of it; keep one")
    told = "\n".join(message["content"] for message in chat if message["role"] != "assistant")
    called = [call["function"]["name"] for message in chat for call in message.get("tool_calls", [])]
    for name in called:
        if name not in schemas and name not in told:
            raise ValueError(
                f"{name} is called, and no tool of that name is given: a model is served with its tools; put them into"
                " the column tools, or describe them in the system message"
            )
    return Chat(messages=chat, tools=tools, answers_from=first_answer)


def _without_channel(given: dict[str, Any]) -> dict[str, Any]:
    """Brings a message of OpenAI's Harmony into the form of others. A channel that is not understood stays, and is
    refused as any unknown key.
    """
    channel, recipient = given.get("channel"), given.get("recipient")
    rest = {key: value for key, value in given.items() if key not in ("channel", "recipient")}
    if channel == "commentary" and str(recipient).startswith("functions."):
        call = {"name": recipient.removeprefix("functions."), "arguments": given.get("content")}
        return rest | {"role": "tool_call", "content": json.dumps(call)}
    return rest if channel == "final" or recipient == "assistant" else given


def _message(given: dict[str, Any], number: int, schemas: dict[str, Any]) -> tuple[Message, bool]:
    """Returns (a message in the one form, whether it was a call with a role of its own)."""
    role = given.get("role", given.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
    place = f"message {number} ({role})"
    if unknown := [repr(key) for key, value in given.items() if key not in MESSAGE_KEYS and value not in NOTHING]:
        raise ValueError(f"{place} has {', '.join(unknown)}, which dsft does not read; {WAY_OUT}")
    content = given.get("content", given.get("value"))
    calls = given.get("tool_calls") or []
    is_call = ROLES[role] == "tool_call"
    if is_call:
        calls = _parsed(_text(content, place), f"{place}: the call")
        content = ""
    elif given.get("function_call"):  # OpenAI's form before tool_calls
        calls = [{"function": given["function_call"]}]
    calls = _parsed(calls, f"{place}: tool_calls")
    calls = calls if isinstance(calls, list) else [calls]
    if content is None and calls:
        content = ""
    message: Message = {"role": "assistant" if is_call else ROLES[role], "content": _text(content, place)}
    for key in REASONING:
        reasoning = _text(given.get(key, ""), f"{place}: {key}")
        if reasoning.strip():
            message.setdefault("reasoning_content", reasoning)
    message |= {key: given[key] for key in ("name", "tool_call_id") if key in given}
    if calls:
        message["tool_calls"] = [_call(call, place, schemas) for call in calls]
    weight = _weight(given, place)
    if weight != 1:
        message["weight"] = weight
    return message, is_call


def _text(content: Any, place: str) -> str:
    """Returns a text, or the parts of one joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} must hold text; it holds {'nothing' if content is None else type(content).__name__}")
    texts = []
    for part in content:
        kind, text = "text", part
        if isinstance(part, dict):
            kind, text = part.get("type", "text"), part.get("text")
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ValueError(f"{place} holds a part of the type {kind!r}; only text can be trained")
        texts.append(text)
    return "".join(texts)


def _weight(given: dict[str, Any], place: str) -> float:
    weight = given.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:  # NaN is not
        raise ValueError(
            f"{place} has the weight {weight!r:.40}; it must be a number from 0 (not trained) to {MOST_WEIGHT:,}"
        )
    for key in TURN_FLAGS:
        flag = given.get(key, True)
        if flag not in (True, False):
            raise ValueError(f"{place}: {key} is {flag!r:.40}; use true, false, or weight")
        weight *= flag
    return weight


# Tools. Arrow gives every object of a column the keys of all rows, with null for those that it had not. What is null in
# truth, the tool's own schema says; JSON that was written as text is as its author wrote it.


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    names = [name for name in TOOL_COLUMNS if row.get(name)]
    if len(names) > 1:
        raise ValueError(f"columns {' and '.join(names)} both hold tools; keep one")
    if not names:
        return []
    given = row[names[0]]
    # Columns of Parquet hold them as JSON, since their schemas differ.
    tools = (
        _parsed(given, f"column {names[0]!r}") if isinstance(given, str) else _without_nulls(_parsed(given, "a tool"))
    )
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"column {names[0]!r} must be a list of objects")
    for number, tool in enumerate(tools):
        # Servers give templates tools. `functions`, LLaMA-Factory's `tools` and OpenAI's Responses are functions alone.
        if "name" in tool and "function" not in tool and tool.get("type", "function") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            tools[number] = {"type": "function", "function": function}
    return tools


def _call(call: Any, place: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Brings a call into OpenAI's form, with arguments as an object."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place}: a tool call must be {{function: {{name, arguments}}}}")
    name = function["name"]
    arguments = function.get("arguments") or function.get("parameters") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}: the arguments of {name}")
    else:
        arguments = _real_values(arguments, schemas.get(name))
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}: the arguments of {name} must be an object; they are {arguments!r:.80}")
    known = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return known | ({"id": call["id"]} if call.get("id") else {})


def _allows_null(schema: Any) -> bool:
    """Returns whether a JSON schema names null as a value."""
    if not isinstance(schema, dict):
        return False
    if schema.get("nullable") is True or "null" in (schema.get("type") or ()):
        return True
    return any(map(_allows_null, [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]))


def _without_nulls(schema: Any) -> Any:
    """Leaves out keys of a schema that are null, but for the default of what may be null."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    real = {}
    for key, value in schema.items():
        if value is not None or (key == "default" and _allows_null(schema)):
            real[key] = _without_nulls(value)
    return real


def _real_values(value: Any, schema: Any) -> Any:
    """Leaves out arguments that are null, and may not be by their schema."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_real_values(item, schema.get("items")) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    real = {}
    for key, item in value.items():
        if item is not None or _allows_null(properties.get(key)):
            real[key] = _real_values(item, properties.get(key))
    return real


def _parsed(value: Any, place: str) -> Any:
    """Reads JSON that is text, also that of the items of a list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{place} must be JSON ({error})") from None
    if isinstance(value, list):
        value = [_parsed(item, place) if isinstance(item, str) else item for item in value]
    return value
