"""The time of one optimizer step, to rank plans: a roofline of matrix products, collectives and transfers. Also the
GPUs that are known by name (cards.toml). Pure arithmetic.

FLOPs per token: 2 x active parameters forward, twice that backward (once with LoRA, whose base needs no weight
gradients), forward again with activation checkpointing. Attention's backward has five products for two of its forward
(FlashAttention-2, arXiv 2307.08691). One utilisation for each card covers everything that a GPU does beside its
products.

Traffic of ZeRO (ZeRO paper, section 7; with LoRA the gradients are the adapters'):
    stage 0, 1  gradients reduced and weights gathered once per step
    stage 2     gradients reduced in each micro step
    stage 3     weights gathered for forward and backward of each micro step, gradients scattered
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsft.errors import UserError
from dsft.runtime.hardware import Machine
from dsft.units import GB, Batch, GiB

if TYPE_CHECKING:  # they import transformers, which the ranks of a smoke test would wait for
    from dsft.models.measure import ModelSize
    from dsft.planner.memory import ZeroLayout

# ---- cards


@dataclass(frozen=True, kw_only=True)
class Card:
    memory_gb: int  # GB, as in the data sheet and the name
    usable_gib: float  # the total that torch reports: without the share of driver and ECC
    tflops: float  # dense bf16 (fp16 without bf16) matrix products by the data sheet
    utilisation: float | None = None
    """Share of that rate that wide products reach, fitted to published steps of its generation; None without any."""
    narrow: int = 600  # width at which products reach half the rate of wide ones
    memory_gbps: float  # GB/s of its own memory
    nvlink_gbps: float  # GB/s to the other GPUs of the node, one direction; 0 without NVLink between all
    pcie_gen: int
    has_bf16: bool = True  # whether it computes in bfloat16; Volta and Turing do not
    pattern: str = ""  # regular expression of its name, as a driver or a user writes it; by default the key of CARDS

    @property
    def usable_bytes(self) -> int:
        return int(self.usable_gib * GiB)


_TABLE = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
CARDS = {name: Card(**values) for name, values in _TABLE.items()}
"""In the order of cards.toml: of cards with the same name or memory, the common one first."""
OTHER_CARD = r"\bMIG\b|\bLAPTOP\b|\bMAX-?Q\b|[45]090[ -]D\b|H800.*PCIE"
"""In a name: a part of a card, or another card of that name."""


def cards_named(text: str) -> list[str]:
    """Return the keys of CARDS that a name may mean: those of the longest match, since H100 is within H100 NVL."""
    name = text.upper()
    lengths = {}
    for key, card in CARDS.items():
        match = re.search(rf"(?<![A-Z0-9])(?:{card.pattern or key})(?![0-9A-Z])", name)
        if match and not re.search(OTHER_CARD, name):
            lengths[key] = len(match.group())
    return [key for key, length in lengths.items() if length == max(lengths.values())]


def choose_card(text: str) -> str:
    """Return the key of CARDS for a user's name such as H100. Raises UserError if it is unknown or ambiguous."""
    names = cards_named(text)
    if not names:
        raise UserError(f"--gpus: {text} is not known (choose from {', '.join(CARDS)}, or write the memory, 80GB)")
    if len(names) > 1:
        raise UserError(f"--gpus: {text} is {' or '.join(names)}; name one")
    return names[0]


def card_of(machine: Machine) -> str:
    """Return the key of CARDS for a machine's GPU: by its name, else the smallest card with its memory."""
    names = cards_named(machine.gpu_type) or list(CARDS)
    enough = [name for name in names if CARDS[name].usable_bytes >= 0.98 * machine.device_bytes]
    if not enough:
        return max(names, key=lambda name: CARDS[name].usable_bytes)
    least = min(CARDS[name].usable_gib for name in enough)
    return next(name for name in enough if CARDS[name].usable_gib <= 1.005 * least)


# ---- speeds of the hardware

ASSUMED_UTILISATION = 0.5
LINK_EFFICIENCY = 0.8
ASSUMED_NETWORK_GBPS = 50  # GB/s of a node's network if none is named: one card of 400 Gbit/s
PCIE_GBPS = {3: 16, 4: 32, 5: 64}  # GB/s of 16 lanes in one direction, by generation (PCI-SIG)
BRIDGE_GBPS = {3: 50, 4: 56, 5: 300}  # GB/s of an NVLink bridge in one direction, by the generation of PCIe


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Achieved speeds, not those of data sheets, of one rank, its links and its node."""

    flops: float  # floating-point operations per second on one rank, in wide products
    narrow: int  # width at which products reach half of that
    device_bytes: float  # bytes per second of one rank's own memory
    link_bytes: float  # bytes per second of a rank's links within the node
    network_bytes: float  # bytes per second of a node's network
    host_link_bytes: float  # bytes per second between one rank's device and host memory


def speeds_of(machine: Machine, *, dtype: str) -> Speeds:
    """Return the speeds of a machine, from its card and `--interconnect`; for CPU ranks an order of magnitude."""
    if not machine.has_gpu:
        return Speeds(flops=5e10, narrow=0, device_bytes=1e10, link_bytes=2e9, network_bytes=1e9, host_link_bytes=1e10)
    card = CARDS[card_of(machine)]
    link, network = parse_interconnect(machine.interconnect, card)
    flops = 1e12 * card.tflops * (card.utilisation or ASSUMED_UTILISATION)
    if dtype == "float32":  # TF32 is half as fast as bf16; cards before Ampere have no tensor cores for fp32
        flops /= 2 if card.has_bf16 else 8
    return Speeds(
        flops=flops,
        narrow=card.narrow,
        device_bytes=0.65 * card.memory_gbps * GB,
        link_bytes=link,
        network_bytes=network,
        host_link_bytes=LINK_EFFICIENCY * PCIE_GBPS[card.pcie_gen] * GB,
    )


def parse_interconnect(text: str, card: Card) -> tuple[float, float]:
    """(bytes/s of a rank within the node, bytes/s of a node's network) for "nvlink+ib400", "pcie", "pcie4+eth25",
    "nvlink+8xib400" ...

    The number after ib, roce or eth is Gbit/s of one card; a node has one card unless prefixed as in 8xib400. Without
    a part for the node: NVLink if the GPU has it, else PCIe.

    Raises:
        UserError: an unknown part.
    """
    link_gbps = card.nvlink_gbps or PCIE_GBPS[card.pcie_gen]
    network_gbps = ASSUMED_NETWORK_GBPS
    for part in filter(None, text.lower().split("+")):
        pcie = re.fullmatch(r"pcie([345])?", part)
        port = re.fullmatch(r"(?:(\d+)x)?(?:ib|roce|eth)([1-9]\d*)", part)
        if part == "nvlink":
            link_gbps = card.nvlink_gbps or BRIDGE_GBPS[card.pcie_gen]
        elif pcie:
            link_gbps = PCIE_GBPS[int(pcie[1] or card.pcie_gen)]
        elif port:
            network_gbps = int(port[1] or 1) * int(port[2]) / 8
        else:
            raise UserError(
                f"--interconnect {text}: {part!r} is unknown; join nvlink or pcie (pcie3, pcie4, pcie5) and a network"
                " such as ib400, 8xib400 or eth10 with +"
            )
    return LINK_EFFICIENCY * link_gbps * GB, LINK_EFFICIENCY * network_gbps * GB


# ---- one optimizer step

EXPERT_SHARE = 0.17
"""Share of the rate that grouped products of experts reach: Qwen3 30B A3B with transformers 5 on 8 H100."""
CPU_ADAM_PARAMS = 2e9  # parameters per second of a node's CPU Adam: 1.7e9 to 3e9 are reported for nodes of 8 GPUs
ADAPTERS_COST = 1.2  # factor for the small products of adapters and their sums
UNPACKED_BYTES = 11
"""Memory traffic of unpacking one quantised weight in one pass: Qwen 7B to 72B in 4 bits against plain LoRA."""
LAUNCH_SECONDS = {"full": 5e-4, "lora": 1.6e-3, "qlora": 3.9e-3}
"""Python time to launch one pass over one layer (github.com/QwenLM/Qwen, README.md)."""
HOOK_SECONDS = 4.5e-4
"""Python time that ZeRO-3 adds per module with weights: hooks, and the events of a fetch (the same source)."""
OVERLAP_LOSS = 0.5  # share of the shorter of compute and communication that overlap does not hide
GATHER_SECONDS = 2e-4  # Python time of a gather from other ranks: Qwen 7B on 2 and 72B on 4 A100 (the same source)


def flops_per_token(size: "ModelSize", seq_len: int, *, checkpointing: bool) -> float:
    """Floating-point operations of training on one token, as counted for MFU."""
    passes = 2 + size.trained_share + checkpointing
    return passes * (2 * size.active_params + attention_flops_per_token(size, seq_len))


def attention_flops_per_token(size: "ModelSize", seq_len: int) -> float:
    """Floating-point operations of attention, for one forward of one token of a causal sequence."""
    return 2 * seq_len * size.num_heads * size.head_dim * size.num_layers  # causal: half of 4 s h L


def product_seconds(size: "ModelSize", speeds: Speeds) -> float:
    """Seconds of the matrix products of one pass over one token."""
    slower = size.active_expert_params * (1 / EXPERT_SHARE - 1)
    return 2 * (size.active_params + slower) / speeds.flops * (1 + speeds.narrow / size.hidden_size)


def launch_seconds(layout: "ZeroLayout") -> float:
    """Seconds of Python for one pass over the model on a GPU."""
    size = layout.size
    method = "lora" if size.lora_r else "full"
    if layout.packed:
        method = "qlora"
    seconds = size.num_layers * LAUNCH_SECONDS[method] + size.looped_experts * 2e-4
    if layout.stage == 3:
        seconds += size.num_modules * HOOK_SECONDS
    return seconds


def collective_seconds(num_bytes: float, machine: Machine, speeds: Speeds, *, ranks: int | None = None) -> float:
    """Seconds of a collective over `num_bytes` in total: each rank receives all but its own share over its links, each
    node all but its own over its network. Args: `ranks`: neighbours that take part; by default all.
    """
    ranks = min(ranks or machine.world_size, machine.world_size)
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / machine.ranks_per_node)
    across = num_bytes * (nodes - 1) / nodes / speeds.network_bytes
    if machine.ranks_per_node == 1:
        return across
    inside = num_bytes * (ranks - 1) / ranks / speeds.link_bytes
    return max(inside, across)


def step_seconds(layout: "ZeroLayout", batch: Batch, *, recomputed: float) -> float:
    """Predict one optimizer step. `recomputed`: the share of the layers that activation checkpointing recomputes."""
    job = layout.job
    size = layout.size
    zero = layout.zero
    machine = layout.machine
    speeds = speeds_of(machine, dtype=job.dtype)
    accumulation = batch.accumulation
    world = machine.world_size
    tokens = batch.micro * job.seq_len // batch.sequence_parallel
    attention = attention_flops_per_token(size, job.seq_len) / speeds.flops
    passes = 2 + recomputed
    micro_step = tokens * (passes + size.trained_share) * product_seconds(size, speeds)
    micro_step += tokens * (3.5 + recomputed) * attention
    if size.lora_r:
        micro_step *= ADAPTERS_COST
    if layout.packed:
        micro_step += UNPACKED_BYTES * passes * layout.num_frozen / speeds.device_bytes
    compute = accumulation * micro_step
    host = 0.0
    if machine.has_gpu:
        host = accumulation * passes * launch_seconds(layout)

    gradients = collective_seconds(layout.sent_bytes * size.num_trainable, machine, speeds)
    trained = collective_seconds(layout.weight_bytes * size.num_trainable, machine, speeds)
    if layout.stage == 0:
        moving = 2 * gradients
    elif layout.stage < 3:
        if zero["use_multi_rank_bucket_allreduce"]:  # an all-reduce in place of a reduce
            gradients *= 2
        if layout.stage == 2:
            gradients *= accumulation
        moving = trained + gradients
    else:
        # With hpZ the forward's gather fills a second partition, from which the backward gathers. An update invalidates
        # trained weights alone, so a frozen base never crosses nodes again.
        over = layout.hpz_ranks or world
        frozen = collective_seconds(layout.weight_bytes * layout.num_frozen, machine, speeds, ranks=over)
        backward = collective_seconds(layout.weight_bytes * size.num_params, machine, speeds, ranks=over)
        moving = accumulation * (trained + frozen + backward + gradients)
        if machine.has_gpu and world > 1:
            host += accumulation * 2 * size.num_modules * GATHER_SECONDS
    updated = size.num_trainable
    if layout.stage:
        updated /= world
    optimizer = updated * (6 + 2 * layout.optimizer.checkpoint_bytes) / speeds.device_bytes
    if layout.optimizer_device != "none":
        if machine.has_gpu:  # gradients to the host each micro step, weights back once
            moved = (accumulation * layout.sum_bytes + layout.weight_bytes) * updated
            moving += moved / speeds.host_link_bytes
        optimizer = updated * machine.ranks_per_node / CPU_ADAM_PARAMS
    if layout.param_device != "none" and machine.has_gpu:  # this rank's shard, for forward and backward
        moving += 2 * accumulation * layout.weight_bytes * size.num_params / world / speeds.host_link_bytes
    busy = max(compute, moving) + OVERLAP_LOSS * min(compute, moving)
    return max(busy, host) + optimizer
