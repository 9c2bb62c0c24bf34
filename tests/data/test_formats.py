"""The registry of data formats: which one rows are of, and what a reader of the manual finds about it."""

import json

import pytest
from conftest import ROOT

from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.formats import CHAT_COLUMNS, COLUMNS, REASONING, Chat, Pair, canonical, format_rules, unused_columns
from dsft.data.sources import Row

MANUAL = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def find_format(columns: list[str], config: TrainConfig) -> str:
    return format_rules([Row(dict.fromkeys(columns, ""), 1)], config).format


@pytest.mark.parametrize("name", COLUMNS)
def test_every_format_has_its_line_in_the_manual_with_all_its_columns(name):
    (line,) = [line for line in MANUAL.splitlines() if line.startswith(f"| `{name}` |")]
    for column in COLUMNS[name]:
        assert f"`{column}`" in line
    (line,) = [line for line in MANUAL.splitlines() if line.startswith("Beside the turns of a chat")]
    for column in CHAT_COLUMNS:
        assert f"`{column}`" in line


@pytest.mark.parametrize("name", COLUMNS)
def test_a_format_is_found_by_its_columns(name):
    columns = [*COLUMNS[name], "id"]
    assert find_format(columns, TrainConfig()) == name


def test_missing_columns_list_those_present():
    with pytest.raises(ValueError, match="the columns are body, title"):
        find_format(["body", "title"], TrainConfig())
    with pytest.raises(ValueError, match="completion, prompt; the columns are body, title"):
        find_format(["body", "title"], TrainConfig(data_format="prompt_completion"))
    assert find_format(["body", "title"], TrainConfig(text_column="body")) == "text"


TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
ROWS = {
    "messages": {"messages": TURNS},
    "sharegpt": {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
    "alpaca": {"instruction": "hello", "output": "hi"},
    "pairs of messages": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "prompt_completion": {"prompt": "hello", "completion": "hi"},
    "text": {"text": "hello"},
}
CHATS = ("messages", "sharegpt", "alpaca", "pairs of messages")
FLAWS = {
    "images": {"images": ["a.png"]},
    "audio": {"audio": "a.wav"},
    "history": {"history": [["before", "after"]]},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "kto_tag": {"kto_tag": False},
    "kto_tag of CSV": {"kto_tag": "False"},
    "label": {"label": False},
    "system": {"system": "be kind"},
    "system_prompt": {"system_prompt": "be kind"},
    "tools": {"tools": [{"type": "function", "function": {"name": "look_up"}}]},
    "functions": {"functions": [{"name": "look_up"}]},
}
"""What stands beside a row and changes what it means."""
READ = {("alpaca", "history"), *((name, flaw) for name in CHATS for flaw in CHAT_COLUMNS)}
"""(row, flaw) that a format reads."""


def made(row: dict, *, options=TrainConfig, **given):
    return canonical(Row(row, 1), format_rules([Row(row, 1)], options(**given)))


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "text"])
def test_a_column_that_changes_the_meaning_is_read_or_refused_by_name(name, flaw):
    row = ROWS[name] | FLAWS[flaw]
    if (name, flaw) in READ:
        assert made(row) != made(ROWS[name])
        return
    for options in (TrainConfig, EvalConfig):
        with pytest.raises(ValueError, match=flaw.split()[0]):
            made(row, options=options)


@pytest.mark.parametrize("flaw", ["images", "history", "system", "tools"])
def test_drop_keys_ignores_a_column_that_is_then_named_as_unused(flaw):
    row = ROWS["prompt_completion"] | FLAWS[flaw]
    assert made(row, drop_keys=[flaw]) == Pair(prompt="hello", completion="hi")
    rules = format_rules([Row(row, 1)], TrainConfig(drop_keys=[flaw]))
    assert unused_columns([Row(row, 1)], rules) == (flaw,)


@pytest.mark.parametrize(
    "row",
    [
        ROWS["text"] | FLAWS["label"],  # a class
        ROWS["text"] | FLAWS["kto_tag"] | FLAWS["history"],
        ROWS["prompt_completion"] | {"label": 0},
        ROWS["prompt_completion"] | {"label": True, "kto_tag": "true"},
        ROWS["prompt_completion"] | dict.fromkeys(FLAWS),  # null in every row
        ROWS["messages"] | {"chosen": TURNS, "rejected": [*TURNS[:1], {"role": "assistant", "content": "no"}]},
        ROWS["messages"] | {"images": [], "history": [], "tools": None, "system": ""},
        ROWS["messages"] | {"system": "be kind", "messages": [{"role": "system", "content": "be kind"}, *TURNS]},
    ],
)
def test_columns_that_change_nothing_are_no_error(row):
    assert made(row)


def test_a_template_of_the_user_names_what_it_means():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["c"], "label": False}
    assert made(row, prompt_template="{prompt}", completion_template="{chosen}") == Pair(prompt="q", completion="a")


def test_an_evaluation_by_groups_of_a_column_reads_it():
    row = ROWS["prompt_completion"] | FLAWS["label"]
    assert made(row, options=EvalConfig, group_by=["label"]) == Pair(prompt="hello", completion="hi")


@pytest.mark.parametrize("name", CHATS)
def test_a_system_column_is_the_first_message_of_every_chat(name):
    sample = made(ROWS[name] | {"system": "be kind", "functions": [{"name": "look_up"}]})
    assert sample == Chat(
        messages=[{"role": "system", "content": "be kind"}, *TURNS],
        tools=FLAWS["tools"]["tools"],
    )


@pytest.mark.parametrize("column", ["tools", "functions"])
def test_a_tool_of_every_shape_is_the_one_that_a_server_gives(column):
    """LLaMA-Factory's rows and OpenAI's Responses have functions alone: templates would write another prompt."""
    function = {"name": "look_up", "parameters": {}}
    (tool,) = made(ROWS["messages"] | {"tools": [{"type": "function", "function": function}]}).tools
    for given in (tool, function, {"type": "function"} | function, json.dumps(function)):
        assert made(ROWS["messages"] | {column: [given]}).tools == [tool]
    assert made(ROWS["messages"] | {column: json.dumps([function])}).tools == [tool]
    other = {"type": "custom", "name": "look_up"}
    assert made(ROWS["messages"] | {column: [other]}).tools == [other]


def test_two_system_messages_that_differ_are_refused():
    turns = [{"role": "system", "content": "be brief"}, *TURNS]
    with pytest.raises(ValueError, match="the system message differs from the column of it"):
        made({"messages": turns, "system": "be kind"})


def test_a_key_of_a_message_that_is_not_read_is_refused_by_name_unless_it_is_ignored_or_null():
    turns = [TURNS[0] | {"images": ["a.png"]}, TURNS[1] | {"score": 3, "loss_scale": 0.5, "id": None, "audios": []}]
    with pytest.raises(ValueError, match=r"message 1 .user. has 'images', which dsft does not read; .*drop_keys"):
        made({"messages": turns})
    with pytest.raises(ValueError, match=r"message 2 .assistant. has 'score', 'loss_scale', which dsft does not read"):
        made({"messages": turns}, drop_keys=["images"])
    assert made({"messages": turns}, drop_keys=["images", "score", "loss_scale"]) == made(ROWS["messages"])


# Rows as other programs write them

QUESTION = {"role": "user", "content": "Level?"}
SCHEMA = {"gauge": {"type": "string"}, "since": {"type": ["string", "null"], "default": None}}
TOOL = {
    "type": "function",
    "function": {"name": "level", "parameters": {"type": "object", "properties": SCHEMA, "required": ["gauge"]}},
}


def calling(arguments: dict | str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "level", "arguments": arguments}}]}


@pytest.mark.parametrize("empty", [{}, {"recipient": None, "name": "", "tool_calls": [], "weight": None}], ids=str)
def test_analysis_is_the_reasoning_of_what_follows_and_commentary_for_a_function_is_a_call(empty):
    """Also if the keys of other messages are empty in it, as Arrow fills them in."""
    analysis = {"role": "assistant", "channel": "analysis", "content": "Look it up."} | empty
    call = {
        "role": "assistant",
        "channel": "commentary",
        "recipient": "functions.level",
        "content": '{"gauge": "g"}',
    }
    result = {"role": "tool", "name": "level", "recipient": "assistant", "channel": "commentary", "content": "3"}
    final = {"role": "assistant", "channel": "final", "content": "It is 3."}
    _, called, told, answered = made({"messages": [QUESTION, analysis, call, result, final], "tools": [TOOL]}).messages
    assert called["reasoning_content"] == "Look it up."
    assert called["tool_calls"][0]["function"] == {"name": "level", "arguments": {"gauge": "g"}}
    assert told == {"role": "tool", "name": "level", "content": "3"}
    assert answered == {"role": "assistant", "content": "It is 3."}
    for follows in ([], [QUESTION, final]):
        with pytest.raises(ValueError, match="no answer follows the message of the channel analysis"):
            made({"messages": [QUESTION, final, QUESTION, analysis, *follows]})
    with pytest.raises(ValueError, match="no answer follows the message of the channel analysis"):
        made({"prompt": [QUESTION, final, QUESTION, analysis], "completion": [final]})
    for key in REASONING:
        with pytest.raises(ValueError, match="the answer has other reasoning too"):
            made({"messages": [QUESTION, analysis, final | {key: "It says so."}]})


@pytest.mark.parametrize(
    "other",
    [
        {"channel": "commentary"},
        {"channel": "commentary", "recipient": "assistant"},
        {"channel": "final", "recipient": "browser"},
        {"channel": "analysis", "recipient": "python"},
        {"channel": "analysis", "weight": 0},
        {"channel": "analysis", "score": 1},
    ],
)
def test_a_channel_that_is_not_understood_is_refused_by_the_key(other):
    final = {"role": "assistant", "channel": "final", "content": "It is 3."}
    with pytest.raises(ValueError, match="message 2 .assistant. has .*'channel'"):
        made({"messages": [QUESTION, final | other, final]})


def test_null_is_an_argument_or_a_default_where_the_tool_s_schema_allows_it_and_else_what_arrow_fills_in():
    filled = {**SCHEMA, "gauge": {"type": "string", "default": None}, "angle": None}
    tool = {"type": "function", "function": {"name": "level", "parameters": {"type": "object", "properties": filled}}}
    for given in (tool, tool["function"] | {"strict": None}):
        arguments = {"gauge": "g", "since": None, "angle": None}
        chat = made({"messages": [QUESTION, calling(arguments)], "tools": [given]})
        assert chat.tools[0]["function"]["parameters"]["properties"] == SCHEMA
        assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"gauge": "g", "since": None}
    written = made({"messages": [QUESTION, calling('{"angle": null}')], "tools": json.dumps([tool])})
    assert written.tools == [tool]  # JSON that is text has no filler
    assert written.messages[1]["tool_calls"][0]["function"]["arguments"] == {"angle": None}
    others = {"gauge": {"type": "object", "additionalProperties": SCHEMA["since"]}}
    tool = {"name": "level", "parameters": {"type": "object", "properties": others}}
    chat = made({"messages": [QUESTION, calling({"gauge": {"any": None}})], "tools": [tool]})
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"gauge": {"any": None}}
    choices = {"gauge": {"enum": ["g", None]}}
    tool = {"name": "level", "parameters": {"type": "object", "properties": choices}}
    chat = made({"messages": [QUESTION, calling({"gauge": None})], "tools": [tool]})
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"gauge": None}


def test_null_is_an_argument_where_a_local_reference_of_the_schema_allows_it():
    """As Pydantic writes the schema of nested models, and of models that contain themselves."""
    place = {"type": "object", "properties": {"name": {"type": "string"}, "height": {"$ref": "#/$defs/Height"}}}
    place["properties"]["inside"] = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
    parameters = {
        "type": "object",
        "$defs": {"Height": SCHEMA["since"], "Place": place, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "others": {"anyOf": [{"type": "array", "items": {"allOf": [{"$ref": "#/$defs/Place"}]}}, {"type": "null"}]},
            "height": {"$ref": "#/$defs/Height", "default": None},
            "loop": {"$ref": "#/$defs/Loop"},
            "elsewhere": {"$ref": "https://example.org/schema"},
        },
    }
    tool = {"type": "function", "function": {"name": "level", "parameters": parameters}}
    inside = {"name": "b", "height": None, "inside": None}
    real = {"place": {"name": "a", "height": None, "inside": inside}, "others": [inside], "height": None}
    filled = {"place": real["place"] | {"angle": None}, "others": [inside | {"name": None}], "loop": None}
    chat = made({"messages": [QUESTION, calling(real | filled | {"elsewhere": None})], "tools": [tool]})
    assert chat.tools == [tool]
    expected = real | {"others": [{"height": None, "inside": None}]}
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("column", ["tools", "functions", "tool_defs", "available_tools"])
def test_tools_are_read_from_their_columns_and_a_call_of_none_is_refused(column):
    messages = [QUESTION, calling({"gauge": "g"})]
    assert made({"messages": messages, column: [TOOL]}).tools == [TOOL]
    for row in ({}, {column: []}, {column: [TOOL | {"function": {"name": "other"}}]}):
        with pytest.raises(ValueError, match="level is called, and no tool of that name is given"):
            made({"messages": messages} | row)
    with pytest.raises(ValueError, match="level is called, and no tool"):  # a word of the question describes none
        made({"messages": [{"role": "user", "content": "What is the level?"}, messages[1]]})
    told = {"role": "system", "content": "You can call level(gauge)."}
    assert made({"messages": [told, *messages]}).tools == []


def test_messages_and_calls_as_json_text_are_read():
    expected = made({"messages": [QUESTION, calling({"gauge": "g"})], "tools": [TOOL]})
    call = calling({"gauge": "g"})
    as_text = [QUESTION, call | {"tool_calls": json.dumps(call["tool_calls"])}]
    for messages in (as_text, json.dumps(as_text), [*map(json.dumps, as_text)]):  # the last as datasets' Json type
        assert made({"messages": messages, "tools": [json.dumps(TOOL)]}) == expected


def test_messages_as_text_are_not_trained_as_the_completion_of_a_prompt():
    turns = [json.dumps([turn]) for turn in TURNS]
    for completion in (turns[1], str(json.loads(turns[1]))):
        with pytest.raises(ValueError, match="column 'completion' is the text of a list of messages"):
            made({"prompt": turns[0], "completion": completion})


def test_a_column_that_is_null_in_all_rows_does_not_show_a_format():
    assert made({"messages": None} | ROWS["sharegpt"]) == made(ROWS["messages"])


def test_the_question_of_alpaca_may_stand_in_input():
    assert made({"instruction": "", "input": "hello", "output": "hi"}) == made(ROWS["alpaca"])


def test_calls_of_every_shape_become_the_same_chat():
    arguments = {"gauge": "g"}
    result, answer = {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}
    expected = made({"messages": [QUESTION, calling(arguments), result, answer], "tools": [TOOL]})
    call = json.dumps({"name": "level", "arguments": arguments})
    shapes = [[QUESTION, calling(json.dumps(arguments)), result, answer]]
    shapes += [[QUESTION, {"role": "assistant", "content": None, "function_call": json.loads(call)}, result, answer]]
    for role, other in (("tool_call", "tool_response"), ("function_call", "observation")):
        shapes.append([QUESTION, {"role": role, "content": call}, result | {"role": other}, answer])
    for shape in shapes:
        assert made({"messages": shape, "tools": [TOOL]}) == expected
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names.get(turn["role"], turn["role"]), "value": turn["content"]} for turn in shapes[-1]]
    assert made({"conversations": turns, "tools": [TOOL]}) == expected
    for bad, problem in (("{", "must be JSON"), ("[1]", "must be an object")):
        with pytest.raises(ValueError, match=rf"message 2 .assistant.: the arguments of level {problem}"):
            made({"messages": [QUESTION, calling(bad)], "tools": [TOOL]})
