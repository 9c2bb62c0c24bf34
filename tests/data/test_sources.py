"""Every format of files gives the same rows, and what is wrong with a file is said with its line."""

import bz2
import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from dsft.config.options import TrainConfig
from dsft.data.sources import HeldOut, batched, find_sources, read_file
from dsft.errors import UserError


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda text: pyarrow.compress(text, "zstd", asbytes=True),
}
ROWS = [{"prompt": "what is ä?", "completion": 'a\nline, "quoted"'}, {"prompt": "", "completion": "b"}]


def jsonl(rows: list) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(folder, name: str) -> str:
    """ROWS as the file `name`."""
    path = folder / name
    inner = path.with_suffix("") if path.suffix in COMPRESS else path
    if inner.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), inner)
    elif inner.suffix == ".arrow":
        datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
        inner.write_bytes(next((folder / "saved").glob("*.arrow")).read_bytes())
    elif inner.suffix == ".csv":
        inner.write_text(
            'prompt,completion\r\nwhat is ä?,"a\nline, ""quoted"""\r\n,b\r\n', encoding="utf-8", newline=""
        )
    elif inner.suffix == ".json":
        inner.write_text(json.dumps(ROWS, indent=1))
    else:
        inner.write_bytes(b"\n" + jsonl(ROWS))
    if path != inner:
        content = inner.read_bytes()
        inner.unlink()
        path.write_bytes(COMPRESS[path.suffix](content))
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.json",
        "lines.json.gz",
        "a.csv",
        "a.parquet",
        "a.arrow",
        "a.jsonl.gz",
        "a.csv.zst",
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    assert [row.values for row in read_file(write(tmp_path, name))] == ROWS


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_large_compressed_file_is_read_whole_and_told_where_it_is_cut(tmp_path, ending):
    """A zstd frame of several blocks, cut between two of them, is 262,144 whole characters to zstandard's reader."""
    path, text = tmp_path / f"a.txt{ending}", "".join(f"{i * i}\n" for i in range(60_000))
    content = COMPRESS[ending](text.encode())
    path.write_bytes(content)
    assert "".join(row.values["text"] for row in read_file(str(path))) == text
    for eighth in range(1, 8):
        path.write_bytes(content[: len(content) * eighth // 8])
        with pytest.raises(UserError, match=f"a.txt{ending} cannot be read as txt: .*(ended before|Truncated)"):
            list(read_file(str(path)))


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (
        ("a.txt", "the model"),
        ("a.jsonl", '{"text": "the model"}'),
        ("a.csv", "text\nthe model\n"),
        ("a.json", '[{"text": "the model"}]'),
    ):
        (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8")
        assert [row.values["text"] for row in read_file(str(tmp_path / name))] == ["the model"]


def test_batches_are_bounded_by_their_size_in_every_format(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [[{"role": "user", "content": "x" * 100_000}]] * 50}), tmp_path / "a.parquet"
    )
    source = find_sources([str(tmp_path / "a.parquet")], TrainConfig(), key="data", problems=[])[0]
    assert [len(batch.rows) for batch in batched(source.rows())] == [11, 11, 11, 11, 6]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3: not valid JSON (Expecting value: line 1 column"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not valid UTF-8 ('utf-8' codec"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: expected a JSON object, got list"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not valid JSON (maximum recursion depth"),
        ("a.json", b'[{"a": 1},\n{"a": }]', "a.json cannot be read as json: Expecting value: line 2"),
        ("a.json", b'[{"a": 1}, 2]', "a.json, row 2: expected a JSON object, got int"),
        ("a.csv", b"text,text\na,b\n", "a.csv, line 1: two columns have the same name (text, text)"),
        ("a.csv", b"text,id\na,1\nb,2,3\n", "a.csv, line 3: not one value for each column (text, id)"),
        ("a.csv", b'text\n"a" b\n', "a.csv cannot be read as csv"),
        ("a.txt", b"one\ntwo \xff\n", "a.txt cannot be read as txt: 'utf-8' codec"),
        ("a.txt", b"", "a.txt is empty"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read as parquet"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:40], "a.jsonl.gz cannot be read as jsonl"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        list(read_file(str(tmp_path / name)))
    assert message in str(raised.value)


def test_a_packed_file_in_a_folder_is_refused_and_not_left_out(tmp_path):
    for name in ("a.jsonl", "b.jsonl.xz"):
        (tmp_path / name).write_text("{}")
    problems: list[str] = []
    find_sources([str(tmp_path)], TrainConfig(), key="data", problems=problems)
    assert "b.jsonl.xz has none of the endings" in problems[0]


def test_folders_globs_and_names_on_the_hub(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz", "notes.md", "._a.jsonl", "state.json", "dataset_info.json"):
        (tmp_path / name).write_bytes(gzip.compress(b"{}") if name.endswith("gz") else b"{}")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")]

    def find_files(entry: Path) -> list[str]:
        (source,) = find_sources([str(entry)], TrainConfig(), key="data", problems=[])
        return [*source.files]

    assert find_files(tmp_path) == files and find_files(tmp_path / "*.jsonl*") == files
    (tmp_path / "below" / "deep").mkdir(parents=True)
    (tmp_path / "below" / "deep" / "d.jsonl").write_text("{}")
    assert find_files(tmp_path / "**" / "*.jsonl") == [*files[:2], str(tmp_path / "below/deep/d.jsonl")]
    problems: list[str] = []
    config = TrainConfig(data_name="small")
    sources = find_sources(
        [
            "owner/name",
            "name:config",
            "owner/name:config:train[:5%]",
            str(tmp_path / "none.jsonl"),
            "some/where/else",
            str(tmp_path / "notes.md"),
        ],
        config,
        key="data",
        problems=problems,
    )
    assert [source.hub for source in sources] == [
        ("owner/name", "small", "train"),
        ("name", "config", "train"),
        ("owner/name", "config", "train[:5%]"),
    ]
    assert [problem.split(": ")[1].split(" ")[1:4] for problem in problems] == [
        ["does", "not", "exist"],
        ["does", "not", "exist"],
        ["has", "none", "of"],
    ]


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.jsonlines", "a.jsonl.GZ", "a.tsv"])
def test_other_endings_of_files(tmp_path, name):
    rows = [{"prompt": "b", "completion": "c"}]
    content = b"prompt\tcompletion\nb\tc\n" if name == "a.tsv" else jsonl(rows)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    (source,) = find_sources([str(tmp_path / name)], TrainConfig(), key="data", problems=[])
    assert [row.values for row in source.rows()] == rows


def find(entry, key: str = "data", **options) -> tuple[list[str], list[str]]:
    problems: list[str] = []
    sources = find_sources([str(entry)], TrainConfig(**options), key=key, problems=problems)
    return [Path(file).name for source in sources for file in source.files], problems


def test_files_named_as_splits_are_read_as_the_hubs(tmp_path):
    for name in ("train-0.jsonl", "more.jsonl", "val.jsonl", "chats_test.jsonl"):
        (tmp_path / name).write_text("{}")
    for entry in (tmp_path, tmp_path / "*.jsonl"):
        assert find(entry) == (["more.jsonl", "train-0.jsonl"], [])
        assert find(entry, key="eval_data") == (["val.jsonl"], [])
        assert find(entry, key="eval_data", eval_split="test") == (["chats_test.jsonl"], [])
    assert find(tmp_path / "*test.jsonl")[0] == ["chats_test.jsonl"]
    for split in ("train", "test"):
        (tmp_path / f"a-test-set-{split}.json").write_text("{}")
    assert find(tmp_path / "a-*")[0] == ["a-test-set-train.json"]
    (source,) = find_sources([str(tmp_path / "*.jsonl")], TrainConfig(), key="data", problems=[])
    assert source.other_splits == ("chats_test.jsonl", "val.jsonl")
    _, (problem,) = find(tmp_path / "*.jsonl", data_split="all")
    assert "has no file of the split all (data_split); the files are chats_test.jsonl" in problem


def test_a_link_to_nothing_is_an_error(tmp_path):
    (tmp_path / "one.jsonl").write_text("{}")
    (tmp_path / "two.jsonl").symlink_to("../blobs/gone")
    for entry in (tmp_path, tmp_path / "*.jsonl", tmp_path / "two.jsonl"):
        _, (problem,) = find(entry)
        assert problem == f"data: {tmp_path / 'two.jsonl'} is a link to a file that does not exist"


def test_a_text_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dsft.data.sources.LONGEST_TEXT", 9)
    (tmp_path / "a.txt").write_text("the model")
    assert [row.values for row in read_file(str(tmp_path / "a.txt"))] == [{"text": "the model"}]
    (tmp_path / "a.txt").write_text("the models")
    with pytest.raises(UserError, match="one text of more than 1 GiB; use jsonl"):
        list(read_file(str(tmp_path / "a.txt")))


def test_a_share_of_a_text_is_cut_at_white_space_of_any_kind(tmp_path):
    (tmp_path / "a.txt").write_text("a line\nanother\tcell and more")
    (source,) = find_sources([str(tmp_path / "a.txt")], TrainConfig(), key="data", problems=[])
    (row,) = HeldOut(fraction=0.6, seed=0, wanted=True).rows(source.rows())
    assert row.values == {"text": "\tcell and more"}
