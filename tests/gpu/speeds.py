"""Checks that ask torch itself: the machine, its rates, memory outside of torch, kernels that keep rows apart."""

import importlib.util
import operator
from collections.abc import Iterator

import torch
from transformers import AutoConfig, GptOssConfig
from transformers.utils import is_flash_attn_2_available

from dsft.models.build import DTYPES, resolve_dtype
from dsft.models.trials import KERNELS, is_like_eager, isolation_problem, needs_mask
from dsft.planner.calibration import (
    calibrate,
    gpus_key,
    keep,
    matmul_flops,
    measure_outside,
    seconds_of,
    speeds_file,
    speeds_for,
    to_carry,
)
from dsft.planner.plans import RESERVE_BYTES
from dsft.planner.step_time import ASSUMED, GPUS, Speeds, gpu_name, named_gpus, speeds_of
from dsft.runtime.distributed import device
from dsft.runtime.hardware import FREE_SHARE, Machine, ask_gpu, this_machine
from dsft.units import in_gib
from gpu.check import Row, Setting

FAST_ENOUGH = 0.7
"""Of the rate that the plan counts on."""
SAME_MEMORY = 0.01
"""Of a card, between two drivers."""
RATES = {
    "flops": "a few layers in training",
    "device_bytes": "a fused AdamW update (GPU memory)",
    "host_link_bytes": "copies from pinned host memory",
    "link_bytes": "all-gather",
    "reduce_bytes": "reduce-scatter",
    "all_reduce_bytes": "all-reduce",
}
"""Field of `Speeds` -> what is timed."""


def facts(setting: Setting) -> Iterator[Row]:
    """Compare the cards with the planner's table."""
    machine = this_machine(ranks_per_node=setting.ranks)
    if not setting.has_gpu:
        yield Row(
            claim="this machine", measured=f"{machine.ranks_per_node} CPU ranks on {machine.cores} cores", ok=True
        )
        return
    cards = [torch.cuda.get_device_properties(gpu) for gpu in range(setting.ranks)]
    left = [ask_gpu(gpu) for gpu in range(setting.ranks)]
    names = sorted({card.name for card in cards})
    is_known = bool(named_gpus(names[0]))
    yield Row(
        claim="all GPUs are of a kind that the plan knows",
        predicted="one known kind",
        measured=f"{len(cards)} x {', '.join(names)}, {machine.interconnect or 'links not read'}",
        ok=len(names) == 1 and is_known,
        details={"machine": str(machine), "driver": driver(), "cuda": torch.version.cuda, "nccl": nccl()},
    )
    planned, total = GPUS[gpu_name(machine)].usable_bytes, min(card.total_memory for card in cards)
    yield Row(
        claim="memory that programs see",
        predicted=in_gib(planned) if is_known else "",
        measured=in_gib(total),
        ok=abs(total / planned - 1) <= SAME_MEMORY if is_known else None,
    )
    share = min(free / everything for free, everything in left)
    yield Row(
        claim="no other program holds GPU memory",
        predicted=f"at least {FREE_SHARE:.0%} free",
        measured=f"{share:.0%} free",
        ok=share >= FREE_SHARE,
    )


def driver() -> str:
    """Ask for the driver's version, which nvidia-ml-py knows."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:  # AMD's
        return f"not told by NVML ({error})"


def nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def speeds(setting: Setting) -> Iterator[Row]:
    """Measure this machine's rates, compare them with those that plans count on without it, and keep them."""
    place, dtype = device(), resolve_dtype("auto")
    machine = this_machine(ranks_per_node=setting.ranks)
    planned = speeds_of(machine, dtype=dtype)  # tells no time of a card that is in no table: then nothing is claimed
    products = GPUS[gpu_name(machine)].matmul_flops if setting.has_gpu else 0.0
    yield rate("large matrix products", products, matmul_flops(place), "TFLOP/s", told=planned.has_time_estimate)
    yield rate("attention", planned.attention_flops, attention_flops(place), "TFLOP/s", told=planned.has_time_estimate)
    torch.cuda.empty_cache()
    calibrate(machine, dtype=dtype)
    yield from planned_rates(planned, speeds_for(machine, dtype=dtype), machine)
    kept = {name: rate for name, rate in (to_carry(machine, dtype=dtype)["ranks"] or {}).items() if name != "date"}
    later = speeds_for(machine, dtype=dtype)
    yield Row(
        claim="dsft plan reads these rates",
        measured=speeds_file().name,
        ok=bool(kept) and all(getattr(later, name) == rate for name, rate in kept.items()),
    )


def planned_rates(planned: Speeds, measured: Speeds, machine: Machine) -> Iterator[Row]:
    """Compare what was measured, field by field."""
    for name, title in RATES.items():
        if machine.ranks_per_node == 1 and title.startswith(("all-", "reduce-")):
            continue
        if name == "host_link_bytes" and not machine.has_gpu:
            continue
        unit = "TFLOP/s" if name == "flops" else "GB/s"
        yield rate(title, getattr(planned, name), getattr(measured, name), unit, told=planned.has_time_estimate)


def rate(title: str, planned: float, measured: float, unit: str, *, told: bool = True) -> Row:
    """Compare two rates; nothing is claimed where the plan's is a rule of thumb."""
    scale = 1e12 if unit == "TFLOP/s" else 1e9
    claims = told and planned > 0
    return Row(
        claim=f"{title}: at least {FAST_ENOUGH} of the plan's rate" if claims else title,
        predicted=f"{planned / scale:.3g} {unit}" if claims else "",
        measured=f"{measured / scale:.3g} {unit}",
        ok=measured >= FAST_ENOUGH * planned if claims else None,
        details={"planned": planned, "measured": measured},
    )


def attention_flops(place: torch.device) -> float:
    """Operations per second of causal attention, forward and backward, counted as in arXiv 2307.08691, section 4.1."""
    batch, heads, length, width = (4, 16, 4096, 128) if place.type == "cuda" else (1, 4, 256, 64)
    dtype = DTYPES[resolve_dtype("auto")]
    shape = (batch, heads, length, width)
    query, key, value = (torch.randn(shape, device=place, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=place, dtype=dtype)

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

    # 4 T^2 d per head, half of it masked; the backward takes 2.5 times the forward.
    return 3.5 * 4 * length**2 * width * heads * batch / 2 / min(seconds_of(run, place))


def outside_memory(setting: Setting) -> Iterator[Row]:
    """Measure what a GPU holds beyond torch's allocator: the context, then each communicator. Later plans use it."""
    others, *held = measure_outside(setting.ranks)  # of the context, then with one, two and three communicators
    claims = setting.has_gpu and not others
    if others:
        yield Row(claim="no other program holds GPU memory", measured=f"{in_gib(others)} are held", ok=False)
    assumed = [ASSUMED.total_bytes(communicators) + RESERVE_BYTES for communicators in range(len(held))]
    yield Row(
        claim="the context, with 0 to 3 communicators, takes at most what is assumed and the reserve",
        predicted=", ".join(map(in_gib, assumed)) if claims else "",
        measured=", ".join(map(in_gib, held)),
        ok=all(map(operator.le, held, assumed)) if claims else None,
    )
    if claims:
        context, *after = held
        taken = [count - context for count in after]
        machine, dtype = this_machine(ranks_per_node=setting.ranks), resolve_dtype("auto")
        path = keep("outside", gpus_key(machine), {"context_bytes": context, "communicators_bytes": taken})
        planned = speeds_for(machine, dtype=dtype).outside
        yield Row(claim="dsft plan reads these bytes", measured=path.name, ok=planned.context_bytes == context)


def usable_kernels() -> list[str]:
    """What of attention for GPUs has its packages here."""
    flash = is_flash_attn_2_available(kernels_fallback_ok=True)
    has = {"flash_attention_2": flash, "flex_attention": importlib.util.find_spec("triton") is not None}
    return [kernel for kernel in KERNELS if has[kernel]]


def masks(setting: Setting) -> Iterator[Row]:
    """Try on this device whether packed samples see each other, and whether padding is seen without a mask."""
    place, dtype = device(), DTYPES[resolve_dtype("auto")]
    config = AutoConfig.from_pretrained(setting.path("base"))
    for kernel in ["sdpa", *(usable_kernels() if setting.has_gpu else [])]:
        problem = isolation_problem(config, attn_implementation=kernel, device=place, dtype=dtype)
        claim = f"packed samples do not see each other ({kernel})"
        yield Row(claim=claim, measured=problem or "they do not", ok=problem is None)
    same = not needs_mask(config, "sdpa", device=place, dtype=dtype)
    yield Row(
        claim="loss and gradients without a mask are those with it (sdpa)",
        measured="the same" if same else "they differ",
        ok=same,
    )
    without_sdpa = GptOssConfig(num_hidden_layers=2)
    for kernel in usable_kernels() if setting.has_gpu else []:
        same = is_like_eager(without_sdpa, kernel, device=place, dtype=dtype)
        yield Row(
            claim=f"loss and gradients of gpt-oss, which has no sdpa, are those of eager attention ({kernel})",
            measured="the same" if same else "they differ, or it does not compute",
            ok=same,
        )
