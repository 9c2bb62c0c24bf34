"""Formats, masks and policies: which tokens a row becomes, which are trained, and what is counted as dropped."""

import copy
import json

import numpy as np
import pytest
from tiny import sentences
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from dsft.config.options import TrainConfig
from dsft.data.formats import format_rules
from dsft.data.sources import Row
from dsft.data.tokens import Tokens, bytes_of_tokens, encode, tokenise
from dsft.errors import UserError
from dsft.models.model_folder import load_template
from dsft.models.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "be fast"},
    {"role": "user", "content": "big"},
    {"role": "assistant", "content": "small"},
    {"role": "user", "content": "fast"},
    {"role": "assistant", "content": "slow"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(TrainConfig(model=str(tiny / "chat")))


def made(values: list[dict], tokenizer, **options) -> Tokens:
    rows = [Row(row, number, "rows.jsonl") for number, row in enumerate(values, start=1)]
    return tokenise(rows, format_rules(rows, TrainConfig(**({"seq_len": 64} | options))), tokenizer)


def trained(tokens: Tokens, tokenizer, index: int | None = None) -> str:
    """The trained tokens of one sequence, or of all."""
    start, end = (0, tokens.ends[-1]) if index is None else ([0, *tokens.ends][index], tokens.ends[index])
    return tokenizer.decode(tokens.ids[start:end][tokens.trained[start:end]])


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def test_text_is_laid_end_to_end_without_losing_a_token(tokenizer):
    texts = ["the model reads and writes", "", "big small " * 20, "loss"]
    tokens = made([{"text": text} for text in texts], tokenizer)
    assert tokens.ids.tolist() == [
        token for text in texts if text for token in tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    ]
    assert len(tokens.ends) == 3 and tokens.counts == {"rows": 4, "dropped_empty": 1} and tokens.trained.all()


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_the_tokenizer(tokenizer, special):
    from tokenizers.processors import TemplateProcessing

    framed = copy.deepcopy(tokenizer)
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", framed.convert_tokens_to_ids("<|user|>"))]
    )
    framed.backend_tokenizer.enable_truncation(3)
    texts = ["the model <|end|> reads", "", "ä\n" * 9]
    assert list(encode(framed, texts, special=special)) == framed(texts, add_special_tokens=special)["input_ids"]
    assert (
        next(encode(framed, ["a"], special=special))
        == [framed.convert_tokens_to_ids("<|user|>")] * special + tokenizer("a")["input_ids"]
    )


def test_only_completion_and_end_token_are_trained(tokenizer):
    rows = [{"prompt": "the model: ", "completion": "reads"}]
    tokens = made(rows, tokenizer)
    assert trained(tokens, tokenizer) == "reads<|end|>" and tokenizer.decode(tokens.ids) == "the model: reads<|end|>"
    everything = made(rows, tokenizer, train_on="all")
    assert everything.trained.tolist() == [False] + [True] * (
        len(everything.ids) - 1
    )  # nothing stands before the first


FORMATS = {
    "messages": {"messages": CHAT},
    "sharegpt": {
        "system": "be fast",
        "conversations": [
            {"from": "human", "value": "big"},
            {"from": "gpt", "value": "small"},
            {"from": "human", "value": "fast"},
            {"from": "gpt", "value": "slow"},
        ],
    },
    "prompt_completion": {"prompt": CHAT[:4], "completion": CHAT[4:]},
}


@pytest.mark.parametrize("name", FORMATS)
def test_chats_of_every_format_become_the_same_tokens(tokenizer, name):
    tokens = made([FORMATS[name]], tokenizer)
    assert format_rules([Row(FORMATS[name], 1)], TrainConfig()).format == name
    assert tokens.ids.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert trained(tokens, tokenizer) == ("slow<|end|>" if name == "prompt_completion" else "small<|end|>slow<|end|>")
    assert trained(made([FORMATS[name]], tokenizer, train_on="last"), tokenizer) == "slow<|end|>"
    assert made([FORMATS[name]], tokenizer, train_on="all").trained.sum() == len(tokens.ids) - 1


def test_alpaca_is_a_chat_and_has_a_template_with_its_headings(tokenizer, tiny):
    row = {"instruction": "Sort.", "input": "b a", "output": "a b", "system": "Be fast."}
    chat = made([row | {"system": ""}], tokenizer)
    assert tokenizer.decode(chat.ids) == "<|user|>Sort.\nb a<|end|><|assistant|>a b<|end|>"
    assert trained(chat, tokenizer) == "a b<|end|>"
    headed = load_tokenizer(TrainConfig(model=str(tiny / "model"), chat_template="alpaca"))
    text = made([row], headed, seq_len=256)
    expected = "Be fast.\n\n### Instruction:\nSort.\nb a\n\n### Response:\na b<|end|>\n\n"
    assert headed.decode(text.ids) == expected and trained(text, headed) == "a b<|end|>"


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "big", "completion": "4"}, {"as_chat": True}),
        ({"q": "big", "a": 4}, {"prompt_template": "{q}", "completion_template": "{a}", "as_chat": True}),
        ({"Q": "big", "A": 4}, {"columns": {"user": "Q", "assistant": "A"}}),
        ({"Q": "big", "A": "4", "C": None}, {"columns": {"user": ["Q", "C"], "assistant": "A"}}),
        (
            {"turns": [{"role": "user", "content": "big"}, {"from": "gpt", "value": "4"}]},
            {"columns": {"messages": "turns"}},
        ),
        (
            {"a": "4", "q": "", "more": "big", "rule": "fast", "before": [["the", "model"]]},
            {"columns": {"user": ["q", "more"], "assistant": "a", "system": "rule", "history": "before"}},
        ),
    ],
)
def test_tables_and_pairs_become_chats(tokenizer, row, options):
    tokens = made([row], tokenizer, **options)
    before = "<|system|>fast<|end|><|user|>the<|end|><|assistant|>model<|end|>" if "rule" in row else ""
    assert tokenizer.decode(tokens.ids) == before + "<|user|>big<|end|><|assistant|>4<|end|>"
    assert trained(tokens, tokenizer).endswith("4<|end|>")


def test_columns_and_as_chat_are_checked(tokenizer):
    for columns, message in (
        ({"user": "q"}, "name user and assistant, or messages"),
        ({"user": "q", "answer": "a"}, "name user and assistant"),
        ({"user": "q", "assistant": "b"}, "columns names the column b; the columns are q, a"),
        ({"user": "q", "assistant": ["a", "q"]}, "assistant must name one column"),
    ):
        with pytest.raises(ValueError, match=message):
            made([{"q": "big", "a": "small"}], tokenizer, columns=columns)
    with pytest.raises(ValueError, match="as_chat makes chats of prompts with completions, and the rows are text"):
        made([{"text": "big"}], tokenizer, as_chat=True)


def test_the_users_own_templates(tokenizer):
    rows = [{"question": "2+2", "answer": 4}]
    tokens = made(rows, tokenizer, prompt_template="Q: {question}\nA: ", completion_template="{answer} {{}}")
    assert tokenizer.decode(tokens.ids) == "Q: 2+2\nA: 4 {}<|end|>" and trained(tokens, tokenizer) == "4 {}<|end|>"
    text = made(rows, tokenizer, completion_template="{question} = {answer}")
    assert tokenizer.decode(text.ids) == "2+2 = 4<|end|>" and text.trained.all()
    for template, message in (
        ("{question", "expected '}'"),
        ("{question.x}", "names the column question.x"),
        ("{nothing}", "names the column nothing; the columns are question, answer"),
    ):
        with pytest.raises(ValueError, match=message):
            made(rows, tokenizer, completion_template=template)


def test_a_token_across_the_border_of_an_answer_is_cut_there_as_a_server_cuts_it(tokenizer):
    merges = with_template(
        tokenizer,
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt"
        " %}assistant: {% endif %}",
    )
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "model"}]
    tokens = made([{"messages": chat}], merges)
    prompt = merges.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = merges.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert whole[: len(prompt)] != prompt  # "assistant:", " model"
    assert tokens.ids[: len(prompt)].tolist() == prompt and trained(tokens, tokenizer) == "model<|end|>"


def test_a_marker_that_stands_for_the_white_space_after_it_is_no_token_across_the_border(tokenizer):
    """Those of Phi-3 do: a server's tokens of a chat have no line break between turns."""
    strips = with_template(
        tokenizer,
        "{% for m in messages %}<|the_{{ m['role'] }}|>\n{{ m['content'] }}<|stop|>\n{% endfor %}{% if"
        " add_generation_prompt %}<|the_assistant|>\n{% endif %}",
    )
    markers = ("<|the_user|>", "<|the_assistant|>", "<|stop|>")
    strips.add_tokens([AddedToken(marker, rstrip=True, special=True, normalized=False) for marker in markers])
    texts = zip(("user", "assistant") * 2, ("a", "b", "c", " d"), strict=True)
    chat = [{"role": role, "content": text} for role, text in texts]
    tokens = made([{"messages": chat}], strips)
    whole = strips.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert tokens.ids.tolist() == whole and trained(tokens, strips) == "b<|stop|>d<|stop|>"
    assert len(whole) == 3 * len(chat)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one turn') }}", "the chat template raised: only one turn"),
        ("{{ messages[0].nothing.more }}", "the chat template raised: .*has no attribute"),
        (
            "{% generation %}{% endgeneration %}{{ messages[0]['content'] }}",
            r"message 2 \(user\): the chat template does not render its content",
        ),
    ],
)
def test_a_template_that_raises_or_renders_nothing_names_the_row(tokenizer, template, message):
    with pytest.raises(UserError, match=f"rows.jsonl, line 1: {message}"):
        made([{"messages": CHAT}], with_template(tokenizer, template))


def test_a_template_that_does_not_end_names_the_row(tokenizer, monkeypatch):
    monkeypatch.setattr("dsft.errors.MOST_SECONDS", 0.3)
    template = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="rows.jsonl, line 1: the chat template takes more than 0.3 s"):
        made([{"messages": CHAT}], with_template(tokenizer, template))


def test_tokenizers_that_close_or_begin_each_text_do_so_once(tokenizer, tiny):
    from tokenizers import normalizers
    from tokenizers.processors import TemplateProcessing

    closes = copy.deepcopy(tokenizer)
    closes.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", closes.eos_token_id)]
    )
    begins = copy.deepcopy(tokenizer)
    begins.backend_tokenizer.normalizer = normalizers.Prepend("_")
    rows = [{"prompt": "big ", "completion": "small"}, {"prompt": "q<|end|>", "completion": "a"}]
    assert closes.decode(made([{"text": "a"}], closes).ids) == "a<|end|>"
    assert closes.decode(made(rows, closes).ids) == "big small<|end|>q<|end|>a<|end|>"
    assert begins.decode(made(rows[:1], begins).ids) == "_big small<|end|>"


def test_a_completion_that_begins_with_a_line_break_has_no_blank_before_it():
    """Also where two line breaks are one token: a completion is encoded after one."""
    pieces = Tokenizer(models.BPE())
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.train_from_iterator(["big\n\nsmall |"] * 9, trainers.BpeTrainer(special_tokens=["<s>", "<|end|>"]))
    sentencepiece = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", eos_token="<|end|>")
    assert sentencepiece.convert_ids_to_tokens(sentencepiece("\n\nb")["input_ids"])[1].startswith("\n\n")
    tokens = made([{"prompt": "big\n", "completion": "\nsmall"}], sentencepiece)
    assert "".join(sentencepiece.convert_ids_to_tokens(tokens.ids)) == "▁big\n\nsmall<|end|>"
    assert trained(tokens, sentencepiece).replace(" ", "") == "\nsmall<|end|>"


def test_tokens_stand_for_all_bytes_of_a_text(tokenizer):
    """Of byte-level pieces, and of SentencePiece's, which puts a blank before a text and cuts unknown characters up."""
    pieces = Tokenizer(models.BPE(byte_fallback=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(special_tokens=["<s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    pieces.train_from_iterator(sentences(50), trainer)
    sentencepiece = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>")
    assert "<0xC3>" in sentencepiece.convert_ids_to_tokens(sentencepiece("é")["input_ids"])
    for each, blank in ((tokenizer, 0), (sentencepiece, 1)):
        bytes_V, extra = bytes_of_tokens(each)
        assert extra == blank
        for text in ("the model reads é🙂\n and  writes", "a", " big"):
            assert bytes_V[each(text)["input_ids"]].sum() == len(text.encode()) + blank
    assert bytes_of_tokens(sentencepiece)[0][sentencepiece.bos_token_id] == 0


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x \ud83d"},
        {
            "messages": [
                CHAT[0],
                CHAT[3],
                {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": ["x \\ud83d"]}}'},
            ]
        },
    ],
)
def test_an_unpaired_surrogate_names_its_row(tokenizer, row):
    with pytest.raises(UserError, match="rows.jsonl, line 1: it contains an unpaired surrogate"):
        made([row], tokenizer)


LONG = [{"prompt": "the ", "completion": "model"}, {"prompt": "the ", "completion": "big small " * 30}]


@pytest.mark.parametrize(
    ("policy", "sequences", "counted"),
    [("truncate", 2, "truncated"), ("drop", 1, "dropped_long"), ("split", 5, "split")],
)
def test_too_long_pairs_follow_the_policy_and_are_counted(tokenizer, policy, sequences, counted):
    tokens = made(LONG, tokenizer, too_long=policy, seq_len=16)
    assert len(tokens.ends) == sequences and tokens.counts == {"rows": 2, counted: 1}
    assert np.diff([0, *tokens.ends]).max() <= 16
    if policy == "split":
        complete = made(LONG, tokenizer, seq_len=999)
        assert tokens.ids.tolist() == complete.ids.tolist()
        lost = complete.trained & ~tokens.trained
        assert np.flatnonzero(lost).tolist() == [
            end for end in tokens.ends[1:-1]
        ]  # of each piece the first: nothing stands before it


def test_too_long_can_be_an_error_and_what_teaches_nothing_is_counted(tokenizer):
    with pytest.raises(UserError, match="rows.jsonl, line 2: .* tokens are longer than seq_len=16"):
        made(LONG, tokenizer, too_long="error", seq_len=16)
    untrained = [{"prompt": "big small " * 30, "completion": "the"}]
    assert made(untrained, tokenizer, seq_len=16).counts == {"rows": 1, "dropped_long": 1}  # by default
    tokens = made(untrained, tokenizer, too_long="truncate", seq_len=16)
    assert tokens.counts == {"rows": 1, "truncated": 1, "dropped_untrained": 1} and not len(tokens.ids)


@pytest.mark.parametrize(("policy", "counted"), [("drop", "dropped_long")])
def test_a_chat_of_several_sequences_that_are_too_long_is_one_row(tokenizer, policy, counted):
    """Of which the template renders the reasoning of the last answer alone."""
    template = (
        "{% for m in messages %}{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        f"{{% endif %}}{{{{ m.content }}}}{tokenizer.eos_token}{{% endfor %}}"
    )
    ask, answer = {"role": "user", "content": "the"}, {"role": "assistant", "content": "big " * 30}
    chat = {"messages": [ask, answer | {"reasoning_content": "slow"}] * 3}
    counts = made([chat], with_template(tokenizer, template), too_long=policy, seq_len=16).counts
    assert (counts["rows"], counts["rendered_apart"], counts[counted]) == (1, 2, 1)


GOOD = {"messages": CHAT}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"messages": None}], "messages must be a list"),
        (
            [GOOD, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}],
            r"message 1 \(user\) contains a part of type 'image_url'; only text can be trained",
        ),
        (
            [GOOD, {"messages": [{"role": "robot", "content": "a"}]}],
            "message 1 has the role 'robot'; the roles are system",
        ),
        (
            [GOOD, {"messages": [CHAT[1], CHAT[1], CHAT[2]]}],
            r"message 2 \(user\) follows a message of the user: two messages of one role in a row; join them",
        ),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 3}],
            "column 'completion' must contain text; it contains int",
        ),
        ([{"text": "a"}, {"text": None}], "column 'text' is null"),
        ([{"instruction": "a", "output": "b"}, {"instruction": "", "output": "b"}], "column 'instruction' is empty"),
        (
            [FORMATS["prompt_completion"], {"prompt": "a", "completion": "b"}],
            "prompt and completion must be lists of messages, as in the rows before",
        ),
    ],
)
def test_a_bad_row_is_an_error_with_its_line_or_is_counted(tokenizer, rows, message):
    with pytest.raises(UserError, match=f"rows.jsonl, line 2: {message}.*bad_rows: drop"):
        made(rows, tokenizer)
    tokens = made(rows, tokenizer, bad_rows="drop")
    assert (
        tokens.counts == {"rows": 2, "dropped_bad": 1}
        and len(tokens.ends) == 1
        and "line 2" in tokens.first["dropped_bad"]
    )


def test_empty_answers_are_left_out_and_counted(tokenizer):
    assert made([LONG[0], {"prompt": "a", "completion": " "}], tokenizer).counts == {"rows": 2, "dropped_empty": 1}
    assert made(
        [GOOD, {"messages": [CHAT[1], {"role": "assistant", "content": ""}]}, {"messages": [CHAT[1]]}], tokenizer
    ).counts == {"rows": 3, "dropped_empty": 2}


def test_for_evaluation_every_row_has_a_place(tokenizer):
    rows = [LONG[0], {"prompt": "a", "completion": ""}, LONG[1], LONG[0]]
    tokens = made(rows, tokenizer, too_long="drop", seq_len=16)
    counts = np.diff(tokens.row_ends, prepend=0)
    assert len(counts) == 4 and counts[1] == counts[2] == 0 and counts[0] == counts[3] > 0


def test_a_template_in_a_json_file_is_the_text_of_its_key(tmp_path):
    """chat_template.json of LLaVA is valid Jinja as it stands, and would render its own braces too."""
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    path = tmp_path / "chat_template.json"
    for content in ({"chat_template": text}, {"other": text}, [text]):
        path.write_text(json.dumps(content))
        if "chat_template" in content:
            assert load_template(str(path)) == text
        else:
            with pytest.raises(ValueError, match="chat_template.json contains no text under the key chat_template"):
                load_template(str(path))


def test_a_text_rendered_before_gets_no_second_bos_and_end_token(tokenizer):
    begins = copy.deepcopy(tokenizer)
    begins.bos_token = "<|user|>"
    special = [("<|user|>", begins.bos_token_id)]
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=special
    )
    for text in ("big", "<|user|>big", "<|user|>big<|end|>", "big<|end|>"):
        assert begins.decode(made([{"text": text}], begins).ids) == "<|user|>big<|end|>"
    assert begins.decode(made([{"text": "big<|end|>\n"}], begins).ids) == "<|user|>big<|end|>\n"
    for text in (" <|user|>big<|end|>", "\n<|user|>big<|end|>"):
        assert begins.decode(made([{"text": text}], begins).ids) == text, "a blank before it"
    assert begins.decode(made([{"text": "a<|user|>big"}], begins).ids) == "<|user|>a<|user|>big<|end|>"
    pair = {"prompt": "<|user|>big ", "completion": "small<|end|>"}
    assert begins.decode(made([pair], begins).ids) == "<|user|>big small<|end|>"


def test_a_history_that_is_not_named_is_not_in_the_prompt(tokenizer):
    row = {"q": "big", "a": "small", "history": [["red", "blue"]]}
    columns = {"user": "q", "assistant": "a"}
    dropped = made([row], tokenizer, columns=columns, drop_keys=["history"])
    assert dropped.ids.tolist() == made([{"q": "big", "a": "small"}], tokenizer, columns=columns).ids.tolist()
    assert len(made([row], tokenizer, columns=columns | {"history": "history"}).ids) > len(dropped.ids)
