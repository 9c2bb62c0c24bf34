"""Ranks that were told different things end together, before weights load, with the field, the values and the hosts."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from conftest import flags, read_json
from ranks import on_ranks, started_entry, train

from dsft.api import evaluate_all
from dsft.checkpoints.manifest import MANIFEST, sealed
from dsft.config.deepspeed import CONFIG_DIR
from dsft.config.options import EvalConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.runtime import distributed
from dsft.runtime.distributed import require_agreement
from dsft.runtime.software import numeric_versions


def as_host() -> None:
    """Give this rank a host of its own: the only thing about a node that one machine has once."""
    name = f"node-{distributed.rank()}"
    socket.gethostname = lambda: name


def problems_of(function, *arguments) -> list[str]:
    """The problems that `function` raises; none where it comes to its end."""
    try:
        function(*arguments)
    except UserError as error:
        return error.problems
    return []


def train_as_told(options: list[dict], codes: tuple[str, ...] = ()) -> list[str]:
    as_host()
    if codes:
        distributed.code_hash = lambda: codes[distributed.rank()]
    return problems_of(train, options[distributed.rank()])


def evaluate_as_told(options: list[dict]) -> list[str]:
    as_host()
    problems: list[str] = []
    config = make_config(EvalConfig, options[distributed.rank()], problems)
    return problems_of(list, evaluate_all(config, problems))


def test_a_training_with_another_learning_rate_and_code_on_one_rank_does_not_begin(options, tmp_path):
    told = options(tmp_path / "run", zero="3", learning_rate=1e-2)
    stale = told | {"learning_rate": 1e-3, "data_cache": str(tmp_path / "cache")}
    first, second = on_ranks(2, train_as_told, [told, stale], ("abc", "abd"))
    assert first == second and len(first) == 2
    assert first[1].startswith("code of dsft differs between the ranks: abc on rank 0, and abd; copy one checkout")
    assert first[0].startswith("learning_rate differs between the ranks: 0.01 on rank 0, and 0.001; use the same")
    assert first[0].endswith("(on node-1, rank 1)")
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_evaluation_with_another_stride_on_one_rank_does_not_begin(tiny, tmp_path):
    told = {"model": [str(tiny / "model")], "data": [str(tiny / "texts.jsonl")], "seq_len": 64, "mode": "sliding"}
    own_folders = [told | {"output_dir": str(tmp_path / f"node-{rank}")} for rank in (0, 1)]
    first, second = on_ranks(2, evaluate_as_told, [own_folders[0], own_folders[1] | {"stride": 16}])
    assert first == second and len(first) == 1
    assert "stride differs between the ranks: not set on rank 0, and 16; " in first[0]


def in_own_folder(folder: Path, function, *arguments) -> list[str]:
    """As on a host where the same relative paths lead to other files."""
    os.chdir(folder / f"node-{distributed.rank()}")
    return function(*arguments)


def test_files_of_the_same_name_and_another_content_are_told(options, tiny, tmp_path):
    zero = (CONFIG_DIR / "zero3.json").read_text()
    manifest = {"files": {}, "world_size": 2, "run_identity": {"sequences per step": 4}}
    for node, bucket, step in (("node-0", "auto", 7), ("node-1", "1000000", 4)):
        (tmp_path / node / "checkpoint-2" / "global_step2").mkdir(parents=True)
        (tmp_path / node / "zero.json").write_text(
            zero.replace('"reduce_bucket_size": "auto"', f'"reduce_bucket_size": {bucket!r}'.replace("'", '"'))
        )
        (tmp_path / node / "checkpoint-2" / MANIFEST).write_text(json.dumps(sealed(manifest | {"step": step})))
        (tmp_path / node / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2, "epoch": 0.1}')
    told = options(tmp_path / "run", zero="zero.json", resume_from_checkpoint="checkpoint-2", max_steps=4)
    first, second = on_ranks(2, in_own_folder, tmp_path, train_as_told, [told, told])
    assert first == second and len(first) == 2
    assert first[0].startswith("content of zero.json differs between the ranks: ...")
    assert "'reduce_bucket_size': 'auto'" in first[0] and "1000000" in first[0]
    assert first[1].startswith("checkpoint-2 to resume from differs between the ranks: ")


def test_a_model_with_other_weights_on_one_host_is_not_evaluated(tiny, tmp_path):
    for node in ("node-0", "node-1"):
        (tmp_path / node).mkdir()
        for name in ("model", "texts.jsonl"):
            (tmp_path / node / name).symlink_to(tiny / name)
    (tmp_path / "node-1" / "texts.jsonl").unlink()
    lines = (tiny / "texts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "node-1" / "texts.jsonl").write_text("".join(lines[1:]))
    told = {"model": ["model"], "data": ["texts.jsonl"], "seq_len": 64}
    first, second = on_ranks(2, in_own_folder, tmp_path, evaluate_as_told, [told, told])
    assert first == second and len(first) == 1 and "tokens of texts.jsonl differs between the ranks" in first[0]


def test_a_rank_that_meets_another_job_ends_and_takes_nobodys_place(options, tmp_path):
    """Rank 1 of the job "other" is there before rank 1 of the job whose rank 0 comes first."""
    port = str(distributed.free_port())
    of_all = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:

        def start(number: int, name: str):
            words = flags(options(tmp_path / name, zero="3"))
            place = of_all | {"RANK": str(number), "LOCAL_RANK": "0"}  # each the first of its node, which speaks
            return stack.enter_context(started_entry("dsft.train", words, **place))

        other, first = start(1, "other"), start(0, "first")
        ended, _ = other()
        assert ended.returncode == 2, ended.stdout + ended.stderr
        said = f"MASTER_PORT={port} is used by another job, output_dir={tmp_path / 'first'}"
        assert said in ended.stdout + ended.stderr
        results = [wait()[0] for wait in (start(1, "first"), first)]
        assert [result.returncode for result in results] == [0, 0], results
    assert read_json(tmp_path / "first" / "run.json")["status"] == "done"


def agree(facts: list[dict]) -> list[str]:
    as_host()
    return problems_of(require_agreement, {"what helps": facts[distributed.rank()]})


def test_every_difference_is_named_with_its_values_and_ranks():
    alike = {"a": 1, "b": "x" * 500, "c": None, "d": [1]}
    [problems, *others] = on_ranks(3, agree, [alike, alike | {"b": "x" * 499 + "y", "c": 2}, alike])
    assert others == [problems] * 2
    values, c = problems[0], problems[1]
    assert values.startswith("b differs between the ranks: ...xxx") and len(values) < 400
    assert c == "c differs between the ranks: not set on rank 0, and 2; what helps (on node-1, rank 1)"
    assert on_ranks(3, agree, [alike] * 3) == [[]] * 3


def test_libraries_that_are_not_installed_have_a_version_too():
    versions = numeric_versions()
    assert versions["torch"].startswith("2.") and versions["bitsandbytes"] == "not installed"


def with_unreadable_config(told: dict) -> list[str]:
    """As with a run.yaml that one host lacks: its options are defaults."""
    from dsft.config.options import TrainConfig
    from dsft.training.run import finetune

    as_host()
    problems = ["--config run.yaml: cannot be read"] if distributed.rank() else []
    config = make_config(TrainConfig, {} if distributed.rank() else told, problems)
    return problems_of(finetune, config, problems)


def test_a_problem_of_one_host_is_named_with_it_instead_of_its_consequences(options, tmp_path):
    first, second = on_ranks(2, with_unreadable_config, options(tmp_path / "run"))
    assert first == second and "--config run.yaml: cannot be read (on node-1, rank 1)" in first
    assert not any("differs between" in problem for problem in first)
