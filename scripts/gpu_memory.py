"""Writes docs/gpu_memory.md, what the planner predicts for usual models: python scripts/gpu_memory.py (two minutes)"""

from pathlib import Path

from dsft.api import plan
from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machines
from dsft.errors import UserError
from dsft.models.measure import USUAL_MODELS
from dsft.units import GiB

MACHINES = {"1x4090": "64GB", "2x4090": "128GB", "1xH100": "200GB", "8xH100": "1TB"}
"""GPUs -> memory of the host."""
SEQ_LEN = 2048
METHODS = {
    "full": "Every weight is trained: bf16 weights and gradients, fp32 weights and AdamW's two moments.",
    "lora": "Adapters of rank 16 on every linear layer, over weights in bf16.",
    "qlora": "The same over weights in 4 bits (nf4). dsft has held less than planned so far, on one H200 (gpus.md).",
}
HEAD = f"""# GPU memory at a glance

What `dsft plan` predicts for a sequence of {SEQ_LEN:,} tokens on each GPU, with `zero: auto`. A cell has the memory of
one GPU in GiB, and the ZeRO stage that is chosen. *c* is activation checkpointing. *no*: nothing fits. A faster
choice may take more memory than the smallest one: `dsft plan --all` shows every candidate.

`python scripts/gpu_memory.py` makes this page. dsft itself has run on one GPU at a time:
[how far to trust the plan](planner.md#how-far-to-trust-it).

```bash
dsft plan --model Qwen/Qwen2.5-0.5B --method lora --seq_len 4096 --gpus 1x4090  # your model and card
dsft plan --config run.yaml --gpus 8xH100 --explain                             # your run, each term
```

| bytes per parameter, before ZeRO shards them | full | lora | qlora |
|---|---|---|---|
| weights of the model | 2 (bf16) + 4 (fp32 copy) | 2 | 0.5; embeddings, head and experts in one parameter 2 |
| gradients | 2, or 4 where sums are in fp32 | of the adapters | of the adapters |
| AdamW's two moments | 8 | of the adapters | of the adapters |

To these come activations, which grow with tokens and layers, and what a GPU holds
[outside of torch](planner.md#memory-outside-of-torch)."""


def cell(model: str, method: str, gpus: str) -> str:
    """What is chosen there."""
    (machine,) = read_machines(PlanOptions(gpus=gpus, host_memory=MACHINES[gpus]))
    options = {"method": method, "seq_len": SEQ_LEN, "per_device_train_batch_size": 1}
    try:
        chosen = plan(model, machine=machine, **options).plan
    except UserError:
        return "no"
    if not chosen.fits:
        return "no"
    return f"{chosen.device_bytes / GiB:.1f}, {chosen.zero}{' *c*' if chosen.activation_checkpointing else ''}"


def page() -> str:
    """The text of docs/gpu_memory.md, without its last newline."""
    parts = [HEAD]
    for method, words in METHODS.items():
        columns = [f"{gpus}, host of {memory}" for gpus, memory in MACHINES.items()]
        rows = [f"| model | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        rows += [
            f"| {model} | {' | '.join(cell(model, method, gpus) for gpus in MACHINES)} |" for model in USUAL_MODELS
        ]
        parts += [f"## `method: {method}`", words, "\n".join(rows)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "gpu_memory.md").write_text(page() + "\n", encoding="utf-8")
