"""A checkpoint is complete or is not there: on handmade files, and in real runs that are killed or fill the disk."""

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import flags, read_json
from ranks import on_ranks, run_entry, train, train_all

from dsft.checkpoints import save as save_module
from dsft.checkpoints.manifest import (
    MANIFEST,
    STAGING,
    TRAINER_STATE,
    checkpoint_folder,
    checkpoints,
    clean_up,
    files_of,
    hash_and_sync,
    integrity_errors,
    prune,
    publish,
    read_manifest,
)
from dsft.checkpoints.resume import restore
from dsft.checkpoints.run_folder import last_good
from dsft.checkpoints.save import Saves, StagedSave, missing_shards
from dsft.errors import Unsaved, UserError


def write_staged(output_dir: Path, step: int, content: str = "weights") -> Path:
    staged = output_dir / STAGING / f"checkpoint-{step}"
    (staged / f"global_step{step}").mkdir(parents=True)
    (staged / TRAINER_STATE).write_text("{}")
    (staged / "model.safetensors").write_text(content)
    torch.save({}, staged / f"global_step{step}" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return staged


def save(output_dir: Path, step: int, content: str = "weights") -> Path:
    staged = write_staged(output_dir, step, content)
    return publish(
        staged,
        {
            "step": step,
            "world_size": 1,
            "files": {str(path.relative_to(staged)): hash_and_sync(path) for path in files_of(staged)},
        },
    )


def test_a_published_checkpoint_has_every_file_in_its_manifest_and_leaves_no_staging(tmp_path):
    folder = save(tmp_path, 5)
    assert folder == checkpoint_folder(tmp_path, 5) and integrity_errors(folder, hash_tensors=True) == []
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == {
        TRAINER_STATE,
        "model.safetensors",
        "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_what_is_missing_shorter_or_changed_is_named(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "model.safetensors").write_text("WEIGHTS")
    assert integrity_errors(folder) == [] and integrity_errors(folder, hash_tensors=True) == [
        "the content of model.safetensors has changed"
    ]
    (folder / "model.safetensors").write_text("w")
    assert integrity_errors(folder) == ["model.safetensors has 1 bytes, 7 were written"]
    (folder / "model.safetensors").unlink()
    assert integrity_errors(folder) == ["model.safetensors is missing"]
    (folder / MANIFEST).write_text("{")
    assert integrity_errors(folder) == [f"{MANIFEST} cannot be read"]


@pytest.mark.parametrize("unreadable", [TRAINER_STATE, MANIFEST, "model.safetensors"])
def test_a_checkpoint_that_cannot_be_read_is_damaged_and_the_one_before_is_taken(
    tmp_path, monkeypatch, capsys, unreadable
):
    """As files of another user, or on a disk with an error."""
    first, second = save(tmp_path, 5), save(tmp_path, 10)
    refused = {str(second / unreadable)}
    open_path, stat = Path.open, Path.stat

    def fail_to_open(path, *args, **kwargs):
        if str(path) in refused:
            raise OSError(5, "Input/output error")
        return open_path(path, *args, **kwargs)

    def fail_to_stat(path, **kwargs):
        if str(path) in refused and unreadable == "model.safetensors":
            raise PermissionError(13, "Permission denied")
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "open", fail_to_open)
    monkeypatch.setattr(Path, "stat", fail_to_stat)
    assert last_good(tmp_path) == first
    assert re.search(f"{second} is incomplete and is skipped: .* cannot be read", capsys.readouterr().out)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_complete_save_that_did_not_get_its_name_gets_it_at_the_next_start(tmp_path, monkeypatch, fault):
    folder = save(tmp_path, 5, "old")
    half = write_staged(tmp_path, 10)
    rename = Path.rename

    def fail(path, target):
        if path.parent.name == STAGING:
            raise fault
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(type(fault)):
        save(tmp_path, 5, "new")
    monkeypatch.undo()
    assert clean_up(tmp_path) == [half]
    assert checkpoints(tmp_path) == [folder] and integrity_errors(folder, hash_tensors=True) == []
    assert (folder / "model.safetensors").read_text() == "new"


@pytest.mark.parametrize(
    ("limit", "best", "newest", "left"),
    [
        (2, None, 20, [15, 20]),
        (2, 5, 20, [5, 20]),
        (1, None, 20, [20]),
        (1, 5, 20, [5, 20]),
        (None, None, 20, [5, 10, 15, 20]),
        (3, 20, 20, [10, 15, 20]),
        (2, None, 10, [5, 10]),  # those of later steps are damaged: their future was given up
    ],
)
def test_the_newest_and_the_best_stay(tmp_path, limit, best, newest, left):
    for step in (5, 10, 15, 20):
        save(tmp_path, step)
    best = best and str(checkpoint_folder(tmp_path, best))
    prune(tmp_path, limit=limit, best=best, newest=checkpoint_folder(tmp_path, newest))
    assert checkpoints(tmp_path) == [checkpoint_folder(tmp_path, step) for step in left]
    assert not (tmp_path / ".saving").exists()


def staged(output_dir: Path) -> StagedSave:
    return StagedSave(checkpoint_folder(output_dir, 10), Saves())


def write_state(save: StagedSave) -> None:
    save.staged.mkdir(parents=True)
    (save.staged / TRAINER_STATE).write_text("{}")


def test_what_an_earlier_save_left_is_not_published(tmp_path):
    leftover = write_staged(tmp_path, 10)
    (leftover / "of_another_rank.pt").write_text("old")
    save = staged(tmp_path)
    save.run(lambda: write_state(save), lambda folder: [], facts={"step": 10}, needed_bytes=1)
    assert [path.name for path in files_of(checkpoint_folder(tmp_path, 10))] == [TRAINER_STATE]
    assert read_manifest(checkpoint_folder(tmp_path, 10))["step"] == 10


def test_ranks_whose_part_is_missing_are_counted(tmp_path):
    staged = write_staged(tmp_path, 5)
    (staged / "rng_state_0.pth").touch()
    assert missing_shards(staged, 1, sharded=True) == []
    assert (
        len(missing_shards(staged, 2, sharded=True)) == 2
        and "1 of 2 ranks' optimizer states" in missing_shards(staged, 2, sharded=True)[0]
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [("write", "No space left"), ("check", "2 of 3 ranks"), ("room", "GB are free")],
)
def test_a_save_that_fails_is_named_and_leaves_the_last_good_checkpoint(tmp_path, fault, message):
    earlier, failing = save(tmp_path, 5), staged(tmp_path)

    def write() -> None:
        write_state(failing)
        if fault == "write":
            raise OSError("No space left")

    with pytest.raises(Unsaved, match=f"checkpoint-10 could not be saved: .*{message}"):
        failing.run(
            write,
            lambda folder: ["2 of 3 ranks"] if fault == "check" else [],
            facts={"step": 10},
            needed_bytes=10**18 if fault == "room" else 1,
        )
    assert last_good(tmp_path) == earlier and integrity_errors(earlier, hash_tensors=True) == []


def test_the_tools_list_and_verify(tmp_path, capsys):
    from dsft.cli.main import main

    save(tmp_path, 5)
    broken = save(tmp_path, 10)
    (broken / "model.safetensors").write_text("WEIGHTS")
    main(["checkpoints", str(tmp_path)])
    main(["verify", str(checkpoint_folder(tmp_path, 5))])
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(broken)])
    seen = capsys.readouterr()
    assert (
        ended.value.code == 2
        and "checkpoint-5 is complete: 3 files" in seen.out
        and "the content of model.safetensors has changed" in seen.err
    )
    (broken / "model.safetensors").unlink()
    main(["checkpoints", str(tmp_path)])
    out = capsys.readouterr().out
    assert "no: model.safetensors is missing" in out and f"to resume from {tmp_path}/checkpoint-5" in out
    shutil.rmtree(broken)
    staged = write_staged(tmp_path, 15)
    shutil.rmtree(staged / "global_step15")  # as of save_only_model
    alone = publish(staged, {"step": 15, "world_size": 1, "files": {}})
    main(["checkpoints", str(tmp_path)])
    out = capsys.readouterr().out
    assert f"to resume from {alone}" in out and "auto" not in out and "start from its weights" in out


def train_with_slow_saves(options: dict) -> None:
    def hash_slowly(path: Path) -> dict:
        time.sleep(0.1)
        return hash_and_sync(path)

    save_module.hash_and_sync = hash_slowly
    try:
        train(options)
    finally:
        save_module.hash_and_sync = hash_and_sync


def test_a_run_killed_while_it_saves_resumes_from_the_last_complete_checkpoint(options, tmp_path):
    out, staging = tmp_path / "run", tmp_path / "run" / ".saving"
    words = options(
        out, max_steps=12, save_strategy="steps", save_steps=2, save_total_limit=3, zero="3", logging_steps=1
    )

    def saving() -> bool:
        return len(checkpoints(out)) > 1 and any(staging.glob("*/*"))

    assert on_ranks(2, train_with_slow_saves, words, kill_when=saving) is None
    assert any(staging.glob("*/*"))
    for folder in checkpoints(out):
        assert integrity_errors(folder, hash_tensors=True) == []
    log = train_all(2, [words | {"resume_from_checkpoint": "auto"}], tmp_path / "log")
    assert "resuming from" in log and "an incomplete save" in log, log
    assert not staging.exists()
    assert read_json(out / "run.json")["results"]["steps"] == 12


def test_the_run_identity_of_a_checkpoint_is_compared(tmp_path):
    from dsft.checkpoints.resume import check_identity, run_identity

    shapes, rows = {"a": (4, 2), "b": (3,)}, {"sequences of data": 2, "content of data": "aa"}
    usual = {"shapes": shapes, "data": rows, "seed": 42, "sequences_per_step": 8, "options": {}}
    now = run_identity(**usual)
    assert now["trained elements"] == 11
    staged = write_staged(tmp_path, 5)
    folder = str(publish(staged, {"files": {}, "run_identity": now}))
    check_identity(folder, now)
    others = {
        "trained elements: 11 then, 15 now": {"shapes": shapes | {"b": (7,)}},
        "names and shapes": {"shapes": {"a": (2, 4), "b": (3,)}},
        "content of data": {"data": rows | {"content of data": "bb"}},
        "seed of the order: 42 then, 43 now": {"seed": 43},
        "sequences per step: 8 then, 16 now": {"sequences_per_step": 16},
    }
    for named, change in others.items():
        with pytest.raises(UserError, match=named):
            check_identity(folder, run_identity(**usual | change))


@pytest.mark.launch
def test_the_clock_saves_beside_the_steps(options, tmp_path):
    """After the next step; at once after the first, which is logged, and the last."""
    result = run_entry(
        "dsft.train",
        flags(
            options(tmp_path / "run", max_steps=6, save_strategy="no", save_minutes=1e-6, save_total_limit=10, zero="2")
        ),
        world=2,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == [f"checkpoint-{step}" for step in (1, 3, 5, 6)]
    assert read_json(tmp_path / "run" / "run.json")["results"]["saves"]["number"] == 4


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"optimizer": type("MuonWithAuxAdam", (), {})()}, "states of Muon are resumed only on the ranks"),
        ({"swap_optimizer": True}, "with weights and states in GPU or host memory"),
        ({"params_in_nvme_and_cpu": True}, "with weights and states in GPU or host memory"),
    ],
)
def test_what_cannot_be_restored_on_other_ranks_is_refused(tmp_path, optimizer, message):
    engine = SimpleNamespace(optimizer=SimpleNamespace(_optimizer_step=print, **optimizer))
    with pytest.raises(UserError, match=message):
        restore(engine, None, str(save(tmp_path, 5)))
