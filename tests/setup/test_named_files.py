"""Files that a launch looks at before its launcher and its ranks start, and ranks before they meet, without torch."""

import json
import subprocess
import sys

from conftest import ROOT

STARTS = """
import json, sys
from dsft import eval_ppl, train
from dsft.launch import launch
from dsft.errors import UserError
for name, *words in json.load(sys.stdin):
    for start in launch, {"train": train, "eval": eval_ppl}[name].main.__wrapped__:
        try:
            start([name, *words] if start is launch else words)
        except UserError as error:
            print(json.dumps(error.problems))
print(json.dumps(sorted({"torch", "transformers", "deepspeed", "datasets"} & sys.modules.keys())))
"""


def test_launches_and_ranks_name_what_is_wrong_with_their_files_before_torch_is_loaded(tmp_path):
    files = {
        "rows.jsonl": '{"text": "a"}\n{"text": \n',
        "columns.jsonl": '{"title": "a", "body": "b"}\n',
        "good.jsonl": '{"text": "a"}\n',
        "zero.json": '{"zero_optimization": {"stage": 3},}',
        "old/run.json": '{"config": {"model": "gpt2", "eval_data": ["gone.jsonl"], "output_dir": "old"}}',
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    wrong = {
        "model": "./none/config.json",
        "tokenizer": "./none",
        "zero": "zero.json",
        "eval_data": "rows.jsonl",
        "output_dir": "run",
    }
    words = [word for name, value in wrong.items() for word in (f"--{name}", value)]
    launches = [
        ["train", *words, "--bogus", "1", "--data", "nowhere.jsonl", "columns.jsonl", "good.jsonl", "a/hub_name"],
        ["eval", "--model", "gpt2", "./none", "--reference", "./gone", "--data", "rows.jsonl"],
        ["eval", "--run", "old"],
    ]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", STARTS],
        input=json.dumps(launches), capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    *answers, loaded = result.stdout.splitlines()
    assert loaded == "[]", result.stdout + result.stderr
    (train, as_rank), (evaluation, as_scorer), (of_run, of_run_as_scorer) = zip(
        answers[::2], answers[1::2], strict=True
    )
    assert (train, evaluation, of_run) == (as_rank, as_scorer, of_run_as_scorer)
    starts = [
        "bogus: unknown key",
        "zero=zero.json: not valid JSON",
        "model=./none/config.json: no such folder or file",
        "tokenizer=./none: no such folder",
        "data: nowhere.jsonl does not exist",
        "data: columns.jsonl: ",
        "eval_data: rows.jsonl, line 2: not valid JSON",
    ]
    problems = json.loads(train)
    assert [problem[: len(start)] for problem, start in zip(problems, starts, strict=True)] == starts
    starts = [
        "model=./none: no such folder or file",
        "reference=./gone: no such folder or file",
        "data: rows.jsonl, line 2: not valid JSON",
    ]
    problems = json.loads(evaluation)
    assert [problem[: len(start)] for problem, start in zip(problems, starts, strict=True)] == starts

    starts = ["run=old: has no final model yet", "data: gone.jsonl does not exist"]
    problems = json.loads(of_run)
    assert [problem[: len(start)] for problem, start in zip(problems, starts, strict=True)] == starts
