"""`dsft plan`: machines on paper, what is printed, what is written."""

import json
import re

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
        ({"gpus": "8xH100", "nodes": 0}, "--nodes 0: must be at least 1"),
        ({"gpus": "8xA100"}, "there are A100-80GB and A100-40GB"),
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
    assert (uneven.world_size, uneven.host_names) == (12, ("a", "b"))


def test_the_plan_is_printed_with_its_terms_and_the_flags_that_fix_it(capsys):
    text = printed(capsys, "--gpus", "1x4090", "--explain", "--tokens", "1e9")
    assert "->" in text and "optimizer state" in text and "is the fastest that fits" in text
    assert re.search(r"about [\d.]+ hours of training", text) and re.search(
        r"--zero \d --per_device_train_batch_size", text
    )


def test_several_machines_have_a_row_each(capsys):
    rows = json.loads(printed(capsys, "--gpus", "1x4090,8xH100", "--json"))
    assert [row["machine"]["gpu_type"] for row in rows] == ["4090", "H100"] and all(row["plan"]["fits"] for row in rows)
    assert "8xH100" in printed(capsys, "--gpus", "1x4090,8xH100")


def test_the_written_configuration_is_one_that_deepspeed_reads(capsys, tmp_path):
    printed(capsys, "--gpus", "8xH100", "--write", str(tmp_path))
    content = json.loads((tmp_path / "deepspeed.json").read_text())
    assert check_deepspeed_json(content, "written") == []
    assert content["train_batch_size"] == 64 and content["bf16"]["enabled"] is True
    with pytest.raises(SystemExit):
        printed(capsys, "--gpus", "8xH100", "--write", str(tmp_path))
    assert "cannot be written" in capsys.readouterr().err


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
    assert ended.value.code == 2 and "sequence_parallel=2: must divide" in capsys.readouterr().err
