"""What the nodes answer to the doctor, as typed values. They travel as JSON: `dataclasses.asdict` there, `from_json`
here.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi tells it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int
    """Uncorrectable memory errors since the driver was loaded."""
    celsius: int


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of a node and their driver."""

    driver: str = ""
    error: str = ""
    """What nvidia-smi complains about; empty where it works, or where there is no GPU."""
    cards: list[Gpu] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with an IPv4 address."""

    addresses: list[str]
    mtu: int
    mbit: int
    """Negotiated speed in Mbit/s; 0 where the card does not say."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a node is connected."""

    addresses: list[str]
    """As `hostname -I` orders them: DeepSpeed takes the first host's first as master address."""
    interfaces: dict[str, Interface]
    own_name: list[str]
    """Addresses that the host's own name resolves to there."""
    infiniband: list[str]
    """Cards with an active port."""
    variables: dict[str, str]
    """NCCL_SOCKET_IFNAME and the like, where they are set."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Everything about one node that a launch depends on."""

    host: str
    python_path: str
    code_folder: str
    slots: int
    """Ranks there: as the host file says, else one per GPU, else up to 2 CPU processes."""
    ranks: list[int] = field(default_factory=list)
    """Numbers of the ranks that a launcher has started there; empty: the doctor starts its own."""
    versions: dict[str, str]
    """Of Python, packages ("missing" where not installed), dsft's own code, GPU driver and type ("none")."""
    gpus: Gpus
    torch_cuda: str
    """CUDA that the installed torch is built for; empty for a CPU build or without torch."""
    cpu_only: bool
    """DS_ACCELERATOR=cpu."""
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES."""
    cores: int
    host_bytes: int
    available_bytes: int
    shm_bytes: int | None
    """Free in /dev/shm."""
    open_files: int | None
    """Soft limit of a process; None without one."""
    locked_bytes: int | None
    """How much memory a process may lock; None without a limit."""
    tools: dict[str, str]
    """What DeepSpeed compiles its operators with, by name: where it is, or empty."""
    compile_error: str = ""
    """Why a program of one line does not compile; empty where it does, or was not tried."""
    disks: dict[str, int | None]
    """Free bytes by folder; None where they cannot be asked."""
    caches: dict[str, str]
    """Folders of the hub's models, data sets, and compiled operators."""
    hub_offline: bool
    clock_synchronized: bool
    """A time service keeps the clock, as the kernel says."""
    network: Network
    open_port: int = 0
    """A freely chosen port that the node listens on during the examination."""
    master_port_taken: str = ""
    """Who has the master's port there; empty where it is free or was not asked for."""
    output_error: str = ""
    """Why no file can be written to the run's output folder."""
    probe: str = ""
    """A file made there, for the other nodes to look for; gone at the end of the examination."""

    @property
    def usable_gpus(self) -> list[Gpu]:
        """The GPUs that ranks would use: none with DS_ACCELERATOR=cpu or a torch without CUDA, those of
        CUDA_VISIBLE_DEVICES where that is set.
        """
        if self.cpu_only or not self.torch_cuda:
            return []
        if self.visible_gpus is None:
            return self.gpus.cards
        words = [word for word in self.visible_gpus.split(",") if word.strip()]
        if all(word.isdigit() for word in words):
            return [gpu for gpu in self.gpus.cards if str(gpu.index) in words]
        return self.gpus.cards[: len(words)]

    def interface_of(self, address: str) -> str:
        """The interface that has `address`; empty where none has."""
        cards = self.network.interfaces.items()
        return next((name for name, card in cards if address in card.addresses), "")

    @property
    def address(self) -> str:
        """The first address; empty without one."""
        return next(iter(self.network.addresses), "")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "NodeFacts":
        """Raises: KeyError, TypeError: of another version of dsft."""
        gpus, network = values["gpus"], values["network"]
        interfaces = {name: Interface(**card) for name, card in network["interfaces"].items()}
        typed = {
            "gpus": Gpus(**gpus | {"cards": [Gpu(**card) for card in gpus["cards"]]}),
            "network": Network(**network | {"interfaces": interfaces}),
        }
        return cls(**values | typed)


SLOWEST_LINK = 0.5e6
"""Bytes per second (4 Mbit/s) below which a link is broken for any training."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An address that a node is to connect to."""

    kind: str
    """"master": rank 0's port; "open": another node's open port, by its address; "name": the same by its name."""
    name: str
    """Of the node that should answer."""
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Connection(Target):
    """What came of it."""

    host: str = ""
    """The host name that answered there; empty where none did."""
    error: str = ""
    """Why none did: timeout, refused, unresolved, closed, or the system's words."""
    seconds: float = 0.0
    """Of a small message one way."""
    clock_ahead: float = 0.0
    """Seconds by which the other node's clock is ahead."""
    bytes_per_second: float = 0.0
    """Of a block from there, of kind "open"; 0 where none was sent."""


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """A file, folder or glob as one node sees it."""

    files: int
    bytes: int
    hash: str
    """Over names, sizes and the ends of each file."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What one node reaches: other nodes, and the files of the run."""

    connections: list[Connection]
    names: dict[str, list[str]]
    """Addresses of the other nodes' names as this node resolves them; none where it does not."""
    outgoing: str
    """This node's address on the way to the master; empty without a way."""
    contents: dict[str, FileContent | None]
    """The run's data and models; None where nothing is there."""
    cached: dict[str, bool]
    """Whether each name on the hub is in this node's cache."""
    config: dict[str, str] | None
    """The keys of the run's configuration file with their values; None where there is no such file, or none was asked
    for."""
    sees_probe: bool | None
    """Whether the file that the first node has made shows here; None where it was not asked."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Reached":
        """Raises: KeyError, TypeError: of another version of dsft."""
        contents = values["contents"].items()
        typed = {
            "connections": [Connection(**connection) for connection in values["connections"]],
            "contents": {source: content and FileContent(**content) for source, content in contents},
        }
        return cls(**values | typed)
