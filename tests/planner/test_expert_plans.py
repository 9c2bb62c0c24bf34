"""The forty plans of benchmarks/expert_plans.md, written by hand before the planner was asked."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machines
from dsft.config.deepspeed import offloads
from dsft.config.options import TrainConfig
from dsft.models.adapters import adapters_of
from dsft.models.measure import USUAL_MODELS, empty_model, model_size, usual_config
from dsft.planner.choose import FULL, FULL_COSTS, Plan, all_plans, choose
from dsft.planner.memory import Job

PAGE = Path(__file__).parents[2] / "benchmarks" / "expert_plans.md"
OTHER_MODELS = {
    "openai/gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
}


def read_rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ") and "/" in line.split("|")[1]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def plan_of(model: str, method: str, gpus: str, tokens: str, other: str) -> tuple[Plan, list[Plan], int]:
    """Return the plan, all that were considered, and the bytes of a GPU."""
    nodes, _, node = gpus.rpartition("x8x") if gpus.count("x") == 2 else ("1", "", "")
    host = re.search(r"host (\w+)", other)
    options = PlanOptions(
        gpus=f"8x{node}" if node else gpus,
        nodes=int(nodes),
        host_memory=host[1] if host else "1TB",
    )
    (machine,) = read_machines(options)
    config = usual_config(model) if model in USUAL_MODELS else AutoConfig.for_model(**OTHER_MODELS[model])
    training = TrainConfig(model=model, method=method)
    adapters = adapters_of(training, empty_model(config))
    sequences = re.search(r"(\d+) sequences", other)
    parallel = re.search(r"sequence_parallel (\d+)", other)
    job = Job(
        size=model_size(empty_model(config), training, adapters=adapters),
        model_config=config,
        adapters=adapters,
        seq_len=int(tokens),
        tiled_loss=True,
        dtype="float16" if "float16" in other else "bfloat16",
        sequences_per_step=int(sequences[1]) if sequences else 64,
        sequence_parallel=int(parallel[1]) if parallel else 1,
    )
    plans = all_plans(job, machine)
    return choose(plans, machine), plans, machine.device_bytes


def is_needlessly_full(plan: Plan, plans: list[Plan], device_bytes: int) -> bool:
    """Whether a GPU is filled though a plan with room, and without offload, takes hardly longer."""
    least_speed = plan.tokens_per_second / FULL_COSTS
    roomy = [each for each in plans if each.fits and each.device_bytes <= 0.9 * device_bytes]
    others = [each for each in roomy if not offloads(each.deepspeed_config) and each.tokens_per_second >= least_speed]
    return plan.device_bytes > FULL * device_bytes and bool(others)


@pytest.mark.parametrize(("every", "others"), [(8, 1), pytest.param(1, 3, marks=pytest.mark.exhaustive)])
def test_most_plans_are_those_of_an_expert(every, others):
    """At most so many of the forty, or of each eighth, are others."""
    rows = read_rows()
    assert len(rows) == 40
    differing = []
    for model, method, gpus, tokens, other, stages, checkpointing, _ in rows[::every]:
        plan, plans, device_bytes = plan_of(model, method, gpus, tokens, other)
        # Over one GPU nothing is sharded: a stage says no more than that the states are on it.
        zero = "2" if gpus.startswith("1x") and plan.zero == "3" else plan.zero
        agrees = not plan.fits if stages == "none" else plan.fits and zero in stages.split()
        if plan.fits:
            agrees = agrees and checkpointing in ("any", "on" if plan.activation_checkpointing else "off")
            agrees = agrees and not is_needlessly_full(plan, plans, device_bytes)
        if not agrees:
            differing.append(f"{model} {method} {gpus} {tokens} {other}: {plan.label}, fits: {plan.fits}")
    print(f"{len(rows[::every]) - len(differing)} of {len(rows[::every])} plans are an expert's")
    assert len(differing) <= others, "\n".join(differing)
