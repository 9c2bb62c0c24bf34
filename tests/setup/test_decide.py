"""A run that is decided: every decision with its reason, options that stay as they were, and one choice of plan."""

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file
from tiny import write_jsonl, write_model

from dsft.checkpoints.manifest import MANIFEST
from dsft.checkpoints.resume import run_identity
from dsft.checkpoints.run_folder import FINAL, write_run
from dsft.checkpoints.save import trained_shapes
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.models.build import build_model
from dsft.models.measure import measure_model
from dsft.planner.speed import CARDS
from dsft.runtime.hardware import Machine
from dsft.setup import decide
from dsft.setup.decide import TrainingRun, check_start, resolve_offline, resolve_run, resume_decisions
from dsft.units import GB

EIGHT_GPUS = Machine(
    nodes=1, ranks_per_node=8, device_bytes=CARDS["A100-80GB"].usable_bytes, host_bytes=1000 * GB, has_gpu=True
)


@pytest.fixture
def resolved(options, tmp_path):
    def resolve(*, machine: Machine = EIGHT_GPUS, **changes):
        problems: list[str] = []
        config = make_config(TrainConfig, options(tmp_path / "run", **changes), problems)
        before = copy.deepcopy(config)
        run = resolve_run(config, machine=machine, problems=problems)
        assert config == before, "nothing rewrites the options that were given"
        return run

    return resolve


def test_every_decision_is_in_the_options_and_says_why(resolved):
    run = resolved(global_batch_size=64, packing=True)
    decisions = {decision.name: decision for decision in run.decisions}
    assert decisions.keys() == {
        "gradient_accumulation_steps",
        "dtype",
        "bf16",
        "fp16",
        "tiled_loss",
    }  # packing: no news
    assert all(decision.reason for decision in run.decisions)
    assert all(run.options.value(decision.name) == decision.value for decision in run.decisions)
    assert decisions["gradient_accumulation_steps"].value == 4
    assert (
        decisions["gradient_accumulation_steps"].reason
        == "global_batch_size=64 / (per_device_train_batch_size=2 x 8 ranks)"
    )
    assert (run.plan.micro_batch, run.plan.accumulation) == (2, 4)
    assert run.model.attn_implementation == "sdpa"
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.options.packing = False


@pytest.mark.parametrize("changes", [{}, {"method": "full"}, {"lora_target_modules": ["in_proj"]}], ids=str)
def test_a_part_of_mamba_that_lora_leaves_out_is_noted(tmp_path, changes):
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    options = make_config(TrainConfig, {"model": str(tmp_path / "config.json"), "method": "lora", **changes}, [])
    notes = resolve_offline(options, EIGHT_GPUS).notes
    assert any("out_proj is not adapted" in note for note in notes) == (not changes)


def test_packing_is_taken_back_and_float32_trains_in_tf32_where_gpus_have_it_unless_the_user_says(
    resolved, monkeypatch
):
    def tf32_of(run: TrainingRun) -> list:
        return [decision.value for decision in run.decisions if decision.name == "tf32"]

    assert tf32_of(resolved(dtype="float32")) == []
    monkeypatch.setattr(decide, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(decide, "try_packing", lambda *_, **__: (None, "they mix"))
    run = resolved(dtype="float32", packing=True)
    assert tf32_of(run) == [True]
    assert run.options.packing is False and "they mix" in [decision.reason for decision in run.decisions]
    monkeypatch.setattr(decide, "try_packing", lambda *_, **__: ("sdpa", None))
    run = resolved(dtype="bfloat16", packing=True)
    assert (run.options.packing, run.options.attn_implementation) == (True, "sdpa") and tf32_of(run) == []
    assert tf32_of(resolved(dtype="float32", tf32=False)) == []
    # CPU ranks beside GPUs (DS_ACCELERATOR=cpu).
    assert tf32_of(resolved(machine=dataclasses.replace(EIGHT_GPUS, has_gpu=False), dtype="float32")) == []


def test_a_checkpoint_is_resumed_ended_or_taken_for_its_weights(tmp_path):
    def decided(step: int | None, **changes):
        run = tmp_path / f"run-{step}"
        if step is not None:
            checkpoint = run / f"checkpoint-{step}"
            (checkpoint / f"global_step{step}").mkdir(parents=True, exist_ok=True)
            (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.1}))
        training = {"output_dir": str(run), "resume_from_checkpoint": "auto", "max_steps": 8}
        config = TrainConfig(training=training | changes.pop("training", {}), **changes)
        path, decisions, is_end = resume_decisions(config, 2)
        assert path in (None, str(run / f"checkpoint-{step}"))
        return path is not None, {decision.name: decision.value for decision in decisions}, is_end

    assert decided(5) == (True, {}, False)
    assert decided(8) == (True, {}, False), "its final model is still to be written"
    (tmp_path / "run-8" / FINAL).mkdir()
    write_run(str(tmp_path / "run-8"), status="running")
    assert decided(8) == (True, {}, False), "its final model is that of an earlier end"
    write_run(str(tmp_path / "run-8"), status="done")
    assert decided(8) == (True, {}, True)
    assert decided(None) == (False, {}, False), "nothing is there"


def test_a_head_with_weights_of_its_own_resumes_though_the_config_ties_it(tmp_path):
    """It is loaded and measured untied, as the files have it."""
    model = write_model(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    training = {"output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "auto", "max_steps": 8}
    config = TrainConfig(model=str(model), training=training)
    shapes, facts = trained_shapes(build_model(config, dtype="float32", seed=0)), measure_model(config)
    assert sum(map(math.prod, shapes.values())) == facts.size.num_trainable
    (tmp_path / "run" / "checkpoint-5" / "global_step5").mkdir(parents=True)
    state = {"trainer_state.json": {"global_step": 5, "epoch": 0.1}}

    def resumed(**more: tuple[int, ...]) -> tuple:
        identity = run_identity(shapes | more, data={}, seed=42, sequences_per_step=4, options={})
        for name, content in (state | {MANIFEST: {"files": {}, "run_identity": identity, "world_size": 2}}).items():
            (tmp_path / "run" / "checkpoint-5" / name).write_text(json.dumps(content))
        return resume_decisions(config, 2, facts)

    path, (decision, _), is_end = resumed()
    assert (path, is_end) == (str(tmp_path / "run" / "checkpoint-5"), False)
    assert (decision.name, decision.value) == ("global_batch_size", 4)
    with pytest.raises(UserError, match=r"belongs to another run \(trained elements"):
        resumed(another=(3,))


def test_what_ends_every_rank_is_found_before_one_starts(options, tiny, tmp_path, monkeypatch):
    """In the environment of rank 0 of two, where no other rank is met."""
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "2")
    rows = [{"messages": [{"role": "usr", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    lost = Path(shutil.copytree(tiny / "model", tmp_path / "lost"))
    weights = load_file(lost / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, lost / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"status": "done"}')
    cases = [
        ({"model": str(tiny / "chat"), "data": str(write_jsonl(tmp_path / "rows.jsonl", rows))}, "has the role 'usr'"),
        ({"model": str(lost)}, "1 tensor of the model missing from its weights"),
        (
            {"zero": str(tmp_path / "zero.json")},
            "overlap_com: Extra inputs are not permitted; did you mean 'overlap_comm'",
        ),
        ({"report_to": "wandbx"}, "report_to=wandbx: wandbx is not supported"),
        ({"output_dir": str(tmp_path / "other")}, "contains another run"),
    ]

    def start(**changes) -> None:
        problems: list[str] = []
        check_start(make_config(TrainConfig, options(tmp_path / "run", **changes), problems), problems)

    for changes, message in cases:
        with pytest.raises(UserError, match=message):
            start(**changes)
    start()
    assert not (tmp_path / "run").exists()
