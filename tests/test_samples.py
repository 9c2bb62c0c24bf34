import pytest
from datasets import Dataset

from dsft.config import TrainConfig
from dsft.model import load_tokenizer
from dsft.problems import UserError
from dsft.samples import IGNORED, Collator, build_samples, find_format


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(TrainConfig(model=str(tiny / "chat")))


def config(**changes) -> TrainConfig:
    return TrainConfig(**({"seq_len": 16} | changes))


def samples_of(rows: list[dict], tokenizer, **changes):
    return build_samples(Dataset.from_list(rows), config(**changes), tokenizer, key="data")


def test_text_is_laid_end_to_end_without_losing_a_token(tokenizer):
    texts = ["the model reads and writes", "", "big small " * 20, "loss"]
    samples = samples_of([{"text": text} for text in texts], tokenizer)
    expected = [token for text in texts if text for token in tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]]
    assert [token for window in samples.sequences["input_ids"] for token in window] == expected
    assert [len(window) for window in samples.sequences["input_ids"][:-1]] == [16] * (len(samples.sequences) - 1)
    assert samples.counts["tokens"] == len(expected)


def test_only_completion_and_end_token_are_trained(tokenizer):
    samples = samples_of([{"prompt": "the model: ", "completion": "reads"}], tokenizer)
    row = samples.sequences[0]
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert trained == tokenizer("reads")["input_ids"] + [tokenizer.eos_token_id]
    assert tokenizer.decode(row["input_ids"][: -len(trained)]) == "the model: "


def test_only_assistant_turns_of_a_chat_are_trained(tokenizer):
    messages = [{"role": "user", "content": "big"}, {"role": "assistant", "content": "small"}, {"role": "user", "content": "fast"}, {"role": "assistant", "content": "slow"}]
    row = samples_of([{"messages": messages}], tokenizer, seq_len=64).sequences[0]
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert tokenizer.decode(trained) == "small<|end|>slow<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tiny):
    import copy

    odd = copy.deepcopy(tokenizer)
    odd.chat_template = "{{ messages | length }}" + odd.chat_template
    rows = [{"messages": [{"role": "user", "content": "big"}, {"role": "assistant", "content": "small"}, {"role": "user", "content": "a"}]}]
    with pytest.raises(UserError, match="differently as it grows"):
        samples_of(rows, odd, seq_len=64)


@pytest.mark.parametrize(("policy", "sequences", "truncated", "dropped"), [("truncate", 2, 1, 0), ("drop", 1, 0, 1)])
def test_too_long_pairs_follow_the_policy_and_are_counted(tokenizer, policy, sequences, truncated, dropped):
    rows = [{"prompt": "the ", "completion": "model"}, {"prompt": "the ", "completion": "big small " * 30}]
    counts = samples_of(rows, tokenizer, too_long=policy).counts
    assert (counts["sequences"], counts["truncated"], counts["dropped"]) == (sequences, truncated, dropped)


def test_too_long_can_be_an_error_and_nothing_to_train_on_always_is(tokenizer):
    rows = [{"prompt": "the ", "completion": "big small " * 30}]
    with pytest.raises(UserError, match="row 1 .* longer than seq_len=16"):
        samples_of(rows, tokenizer, too_long="error")
    with pytest.raises(UserError, match="no token to train on"):
        samples_of([{"prompt": "big small " * 30, "completion": "the"}], tokenizer)


def test_a_bad_chat_names_its_row(tokenizer):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for bad in ({"messages": None}, {"messages": [{"role": "user", "content": None}]}):
        with pytest.raises(UserError, match="data: row 2 cannot be used: messages must be"):
            samples_of([good, bad], tokenizer, seq_len=64)


def test_files_read_together_need_only_agree_in_the_columns_that_are_read(tmp_path):
    from dsft.text_data import read_rows
    from tiny import write_jsonl

    files = [str(write_jsonl(tmp_path / name, [row])) for name, row in (("a.jsonl", {"id": 1, "text": "x"}), ("b.jsonl", {"text": "y", "id": "one"}), ("c.jsonl", {"id": 3}))]
    assert read_rows(files[:2], config(), key="data", split="train")["text"][:] == ["x", "y"]
    with pytest.raises(UserError, match="c.jsonl lacks the column text"):
        read_rows([files[0], files[2]], config(), key="data", split="train")


def test_missing_columns_list_those_present():
    rows = Dataset.from_list([{"body": "x", "title": "y"}])
    with pytest.raises(UserError, match="body, title"):
        find_format(rows, config(), key="data")
    with pytest.raises(UserError, match="completion, prompt; there are body, title"):
        find_format(rows, config(data_format="prompt_completion"), key="data")
    assert find_format(rows, config(text_column="body"), key="data") == "text"


def test_padding_is_masked_and_unlabelled():
    batch = Collator(pad_token_id=7)([{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4], "labels": [4]}])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [3, 1]
    assert batch["input_ids"][1].tolist() == [4] + [7] * 7
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [2, 1]
