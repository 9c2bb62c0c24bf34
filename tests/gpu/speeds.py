"""Checks that ask torch itself: the machine, and kernels that keep rows apart."""

import importlib.util
from collections.abc import Iterator

import torch
from transformers import AutoConfig, GptOssConfig
from transformers.utils import is_flash_attn_2_available

from dsft.models.build import DTYPES, resolve_dtype
from dsft.models.probes import KERNELS, is_like_eager, isolation_problem
from dsft.planner.speed import CARDS, card_of, cards_named
from dsft.runtime.distributed import device
from dsft.runtime.hardware import FREE_SHARE, ask_gpu, this_machine
from dsft.units import in_gib
from gpu.check import Row, Setting


def facts(setting: Setting) -> Iterator[Row]:
    """Compare the cards with the planner's table."""
    machine = this_machine(ranks_per_node=setting.ranks)
    if not setting.has_gpu:
        yield Row(claim="this machine", measured=f"{machine.ranks_per_node} CPU ranks", ok=True)
        return
    cards = [torch.cuda.get_device_properties(gpu) for gpu in range(setting.ranks)]
    left = [ask_gpu(gpu) for gpu in range(setting.ranks)]
    names = sorted({card.name for card in cards})
    is_known = bool(cards_named(names[0]))
    yield Row(
        claim="all GPUs are of a kind that the plan knows",
        predicted="one known kind",
        measured=f"{len(cards)} x {', '.join(names)}",
        ok=len(names) == 1 and is_known,
        details={"machine": str(machine), "cuda": torch.version.cuda},
    )
    planned, total = CARDS[card_of(machine)].usable_bytes, min(card.total_memory for card in cards)
    yield Row(
        claim="memory that programs see",
        predicted=in_gib(planned) if is_known else "",
        measured=in_gib(total),
        ok=abs(total / planned - 1) <= 0.01 if is_known else None,
    )
    share = min(free / everything for free, everything in left)
    yield Row(
        claim="no other program holds GPU memory",
        predicted=f"at least {FREE_SHARE:.0%} free",
        measured=f"{share:.0%} free",
        ok=share >= FREE_SHARE,
    )


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
    without_sdpa = GptOssConfig(num_hidden_layers=2)
    for kernel in usable_kernels() if setting.has_gpu else []:
        same = is_like_eager(without_sdpa, kernel, device=place, dtype=dtype)
        yield Row(
            claim=f"loss and gradients of gpt-oss, which has no sdpa, are those of eager attention ({kernel})",
            measured="the same" if same else "they differ, or it does not compute",
            ok=same,
        )
