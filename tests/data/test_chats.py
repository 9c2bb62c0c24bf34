"""The table of truth: what is trained of ten chats under every vendor's chat template that trl ships.

The expected texts stand in chat_table.json and were read by eye; docs/chats.md shows them in short. After a change that
is meant, `python tests/data/test_chats.py` writes both anew.
"""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
from chat_corpus import CHATS, TEMPLATES, TRL, tokenizer_for

from dsft.config.options import TrainConfig
from dsft.data.chats import _forms, chat_ids
from dsft.data.formats import TURN_FLAGS, canonical, format_rules
from dsft.data.sources import Row
from dsft.data.tokens import Tokens, stop_tokens, tokenise
from dsft.errors import UserError

TABLE = Path(__file__).parent / "chat_table.json"
DOCS = Path(__file__).parents[2] / "docs" / "chats.md"
TITLE = "| template | "
REFUSALS = {
    "does not render its reasoning": "reasoning",
    "does not render tools": "tools",
    "does not render its tool call": "tool calls",
    "does not render its content": "content",
    "the chat template raised": "raises",
}
"""What a message says -> the docs' word for it."""


def made(chat: dict, tokenizer, **options) -> Tokens:
    rows = [Row(chat, 1, "rows.jsonl")]
    return tokenise(rows, format_rules(rows, TrainConfig(**({"seq_len": 9999} | options))), tokenizer)


def answers(tokens: Tokens, tokenizer) -> list[list[str]]:
    """The trained stretches of each sequence."""
    sequences, start = [], 0
    for end in tokens.ends:
        stretches, ids = [[]], tokens.ids[start:end]
        for token, is_trained in zip(ids, tokens.trained[start:end], strict=True):
            if is_trained:
                stretches[-1].append(token)
            elif stretches[-1]:
                stretches.append([])
        sequences.append([tokenizer.decode(stretch) for stretch in stretches if stretch])
        start = end
    return sequences


def cell(name: str, chat: str) -> list[list[str]] | str:
    """What is trained, or why the chat is refused."""
    tokenizer = tokenizer_for(name)
    try:
        return answers(made(CHATS[chat], tokenizer), tokenizer)
    except UserError as error:
        return error.problems[0].removeprefix("rows.jsonl, line 1: ").partition("; name")[0].partition("; bad_rows")[0]


def in_short(trained: list[list[str]] | str) -> str:
    if isinstance(trained, str):
        return "refused: " + next(word for says, word in REFUSALS.items() if says in trained)
    return "trained" if len(trained) == 1 else f"trained, {len(trained)} sequences"


def docs_table(table: dict) -> str:
    """The table of docs/chats.md: templates with the same cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, cells in table.items():
        rows.setdefault(tuple(in_short(cells[chat]) for chat in CHATS), []).append(name)
    lines = [f"{TITLE}{' | '.join(CHATS)} |", f"|---|{'---|' * len(CHATS)}"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join([f"Chat templates of trl {TRL}: {len(table)} as vendors publish them.", "", *lines])


def in_docs(text: str) -> str:
    return re.search(r"^Chat templates of trl .*\n\n(\|.*\n)+", text, re.MULTILINE)[0].strip()


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_cell_of_the_table_is_trained_or_refused_as_it_says(name):
    expected = json.loads(TABLE.read_text(encoding="utf-8"))
    assert {chat: cell(name, chat) for chat in CHATS} == expected[name]


def test_the_docs_show_the_table():
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert list(table) == list(TEMPLATES)
    assert in_docs(DOCS.read_text(encoding="utf-8")) == docs_table(table)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_alone_are_trained_each_whole_and_to_a_token_that_stops(name):
    """Laws of every cell that is trained, beside the exact texts."""
    tokenizer, stops = tokenizer_for(name), stop_tokens(tokenizer_for(name))
    assert stops and set(stops) <= set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for chat in CHATS:
        if isinstance(trained := cell(name, chat), str):
            continue
        stretches = [text for sequence in trained for text in sequence]
        turns = [message for message in CHATS[chat]["messages"] if message["role"] == "assistant"]
        if made(CHATS[chat], tokenizer).counts["unprompted"]:  # after a tool's result and text, Gemma 4 asks for none
            assert chat == "call with text" and name in ("diffusion_gemma", "gemma4_v5")
            turns.pop(1)
        assert len(stretches) == len(turns)
        for stretch, turn in zip(stretches, turns, strict=True):
            texts = turn["content"] if isinstance(turn["content"], str) else turn["content"][0]["text"]
            assert texts in stretch and turn.get("reasoning_content", "") in stretch
            assert all(call["function"]["name"] in stretch for call in turn.get("tool_calls", []))
            assert tokenizer(stretch, add_special_tokens=False)["input_ids"][-1] in stops
            others = ("Ask", "Be brief", "Says", "wet", "noon" if "noon" not in texts else "wet")
            assert not any(other in stretch for other in others)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_of_a_question_holds_it(name):
    """Also where a template takes lists of parts alone: of a text it writes nothing, and does not raise."""
    tokenizer = tokenizer_for(name)
    assert "Ask one?" in tokenizer.decode(chat_ids(tokenizer, CHATS["one turn"]["messages"][:1]))


EMPTY_BLOCKS = {"glm4moe": "\n<think></think>\n", "qwen3_8": "\n</think>\n\n"}
"""What these templates write after a generation prompt for answers without reasoning; others have a switch for it."""


def server_prompts(tokenizer, chat: dict) -> list[str]:
    """What servers send before each answer of a chat: the template's generation prompts."""
    sample = canonical(Row(chat, 1), format_rules([Row(chat, 1)], TrainConfig()))
    prompts = []
    for turn, message in enumerate(sample.messages):
        for switch in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            if message["role"] == "assistant":
                prompts.append(rendered(tokenizer, sample.messages[:turn], sample.tools, **switch))
    return prompts


def rendered(tokenizer, messages: list[dict], tools: list, **switch) -> str:
    template = tokenizer.get_chat_template(tools=tools or None)
    taken = [*map(_forms(tokenizer, template, len(tokenizer)).take, messages)]
    return tokenizer.apply_chat_template(
        taken, tools=tools or None, tokenize=False, add_generation_prompt=True, **switch
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_precedes_a_trained_answer_is_token_by_token_a_prompt_that_a_server_gives(name):
    tokenizer = tokenizer_for(name)
    for chat in CHATS:
        if isinstance(cell(name, chat), str):
            continue
        prompts = server_prompts(tokenizer, CHATS[chat])
        if name in EMPTY_BLOCKS:
            prompts += [prompt + EMPTY_BLOCKS[name] for prompt in prompts]
        allowed = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        tokens, start = made(CHATS[chat], tokenizer), 0
        for end in tokens.ends:
            begins = np.flatnonzero(np.diff(tokens.trained[start:end].astype(int)) == 1) + 1
            for begin in begins:
                assert tokens.ids[start : start + begin].tolist() in allowed, chat
            start = end


ODD = [
    "a",
    "42",
    "?!",
    '"quoted"',
    "<b>bold</b>",
    "{{ x }}",
    "🙂 ünï",
    "a\\nb\nc",
    "[INST]",
    "the user said: assistant",
    "</s",
]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("phi3", "<|end|>"),
    ],
)
def test_whatever_a_chat_holds_its_answers_are_found(name, end):
    tokenizer, rng = tokenizer_for(name), random.Random(0)
    for _ in range(15):
        chat = [
            {"role": role, "content": " ".join(rng.choices(ODD, k=rng.randint(1, 4)))}
            for _ in range(rng.randint(1, 3))
            for role in ("user", "assistant")
        ]
        trained = [text for texts in answers(made({"messages": chat}, tokenizer), tokenizer) for text in texts]
        assert trained == [message["content"] + end for message in chat if message["role"] == "assistant"]


THINKS = CHATS["reasoning twice"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("auto", [["<think>\nMuse one.\n</think>\n\nReply one."], ["<think>\nMuse two.\n</think>\n\nReply two."]]),
        ("last", [["Reply one.", "<think>\nMuse two.\n</think>\n\nReply two."]]),
        ("none", [["Reply one.", "Reply two."]]),
    ],
)
def test_train_thinking_says_which_reasoning_is_trained(how, expected):
    tokenizer = tokenizer_for("qwen3")
    tokens = made(THINKS, tokenizer, train_thinking=how)
    assert answers(tokens, tokenizer) == [[f"{text}<|im_end|>" for text in texts] for texts in expected]
    assert ("Muse two." in tokenizer.decode(tokens.ids)) and tokens.counts["rendered_apart"] == (how == "auto")


@pytest.mark.parametrize(
    ("name", "calls", "says"),
    [
        (
            "qwen3",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
            "It rains.<|im_end|>",
        ),
        (
            "gptoss",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>It rains.<|return|>",
        ),
    ],
)
def test_all_that_follows_untrained_reasoning_is_trained(name, calls, says):
    """What opens a call, or the channel of an answer, is the model's to write."""
    ask, call, _, answer = CHATS["tool call"]["messages"]
    call, answer = (message | {"reasoning_content": "Muse."} for message in (call, answer))
    tokenizer, tools = tokenizer_for(name), CHATS["tool call"]["tools"]
    for messages, expected in (([ask, call], calls), ([ask, answer], says)):
        tokens = made({"messages": messages, "tools": tools}, tokenizer, train_thinking="none")
        assert "Muse." in tokenizer.decode(tokens.ids) and answers(tokens, tokenizer) == [[expected]]


def test_empty_thinking_is_rendered_and_trained_only_where_it_is_asked_for():
    tokenizer = tokenizer_for("qwen3")
    tokens = made(CHATS["one turn"], tokenizer)
    assert tokens.counts == {"rows": 1, "empty_thinking": 1}
    assert tokenizer.decode(tokens.ids).endswith("assistant\n<think>\n\n</think>\n\nReply one.<|im_end|>\n")
    assert answers(tokens, tokenizer) == [["Reply one.<|im_end|>"]]
    everything = made(CHATS["one turn"], tokenizer, train_thinking="all")
    assert answers(everything, tokenizer) == [["<think>\n\n</think>\n\nReply one.<|im_end|>"]]


def test_reasoning_within_the_content_is_the_same_as_beside_it():
    inline = [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        | {"content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"}
        if message["role"] == "assistant"
        else message
        for message in THINKS["messages"]
    ]
    for name in ("qwen3", "deepseek_r1_distill", "glm4moe", "qwen3_6"):
        tokenizer = tokenizer_for(name)
        assert answers(made({"messages": inline}, tokenizer), tokenizer) == cell(name, "reasoning twice"), name
    assert "Muse one." in answers(made({"messages": inline}, tokenizer_for("llama3")), tokenizer_for("llama3"))[0][0]


def test_a_template_prints_the_day_that_is_given():
    for name, day in (("gptoss", "Current date: 2001-02-03"), ("llama3_2", "Today Date: 03 Feb 2001")):
        tokenizer = tokenizer_for(name)
        tokens = made(CHATS["one turn"], tokenizer, chat_date="2001-02-03")
        assert day in tokenizer.decode(tokens.ids)
        assert made(CHATS["one turn"], tokenizer).ids.tolist() != tokens.ids.tolist()
    in_variable = "{% set format = '%A, %-d %B %Y' %}{{ strftime_now(format) }}"
    for asks, day in (("{{ strftime_now( '%d %b' ) }}", "03 Feb"), (in_variable, "Saturday, 3 February 2001")):
        tokenizer = tokenizer_for(asks, f"\n  {{% if true %}}\n  Day: {{% endif %}}{asks}" + TEMPLATES["qwen2_5"])
        tokens = made(CHATS["one turn"], tokenizer, chat_date="2001-02-03")
        assert tokenizer.decode(tokens.ids).startswith(f"\n  Day: {day}<|im_start|>")


def test_what_a_template_leaves_out_is_refused_by_name_or_left_out_and_counted():
    named = {"messages": [{"role": "user", "name": "Ann", "content": "Ask"}, {"role": "assistant", "content": "Reply"}]}
    for name, chat, part in (
        ("llama3", CHATS["reasoning"], r"message 2 \(assistant\): the chat template does not render its reasoning"),
        ("llama3", CHATS["tool call"], "the chat template does not render tools"),
        ("qwen2_5", named, r"message 1 \(user\): the chat template does not render its name"),
    ):
        tokenizer = tokenizer_for(name)
        with pytest.raises(UserError, match=f"rows.jsonl, line 1: {part}.*drop_unrendered: true"):
            made(chat, tokenizer)
    for name, chat in (("llama3", CHATS["reasoning"]), ("qwen2_5", named)):
        tokens = made(chat, tokenizer_for(name), drop_unrendered=True)
        assert tokens.counts == {"rows": 1, "unrendered": 1} and tokens.trained.any()
    with pytest.raises(UserError, match="does not render its tool call"):  # nothing of the answer would be left
        made(CHATS["tool call"], tokenizer_for("lfm2"), drop_unrendered=True)


@pytest.mark.parametrize("off", [{"weight": 0}, *({key: False} for key in TURN_FLAGS)])
def test_a_turn_of_no_weight_is_given_and_not_trained(off):
    tokenizer = tokenizer_for("qwen2_5")
    first, second, *rest = CHATS["two turns"]["messages"]
    chat = {"messages": [first, second | off, *rest]}
    assert answers(made(chat, tokenizer), tokenizer) == [["Reply two.<|im_end|>"]]
    assert made({"messages": [first, second | off]}, tokenizer).counts["dropped_empty"] == 1


def test_a_turn_s_weight_is_that_of_its_tokens_also_where_turns_become_sequences():
    for name, several in (("qwen2_5", False), ("qwen3", True), ("gptoss", True)):
        tokenizer = tokenizer_for(name)
        first, second, third, fourth = CHATS["reasoning twice" if several else "two turns"]["messages"]
        tokens = made({"messages": [first, second | {"weight": 0.5}, third, fourth | {"weight": 3.0}]}, tokenizer)
        plain = made({"messages": [first, second, third, fourth]}, tokenizer)
        assert {*plain.weights} == {0, 1} and tokens.ids.tolist() == plain.ids.tolist()
        assert tokens.trained.tolist() == plain.trained.tolist()
        assert tokens.weights.dtype == np.float32 and (tokens.weights > 0).tolist() == tokens.trained.tolist()
        assert len(tokens.ends) == 1 + several
        # The tokens of the two answers, in their order.
        begins = np.flatnonzero(np.diff(tokens.trained.astype(int), prepend=0) == 1)
        of_first = (np.arange(len(tokens.ids)) < begins[1]) & tokens.trained
        assert {*tokens.weights[of_first]} == {0.5} and {*tokens.weights[tokens.trained & ~of_first]} == {3.0}


def test_where_all_tokens_are_trained_weights_are_refused():
    first, second = CHATS["one turn"]["messages"]
    for messages in ([first, second | {"weight": 0.5}], [first | {"weight": 0.5}, second]):
        with pytest.raises(UserError, match="train_on: all trains every token alike"):
            made({"messages": messages}, tokenizer_for("qwen2_5"), train_on="all")
    assert made({"messages": [first | {"weight": 0.5}, second]}, tokenizer_for("qwen2_5")).weights.max() == 1


@pytest.mark.parametrize(
    "given",
    [
        *({"weight": weight} for weight in (-1, float("nan"), float("inf"), 10**400, 1e7, True, "0.5", [1])),
        *({key: value} for key in ("train", "loss") for value in (0.5, "false")),
    ],
)
def test_a_weight_that_is_none_is_refused_in_one_line(given):
    first, second = CHATS["one turn"]["messages"]
    with pytest.raises(UserError) as error:
        made({"messages": [first, second | given]}, tokenizer_for("qwen2_5"))
    (problem,) = error.value.problems
    assert "message 2 (assistant)" in problem and "\n" not in problem and len(problem) < 250


def test_two_turns_of_an_assistant_in_a_row_are_two_answers():
    tokenizer = tokenizer_for("qwen2_5")
    first, second = ({"role": "assistant", "content": text} for text in ("One.", "Two."))
    chat = {"messages": [{"role": "user", "content": "Ask"}, first, second]}
    assert answers(made(chat, tokenizer), tokenizer) == [["One.<|im_end|>", "Two.<|im_end|>"]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ["<|im_end|>"]),
        ("llama3_1", ["<|eot_id|>"]),
        ("phi3", ["<|end|>"]),
        ("gptoss", ["<|return|>", "<|call|>"]),
        ("gemma4_v5", ["<turn|>", "<|tool_response>"]),
        ("glm4moe", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    ],
)
def test_stop_tokens_are_those_that_trained_answers_end_with(name, expected):
    tokenizer = tokenizer_for(name)
    assert tokenizer.convert_ids_to_tokens(stop_tokens(tokenizer)) == expected


CALLS = "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|end_of_text|>{% else %}"


@pytest.mark.parametrize("tools", ["", "{{ tools | tojson if tools }}"], ids=["not rendered", "rendered"])
def test_a_call_ends_with_a_stop_token_whether_the_template_renders_tools_or_not(tools):
    turn = f"<|{{{{ m.role }}}}|>{CALLS}{{{{ m.content }}}}<|endoftext|>{{% endif %}}"
    prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer = tokenizer_for("bare", f"{tools}{{% for m in messages %}}{turn}{{% endfor %}}{prompt}")
    assert tokenizer.convert_ids_to_tokens(stop_tokens(tokenizer)) == ["<|endoftext|>", "<|end_of_text|>"]


@pytest.mark.parametrize("role", ["developer", "system", "tool"])
def test_a_message_of_a_role_that_the_template_leaves_out_is_refused(role):
    text = (
        "{% for m in messages if m.role != left_out %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_for("bare", text.replace("left_out", repr(role)))
    ask, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}
    left_out = {"role": role, "content": "be kind"}
    chats = [{"messages": [ask, answer, left_out, answer] if role == "tool" else [left_out, ask, answer]}]
    chats += [{"messages": [ask, answer], "system": "be kind"}] * (role == "system")
    for chat in chats:
        rules = format_rules([Row(chat, 1)], TrainConfig())
        with pytest.raises(UserError, match=rf"message . \({role}\): the chat template does not render its content"):
            tokenise([Row(chat)], rules, tokenizer)


def test_a_template_without_a_token_that_stops_gets_the_end_token_or_is_refused():
    turn = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = turn + "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = tokenizer_for("bare", text)
    tokens = made(CHATS["two turns"], tokenizer)
    assert answers(tokens, tokenizer) == [[" Reply one.<|endoftext|>"], [" Reply two.<|endoftext|>"]]
    assert tokenizer.convert_ids_to_tokens(stop_tokens(tokenizer)) == ["<|endoftext|>"]
    try:
        tokenizer.eos_token = None
        with pytest.raises(UserError, match="nothing in the chat template ends an answer"):
            made(CHATS["one turn"], tokenizer)
    finally:
        tokenizer.eos_token = "<|endoftext|>"


if __name__ == "__main__":
    made_now = {name: {chat: cell(name, chat) for chat in CHATS} for name in TEMPLATES}
    TABLE.write_text(json.dumps(made_now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    docs = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(docs.replace(in_docs(docs), docs_table(made_now)), encoding="utf-8")
