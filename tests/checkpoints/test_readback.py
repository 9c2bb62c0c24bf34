"""What was saved is complete; a checkpoint is compared with its manifest before it is used."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_ranks, train, train_all
from safetensors.torch import save_file
from tiny import write_model

from dsft.api import evaluate
from dsft.checkpoints.export import export
from dsft.checkpoints.manifest import MANIFEST
from dsft.checkpoints.run_folder import find_weights
from dsft.checkpoints.save import missing_weights
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.runtime import distributed
from dsft.setup.decide import check_start, resume_decisions
from dsft.training.trainer import PerplexityTrainer


def test_empty_and_missing_tensors_are_named(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert missing_weights(tmp_path, num_elements=10) == []
    assert missing_weights(tmp_path, num_elements=11) == ["11 trained elements expected, 10 written"]
    save_file({"a": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    assert missing_weights(tmp_path, num_elements=0) == ["a is empty on disk"]


SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def change_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def run_of_six(tmp_path_factory, options) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = {"zero": "2", "save_strategy": "steps", "save_steps": 2, "save_total_limit": 10, "max_steps": 6}
    train_all(2, [options(folder / "run", **words)], folder / "log")
    return folder / "run"


def resumed(cases: list[dict]) -> list[str]:
    """The first step of each resumed training, or its error."""
    starts = []
    for options in cases:
        try:
            train(options)
            starts.append(json.loads((Path(options["output_dir"]) / "run.json").read_text())["status"])
        except UserError as error:
            starts.append(str(error))
    return starts


@pytest.mark.launch
def test_auto_takes_the_newest_checkpoint_whose_bytes_are_those_that_were_written(run_of_six, options, tmp_path):
    """`damaged` has a changed byte in 6, no manifest in 4; all of `hopeless` are damaged; `untouched` is moved.

    Who takes the weights alone does not read the optimizer's shards.
    """

    def copy(name: str, *, changed: tuple[int, ...] = (), without_manifest: tuple[int, ...] = ()) -> Path:
        run = Path(shutil.copytree(run_of_six, tmp_path / name))
        for step in changed:
            change_a_byte(run / f"checkpoint-{step}" / f"global_step{step}" / SHARD)
        for step in without_manifest:
            (run / f"checkpoint-{step}" / MANIFEST).unlink()
        return run

    def weights_of(run: Path) -> dict:
        checkpoint = str(run / "checkpoint-6")
        return options(tmp_path / f"from {run.name}", zero="2", model=checkpoint)

    damaged = {"changed": (6,), "without_manifest": (4,)}
    auto = {"resume_from_checkpoint": "auto", "zero": "2", "max_steps": 7}
    named = tmp_path / "named" / "checkpoint-6"
    cases = [
        options(copy("damaged", **damaged), **auto),
        options(copy("hopeless", changed=(2, 6), without_manifest=(4,)), **auto),
        options(copy("named", **damaged), **auto | {"resume_from_checkpoint": str(named)}),
        options(copy("untouched"), **auto),
        options(copy("unverified", changed=(2,), without_manifest=(4, 6)), **auto, verify_resume=False),
        *(weights_of(copy(name, changed=(6,))) for name in ("shards_changed", "weights_changed")),
    ]
    change_a_byte(tmp_path / "weights_changed" / "checkpoint-6" / "model.safetensors")
    damaged, hopeless, named, untouched, unverified, of_shards, of_weights = on_ranks(
        2, resumed, cases, log=tmp_path / "log"
    )[0]
    log = (tmp_path / "log").read_text()
    assert [damaged, untouched, unverified, of_shards] == ["done"] * 4, log[-3000:]
    assert "the content of model.safetensors has changed" in of_weights
    assert "damaged/checkpoint-6 is damaged and is skipped: the content of global_step6/zero_pp_rank_1" in log
    assert f"damaged/checkpoint-4 is incomplete and is skipped: it has no {MANIFEST}" in log
    assert "resuming from " + str(tmp_path / "damaged/checkpoint-2") in log
    assert "no checkpoint in" in hopeless and "--overwrite" in hopeless
    assert "the content of" in named and "--verify_resume false" in named
    assert "resuming from " + str(tmp_path / "untouched/checkpoint-6") in log and "hashed in" in log
    assert "resuming from " + str(tmp_path / "unverified/checkpoint-6") in log


def flip_a_bit(file: Path, before: bytes) -> None:
    """Change the last bit of the character after `before`: a digit stays a digit, and JSON stays JSON."""
    content = bytearray(file.read_bytes())
    content[content.index(before) + len(before)] ^= 1
    file.write_bytes(content)


FLIPPED = {
    "another_step": ("trainer_state.json", b'"global_step": '),
    "no_json": ("trainer_state.json", b""),
    "another_world": (MANIFEST, b'"world_size": '),
    "another_base": ("config.json", b'"num_hidden_layers": '),
}
"""Case -> the file of the newest checkpoint, and what stands in front of the flipped bit."""


@pytest.mark.parametrize("name", FLIPPED)
def test_nothing_that_decides_how_a_run_resumes_is_read_before_its_hash(run_of_six, options, tmp_path, capsys, name):
    """A flipped bit in trainer_state.json ended in a traceback, or in a training that was complete without a model."""
    run, (file, before) = Path(shutil.copytree(run_of_six, tmp_path / "run")), FLIPPED[name]
    newest = run / "checkpoint-6"
    flip_a_bit(newest / file, before)
    damaged = f"{file} cannot be read" if file == MANIFEST else f"the content of {file} has changed"

    def decided(resume: str, **words) -> tuple:
        words = {"zero": "2", "max_steps": 6, "resume_from_checkpoint": resume} | words
        return resume_decisions(make_config(TrainConfig, options(run, **words), []), 2)

    checkpoint, _, is_complete = decided("auto")
    assert (checkpoint, is_complete) == (str(run / "checkpoint-4"), False)
    assert f"{newest} is incomplete and is skipped: {damaged}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"{damaged}; it is incomplete, use another or auto"):
        decided(str(newest))
    if name == "no_json":
        with pytest.raises(UserError, match="trainer_state.json: cannot be read as JSON"):
            decided(str(newest), verify_resume=False)
    with pytest.raises(UserError, match=f"{damaged}; it is damaged, use another"):
        find_weights(str(newest))
    shutil.rmtree(run / "final")
    assert find_weights(str(run)) == run / "checkpoint-4"


def test_a_resume_of_another_run_is_refused_before_any_rank_starts(run_of_six, options, tmp_path):
    def start(**words) -> None:
        check_start(make_config(TrainConfig, options(run_of_six, **{"resume_from_checkpoint": "auto"} | words), []), [])

    start()
    wide = write_model(tmp_path / "wide", intermediate_size=64)
    for words in {"model": str(wide)}, {"method": "lora"}:
        with pytest.raises(
            UserError, match=r"checkpoint-6 belongs to another run \(trained elements: \d+ then, \d+ now"
        ):
            start(**words)
    with pytest.raises(UserError, match="seed of the order: 42 then, 7 now"):
        start(seed=7)
    with pytest.raises(UserError, match="gone: has no trainer_state.json"):
        start(resume_from_checkpoint=str(tmp_path / "gone"))


def evaluated(words: list[dict]) -> list[str]:
    """What an evaluation of each says: `done`, or its error."""
    outcomes = []
    for options in words:
        try:
            evaluate(**options, progress=False)
            outcomes.append("done")
        except UserError as error:
            outcomes.append(str(error))
    return outcomes


def flip_a_weight(run: Path) -> None:
    """In the last weight of checkpoint-6: the file can be loaded, and differs by one number."""
    file = run / "checkpoint-6" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def test_evaluation_and_export_refuse_a_checkpoint_with_a_flipped_bit(run_of_six, options, tiny, tmp_path):
    """On two ranks each hashes its share. Another checkpoint of the run is evaluated; without a manifest
    nothing is compared."""
    run = Path(shutil.copytree(run_of_six, tmp_path / "run"))
    flip_a_weight(run)
    flip_a_bit(run / "checkpoint-4" / "config.json", b'"num_hidden_layers": ')
    shards = Path(shutil.copytree(run_of_six, tmp_path / "shards")) / "checkpoint-6"
    change_a_byte(shards / "global_step6" / SHARD)
    models = [run / "checkpoint-6", run / "checkpoint-4", run / "checkpoint-2", shards / "global_step6"]
    changed = ["model.safetensors", "config.json", None, f"global_step6/{SHARD}"]
    shared = {"data": [str(tiny / "held_out.jsonl")], "seq_len": 64}
    cases = [{"model": [str(model)]} | shared for model in models]
    cases.append({"model": [str(models[2])], "reference": str(models[0])} | shared)
    outcomes = on_ranks(2, evaluated, cases, log=tmp_path / "log")
    assert outcomes[0] == outcomes[1]
    for outcome, file in zip(outcomes[0], [*changed, "model.safetensors"], strict=True):
        assert outcome == "done" if file is None else f"the content of {file} has changed" in outcome
    assert "checkpoint-2: hashed in" in (tmp_path / "log").read_text()
    for model, file in zip(models, changed, strict=True):
        out = tmp_path / f"out-{model.name}"
        if file is None:
            assert (export(str(model), str(out)) / "model.safetensors").is_file()
        else:
            with pytest.raises(UserError, match=f"the content of {file} has changed; it is damaged"):
                export(str(model), str(out))
            assert not out.exists()
    (models[0] / MANIFEST).unlink()
    assert evaluated(cases[:1]) == ["done"]


@pytest.mark.launch
def test_a_run_that_was_killed_before_its_final_model_writes_it_on_resume(run_of_six, options, tmp_path):
    run = Path(shutil.copytree(run_of_six, tmp_path / "run"))
    expected = (run / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "final")
    again = options(run, zero="2", max_steps=6, resume_from_checkpoint="auto")
    assert on_ranks(2, resumed, [again, again], log=tmp_path / "log")[0] == ["done", "done"]
    assert (run / "final" / "model.safetensors").read_bytes() == expected
    assert (tmp_path / "log").read_text().count("training is already complete") == 1


def with_damaged_best(changed: dict, removed: dict) -> None:
    """Train twice; the best checkpoint gets a changed byte, or is removed, before it is loaded at the end."""
    load = PerplexityTrainer._load_best_model

    def damage_and_load(trainer) -> None:
        if distributed.rank() == 0:
            best = Path(trainer.state.best_model_checkpoint)
            change_a_byte(best / "model.safetensors") if "changed" in str(best) else shutil.rmtree(best)
        distributed.wait_for_all()
        load(trainer)

    PerplexityTrainer._load_best_model = damage_and_load
    train(changed)
    train(removed)


@pytest.mark.launch
def test_a_damaged_best_checkpoint_is_not_loaded_at_the_end(options, tiny, tmp_path):
    words = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    words |= {"load_best_model_at_end": True, "eval_data": str(tiny / "held_out.jsonl")}
    words |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the best is the first
    names = ("changed", "removed")
    on_ranks(2, with_damaged_best, *(options(tmp_path / name, **words) for name in names), log=tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert "the best checkpoint, is damaged (the content of model.safetensors" in log
    assert "the best checkpoint, is damaged (it does not exist)" in log
    for name in names:
        assert json.loads((tmp_path / name / "run.json").read_text())["results"]["best_checkpoint"] is None
        final, last = (tmp_path / name / part / "model.safetensors" for part in ("final", "checkpoint-4"))
        assert final.read_bytes() == last.read_bytes()
