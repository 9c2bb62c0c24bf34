"""The choice of a plan: what an expert would take, and when nothing else is left."""

import copy
import dataclasses

import pytest

from dsft.config.options import TrainConfig
from dsft.models.adapters import adapters_of
from dsft.models.measure import empty_model, model_size, usual_config
from dsft.planner.choose import Plan, all_plans, candidate_names, choose, reason
from dsft.planner.memory import Job, adapts_head, head_bytes, optimizer_memory
from dsft.planner.speed import CARDS
from dsft.runtime.hardware import Machine
from dsft.units import GB, GiB


def job_of(name: str, *, method: str = "full", **changes) -> Job:
    config = usual_config(name)
    options = TrainConfig(model=name, method=method)
    adapters = adapters_of(options, empty_model(config))
    size = model_size(empty_model(config), options, adapters=adapters)
    return Job(size=size, model_config=config, adapters=adapters, seq_len=2048, tiled_loss=True, **changes)


def machine_of(gpus: int, card: str = "H100", *, host_bytes: int = 1500 * GB, **changes) -> Machine:
    return Machine(
        nodes=changes.pop("nodes", 1),
        ranks_per_node=gpus,
        device_bytes=CARDS[card].usable_bytes,
        host_bytes=host_bytes,
        has_gpu=True,
        gpu_type=card,
        **changes,
    )


@pytest.fixture(scope="module")
def llama_8b() -> Job:
    return job_of("meta-llama/Llama-3.1-8B", sequences_per_step=64)


def chosen(job: Job, machine: Machine) -> Plan:
    return choose(all_plans(job, machine), machine)


def test_offload_and_a_full_gpu_must_gain_something(llama_8b):
    machine = machine_of(8)
    plans = [plan for plan in all_plans(llama_8b, machine) if plan.fits]
    plain = next(plan for plan in plans if plan.zero == "1")
    seconds = plain.step_seconds
    offload = next(plan for plan in plans if plan.zero == "2-offload")
    offload = dataclasses.replace(offload, step_seconds=seconds / 1.15, tokens_per_step=plain.tokens_per_step)
    assert choose([plain, offload], machine) is plain
    assert choose([plain, dataclasses.replace(offload, step_seconds=seconds / 1.3)], machine).zero == "2-offload"
    crowded = dataclasses.replace(plain, device_bytes=int(0.95 * machine.device_bytes))
    assert choose([crowded, offload], machine) is crowded, "though it fills the card"
    full = dataclasses.replace(plain, device_bytes=int(0.95 * machine.device_bytes), step_seconds=seconds / 1.1)
    assert choose([plain, full], machine) is plain


def test_where_nothing_fits_the_closest_is_named_with_what_it_needs(llama_8b):
    machine = machine_of(1, "4090", host_bytes=64 * GB)
    plan = chosen(llama_8b, machine)
    assert not plan.fits and reason(plan, machine).startswith("nothing fits; the closest is ZeRO")
    assert "of 23.6 GiB (" in reason(plan, machine)


def test_a_plan_makes_up_the_sequences_of_a_step(llama_8b):
    for plan in all_plans(llama_8b, machine_of(8)):
        assert plan.micro_batch * plan.accumulation * 8 == 64 and plan.tokens_per_step == 64 * 2048


def test_gradients_of_many_micro_batches_are_added_up_in_fp32(llama_8b):
    plans = all_plans(dataclasses.replace(llama_8b, micro_batch=1), machine_of(8))
    assert not {"0", "1"} & {plan.zero for plan in plans}
    assert {"fp32"} == {plan.deepspeed_config["data_types"]["grad_accum_dtype"] for plan in plans if plan.fits}


def test_shards_shrink_with_ranks_and_checkpointing_saves_memory(llama_8b):
    job = dataclasses.replace(llama_8b, micro_batch=1, accumulation=1)
    of_8, of_16 = (
        {(plan.zero, plan.checkpointing): plan for plan in all_plans(job, machine_of(8, nodes=nodes))}
        for nodes in (1, 2)
    )
    assert of_16["3", "off"].device_bytes < of_8["3", "off"].device_bytes
    assert of_8["3", "on"].device_bytes < of_8["3", "1/4"].device_bytes < of_8["3", "off"].device_bytes
    assert of_8["3", "on"].step_seconds > of_8["3", "off"].step_seconds
    assert of_8["3-offload", "on"].host_bytes > of_8["3", "on"].host_bytes


def test_what_a_job_or_machine_cannot_have_is_no_candidate(llama_8b):
    def names(machine: Machine, **changes) -> set[str]:
        return set(candidate_names(dataclasses.replace(llama_8b, **changes), machine))

    assert "3-hpz" in names(machine_of(8, nodes=2)) and "3-hpz" not in names(machine_of(8))
    assert "0" not in names(machine_of(8), dtype="float16")
    assert not any("offload" in name for name in names(dataclasses.replace(machine_of(8), has_gpu=False)))
    assert not any(name.startswith("3") for name in names(machine_of(8), liger=True, tiled_loss=False))


def test_a_tf32_training_is_planned_at_half_the_rate_of_bf16(llama_8b):
    plans = {
        dtype: all_plans(dataclasses.replace(llama_8b, dtype=dtype, micro_batch=8), machine_of(8), zero="3")[0]
        for dtype in ("bfloat16", "float32")
    }
    assert 1.7 < plans["float32"].step_seconds / plans["bfloat16"].step_seconds < 2.3


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        ({}, None, 12),
        ({}, "adamw_8bit", 4 + 2 * (1 + 4 / 256)),
        ({"optimizer": {"type": "Lion"}}, None, 8),
        ({"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, None, 6),
    ],
)
def test_an_optimizer_keeps_its_master_and_moments(config, name, expected):
    assert optimizer_memory(config, name, weight_bytes=2).checkpoint_bytes == expected


def test_a_gpu_that_is_not_known_is_planned_without_a_time():
    machine = dataclasses.replace(machine_of(1), gpu_type="NVIDIA GeForce RTX 9999", device_bytes=24 * GiB)
    plan = chosen(job_of("Qwen/Qwen2.5-0.5B", micro_batch=1), machine)
    assert plan.fits and not plan.has_time_estimate and "tokens/s" not in reason(plan, machine)


def test_an_adapted_head_is_planned_with_all_logits_and_those_of_the_adapter():
    job = job_of("meta-llama/Llama-3.2-1B", method="lora", micro_batch=4)
    adapted = copy.deepcopy(job.adapters)
    adapted.target_modules = {"q_proj", "lm_head"}
    assert adapts_head(adapted) and not adapts_head(job.adapters) and not adapts_head(None)
    plain = dataclasses.replace(job, tiled_loss=False)
    logits = 4 * 2048 * job.size.vocab_size
    assert (
        head_bytes(dataclasses.replace(plain, adapters=adapted), 4 * 2048) - head_bytes(plain, 4 * 2048) == 8 * logits
    )


@pytest.mark.parametrize(
    ("name", "method", "gpus", "zero", "seq_len", "micro_batch", "speed"),
    [
        # dsft on one H200 (benchmarks/gpus.md)
        ("meta-llama/Llama-3.1-8B", "lora", (1, "H200"), "1", 4096, 2, 11_787),
        ("meta-llama/Llama-3.1-8B", "qlora", (1, "H200"), "1", 2048, 4, 11_378),
        ("meta-llama/Llama-3.2-1B", "full", (1, "H200"), "2-offload", 4096, 4, 16_063),
        # PrimeIntellect-ai/prime-rl, benchmarks/baselines: FlashAttention 4 with activation checkpointing
        ("meta-llama/Llama-3.1-8B", "lora", (8, "B200"), "3", 65_536, 1, 6353),
        ("meta-llama/Llama-3.2-3B", "lora", (8, "B200"), "3", 65_536, 1, 9830),
    ],
)
def test_published_steps_are_met_within_15_percent(name, method, gpus, zero, seq_len, micro_batch, speed):
    """Tokens per second and GPU."""
    machine = machine_of(*gpus)
    job = job_of(name, method=method, micro_batch=micro_batch, accumulation=1, checkpointing=machine.world_size > 1)
    plans = all_plans(dataclasses.replace(job, seq_len=seq_len), machine, zero=zero)
    assert plans[0].tokens_per_second / machine.world_size == pytest.approx(speed, rel=0.15)
