"""Writes docs/gpu_memory.md, the least memory that usual models need: python scripts/gpu_memory.py (two minutes)"""

from pathlib import Path

from dsft.config.deepspeed import offloads
from dsft.config.options import TrainConfig
from dsft.models.measure import USUAL_MODELS
from dsft.planner.choose import RESERVE_BYTES, all_plans
from dsft.planner.speed import CARDS
from dsft.runtime.hardware import Machine
from dsft.setup.decide import TrainingRun, resolve_offline
from dsft.units import GB, GiB

SEQ_LEN = 2048
COLUMNS = {
    "full": ("full", 1, False),
    "full, weights and Adam in host memory": ("full", 1, True),
    "LoRA": ("lora", 1, False),
    "QLoRA": ("qlora", 1, False),
    "full, 8 GPUs": ("full", 8, False),
    "LoRA, 8 GPUs": ("lora", 8, False),
}
"""Column -> method, GPUs, whether the optimizer or parameters are offloaded."""
SMALL_CARDS = (8, 12)
"""GB of cards without an entry of their own: --gpus 1x8GB."""
CARD_SIZES = {
    "T4": "16 GB (T4)",
    "4090": "24 GB (3090, 4090)",
    "5090": "32 GB (5090)",
    "A100-40GB": "40 GB (A100)",
    "L40S": "48 GB (L40S)",
    "H100": "80 GB (A100, H100)",
    "H200": "141 GB (H200)",
    "B200": "192 GB (B200)",
}
HEAD = f"""# How much GPU memory do I need?

GiB of each GPU, for sequences of {SEQ_LEN:,} tokens, one at a time, with activation checkpointing: the least that
`dsft plan` accepts. LoRA has rank 16 on every linear layer, over weights in bf16; QLoRA is the same over nf4. Full
finetuning trains bf16 weights with fp32 copies and AdamW's moments. With more memory, plans are faster.
"""
FOOT = """
- The base of a quantised model is not sharded: QLoRA takes as much on each of 8 GPUs.
- 8 GPUs without NVLink take the same memory, but gather weights slowly.
- `states: bfloat16` halves what full finetuning keeps beside the weights ([methods](methods.md)).
- 8 GPUs shard everything (ZeRO 3). [Offload](planner.md#how-zero-is-chosen) goes further, slowly.

```bash
dsft plan --model Qwen/Qwen2.5-0.5B --method lora --seq_len 4096 --gpus 1x4090
dsft plan --config run.yaml --gpus 8xH100 --explain   # your run, each term
```

| bytes per parameter, before ZeRO shards them | full | LoRA | QLoRA |
|---|---|---|---|
| weights of the model | 2 (bf16) + 4 (fp32 copy) | 2 | 0.5; embeddings, head and experts in one parameter 2 |
| gradients | 2, or 4 if sums are in fp32 | of the adapters | of the adapters |
| AdamW's two moments | 8 | of the adapters | of the adapters |

To these come activations, which grow with tokens and layers, and what a GPU keeps
[outside of torch](planner.md#memory-outside-of-torch). `python scripts/gpu_memory.py` makes this page. dsft itself has
run on one GPU at a time: [how far to trust the plan](planner.md#how-far-to-trust-it)."""


def least_bytes(run: TrainingRun, gpus: int, *, offloaded: bool) -> int:
    """The memory of the leanest plan."""
    # On so small a GPU each candidate is planned with its leanest numbers.
    machine = Machine(nodes=1, ranks_per_node=gpus, device_bytes=GB, host_bytes=10**15, has_gpu=True)
    plans = all_plans(run.job, machine)
    return RESERVE_BYTES + min(plan.device_bytes for plan in plans if offloads(plan.deepspeed_config) == offloaded)


def page() -> str:
    """The text of docs/gpu_memory.md, without its last newline."""
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    rows = [f"| model | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for model in USUAL_MODELS:
        runs: dict[str, TrainingRun] = {}
        cells = []
        for method, gpus, offloaded in COLUMNS.values():
            if method not in runs:
                options = TrainConfig(model=model, method=method, dtype="bfloat16", seq_len=SEQ_LEN, training=batch)
                machine = Machine(nodes=1, ranks_per_node=1, device_bytes=GB, host_bytes=10**15, has_gpu=True)
                runs[method] = resolve_offline(options, machine)
            num_bytes = least_bytes(runs[method], gpus, offloaded=offloaded)
            cells.append(f"{num_bytes / GiB:.1f}" if num_bytes < 100 * GiB else f"{num_bytes / GiB:,.0f}")
        rows.append(f"| {model} | {' | '.join(cells)} |")
    sizes = [f"| {size} GB | {size * GB / GiB:.1f} |" for size in SMALL_CARDS]
    sizes += [f"| {name} | {CARDS[key].usable_gib:.1f} |" for key, name in CARD_SIZES.items()]
    cards = ["| card | GiB that programs see |", "|---|---|", *sizes]
    return "\n".join([HEAD, *rows, "", *cards, FOOT])


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "gpu_memory.md").write_text(page() + "\n", encoding="utf-8")
