"""GPUs by name (gpus.toml): the memory that programs see, the rates of the data sheet, and what matrix products reach.

A name selects the card; where two cards share it (A100, V100), the memory decides.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import UserError
from dsft.runtime.hardware import Machine
from dsft.units import GB, GiB

MATMUL_SHARE = 0.75
"""Of the data sheet's rate, for cards without a published measurement: between L4 (0.75) and H100 (0.80)."""
TYPICAL = ("A100-80GB", "H200")
"""Of cards with the same memory the one whose speed is assumed where only the size is given."""
SAME_MEMORY = 0.005
"""Cards whose memory differs by less plan alike, but for time."""
OTHER_CARD = r"\bMIG\b|\bLAPTOP\b|\bMAX-?Q\b|[45]090[ -]D\b|H800.*PCIE"
"""In a name: a part of the card, or another one of that name."""

TRAINING_SHARES, OTHERS = {"ampere": 0.92, "hopper": 0.78, "ada": 1.0, "blackwell": 0.45, "H20": 1.0}, 0.85
"""Share of the rate of the best products that those of a training reach: by published steps of A100 and A800, of H100
and H200, of a 4090, of B200 and of H20 (tests/planner/published_steps.json). Power limits the large ones; an H20 has
so few tensor cores that it does not. OTHERS is assumed for the rest.
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    memory_gb: int
    """GB, as the data sheet and its name have it."""
    usable_gib: float
    """What torch sees as the card's total: without what the driver and ECC keep."""
    memory_source: str
    tflops: float
    """Dense bf16 (fp16 where there is no bf16) matrix products by the data sheet."""
    matmul_tflops: float = 0.0
    """The best that was measured on large bf16 products; 0 where nothing was found."""
    matmul_source: str = ""
    training_share: float = OTHERS
    """Of that rate, what a training reaches."""
    attention_share: float = 0.6
    """Of the data sheet's rate, what attention reaches: 0.5 to 0.73 on an A100 (FlashAttention-2, arXiv 2307.08691),
    with the kernels that transformers takes for flash_attention_2, and torch for sdpa.
    """
    memory_gbps: float
    """GB/s of its own memory."""
    nvlink_gbps: float
    """GB/s to the other GPUs of the node, one direction; 0 without NVLink between all."""
    pcie_gen: int
    has_bf16: bool = True
    """Whether it computes in bfloat16: not Volta and Turing."""
    pattern: str = ""
    """Of its name, as a driver or a user writes it; by default the key of GPUS."""

    @property
    def usable_bytes(self) -> int:
        return int(self.usable_gib * GiB)

    @property
    def matmul_flops(self) -> float:
        """Of large bf16 products per second: measured, or a share of the data sheet."""
        return 1e12 * (self.matmul_tflops or MATMUL_SHARE * self.tflops)


GPUS = {
    name: Gpu(training_share=TRAINING_SHARES.get(values.pop("generation", ""), OTHERS), **values)
    for name, values in tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")).items()
}
"""In the order of gpus.toml: of cards with the same name the common one first."""


def named_gpus(text: str) -> list[str]:
    """Keys of GPUS that this name may mean: of the longest match, for H100 is within H100 NVL."""
    if re.search(OTHER_CARD, text.upper()):
        return []
    lengths = {}
    for key, gpu in GPUS.items():
        match = re.search(rf"(?<![A-Z0-9])(?:{gpu.pattern or key})(?![0-9A-Z])", text.upper())
        if match:
            lengths[key] = len(match.group())
    return [key for key, length in lengths.items() if length == max(lengths.values())]


def sized_gpus(num_bytes: int) -> list[str]:
    """Keys of the GPUS that a user or a driver may give this memory, in GB, GiB, or as the card's own total."""

    sizes = {key: (gpu.memory_gb * GB, gpu.memory_gb * GiB, gpu.usable_bytes) for key, gpu in GPUS.items()}
    return [key for key, names in sizes.items() if any(abs(num_bytes - size) <= 0.012 * size for size in names)]


def choose_gpu(gpu_type: str, num_bytes: int) -> str:
    """Key of GPUS for what a user wrote.

    Args:
        gpu_type: empty where only memory is given.
        num_bytes: of one GPU; 0 where only a name is given.

    Raises:
        UserError: for an unknown name or size, for a memory that no card of this name has, and where cards of
            different memory fit.
    """
    if not gpu_type:
        names = sized_gpus(num_bytes)
        each = f"--gpus with {num_bytes / GB:,.0f} GB each"
        if not names:
            raise UserError([f"{each}: no such GPU is known; name the card with --gpu_type, one of {', '.join(GPUS)}"])
        sizes = [GPUS[name].usable_gib for name in names]
        alike = max(sizes) - min(sizes) <= SAME_MEMORY * max(sizes)
        if len(names) > 1 and not (alike and set(names) & set(TYPICAL)):
            usable = ", ".join(f"{name} ({GPUS[name].usable_gib:.1f} GiB usable)" for name in names)
            raise UserError([f"{each} may be {usable}; name one with --gpu_type"])
        return _typical(names)
    names = named_gpus(gpu_type)
    if not names:
        raise UserError([f"--gpu_type {gpu_type}: invalid choice (choose from {', '.join(GPUS)})"])
    if num_bytes:  # a part of a card may be planned (MIG), more than the card may not
        fitting = [name for name in names if num_bytes <= 1.08 * GPUS[name].memory_gb * GB]
        if not fitting:
            most = max(GPUS[name].memory_gb for name in names)
            raise UserError([f"--gpus with {num_bytes / GB:,.0f} GB each: a {gpu_type} has {most} GB"])
        return min(fitting, key=lambda name: GPUS[name].memory_gb)
    if len(names) > 1:
        raise UserError([f"--gpu_type {gpu_type}: there are {' and '.join(names)}; name one"])
    return names[0]


def _typical(names: list[str]) -> str:
    return next((name for name in TYPICAL if name in names), names[0])


def gpu_name(machine: Machine) -> str:
    """Key of GPUS for a machine's GPU: by its name, or where that is no known name by its memory.

    Raises:
        UserError: where a user's name is not in the table.
    """
    names = named_gpus(machine.gpu_type) if machine.gpu_type else []
    if not names and machine.gpu_type and not machine.exists:
        raise UserError([f"--gpu_type {machine.gpu_type}: invalid choice (choose from {', '.join(GPUS)})"])
    names = names or sized_gpus(machine.device_bytes)
    if names and machine.gpu_type:
        enough = [name for name in names if GPUS[name].memory_gb * GiB >= 0.98 * machine.device_bytes] or names
        return min(enough, key=lambda name: GPUS[name].memory_gb)
    if names:
        return _typical(names)
    enough = [name for name, gpu in GPUS.items() if gpu.usable_bytes >= 0.98 * machine.device_bytes]
    return min(enough or GPUS, key=lambda name: GPUS[name].usable_bytes if enough else -GPUS[name].usable_bytes)
