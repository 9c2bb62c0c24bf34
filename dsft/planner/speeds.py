"""How fast the hardware of a plan is: from data sheets by the GPU's name and from `--interconnect`; what was measured
takes their place (measured_speeds.py).

Speeds are for ranking configurations; the memory predictions do not depend on them, but for `Speeds.outside`.
"""

import dataclasses
import re
from dataclasses import dataclass

from dsft.errors import UserError
from dsft.planner.gpus import GPUS, MATMUL_SHARE, OTHERS, Gpu, gpu_name, named_gpus
from dsft.planner.terms import ASSUMED, OutsideMemory
from dsft.runtime.hardware import Machine
from dsft.units import GB

MEMORY_SHARE = 0.6
"""Share of the data sheet's memory bandwidth that pointwise operators reach: by the published steps."""
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
    """Whether seconds may be told from these numbers, or only an order of configurations: rules of thumb for CPU ranks
    are off by a factor.
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
        return _of_cpu_ranks(machine)
    name = gpu_name(machine)
    gpu, is_known = GPUS[name], bool(named_gpus(machine.gpu_type)) or not machine.exists
    source = f"{name} by {'published products' if gpu.matmul_tflops else 'its data sheet'}, {_links(machine)}"
    if not is_known:
        if products:  # a card of this memory with other products
            tflops = products / 1e12
            gpu = dataclasses.replace(gpu, tflops=tflops / MATMUL_SHARE, matmul_tflops=tflops, training_share=OTHERS)
        source = (
            f"{machine.gpu_type or 'this GPU'} is in no table: a product timed here, memory as of {name}"
            if products
            else f"{machine.gpu_type or 'this GPU'} is in no table, so no time is estimated"
        )
        source += f", {_links(machine)}; dsft plan --calibrate measures this machine"
    link, network = parse_interconnect(machine.interconnect, gpu, assumed_gbps=_assumed_network(machine))
    reached = gpu.training_share * gpu.matmul_flops
    return Speeds(
        # fp32 without tensor cores is an eighth to a sixteenth of bf16 on these GPUs.
        flops=reached / (8 if dtype == "float32" else 1),
        attention_share=min(1.0, gpu.attention_flops / reached),
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


def _of_cpu_ranks(machine: Machine) -> Speeds:
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


def _assumed_network(machine: Machine) -> float:
    """Return the GB/s of a node's network where `machine.interconnect` names none."""
    return UNREAD_NETWORK_GBPS if machine.exists else ASSUMED_NETWORK_GBPS


def _links(machine: Machine) -> str:
    """Say what is known of the links, and between several nodes what is assumed."""
    links = machine.interconnect or "interconnect assumed"
    if machine.nodes == 1 or re.search(NETWORK, machine.interconnect.lower()):
        return links
    return f"{links}, {8 * _assumed_network(machine):g} Gbit/s between nodes assumed (--interconnect says otherwise)"


def parse_interconnect(text: str, gpu: Gpu, *, assumed_gbps: float = ASSUMED_NETWORK_GBPS) -> tuple[float, float]:
    """(bytes/s of a rank within the node, bytes/s of a node's network) for "nvlink+ib400", "pcie", "pcie4+eth25",
    "nvlink+8xib400" ...

    The number after ib, roce or eth is Gbit/s of one card; one card per node unless "8x" stands before it. Without a
    part for the node, NVLink where the GPU has it, else PCIe; without a network, `assumed_gbps` GB/s.

    Raises:
        UserError: for a part that is not one of these.
    """
    link = network = None
    for part in filter(None, text.lower().split("+")):
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
    default_link = 0.8 * gpu.nvlink_gbps if gpu.nvlink_gbps else PCIE_EFFICIENCY * PCIE_GBPS[gpu.pcie_gen]
    return link or default_link * GB, network or NETWORK_EFFICIENCY * assumed_gbps * GB
