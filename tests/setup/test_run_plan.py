"""The plan of a run: what a checkpoint can be taken over by, what a machine or the NVMe of a DeepSpeed JSON allows."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny import GATED

from dsft.checkpoints.manifest import MANIFEST
from dsft.config.deepspeed import read_zero_file
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.measure import measure_model
from dsft.planner.memory import Job
from dsft.runtime.hardware import Machine
from dsft.setup.decide import Choice, TrainingRun, choose_plan, job_of, plan_run, smaller_plan
from dsft.units import GB

EIGHT_GPUS = Machine(nodes=1, ranks_per_node=8, device_bytes=80 * GB, host_bytes=1000 * GB, has_gpu=True)


@pytest.fixture(scope="module")
def measured(tiny):
    return measure_model(TrainConfig(model=str(tiny / "model")))


@pytest.fixture
def facts(measured):
    return measured


def plain_job(facts, options: TrainConfig) -> Job:
    job = job_of(dataclasses.replace(options, tiled_loss=False), facts, masked=False)
    return dataclasses.replace(job, attention="flash")


def chosen(facts, options: TrainConfig, *, job: Job | None = None, machine: Machine = EIGHT_GPUS, **known) -> Choice:
    job = job or plain_job(facts, options)
    return plan_run(TrainingRun(options=options, machine=machine, job=job, **known))


def checkpoint_in(folder: Path, **facts: Any) -> str:
    path = folder / "checkpoint-5"
    path.mkdir()
    (path / MANIFEST).write_text(json.dumps(facts))
    return str(path)


def test_a_resume_on_other_ranks_chooses_among_what_can_take_the_checkpoint_over(facts, tmp_path):
    machine = EIGHT_GPUS
    options = TrainConfig(dtype="bfloat16", training={"output_dir": str(tmp_path)})
    checkpoint = checkpoint_in(tmp_path, world_size=2, zero_stage=2)
    job = plain_job(facts, options)
    considered = {
        plan.zero for plan in chosen(facts, options, job=job, machine=machine, checkpoint=checkpoint).candidates
    }
    everything = {plan.zero for plan in chosen(facts, options, job=job, machine=machine).candidates}
    assert everything - considered == {"0"}


def test_a_resume_of_a_run_with_a_json_of_its_own_is_asked_for_it(facts, tmp_path):
    """Its scheduler and dtype of communication would be lost."""
    options = TrainConfig(dtype="bfloat16", training={"output_dir": str(tmp_path)})
    checkpoint = checkpoint_in(tmp_path, world_size=8, zero_stage=1, zero="own.json")
    with pytest.raises(UserError, match=f"{checkpoint}: its run had zero=own.json; give that again"):
        chosen(facts, options, checkpoint=checkpoint)


def test_what_was_not_sharded_stays_so_on_other_ranks(facts, tmp_path):
    options = TrainConfig(dtype="bfloat16", training={"output_dir": str(tmp_path)})
    checkpoint = checkpoint_in(tmp_path, world_size=2, zero_stage=0)
    choice = chosen(facts, options, checkpoint=checkpoint)
    assert choice.plan.zero == "0" and choice.reason.startswith("zero=0: ")


def test_what_cannot_fit_is_refused_with_what_would_unless_memory_is_not_to_be_checked(facts, tmp_path):
    options = TrainConfig(dtype="bfloat16", zero="0", training={"output_dir": str(tmp_path)})
    job, machine = plain_job(facts, options), dataclasses.replace(EIGHT_GPUS, device_bytes=GB // 100)
    with pytest.raises(
        UserError, match="zero=0: nothing fits; .* use more GPUs or nodes.*memory_check=false starts it"
    ):
        chosen(facts, options, job=job, machine=machine)
    choice = chosen(facts, dataclasses.replace(options, memory_check=False), job=job, machine=machine)
    assert not choice.plan.fits and choice.plan.zero == "0"


def test_hpz_over_nodes_of_3_and_5_ranks_is_refused_before_the_model_loads(facts, tmp_path):
    machine = dataclasses.replace(EIGHT_GPUS, nodes=2, ranks_per_node=5, num_ranks=8)
    options = TrainConfig(dtype="bfloat16", zero="3-hpz", training={"output_dir": str(tmp_path)})
    with pytest.raises(UserError, match="zero=3-hpz: zero_hpz_partition_size=5 does not divide the 8 ranks"):
        chosen(facts, options, machine=machine)
    assert chosen(facts, options, machine=dataclasses.replace(machine, num_ranks=0)).plan.zero == "3-hpz"


def test_offload_to_nvme_by_a_json_of_ones_own_runs_unplanned_with_one_line(facts, tmp_path):
    content = read_zero_file("3-offload", [])
    for part in ("offload_optimizer", "offload_param"):
        content["zero_optimization"][part] = {"device": "nvme", "nvme_path": str(tmp_path)}
    options = TrainConfig(dtype="bfloat16", zero="own.json", training={"output_dir": str(tmp_path / "run")})
    choice = chosen(facts, options, zero_file=content)
    assert choice.plan.fits and "Offload to NVMe is not planned" in choice.reason


def test_a_smaller_plan_takes_at_least_a_tenth_less_for_the_same_steps(tmp_path):
    transformers.LlamaConfig(**GATED | {"vocab_size": 32_000}).save_pretrained(tmp_path)
    facts = measure_model(TrainConfig(model=str(tmp_path / "config.json")))
    options = TrainConfig(dtype="bfloat16", seq_len=256, training={"per_device_train_batch_size": 64})
    job = plain_job(facts, options)
    plan = choose_plan(job, EIGHT_GPUS, zero="0").plan
    run = TrainingRun(options=options, machine=EIGHT_GPUS, job=job, plan=plan)
    smaller = smaller_plan(run)
    assert smaller.device_bytes <= 0.9 * plan.device_bytes
    assert smaller.micro_batch * smaller.accumulation == plan.micro_batch * plan.accumulation
    resumed = dataclasses.replace(run, checkpoint="checkpoint-5")
    assert (smaller.zero, smaller_plan(resumed).zero) == ("0", "1"), "ZeRO 0 takes no checkpoint of other stages"
    run.plan = dataclasses.replace(plan, device_bytes=GB // 100)
    assert smaller_plan(run) is None
    run.plan = dataclasses.replace(plan, device_bytes=1000 * GB)  # with memory_check=false, beyond any card
    assert smaller_plan(run).device_bytes <= EIGHT_GPUS.device_bytes
