"""Findings about nodes, each by itself and as compared to the others (drivers, memory, limits, tools; versions, clocks,
names, addresses, ports, interfaces), and about the files of a run, which have to have the same content on each. Pure:
facts in, findings out. What the smoke test measured is checked in links.py.
"""

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from dsft.config.reader import read_file_and_flags, read_flags, sent_files
from dsft.data.sources import is_path
from dsft.doctor.facts import NodeFacts
from dsft.doctor.findings import Finding, finding, join
from dsft.doctor.phases import SLOWEST_LINK, FileContent, Reached
from dsft.runtime.patches import Patch
from dsft.runtime.versions import PACKAGES
from dsft.units import GiB, MiB, plural

SHARED_BYTES_PER_RANK = 256 * MiB
"""DeepSpeed's collectives on CPU take 66 MiB per rank, NCCL some 10 MiB per pair of GPUs, data loaders what a batch
takes; Docker's default is 64 MiB in all.
"""
FEWEST_FILES = 4096
FREE_CACHE_BYTES = 5 * GiB
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""NVIDIA's lowest driver for each CUDA (CUDA compatibility guide, minor version compatibility)."""
CLOCK_SECONDS = 2.0
CODE_ROWS = ("dsft commit", "dsft code")
DRIVER_ROWS = ("GPU driver", "GPU type")
FEWEST_FREE_BYTES = GiB  # for the output folder, where the run's needs are not known


def check_node(node: str, facts: NodeFacts, *, quick: bool, nvme: bool = False) -> Iterator[Finding]:
    """Everything that one node's facts show: of its GPUs and slots, memory and limits, packages, tools and caches.

    Args:
        quick: leave out what only compiling operators needs, and the space for caches.
        nvme: whether the run offloads to NVMe.
    """
    usable, cards, driver = facts.usable_gpus, facts.gpus.cards, facts.gpus.driver
    if facts.gpus.error:
        fix = "load the driver's module or reboot after an update: sudo modprobe nvidia; nvidia-smi"
        yield finding("gpu-driver", node, facts.gpus.error, fix)
    if cards and not facts.cpu_only and not facts.torch_cuda:
        torch = facts.versions["torch"]
        yield finding(
            "torch-without-cuda",
            node,
            f"{len(cards)} x {cards[0].name}, but torch {torch} is built without CUDA",
            f"{facts.python_path} -m pip install torch --index-url https://download.pytorch.org/whl/cu128; or ask for"
            " CPU ranks: export DS_ACCELERATOR=cpu",
        )
    heads = (version.partition(".")[0] for version in (facts.torch_cuda, driver))
    cuda_major, driver_major = (int(head) if head.isdigit() else 0 for head in heads)
    oldest = OLDEST_DRIVER.get(cuda_major, 0)
    if cards and not facts.cpu_only and 0 < driver_major < oldest:
        message = f"driver {driver}, and torch's CUDA {facts.torch_cuda} needs {oldest} or newer"
        fix = f"install driver {oldest} or newer, or a torch for an older CUDA"
        yield finding("driver-too-old", node, message, fix)
    for gpu in usable:
        if gpu.used_bytes > 0.05 * gpu.memory_bytes:
            used, memory = gpu.used_bytes / GiB, gpu.memory_bytes / GiB
            message = f"GPU {gpu.index} holds {used:.1f} of {memory:.0f} GiB of other programs"
            yield finding("gpu-busy", node, message, f"ssh {node} nvidia-smi, and end what should not run")
        if gpu.ecc_errors:
            yield finding(
                "gpu-errors",
                node,
                f"GPU {gpu.index}: {gpu.ecc_errors} uncorrectable memory errors since the driver was loaded",
                f"ssh {node} nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace it, or leave it out: --exclude"
                f" {node}:{gpu.index}",
            )
    slots, gpus, cores = facts.slots, len(usable), facts.cores
    fix = f"write `{node} slots={gpus or cores}` into the host file"
    if gpus and slots > gpus:
        yield finding("slots", node, f"slots={slots}, but there are {gpus} GPUs", fix)
    elif gpus > slots:
        yield finding("idle-gpus", node, f"slots={slots} of {gpus} GPUs", f"{fix} to use them")
    elif not gpus and slots > cores:
        message = f"slots={slots}, but there is no GPU and {plural(cores, 'CPU core')}"
        yield finding("slots", node, message, fix.replace(" into", " or fewer into"))

    if facts.available_bytes < 0.25 * facts.host_bytes:
        free, total = facts.available_bytes / GiB, facts.host_bytes / GiB
        message = f"{free:.1f} of {total:.0f} GiB of host memory are free"
        yield finding("memory-low", node, message, f"ssh {node} ps aux --sort=-rss | head")
    shared, needed = facts.shm_bytes, facts.slots * SHARED_BYTES_PER_RANK
    if shared is not None and shared < needed:
        message = f"/dev/shm has {shared / MiB:.0f} MiB free; {facts.slots} ranks may take {needed / MiB:.0f}"
        fix = "mount -o remount,size=50% /dev/shm; in a container: docker run --shm-size=16g (or --ipc=host)"
        yield finding("shared-memory", node, message, fix)
    if facts.open_files is not None and facts.open_files < FEWEST_FILES:
        message = f"ulimit -n is {facts.open_files}, less than {FEWEST_FILES}"
        fix = "echo '* soft nofile 65536' >> /etc/security/limits.conf, and log in again"
        yield finding("open-files", node, message, fix)
    if facts.locked_bytes is not None and facts.network.infiniband:
        cards = ", ".join(facts.network.infiniband)
        message = f"ulimit -l is {facts.locked_bytes // 1024} KiB, with InfiniBand ({cards})"
        fix = (
            "echo '* - memlock unlimited' >> /etc/security/limits.conf, and log in again (sshd and slurmd have limits"
            " of their own)"
        )
        yield finding("locked-memory", node, message, fix)
    missing = [name for name in PACKAGES if facts.versions.get(name) == "missing"]
    if missing:
        fix = f"on {node}: {facts.python_path} -m pip install -c constraints.txt -e ."
        yield finding("package-missing", node, f"not installed: {', '.join(missing)}", fix)
    if quick:
        return

    tools = facts.tools
    packages = {"c++": "g++", "ninja": "ninja-build", "Python.h": "python3-dev"}
    missing = [name for name in packages if not tools[name]]
    # Without GPUs DeepSpeed compiles its collectives for the first launch on one node; with GPUs only offload needs
    # compiling.
    severity = "warning" if facts.usable_gpus else "error"
    if missing:
        fix = f"apt-get install {' '.join(packages[name] for name in missing)}"
        yield finding("compiler", node, f"missing: {', '.join(missing)}", fix, severity=severity)
    elif facts.compile_error:
        message = f"a program of one line does not compile: {facts.compile_error}"
        yield finding("compiler", node, message, "apt-get install g++ python3-dev", severity=severity)
    if nvme and not (tools["libaio"] and tools["libaio.h"]):
        message = "libaio and its header are missing, and the run offloads to NVMe"
        yield finding("libaio", node, message, "apt-get install libaio-dev", severity="error")
    if facts.usable_gpus and not tools["nvcc"]:
        fix = f"install the toolkit of CUDA {facts.torch_cuda} and export CUDA_HOME, where an operator needs it"
        yield finding("nvcc", node, "no CUDA toolkit (nvcc)", fix)
    variables = {"hub": "HF_HUB_CACHE", "data sets": "HF_DATASETS_CACHE", "operators": "TORCH_EXTENSIONS_DIR"}
    for name, folder in facts.caches.items():
        free = facts.disks.get(folder)
        if free is not None and free < FREE_CACHE_BYTES:
            message = f"{free / GiB:.1f} GiB free for {folder} ({name})"
            fix = f"export {variables[name]}=/a/larger/disk, in .deepspeed_env for all nodes"
            yield finding("cache-disk", node, message, fix)


def check_patches(node: str, patches: Collection[Patch]) -> Iterator[Finding]:
    """dsft's patches of libraries whose code is another than the patch was written for."""
    for patch in patches:
        if patch.change:
            code = "patch-refused" if patch.if_changed == "refuse" else "patch-changed"
            yield finding(code, node, patch.change.removesuffix(f": {patch.fix}"), patch.fix)


def differences(facts: dict[str, NodeFacts]) -> dict[str, dict[str, str]]:
    """Versions that are not the same on all nodes: row -> node -> version."""
    rows = next(iter(facts.values())).versions if facts else {}
    table = {row: {name: node.versions.get(row, "none") for name, node in facts.items()} for row in rows}
    return {row: versions for row, versions in table.items() if len(set(versions.values())) > 1}


def spread(rows: dict[str, dict[str, Any]]) -> tuple[list[str], str]:
    """(nodes with another value than most, "torch: 2.13.0 on node-0, node-1, 2.12.0 on node-2; numpy: ..."), for row ->
    node -> value. Of equally many, the first node's value is the usual one.
    """
    odd, texts = [], []
    for row, values in rows.items():
        usual = Counter(values.values()).most_common(1)[0][0]
        odd += [node for node, value in values.items() if value != usual]
        nodes = {value: [node for node in values if values[node] == value] for value in values.values()}
        texts.append(f"{row}: " + ", ".join(f"{value} on {join(named)}" for value, named in nodes.items()))
    return list(dict.fromkeys(odd)), "; ".join(texts)


def check_versions(facts: dict[str, NodeFacts]) -> Iterator[Finding]:
    """One finding for packages, one for dsft's own code, one for drivers and GPU types."""
    rows, first = differences(facts), next(iter(facts.values()), None)
    code, drivers = ({row: rows[row] for row in names if row in rows} for names in (CODE_ROWS, DRIVER_ROWS))
    if packages := {row: versions for row, versions in rows.items() if row not in CODE_ROWS + DRIVER_ROWS}:
        odd, text = spread(packages)
        fix = "install every node from the same Python and constraints.txt, or mount one environment on all"
        if "python" not in packages:  # not by the versions' names: no index has torch 2.13.0+cpu
            folder = shlex.quote(first.code_folder)
            fix = f"on {join(odd)}, in {folder}: {first.python_path} -m pip install -c constraints.txt -e ."
        yield finding("versions", join(odd), text, fix)
    if "dsft code" in code:  # the same files are the same code, whatever git says
        odd, text = spread(code)
        copied = shlex.quote(f"{first.code_folder}/")
        fix = f"rsync -a --delete {copied} {odd[0]}:{copied}, or git pull on every node"
        yield finding("code", join(odd), text, fix)
    if drivers:
        odd, text = spread(drivers)
        fix = "the same driver on every node; leave nodes with other GPUs out (--exclude)"
        yield finding("driver-versions", join(odd), text, fix)


def check_clocks(offsets: dict[str, float], *, not_synchronized: Collection[str] = ()) -> Iterator[Finding]:
    """Clocks that are wrong, or differ without telling which is.

    Args:
        offsets: seconds by which each node's clock is ahead of one of them.
        not_synchronized: nodes whose kernel says that no time service keeps its clock.
    """
    if len(offsets) < 2:
        return
    near = {
        node: [other for other in offsets if abs(offsets[other] - offsets[node]) <= CLOCK_SECONDS] for node in offsets
    }
    agreeing = max(near.values(), key=len)
    odd = [node for node in offsets if node not in agreeing]
    if len(agreeing) > len(offsets) / 2:
        for node in odd:
            seconds = offsets[node] - offsets[agreeing[0]]
            message = f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the others'"
            yield finding("clocks", node, message, f"on {node}: timedatectl set-ntp true (or chronyc makestep)")
    elif odd:  # as many say one thing as another
        suspects = [node for node in offsets if node in not_synchronized]
        seconds = max(offsets.values()) - min(offsets.values())
        said = f"; no time service keeps that of {join(suspects)}" if 0 < len(suspects) < len(offsets) else ""
        message = f"their clocks differ by {seconds:.0f} s, and which is right cannot be told from here{said}"
        fix = f"on {join(suspects or list(offsets))}: timedatectl (is it synchronized?), then timedatectl set-ntp true"
        yield finding("clocks", join(list(offsets)), message, fix)


def check_names(facts: dict[str, NodeFacts], reached: dict[str, Reached]) -> Iterator[Finding]:
    """Own names on loopback, and names of other nodes that do not resolve."""
    if len(facts) < 2:
        return
    for name, node in facts.items():
        addresses = node.network.own_name
        is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
        if "GLOO_SOCKET_IFNAME" not in node.network.variables and is_loopback:
            address = node.address or "ADDRESS"
            says = f"resolves to {', '.join(addresses)} there" if addresses else "does not resolve there"
            yield finding(
                "own-name",
                name,
                f"its own name {node.host} {says}",
                f"on {name}, in /etc/hosts: `{address} {node.host}` instead of 127.0.1.1; or"
                f" `GLOO_SOCKET_IFNAME={node.interface_of(address) or 'eth0'}` in .deepspeed_env",
            )
    for name, answer in reached.items():
        unknown = [other for other, addresses in answer.names.items() if not addresses and other != name]
        if unknown:
            fix = f"the same lines in /etc/hosts on every node, or DNS; then on {name}: getent hosts {unknown[0]}"
            yield finding("name-unresolved", name, f"{join(unknown)} does not resolve there", fix)


def check_master(
    master_node: str, address: str, port: int, taken: str, reached: dict[str, Reached], *, port_asked: bool
) -> Iterator[Finding]:
    """Whether rank 0's port is free, and every node gets there.

    Args:
        taken: who has the port on rank 0's node; empty where it is free.
        port_asked: whether the user named the port; else it is DeepSpeed's default, which dsft train does not take.
    """
    if taken:
        fix = f"--master_port with a free one, or end what listens: ssh {master_node} ss -ltnp sport = :{port}"
        code = "master-port-busy" if port_asked else "default-port-busy"
        yield finding(code, master_node, f"port {port} is {taken}", fix)
        return
    for node, answer in reached.items():
        errors = {target.kind: target.error for target in answer.connections if target.name == master_node}
        if not errors.get("master"):
            continue
        if not errors["open"]:
            yield finding(
                "port-blocked",
                f"{node} -> {master_node}",
                f"port {port} of {address} {_why(errors['master'])}, other ports answer: a firewall blocks it",
                f"--master_port with another one, or on {master_node}: iptables -I INPUT -p tcp --dport {port} -j"
                " ACCEPT",
            )
        elif not errors["name"]:  # else check_network says that nothing gets through
            yield finding(
                "master-address",
                f"{node} -> {master_node}",
                f"{address}, the first that `hostname -I` prints on {master_node}, {_why(errors['master'])} from"
                f" {node}, but its name leads to {master_node}",
                f"--master_addr {master_node}",
            )


def _why(error: str) -> str:
    words = {"timeout": "does not answer", "refused": "refuses connections", "unresolved": "does not resolve"}
    return words.get(error, f"cannot be reached ({error})")


def check_network(facts: dict[str, NodeFacts], reached: dict[str, Reached]) -> Iterator[Finding]:
    """Whether every node reaches every other, and the right one, on a port of its choice."""
    targets = [(node, target) for node, answer in reached.items() for target in answer.connections]
    for node, target in targets:
        expected = facts[target.name].host
        if target.kind != "master" and target.host not in ("", expected):
            message = f"{target.address} ({target.name}) is {target.host} from there, not {expected}"
            fix = f"on {node}: getent hosts {target.name}; correct /etc/hosts or DNS, or the doubled address"
            yield finding("wrong-machine", node, message, fix)
    for node, target in targets:
        if 0 < target.bytes_per_second < SLOWEST_LINK:
            message = f"{8e-6 * target.bytes_per_second:.2g} Mbit/s from there: collectives would time out"
            fix = (
                f"ssh {target.name} 'ethtool IFACE; ip -s link; tc qdisc show': a lower speed, errors, a limit;"
                f" or leave it out: --exclude {target.name}"
            )
            yield finding("slow-link", f"{target.name} -> {node}", message, fix, severity="error")
    blocked = [(node, target) for node, target in targets if target.kind == "open" and target.error]
    for towards in dict.fromkeys(target.name for _, target in blocked):
        froms = [node for node, target in blocked if target.name == towards]
        target = next(target for _, target in blocked if target.name == towards)
        yield finding(
            "network-blocked",
            f"{join(froms)} -> {towards}",
            f"port {target.port} of {target.address}, opened for this test, {_why(target.error)}",
            f"on {towards}: iptables -I INPUT -s ADDRESSES_OF_THE_NODES -j ACCEPT (or ufw allow from ...); without a"
            f" firewall: ip route get {target.address}",
        )


def check_interfaces(facts: dict[str, NodeFacts], used: dict[str, str]) -> Iterator[Finding]:
    """Interfaces that variables name, MTU and speed of those between the nodes (`used`: node -> its name), and
    InfiniBand.
    """
    for name, node in facts.items():
        for variable, value in node.network.variables.items():
            prefixes = [word.strip("=") for word in value.split(",") if not word.startswith("^")]
            names = list(node.network.interfaces)
            is_there = any(interface.startswith(prefix) for prefix in prefixes for interface in names)
            if variable.endswith("_IFNAME") and prefixes and not value.startswith("^") and not is_there:
                message = f"{variable}={value}, but there are {', '.join(names)}"
                fix = f"{variable}={used.get(name) or 'eth0'} in .deepspeed_env, or in the shell of {name}"
                yield finding("interface", name, message, fix)
    if len(facts) < 2:
        return
    known = {node: name for node, name in used.items() if name in facts[node].network.interfaces}
    cards = {node: facts[node].network.interfaces[name] for node, name in known.items()}
    mtus = {node: card.mtu for node, card in cards.items()}
    odd, _ = spread({"MTU": mtus}) if mtus else ([], "")
    if odd:
        _, message = spread({"MTU": {node: f"{mtu} ({used[node]})" for node, mtu in mtus.items()}})
        usual = next(mtu for node, mtu in mtus.items() if node not in odd)
        yield finding("mtu", join(odd), message, f"on {odd[0]}: ip link set {used[odd[0]]} mtu {usual}")
    speeds = {node: card.mbit for node, card in cards.items() if card.mbit > 0}
    slow = [node for node, speed in speeds.items() if speed < max(speeds.values())]
    if slow:
        _, message = spread({"speed in Mbit/s": speeds})
        fix = f"ssh {slow[0]} ethtool {used[slow[0]]}: another cable or port, or another interface (NCCL_SOCKET_IFNAME)"
        yield finding("interface-speed", join(slow), message, fix)
    with_ib = [name for name, node in facts.items() if node.network.infiniband]
    without = [name for name in facts if name not in with_ib]
    if with_ib and without:
        fix = (
            f"ssh {without[0]} ibstat; load its driver or check the cable, or NCCL_IB_DISABLE=1 for all in"
            " .deepspeed_env"
        )
        yield finding("infiniband", join(without), f"no active InfiniBand port, unlike {join(with_ib)}", fix)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run reads and writes, as its options name it."""

    data: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # model, tokenizer and adapter
    output_dir: str = ""
    saves: bool = True  # whether checkpoints are written while training
    nvme: bool = False
    config: str = ""  # path of its YAML file
    config_is_sent: bool = False  # `dsft launch` sends that of the first node to all

    @property
    def hub_names(self) -> list[str]:
        """Of NAME:CONFIG:SPLIT the name, of every source that may lie on the hub."""
        return [source.partition(":")[0] for source in (*self.data, *self.models) if not is_path(source)]


def read_run_files(argv: list[str]) -> RunFiles:
    """The files that `dsft train` or `dsft eval` with these options would use; none without options."""
    problems: list[str] = []  # reported by the plan, or by training itself
    values = read_file_and_flags(argv, problems) or {}
    config = "".join(_listed(read_flags(argv, []).get("config"))[:1])
    keys = ("data", "eval_data", "model", "tokenizer", "adapter", "output_dir", "zero")
    words = {key: _listed(values.get(key)) for key in keys}
    return RunFiles(
        data=words["data"] + words["eval_data"],
        models=[*dict.fromkeys(words["model"] + words["tokenizer"] + words["adapter"])],
        output_dir="".join(words["output_dir"][:1]),
        saves=str(values.get("save_strategy", "steps")) != "no",
        nvme="nvme" in "".join(words["zero"]),
        config=config,
        config_is_sent=config in sent_files(),
    )


def _listed(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = [*value.values()]
    return list(map(str, value)) if isinstance(value, list) else [] if value in (None, True) else [str(value)]


def check_files(
    files: RunFiles, first: str, facts: dict[str, NodeFacts], reached: dict[str, Reached]
) -> Iterator[Finding]:
    """Data and model the same everywhere, or on the hub; the output folder writable everywhere and shared."""
    if files.config:
        yield from check_config(files, {node: answer.config for node, answer in reached.items()})
    named_on_hub: set[str] = set()
    for source in (*files.data, *files.models):
        seen, is_data = {node: answer.contents[source] for node, answer in reached.items()}, source in files.data
        yield from check_content(source, seen, "data" if is_data else "model")
        name = source.partition(":")[0]
        if any(seen.values()) or is_path(source) or name in named_on_hub:  # two splits of one data set are one name
            continue
        named_on_hub.add(name)
        lacking = [node for node, answer in reached.items() if not answer.cached[name]]
        barred = [node for node in lacking if facts[node].hub_offline]
        download = f"hf download {name}{' --repo-type dataset' if is_data else ''}"
        if barred:
            message = (
                f"{name} is neither a file nor in the hub's cache, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
            )
            fix = f"on {barred[0]}: HF_HUB_OFFLINE=0 {download}; or name an existing folder"
            yield finding("hub-offline", join(barred), message, fix)
        elif lacking:
            fix = f"on each: {download}; or one HF_HOME that all nodes share"
            yield finding("hub-download", join(lacking), f"{name} is not in the hub's cache yet", fix)
    if files.output_dir:
        errors = {node: answer.output_error for node, answer in facts.items()}
        shows = {node: answer.sees_probe for node, answer in reached.items() if answer.sees_probe is not None}
        yield from check_output(files, first, errors, shows)


def check_config(files: RunFiles, seen: dict[str, dict[str, str] | None]) -> Iterator[Finding]:
    """`seen`: the configuration file on each node. Where `dsft launch` sends one, a difference is a note."""
    lacking = [node for node, values in seen.items() if values is None]
    if len(lacking) == len(seen):
        return  # reported by the reader of options
    read = {node: values for node, values in seen.items() if values is not None}
    first = next(iter(read))
    odd, texts = lacking[:], [f"it is not on {join(lacking)}"] if lacking else []
    for key in dict.fromkeys(key for values in read.values() for key in values):
        nodes: dict[str, list[str]] = {}
        for node, values in read.items():
            nodes.setdefault(values.get(key, "not set"), []).append(node)
        if len(nodes) > 1:
            texts.append(f"{key} is " + ", ".join(f"{value[:80]} on {join(on)}" for value, on in nodes.items()))
            odd += [node for node in read if read[node].get(key) != read[first].get(key)]
    if odd:
        copy = f"rsync -a {os.path.abspath(files.config)} {{}}:{os.path.abspath(files.config)}"
        fix = f"on {first}: {copy.format(odd[0])}; `dsft launch --hostfile` sends the one from where it is started"
        severity = "note" if files.config_is_sent else None
        message = f"{files.config}: {'; '.join(texts)}"
        yield finding("config-differs", join([*dict.fromkeys(odd)]), message, fix, severity=severity)


def check_content(source: str, seen: dict[str, FileContent | None], kind: str) -> Iterator[Finding]:
    """`seen`: one file, folder or glob on each node; `kind`: "data" or "model"."""
    there, missing = [node for node in seen if seen[node]], [node for node in seen if not seen[node]]
    copy = f"rsync -aR {source} {{}}:/" if os.path.isabs(source) else f"rsync -a {source} {{}}:{os.getcwd()}/{source}"
    if not there:
        if missing and is_path(source):
            message = f"{source} does not exist (seen from {os.getcwd()})"
            yield finding(f"{kind}-missing", join(missing), message, f"correct {kind}, or copy it there")
        return
    if missing:
        fix = f"on {there[0]}: {copy.format(missing[0])}; or mount the same folder on every node"
        yield finding(f"{kind}-missing", join(missing), f"{source} is on {join(there)} but not there", fix)
        return
    odd, _ = spread({source: seen})
    if odd:
        texts = [
            f"{join([node for node in seen if seen[node] == content])}: {plural(content.files, 'file')},"
            f" {content.bytes:,} bytes, hash {content.hash}"
            for content in dict.fromkeys(seen.values())
        ]
        good = next(node for node in seen if node not in odd)
        fix = f"on {good}: {copy.format(odd[0])}; or mount the same folder on every node"
        yield finding(f"{kind}-differs", join(odd), f"{source} differs ({'; '.join(texts)})", fix)


def check_output(files: RunFiles, first: str, errors: dict[str, str], seen: dict[str, bool]) -> Iterator[Finding]:
    """`errors`: why each node cannot write to the folder (empty: it can); `seen`: whether the others see what `first`
    wrote.
    """
    folder = files.output_dir
    for node, problem in errors.items():
        message = f"output_dir={folder}: {problem}"
        if "No space" in problem or "quota" in problem.lower():
            yield finding("disk", node, message, f"ssh {node} df -h {folder}; another output_dir, or make room")
        elif problem:
            fix = f"on {node}: mkdir -p {folder} && ls -ld {folder}; chown, remount, or another output_dir"
            yield finding("output-not-writable", node, message, fix)
    apart = [node for node, sees in seen.items() if not sees]
    if apart:
        # The last model is gathered on rank 0, so that without checkpoints nothing is lost.
        yield finding(
            "output-not-shared",
            join(apart),
            f"output_dir={folder}: a file made on {first} does not show there",
            "mount one network folder (NFS, Lustre ...) there on every node and set output_dir to it; without"
            " checkpoints (--save_strategy no) local disks do",
            severity="error" if files.saves else "note",
        )


def check_disk(files: RunFiles, facts: dict[str, NodeFacts], needed_bytes: int | None) -> Iterator[Finding]:
    """Free space for what the run writes (`needed_bytes`, None where it is not known)."""
    for name, node in facts.items():
        free = node.disks.get(files.output_dir)
        if free is None:
            continue
        if needed_bytes and free < needed_bytes:
            yield finding(
                "disk",
                name,
                f"output_dir={files.output_dir}: {free / GiB:.1f} GiB free, the run writes about"
                f" {needed_bytes / GiB:.1f} (weights and checkpoints)",
                "another output_dir, a smaller save_total_limit, or save_only_model: true",
            )
        elif not needed_bytes and free < FEWEST_FREE_BYTES:
            message = f"output_dir={files.output_dir}: {free / GiB:.2f} GiB free"
            fix = f"ssh {name} df -h {files.output_dir}; another output_dir, or make room"
            yield finding("disk", name, message, fix, severity="warning")
