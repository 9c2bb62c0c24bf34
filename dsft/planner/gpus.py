"""GPUs by name: the memory that programs see, the rates of the data sheet, and what matrix products reach.

A name says which card; where two cards share it (A100, V100), the memory decides. Rates come from NVIDIA's and AMD's
data sheets. What a card's memory and its products reach was read where `memory_source` and `matmul_source` say.
"""

import re
from dataclasses import dataclass

from dsft.errors import UserError
from dsft.runtime.hardware import Machine
from dsft.units import GB, GiB

BENCHMARK = "github.com/mag-/gpu_benchmark"
MATMUL_SHARE = 0.75
"""Of the data sheet's rate, for cards without a published measurement: between L4 (0.75) and H100 (0.80)."""
TYPICAL = ("A100-80GB", "H200")
"""Of cards with the same memory the one whose speed is assumed where only the size is given."""
SAME_MEMORY = 0.005
"""Cards whose memory differs by less plan alike, but for time."""
OTHER_CARD = r"\bMIG\b|\bLAPTOP\b|\bMAX-?Q\b|[45]090[ -]D\b|H800.*PCIE"
"""In a name: a part of the card, or another one of that name."""

AMPERE, HOPPER, ADA, OTHERS = 0.88, 0.73, 1.0, 0.85
"""Share of the rate of the best products that those of a training reach: by published steps of A100 and A800, of H100
and H200, and of a 4090 (tests/planner/published_steps.json); assumed for others.
"""

ATTENTION_SHARE = 0.6
"""Of the data sheet's rate, what attention reaches: 0.5 to 0.73 on an A100 (FlashAttention-2, arXiv 2307.08691), with
the kernels that transformers takes for flash_attention_2, and torch for sdpa.
"""
ATTENTION_FLOPS = 0.35 * 989e12
"""That these kernels reach at most: 35 % on an H100, since they use no instruction that is newer than Ampere's
(FlashAttention-3, arXiv 2407.08608).
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    memory_gb: int
    """As its name says: GB of the data sheet."""
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

    @property
    def attention_flops(self) -> float:
        """Of attention per second, forward and backward."""
        return min(ATTENTION_SHARE * 1e12 * self.tflops, ATTENTION_FLOPS)


def _gpu(
    memory_gb, usable_gib, memory_source, tflops, memory_gbps, nvlink_gbps, pcie_gen, matmul=None, **others
) -> Gpu:
    measured, source, share = matmul or (0.0, "", OTHERS)
    return Gpu(
        memory_gb=memory_gb,
        usable_gib=usable_gib,
        memory_source=memory_source,
        tflops=tflops,
        memory_gbps=memory_gbps,
        nvlink_gbps=nvlink_gbps,
        pcie_gen=pcie_gen,
        matmul_tflops=measured,
        matmul_source=source,
        training_share=share,
        **others,
    )


_A100 = (267.9, BENCHMARK, AMPERE)
_H100 = (792.1, BENCHMARK, HOPPER)
_H200_MEMORY = "nvidia-smi 143,771 MiB: github.com/sgl-project/sglang/issues/3196; torch sees 0.4 % less"
_H100_MEMORY = "58.28 GiB are 73.68 %: github.com/pytorch/torchtitan/issues/1789"
_A100_MEMORY = "github.com/vllm-project/vllm/issues/4408"
_46068 = "nvidia-smi 46,068 MiB as on the L40"

# Of cards with the same name the common one first. Columns: memory in GB, usable GiB and its source, Tflop/s, GB/s of
# memory, of NVLink, generation of PCIe, (measured Tflop/s, its source, share in training).
GPUS = {
    "B200": _gpu(180, 178.35, "github.com/pytorch/ao/pull/4002", 2250, 7670, 900, 5),
    "H200-NVL": _gpu(141, 139.8, _H200_MEMORY, 836, 4800, 0, 5, pattern="H200[ -]?NVL"),
    "H200": _gpu(141, 139.8, _H200_MEMORY, 989, 4800, 450, 5, _H100, pattern=r"(?<!G)H200"),
    "H20-3E": _gpu(
        141,
        139.8,
        "nvidia-smi 143,771 MiB: github.com/sgl-project/sglang/issues/6418; torch as on H200",
        148,
        4800,
        450,
        5,
        (142.2, "as H20", HOPPER),
        pattern="H20-?3E",
    ),
    "H20": _gpu(
        96,
        94.9,
        "nvidia-smi 97,871 MiB (in the container opencc/ace:20250524), 0.7 % less in torch as on H100",
        148,
        4000,
        450,
        5,
        (142.2, "github.com/zzc0721/torch-performance-test-data/issues/77", HOPPER),
    ),
    "GH200": _gpu(
        96,
        94.5,
        "nvidia-smi 97,871 MiB, as many public logs show; torch sees 94.5",
        990,
        4000,
        450,
        5,
        (842.5, BENCHMARK, HOPPER),
    ),
    "H100-NVL": _gpu(
        94,
        93.1,
        "github.com/fastfetch-cli/fastfetch/issues/1658",
        835,
        3900,
        0,
        5,
        (488.5, BENCHMARK, HOPPER),
        pattern="H100[ -]?NVL",
    ),
    "H100-PCIE": _gpu(80, 79.1, "as H100", 756, 2000, 0, 5, (499.5, BENCHMARK, HOPPER), pattern="H100[ -]?PCIE"),
    "A100-80GB": _gpu(80, 79.15, _A100_MEMORY, 312, 2039, 300, 4, _A100, pattern="A100(?!.*40 ?GB)"),
    "A100-40GB": _gpu(
        40,
        39.39,
        "github.com/philschmid/llm-sagemaker-sample/issues/25",
        312,
        1555,
        300,
        4,
        _A100,
        pattern="A100(?!.*80 ?GB)",
    ),
    "H100": _gpu(80, 79.1, _H100_MEMORY, 989, 3350, 450, 5, _H100),
    "H800": _gpu(80, 79.1, "as H100", 989, 3350, 200, 5, (792.1, "as H100", HOPPER)),
    "A800": _gpu(80, 79.15, "as A100-80GB", 312, 2039, 200, 4, (267.9, "as A100", AMPERE)),
    "MI325X": _gpu(
        256, 255.98, "data sheet: no measured total was found", 1307, 6000, 448, 5, (758.3, "as MI300X", OTHERS)
    ),
    "MI300X": _gpu(
        192,
        191.98,
        "github.com/ROCm/legacy-rocm-build/issues/4750",
        1307,
        5300,
        448,
        5,
        (758.3, BENCHMARK, OTHERS),
    ),
    "MI250X": _gpu(64, 63.98, "one die of two: github.com/RooCodeInc/Roo-Code/issues/6541", 191.5, 1638, 50, 4),
    "RTX-PRO-6000": _gpu(
        96,
        94.97,
        "github.com/antirez/ds4/issues/431",
        503.8,
        1792,
        0,
        5,
        pattern="(RTX[ -])?PRO[ -]6000",
    ),
    "6000-ADA": _gpu(
        48,
        44.43,
        "with ECC: github.com/DINGYANB/MTVCrafter/issues/21",
        364,
        960,
        0,
        4,
        (278.5, BENCHMARK, OTHERS),
        pattern="6000[ -]ADA",
    ),
    "L40S": _gpu(
        48, 44.42, "github.com/stepfun-ai/Step-Video-T2V/issues/8", 362, 864, 0, 4, (252.0, BENCHMARK, OTHERS)
    ),
    "L40": _gpu(48, 44.40, "github.com/QwenLM/Qwen3-VL/issues/2097", 181, 864, 0, 4, (170.3, BENCHMARK, OTHERS)),
    "L20": _gpu(48, 44.40, _46068, 119.5, 864, 0, 4),
    "A40": _gpu(48, 44.40, _46068, 149.7, 696, 0, 4),
    "A6000": _gpu(48, 47.5, "nvidia-smi 49,140 MiB without ECC; torch sees 47.5", 154.8, 768, 0, 4),
    "V100-32GB": _gpu(
        32,
        31.75,
        "github.com/deepspeedai/DeepSpeed/issues/3312",
        125,
        900,
        150,
        3,
        has_bf16=False,
        pattern="V100(?!.*16 ?GB)",
    ),
    "V100-16GB": _gpu(
        16,
        15.78,
        "github.com/kchengiva/Shift-GCN/issues/34",
        125,
        900,
        150,
        3,
        has_bf16=False,
        pattern="V100(?!.*32 ?GB)",
    ),
    "5090": _gpu(32, 31.37, "github.com/Wan-Video/Wan2.1/issues/465", 209.5, 1792, 0, 5),
    "4090": _gpu(24, 23.64, "github.com/ali-vilab/VGen/issues/104", 165, 1008, 0, 4, (178.5, BENCHMARK, ADA)),
    "3090": _gpu(24, 23.70, "github.com/GaoLii/DSP/issues/10", 71, 936, 0, 4, (78.0, BENCHMARK, OTHERS)),
    "A30": _gpu(24, 23.53, "github.com/google/RB-Modulation/issues/5", 165, 933, 0, 4),
    "A10G": _gpu(
        24,
        22.06,
        "nvidia-smi 23,028 MiB: github.com/modal-labs/modal-client/pull/2797; torch sees 2 % less",
        70,
        600,
        0,
        4,
        (69.7, BENCHMARK, OTHERS),
    ),
    "A10": _gpu(24, 22.06, "as A10G", 125, 600, 0, 4),
    "L4": _gpu(
        24,
        22.03,
        "nvidia-smi 23,034 MiB: github.com/modal-labs/modal-client/pull/2797; torch sees 2 % less",
        121,
        300,
        0,
        4,
        (91.4, BENCHMARK, OTHERS),
    ),
    "T4": _gpu(16, 14.56, "github.com/Zheng-Chong/CatVTON/issues/133", 65, 320, 0, 3, has_bf16=False),
}


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

    def agrees(gpu: Gpu) -> bool:
        names = (gpu.memory_gb * GB, gpu.memory_gb * GiB, gpu.usable_bytes)
        return any(abs(num_bytes - size) <= 0.012 * size for size in names)

    return [key for key, gpu in GPUS.items() if agrees(gpu)]


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
        return _by_size(num_bytes)
    names = named_gpus(gpu_type)
    if not names:
        raise UserError([f"--gpu_type {gpu_type}: unknown; there are {', '.join(GPUS)}"])
    if num_bytes:  # a part of a card may be planned (MIG), more than the card may not
        fitting = [name for name in names if num_bytes <= 1.08 * GPUS[name].memory_gb * GB]
        if not fitting:
            most = max(GPUS[name].memory_gb for name in names)
            raise UserError([f"--gpus with {num_bytes / GB:,.0f} GB each: a {gpu_type} has {most} GB"])
        return min(fitting, key=lambda name: GPUS[name].memory_gb)
    if len(names) > 1:
        raise UserError([f"--gpu_type {gpu_type}: there are {' and '.join(names)}; name one"])
    return names[0]


def _by_size(num_bytes: int) -> str:
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


def same_memory(name: str) -> list[str]:
    """The other cards of this size."""
    return [key for key, gpu in GPUS.items() if key != name and gpu.memory_gb == GPUS[name].memory_gb]


def _typical(names: list[str]) -> str:
    return next((name for name in TYPICAL if name in names), names[0])


def gpu_name(machine: Machine) -> str:
    """Key of GPUS for a machine's GPU: by its name, or where that says nothing by its memory.

    Raises:
        UserError: where a user's name is not in the table.
    """
    names = named_gpus(machine.gpu_type) if machine.gpu_type else []
    if not names and machine.gpu_type and not machine.exists:
        raise UserError([f"--gpu_type {machine.gpu_type}: unknown; there are {', '.join(GPUS)}"])
    names = names or sized_gpus(machine.device_bytes)
    if names and machine.gpu_type:
        enough = [name for name in names if GPUS[name].memory_gb * GiB >= 0.98 * machine.device_bytes] or names
        return min(enough, key=lambda name: GPUS[name].memory_gb)
    if names:
        return _typical(names)
    enough = [name for name, gpu in GPUS.items() if gpu.usable_bytes >= 0.98 * machine.device_bytes]
    return min(enough or GPUS, key=lambda name: GPUS[name].usable_bytes if enough else -GPUS[name].usable_bytes)
