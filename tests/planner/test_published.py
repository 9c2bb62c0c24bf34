"""The planner beside published measurements of runs whose settings are all known: within 10 %, and what ran or failed
answered right.

Where an engine differs from dsft's (its own optimizer states, logits kept through the backward), the row says so and
the test adds it.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import grid
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from dsft.config.options import TrainConfig
from dsft.models.adapters import adapters_of
from dsft.models.measure import empty_model, model_size, usual_config
from dsft.planner.choose import HOST_SHARE, add_up
from dsft.planner.memory import FRAGMENTATION, Job, Term, ZeroLayout, activation_terms, peak_bytes, training_terms
from dsft.runtime.hardware import CONTEXT_BYTES, Machine
from dsft.units import GB, Batch, GiB


def llama(hidden: int, ffn: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=32000
    )


LLAMA2_7B = llama(4096, 11008, 32, 32)
QWEN_7B = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
)
LLAMA_8B = usual_config("meta-llama/Llama-3.1-8B")
PAGEABLE = {"device": "cpu", "pin_memory": False}
AUTO = {
    "stage": 3,
    "overlap_comm": False,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 10**9,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
}
QUERY_AND_VALUE = {"lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run."""

    source: str
    model: PreTrainedConfig
    zero: dict[str, Any] | None = None
    """None: one GPU without DeepSpeed, weights, gradients and both moments of AdamW in bf16."""
    lora: dict[str, Any] = field(default_factory=dict)
    method: str = "lora"
    """With `lora`."""
    gpus: int = 1
    micro_batch: int = 1
    seq_len: int
    """Tokens of one sequence as it was fed."""
    accumulation: int = 1
    checkpointing: bool = True
    loss: str = "hf"
    liger: bool = False
    """Norms, feed-forwards and loss by Liger."""
    optimizer: str = "adamw_torch_fused"
    logits_kept: int = 0
    """Bytes per token and word of the vocabulary that the trainer keeps beside the loss until after the backward."""
    measured: float
    """Bytes."""
    counts: str = "allocated"
    """What was read: torch's allocated or reserved bytes, or all the GPU's (nvml)."""


def swift(model: PreTrainedConfig, gpus: int, gib: float, *, liger: bool, logits_kept: int = 0) -> Published:
    """A run of ms-swift's examples of sequence packing. Its log has torch's reserved memory in GiB."""
    return Published(
        source="modelscope/ms-swift, examples of sequence packing",
        model=model,
        zero=AUTO,
        gpus=gpus,
        seq_len=8192,
        accumulation=2,
        liger=liger,
        optimizer="adamw_torch",
        logits_kept=logits_kept,
        measured=gib * GiB,
        counts="reserved",
    )


def dsft_run(name: str, micro_batch: int, seq_len: int, gib: float, *, method: str = "full", **zero: Any) -> Published:
    """A run of dsft on one H200."""
    return Published(
        source="benchmarks/gpus.md",
        model=usual_config(name),
        zero={"stage": 1, "overlap_comm": False, "reduce_bucket_size": 200_000_000} | zero,
        lora={} if method == "full" else {"lora_r": 16},
        method=method,
        micro_batch=micro_batch,
        seq_len=seq_len,
        checkpointing=False,
        loss="tiled",
        measured=gib * GiB,
    )


# ms-swift and Arctic ran transformers 4, whose loss keeps the bf16 logits.
# Under accelerate's autocast, without DeepSpeed, outputs become fp32 once more (accelerate/utils/operations.py,
# convert_outputs_to_fp32).
RUNS = {
    "deepspeed-7b-zero3": Published(
        source="deepspeedai/DeepSpeedExamples 6a3d817a, training/bf16_master_weight/README.md",
        model=GPT2Config(
            n_embd=4096,
            n_inner=16384,
            n_layer=32,
            n_head=32,
            vocab_size=50257,
            n_positions=512,
            tie_word_embeddings=False,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        zero={
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 10**9,
        },
        gpus=4,
        seq_len=512,
        measured=31.38 * GiB,
    ),
    "litgpt-7b-lora": Published(
        source="Lightning-AI/litgpt 8641822, tutorials/resource-tables.md",
        model=LLAMA2_7B,
        lora={"lora_r": 8} | QUERY_AND_VALUE,
        seq_len=1304,
        checkpointing=False,
        loss="fused",
        measured=21.3 * GB,
    ),
    "torchtune-3b-full": Published(
        source="pytorch/torchtune 0.6, single-device full finetuning of Llama 3.2 3B, packed",
        model=usual_config("meta-llama/Llama-3.2-3B"),
        micro_batch=2,
        seq_len=4096,
        checkpointing=False,
        measured=60.0 * GiB,
    ),
    "arctic-8b-offload-liger-300k": Published(
        source="snowflakedb/ArcticTraining, projects/sequence-parallelism/run-h200-sp1-llama-8b-liger.yml",
        model=LLAMA_8B,
        seq_len=300_000,
        liger=True,
        measured=134.96 * GiB,
        counts="nvml",
        zero={"stage": 3, "offload_optimizer": PAGEABLE, "offload_param": PAGEABLE},
    ),
    "swift-14b-zero3": swift(usual_config("Qwen/Qwen2.5-14B"), 8, 58, liger=False, logits_kept=2),
    "swift-7b-zero3-liger": swift(QWEN_7B, 4, 42, liger=True),
    "own-8b-lora": dsft_run("meta-llama/Llama-3.1-8B", 2, 4096, 61.6, method="lora"),
    "own-8b-qlora": dsft_run("meta-llama/Llama-3.1-8B", 4, 2048, 52.0, method="qlora"),
    "own-3b-full": dsft_run("meta-llama/Llama-3.2-3B", 2, 4096, 71.8),
    "own-1b-full": dsft_run("meta-llama/Llama-3.2-1B", 4, 4096, 45.2),
    "own-1b-offload": dsft_run("meta-llama/Llama-3.2-1B", 4, 4096, 31.9, stage=2, offload_optimizer={"device": "cpu"}),
    "gist-7b-zero3": Published(
        source="gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a, 8 A800 (its buckets are not known)",
        model=LLAMA2_7B,
        zero=AUTO,
        gpus=8,
        micro_batch=2,
        seq_len=4096,
        accumulation=4,
        measured=20.4 * GiB,
    ),
    "gist-7b-zero3-offload-optimizer": Published(
        source="the same",
        model=LLAMA2_7B,
        zero=AUTO | {"offload_optimizer": PAGEABLE},
        gpus=8,
        micro_batch=2,
        seq_len=4096,
        accumulation=4,
        measured=9.4 * GiB,
    ),
}


def predicted(run: Published, machine: Machine | None = None) -> list[Term]:
    config = TrainConfig(model="published", method=run.method if run.lora else "full", **run.lora)
    model = empty_model(run.model)
    adapters = adapters_of(config, model)
    size = model_size(model, config, adapters=adapters)
    job = Job(
        size=size,
        model_config=run.model,
        adapters=adapters,
        seq_len=run.seq_len,
        liger=run.liger,
        tiled_loss=run.loss in ("fused", "tiled"),
        optimizer=run.optimizer,
    )
    machine = machine or Machine(
        nodes=1, ranks_per_node=run.gpus, device_bytes=80 * GiB, host_bytes=10**12, has_gpu=True
    )
    batch = Batch(run.micro_batch, run.accumulation, run.gpus)
    config = {"zero_optimization": run.zero or {"stage": 0}}
    layout = ZeroLayout(job, config, machine, accumulation=run.accumulation)
    if run.zero is None:
        states = 2 * size.num_params + 6 * size.num_trainable  # 2 per weight, 2 gradient, 2 + 2 moments
        terms = [Term("plain torch", states, ""), *activation_terms(layout, batch, every=int(run.checkpointing))]
    else:
        terms = training_terms(layout, batch, every=int(run.checkpointing))
    kept = run.logits_kept * run.micro_batch * run.seq_len * size.vocab_size
    return [*terms, Term("logits kept by the trainer", kept, "", "compute")]


QUICK = ("litgpt-7b-lora", "torchtune-3b-full", "arctic-8b-offload-liger-300k", "swift-14b-zero3")  # one of each kind


@pytest.mark.parametrize("name", grid(RUNS, QUICK))
def test_published_peaks_are_met_within_10_percent(name):
    run = RUNS[name]
    peak = peak_bytes([term for term in predicted(run) if term.phase != "outside"], "device")
    if run.counts != "allocated":
        peak = (1 + FRAGMENTATION) * peak + (CONTEXT_BYTES if run.counts == "nvml" else 0)
    assert peak == pytest.approx(run.measured, rel=0.1), (
        f"{peak / GiB:.2f} GiB predicted, {run.measured / GiB:.2f} GiB measured; {run.source}"
    )


@pytest.mark.parametrize(
    ("run", "gpu_bytes", "fits"),
    [
        # "8 * 80GiB" in its example: it ran, at the limit (an 80 GB GPU has 79.2 to 79.6 GiB)
        (swift(usual_config("Qwen/Qwen2.5-32B"), 8, 0, liger=True), 79.6 * GiB, True),
        (
            Published(
                source="hiyouga/LlamaFactory issue 7282: out of memory on 8 H200",
                model=usual_config("meta-llama/Llama-3.1-70B"),
                zero=AUTO | {"overlap_comm": True},
                gpus=8,
                seq_len=1024,
                optimizer="adamw_torch",
                measured=0,
            ),
            139.8 * GiB,
            False,
        ),
        (
            Published(
                source="Lightning-AI/litgpt 8641822, tutorials/resource-tables.md: out of memory on an A100 of 40 GB",
                model=LLAMA2_7B,
                zero={"stage": 1},
                lora={"lora_r": 8} | QUERY_AND_VALUE,
                micro_batch=4,
                seq_len=1304,
                checkpointing=False,
                loss="fused",
                measured=0,
            ),
            39.39 * GiB,
            False,
        ),
    ],
)
def test_what_ran_is_accepted_and_what_failed_is_refused(run, gpu_bytes, fits):
    machine = Machine(nodes=1, ranks_per_node=run.gpus, device_bytes=int(gpu_bytes), host_bytes=10**12, has_gpu=True)
    needs = add_up(predicted(run, machine), machine, stage=run.zero["stage"])
    assert needs["fits"] == fits, f"{needs['device_bytes'] / GiB:.1f} GiB predicted"


def test_a_host_that_was_killed_is_refused():
    """LLaMA 33B with both offloads on 8 ranks and 600 GB of host memory: killed (DeepSpeed issue 3448)."""
    offload = {"device": "cpu", "pin_memory": True}
    run = Published(
        source="deepspeedai/DeepSpeed issue 3448",
        model=llama(6656, 17920, 60, 52),
        zero=AUTO | {"offload_optimizer": offload, "offload_param": offload},
        gpus=8,
        seq_len=512,
        measured=0,
    )
    assert peak_bytes(predicted(run), "host") > HOST_SHARE * 600 * GB
