"""`dsft plan`: machines on paper, what is printed, what is written."""

import json
import re
import subprocess
import sys

import pytest

from dsft.cli.commands import PlanOptions
from dsft.cli.main import main
from dsft.cli.plan import read_machines
from dsft.config.deepspeed import check_deepspeed_json
from dsft.errors import UserError
from dsft.planner.speed import CARDS
from dsft.units import GB

MODEL = ["--model", "Qwen/Qwen2.5-0.5B", "--seq_len", "512"]


def printed(capsys, *words: str) -> str:
    main(["plan", *MODEL, *words])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("hardware", "problem"),
    [
        ({"gpus": "8xA100"}, "is A100-80GB or A100-40GB"),
        ({"gpus": "H100"}, "write the number of GPUs"),
        ({"gpus": "8xH100", "interconnect": "wifi"}, "'wifi' is unknown"),
        ({"hostfile": "hosts", "nodes": 2}, "--hostfile hosts has 2; keep one"),
    ],
    ids=str,
)
def test_impossible_hardware_is_refused(tmp_path, monkeypatch, hardware, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    with pytest.raises(UserError, match=re.escape(problem)):
        read_machines(PlanOptions(**hardware))


def test_machines_on_paper_have_the_memory_that_torch_sees(tmp_path):
    (tmp_path / "hosts").write_text("a slots=8\nb slots=4\n")
    (named,) = read_machines(PlanOptions(gpus="8xH100", nodes=2, host_memory="768GB"))
    assert (named.world_size, named.device_bytes) == (16, CARDS["H100"].usable_bytes)
    assert named.host_bytes == 768 * GB
    (sized,) = read_machines(PlanOptions(gpus="8x80GB"))
    assert sized.device_bytes == CARDS["A100-80GB"].usable_bytes
    (part,) = read_machines(PlanOptions(gpus="4x10GB"))
    assert part.device_bytes == 10 * GB
    (uneven,) = read_machines(PlanOptions(gpus="8xH100", hostfile=str(tmp_path / "hosts")))
    assert uneven.world_size == 12


def test_the_answer_is_a_few_lines(capsys):
    lines = printed(capsys, "--method", "lora", "--gpus", "1x4090", "--tokens", "1e9").splitlines()
    assert lines[0].startswith("Qwen2.5-0.5B, lora, 1x4090: checkpointing off, batch ")
    assert re.fullmatch(r"fits: [\d.]+ of 23.6 GiB \(\d+%\)", lines[1])
    assert re.match(r"3 epochs: about [\d.]+ (h|days); ", lines[2])
    assert lines[3].startswith("dsft train --model Qwen/Qwen2.5-0.5B --seq_len 512 --method lora --data DATA")
    assert "ZeRO" not in "\n".join(lines), "nothing is sharded over one GPU"
    assert lines[4].startswith("smaller: --per_device_train_batch_size ") and len(lines) == 5


def test_the_table_of_candidates_fits_a_terminal(capsys):
    lines = printed(capsys, "--method", "lora", "--gpus", "1x4090", "--explain").splitlines()[5:]
    assert lines[0].split() == ["offload", "ckpt", "batch", "peak", "GiB", "step", "tokens/s"]
    table = lines[2 : lines.index(next(line for line in lines if "tokens per sequence" in line))]
    assert len(table) >= 3 and max(map(len, table)) <= 80 and sum(line.startswith(" ->") for line in table) == 1


def test_what_was_assumed_is_behind_explain(capsys):
    text = printed(capsys, "--gpus", "8xH100", "--explain")
    assert "optimizer state (" in text and "is the fastest that fits" in text
    assert re.search(r"^ ->   +\d ", text, re.MULTILINE), "the chosen one of a table of all candidates"
    assert re.search(r"to keep this plan: --zero \d --per_device_train_batch_size", text)
    assert "optimizer state" not in printed(capsys, "--gpus", "8xH100")


def test_the_time_is_that_of_the_data_and_of_a_card_without_published_steps_a_guess(capsys, tiny, tmp_path):
    words = ["--model", str(tiny / "model"), "--seq_len", "32", "--data", str(tiny / "pairs.jsonl")]
    main(["plan", *words, "--gpus", "1xL4", "--num_train_epochs", "1"])
    text = capsys.readouterr().out
    assert re.search(r"^1 epoch: about .*\(a guess: ", text, re.MULTILINE)


def test_a_faster_precision_is_named(capsys):
    assert "faster: --dtype float16" in printed(capsys, "--gpus", "1xT4")
    main(["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "1xH100"])
    assert "faster: --states bfloat16" in capsys.readouterr().out


def test_ranks_that_share_a_sequence_are_named_in_place_of_offload(capsys):
    main(["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100", "--seq_len", "131072"])
    assert "without offload: --sequence_parallel 8 (" in capsys.readouterr().out


def test_json_on_a_full_disk_is_an_error():
    words = [
        sys.executable,
        "-m",
        "dsft.cli.main",
        "plan",
        "--model",
        "Qwen/Qwen2.5-0.5B",
        "--gpus",
        "1x4090",
        "--json",
    ]
    with open("/dev/full", "w") as full:
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2 and "No space left on device" in result.stderr


def test_several_machines_have_a_row_each(capsys):
    rows = json.loads(printed(capsys, "--gpus", "1x4090,8xH100", "--json"))
    assert [row["machine"]["gpu_type"] for row in rows] == ["4090", "H100"] and all(row["plan"]["fits"] for row in rows)
    assert "8xH100" in printed(capsys, "--gpus", "1x4090,8xH100")


def test_the_written_configuration_is_one_that_deepspeed_reads(capsys, tmp_path):
    printed(capsys, "--gpus", "8xH100", "--out", str(tmp_path))
    content = json.loads((tmp_path / "deepspeed.json").read_text())
    assert check_deepspeed_json(content, "written") == []
    assert content["train_batch_size"] == 64
    with pytest.raises(SystemExit):
        printed(capsys, "--gpus", "8xH100", "--out", str(tmp_path))
    assert "deepspeed.json: File exists" in capsys.readouterr().err


def test_what_does_not_fit_ends_with_1_and_names_what_would(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "1x4090", "--host_memory", "64GB"])
    text = capsys.readouterr().out
    assert ended.value.code == 1 and "nothing fits" in text and "would fit: --method lora" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--perplexity"], "longest window that fits"), (["--longest"], "tokens per sequence fit: ZeRO")],
)
def test_other_questions_are_answered(capsys, words, expected):
    assert expected in printed(capsys, "--gpus", "1x4090", *words)


def test_an_option_that_left_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *MODEL, "--cheapest", "true"])
    assert ended.value.code == 2 and "--gpus 1x4090,8xH100" in capsys.readouterr().err


def test_more_ranks_to_a_sequence_than_there_are_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *MODEL, "--gpus", "1xH100", "--sequence_parallel", "2"])
    assert ended.value.code == 2 and "must divide the number of ranks, which is 1" in capsys.readouterr().err
