"""GPUs by name (gpus.toml), and the time of one optimizer step from how fast the hardware is. Pure arithmetic.

Speeds come from the data sheet and from `--interconnect`; what was measured takes their place (calibration.py).

Products of matrices per token: 2 x active parameters forward, twice that backward (once with LoRA, whose base needs no
weight gradients), forward again with activation checkpointing. Attention's backward multiplies five times where its
forward does twice (FlashAttention-2, arXiv 2307.08691). Other operators move memory: their bytes are traced. Python
launches every kernel and runs the hooks of ZeRO-3, which a short micro batch waits for.

Traffic of ZeRO (ZeRO paper, section 7; with LoRA the gradients are the adapters'):
    stage 0, 1  gradients reduced and weights gathered once per step
    stage 2     gradients reduced in each micro step
                (under 1 and 2 by all-reduce, twice the traffic, where use_multi_rank_bucket_allreduce stands)
    stage 3     weights gathered for forward and backward of each micro step, gradients scattered
"""

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsft.errors import UserError
from dsft.runtime.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, Machine
from dsft.units import GB, MLP_TILES, Batch, GiB

if TYPE_CHECKING:  # they import transformers, which the ranks of a smoke test would wait for
    from dsft.models.size import ModelSize
    from dsft.planner.zero_layout import ZeroLayout

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
        UserError: for what is unknown, or may be several cards of different memory.
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


MEMORY_SHARE = 0.65
"""Share of the data sheet's memory bandwidth that pointwise operators reach: by the published steps."""
ATTENTION_FLOPS = 0.35 * 989e12
"""That attention's kernels reach at most: 35 % on an H100, since they use no instruction that is newer than Ampere's
(FlashAttention-3, arXiv 2407.08608).
"""
PCIE_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.8

NETWORK = r"(ib|roce|eth)(\d+)"
ASSUMED_NETWORK_GBPS = 50
"""GB/s of a node's network on paper, where none is named: one card of 400 Gbit/s."""
UNREAD_NETWORK_GBPS = 25 / 8
"""The same of a machine that exists, has no InfiniBand and whose kernel reports no rate: 25 Gbit/s of a
virtual card.
"""

PCIE_GBPS = {3: 16, 4: 32, 5: 64}
"""GB/s of 16 lanes in one direction, by generation (PCI-SIG)."""
BRIDGE_GBPS = {3: 50, 4: 56, 5: 300}
"""GB/s of an NVLink bridge in one direction, on cards without NVLink between all, by their generation of PCIe: Quadro
RTX 8000, RTX A6000 and H100 NVL by their data sheets.
"""


@dataclass(frozen=True, kw_only=True)
class OutsideMemory:
    """Bytes that one GPU holds outside of torch's allocator: assumed (docs/planner.md has the sources), until
    `dsft plan --calibrate` has measured them.
    """

    context_bytes: int = CONTEXT_BYTES
    """CUDA's context with the libraries' kernels."""
    communicators_bytes: tuple[int, ...] = tuple(number * COMMUNICATOR_BYTES for number in (1, 2, 3))
    """NCCL's buffers with one communicator, two, and three."""
    measured: bool = False

    def total_bytes(self, communicators: int) -> int:
        if not communicators:
            return self.context_bytes
        known = min(communicators, len(self.communicators_bytes))
        more = (communicators - known) * COMMUNICATOR_BYTES
        return self.context_bytes + self.communicators_bytes[known - 1] + more


ASSUMED = OutsideMemory()


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of one rank, its links and its node, in what is reached, not in what data sheets say."""

    flops: float
    """Floating-point operations of matrix products per second on one rank."""
    device_bytes: float
    """Bytes per second of one rank's own memory."""
    link_bytes: float
    """Bytes per second that one rank gets from the others of its node in an all-gather."""
    reduce_bytes: float
    """The same in a reduce-scatter."""
    all_reduce_bytes: float
    """The same in an all-reduce, which moves everything twice."""
    network_bytes: float
    """Bytes per second that one node gets from the others, all its cards together."""
    host_link_bytes: float
    """Bytes per second between one rank's device and host memory."""
    adam_params: float
    """Parameters per second that DeepSpeed's CPUAdam updates on one node."""
    nvme_bytes: float
    """Bytes per second of one node's NVMe."""
    collective_seconds: float
    """What a collective costs however small it is."""
    overlaps: bool
    """Whether communication runs while computing: not on CPU ranks, whose cores do both."""
    source: str
    has_time_estimate: bool = True
    """Whether seconds may be printed, or only an order of configurations: rules of thumb for CPU ranks are off by a
    factor.
    """
    attention_share: float = 1.0
    """Of `flops`, what attention reaches."""
    outside: OutsideMemory = ASSUMED
    """No speed, but measured beside them: what a GPU holds outside of torch."""

    @property
    def attention_flops(self) -> float:
        return self.attention_share * self.flops


def speeds_of(machine: Machine, *, dtype: str, products: float = 0.0) -> Speeds:
    """Speeds of `machine` by its GPU type and interconnect; CPU ranks by a rule of thumb (`dsft plan --calibrate`
    measures them).

    Args:
        products: operations per second of large matrix products, timed on a GPU of this machine that is in no table;
            0 where they were not.

    Raises:
        UserError: for a GPU type or interconnect that is not known.
    """
    if not machine.has_gpu:
        # A core of a server, AVX-512: about 100 GFLOP/s in fp32; ranks share cores and memory (measured ranges vary
        # fourfold).
        cores = max(1.0, machine.cores / machine.ranks_per_node)
        return Speeds(
            flops=1e11 * cores,
            device_bytes=5e9 * cores,
            link_bytes=5e8,
            reduce_bytes=5e8,
            all_reduce_bytes=2e9,
            network_bytes=1e9,
            host_link_bytes=5e9,
            adam_params=2e8 * machine.cores,
            nvme_bytes=1e9,
            collective_seconds=5e-4,
            overlaps=False,
            source="rules of thumb for CPU ranks, so no time is estimated; dsft plan --calibrate measures this machine",
            has_time_estimate=False,
        )
    name = gpu_name(machine)
    gpu, is_known = GPUS[name], bool(named_gpus(machine.gpu_type)) or not machine.exists
    network_gbps = UNREAD_NETWORK_GBPS if machine.exists else ASSUMED_NETWORK_GBPS
    links = machine.interconnect or "interconnect assumed"
    if machine.nodes > 1 and not re.search(NETWORK, machine.interconnect.lower()):
        links += f", {8 * network_gbps:g} Gbit/s between nodes assumed (--interconnect names others)"
    source = f"{name} by {'published products' if gpu.matmul_tflops else 'its data sheet'}, {links}"
    if not is_known:
        source = f"{machine.gpu_type or 'this GPU'} is in no table"
        source += f": a product timed here, memory as of {name}" if products else ", so no time is estimated"
        source += f", {links}; dsft plan --calibrate measures this machine"
    if products and not is_known:  # a card of this memory with other products
        tflops = products / 1e12
        gpu = dataclasses.replace(gpu, tflops=tflops / MATMUL_SHARE, matmul_tflops=tflops, training_share=OTHERS)
    link, network = parse_interconnect(machine.interconnect, gpu, assumed_gbps=network_gbps)
    reached = gpu.training_share * gpu.matmul_flops
    return Speeds(
        # fp32 without tensor cores is an eighth to a sixteenth of bf16 on these GPUs.
        flops=reached / (8 if dtype == "float32" else 1),
        attention_share=min(1.0, min(gpu.attention_share * 1e12 * gpu.tflops, ATTENTION_FLOPS) / reached),
        device_bytes=MEMORY_SHARE * gpu.memory_gbps * GB,
        link_bytes=link,
        reduce_bytes=link,
        all_reduce_bytes=link,
        network_bytes=network,
        host_link_bytes=PCIE_EFFICIENCY * PCIE_GBPS[gpu.pcie_gen] * GB,
        adam_params=2e9,  # 1.7e9 to 3e9 are reported for nodes of 8 GPUs
        nvme_bytes=5e9,
        collective_seconds=3e-5,
        overlaps=True,
        source=source,
        has_time_estimate=is_known or bool(products),
    )


def parse_interconnect(text: str, gpu: Gpu, *, assumed_gbps: float = ASSUMED_NETWORK_GBPS) -> tuple[float, float]:
    """(bytes/s of a rank within the node, bytes/s of a node's network) for "nvlink+ib400", "pcie", "pcie4+eth25",
    "nvlink+8xib400" ...

    The number after ib, roce or eth is Gbit/s of one card; one card per node unless "8x" stands before it. Without a
    part for the node, NVLink where the GPU has it, else PCIe; without a network, `assumed_gbps` GB/s.

    Raises:
        UserError: for a part that is not one of these.
    """
    link = network = None
    parts = [part for part in text.lower().split("+") if part]
    if not any(part.startswith(("nvlink", "pcie")) for part in parts):
        parts.append("nvlink" if gpu.nvlink_gbps else "pcie")
    for part in parts:
        pcie = re.fullmatch(r"pcie([345])?", part)
        card = re.fullmatch(rf"(?:(\d+)x)?{NETWORK}", part)
        if part == "nvlink":
            link = 0.8 * (gpu.nvlink_gbps or BRIDGE_GBPS[gpu.pcie_gen]) * GB
        elif pcie:
            link = PCIE_EFFICIENCY * PCIE_GBPS[int(pcie[1] or gpu.pcie_gen)] * GB
        elif card and int(card[3]) and int(card[1] or 1):
            network = NETWORK_EFFICIENCY * int(card[1] or 1) * int(card[3]) / 8 * GB
        else:
            raise UserError(
                [
                    f"--interconnect {text}: {part!r} is unknown; join nvlink or pcie (pcie3, pcie4, pcie5) and a"
                    " network such as ib400, 8xib400 or eth10 with +"
                ]
            )
    return link, network or NETWORK_EFFICIENCY * assumed_gbps * GB


NARROW = 300
"""Width at which products of matrices reach half of what wide ones do: published steps of 0.8 and 1 B beside 30 and
70 B.
"""
EXPERT_SHARE = 0.17
"""Of the rate of products, what the grouped ones of experts reach, top-k and the sorting of tokens included: Qwen3 30B
A3B with transformers 5 on 8 H100.
"""
UNPACKED_BYTES = 11
"""Memory that unpacking a weight of a quantised base moves in one pass: Qwen 7B to 72B in 4 bits beside plain LoRA."""
LAUNCH_SECONDS = {"full": 5e-4, "lora": 1.6e-3, "qlora": 3.9e-3}
"""Time that Python takes to launch one pass (forward, recompute, backward) over one layer: with adapters at all linear
layers Qwen 1.8B and 7B take 5 ms per layer for three passes over 256 tokens on an A100, and 12 ms where each layer
is unpacked first (github.com/QwenLM/Qwen, README.md).
"""
HOOK_SECONDS = 4.5e-4
"""The same that ZeRO-3 adds for each module with weights: its hooks, and the events of a fetch. Qwen 1.8B in full takes
11 ms per layer, of 7 such modules, for three passes over 256 tokens on one A100 (the same source).
"""
GATHER_SECONDS = 2e-4
"""The same of a gather from other ranks: Qwen 7B on 2 and 72B on 4 A100 (the same source)."""
EXPERT_SECONDS = 2e-4
"""The same of one expert where Python goes through them: about ten kernels (an estimate)."""
MLP_LAUNCHES = 0.3
"""Of what Python launches for a layer, its feed-forward's part (an estimate), which each tile launches again."""
OVERLAP_LOSS = 0.5
"""Share of the shorter of computing and communicating that overlap does not hide: NCCL's kernels take multiprocessors
and memory bandwidth. Published steps of 13 B on 8 H100 hide none of it, others all.
"""
LONG_SHARE, SHORT_TOKENS = 1 / 3, 2048
"""Attention's share of a forward and backward from which on a step counts as long; tokens of a micro batch below which
it counts as short.
"""
TIME_RANGES = {
    "dense": (0.85, 1.2),
    "long": (0.95, 1.7),
    "LoRA": (0.85, 1.2),
    "QLoRA": (0.8, 1.25),
    "short": (0.8, 1.3),
}
"""Kind of a step -> measured over predicted seconds of the published steps that chose the numbers above, rounded
outwards; docs/planner.md has how many others it covers. A kind that is missing has too few to tell.
"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step: all its micro steps and the update."""

    compute_seconds: float
    """Products, attention and all other operators."""
    communication_seconds: float
    """As if it stood alone; what overlaps with computing is hidden in `step_seconds`."""
    offload_seconds: float
    """Transfers between device, host and NVMe."""
    optimizer_seconds: float
    host_seconds: float
    """What Python takes to launch all that on a GPU: a step takes at least as long."""
    step_seconds: float
    tokens_per_step: int
    """Over all ranks."""
    kind: str
    """Of TIME_RANGES, or what has no range: steps with experts, compiled or offloaded ones, and those of CPU ranks."""

    @property
    def range_seconds(self) -> tuple[float, float] | None:
        """From the fastest to the slowest that published steps of this kind were, where there are enough."""
        shares = TIME_RANGES.get(self.kind)
        return shares and (shares[0] * self.step_seconds, shares[1] * self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens_per_step / self.step_seconds


def attention_flops_per_token(size: "ModelSize", seq_len: int) -> float:
    """Floating-point operations of one forward's attention on one token of a causal sequence."""
    return 2 * seq_len * size.num_heads * size.head_dim * size.num_layers  # causal: half of 4 s h L


def flops_per_token(size: "ModelSize", seq_len: int, *, checkpointing: bool) -> float:
    """Floating-point operations of training on one token, as they are counted for a share of the data sheet's rate."""
    passes = 2 + size.trained_share + checkpointing
    return passes * (2 * size.active_params + attention_flops_per_token(size, seq_len))


def product_seconds(size: "ModelSize", speeds: Speeds, *, has_gpu: bool) -> float:
    """Seconds of one pass's matrix products over one token."""
    seconds = 2 * size.active_params / speeds.flops
    if has_gpu:  # on CPU ranks products are measured on a model as narrow, and none are grouped
        seconds += 2 * size.active_expert_params * (1 / EXPERT_SHARE - 1) / speeds.flops
        seconds *= 1 + NARROW / size.hidden_size
    return seconds


def launch_seconds(layout: "ZeroLayout") -> float:
    """Seconds that Python takes for one pass over the model on a GPU, without gathers."""
    size = layout.size
    method = "qlora" if layout.packed else "lora" if size.lora_r else "full"
    hooks = size.num_modules * HOOK_SECONDS if layout.stage == 3 else 0.0
    return size.num_layers * LAUNCH_SECONDS[method] + size.looped_experts * EXPERT_SECONDS + hooks


def step_time(
    layout: "ZeroLayout",
    speeds: Speeds,
    batch: Batch,
    *,
    seq_len: int,
    recomputed: float,
    traffic_bytes: float,
    offloaded_bytes: float = 0.0,
    compiled: bool = False,
) -> StepTime:
    """Predict one optimizer step.

    Args:
        recomputed: the share of the layers that activation checkpointing computes again.
        offloaded_bytes: that it saves in one micro step and sends to host memory and back, on the stream that computes.
        traffic_bytes: what operators other than products read and write in one micro step.
        compiled: by torch.compile, which is not modelled.
    """
    size, zero, machine, accumulation = layout.size, layout.zero, layout.machine, batch.accumulation
    sequence_parallel, tokens = batch.sequence_parallel, batch.micro * seq_len // batch.sequence_parallel
    # Products, attention (whose backward multiplies five times where its forward does twice) and all other operators.
    launched = 2 + recomputed  # passes, of which a backward multiplies twice where weights are trained
    multiplied = launched + size.trained_share
    per_token = product_seconds(size, speeds, has_gpu=machine.has_gpu)
    attention = attention_flops_per_token(size, seq_len) / speeds.attention_flops
    micro_step = tokens * (multiplied * per_token + (3.5 + recomputed) * attention)
    micro_step += tokens * 2 * size.tiled_params / speeds.flops
    micro_step += traffic_bytes / speeds.device_bytes
    if layout.packed:
        in_tiles = (MLP_TILES * (launched + 1) - launched) * size.tiled_params  # a tile unpacks its weights anew
        micro_step += UNPACKED_BYTES * (launched * layout.num_frozen + in_tiles) / speeds.device_bytes
    compute = accumulation * micro_step
    host = accumulation * launched * launch_seconds(layout) if machine.has_gpu else 0.0
    if size.tiled_params:
        host *= 1 - MLP_LAUNCHES + MLP_LAUNCHES * MLP_TILES * (launched + 1) / launched

    # Queries, keys, values and the result of attention pass between the ranks that share a sequence, layer by layer and
    # while all of them wait: each rank sends what the others' heads have of its tokens.
    exchange = 0.0
    if sequence_parallel > 1:
        width = 2 * sum(size.exchanged_widths(sequence_parallel))
        moved, calls = tokens * width * layout.weight_bytes * size.num_layers, 4 * size.num_layers
        within = min(sequence_parallel, machine.ranks_per_node)
        exchange = collective_seconds(moved, calls, machine, speeds, speeds.link_bytes, ranks=within)
        if sequence_parallel > within:
            nodes = math.ceil(sequence_parallel / within)
            exchange += within * moved * (nodes - 1) / nodes / speeds.network_bytes
        exchange *= accumulation * launched

    # Collectives.
    gradients = layout.sent_bytes * size.num_trainable
    trained, frozen = (layout.weight_bytes * count for count in (size.num_trainable, layout.num_frozen))
    buckets = size.num_trainable // zero["reduce_bucket_size"] + 1
    # Under 1 and 2 a bucket goes to each rank that keeps a part of it: one call more where the next rank's part begins.
    calls = buckets + (machine.world_size - 1 if layout.stage < 3 else 0)
    reduce = collective_seconds(gradients, calls, machine, speeds, speeds.reduce_bytes)
    to_one = zero["reduce_scatter"] and not zero["use_multi_rank_bucket_allreduce"]
    if layout.stage == 0 or (layout.stage < 3 and not to_one):
        # All ranks get all gradients, and throw away what is not theirs (stage_1_and_2.py, average_tensor).
        reduce = collective_seconds(2 * gradients, 2 * buckets, machine, speeds, speeds.all_reduce_bytes)
    if layout.stage == 0:
        communication = reduce
    elif layout.stage < 3:
        gather = collective_seconds(trained, buckets, machine, speeds, speeds.link_bytes)
        communication = (accumulation if layout.stage == 2 else 1) * reduce + gather
    else:
        # With hpZ what the forward gathers fills a second partition over fewer ranks, which the backward gathers from.
        # An update empties that of trained weights alone (partition_parameters.py, _partition_param_sec; stage3.py,
        # invalidate_secondary_tensor), so a frozen base never crosses nodes again.
        gather = partial(collective_seconds, machine=machine, speeds=speeds, link_bytes=speeds.link_bytes)
        over = layout.hpz_ranks or machine.world_size
        forward = gather(trained, size.num_modules) + gather(frozen, 0, ranks=over)
        backward = gather(trained + frozen, size.num_modules, ranks=over)
        communication = accumulation * (forward + backward + reduce)
        if machine.has_gpu and machine.world_size > 1:
            host += accumulation * 2 * size.num_modules * GATHER_SECONDS

    # The update: a rank has only its own shard; stage 0 updates everything on every rank.
    updated = size.num_trainable / (machine.world_size if layout.stage else 1)
    ratio = zero["offload_optimizer"]["ratio"] if layout.optimizer_device != "none" else 0.0
    optimizer = (1 - ratio) * updated * layout.optimizer.update_bytes / speeds.device_bytes
    saving = 2 * accumulation * offloaded_bytes / speeds.host_link_bytes if offloaded_bytes else 0.0
    offload = 0.0
    if ratio:
        on_host = ratio * updated
        if machine.has_gpu:  # gradients down each micro step (once where the device adds them up), weights up once
            down = (1 if layout.keeps_fp32_share else accumulation) * layout.sum_bytes
            offload += (down + layout.weight_bytes) * on_host / speeds.host_link_bytes
        optimizer = max(optimizer, on_host * machine.ranks_per_node / speeds.adam_params)
    if layout.optimizer_device == "nvme":  # master and moments, read and written
        moved = 2 * layout.optimizer.checkpoint_bytes * updated * machine.ranks_per_node
        offload += moved / speeds.nvme_bytes
    if layout.param_device != "none":  # this rank's shard, for forward and backward
        moved = 2 * accumulation * layout.weight_bytes * size.num_params / machine.world_size
        if machine.has_gpu:
            offload += moved / speeds.host_link_bytes
        if layout.param_device == "nvme":
            offload += moved * machine.ranks_per_node / speeds.nvme_bytes

    busy = compute + communication + offload
    if speeds.overlaps and zero["overlap_comm"]:  # parameter transfers of offload are prefetched like gathers
        moving = communication + offload
        busy = max(compute, moving) + OVERLAP_LOSS * min(compute, moving)
    if not machine.has_gpu or offload or saving or compiled or size.expert_params or exchange:
        kind = "no published steps"
    elif layout.packed:
        kind = "QLoRA"
    elif tokens < SHORT_TOKENS:
        kind = "short"
    elif 3.5 * attention > LONG_SHARE * (3.5 * attention + 3 * per_token):
        kind = "long"
    else:
        kind = "LoRA" if size.lora_r else "dense"
    return StepTime(
        compute_seconds=compute,
        communication_seconds=communication + exchange,
        offload_seconds=offload + saving,
        optimizer_seconds=optimizer,
        host_seconds=host,
        step_seconds=max(busy + exchange + saving, host) + optimizer,
        tokens_per_step=seq_len * batch.sequences,
        kind=kind,
    )


def collective_seconds(
    num_bytes: float,
    calls: float,
    machine: Machine,
    speeds: Speeds,
    link_bytes: float,
    *,
    ranks: int | None = None,
) -> float:
    """A collective over `num_bytes` in total: each rank gets all but its own share over its links, each node all but
    its own over its cards.

    Args:
        link_bytes: of `speeds`, the rate of this kind of collective within a node.
        ranks: neighbours that take part; by default all.
    """
    ranks = min(ranks or machine.world_size, machine.world_size)
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / machine.ranks_per_node)
    inside = num_bytes * (ranks - 1) / ranks / link_bytes if machine.ranks_per_node > 1 else 0.0
    across = num_bytes * (nodes - 1) / nodes / speeds.network_bytes
    return max(inside, across) + calls * speeds.collective_seconds
