"""The choice of a configuration: laws that hold for every plan, choices that are known to be right, and the command."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import socket
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, grid
from paper_jobs import EIGHT_GPUS, paper_job
from tiny import ARCHITECTURES, write_texts
from transformers import (
    AriaTextConfig,
    AutoConfig,
    Gemma4TextConfig,
    JetMoeConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
)

import dsft
from dsft.cli.main import main
from dsft.cli.plan_answers import PHASES
from dsft.config.deepspeed import CONFIG_DIR, check_deepspeed_json, read_zero_file
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.models.quantization import FORMATS
from dsft.models.size import measure_model
from dsft.planner import calibration
from dsft.planner.activations import Job
from dsft.planner.calibration import calibrate
from dsft.planner.candidates import NAMES, candidate_names, fit_nvme_buffers, settings, unmodelled
from dsft.planner.evaluation_plan import evaluation_section, plan_evaluation
from dsft.planner.plans import Plan, all_plans, choose, faster_with, reason, shortlist
from dsft.planner.states import frozen_bytes, load_terms
from dsft.planner.step_time import GPUS, TIME_RANGES, collective_seconds, flops_per_token, parse_interconnect, speeds_of
from dsft.planner.zero_layout import OPTIMIZERS, Term, ZeroLayout, bytes_by_phase, sums_in_fp32
from dsft.run_setup.alternatives import of_length, ways_to_fit
from dsft.run_setup.arguments import check_zero_file
from dsft.run_setup.resolve import TrainingRun, choose_plan, decide_run, plan_run, resolve_offline
from dsft.runtime.hardware import Machine, parse_bytes, this_machine
from dsft.units import GB

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for name, values in (("8b", LLAMA_8B), ("70b", LLAMA_70B), ("405b", LLAMA_405B)):
        LlamaConfig(**values).save_pretrained(folder / name)
    LlamaConfig(**LLAMA_8B | {"num_hidden_layers": 4, "max_position_embeddings": 2**24}).save_pretrained(
        folder / "long"
    )
    MixtralConfig().save_pretrained(folder / "mixtral")  # the default is Mixtral 8x7B
    LlavaConfig(text_config=LlamaConfig(**LLAMA_8B)).save_pretrained(folder / "llava")
    return {path.name: str(path) for path in folder.iterdir()}


def gpus(number: int = 8, gigabytes: int = 80, *, nodes: int = 1, host: int = 1000, **others) -> Machine:
    return Machine(
        nodes=nodes, ranks_per_node=number, device_bytes=gigabytes * GB, host_bytes=host * GB, has_gpu=True, **others
    )


@functools.cache
def job_in_bf16(model: str, method: str) -> Job:
    """Resolved and traced once for all lengths and machines."""
    return paper_job(TrainConfig(model=model, method=method, dtype="bfloat16"))


def plans_of(model: str, machine: Machine, *, method: str = "full", zero: str = "auto", seq_len: int = 1024, **job):
    job = of_length(job_in_bf16(model, method), seq_len, **job)
    plans = all_plans(job, machine, speeds_of(machine, dtype=job.dtype), zero=zero)
    return choose(plans, machine), plans


def test_parameters_are_counted_exactly_and_by_kind(configs):
    size = measure_model(TrainConfig(model=configs["8b"])).size
    assert size.num_params == 8_030_261_248  # as published for Llama 3.1 8B
    assert (
        size.embedding_params == size.head_params == 128256 * 4096
        and size.active_params == size.num_params - size.embedding_params
    )
    assert sum(numel * count for numel, count in size.numels) == size.num_params
    assert measure_model(TrainConfig(model=configs["70b"])).size.num_params == 70_553_706_496
    # r x (in + out) of the seven linear layers, times layers
    per_layer = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert (
        measure_model(TrainConfig(model=configs["8b"], method="lora", lora_r=16)).size.num_trainable == 32 * per_layer
    )
    experts = measure_model(TrainConfig(model=configs["mixtral"])).size
    assert experts.num_params == 46_702_792_704 and experts.active_params == pytest.approx(
        12.9e9 - experts.embedding_params, rel=0.01
    )  # as published: 46.7 B, 12.9 B active


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (AriaTextConfig, {"intermediate_size": 8, "moe_num_experts": 4, "moe_topk": 2}),
        (
            Gemma4TextConfig,
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
        ),
    ],
    ids=["aria", "gemma4"],
)
def test_experts_of_a_token_are_counted_by_any_name_of_their_number(tmp_path, kind, sizes):
    widths = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    kind(**widths, **sizes).save_pretrained(tmp_path)
    size = measure_model(TrainConfig(model=str(tmp_path))).size
    assert size.expert_params > 0 and size.active_expert_params == size.expert_params // 2
    assert size.ffn_size == 2 * 8


def test_experts_in_one_parameter_are_planned_as_bitsandbytes_leaves_them(configs):
    size = measure_model(TrainConfig(model=configs["mixtral"], method="qlora")).size
    experts = 32 * 8 * 3 * 4096 * 14336
    layout = ZeroLayout(size, {}, gpus(), dtype="bfloat16")
    assert size.plain_expert_params == experts and frozen_bytes(layout)[0] > 2 * experts
    loaded = {term.name: term.num_bytes for term in load_terms(layout)}
    assert loaded["weights"] > 4 * experts, "peft's prepare_model_for_kbit_training makes them float32"
    assert any(
        "45.1 B parameters of experts are not quantised" in note
        for note in unmodelled(paper_job(TrainConfig(model=configs["mixtral"], method="qlora")), {})
    )
    assert measure_model(TrainConfig(model=configs["mixtral"], method="lora")).size.plain_expert_params == 0


def test_experts_that_are_not_called_so_are_planned_as_bitsandbytes_leaves_them(tmp_path):
    """JetMoE has them in attention and in feed-forwards, under names of their own."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
    JetMoeConfig(**sizes, num_key_value_heads=2, kv_channels=8, vocab_size=64).save_pretrained(tmp_path)
    size = measure_model(TrainConfig(model=str(tmp_path), method="qlora")).size
    experts, hidden, width, heads = 4, 16, 24, 2 * 8
    assert size.plain_expert_params == 2 * experts * hidden * (3 * width + 2 * heads)


def test_the_workspaces_of_cublas_are_planned_on_hopper_alone(configs):
    planned = {}
    for name in GPUS:
        plan, _ = plans_of(configs["8b"], gpus(8, gpu_type=name), zero="3", micro_batch=1, accumulation=1)
        planned[name] = sum(term.num_bytes for term in plan.terms if term.name == "cuBLAS workspaces")
    hopper = {"H100", "H100-NVL", "H100-PCIE", "H200", "H200-NVL", "H20", "H20-3E", "H800", "GH200"}
    assert planned == {name: 2 * 2**25 if name in hopper else 0 for name in GPUS}


def test_a_multimodal_wrapper_is_planned_by_its_text_model(configs):
    size = paper_job(TrainConfig(model=configs["llava"]), attention="flash").size
    assert size.num_layers == 32 and size.other_params > 3e8 and size.num_params == 8_030_261_248 + size.other_params


@pytest.mark.parametrize(
    ("name", "machine", "method", "zero"),
    [
        ("8b", gpus(), "full", {"1", "2", "3"}),
        ("8b", gpus(1, 80), "full", {"2-offload", "3-offload-optimizer"}),
        ("8b", gpus(1, 80), "lora", {"1"}),
        ("8b", gpus(1, 24), "qlora", {"1", "2"}),
        pytest.param("70b", gpus(8, 80), "lora", {"3"}, marks=pytest.mark.exhaustive),
        (
            "70b",
            gpus(8, 80, nodes=2, host=1600),
            "full",
            {"3-offload-param", "3-offload-optimizer"},
        ),
        ("70b", gpus(8, 80, nodes=4), "full", {"3"}),
    ],
)
def test_the_choice_for_known_models_and_machines(configs, name, machine, method, zero):
    chosen, plans = plans_of(configs[name], machine, method=method)
    assert chosen.fits and chosen.zero in zero, chosen.label
    plans = [plan for plan in plans if plan.zero != "3-offload-partial"]
    fastest = max(plan.time.tokens_per_second for plan in plans if plan.fits)
    measured = [plan.time.tokens_per_second for plan in plans if plan.fits and not plan.is_unbenchmarked]
    assert chosen.time.tokens_per_second >= 0.95 * (max(measured) if not chosen.is_unbenchmarked else fastest)
    assert not chosen.is_unbenchmarked or not measured or fastest >= 1.15 * max(measured)


def test_offload_and_hpz_are_chosen_only_for_a_gain_of_15_percent(configs):
    machine = gpus(8, 80, nodes=4)
    chosen, plans = plans_of(configs["70b"], machine)
    best = max(plan.time.tokens_per_second for plan in plans if plan.fits and not plan.is_unbenchmarked)
    little, much = (
        [
            dataclasses.replace(
                plan,
                fits=True,
                time=dataclasses.replace(plan.time, step_seconds=plan.time.tokens_per_step / (gain * best)),
            )
            if plan.zero == "3-hpz"
            else plan
            for plan in plans
            if plan.zero in ("3", "3-hpz")
        ]
        for gain in (1.1, 1.2)
    )
    assert chosen.zero == "3" and choose(little, machine).zero == "3" and choose(much, machine).zero == "3-hpz"
    assert "ZeRO 3-hpz would gain 10%, predicted, not benchmarked" in reason(choose(little, machine), little, machine)
    partial = [dataclasses.replace(plan, zero="3-offload-partial") if plan.zero == "3-hpz" else plan for plan in much]
    whole = [dataclasses.replace(plan, zero="3-offload") if plan.zero == "3" else plan for plan in partial]
    for plans in (partial, whole):
        chosen = choose(plans, machine)
        assert chosen.zero in ("3", "3-offload"), "whatever the gain"
        assert "ZeRO 3-offload-partial would gain 20%, predicted, not benchmarked" in reason(chosen, plans, machine)
    assert choose([plan for plan in partial if plan.zero == "3-offload-partial"], machine).fits


def test_what_a_plan_changes_to_fit_stands_in_its_label(configs):
    chosen, _ = plans_of(configs["8b"], gpus(8, 10), zero="3-offload", micro_batch=1, seq_len=2048)
    assert "fewer live parameters" in chosen.label
    plain, _ = plans_of(configs["8b"], gpus(8, 80), zero="3", micro_batch=1)
    assert "(" not in plain.label


def test_some_layers_are_computed_again_where_all_of_them_would_leave_memory_unused(configs):
    wide = {"method": "lora", "seq_len": 2048, "zero": "3"}
    chosen, plans = plans_of(configs["70b"], gpus(), **wide)
    all_layers = next(plan for plan in plans if plan.activation_checkpointing and plan.checkpoint_every == 1)
    gain = chosen.time.tokens_per_second / all_layers.time.tokens_per_second - 1
    assert chosen.activation_checkpointing and chosen.checkpoint_every == 4 and 0.05 < gain < 1 / 3
    assert not chosen.low_headroom and all_layers.device_bytes < chosen.device_bytes
    assert " with activation checkpointing of one layer in 4" in chosen.label
    assert f"{gain:.0%} faster than with all layers computed again" in reason(chosen, plans, gpus())
    for given, every in ({"checkpointing": True}, 1), ({"checkpoint_every": 1}, 1), ({"checkpoint_every": 3}, 3):
        _, kept = plans_of(configs["70b"], gpus(), **wide, **given)
        assert {plan.checkpoint_every for plan in kept if plan.activation_checkpointing} == {every}
    _, small = plans_of(configs["8b"], gpus(), method="lora", zero="3")
    assert small[0].fits and [plan.activation_checkpointing for plan in small] == [False, True], "all fits without"


def test_what_does_not_fit_names_the_resource_that_binds(configs):
    machine = gpus(1, 24, host=200)
    chosen, plans = plans_of(configs["70b"], machine)
    assert not chosen.fits and "nothing fits" in reason(chosen, plans, machine)
    # 2 x 8 x 80 GB: hosts with less than the optimizer's states are killed in practice
    machine = gpus(8, 80, nodes=2, host=400)
    forced, plans = plans_of(configs["70b"], machine, zero="3-offload-optimizer")
    assert "host memory" in forced.limiting_resource and "of memory per host" in reason(
        forced, plans, machine, zero="3-offload-optimizer"
    )


def test_a_sentence_says_what_the_next_better_plan_would_need(configs):
    machine = gpus(8, 24)
    chosen, plans = plans_of(configs["8b"], machine, method="full")
    text = faster_with(chosen, plans, machine)
    assert chosen.fits and "per GPU" in text and "would fit" in text and "times as fast" in text


def test_the_plan_that_the_sentence_names_is_shown(configs):
    machine = gpus(8, 80, nodes=2, host=1000)
    chosen, plans = plans_of(configs["70b"], machine, method="lora")
    (named,) = re.findall(r"per (?:GPU|host), (ZeRO .*?) would fit", faster_with(chosen, plans, machine))
    assert named in [plan.label for plan in shortlist(chosen, plans, machine)]


def test_more_of_anything_never_needs_less(configs):
    sizes = [
        plans_of(configs["8b"], gpus(8), zero="3", seq_len=length, micro_batch=1, accumulation=1)[0].device_bytes
        for length in (1024, 2048, 4096)
    ]
    assert sizes == sorted(sizes)
    sharded = [
        plans_of(configs["8b"], gpus(number), zero="3", micro_batch=1, accumulation=1)[0].device_bytes
        for number in (2, 4, 8)
    ]
    assert sharded == sorted(sharded, reverse=True)
    _, (without, with_checkpointing) = plans_of(configs["8b"], gpus(8), zero="2", micro_batch=1, accumulation=1)
    assert (
        with_checkpointing.device_bytes < without.device_bytes
        and with_checkpointing.time.step_seconds > without.time.step_seconds
    )


def test_what_is_not_modelled_is_said(configs):
    def notes(zero: dict | None = None, **training) -> list[str]:
        return unmodelled(paper_job(TrainConfig(model=configs["8b"], training=training)), zero or {})

    plain = paper_job(TrainConfig(model=configs["8b"]))
    assert not any(unmodelled(dataclasses.replace(plain, optimizer=optimizer), {}) for optimizer in OPTIMIZERS)
    assert notes() == notes(use_liger_kernel=True) == notes(read_zero_file("3", [])) == []
    assert notes(optim="ademamix")[0].startswith("optim ademamix is not modelled: planned with the states of adamw_")
    assert notes(torch_compile=True)[0].startswith("torch.compile is not modelled")
    settings = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}, "data_types": {}}
    assert notes(settings) == [
        "zero_optimization.zero_quantized_weights is not modelled: planned without gathers of 8-bit weights."
    ]


def test_experts_without_adapters_and_kernels_that_are_missing_are_said(tmp_path):
    for architecture in ("qwen2_moe", "gpt2"):
        cls, values = ARCHITECTURES[architecture]
        cls(**values).save_pretrained(tmp_path / architecture)
    moe = TrainConfig(model=str(tmp_path / "qwen2_moe"), method="lora", lora_target_modules=["q_proj"])
    assert any("of experts get no adapters" in note for note in unmodelled(paper_job(moe, seq_len=64), {}))
    MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=1000).save_pretrained(tmp_path / "mamba")
    mamba = TrainConfig(model=str(tmp_path / "mamba"), method="lora", lora_target_modules=["in_proj"])
    assert unmodelled(paper_job(mamba, seq_len=64), {}) == [], "convolutions are no experts"
    gpt2 = TrainConfig(model=str(tmp_path / "gpt2"), training={"use_liger_kernel": True})
    plain = TrainConfig(model=str(tmp_path / "gpt2"))
    with_kernels, without = (paper_job(options, seq_len=64) for options in (gpt2, plain))
    assert unmodelled(with_kernels, {}) == ["use_liger_kernel changes nothing: Liger has no kernels for gpt2."]
    assert with_kernels.activations == without.activations


def test_an_optimizer_of_8_bits_takes_a_quarter_of_the_moments_and_none_where_deepspeed_brings_its_own(configs):
    _, (plain, *_) = plans_of(configs["8b"], gpus(), zero="1", micro_batch=1)
    _, (small, *_) = plans_of(configs["8b"], gpus(), zero="1", micro_batch=1, optimizer="adamw_8bit")
    states = [sum(term.num_bytes for term in plan.terms if term.name == "optimizer state") for plan in (plain, small)]
    assert states[0] - states[1] == pytest.approx((8 - 2 * (1 + 4 / 256)) * 8_030_261_248 / 8, rel=1e-3)
    offloaded = [
        plans_of(configs["8b"], gpus(), zero="2-offload", micro_batch=1, optimizer=name)[0]
        for name in ("adamw_torch_fused", "adamw_8bit")
    ]
    assert offloaded[0].host_bytes == offloaded[1].host_bytes, "CPUAdam takes its place"


def test_batches_make_up_the_step(configs):
    _, plans = plans_of(configs["8b"], gpus(8), sequences_per_step=128, **REFUSED)
    assert {plan.micro_batch * plan.accumulation * 8 for plan in plans} == {128}
    # One layer in some keeps what there is room for: no other is within 5 % and leaves a fifth free.
    of_stage_1 = [plan for plan in plans if plan.zero == "1" and plan.checkpoint_every == 1]
    assert all(plan.micro_batch == 1 or plan.device_bytes <= 0.8 * 80 * GB for plan in of_stage_1)
    assert max(plan.micro_batch for plan in plans) > 1  # equally fast by the model, so the larger
    _, plans = plans_of(configs["8b"], gpus(8), micro_batch=3, accumulation=2)
    assert {(plan.micro_batch, plan.accumulation) for plan in plans} == {(3, 2)}


def test_candidates_are_those_that_make_sense(configs):
    job = paper_job(TrainConfig(model=configs["8b"], dtype="bfloat16"))
    assert candidate_names(job, gpus(8, nodes=2, nvme_bytes=4 * 10**12)) == list(NAMES)
    assert "3-hpz" not in candidate_names(job, gpus(8)) and "3-nvme" not in candidate_names(job, gpus(8))
    assert "3-hpz" not in candidate_names(job, gpus(8, nodes=2, num_ranks=12)), "nodes of 8 and 4"
    quantised = dataclasses.replace(job.size, quantization=FORMATS["nf4"])
    assert candidate_names(dataclasses.replace(job, size=quantised), gpus(8)) == ["0", "1", "2"]
    assert candidate_names(dataclasses.replace(job, fp32_accumulation=True), gpus(1))[:2] == ["2", "3"]
    for name in NAMES:
        problems: list[str] = []
        assert check_deepspeed_json(read_zero_file(name, problems), name) == problems == []


REFUSED = {"fp32_accumulation": False}


def test_gradients_of_many_micro_batches_are_added_up_in_fp32_where_that_fits(configs):
    def of(zero: str, machine: Machine = EIGHT_GPUS, *, accumulation: int = 4, **job) -> tuple[bool, Plan, str]:
        job = paper_job(TrainConfig(model=configs["8b"], dtype=job.pop("dtype", "bfloat16")), **job)
        job = of_length(job, 1024, micro_batch=1, accumulation=accumulation, checkpointing=True)
        choice = choose_plan(job, machine, zero=zero)
        return sums_in_fp32(choice.plan.deepspeed_config), choice.plan, choice.reason

    assert of("3")[0] and of("2")[0]
    for zero, change in (("3", {"accumulation": 2}), ("1", {}), ("3", {"dtype": "float16"}), ("3", REFUSED)):
        assert not of(zero, **change)[0]
    assert of("3", dtype="float16", fp32_accumulation=True)[0]
    bf16, fp32 = of("3", **REFUSED)[1], of("3")[1]
    assert fp32.device_bytes > bf16.device_bytes
    between = dataclasses.replace(EIGHT_GPUS, device_bytes=(bf16.device_bytes + fp32.device_bytes) // 2)
    fits, plan, why = of("3", between)
    assert plan.fits and not fits and "4 micro batches are added up in bfloat16: float32 takes too much" in why


@pytest.mark.parametrize("ranks", [1, 8])
def test_zero_0_and_1_add_up_no_4_micro_batches_in_bf16_unless_asked_for(configs, ranks):
    machine = gpus(ranks)
    job = of_length(paper_job(TrainConfig(model=configs["8b"], method="lora", dtype="bfloat16")), 1024)

    choice = choose_plan(dataclasses.replace(job, micro_batch=1, accumulation=4), machine)
    assert choice.plan.zero == "2" and all(sums_in_fp32(plan.deepspeed_config) for plan in choice.candidates)
    free = {plan.zero: plan.accumulation for plan in choose_plan(job, machine).candidates}
    assert free["1"] < 4, "fewer micro batches"
    asked = dataclasses.replace(job, micro_batch=1, accumulation=4, **REFUSED)
    assert choose_plan(asked, machine).plan.zero == ("1" if ranks == 1 else "0")
    named = dataclasses.replace(asked, fp32_accumulation=None)
    why = choose_plan(named, machine, zero="1", zero_file=read_zero_file("1", [])).reason
    assert "4 micro batches are added up in bfloat16: ZeRO 1 cannot in float32." in why
    on_nvme = choose_plan(named, gpus(ranks, nvme_bytes=4 * 10**12), zero="3-nvme").reason
    assert "4 micro batches are added up in bfloat16: float32 was not tried with NVMe." in on_nvme


def test_a_plan_says_where_fp32_sums_cost_speed(configs):
    """ZeRO 2 reduces the gradients of each micro batch, ZeRO 1 those of a step."""
    job = of_length(paper_job(TrainConfig(model=configs["8b"], dtype="bfloat16")), 4096, sequences_per_step=256)
    said = [choose_plan(job, gpus(8, 90, interconnect=links)).reason for links in ("pcie", "nvlink")]
    assert [f"{WAY} (--fp32_accumulation false)" in why for why in said] == [True, True]
    assert WAY not in choose_plan(dataclasses.replace(job, **REFUSED), gpus(8, 90, interconnect="pcie")).reason
    resumed = choose_plan(job, gpus(8, 90, interconnect="pcie"), left_out=("0", "1"))  # on other ranks, say
    assert WAY not in resumed.reason


WAY = "times as fast, but adds up gradients in bfloat16"


def test_lowered_live_parameters_come_together(configs):
    """One alone changes nothing in DeepSpeed."""
    chosen, _ = plans_of(configs["8b"], gpus(8, 10), zero="3-offload", micro_batch=1, seq_len=2048)
    zero = chosen.deepspeed_config["zero_optimization"]
    assert chosen.fits and zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] < 10**9


def test_buckets_are_no_larger_than_needed_and_even(configs):
    size = measure_model(TrainConfig(model=configs["8b"], method="lora", lora_r=3)).size
    chosen, _ = plans_of(configs["8b"], gpus(8), method="lora", zero="2")
    bucket = chosen.deepspeed_config["zero_optimization"]["allgather_bucket_size"]
    assert bucket % 2 == 0 and max(numel for numel, _ in size.trainable_numels) <= bucket < 10**8


def test_stage_3_gathers_adapters_together_and_has_no_tiny_buckets(configs, tmp_path):
    """transformers' "auto" follows from the hidden size alone: 65,536 elements at 256."""
    LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8).save_pretrained(
        tmp_path
    )
    size = measure_model(TrainConfig(model=str(tmp_path / "config.json"))).size
    zero = plans_of(str(tmp_path / "config.json"), gpus(2), zero="3")[0].deepspeed_config["zero_optimization"]
    assert zero["reduce_bucket_size"] == size.num_trainable and zero["stage3_prefetch_bucket_size"] == size.num_params
    adapted = measure_model(TrainConfig(model=configs["8b"], method="lora")).size
    chosen, _ = plans_of(configs["8b"], gpus(8), method="lora", zero="3")
    zero = chosen.deepspeed_config["zero_optimization"]
    layer = adapted.num_params // adapted.num_layers  # with its part of the embeddings
    assert zero["stage3_prefetch_bucket_size"] == layer > 2 * 10**8
    largest_adapter = max(numel for numel, _ in adapted.trainable_numels)
    assert largest_adapter <= zero["stage3_param_persistence_threshold"] < 1024 * 4096  # and no projection
    persistent = next(term for term in chosen.terms if term.name == "persistent parameters")
    assert persistent.num_bytes >= 2 * adapted.num_trainable
    full, _ = plans_of(configs["8b"], gpus(8), zero="3")
    assert full.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] == 100_000


def test_what_a_deepspeed_json_leaves_to_auto_is_chosen_as_for_a_named_configuration(configs):
    """Where that does not fit, transformers' numbers stay; written ones always do."""
    options = TrainConfig(model=configs["8b"], method="lora", dtype="bfloat16")
    job, written = paper_job(options), read_zero_file("3", [])

    def zero_of(machine: Machine, **changes) -> dict:
        zero_file = written | {"zero_optimization": written["zero_optimization"] | changes}
        speeds = speeds_of(machine, dtype=job.dtype)
        plans = all_plans(job, machine, speeds, zero="own.json", zero_file=zero_file)
        return choose(plans, machine).deepspeed_config["zero_optimization"]

    named = plans_of(configs["8b"], gpus(8), method="lora", zero="3")[0].deepspeed_config["zero_optimization"]
    auto = {key: named[key] for key, value in written["zero_optimization"].items() if value == "auto"}
    assert len(auto) == 3 and "auto" not in auto.values()
    filled = zero_of(gpus(8))
    assert filled == written["zero_optimization"] | auto, "all else stays as it is written"
    filled = zero_of(gpus(8), stage3_param_persistence_threshold=7, reduce_bucket_size=512)
    assert filled["stage3_param_persistence_threshold"] == 7 and filled["reduce_bucket_size"] == 512
    too_small = dataclasses.replace(gpus(8), device_bytes=GB)
    assert zero_of(too_small) == written["zero_optimization"]


def test_zero_3_holds_more_activations_over_a_frozen_base(configs):
    """DeepSpeed's linear layers keep inputs that no weight's gradient needs."""
    options = TrainConfig(model=configs["8b"], method="lora", lora_target_modules=["q_proj"], dtype="bfloat16")
    job, held = dataclasses.replace(paper_job(options), micro_batch=1, checkpointing=False), {}
    for zero in ("2", "3"):
        (plan,) = all_plans(job, gpus(), speeds_of(gpus(), dtype=job.dtype), zero=zero)
        held[zero] = sum(term.num_bytes for term in plan.terms if term.name == "saved activations")
    assert held["3"] > 1.2 * held["2"]


def test_a_single_rank_overlaps_no_communication(configs):
    """It has none; ZeRO-1 with a second bucket took a tenth longer on a CPU."""
    overlaps = {
        (number, zero): plans_of(configs["8b"], gpus(number), method="lora", zero=zero)[0].deepspeed_config[
            "zero_optimization"
        ]["overlap_comm"]
        for number in (1, 2)
        for zero in ("1", "2-offload")
    }
    assert overlaps == {(1, "1"): False, (2, "1"): True, (1, "2-offload"): True, (2, "2-offload"): True}


def test_gradients_go_to_one_rank_where_links_are_slow_and_shares_large(configs):
    def is_reduced_to_all(machine: Machine, zero: str = "2", **options) -> bool:
        job = paper_job(TrainConfig(model=configs["8b"], **options))
        section = next(settings(zero, None, job, machine))[0]["zero_optimization"]
        return section.get("use_multi_rank_bucket_allreduce", True)

    assert not is_reduced_to_all(gpus(nodes=2)) and not is_reduced_to_all(gpus(nodes=2), "1")
    assert not is_reduced_to_all(gpus(interconnect="pcie"))
    assert is_reduced_to_all(gpus()), "NVLink"
    assert is_reduced_to_all(gpus(nodes=2), method="lora"), "shares of adapters are small"
    assert is_reduced_to_all(gpus(nodes=32)), "256 ranks"
    assert is_reduced_to_all(gpus(1)) and is_reduced_to_all(gpus(nodes=2), "2-offload")


def test_sub_groups_fill_a_power_of_two(configs):
    job = paper_job(TrainConfig(model=configs["70b"]))
    for world_size in (1, 8, 16):
        elements = next(settings("3", None, job, gpus(world_size)))[0]["zero_optimization"]["sub_group_size"]
        largest = elements + math.ceil(128256 * 8192 / world_size)  # the group that the embedding's shard closes
        assert math.log2(largest) == int(math.log2(largest)) and elements > 0.7 * largest


def test_arithmetic_of_a_step(configs):
    size = measure_model(TrainConfig(model=configs["8b"])).size
    short = flops_per_token(size, 1, checkpointing=False)
    assert short == pytest.approx(6 * size.active_params, rel=1e-3) and flops_per_token(
        size, 1, checkpointing=True
    ) == pytest.approx(4 / 3 * short)
    lora = measure_model(TrainConfig(model=configs["8b"], method="lora")).size
    assert flops_per_token(lora, 1, checkpointing=False) == pytest.approx(4 * size.active_params, rel=0.01)
    two_nodes = gpus(8, nodes=2, interconnect="nvlink+eth25")
    speeds = speeds_of(two_nodes, dtype="bfloat16")
    assert collective_seconds(1e9, 0, two_nodes, speeds, speeds.link_bytes) == pytest.approx(
        0.5 / (0.8 * 25 / 8)
    )  # each node gets the other's half over its card
    assert collective_seconds(1e9, 0, two_nodes, speeds, speeds.link_bytes, ranks=8) == pytest.approx(
        7 / 8 / (0.8 * 300)
    )
    # Across slow Ethernet hpZ gathers half as much; stage 2 reduces once per micro batch, stage 1 once per step. Both
    # all-reduce, where DeepSpeed's default stays.
    seconds = {
        name: (
            plans_of(configs["8b"], two_nodes, zero=name, micro_batch=1, accumulation=4)[1][
                0
            ].time.communication_seconds
        )
        for name in ("1", "2", "3", "3-hpz")
    }
    assert seconds["1"] < seconds["2"] and seconds["1"] < seconds["3-hpz"] < seconds["3"]


def test_short_micro_batches_of_zero_3_wait_for_python(configs):
    seconds = {}
    for seq_len in (256, 8192):
        for name in ("2", "3"):
            plan, _ = plans_of(configs["8b"], gpus(8), zero=name, seq_len=seq_len, micro_batch=1, accumulation=1)
            seconds[name, seq_len] = plan.time.step_seconds
            assert (plan.time.host_seconds > plan.time.compute_seconds) == ((name, seq_len) == ("3", 256))
    assert seconds["3", 256] > 1.7 * seconds["2", 256] and seconds["3", 8192] < 1.2 * seconds["2", 8192]


def test_a_frozen_base_crosses_nodes_no_more_with_hpz(configs):
    two_nodes = gpus(8, nodes=2, interconnect="nvlink+eth25")
    chosen, plans = plans_of(configs["70b"], two_nodes, method="lora", seq_len=2048)
    by_zero = {plan.zero: plan.time for plan in plans}
    assert chosen.zero == "3-hpz"
    assert by_zero["3-hpz"].communication_seconds < 0.2 * by_zero["3"].communication_seconds
    assert by_zero["3-hpz"].step_seconds < 0.7 * by_zero["3"].step_seconds


def test_hpz_is_for_nodes_of_as_many_ranks(configs):
    job, options = job_in_bf16(configs["70b"], "lora"), TrainConfig(method="lora", dtype="bfloat16")
    slow = {"nodes": 2, "interconnect": "nvlink+eth25"}
    assert plan_run(options, of_length(job, 2048), gpus(8, **slow)).plan.zero == "3-hpz"
    assert plan_run(options, of_length(job, 2048), gpus(8, **slow, num_ranks=12)).plan.zero == "3"
    named, content = dataclasses.replace(options, zero="3-hpz"), read_zero_file("3-hpz", [])
    assert check_zero_file(content, named, gpus(4, nodes=3)) == [], "of the 4 ranks of each node"
    (refusal,) = check_zero_file(content, named, gpus(8, nodes=2, num_ranks=12))
    assert "zero_hpz_partition_size=8 does not divide the 12 ranks; take zero 3" in refusal


def test_the_size_of_hpz_that_a_json_names_is_kept_and_must_divide_the_ranks(configs, tmp_path):
    path = tmp_path / "own.json"
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    path.write_text(json.dumps({"zero_optimization": zero}))
    options = TrainConfig(model=configs["8b"], dtype="bfloat16", zero=str(path))
    machine, job = gpus(8, nodes=2), paper_job(options)
    plan = plan_run(options, job, machine, zero_file={"zero_optimization": zero}).plan
    assert plan.deepspeed_config["zero_optimization"]["zero_hpz_partition_size"] == 4
    few = plan_run(options, job, gpus(4), zero_file={"zero_optimization": zero | {"zero_hpz_partition_size": 8}}).plan
    (partition,) = {term.num_bytes for term in few.terms if term.name == "secondary partition" and term.phase != "load"}
    assert partition == 2 * job.size.num_trainable // 4, "of 4 ranks, DeepSpeed takes all"
    with pytest.raises(UserError, match="zero_hpz_partition_size=3 does not divide the 16 ranks; use 8"):
        plan_run(options, job, machine, zero_file={"zero_optimization": zero | {"zero_hpz_partition_size": 3}})
    below = {"stage": 2, "zero_hpz_partition_size": 3}  # DeepSpeed makes its groups under stage 3 alone
    plan_run(options, job, machine, zero_file={"zero_optimization": below}, must_fit=False)


def test_a_bucket_that_goes_to_the_ranks_that_keep_it_takes_a_call_for_each(configs):
    job, machine = paper_job(TrainConfig(model=configs["8b"], dtype="bfloat16")), gpus(8, nodes=2)
    speeds = speeds_of(machine, dtype="bfloat16")
    slow, instant = (
        all_plans(job, machine, dataclasses.replace(speeds, collective_seconds=latency), zero="1")[0]
        for latency in (1.0, 0.0)
    )
    zero = slow.deepspeed_config["zero_optimization"]
    buckets = job.size.num_trainable // zero["reduce_bucket_size"] + 1
    assert not zero["use_multi_rank_bucket_allreduce"]
    calls = slow.time.communication_seconds - instant.time.communication_seconds
    assert calls == pytest.approx(buckets + 16 - 1 + buckets), "reductions and gathers of one step"


def test_seconds_have_a_range_where_published_steps_are_like_them(configs):
    kinds = {
        name: plans_of(configs["8b"], gpus(8), zero=zero, seq_len=seq_len, micro_batch=1, **others)[0].time.kind
        for name, zero, seq_len, others in (
            ("dense", "3", 4096, {}),
            ("long", "3", 65536, {}),
            ("short", "3", 1024, {}),
            ("LoRA", "3", 4096, {"method": "lora"}),
            ("compiled", "3", 4096, {"compiled": True}),
            ("offloaded", "3-offload", 4096, {}),
        )
    }
    assert {name for name, kind in kinds.items() if kind == name} == {"dense", "long", "short", "LoRA"}
    assert kinds["compiled"] == kinds["offloaded"] and kinds["compiled"] not in TIME_RANGES


@pytest.mark.parametrize("architecture", grid(ARCHITECTURES, ["gpt2"]))
def test_every_architecture_can_be_planned(tmp_path, architecture):
    cls, values = ARCHITECTURES[architecture]
    cls(**values).save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tmp_path)
    for method in ("full", "lora"):
        chosen, _, size = dsft.plan(
            str(tmp_path / "config.json"), machine=gpus(), method=method, seq_len=128, dtype="bfloat16"
        )
        assert chosen.fits and 0 < size.num_trainable <= size.num_params


def test_activations_are_said_to_be_traced(tmp_path):
    cls, values = ARCHITECTURES["gpt_neox"]
    cls(**values).save_pretrained(tmp_path)
    job = paper_job(TrainConfig(model=str(tmp_path), seq_len=128, dtype="bfloat16"), attention="flash")
    assert job.activations.source == "trace of its own code"


def planned(config: TrainConfig, machine: Machine, *, checkpoint: str | None = None) -> Plan:
    """The plan of a training over full windows of text."""
    zero_file = None if config.zero == "auto" else read_zero_file(config.zero, [])
    run = TrainingRun(options=config, machine=machine, model=measure_model(config))
    decide_run(run)
    return plan_run(run.options, run.job, machine, zero_file=zero_file, checkpoint=checkpoint).plan


def test_training_refuses_what_cannot_fit(configs, tmp_path):
    problems: list[str] = []
    config = make_config(
        TrainConfig,
        {
            "model": configs["8b"],
            "data": ["d.jsonl"],
            "output_dir": str(tmp_path / "run"),
            "zero": "1",
            "seq_len": 1024,
            "dtype": "bfloat16",
            "per_device_train_batch_size": 1,
        },
        problems,
    )
    assert problems == []
    with pytest.raises(UserError, match=r"GiB per GPU.*offload.* would fit; memory_check=false"):
        planned(config, gpus(1, 80))
    with pytest.raises(UserError, match="cannot fit.*use more GPUs"):  # an offloaded optimizer would be refused
        planned(dataclasses.replace(config, learning_rates={"embed": 0.1}), gpus(1, 80))
    assert not planned(dataclasses.replace(config, memory_check=False), gpus(1, 80)).fits
    with pytest.raises(UserError, match="nothing fits.*more GPUs"):
        planned(dataclasses.replace(config, zero="auto"), gpus(1, 16, host=64))
    # Two GPUs hold an adapter's base in halves, and neither all of it at once.
    halves = dataclasses.replace(config, zero="auto", method="lora", eval_fraction=0.1)
    assert planned(halves, gpus(2, 16)).fits
    with pytest.raises(UserError, match=r"nothing fits.* ZeRO 3.* without generate_samples would fit"):
        planned(dataclasses.replace(halves, generate_samples=2), gpus(2, 16))


def test_a_resumed_run_keeps_its_plan_or_takes_one_that_can_take_it_over(configs, tmp_path):
    values = {
        "model": configs["8b"],
        "data": ["d.jsonl"],
        "output_dir": str(tmp_path / "run"),
        "seq_len": 1024,
        "dtype": "bfloat16",
        "global_batch_size": 64,
    }
    config = make_config(TrainConfig, values, [])
    (tmp_path / "run").mkdir()
    plan = {"zero": "3", "activation_checkpointing": True, "micro_batch": 2, "accumulation": 4, "checkpoint_every": 1}
    run = {"world_size": 8, "plan": plan, "config": {"sequence_parallel": 1}}
    (tmp_path / "run/run.json").write_text(json.dumps(run))
    checkpoint = tmp_path / "run" / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(json.dumps({"zero_stage": 3}))
    fresh, resumed = planned(config, gpus()), planned(config, gpus(), checkpoint=str(checkpoint))
    kept = [
        (plan.zero, plan.activation_checkpointing, plan.micro_batch, plan.accumulation) == ("3", True, 2, 4)
        for plan in (fresh, resumed)
    ]
    assert kept == [False, True]
    fewer = planned(config, gpus(4), checkpoint=str(checkpoint))
    assert fewer.zero == planned(config, gpus(4)).zero and fewer.micro_batch * fewer.accumulation * 4 == 64
    (checkpoint / "manifest.json").write_text(json.dumps({"zero_stage": 0}))
    assert planned(config, gpus(4, 400), checkpoint=str(checkpoint)).zero == "0", (
        "what was not cut into shards stays so"
    )


def test_offload_to_a_disk_counts_the_disk(configs, tmp_path):
    written = read_zero_file("3-nvme", [])
    for part in ("offload_optimizer", "offload_param"):
        written["zero_optimization"][part]["nvme_path"] = str(tmp_path)
    path = tmp_path / "nvme.json"
    path.write_text(json.dumps(written))
    cls, small = ARCHITECTURES["llama"]
    cls(**small).save_pretrained(tmp_path)
    config = make_config(
        TrainConfig,
        {
            "model": str(tmp_path),
            "data": ["d.jsonl"],
            "output_dir": str(tmp_path / "run"),
            "zero": str(path),
            "seq_len": 128,
            "dtype": "bfloat16",
        },
        [],
    )
    plan = planned(config, gpus())
    assert plan.zero == str(path) and plan.fits
    chosen, _ = plans_of(configs["8b"], gpus(8, nvme_bytes=10**9), zero="3-nvme")
    assert "NVMe" in chosen.limiting_resource
    chosen, _ = plans_of(configs["8b"], gpus(8, nvme_bytes=10**13, memlock_bytes=2**23), zero="3-nvme")
    assert chosen.limiting_resource == "locked memory"


@pytest.mark.parametrize("num_gpus", [1, 4, 8])
def test_buffers_of_nvme_hold_the_shard_of_the_largest_parameter(configs, num_gpus):
    """DeepSpeed asserts it as it loads the embedding, here 128,256 x 4,096."""
    chosen, _ = plans_of(configs["8b"], gpus(num_gpus, nvme_bytes=10**13), zero="3-nvme")
    section = chosen.deepspeed_config["zero_optimization"]
    assert section["offload_param"]["buffer_size"] == max(10**8, 128256 * 4096 // num_gpus)
    # Each weight that stays, or is fetched ahead, holds a buffer, and there are five.
    assert section["stage3_prefetch_bucket_size"] == section["stage3_max_reuse_distance"] == 0


@pytest.mark.parametrize(
    ("count", "is_kept"), [({}, False), ({"buffer_count": 5}, False), ({"buffer_count": 99}, True)]
)
def test_weights_that_stay_have_buffers_on_nvme(configs, count, is_kept):
    """transformers' manual has this number, and five buffers."""
    section = {"stage3_max_reuse_distance": 10**9, "offload_param": {"device": "nvme"} | count}
    fit_nvme_buffers(section, job_in_bf16(configs["8b"], "full").size, 8)
    assert section["stage3_max_reuse_distance"] == (10**9 if is_kept else 0)


@pytest.mark.parametrize("text", ["80", "80G", "GB", "-1GB", "0GB", "80 gigabytes"])
def test_sizes_are_read_strictly(text):
    with pytest.raises(UserError, match="80GB"):
        parse_bytes(text)


def test_interconnects():
    gpu = GPUS["A100-80GB"]
    assert parse_interconnect("nvlink+ib400", gpu) == (0.8 * 300 * GB, 0.8 * 50 * GB)
    assert parse_interconnect("pcie+8xib200", gpu) == (0.8 * 32 * GB, 0.8 * 200 * GB)
    assert parse_interconnect("eth10", gpu) == (0.8 * 300 * GB, 0.8 * 1.25 * GB)
    for text in ("nvlik", "ib", "eth0", "pcie9"):
        with pytest.raises(UserError, match="unknown"):
            parse_interconnect(text, gpu)


def test_this_machine_is_measured():
    machine = this_machine(ranks_per_node=2)
    assert (
        machine.measured and machine.cores >= 1 and (0 < machine.device_bytes <= machine.host_bytes or machine.has_gpu)
    )


def compiled_ops() -> str:
    """Where this machine keeps DeepSpeed's compiled operators."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path(root) / "torch_extensions" / f"{python}_cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_this_machine_is_measured_by_its_ranks(tmp_path, monkeypatch, ranks):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", compiled_ops())  # else the ranks compile DeepSpeed's operators again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = dataclasses.replace(this_machine(ranks_per_node=ranks), has_gpu=False, gpu_type="")
    assumed = speeds_of(machine, dtype="float32")
    file, _ = calibrate(machine, dtype="float32")
    assert file.is_file()
    measured = calibration.speeds_for(machine, dtype="float32")
    assert (
        measured.flops > 1e9
        and measured.flops != assumed.flops
        and (measured.link_bytes == assumed.link_bytes) == (ranks == 1)
        and (ranks == 1 or (measured.link_bytes > 1e6 and 0 < measured.collective_seconds < 1))
    )


def test_measured_speeds_take_the_place_of_assumed_ones_and_tell_time(configs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = dataclasses.replace(this_machine(ranks_per_node=1), has_gpu=False, gpu_type="")
    assumed = speeds_of(machine, dtype="float32")
    assert calibration.speeds_for(machine, dtype="float32") == assumed and not assumed.has_time_estimate
    job = paper_job(TrainConfig(model=configs["8b"]))
    path = calibration.keep("ranks", calibration.ranks_key(machine, "float32"), {"flops": 3e10, "device_bytes": 4e9})
    measured = calibration.speeds_for(machine, dtype="float32")
    assert "measured on this machine" in measured.source and measured.has_time_estimate
    assert measured.flops == 3e10 and measured.link_bytes == assumed.link_bytes
    larger = dataclasses.replace(machine, host_bytes=10**12, device_bytes=10**12)
    for speeds in (assumed, measured):
        plans = all_plans(job, larger, speeds, zero="1")
        assert ("tokens/s predicted" in reason(plans[0], plans, larger)) == speeds.has_time_estimate
    on_paper, with_gpu = dataclasses.replace(machine, measured=False), dataclasses.replace(machine, gpu_type="T4")
    more_cores = dataclasses.replace(machine, cores=machine.cores + 1)  # of the same host, in another allocation
    for other, dtype in (
        (on_paper, "float32"),
        (with_gpu, "float32"),
        (more_cores, "float32"),
        (machine, "bfloat16"),
    ):
        assert calibration.speeds_for(other, dtype=dtype) == speeds_of(other, dtype=dtype)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    assert calibration.speeds_for(machine, dtype="float32") == assumed
    path.write_text("{")
    assert "cannot be read" in calibration.speeds_for(machine, dtype="float32").source


def test_measured_memory_outside_of_torch_takes_the_place_of_the_assumed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = gpus(2, gpu_type="H100", measured=True)
    assumed = speeds_of(machine, dtype="bfloat16")
    outside = {"context_bytes": 100, "communicators_bytes": [10, 20, 30]}
    calibration.keep("outside", calibration.gpus_key(machine), outside)
    outside = calibration.speeds_for(machine, dtype="bfloat16").outside
    assert outside.measured and outside.total_bytes(2) == 120 and outside.total_bytes(0) == 100
    for other in ({"measured": False}, {"nodes": 2}, {"ranks_per_node": 4}, {"gpu_type": "A100-80GB"}):
        elsewhere = dataclasses.replace(machine, **other)
        assert calibration.speeds_for(elsewhere, dtype="bfloat16").outside == assumed.outside
    alone = gpus(1, gpu_type="H100", measured=True)
    calibration.keep("outside", calibration.gpus_key(alone), {"context_bytes": 100, "communicators_bytes": []})
    outside = calibration.speeds_for(alone, dtype="bfloat16").outside
    assert outside.context_bytes == 100 and outside.communicators_bytes == assumed.outside.communicators_bytes


def run_plan(capsys, *words: str, fits: bool = True) -> str:
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit, match="^1$"):
        main(["plan", *words])
    return capsys.readouterr().out


def test_the_command_prints_table_reason_and_terms(configs, capsys):
    out = run_plan(
        capsys,
        "--model",
        configs["405b"],
        "--nodes",
        "16",
        "--gpus",
        "8x80GB",
        "--host_memory",
        "2TB",
        "--explain",
    )
    assert "405.853 B parameters" in out and "->" in out and "is chosen" in out
    assert "optimizer" in out and "computing" in out and "activations: trace of its own code" in out


def test_the_peak_is_explained_with_every_phase_that_may_make_it(configs, capsys):
    words = ["--model", configs["8b"], "--gpus", "8xH100", "--zero", "3", "--method", "lora", "--seq_len", "512"]
    words += ["--per_device_train_batch_size", "1", "--generate_samples", "2", "--eval_data", "d"]
    plan = json.loads(run_plan(capsys, *words, "--json"))["chosen"]
    sums = bytes_by_phase([Term(**term) for term in plan["terms"]], "device")
    assert sums["always"] + sums["sample"] == plan["device_bytes"] > sums["always"] + sums["compute"]
    (sentence,) = re.findall("^peak = .*", run_plan(capsys, *words, "--explain"), re.MULTILINE)
    assert all(f"({name})" in sentence for phase, name in PHASES.items() if phase != "always")


def test_the_command_repeats_the_question_and_shows_the_chosen_one_and_its_cost(configs, capsys):
    words = ["--model", configs["8b"], "--gpus", "8xH100", "--tokens", "1e9", "--num_train_epochs", "2"]
    out = run_plan(capsys, *words, "--dollars_per_gpu_hour", "2.5")
    rows = [line for line in out.splitlines() if " x " in line and ("yes" in line or "no:" in line)]
    assert len(rows) == 1 and out.count("->") == 1 and "tokens per step" in out and "is chosen" in out
    assert "full finetuning (--method), 1,024 tokens per sequence (--seq_len), bfloat16 (--dtype)" in out
    everything = run_plan(capsys, *words, "--all")
    assert len([line for line in everything.splitlines() if " x " in line and ("yes" in line or "no:" in line)]) > 15
    printed = json.loads(run_plan(capsys, *words, "--dollars_per_gpu_hour", "2.5", "--json"))
    cost, speed = printed["cost"], printed["chosen"]["tokens_per_second"]
    assert cost["hours"] == pytest.approx(2e9 / speed / 3600)
    assert cost["dollars"] == pytest.approx(2.5 * 8 * cost["hours"])
    assert cost["least_hours"] < cost["hours"] < cost["most_hours"]
    assert f"{cost['hours']:,.1f} hours" in out and f"{cost['dollars']:,.0f} dollars" in out
    by_default = json.loads(run_plan(capsys, *words[:-2], "--json"))["cost"]
    assert (by_default["epochs"], by_default["tokens"]) == (3, 3e9)  # of transformers' TrainingArguments


def test_hours_of_data_that_is_not_prepared_are_left_out_with_a_note(tiny, tmp_path, capsys):
    data = write_texts(tmp_path / "texts.jsonl", 7, seed=26)  # of no other test, which may have prepared it
    words = ["plan", "--model", str(tiny / "model"), "--seq_len", "64", "--gpus", "8xH100"]
    for given, is_noted in (
        ([], False),
        (["--data", str(data)], True),
        (["--data", str(data), "--tokens", "1e9"], False),
    ):
        main([*words, *given])
        assert ("hours are counted once the data is prepared" in capsys.readouterr().err) == is_noted, given


def test_the_cheapest_machine_and_the_smallest_are_found(configs, capsys, tmp_path):
    words = ["--model", configs["8b"], "--cheapest", "--tokens", "1e9"]
    rows = json.loads(run_plan(capsys, *words, "--json"))
    fitting = [row for row in rows if row["plan"]["fits"]]
    assert len(rows) > 15 and 0 < len(fitting) < len(rows)
    assert all(row["cost"]["tokens"] == 3e9 for row in rows)
    prices = tmp_path / "prices.toml"
    prices.write_text(
        '[[machine]]\ngpus = "1x4090"\nhost_memory = "64GB"\ndollars_per_gpu_hour = 0.1\n'
        '[[machine]]\ngpus = "8xH100"\ndollars_per_gpu_hour = 2\n[[machine]]\ngpus = "8xA100-80GB"\n'
        'dollars_per_gpu_hour = 0.5\n[[machine]]\nnodes = "2,4"\ngpus = "8xH100"\n'  # without a price
    )
    out = run_plan(capsys, *words, "--prices", str(prices))
    *table, last = out.splitlines()
    lines = {name: next(line for line in table if name in line) for name in ("1x4090", "8xH100", "8xA100", "2 x 8xH")}
    assert "no:" in lines["1x4090"] and "smallest" in lines["8xH100"] and "cheapest" in lines["8xA100"]
    assert any("4 x 8xH" in line for line in table)
    assert " - " in lines["2 x 8xH"] and "yes" in lines["2 x 8xH"], "hours, and no dollars"
    assert last.startswith("smallest: 8xH100, ") and "; cheapest: 8xA100-80GB, " in last and "dollars" in last
    assert len(last.split()) <= 25
    batch = ("--global_batch_size", "64", "--per_device_train_batch_size", "1", "--seq_len", "1024")
    limited = json.loads(
        run_plan(capsys, *words, "--prices", str(prices), *batch, "--max_steps", "10", "--json")
    )  # the first machine has one rank, the others 8
    assert {row["plan"]["time"]["tokens_per_step"] for row in limited} == {64 * 1024}
    assert {row["cost"]["tokens"] for row in limited} == {10 * 64 * 1024}
    prices.write_text('[[machine]]\ngpus = "1xV100-32GB"\n[[machine]]\ngpus = "8xH100"\n')
    small = ["--model", "Qwen/Qwen2.5-0.5B", "--cheapest", "--prices", str(prices), "--json"]
    older, newer = json.loads(run_plan(capsys, *small))
    for row, machine in ((older, "1xV100-32GB"), (newer, "8xH100")):  # in float32, and in bfloat16
        alone = json.loads(run_plan(capsys, *small[:2], "--gpus", machine, "--json"))["chosen"]
        assert row["plan"]["device_bytes"] == alone["device_bytes"], machine
    (shared,) = json.loads(run_plan(capsys, *small, "--sequence_parallel", "2"))
    assert shared["machine"]["gpu_type"] == "H100", "a single GPU shares its sequences with no other"
    older, newer = json.loads(run_plan(capsys, *small, "--global_batch_size", "12"))
    assert (older["plan"]["fits"], newer["plan"]["limiting_resource"]) == (True, "global_batch_size")
    with pytest.raises(SystemExit):
        run_plan(capsys, *small, "--sequence_parallel", "3")
    assert "none of these machines can share this job" in capsys.readouterr().err
    file = json.loads((CONFIG_DIR / "zero2.json").read_text())
    file |= {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    (tmp_path / "own.json").write_text(json.dumps(file))
    (chosen,) = json.loads(run_plan(capsys, *small, "--zero", str(tmp_path / "own.json")))  # 8 ranks alone take 64 so
    assert chosen["machine"]["gpu_type"] == "H100"
    assert (chosen["plan"]["micro_batch"], chosen["plan"]["accumulation"]) == (4, 2)
    file |= {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}}
    (tmp_path / "own.json").write_text(json.dumps(file | {"optimizer": {"type": "Lion"}}))
    (chosen,) = json.loads(run_plan(capsys, *small, "--zero", str(tmp_path / "own.json")))
    assert chosen["cost"]["steps"] == 10, "as the JSON says"
    assert "Lion (--zero)\n" in run_plan(capsys, *small[:-1], "--zero", str(tmp_path / "own.json"))
    for content, more, said in [
        ("[[machine]]\ngpu = 1\n", (), "prices.toml: machine 1: unknown key gpu"),
        ("[[machine]]\nnodes = '2'\n", (), "prices.toml: machine 1: it needs gpus, such as 8xH100"),
        ("[[machine]]\nnodes = 0\ngpus = '1xH100'\n", (), "prices.toml: machine 1: --nodes 0: write a number"),
        *(
            (f"[[machine]]\ngpus = '1xH100'\ndollars_per_gpu_hour = {price}\n", (), "is no price; write a number")
            for price in ("nan", "inf", "-1", "true", "'2'")
        ),
        ("[machine]\ngpus = '1xH100'\n", (), "prices.toml: machine is no list of tables"),
        ("machine = []\n", (), "prices.toml: machine is no list of tables"),
        ("", ("--longest",), "--cheapest is a question of its own; leave out --longest"),
    ]:
        prices.write_text(content)
        with pytest.raises(SystemExit):
            run_plan(capsys, *words, "--prices", str(prices), *more)
        assert said in capsys.readouterr().err


def test_changes_are_combined_where_none_alone_is_enough(configs):
    options = TrainConfig(model=configs["70b"], method="qlora", dtype="bfloat16")
    machine = gpus(2, 24, host=64, gpu_type="4090")
    ways = ways_to_fit(options, paper_job(options, machine=machine), machine, attention="flash")
    assert {"method", "host_memory"} in [way.change.keys() for way in ways]
    assert all(way.plan.fits for way in ways)


@pytest.mark.exhaustive
def test_feed_forwards_in_tiles_make_long_sequences_fit_for_a_longer_step(tmp_path):
    LlamaConfig(**(LLAMA_8B | {"max_position_embeddings": 131072})).save_pretrained(tmp_path)
    name = str(tmp_path / "config.json")
    options = TrainConfig(model=name, method="lora", dtype="bfloat16", seq_len=81920)
    machine = gpus(1, 40, host=1000, gpu_type="A100-40GB")
    job = paper_job(options, machine=machine)
    (way,) = (way for way in ways_to_fit(options, job, machine, attention="flash") if way.change == {"tiled_mlp": True})
    assert way.plan.fits and way.plan.device_bytes < 0.9 * choose_plan(job, machine).plan.device_bytes
    tiled = paper_job(dataclasses.replace(options, tiled_mlp=True), machine=machine)
    seconds = [choose_plan(each, machine, zero="3-offload").plan.time.compute_seconds for each in (job, tiled)]
    assert 1.02 * seconds[0] < seconds[1] < 1.15 * seconds[0]


def test_what_does_not_fit_ends_with_1_and_says_as_commands_what_would(configs, capsys):
    words = ["--model", configs["8b"], "--gpus", "1x4090", "--host_memory", "64GB"]
    with pytest.raises(SystemExit) as caught:
        run_plan(capsys, *words)
    assert caught.value.code == 1
    out = capsys.readouterr().out
    commands = [line.strip() for line in out.splitlines() if line.strip().startswith("dsft plan")]
    assert any("--method lora" in line or "--method qlora" in line for line in commands) and len(commands) >= 3
    for command in commands:  # each is a whole command, and keeps its word
        assert json.loads(run_plan(capsys, *command.split()[2:], "--json"))["chosen"]["fits"], command


def test_every_way_out_takes_the_step_that_was_asked_for(configs):
    batch = {"global_batch_size": 64, "training": {"per_device_train_batch_size": 4}}
    machine = gpus(1, 24, host=64, gpu_type="4090")
    run = resolve_offline(TrainConfig(model=configs["8b"], dtype="bfloat16", **batch), machine, attention="flash")
    ways = ways_to_fit(run.options, run.job, machine, attention="flash")
    assert any("nodes" in way.change for way in ways)
    for way in ways:
        assert way.plan.time.tokens_per_step == 64 * way.change.get("seq_len", 1024), way.change


def test_a_way_out_of_a_json_is_planned_without_its_batch_as_its_command_is(configs, capsys, tmp_path, cheap_traces):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 3}))
    words = ["--model", configs["8b"], "--gpus", "8xA100-40GB", "--zero", str(file)]
    with pytest.raises(SystemExit):
        run_plan(capsys, *words)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    ways = [(line, lines[number + 1]) for number, line in enumerate(lines) if line.startswith("dsft plan")]
    command, label = ways[0]
    plan = json.loads(run_plan(capsys, *command.split()[2:], "--json"))["chosen"]
    assert f"micro batch {plan['micro_batch']} x {plan['accumulation']} accumulated" in label


def test_the_nodes_of_a_host_file_are_all_there_are(configs, capsys, tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--model", configs["8b"], "--gpus", "1x4090", "--host_memory", "64GB"]
    for more, has_more_nodes in ((("--nodes", "2"), True), (("--hostfile", str(tmp_path / "hosts")), False)):
        with pytest.raises(SystemExit) as caught:
            run_plan(capsys, *words, *more)
        assert caught.value.code == 1
        commands = [line.split() for line in capsys.readouterr().out.splitlines() if "  dsft plan" in line]
        more_nodes = [each for each in commands if "--nodes" in each and each[each.index("--nodes") + 1] != "2"]
        assert bool(more_nodes) == has_more_nodes
        for command in more_nodes or commands:
            assert json.loads(run_plan(capsys, *command[2:], "--json"))["chosen"]["fits"], command


def test_lora_is_the_way_out_where_a_quantised_base_fits_no_gpu(configs):
    options = TrainConfig(model=configs["8b"], method="qlora", dtype="bfloat16")
    machine = gpus(8, 8)
    job = paper_job(options, machine=machine)
    choice = choose_plan(job, machine)
    assert not choice.plan.fits and "ZeRO-3 would shard it only once it is loaded" in choice.reason
    assert {"method": "lora"} in [way.change for way in ways_to_fit(options, job, machine, attention="flash")]


def test_every_way_out_of_a_zero_that_was_asked_for_leaves_it(configs):
    checkpointing = {"activation_checkpointing": True}
    options = TrainConfig(model=configs["8b"], zero="3", dtype="bfloat16", training=checkpointing)
    machine = gpus(1, 24, host=64)
    ways = ways_to_fit(options, paper_job(options, machine=machine), machine, attention="flash")
    assert len(ways) > 1
    assert all(way.change["zero"] == "auto" and way.plan.activation_checkpointing for way in ways)


def test_the_longest_sequence_fits_and_a_longer_one_does_not(configs, capsys):
    words = ["--model", configs["8b"], "--gpus", "1xA100-40GB", "--method", "lora"]
    longest = json.loads(run_plan(capsys, *words, "--longest", "--json"))["seq_len"]
    assert 2048 <= longest <= 8192 and longest % 256 == 0
    words += ["--zero", "3", "--json"]
    asked = json.loads(run_plan(capsys, *words, "--longest"))
    assert asked["plan"]["zero"] == "3", "of what is asked for, not of what would fit longer ones"
    batch = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1")
    alone = json.loads(run_plan(capsys, *words, "--seq_len", str(asked["seq_len"]), *batch))["chosen"]
    assert alone["fits"] and alone["device_bytes"] == asked["plan"]["device_bytes"]
    with pytest.raises(SystemExit) as caught:
        run_plan(capsys, *words, "--seq_len", str(asked["seq_len"] + 256), *batch)
    assert caught.value.code == 1
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_plan(capsys, "--model", configs["8b"], "--gpus", "1xL4", "--host_memory", "32GB", "--longest")
    assert caught.value.code == 1 and "no sequence fits" in capsys.readouterr().out


def test_the_longest_sequence_and_window_have_the_mask_of_a_sliding_window(tmp_path, capsys):
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    MistralConfig(**sizes, **heads, sliding_window=512, max_position_embeddings=2**17).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path / "config.json"), "--gpus", "1xL4", "--json"]
    longest = json.loads(run_plan(capsys, *words, "--longest"))
    batch = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1")
    alone = json.loads(run_plan(capsys, *words, "--seq_len", str(longest["seq_len"]), *batch))["chosen"]
    assert longest["seq_len"] < 2**17 and longest["plan"]["device_bytes"] == alone["device_bytes"]
    window = json.loads(run_plan(capsys, *words, "--perplexity", "--seq_len", "256"))["longest_window"]
    assert 1024 < window < 2**17


def test_the_batch_stays_or_grows_with_the_nodes(configs, capsys):
    words = ["--model", configs["8b"], "--gpus", "8xH100", "--nodes", "1,2"]
    steps = {
        scaling: [
            row["time"]["tokens_per_step"]
            for row in json.loads(run_plan(capsys, *words, "--scaling", scaling, "--json"))
        ]
        for scaling in ("strong", "weak")
    }
    assert steps == {"strong": [64 * 1024] * 2, "weak": [64 * 1024, 2 * 64 * 1024]}
    assert "stays (strong scaling)" in run_plan(capsys, *words)
    batch = ("--tokens_per_step", str(64 * 1024), "--gradient_accumulation_steps", "2")
    rows = json.loads(run_plan(capsys, *words, *batch, "--json"))
    assert [(row["micro_batch"], row["accumulation"]) for row in rows] == [(4, 2), (2, 2)]


def test_the_command_as_json_and_as_files(configs, capsys, tmp_path):
    words = ["--model", configs["8b"], "--gpus", "8x80GB", "--gpu_type", "H100", "--tokens_per_step", str(64 * 1024)]
    printed = json.loads(run_plan(capsys, *words, "--json"))
    chosen = printed["chosen"]
    assert (
        chosen["fits"]
        and chosen["reason"]
        and printed["model"]["num_params"] == 8_030_261_248
        and len(printed["candidates"]) > 15
    )
    assert chosen["micro_batch"] * chosen["accumulation"] * 8 * 1024 == 64 * 1024
    more = ("--max_grad_norm", "0.5", "--states", "bfloat16")
    run_plan(capsys, *words, *more, "--write", str(tmp_path / "more"))
    written = read_zero_file(str(tmp_path / "more/deepspeed.json"), [])
    assert written["gradient_clipping"] == 0.5 and written["bf16"]["bf16_optimizer_states"] is True
    again = json.loads(run_plan(capsys, *words, *more, "--zero", str(tmp_path / "more/deepspeed.json"), "--json"))
    assert again["chosen"]["fits"], "what was written is taken with the same options"
    half_file = read_zero_file("2", []) | {"fp16": {"enabled": True, "initial_scale_power": 12}}
    (tmp_path / "own.json").write_text(json.dumps(half_file))
    half = ("--dtype", "float16", "--zero", str(tmp_path / "own.json"))
    run_plan(capsys, *words, *half, "--write", str(tmp_path / "half"))
    assert read_zero_file(str(tmp_path / "half/deepspeed.json"), [])["fp16"] == half_file["fp16"]
    run_plan(capsys, *words, "--write", str(tmp_path / "plan"))
    problems: list[str] = []
    written = read_zero_file(str(tmp_path / "plan/deepspeed.json"), problems)
    assert check_deepspeed_json(written, "written") == problems == [] and "auto" not in json.dumps(
        {key: value for key, value in written.items() if key != "optimizer"}
    )
    assert written["train_batch_size"] == 64 and written["zero_optimization"]["stage"] == int(chosen["zero"][0])
    launcher = yaml.safe_load((tmp_path / "plan/accelerate.yaml").read_text())
    assert launcher["num_processes"] == 8 and launcher["deepspeed_config"]["deepspeed_config_file"].endswith(
        "deepspeed.json"
    )
    with pytest.raises(SystemExit):
        run_plan(capsys, *words, "--write", str(tmp_path / "plan"))


def test_the_view_over_nodes_and_the_plan_of_an_evaluation(configs, capsys):
    rows = json.loads(run_plan(capsys, "--model", configs["8b"], "--gpus", "8x80GB", "--nodes", "1,2,8", "--json"))
    assert [row["nodes"] for row in rows] == [1, 2, 8] and rows[0]["tokens_per_second"] < rows[2]["tokens_per_second"]
    assert rows[0]["gpu_hours_per_1e9_tokens"] == pytest.approx(1e9 / rows[0]["tokens_per_second"] * 8 / 3600)
    words = ["--perplexity", "--gpus", "8x80GB", "--json", "--model"]
    printed = {
        name: json.loads(run_plan(capsys, *words, configs[name], fits=name != "405b"))["chosen"]
        for name in ("8b", "70b", "405b")
    }
    assert printed["8b"]["zero"] == "0" and printed["70b"]["zero"] == "3" and not printed["405b"]["fits"]
    assert printed["8b"]["weight_bytes"] == 2 * 8_030_261_248
    # A token takes as many operations as there are weights, twice, and some of attention.
    assert 7 < printed["8b"]["tokens_per_second"] / printed["70b"]["tokens_per_second"] < 10


def test_an_evaluation_with_a_named_zero_is_planned_with_it_alone(configs, tmp_path, capsys):
    sharded = tmp_path / "sharded.json"
    sharded.write_text('{"zero_optimization": {"stage": 3}}')
    words = ["--model", configs["8b"], "--perplexity", "--gpus", "8x80GB", "--json", "--zero"]
    plans = {zero: json.loads(run_plan(capsys, *words, zero)) for zero in ("0", "3", str(sharded))}
    for zero, plan in plans.items():
        assert [plan["chosen"]["zero"]] == [each["zero"] for each in plan["candidates"]] == [zero]
        assert plan["chosen"]["reason"].startswith(f"zero={zero} (requested): ")
    assert plans["3"]["chosen"]["weight_bytes"] < plans["0"]["chosen"]["weight_bytes"]


def test_a_window_that_is_longer_than_the_batches_is_planned_whole(configs, cheap_traces):
    """As lm-eval's windows have all of the model's positions, whatever batch_tokens is."""
    facts = measure_model(TrainConfig(model=configs["8b"]), scored=True)
    peaks = [
        plan_evaluation(facts, gpus(), dtype="bfloat16", seq_len=8192, batch_tokens=number).plan.activation_bytes
        for number in (512, 8192, 16384)
    ]
    assert peaks[0] == peaks[1] < peaks[2]


@pytest.mark.parametrize("asked", [["--perplexity"], ["--nodes", "1,2"]], ids=str)
def test_nothing_that_fits_ends_with_1_whatever_is_asked(configs, capsys, cheap_traces, asked):
    words = ["--model", configs["405b"], "--gpus", "1xL4", "--host_memory", "32GB", *asked]
    assert "no: GPU memory" in run_plan(capsys, *words, fits=False)
    assert json.loads(run_plan(capsys, *words, "--json", fits=False))


def test_an_evaluation_is_planned_without_the_format_that_a_training_makes(configs, tmp_path, capsys):
    words = ["--perplexity", "--gpus", "8x80GB", "--json", "--model"]
    with pytest.raises(SystemExit):
        run_plan(capsys, *words, configs["8b"], "--method", "qlora")
    assert "--perplexity plans a model as it lies on disk; leave out --method qlora" in capsys.readouterr().err
    packed = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    LlamaConfig(**LLAMA_8B, **packed).save_pretrained(tmp_path)
    plain, adapted = (
        json.loads(run_plan(capsys, *words, str(tmp_path), *method))["chosen"]["weight_bytes"]
        for method in ((), ("--method", "lora"))
    )
    assert adapted > 1.7 * plain, "below adapters FP8 is unpacked, as an evaluation of them does"


@pytest.mark.parametrize("zero", ["2-offload", "3", "3-hpz", "3-offload", "3-nvme"])
def test_an_evaluation_has_no_optimizer_and_nothing_that_is_filled_in_later(configs, zero):
    section = evaluation_section(zero, paper_job(TrainConfig(model=configs["8b"])).size, ranks=12, ranks_per_node=4)
    assert section["stage"] == int(zero[0])
    assert section.get("zero_hpz_partition_size") == (4 if zero == "3-hpz" else None), "the ranks of a node"
    assert "auto" not in section.values() and "offload_optimizer" not in section


def test_windows_that_are_spread_over_more_ranks_may_be_longer(configs, capsys):
    words = ["--model", configs["long"], "--perplexity", "--seq_len", "131072", "--gpus", "8x80GB"]
    plans = [json.loads(run_plan(capsys, *words, "--sequence_parallel", str(n), "--json")) for n in (1, 2, 8)]
    alone, two, eight = (plan["longest_window"] for plan in plans)
    assert 1024 < alone < two < eight < 2**24 and two > 1.5 * alone
    terms = {term["name"]: term["num_bytes"] for term in plans[2]["candidates"][0]["terms"]}
    assert terms["positions exchanged for heads"] == 131_072 // 8 * (3 * 32 * 128 + 2 * 8 * 128) * 2
    assert f"longest window that fits: {eight:,} tokens on 8 ranks" in run_plan(
        capsys, *words, "--sequence_parallel", "8"
    )


def test_sequences_that_ranks_share_may_be_longer_and_count_once(tmp_path, capsys):
    LlamaConfig(**LLAMA_8B | {"max_position_embeddings": 2**20}).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--gpus", "8x80GB", "--interconnect", "nvlink"]
    alone, shared = (
        json.loads(run_plan(capsys, *words, "--longest", "--sequence_parallel", str(n), "--json")) for n in (1, 4)
    )
    assert 1024 < 2 * alone["seq_len"] < shared["seq_len"] < 2**20
    assert alone["plan"]["time"]["tokens_per_step"] == 8 * alone["seq_len"]
    assert shared["plan"]["time"]["tokens_per_step"] == 2 * shared["seq_len"]
    words += ["--seq_len", "16384", "--per_device_train_batch_size", "1", "--all"]
    words += ["--activation_checkpointing", "true", "--zero", "3", "--json"]
    plans = [json.loads(run_plan(capsys, *words, "--sequence_parallel", str(n)))["chosen"] for n in (1, 8)]
    alone, shared = ({term["name"]: term["num_bytes"] for term in plan["terms"]} for plan in plans)
    name = "layer inputs (checkpointing)"
    assert shared[name] == alone[name] // 8 and shared["positions exchanged for heads"] > 0
    assert plans[1]["time"]["communication_seconds"] > plans[0]["time"]["communication_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8x80GB", "--sequence_parallel", "3"], "must divide the number of ranks, which is 8; use 1, 2, 4"),
        (["--gpus", "24x80GB", "--sequence_parallel", "6"], "cannot be shared by 6 ranks; use 1, 2, 4 or 8"),
        (["--gpus", "8x80GB", "--sequence_parallel", "0"], "must be at least 1"),
        (["--gpus", "8x80GB", "--sequence_parallel", "2", "--torch_compile", "true"], "cannot be combined"),
        (
            ["--gpus", "8x80GB", "--sequence_parallel", "4", "--global_batch_size", "3"],
            "8 ranks / sequence_parallel=4; try",
        ),
        (["--gpus", "0x80GB"], "8x80GB"),
        (["--gpus", "8x80G"], "80GB"),
        (["--seq_len", "9000", "--gpus", "8x80GB"], "beyond the 8192 positions"),
        (["--nodes", "0", "--gpus", "8x80GB"], "at least 1"),
        (["--gpus", "8x80GB", "--interconnect", "wifi"], "'wifi' is unknown"),
        (["--hostfile", "nowhere"], "nowhere: no such file"),
        (["--hostfile", str(ROOT / "hostfiles/2x8"), "--nodes", "3"], "keep one"),
        (["--hostfile", str(ROOT / "hostfiles/2x8"), "--gpus", "4x80GB"], "has at most 8 per node"),
        (["--perplexity", "--nodes", "1,2", "--gpus", "8x80GB"], "one number of nodes"),
        (["--perplexity", "--longest", "--gpus", "8x80GB"], "questions of their own; leave out --longest"),
        (["--largest", "--longest", "--gpus", "8x80GB"], "questions of their own; leave out --largest"),
        (["--perplexity", "--gpus", "8x80GB", "--sequence_parallel", "3"], "use 1, 2, 4 or 8"),
        (["--perplexity", "--gpus", "8x80GB", "--zero", "2"], "shards of stage 3, not of stage 2"),
        (
            ["--perplexity", "--gpus", "24x80GB", "--sequence_parallel", "6"],
            "cannot be shared by 6 ranks; use 1, 2, 4 or 8",
        ),
        (["--tokens_per_step", "8"], "less than one sequence"),
        (["--tokens", "0", "--gpus", "8x80GB"], "--tokens 0.0: must be above 0"),
        (["--dollars_per_gpu_hour", "2", "--gpus", "8x80GB"], "needs --tokens"),
        (["--global_batch_size", "64", "--gpus", "3x80GB"], "try 63 or 66"),
        (["--tokens_per_step", "65536", "--global_batch_size", "64", "--gpus", "8x80GB"], "keep one"),
        (["--gpu_typ", "H100"], "gpu_typ: unknown key; did you mean 'gpu_type'"),
    ],
)
def test_bad_requests_are_one_clear_error(configs, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        run_plan(capsys, "--model", configs["8b"], *words)
    assert caught.value.code == 2 and message in capsys.readouterr().err
