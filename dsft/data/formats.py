"""Finds the format of rows, by their columns or by `data_format`, and brings each row into one form for tokenising.

The forms are text, prompt with completion, and chat. A format is one value of FORMATS, at the end of this file.
"""

import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import chain
from typing import Any

from dsft.config.options import DataFields, EvalConfig
from dsft.data.sources import Batch, HeldOut, Row, Source

SHAREGPT_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")}
"""Speakers in ShareGPT's form, as vicuna's data, OpenChat, Hermes and LLaMA-Factory name them, beside ROLES."""
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("function", "function_response", "ipython", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "tool_call"),
}
"""Roles as OpenAI, LLaMA-Factory and ms-swift name them -> those of chat templates; the content of a tool_call is the
call as JSON, which becomes `tool_calls` of the assistant's turn.
"""
MOST_WEIGHT = 1_000_000  # of a message: beyond it fp32 sums of a step would lose its other tokens
# Keys of a message: its reasoning, as transformers reads it; those that are false where it is given and not trained
# (axolotl, ms-swift); and all that are read.
REASONING = ("reasoning_content", "thinking", "reasoning")
TURN_FLAGS = ("train", "loss", "training", "label")
MESSAGE_KEYS = {
    *("role", "content", "from", "value", "name", "weight"),
    *("tool_calls", "tool_call_id", "function_call", *TURN_FLAGS, *REASONING),
}
SYSTEM_COLUMNS = ("system", "system_prompt")
CHAT_COLUMNS = (*SYSTEM_COLUMNS, "tools", "functions")
"""Read beside the turns wherever a row becomes a chat. `functions` is OpenAI's form before tools."""

# What a row or message holds beside what its format reads, and would be learnt wrongly without.

PICTURES = dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), "only text can be trained")
PARTS = PICTURES | {
    "history": "earlier turns belong into the chat",
    "chat_template_kwargs": "every chat is rendered with the same arguments",
    **dict.fromkeys(CHAT_COLUMNS, "a prompt that is text has no place for it"),
}
"""Column -> why it cannot be read. `drop_unrendered` trains the row without it."""
PARTS_OF_MESSAGES = PICTURES | {
    "loss_scale": "write it as weight",
    **dict.fromkeys(
        ("train_detail", "training_detail", "reasoning_train_detail", "reasoning_training_detail"),
        "turns are trained whole; write train or weight for the turn",
    ),
}
"""Likewise of a message: keys of LLaMA-Factory, ms-swift and axolotl."""
PREFERENCES = ("chosen", "rejected")  # columns of DPO and of reward models (TRL, LLaMA-Factory)
VERDICTS = ("kto_tag", "label")  # columns of KTO (LLaMA-Factory, TRL): false marks an answer to be avoided
WITHOUT = "take it out of the data, or set drop_unrendered: true, which goes on without it"

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
    source_column: str | None = None  # of a training
    has_chat_pairs: bool = False  # whether prompts and completions are lists of messages
    grouped_by: tuple[str, ...] = ()  # columns that would be refused and that are read for groups or sources
    keep_all: bool = False
    """One sequence for each row, in order, also for rows to be dropped (evaluation): those have no trained token."""

    @property
    def forms(self) -> set[type]:
        """Text, Pair or Chat, that rows become; several where the tokenizer's chat template decides."""
        return FORMATS[self.format].forms(self)

    @property
    def is_text(self) -> bool:
        """Documents of any length, all trained, to be laid end to end."""
        return self.forms == {Text}


@dataclass(frozen=True, kw_only=True)
class Format:
    """A form of rows: what shows it, which columns it reads, and what becomes of a row."""

    columns: Callable[[DataFields | FormatRules], set[str]]
    """Those that show it: a source of this format has them all. Empty where no columns do."""
    sample: Callable[[Row, FormatRules, bool], Text | Pair | Chat]
    """(row, rules, whether the tokenizer can render chats) -> the row in its one form, or errors as of `canonical`."""
    forms: Callable[[FormatRules], set[type]]  # see FormatRules
    more_columns: tuple[str, ...] = ()  # read where they are there, beside CHAT_COLUMNS where the row becomes a chat


@dataclass(frozen=True, kw_only=True)
class FormattedSource:
    """A source and how its rows are read."""

    source: Source
    rules: FormatRules
    held_out: HeldOut | None = None  # the share of the rows that is read; None for all of them
    unused: tuple[str, ...] = ()  # columns of the first rows, and keys of their messages, that are not read

    def batches(self) -> Iterator[Batch]:
        """Reads the rows in order."""
        batches = self.source.batches()
        return self.held_out.batches(batches) if self.held_out else batches

    def __str__(self) -> str:
        return f"{self.source.name} ({self.rules.format})"


def format_rules(rows: list[Row], config: DataFields) -> FormatRules:
    """Takes the rules of a source from the options, and its format from `data_format`, else from the columns of its
    first rows; ValueError lists the columns there are.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    name = config.data_format
    if name == "auto" and config.completion_template:  # the user's own, whatever other columns there are
        name = "template"
    if name == "auto":
        shown_by = {known: needed for known, each in FORMATS.items() if (needed := each.columns(config))}
        name = next((known for known, needed in shown_by.items() if needed <= {*columns}), None)
        if name is None and (preferred := [column for column in columns if column in PREFERENCES]):
            raise ValueError(
                f"{', '.join(preferred)} are columns of preference training, which dsft does not do; to learn the"
                " preferred answers alone, name their column messages (chats), or completion beside prompt (texts)"
            )
        if name is None:
            known = "; ".join(", ".join(sorted(needed)) for needed in shown_by.values())
            raise ValueError(
                f"columns of no known format ({known}); there are {', '.join(columns)}. Name the text with text_column,"
                " or write a completion_template"
            )
    elif missing := FORMATS[name].columns(config) - {*columns}:
        needs = "the template names" if config.data_format == "auto" else f"data_format={name} needs"
        raise ValueError(f"{needs} the column {', '.join(sorted(missing))}; there are {', '.join(columns)}")
    shared = {option.name for option in fields(FormatRules)} & {option.name for option in fields(DataFields)}
    is_evaluation = isinstance(config, EvalConfig)
    shared -= {"source_column"} if is_evaluation else set()  # it reads that by itself
    return FormatRules(
        format=name,
        has_chat_pairs=isinstance(rows[0].values.get("completion"), list),
        keep_all=is_evaluation,
        grouped_by=tuple(name for name in columns_of_groups(config) if name in (*PARTS, *PREFERENCES, *VERDICTS)),
        **{option: getattr(config, option) for option in shared},
    )


def columns_of_groups(config: DataFields) -> tuple[str, ...]:
    """Lists the columns that are read beside the text: as groups of an evaluation, or as sources."""
    return tuple(filter(None, (*getattr(config, "group_by", ()), config.source_column)))


def canonical(row: Row, rules: FormatRules, *, has_template: bool) -> Text | Pair | Chat:
    """Brings a row into its one form.

    Args:
        has_template: whether the tokenizer can render chats.

    Raises:
        EmptyAnswer, ValueError: why the row cannot be used; also a column or key that is not read, and changes what the
            row's text or answer means.
    """
    values, read = row.values, read_columns(rules, has_template=has_template)
    parts = {} if rules.drop_unrendered else PICTURES if rules.is_text else PARTS
    for name, value in values.items() if not rules.completion_template else ():  # the user's own name what they mean
        if name in read:
            for number, turn in enumerate(value if isinstance(value, list) else (), start=1):
                for key in turn if isinstance(turn, dict) and not rules.drop_unrendered else ():
                    if turn[key] and key in PARTS_OF_MESSAGES:
                        raise ValueError(
                            f"message {number} of {name!r} has {key!r}: {PARTS_OF_MESSAGES[key]}; {WITHOUT}"
                        )
        elif value and name in parts:
            raise ValueError(f"column {name!r}: {parts[name]}; {WITHOUT}")
        elif name in VERDICTS and _verdict(name, value) is False and not rules.is_text:
            raise ValueError(
                f"column {name!r} is false, which marks an answer to be avoided (KTO); take such rows out of the data,"
                " or the column where it means something else"
            )
        # The chosen answer may be the one that is read, as in UltraFeedback's rows for supervised training.
        elif name == "chosen" and value and not rules.is_text and value not in [values.get(each) for each in read]:
            raise ValueError(
                "columns 'chosen' and 'rejected' are of preference training, which dsft does not do, and no column that"
                " is read holds the chosen answer; take them out of the data"
            )
    sample = FORMATS[rules.format].sample(row, rules, has_template)
    try:
        for text in _texts_in(vars(sample)):
            text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"unpaired surrogate at character {error.start + 1}, which UTF-8 cannot hold") from None
    return sample


def _texts_in(value: Any) -> list[str]:
    """Lists all texts within lists and objects, keys too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [value] if isinstance(value, str) else [*chain(*map(_texts_in, value))] if isinstance(value, list) else []


@lru_cache
def read_columns(rules: FormatRules, *, has_template: bool) -> frozenset[str]:
    """Returns the columns that are read of a source's rows, by `canonical` and for groups."""
    known = FORMATS[rules.format]
    is_chat = Chat in rules.forms and (has_template or rules.forms == {Chat})
    beside = CHAT_COLUMNS if is_chat else ()
    return frozenset({*known.columns(rules), *known.more_columns, *beside, *rules.grouped_by})


def _verdict(name: str, value: Any) -> bool | None:
    """What a column of KTO says of its row; None where it is another's: a label may be a class."""
    if name == "kto_tag" and isinstance(value, str):  # CSV has no other values
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def unused_columns(rows: list[Row], rules: FormatRules, *, has_template: bool) -> tuple[str, ...]:
    """Lists columns with a value, and keys of messages, that are read of none of the rows."""
    read = read_columns(rules, has_template=has_template)
    verdicts = () if rules.is_text or rules.completion_template else VERDICTS
    unused = {}
    for row in rows:
        for name, value in row.values.items():
            if name not in read:
                if value not in (None, "", [], {}) and not (name in verdicts and _verdict(name, value) is not None):
                    unused[name] = None
            elif isinstance(value, list) and name in FORMATS[rules.format].columns(rules):
                keys = (key for turn in value if isinstance(turn, dict) for key in turn if turn[key] is not None)
                unused |= {f"{name}[].{key}": None for key in keys if key not in MESSAGE_KEYS}
    return tuple(unused)


def text_of(sample: Text | Pair | Chat) -> str:
    """Returns the text of a sample that can be scored: for bytes and words."""
    if isinstance(sample, Text):
        return sample.text
    if isinstance(sample, Pair):
        return sample.completion
    return "".join(
        message["content"] or "" for message in sample.messages[sample.answers_from :] if message["role"] == "assistant"
    )


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


def _from_template(row: Row, rules: FormatRules, has_template: bool) -> Text | Pair:
    values = {
        name: row.values[name] if isinstance(row.values.get(name), (str, int, float)) else _column(row.values, name)
        for name in template_columns(rules)
    }
    completion = rules.completion_template.format(**values)
    if rules.prompt_template:
        return _pair(rules.prompt_template.format(**values), completion)
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
        for _, name, form, conversion in parts:
            if name is not None and (not name.isidentifier() or form or conversion):
                raise ValueError(f"{key}={template!r}: {{{name}}} must be the plain name of a column")
            names |= {name} - {None}
    return names


def _from_prompt_completion(row: Row, rules: FormatRules, has_template: bool) -> Pair | Chat:
    if not rules.has_chat_pairs:
        return _pair(*(_column(row.values, name, empty=True) for name in ("prompt", "completion")))
    prompt, completion = row.values.get("prompt"), row.values.get("completion")
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise ValueError("prompt and completion must be lists of messages, as in the rows before")
    return _chat(prompt + completion, row.values, answers_from=len(prompt))


def _from_alpaca(row: Row, rules: FormatRules, has_template: bool) -> Pair | Chat:
    values = row.values
    instruction, output = _column(values, "instruction"), _column(values, "output", empty=True)
    given, history, system = values.get("input") or "", values.get("history") or [], _system(values)
    if not isinstance(given, str):
        raise ValueError(f"column 'input' must hold text; it holds {type(given).__name__}")
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise ValueError("column 'history' must be a list of [instruction, output]")
    if has_template:
        turns = [*history, (f"{instruction}\n{given}" if given else instruction, output)]
        pairs = [zip(("user", "assistant"), turn, strict=True) for turn in turns]
        return _chat([{"role": role, "content": text} for pair in pairs for role, text in pair], values)
    if history:
        raise ValueError(
            "column 'history' holds earlier turns, which need a chat template; name one with chat_template"
        )
    # The headings of github.com/tatsu-lab/stanford_alpaca.
    parts = [system, f"### Instruction:\n{instruction}", given and f"### Input:\n{given}", "### Response:\n"]
    return _pair("\n\n".join(filter(None, parts)), output)


# Chats


def _from_sharegpt(row: Row, rules: FormatRules, has_template: bool) -> Chat:
    turns = row.values.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations must be a list of {from, value}")
    if turns and all("role" in turn for turn in turns):  # messages under ShareGPT's name of the column
        return _chat(turns, row.values)
    known = ROLES | SHAREGPT_ROLES
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn.get("from"), str) or turn["from"] not in known:
            raise ValueError(
                f"turn {number} is from {turn.get('from')!r}; known are {', '.join(SHAREGPT_ROLES | ROLES)}"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append(rest | {"role": known[turn["from"]], "content": turn.get("value")})
    return _chat(messages, row.values)


FOLLOWS = {
    "system": ({None, "system", "developer"}, "it must come first"),
    "developer": ({None, "system", "developer"}, "it must come first"),
    "user": ({None, "system", "developer", "assistant", "tool"}, "two messages of one role in a row; join them"),
    "tool": ({"assistant", "tool"}, "it must follow a turn of the assistant"),
}
"""Role -> (the roles that it may follow, None at the beginning; the problem after another: templates raise, or render
what no server renders). Two turns of an assistant in a row are two answers.
"""


def _system(row: dict[str, Any]) -> str:
    """Reads the column of the system message; empty where there is none."""
    given = {name: _column(row, name) for name in SYSTEM_COLUMNS if row.get(name)}
    if len(set(given.values())) > 1:
        raise ValueError(f"columns {' and '.join(given)} differ; keep one")
    return next(iter(given.values()), "")


def _chat(messages: Any, row: dict[str, Any], *, answers_from: int = 0) -> Chat:
    """Brings messages of every shape into one, with what stands beside them in the row."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of {role, content}")
    chat: list[Message] = []
    before, first_answer = None, 0
    for number, given in enumerate(messages, start=1):
        message, is_call = _message(given, number)
        role = message["role"]
        allowed, problem = FOLLOWS.get(role, ({before}, ""))
        if before not in allowed:
            follows = f"a message of the {before}" if before else "nothing"
            raise ValueError(f"message {number} ({role}) follows {follows}: {problem}")
        is_trained = role == "assistant" and number > answers_from and message.get("weight", 1)
        if is_trained and not (
            message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
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
    if system := _system(row):
        if chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": system})
            first_answer += bool(first_answer)
        elif chat[0]["content"] != system:
            raise ValueError("the system message differs from the column of it; keep one")
    tools = row.get("tools") or row.get("functions") or []
    if isinstance(tools, str) and tools.strip():  # columns of Parquet hold them as JSON, since their schemas differ
        tools = _json(tools, "tools is no JSON") or []
    if not isinstance(tools, list):
        raise ValueError(f"tools must be a list; it is a {type(tools).__name__}")
    tools = [_json(tool, "a tool is no JSON") if isinstance(tool, str) else tool for tool in tools]
    if others := [tool for tool in tools if not isinstance(tool, dict)]:
        raise ValueError(f"tools must be a list of objects; it holds {others[0]!r:.80}")
    for number, tool in enumerate(tools):
        # Servers give templates tools. `functions`, LLaMA-Factory's `tools` and OpenAI's Responses are functions alone.
        if "name" in tool and "function" not in tool and tool.get("type", "function") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            tools[number] = {"type": "function", "function": function}
    return Chat(messages=chat, tools=tools, answers_from=first_answer)


def _message(given: dict[str, Any], number: int) -> tuple[Message, bool]:
    """Returns (a message in the one form, whether it was a call with a role of its own)."""
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
    where = f"message {number} ({role})"
    content, calls = given.get("content"), given.get("tool_calls") or []
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
                part = part.get("text")
            if isinstance(part, dict):
                raise ValueError(f"{where} holds a part of the type {part.get('type')!r}; only text can be trained")
            if not isinstance(part, str):
                raise ValueError(f"{where} holds a part that is no text but {type(part).__name__}")
            texts.append(part)
        content = "".join(texts)
    is_call = ROLES[role] == "tool_call"
    if is_call:
        calls, content = _json(content, f"{where} must hold the call as JSON"), ""
        calls = calls if isinstance(calls, list) else [calls]
    elif given.get("function_call"):  # OpenAI's form before tool_calls
        calls = [{"function": given["function_call"]}]
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls must be a list; it is a {type(calls).__name__}")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f"{where} must hold text; it holds {'nothing' if content is None else type(content).__name__}")
    message: Message = {"role": "assistant" if is_call else ROLES[role], "content": content or ""}
    # Blank reasoning is none, as an empty think block is: gpt-oss' template would write a thought without words.
    if reasoning := next((given[key] for key in REASONING if given.get(key) and str(given[key]).strip()), None):
        if not isinstance(reasoning, str):
            raise ValueError(f"{where}: reasoning must be text; it is a {type(reasoning).__name__}")
        message["reasoning_content"] = reasoning
    message |= {key: given[key] for key in ("name", "tool_call_id") if given.get(key) is not None}
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a tool call must be {{function: {{name, arguments}}}}")
        name, arguments = function["name"], function.get("arguments", function.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{where}: the arguments of {name} must be a JSON object")
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: the arguments of {name} must be an object; they are {arguments!r:.80}")
        known = {"type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(known | ({"id": call["id"]} if call.get("id") else {}))
    weight = 1 if given.get("weight") is None else given["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:  # NaN is not
        raise ValueError(
            f"{where} has the weight {weight!r:.40}; it must be a number from 0 (not trained) to {MOST_WEIGHT:,}"
        )
    for key in TURN_FLAGS:
        if key != "label" and not isinstance(given.get(key), bool | None):
            raise ValueError(f"{where}: {key} is {given[key]!r:.40}; use true, false, or weight")
        weight = 0 if given.get(key) is False else weight
    return (message if weight == 1 else message | {"weight": weight}), is_call


def _json(text: Any, problem: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{problem} ({error})") from None


FORMATS = {
    "messages": Format(
        columns=lambda _: {"messages"},
        sample=lambda row, *_: _chat(row.values.get("messages"), row.values),
        forms=lambda _: {Chat},
    ),
    "sharegpt": Format(columns=lambda _: {"conversations"}, sample=_from_sharegpt, forms=lambda _: {Chat}),
    "alpaca": Format(
        columns=lambda _: {"instruction", "output"},
        more_columns=("input", "history", *SYSTEM_COLUMNS),
        sample=_from_alpaca,
        forms=lambda _: {Chat, Pair},  # a pair where the tokenizer has no chat template
    ),
    "prompt_completion": Format(
        columns=lambda _: {"prompt", "completion"},
        sample=_from_prompt_completion,
        forms=lambda rules: {Chat} if rules.has_chat_pairs else {Pair},
    ),
    "text": Format(
        columns=lambda config: {config.text_column},
        sample=lambda row, rules, _: Text(text=_column(row.values, rules.text_column, empty=True)),
        forms=lambda _: {Text},
    ),
    "template": Format(
        columns=lambda config: template_columns(config) if config.completion_template else set(),
        sample=_from_template,
        forms=lambda rules: {Pair} if rules.prompt_template else {Text},
    ),
}
"""`data_format` -> what it is; tried by their columns in this order."""
