"""Tokens prepared once: the same whoever prepares them, kept under a fingerprint, never broken, within little memory;
and what is read from them.
"""

import copy
import dataclasses
import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import on_ranks, run_entry
from tiny import sentences, write_jsonl, write_texts
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm

from dsft.cli import data as data_command
from dsft.cli.commands import PreviewOptions
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data import tokens as preparing
from dsft.data.formats import FormatRules, FormattedSource, format_rules
from dsft.data.sources import HeldOut, Row, find_sources
from dsft.data.tokens import Tokens, fingerprint, prepare, write_store
from dsft.data.training_data import check_sources, load_training_data
from dsft.errors import UserError
from dsft.models.tokenizer import load_tokenizer
from dsft.perplexity.documents import build_windows
from dsft.runtime import distributed
from dsft.units import IGNORED


def rules_of(*columns: str, **options) -> FormatRules:
    return format_rules([Row(dict.fromkeys(columns, "a"), 1)], TrainConfig(**options))


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(TrainConfig(model=str(tiny / "chat")))


@pytest.fixture
def config(tmp_path):
    def make(*, seed: int = 42, **changes) -> TrainConfig:
        made = TrainConfig(**{"seq_len": 32, "data_cache": str(tmp_path / "cache"), "model": "unused"} | changes)
        made.training["seed"] = seed
        return made

    return make


def formatted(path, rules: FormatRules, held_out: HeldOut | None = None) -> FormattedSource:
    (source,) = find_sources([str(path)], TrainConfig(), key="data", problems=[])
    return FormattedSource(source=source, rules=rules, held_out=held_out)


def loaded(config: TrainConfig, tokenizer, *, pack: bool = False):
    problems: list[str] = []
    data, held_out = (
        check_sources(entries, config, tokenizer, key=key, problems=problems)
        for key, entries in (("data", config.data), ("eval_data", config.eval_data))
    )
    if problems:
        raise UserError(problems)
    return load_training_data(dataclasses.replace(config, packing=pack), data, held_out, tokenizer)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.name != "facts.json"}


def test_many_processes_prepare_what_one_does(tiny, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(TrainConfig(model=str(tiny / "chat")))
    rules = rules_of("messages", seq_len=32, too_long="split")
    question = {"role": "user", "content": "the"}
    chats = [{"messages": [question, {"role": "assistant", "content": text * 3}]} for text in sentences(3000)]
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    alone = prepare(formatted(path, rules), tokenizer, tmp_path / "one", show_progress=False)
    monkeypatch.setattr(preparing, "WORKERS_FROM_BYTES", 0)
    monkeypatch.setattr(preparing, "cpu_count", lambda: 2)
    random_state = torch.get_rng_state()
    shared = prepare(formatted(path, rules), tokenizer, tmp_path / "two", show_progress=False)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert content(alone.folder) == content(shared.folder) and alone.counts == shared.counts
    assert alone.folder.name == shared.folder.name
    assert alone.counts["rows"] == 3000 and alone.counts["split"] > 0 and alone.tokens.dtype == np.uint16
    write_jsonl(path, [*chats, {"messages": [question, {"role": "assistant", "content": 5}]}])
    with pytest.raises(UserError, match=r"chats.jsonl, line 3001: message 2 \(assistant\) must contain text.*int"):
        prepare(formatted(path, rules), tokenizer, tmp_path / "two", show_progress=False)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(preparing, "tokenise_samples", die)
    with pytest.raises(UserError, match="a process that tokenised ended .*; was it out of memory"):
        prepare(formatted(path, rules), tokenizer, tmp_path / "three", show_progress=False)
    assert not list((tmp_path / "three").glob("*.partial"))


def test_a_fingerprint_changes_with_all_that_decides_the_tokens(tiny, tokenizer, tmp_path, monkeypatch):
    path = write_texts(tmp_path / "texts.jsonl", 5)
    rules = rules_of("messages")
    first = fingerprint(formatted(path, rules), tokenizer)
    assert fingerprint(formatted(path, rules), load_tokenizer(TrainConfig(model=str(tiny / "chat")))) == first
    others = {
        fingerprint(formatted(path, rules_of("messages", **change)), tokenizer)
        for change in ({"seq_len": 8}, {"train_on": "last"}, {"too_long": "split"}, {"bad_rows": "drop"})
    }
    others.add(fingerprint(formatted(path, rules, HeldOut(fraction=0.1, seed=1, wanted=True)), tokenizer))
    others.add(
        fingerprint(
            formatted(path, rules), load_tokenizer(TrainConfig(model=str(tiny / "chat"), chat_template="chatml"))
        )
    )
    split = load_tokenizer(TrainConfig(model=str(tiny / "chat")))
    split.split_special_tokens = True  # as tokenizer_config.json may have it, and tokenizer.json has not
    others.add(fingerprint(formatted(path, rules), split))
    for special in (True, False):  # of a tokenizer in Python, which has no file of all that it does
        slow = copy.deepcopy(tokenizer)
        slow.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|user|> $A" if special else "$A",
            special_tokens=[("<|user|>", tokenizer.convert_tokens_to_ids("<|user|>"))],
        )
        with monkeypatch.context() as patched:
            patched.setattr(type(slow), "is_fast", False)
            others.add(fingerprint(formatted(path, rules), slow))
    path.write_text(path.read_text().replace("the", "THE"))
    others.add(fingerprint(formatted(path, rules), tokenizer))
    assert len(others | {first}) == 11
    texts = [fingerprint(formatted(path, rules_of("text", seq_len=length)), tokenizer) for length in (8, 16)]
    assert texts[0] == texts[1]  # windows are cut when they are read


def _errors_of_preparing(paths: list[str], cache: str, model: str) -> list[str]:
    tokenizer, errors = load_tokenizer(TrainConfig(model=model)), []
    for path in paths:
        try:
            prepare(formatted(path, rules_of("text", seq_len=32)), tokenizer, Path(cache), show_progress=False)
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


def test_of_many_ranks_one_prepares_and_all_say_what_is_wrong(tiny, tmp_path):
    good = write_texts(tmp_path / "good.jsonl", 1000)
    bad, cache = tmp_path / "bad.jsonl", tmp_path / "cache"
    bad.write_text(good.read_text() + "{\n")
    for fine, wrong in on_ranks(3, _errors_of_preparing, [str(good), str(bad)], str(cache), str(tiny / "model")):
        assert not fine and "bad.jsonl, line 1001: not valid JSON" in wrong, (fine, wrong)
    assert [path.name for path in cache.glob("*.partial")] == []
    assert len([folder for folder in cache.iterdir() if folder.is_dir()]) == 1


PREPARES_WITH_WORKERS = """
import sys
from dsft.cli.main import main
from dsft.data import tokens as prepare
prepare.WORKERS_FROM_BYTES, prepare.cpu_count = 0, lambda: 2
main(sys.argv[1:])
"""


@pytest.mark.launch
@pytest.mark.parametrize("moments", [[1 << 15], pytest.param([0, 1 << 16], marks=pytest.mark.exhaustive)], ids=len)
def test_a_killed_preparation_leaves_nothing_broken_and_no_process(tiny, tmp_path, moments):
    """Killed at some moments; the workers end too. Then it is done from the beginning, and a second time it is there
    already.
    """
    path = write_jsonl(
        tmp_path / "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
            for text in sentences(4_000, longest=50)
        ],
    )
    words = ["prepare", "--tokenizer", tiny / "chat", "--data", path, "--data_cache", tmp_path / "cache"]

    def written() -> int:
        return max((path.stat().st_size for path in (tmp_path / "cache").glob("*.partial/tokens.bin")), default=-1)

    for least in moments:
        process = subprocess.Popen(
            [sys.executable, "-c", PREPARES_WITH_WORKERS, *map(str, words)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 600
        while written() < least:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.005)
        assert least == 0 or len(_group(process.pid)) > 2, "no workers"
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished = {path.parent.suffix for path in (tmp_path / "cache").glob("*/facts.json")}
        assert finished <= {".partial"}  # it may just have been written, and is not in its place
        while _group(process.pid):
            assert time.monotonic() < until, "workers of a killed preparation live on"
            time.sleep(0.1)
    first = run_entry("dsft.cli.main", words)
    written_at = [path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/facts.json")]
    second = run_entry("dsft.cli.main", words)
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout and "4,000 rows" in first.stdout
    assert "\r" not in first.stdout + first.stderr, "no bar where there is no terminal"
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/facts.json")] == written_at != []
    assert not list((tmp_path / "cache").glob("*.partial"))


def _group(leader: int) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "pgid=,pid=,stat="], capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if line.split()[0] == str(leader) and not line.split()[2].startswith("Z")]


def test_held_out_rows_are_a_seeded_share_and_none_is_in_both(tokenizer, tmp_path, config):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i} ", "completion": "x"} for i in range(1000)])
    data = loaded(config(data=[str(path)], eval_fraction=0.07), tokenizer)
    texts = [{tokenizer.decode(item[0]["input_ids"]) for item in part} for part in (data.items, data.held_out)]
    assert len(texts[0]) + len(texts[1]) == 1000 and not texts[0] & texts[1] and 65 <= len(texts[1]) <= 75
    other = loaded(config(data=[str(path)], eval_fraction=0.07, seed=7), tokenizer)
    assert {tokenizer.decode(item[0]["input_ids"]) for item in other.held_out} != texts[1]
    with pytest.raises(UserError, match="eval_fraction=0.0001 of the data is less than one row"):
        loaded(config(data=[str(path)], eval_fraction=0.0001, seed=0), tokenizer)
    for fraction in (0.001, 0.5, 0.9):
        held_out = HeldOut(fraction=fraction, seed=1, wanted=True)
        assert sum(map(held_out.is_held_out, range(3000))) == pytest.approx(3000 * fraction, abs=1)


def test_a_text_file_is_one_document_and_its_end_is_held_out(tokenizer, tmp_path, config):
    text = "\n\n \n".join(sentences(3000))
    (tmp_path / "a.txt").write_text(text)
    whole = loaded(config(data=[str(tmp_path / "a.txt")]), tokenizer).items.stores[0]
    assert whole.tokens.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    data = loaded(config(data=[str(tmp_path / "a.txt")], eval_fraction=0.1), tokenizer)
    parts = [
        tokenizer.decode(items.stores[0].tokens, skip_special_tokens=True) for items in (data.items, data.held_out)
    ]
    assert "".join(parts) == text and len(parts[1]) == pytest.approx(0.1 * len(text), rel=0.01)
    assert data.items.stores[0].tokens.tolist().count(tokenizer.eos_token_id) == 1


def test_data_that_differ_in_any_token_are_other_data(tokenizer, tmp_path, config):
    """A resume and the agreement of nodes go by it; a changed answer has the length of the first."""
    rows = [{"prompt": f"{i} ", "completion": "big"} for i in range(5000)]
    first, again = (
        loaded(config(data=[str(write_jsonl(tmp_path / f"{name}.jsonl", rows))]), tokenizer).items.identity
        for name in "ab"
    )
    rows[4321]["completion"] = "the"
    changed = loaded(config(data=[str(write_jsonl(tmp_path / "c.jsonl", rows))]), tokenizer).items
    assert first == again != changed.identity and len(changed) == 5000


def test_windows_of_text_are_those_of_the_evaluator(tokenizer, tmp_path, config):
    """Over the full corpus, not over batches of documents."""

    path = write_texts(tmp_path / "texts.jsonl", 2500)
    data = loaded(config(data=[str(path)]), tokenizer)
    problems: list[str] = []
    evaluated = EvalConfig(data=[str(path)], seq_len=32, model=["unused"])
    windows = build_windows(
        check_sources([str(path)], evaluated, tokenizer, key="data", problems=problems)[0],
        evaluated,
        tokenizer,
    )
    assert len(data.items) == len(windows.spans) and data.items.lengths[:-1].tolist() == [32] * (len(data.items) - 1)
    assert np.array_equal(np.concatenate([item[0]["input_ids"] for item in data.items]), windows.tokens)
    assert data.counts["trained_tokens"] == sum(int((item[0]["labels"] != IGNORED).sum()) for item in data.items)


def test_an_empty_text_is_left_out_by_a_training_and_by_its_evaluation(tokenizer, tmp_path, config):
    """Also where the tokenizer begins each text with a token of its own, which was scored then."""
    begins = copy.deepcopy(tokenizer)
    begins.bos_token = "<|user|>"
    special = [("<|user|>", begins.bos_token_id)]
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=special)
    path = str(write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in ("a step", "", "big")]))
    (store,) = loaded(config(data=[path]), begins).items.stores
    options = EvalConfig(data=[path], seq_len=32, model=["unused"], data_cache=str(tmp_path / "cache"))
    windows = build_windows(check_sources([path], options, begins, key="data", problems=[])[0], options, begins)
    assert windows.tokens.tolist() == store.tokens.tolist() and len(windows.document_ends) == 3
    assert store.tokens.tolist().count(begins.bos_token_id) == 2


def _waits(path: str, cache: str, model: str, seconds: float) -> int:
    """As a rank on a node of its own, with a process group that allows its collectives 5 seconds."""
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    time.sleep(seconds * dist.get_rank())
    options = TrainConfig(data=[path], seq_len=32, data_cache=f"{cache}-{dist.get_rank()}", tokenizer=model)
    return len(loaded(options, load_tokenizer(options)).items)


def test_a_node_that_prepares_longer_than_a_collective_may_take_is_waited_for(tiny, tmp_path):
    path = str(write_texts(tmp_path / "a.jsonl", 50))
    lengths = on_ranks(2, _waits, path, str(tmp_path / "cache"), str(tiny / "model"), 6.0)
    assert lengths[0] == lengths[1] > 0


def _problems_of_nodes(folder: str, model: str) -> list[str]:
    """As on a node with files of its own: what is trained is another there, what is held out, and nothing."""
    os.chdir(Path(folder, f"node-{distributed.rank()}"))
    problems, common = [], TrainConfig(seq_len=32, tokenizer=model, data_cache="cache")
    for data, held_out in (("a.jsonl", []), ("same.jsonl", ["a.jsonl"]), ("same.jsonl", ["same.jsonl"])):
        options = dataclasses.replace(common, data=[data], eval_data=held_out)
        try:
            loaded(options, load_tokenizer(options))
            problems.append("")
        except UserError as error:
            problems += error.problems
    return problems


def test_nodes_that_train_other_files_or_hold_out_others_are_told(tiny, tmp_path):
    for node, number in (("node-0", 9), ("node-1", 8)):
        (tmp_path / node).mkdir()
        write_texts(tmp_path / node / "a.jsonl", number)
        write_texts(tmp_path / node / "same.jsonl", 9)
    first, second = on_ranks(2, _problems_of_nodes, str(tmp_path), str(tiny / "model"))
    named = [problem.partition(" differs ")[0] for problem in first]
    assert first == second and named == ["content of data", "content of data", ""]


def test_sources_may_have_different_formats_and_rows_of_one_may_not(tokenizer, tmp_path, config):
    write_texts(tmp_path / "a.jsonl", 5)
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a ", "completion": "b"}, {"prompt": "a "}])
    with pytest.raises(UserError, match="b.jsonl, line 2: column 'completion' is missing"):
        loaded(config(data=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]), tokenizer)
    data = loaded(config(data=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], bad_rows="drop"), tokenizer)
    assert data.counts["rows"] == 7 and data.counts["dropped_bad"] == 1 and "line 2" in data.notes[-1]


def test_a_text_file_goes_with_rows_whose_text_has_another_name(tokenizer, tmp_path, config):
    """Trained and evaluated: the text is longer than a piece, so it comes in several."""
    (tmp_path / "both").mkdir()
    text = "the model\n" * 4000
    (tmp_path / "both" / "a.txt").write_text(text)
    write_jsonl(tmp_path / "both" / "b.jsonl", [{"content": "big"}])
    made = config(data=[str(tmp_path / "both")], text_column="content")
    counts = loaded(made, tokenizer).counts
    assert counts["tokens"] == len(tokenizer(text)["input_ids"]) + len(tokenizer("big")["input_ids"]) + 2
    problems: list[str] = []
    options = EvalConfig(model="m", data=made.data, text_column="content", mode="rolling", data_cache=made.data_cache)
    (data,) = check_sources(options.data, options, tokenizer, key="data", problems=problems)
    assert problems == [] and build_windows(data, options, tokenizer).document_bytes.tolist() == [len(text), 3]


def test_data_that_is_all_prompt_is_an_error(tokenizer, tmp_path, config):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a long prompt " * 20, "completion": "b"}])
    with pytest.raises(UserError, match="a.jsonl: no trainable tokens in 1 rows .*1 dropped long"):
        loaded(config(data=[str(tmp_path / "a.jsonl")]), tokenizer)


def test_data_sets_of_the_hub(tokenizer, tmp_path, config, monkeypatch):
    """By name, configuration and slice; and one that is not there."""

    def load(name: str, part: str | None, split: str) -> datasets.Dataset:
        if name != "ns/name":
            raise FileNotFoundError(f"no data set {name}")
        return datasets.Dataset.from_list([{"text": f"{part} {split}"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load)
    entries = {"data": ["ns/name:small:train[:50%]"], "eval_data": ["ns/name"]}
    data = loaded(config(**entries, data_name="other"), tokenizer)
    texts = [tokenizer.decode(part.stores[0].tokens[:-1]) for part in (data.items, data.held_out)]
    assert ["small train[:50%]" in texts[0], "other validation" in texts[1]] == [True, True]
    with pytest.raises(UserError, match="ns/nothing is neither a file .*: FileNotFoundError: no data set"):
        loaded(config(data=["ns/nothing"]), tokenizer)


def test_preview_shows_what_is_trained_and_why_rows_are_left_out(tiny, tmp_path, capsys):
    rows = [{"prompt": "the ", "completion": "model"}] * 2 + [{"prompt": "a ", "completion": ""}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ["--model", tiny / "model", "--data", path, "--seq_len", 32, "--data_cache", tmp_path / "cache"]
    options = [str(option) for option in options]
    data_command.run(PreviewOptions(samples=1), options)
    shown = capsys.readouterr().out
    assert "sequence 1: 4 tokens, 2 trained\nthe ⟦model<|end|>⟧" in shown
    assert "rows.jsonl (prompt_completion): 3 rows" in shown and "trained fraction: 50.0%" in shown
    assert f"1 dropped empty, the first: {path}, line 3: the completion is empty" in shown
    data_command.run(PreviewOptions(samples=1), [*options, "--packing"])
    assert "tokens of 2 samples" in capsys.readouterr().out


def tokens_of(*samples: list[int], **counts: int) -> Tokens:
    ids = np.array([token for sample in samples for token in sample], np.int64)
    return Tokens(
        ids=ids,
        weights=(ids % 2 == 0).astype(np.float32),
        ends=np.cumsum([len(sample) for sample in samples], dtype=np.int64),
        row_ends=np.zeros(0, np.int64),
        counts=Counter(counts),
    )


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, "uint16"), (65_536, "int32")])
def test_every_id_of_a_vocabulary_is_kept_in_the_smallest_type(tmp_path, largest, dtype):
    parts = [tokens_of([0, largest], [largest - 1]), tokens_of([1, 2, largest])]
    store = write_store(tmp_path / "store", parts, source="here", is_text=False, largest_id=largest)
    assert store.tokens.dtype == dtype and store.tokens.tolist() == [0, largest, largest - 1, 1, 2, largest]
    assert store.ends.tolist() == [2, 3, 6] and store.trained.tolist() == [token % 2 == 0 for token in store.tokens]
    assert store.counts["tokens"] == 6 and store.counts["trained_tokens"] == int(store.trained.sum())
    assert [path.name for path in tmp_path.iterdir()] == ["store"] and not store.is_text


def test_weights_are_read_where_any_is_other_than_0_and_1(tmp_path):
    for first, expected in ((0.5, [0.5, 0, 0, 1]), (1, None)):
        weighted = dataclasses.replace(tokens_of([6, 7]), weights=np.array([first, 0], np.float32))
        parts = [weighted, tokens_of([3, 8])]
        place = tmp_path / f"{first}"
        store = write_store(place, parts, source="here", is_text=False, largest_id=9, has_weights=True)
        assert (None if store.weights is None else store.weights.tolist()) == expected


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tokenizer, tmp_path, config, monkeypatch):
    """Files of more than 64 KiB cannot be written: a real error of the system, in the middle of writing."""
    path = write_texts(tmp_path / "a.jsonl", 5000)
    bar = tqdm(file=io.StringIO())
    monkeypatch.setattr(preparing, "progress_bar", lambda **_: bar)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(UserError, match="data_cache: .*; free some space or name another folder") as full:
            loaded(config(data=[str(path)]), tokenizer)
        assert bar.disable, f"on the line of an open bar: {full.value}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]
    assert loaded(config(data=[str(path)]), tokenizer).counts["rows"] == 5000
