"""What is decided in the user's place, and why: options (and the files they name) in, decisions and problems out.

A `Draft` applies them one after the other (`resolve.py`).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsft.checkpoints.manifest import read_manifest
from dsft.config.deepspeed import read_zero_file
from dsft.config.options import HALF_PRECISION, Decision, TrainConfig, decide
from dsft.errors import raise_if_any
from dsft.models.head import LEAST_VOCAB
from dsft.models.sequence_parallel import refused_ranks
from dsft.models.size import ModelFacts
from dsft.models.trials import Packing, can_tile_loss
from dsft.planner.plans import Plan
from dsft.units import Batch

STEPS_WAITED = 10
"""Planned steps in the time of one, after which a run with NVMe is ended: disks may be as much slower than planned."""


class Draft:
    """Options on their way to a run: decisions are applied one after the other, problems are collected."""

    def __init__(self, options: TrainConfig, decisions: Sequence[Decision] = (), problems: Sequence[str] = ()):
        self.options, self.decisions, self.problems = options, list(decisions), list(problems)

    def apply(self, decisions: Sequence[Decision], problems: Sequence[str] = ()) -> None:
        for decision in decisions:  # one after the other: a later one may give back what an earlier one took away
            if self.options.value(decision.name) != decision.value:
                self.options = decide(self.options, [decision])
                self.decisions.append(decision)
        self.problems += problems


def accelerate_decisions(options: TrainConfig, environment: Mapping[str, str]) -> tuple[list[Decision], list[str]]:
    """Takes the deepspeed_config_file of `accelerate launch` as `zero`, unless the user named another: then both are
    named.
    """
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in environment and options.zero == "auto":
            return [], [
                "accelerate's own DeepSpeed settings (zero_stage, offload ...) are not read; name a"
                " deepspeed_config_file in its YAML, or set zero"
            ]
        return [], []
    if options.zero == "auto":
        return [Decision("zero", file, "it is accelerate's deepspeed_config_file")], []
    if read_zero_file(options.zero, []) != read_zero_file(file, []):
        return [], [f"zero={options.zero}, but accelerate's deepspeed_config_file is {file}; keep one"]
    return [], []


def batch_decisions(options: TrainConfig, world: int) -> tuple[list[Decision], list[str]]:
    """Derives what follows from `global_batch_size`, or reports which sizes would divide."""
    total, training, shared_by = options.global_batch_size, options.training, options.sequence_parallel
    ranks = f"{world} ranks" if shared_by == 1 else f"{world} ranks / sequence_parallel={shared_by}"
    micro, accumulation = training.get("per_device_train_batch_size"), training.get("gradient_accumulation_steps")
    if not total or (micro is not None and micro < 1) or refused_ranks(shared_by, world):  # problems of their own
        return [], []
    if accumulation and micro is None:
        micro, rest = divmod(total, Batch(1, accumulation, world, shared_by).sequences)
        reason = f"global_batch_size={total} / (gradient_accumulation_steps={accumulation} x {ranks})"
        problem = (
            f"global_batch_size={total} is not divisible by gradient_accumulation_steps={accumulation} x {ranks};"
            " leave gradient_accumulation_steps out"
        )
        return [Decision("per_device_train_batch_size", micro, reason)], [problem] if rest else []
    if accumulation:  # both fixed, by a DeepSpeed JSON
        problem = (
            f"global_batch_size={total} (train_batch_size) is not per_device_train_batch_size={micro} x"
            f" gradient_accumulation_steps={accumulation} x {ranks}; leave one to follow"
        )
        return [], [problem] if Batch(micro, accumulation, world, shared_by).sequences != total else []
    # Where the micro batch is not given, the plan chooses one that divides.
    per_step = Batch(micro or 1, 1, world, shared_by).sequences
    if total % per_step:
        lower = total // per_step * per_step
        return [], [
            f"global_batch_size={total} is not divisible by per_device_train_batch_size={micro or 1} x {ranks};"
            f" try {' or '.join(str(n) for n in (lower, lower + per_step) if n)}, or another"
            " per_device_train_batch_size"
        ]
    if micro is None:
        return [], []
    reason = f"global_batch_size={total} / (per_device_train_batch_size={micro} x {ranks})"
    return [Decision("gradient_accumulation_steps", total // per_step, reason)], []


def dtype_decisions(options: TrainConfig, auto_dtype: str) -> list[Decision]:
    """Makes `dtype` and the flags bf16 and fp16 one decision.

    Args:
        auto_dtype: what `auto` is on the devices of the run.
    """
    training = options.training
    flag = next((name for name in HALF_PRECISION if training.get(name)), None)
    if flag:
        dtype, reason = HALF_PRECISION[flag], f"{flag}=true"
    elif options.dtype == "auto" and "bf16" in training:
        dtype, reason = "float32", "bf16=false"
    else:
        dtype = auto_dtype if options.dtype == "auto" else options.dtype
        reason = "auto is bfloat16 on a GPU that computes in it, else float32"
    return [Decision("dtype", dtype, reason)] + [
        Decision(name, dtype == flagged, f"dtype={dtype}") for name, flagged in HALF_PRECISION.items()
    ]


def tf32_decision(options: TrainConfig, *, available: bool) -> list[Decision]:
    """Lets a training in float32 multiply on tensor cores, where all GPUs can and the user does not set it.

    Args:
        available: whether the GPUs of all ranks have TF32 (NVIDIA since Ampere).
    """
    if options.dtype != "float32" or not available or "tf32" in options.training:
        return []
    return [Decision("tf32", True, "faster: products of training keep 10 of 23 bits, evaluations keep all")]


def keep_global_batch(options: TrainConfig, checkpoint: str, world: int) -> list[Decision]:
    """Lets a training that resumes on another number of ranks, of all or of those that share a sequence, take as many
    sequences per step as before, unless `global_batch_size` is set.

    Raises:
        UserError: where they cannot be shared by so many ranks.
    """
    manifest = read_manifest(Path(checkpoint))
    if "run_identity" not in (manifest or {}) or options.global_batch_size:
        return []
    then = Batch(1, 1, manifest["world_size"], manifest.get("sequence_parallel", 1))
    if then.sequences == Batch(1, 1, world, options.sequence_parallel).sequences:
        return []
    total = manifest["run_identity"]["sequences per step"]
    shared = f", {then.sequence_parallel} to a sequence" if then.sequence_parallel > 1 else ""
    reason = f"{checkpoint} took so many on {then.ranks} ranks{shared}"
    kept = [
        Decision("global_batch_size", total, reason),
        Decision("gradient_accumulation_steps", None, "follows from global_batch_size"),
    ]
    decisions, problems = batch_decisions(decide(options, kept), world)
    raise_if_any(
        [
            f"resume_from_checkpoint: {checkpoint} took {total} sequences per step, and so must what follows; {problem}"
            for problem in problems
        ]
    )
    return kept + decisions


def tiled_loss_decision(options: TrainConfig, facts: ModelFacts) -> Decision:
    """Decides whether the loss is computed for some tokens at a time."""
    vocab_size, training = facts.size.vocab_size, options.training
    if options.tiled_loss is False:
        return Decision("tiled_loss", False, "as asked for")
    if options.tiled_loss == "auto" and vocab_size < LEAST_VOCAB and not training.get("use_liger_kernel"):
        return Decision("tiled_loss", False, f"a vocabulary of {vocab_size:,} is below {LEAST_VOCAB:,}")
    if others := [name for name in ("label_smoothing_factor", "compute_loss") if options.value(name)]:
        return Decision("tiled_loss", False, f"not with {' and '.join(others)}")
    if options.dtype == "float16":
        return Decision("tiled_loss", False, "float16's small gradients vanish before they are scaled")
    if not can_tile_loss(facts.config, adapters=facts.adapters, trust_remote_code=options.trust_remote_code):
        return Decision("tiled_loss", False, f"a trial with {facts.size.model_type} did not find the same gradients")
    return Decision("tiled_loss", True, f"logits of {vocab_size:,} entries take more memory than the layers")


def packing_decisions(packing: Packing) -> list[Decision]:
    """Packs where samples in one row can be kept apart, with the attention that can do it."""
    return [
        Decision("packing", packing.problem is None, packing.problem or "samples in one row are kept apart"),
        Decision("attn_implementation", packing.attn_implementation, "it keeps packed samples apart"),
    ]


def step_limit_decision(options: TrainConfig, plan: Plan) -> Decision:
    """Decides how long the watchdog waits for a step: at least ten planned ones where a plan uses NVMe, whose rate is a
    guess.
    """
    seconds, reason = options.step_timeout, f"{STEPS_WAITED} planned steps, with offload to NVMe"
    if any(term.place == "nvme" for term in plan.terms):
        seconds = max(seconds, float(math.ceil(STEPS_WAITED * plan.time.step_seconds)))
    if options.training.get("torch_compile"):
        # A rank that compiles for the shapes of its batch alone leaves the others waiting.
        seconds, reason = seconds + options.compile_timeout, "a step that is compiled anew takes compile_timeout longer"
    return Decision("step_timeout", seconds, reason)
