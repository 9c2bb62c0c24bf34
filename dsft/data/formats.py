"""Finds the format of rows, from their columns or the options, and converts each row to one form for tokenising.

The forms are text, prompt with completion, and chat. Chats are never guessed: a message's key, or a column that changes
the meaning of a row, is read or refused by name (`drop_keys` ignores it).
"""

import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any

import yaml

from dsft.config.options import DataFields
from dsft.data.sources import HeldOut, Row, Source, Values

# Format -> the columns that identify it, tried in this order; then the text column, see `_needed_columns`.
COLUMNS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
# Format -> part of a chat -> its columns, in the form of the option `columns` for other tables.
CHAT_PARTS = {
    "messages": {"messages": ["messages"]},
    "sharegpt": {"messages": ["conversations"]},
    "alpaca": {"user": ["instruction", "input"], "assistant": ["output"], "history": ["history"]},
}
SOURCE_OPTIONS = ("data", "data_name", "data_split", "data_format", "data_cache", "map_row", "chat_template")
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions", "tool_defs", "available_tools")
CHAT_COLUMNS = (*SYSTEM_COLUMNS, *TOOL_COLUMNS)  # read beside the turns of every chat
# Common column names, from which `suggest_columns` suggests `columns`.
TURN_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns")
USER_COLUMNS = ("question", "query", "instruction", "prompt", "problem", "input", "user")
MORE_OF_USER = ("input", "context")
ASSISTANT_COLUMNS = ("answer", "response", "completion", "output", "solution", "assistant")
# Roles of OpenAI, ShareGPT, LLaMA-Factory and ms-swift -> roles of chat templates. The content of a tool_call is the
# call as JSON, which becomes `tool_calls` of the assistant's turn.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("function", "function_response", "ipython", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "tool_call"),
}
# Role -> (the roles that it may follow, None at the beginning; the problem otherwise). Two consecutive turns of an
# assistant are two answers.
FOLLOWS = {
    "system": ({None, "system", "developer"}, "it must come first"),
    "developer": ({None, "system", "developer"}, "it must come first"),
    "user": ({None, "system", "developer", "assistant", "tool"}, "two messages of one role in a row; join them"),
    "tool": ({"assistant", "tool"}, "it must follow a turn of the assistant"),
}
MOST_WEIGHT = 1_000_000  # of a message: beyond it fp32 sums of a step would lose its other tokens
REASONING = ("reasoning_content", "thinking", "reasoning")
TURN_FLAGS = ("train", "loss", "training", "label")  # false: the turn is context only (axolotl, ms-swift)
MESSAGE_KEYS = {
    *("role", "content", "from", "value", "name", "weight"),
    *("tool_calls", "tool_call_id", "function_call", *TURN_FLAGS, *REASONING),
}
VERDICTS = ("kto_tag", "label")  # columns of KTO (LLaMA-Factory, TRL): false marks an answer to be avoided
PICTURES = dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), "only text can be trained")
# Column -> why a row with it is refused if its format does not read it.
UNREADABLE = PICTURES | {
    "history": "earlier turns belong in the chat",
    "chat_template_kwargs": "every chat is rendered with the same arguments",
    **dict.fromkeys(CHAT_COLUMNS, "a text prompt has no place for it"),
}
WAY_OUT = "take it out of the data, or name it in drop_keys, which ignores it"
NOTHING = (None, "", [], {})
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["']role["']""")

# role, content (text); optionally reasoning_content, name, tool_call_id, tool_calls with arguments that are objects,
# and weight if it is not 1 (0 for a turn that is not trained).
Message = dict[str, Any]
Schemas = dict[str, Any]  # name of a tool -> JSON schema of its arguments


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


class EmptyAnswer(ValueError):
    """A row with an empty answer: there is nothing to learn."""


@dataclass(frozen=True, kw_only=True)
class FormatRules(DataFields):
    """Everything beside the tokenizer that decides a row's tokens: the options, without SOURCE_OPTIONS."""

    format: str
    has_chat_pairs: bool  # whether prompts and completions are lists of messages

    @property
    def form(self) -> type:
        """The class of the converted rows: Text, Pair or Chat."""
        if self.columns or self.has_chat_pairs or self.as_chat:
            return Chat
        is_pair = self.format == "prompt_completion" or self.prompt_template
        return Pair if is_pair else Text

    @property
    def is_text(self) -> bool:
        """Whether rows are documents of any length, trained whole, to be concatenated."""
        return self.form is Text

    @cached_property
    def read(self) -> set[str]:
        """The columns that are read."""
        read = _needed_columns(self.format, self).union(*self.columns.values())
        return read.union(CHAT_COLUMNS) if self.form is Chat else read


@dataclass(frozen=True, kw_only=True)
class FormattedSource:
    source: Source
    rules: FormatRules
    held_out: HeldOut | None = None  # the share of the rows that is read; None for all of them
    unused: tuple[str, ...] = ()  # columns of the first rows that are not read

    def rows(self) -> Iterator[Row]:
        rows = self.source.rows()
        return self.held_out.rows(rows) if self.held_out else rows

    def __str__(self) -> str:
        return f"{self.source.name} ({self.rules.format})"


def _needed_columns(name: str, config: DataFields) -> set[str]:
    if name == "template":
        return template_columns(config)
    return {*COLUMNS.get(name, (config.text_column,))}


def format_rules(rows: list[Row], config: DataFields) -> FormatRules:
    """Returns the rules of a source, from the options; its format is `data_format`, or follows from the columns of its
    first rows. ValueError lists the present columns, and suggests the option that reads them.
    """
    present = []
    for row in rows:
        present += [name for name, value in row.values.items() if value is not None and name not in present]
    name = config.data_format
    if name == "auto" and config.completion_template:  # the user's own, whatever the columns are
        name = "template"
    columns = {}
    for part, names in config.columns.items():
        columns[part] = [names] if isinstance(names, str) else [*names]
    if columns:
        name = "columns"
        has_turns = "messages" in columns or {"user", "assistant"} <= columns.keys()
        if not has_turns or columns.keys() - {"messages", "system", "history", "user", "assistant"}:
            raise ValueError(
                f"columns={config.columns}: name user and assistant, or messages; also system, history; for text write"
                " text_column: COLUMN"
            )
        wrong = []
        for part, names in columns.items():
            lists_several = part == "user" and len(names) > 1
            if len(names) != 1 and not lists_several:
                wrong.append(part)
        if wrong:
            raise ValueError(f"columns={config.columns}: {' and '.join(wrong)} must name one column")
    if name == "auto":
        needed_by = {each: _needed_columns(each, config) for each in (*COLUMNS, "text")}
        matching = [each for each in needed_by if needed_by[each] <= {*present}]
        if not matching:
            formats = "; ".join(", ".join(sorted(needed)) for needed in needed_by.values())
            example = suggest_columns(present) or {"user": "COLUMN", "assistant": "COLUMN"}
            raise ValueError(
                f"columns of no known format ({formats}); the columns are {', '.join(present)}. Add to the config,"
                f" which dsft init writes, for chats: {columns_line(example)} or for text: text_column: COLUMN"
            )
        name = matching[0]
    needed = {*chain(*columns.values())} if columns else _needed_columns(name, config)
    if missing := needed.difference(*(row.values for row in rows)):
        option = {"template": "the template names", "columns": "columns names"}.get(name, f"data_format={name} needs")
        raise ValueError(f"{option} the column {', '.join(sorted(missing))}; the columns are {', '.join(present)}")
    names = {option.name for option in fields(DataFields)} - {*SOURCE_OPTIONS}
    values = {option: getattr(config, option) for option in names}
    values["columns"] = columns or CHAT_PARTS.get(name, {})
    values["drop_keys"] = [*config.drop_keys, *getattr(config, "group_by", ())]
    is_pair = name == "prompt_completion"
    has_chat_pairs = is_pair and isinstance(rows[0].values.get("completion"), list)
    rules = FormatRules(format=name, has_chat_pairs=has_chat_pairs, **values)
    if rules.as_chat and not (is_pair or rules.prompt_template or rules.columns):
        raise ValueError("as_chat makes chats of prompts with completions, and the rows are text; use columns")
    return rules


def suggest_columns(present: Iterable[str]) -> dict[str, Any]:
    """Suggests `columns` for a table with common column names, in upper or lower case; empty for other names."""
    by_name = {name.lower(): name for name in present}

    def find(usual):
        return [by_name[name] for name in usual if name in by_name]

    turns = find(TURN_COLUMNS)
    questions = find(USER_COLUMNS)
    answers = find(ASSISTANT_COLUMNS)
    if turns:
        parts = {"messages": turns[0]}
    elif questions and answers:
        more = [name for name in find(MORE_OF_USER) if name != questions[0]]
        parts = {"user": questions[0], "assistant": answers[0]}
        if more:
            parts["user"] = [questions[0], *more]
        if history := find(["history"]):
            parts["history"] = history[0]
    else:
        return {}
    if system := find(SYSTEM_COLUMNS):
        parts["system"] = system[0]
    return parts


def columns_line(columns: Mapping[str, Any]) -> str:
    text = yaml.safe_dump({**columns}, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return f"columns: {text.strip()}"


def canonical(row: Row, rules: FormatRules) -> Text | Pair | Chat:
    """Converts a row to its form. Raises EmptyAnswer or ValueError if it cannot be used, or has a column or key that is
    not read although it changes the meaning of the row.
    """
    refused = PICTURES if rules.is_text else UNREADABLE
    for name, value in row.values.items():
        if name in rules.read or name in rules.drop_keys or rules.completion_template:  # its author decides what counts
            continue
        if name in refused and value not in NOTHING:
            raise ValueError(f"column {name!r}: {refused[name]}; {WAY_OUT}")
        if name in VERDICTS and str(value).lower() == "false" and not rules.is_text:
            raise ValueError(f"column {name!r} is false, which marks an answer to be avoided (KTO); {WAY_OUT}")
    sample = _sample(row.values, rules)
    try:
        json.dumps(vars(sample), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError("it contains an unpaired surrogate, which UTF-8 cannot encode") from None
    return sample


def _sample(row: Values, rules: FormatRules) -> Text | Pair | Chat:
    if rules.format == "text":
        return Text(text=_column(row, rules.text_column, empty=True))
    if "messages" in rules.columns:
        return _chat(row.get(rules.columns["messages"][0]), row, rules)
    if rules.columns:  # a question and an answer, each a text or a number
        names = rules.columns["user"]
        questions = [_column(row, name, number=True) for name in names if row.get(name) not in NOTHING]
        if not questions:
            raise ValueError(f"column {names[0]!r} is empty")
        answer = _column(row, rules.columns["assistant"][0], empty=True, number=True)
        (earlier,) = rules.columns.get("history", [None])
        history = row.get(earlier) or []
        messages = []
        for turn in history if isinstance(history, list) else [None]:
            if not isinstance(turn, list) or len(turn) != 2:
                raise ValueError(f"column {earlier!r} must be a list of [question, answer]")
            messages += _turns(*turn)
        return _chat(messages + _turns("\n".join(questions), answer), row, rules)
    if rules.has_chat_pairs:
        prompt = row.get("prompt")
        completion = row.get("completion")
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            raise ValueError("prompt and completion must be lists of messages, as in the rows before")
        num_given = 0 if rules.train_on == "all" else len(prompt)
        return _chat(prompt + completion, row, rules, num_given=num_given)
    if rules.format == "prompt_completion":
        prompt = _column(row, "prompt", empty=True)
        completion = _column(row, "completion", empty=True)
        if MESSAGES_AS_TEXT.match(completion):
            raise ValueError(
                "column 'completion' is the text of a list of messages; write prompt and completion as lists"
            )
    else:
        for name in template_columns(rules):
            _column(row, name, number=True)
        completion = rules.completion_template.format(**row)
        if not rules.prompt_template:
            return Text(text=completion)
        prompt = rules.prompt_template.format(**row)
    if rules.as_chat:
        return _chat(_turns(prompt, completion), row, rules)
    if not completion.strip():
        raise EmptyAnswer("the completion is empty")
    return Pair(prompt=prompt, completion=completion)


def unused_columns(rows: list[Row], rules: FormatRules) -> tuple[str, ...]:
    names = {}
    for row in rows:
        names |= dict.fromkeys(name for name, value in row.values.items() if value not in NOTHING)
    return tuple(name for name in names if name not in rules.read and name not in VERDICTS)


# Texts and tables


def _column(row: Values, name: str, *, empty: bool = False, number: bool = False) -> str:
    """Reads a column that must contain text, which may be `empty` or a `number` only with these."""
    value = row.get(name)
    if number and isinstance(value, int | float):
        return str(value)
    if value is None:
        raise ValueError(f"column {name!r} is {'null' if name in row else 'missing'}")
    if not isinstance(value, str):
        raise ValueError(f"column {name!r} must contain text; it contains {type(value).__name__}")
    if not value and not empty:
        raise ValueError(f"column {name!r} is empty")
    return value


def _turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def template_columns(config: DataFields) -> set[str]:
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


# Chats


def _chat(messages: Any, row: Values, rules: FormatRules, *, num_given: int = 0) -> Chat:
    """Returns a chat from messages of any supported shape; the first `num_given` are not trained."""
    messages = _parsed(messages, "messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(given, dict) for given in messages):
        raise ValueError("messages must be a list of {role, content}")
    tools = _tools(row)
    schemas = {}
    for tool in tools:
        if isinstance(tool.get("function"), dict):
            schemas[tool["function"].get("name")] = tool["function"].get("parameters")
    ignored = {*rules.drop_keys} - MESSAGE_KEYS
    chat = []
    analysis = ""
    for number, given in enumerate(messages, start=1):
        given = {key: value for key, value in given.items() if value is not None and key not in ignored}
        used = {key for key, value in given.items() if value not in NOTHING}
        if given.get("channel") == "analysis" and used <= {"role", "content", "channel"}:
            analysis += _text(given.get("content"), f"message {number}")
            continue
        message, is_call = _message(_without_channel(given), number, schemas)
        is_answer = message["role"] == "assistant"
        if analysis.strip():
            if not is_answer or number - 1 == num_given or "reasoning_content" in message:
                break
            message["reasoning_content"] = analysis
        analysis = ""
        if is_answer and number <= num_given:
            message["weight"] = 0
        before = chat[-1] if chat else {"role": None}
        allowed, problem = FOLLOWS.get(message["role"], ((before["role"],), ""))
        if before["role"] not in allowed:
            follows = f"a message of the {before['role']}" if chat else "nothing"
            raise ValueError(f"message {number} ({message['role']}) follows {follows}: {problem}")
        has_more = message.keys() & {"tool_calls", "reasoning_content"}
        is_empty = not message["content"].strip() and not has_more
        if is_answer and is_empty and message.get("weight", 1):
            raise EmptyAnswer(f"message {number}, an assistant's, is empty")
        same_turn = before["role"] == "assistant" and before.get("weight") == message.get("weight")
        if is_call and same_turn and "reasoning_content" not in message:
            before.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            chat.append(message)
    if analysis:
        raise ValueError(
            "no answer follows the message of the channel analysis, which is the reasoning of an answer, or the answer"
            " has other reasoning too"
        )
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in chat):
        raise EmptyAnswer("no turn of an assistant, or each has weight 0")
    system = ""
    for name in rules.columns.get("system", SYSTEM_COLUMNS):
        if row.get(name):
            system = _column(row, name)
            break
    if system and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": system})
    elif system and chat[0]["content"] != system:
        raise ValueError("the system message differs from the column of it; keep one")
    _require_tools(chat, schemas)
    return Chat(messages=chat, tools=tools)


def _require_tools(chat: list[Message], schemas: Schemas) -> None:
    """Raises ValueError if a called tool is neither among the chat's tools nor named in a system message."""
    texts = "\n".join(message["content"] for message in chat if message["role"] in ("system", "developer"))
    for message in chat:
        for call in message.get("tool_calls", []):
            name = call["function"]["name"]
            if name not in schemas and name not in texts:
                raise ValueError(
                    f"{name} is called, and no tool of that name is given: a model is served with its tools; put them"
                    " into the column tools, or describe them in the system message"
                )


def _without_channel(given: Message) -> Message:
    """Converts a message of OpenAI's Harmony; an unknown channel is kept, and refused like any unknown key."""
    channel = given.get("channel")
    recipient = given.get("recipient")
    rest = {key: value for key, value in given.items() if key not in ("channel", "recipient")}
    if channel == "commentary" and str(recipient).startswith("functions."):
        call = {"name": recipient.removeprefix("functions."), "arguments": given.get("content")}
        return rest | {"role": "tool_call", "content": json.dumps(call)}
    is_result = recipient == "assistant" and given.get("role") != "assistant"
    return rest if is_result or (channel == "final" and not recipient) else given


def _message(given: Message, number: int, schemas: Schemas) -> tuple[Message, bool]:
    """Returns (the converted message, whether its role was that of a call)."""
    role = given.get("role", given.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; the roles are {', '.join(ROLES)}")
    place = f"message {number} ({role})"
    unknown = [key for key in given if key not in MESSAGE_KEYS and given[key] not in NOTHING]
    if unknown:
        raise ValueError(f"{place} has {', '.join(map(repr, unknown))}, which dsft does not read; {WAY_OUT}")
    content = given.get("content", given.get("value"))
    calls = given.get("tool_calls") or []
    is_call = ROLES[role] == "tool_call"
    if is_call:
        calls = _text(content, place)
        content = ""
    elif given.get("function_call"):  # OpenAI's older form of tool_calls
        calls = [{"function": given["function_call"]}]
    calls = _parsed(calls, f"{place}: the call")
    calls = calls if isinstance(calls, list) else [calls]
    if content is None and calls:
        content = ""
    message = {"role": "assistant" if is_call else ROLES[role], "content": _text(content, place)}
    for key in REASONING:
        reasoning = _text(given.get(key, ""), f"{place}: {key}")
        if reasoning.strip():
            message.setdefault("reasoning_content", reasoning)
    message |= {key: given[key] for key in ("name", "tool_call_id") if key in given}
    if calls:
        message["tool_calls"] = [_call(call, place, schemas) for call in calls]
    weight = given.get("weight", 1)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= MOST_WEIGHT:  # or NaN
        raise ValueError(
            f"{place} has the weight {weight!r:.40}; it must be a number from 0 (not trained) to {MOST_WEIGHT:,}"
        )
    for key in TURN_FLAGS:
        flag = given.get(key, True)
        if flag not in (True, False):
            raise ValueError(f"{place}: {key} is {flag!r:.40}; use true, false, or weight")
        weight *= flag
    if weight != 1:
        message["weight"] = weight
    return message, is_call


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"{place} must contain text; it contains {'nothing' if content is None else type(content).__name__}"
        )
    texts = []
    for part in content:
        kind = "text"
        text = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            text = part.get("text")
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ValueError(f"{place} contains a part of type {kind!r}; only text can be trained")
        texts.append(text)
    return "".join(texts)


# Tools. Arrow gives every object of a column the keys of all rows, with null for missing ones. The tool's schema says
# which values may really be null; JSON that was stored as text is unchanged.


def _tools(row: Values) -> list[Any]:
    names = [name for name in TOOL_COLUMNS if row.get(name)]
    if len(names) > 1:
        raise ValueError(f"columns {' and '.join(names)} both contain tools; keep one")
    if not names:
        return []
    given = row[names[0]]
    # Parquet stores tools as JSON, since their schemas differ.
    tools = (
        _parsed(given, f"column {names[0]!r}") if isinstance(given, str) else _without_nulls(_parsed(given, "a tool"))
    )
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"column {names[0]!r} must be a list of objects")
    for number, tool in enumerate(tools):
        # Servers pass tools to templates. `functions`, LLaMA-Factory's `tools` and OpenAI's Responses are bare
        # functions.
        if "name" in tool and "function" not in tool and tool.get("type", "function") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            tools[number] = {"type": "function", "function": function}
    return tools


def _call(call: Any, place: str, schemas: Schemas) -> Message:
    """Converts a call to OpenAI's form, with arguments as an object."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place}: a tool call must be {{function: {{name, arguments}}}}")
    name = function["name"]
    arguments = function.get("arguments") or function.get("parameters") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}: the arguments of {name}")
    else:
        schema = schemas.get(name)
        arguments = _real_values(arguments, _variants([schema], schema), schema)
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}: the arguments of {name} must be an object; they are {arguments!r:.80}")
    openai_call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id"):
        openai_call["id"] = call["id"]
    return openai_call


def _variants(schemas: list[Any], root: Any) -> list[dict[str, Any]]:
    """Lists JSON schemas with the alternatives of each, and those that local `$ref`s name in the schema `root`."""
    variants = []
    for schema in schemas:  # which grows
        if not isinstance(schema, dict) or schema in variants:
            continue
        variants.append(schema)
        target = root
        for key in str(schema.get("$ref")).removeprefix("#/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        schemas.append(target)
        for key in ("anyOf", "oneOf", "allOf"):
            schemas += schema.get(key) or []
    return variants


def _allows_null(variants: list[dict[str, Any]]) -> bool:
    return any(
        variant.get("nullable") or "null" in (variant.get("type") or ()) or None in (variant.get("enum") or ())
        for variant in variants
    )


def _without_nulls(schema: Any, root: Any = None) -> Any:
    """Removes keys of a schema that are null, except the default of a nullable value."""
    if isinstance(schema, list):
        return [_without_nulls(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    root = root or schema.get("parameters")
    real = {}
    for key, value in schema.items():
        if value is not None or (key == "default" and _allows_null(_variants([schema], root))):
            real[key] = _without_nulls(value, root)
    return real


def _real_values(value: Any, variants: list[dict[str, Any]], root: Any) -> Any:
    """Removes arguments that are null although no variant of their schema allows it."""
    if isinstance(value, list):
        of_item = _variants([variant.get("items") for variant in variants], root)
        return [_real_values(item, of_item, root) for item in value]
    if not isinstance(value, dict):
        return value
    real = {}
    for key, item in value.items():
        of_item = _variants(
            [(variant.get("properties") or {}).get(key, variant.get("additionalProperties")) for variant in variants],
            root,
        )
        if item is not None or _allows_null(of_item):
            real[key] = _real_values(item, of_item, root)
    return real


def _parsed(value: Any, place: str) -> Any:
    """Parses JSON that is stored as text, also in the items of a list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{place} must be JSON ({error})") from None
    if isinstance(value, list):
        value = [_parsed(item, place) if isinstance(item, str) else item for item in value]
    return value
