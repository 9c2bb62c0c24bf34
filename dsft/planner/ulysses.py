"""Knows what DeepSpeed's Ulysses attention asks of ranks and heads, and what it holds.

Ranks that share a window exchange its positions for heads around attention
(deepspeed/runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF).
"""

from dsft.models.size import ModelSize
from dsft.planner.job import Job
from dsft.planner.terms import Term
from dsft.units import DTYPE_BYTES


def refused_number(size: int, world: int) -> str:
    """Say why the ranks cannot form teams of `size`; empty where they can."""
    if size <= 1 or world % size == 0:  # what is below 1 is a problem of the options
        return ""
    works = [number for number in range(1, world + 1) if world % number == 0]
    return f"sequence_parallel={size}: must divide the number of ranks, which is {world}; use {_one_of(works)}"


def refused_heads(model: ModelSize, *, size: int, world: int) -> str:
    """Say why `size` of `world` ranks cannot share the heads of a model; empty where they can."""
    heads, key_heads = model.num_heads, max(1, model.kv_size // model.head_dim)
    if _shares_heads(heads, key_heads, size):
        return ""
    works = [
        number for number in range(1, world + 1) if world % number == 0 and _shares_heads(heads, key_heads, number)
    ]
    return f"its {heads} heads and {key_heads} key heads cannot be shared by {size} ranks; use {_one_of(works)}"


def _shares_heads(heads: int, key_heads: int, size: int) -> bool:
    """Tell whether `size` ranks can share the heads: key heads may also be repeated."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def exchange_term(job: Job, rank_tokens: int, ranks: int) -> Term:
    """Count what Ulysses attention holds beside the activations of one rank's tokens: q, k and v once exchanged, and
    two more copies of q, or of its result, on their way.
    """
    size = job.size
    key_heads = max(1, size.kv_size // size.head_dim)
    repeats = max(1, ranks // key_heads)
    width = 3 * size.num_heads * size.head_dim + 2 * size.kv_size * repeats
    itemsize = DTYPE_BYTES[job.dtype]
    return Term(
        name="positions exchanged for heads",
        num_bytes=rank_tokens * width * itemsize,
        phase="compute",
        formula=f"{rank_tokens:,} tokens x (3 q + k + v = {width:,}) x {itemsize} B",
    )


def _one_of(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
