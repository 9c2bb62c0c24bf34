"""What the doctor reports: the kinds of findings, and the checks that report them: of each node by itself (drivers,
memory, limits, tools), of nodes among each other (versions, clocks, names, addresses, ports, interfaces), of a run's
files, which have to have the same content on each node. Pure: facts in, findings out. Those about rates: links.py.
"""

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dsft.config.deepspeed import offloads, read_zero_file
from dsft.config.reader import read_file_and_flags, read_flags, sent_files
from dsft.data.sources import is_path
from dsft.doctor.phases import SLOWEST_LINK, NodeFacts, Reached
from dsft.runtime.patches import Patch
from dsft.runtime.software import PACKAGES
from dsft.units import GiB, MiB, plural

Severity = Literal["error", "warning", "note"]
KINDS: dict[str, dict[str, str]] = {
    "error": {
        "unknown-host": "no rank can be started on a host whose name does not resolve",
        "mtu-path": "ssh, NCCL and gloo stop at the first large packet, without an error",
        "host-unreachable": "no rank can be started on a host that does not answer",
        "ssh-refused": "DeepSpeed starts the ranks of every node through ssh",
        "ssh-password": "DeepSpeed's launcher cannot type a password; it would fail or wait for ever",
        "ssh-host-key": "ssh would ask whether to trust the host, and the launcher cannot answer",
        "ssh-failed": "DeepSpeed starts the ranks of every node through ssh",
        "no-folder": "ranks start in the same folder as the launcher, on every node",
        "no-python": "ranks start with the same path of Python as the launcher, on every node",
        "no-dsft": "every rank runs the same dsft; here it cannot be imported, or is an older one",
        "node-silent": "a node that does not answer now will hold up every collective",
        "node-failed": "what cannot be examined may not work either",
        "missing-ranks": "all ranks wait for the missing ones",
        "gpu-driver": "without its driver no GPU can be used",
        "torch-without-cuda": "this torch cannot see the GPUs: ranks would run on the CPU",
        "driver-too-old": "torch's CUDA cannot start on an older driver",
        "package-missing": "every rank imports it",
        "slots": "ranks without a GPU or core of their own fail or slow each other down",
        "libaio": "offload to NVMe needs it; nothing else does",
        "hub-offline": "nothing is downloaded then, and the ranks of this node need the files",
        "patch-refused": "dsft mends a fault of that library there, and a training without it would be wrong",
        "versions": "ranks of different code compute differently, or wait for collectives that the others do not call",
        "code": "ranks of different code compute differently, or wait for collectives that the others do not call",
        "master-port-busy": "rank 0 listens there for all others; the launch fails at once",
        "port-blocked": "ranks connect to that port; where a firewall drops them they wait until they time out",
        "network-blocked": "NCCL and gloo connect every node with every other on ports of their choice",
        "master-address": "all ranks connect to that address first",
        "wrong-machine": "two machines share an address or name: ranks would talk to the wrong one",
        "interface": "NCCL or gloo cannot start on an interface that is not there",
        "config-differs": "a rank with other options computes something else; training compares them and exits at its"
        " start",
        "data-missing": "every node reads the data itself",
        "data-differs": "ranks would train on different data, or disagree about the number of steps and hang",
        "model-missing": "every node reads the model and tokenizer itself",
        "model-differs": "ranks would start from different weights or tokens",
        "output-not-writable": "checkpoints are written there from every node: each rank saves its own shard",
        "output-not-shared": "a checkpoint's shards would lie scattered over the nodes, and no run could resume from"
        " it",
        "disk": "a checkpoint that does not fit ends the run while it is written",
        "configuration": "training would refuse it with the same message",
        "plan": "by prediction it runs out of memory",
        "smoke-failed": "training joins and adds up in the same way",
        "smoke-silent": "every collective of the training would wait for it",
        "wrong-sum": "gradients would be wrong without an error",
    },
    "warning": {
        "gpu-busy": "the plan counts on that memory, and the slowest GPU sets everyone's pace",
        "gpu-errors": "a GPU with memory errors corrupts results or falls out of the run",
        "memory-low": "loading and offload need host memory; without it the kernel kills a rank",
        "shared-memory": "NCCL, gloo and data loaders exchange through /dev/shm; too little ends in a bus error",
        "open-files": "each rank holds a connection to every other, and its data files",
        "locked-memory": "InfiniBand, NCCL and NVMe offload lock their buffers",
        "compiler": "DeepSpeed compiles its operators at first use (CPU ranks' collectives, offload, NVMe)",
        "cache-disk": "models, data sets and compiled operators are written there",
        "patch-changed": "dsft replaces that code of the library; what it saves in time or memory may be lost",
        "driver-versions": "different drivers and GPU types work together, but not always, and at the slowest one's"
        " pace",
        "clocks": "logs of nodes cannot be compared, file times on shared folders lie, and time-outs misjudge",
        "own-name": "gloo tells the others the address of the node's own name, where they do not reach it; dsft"
        " names an interface itself, other programs do not",
        "name-unresolved": "accelerate, mpirun and your own ssh from there go by names",
        "default-port-busy": "`deepspeed` takes this port by default and would fail; dsft train takes a free one",
        "mtu": "larger packets get lost on the way to the node that takes smaller ones: connections that stand,"
        " then hang",
        "interface-speed": "the slowest card sets the pace of every collective",
        "infiniband": "NCCL falls back to plain sockets on all nodes, or fails to connect",
        "packet-loss": "each lost packet holds a collective up until it is sent again",
        "slow-link": "every collective waits for the slowest link",
        "slow-node": "every collective waits for the slowest link, and all of this node's are slow",
        "slow-inside": "every collective waits for the slowest node",
        "slow-rank": "every step waits for the slowest rank",
        "below-assumed": "the planner's data sheets assume more; what was measured is kept, and plans for these nodes"
        " use it",
    },
    "note": {
        "idle-gpus": "GPUs beyond the slots stay idle",
        "nvcc": "DeepSpeed's CUDA operators are compiled with the toolkit of torch's CUDA; plain training needs none",
        "hub-download": "each node downloads by itself, at the same time",
        "plan-unknown": "memory and disk were not checked against the run",
        "smoke-skipped": "nothing was measured",
    },
}
"""Severity -> code of a finding -> why it matters. Each has a line in docs/doctor.md."""
MESSAGES = {code: (severity, why) for severity, kinds in KINDS.items() for code, why in kinds.items()}
SHARED_BYTES_PER_RANK = 256 * MiB
"""DeepSpeed's CPU collectives take 66 MiB per rank, NCCL 10 MiB per pair of GPUs; Docker's default is 64 in all."""
FEWEST_FILES = 4096
FREE_CACHE_BYTES = 5 * GiB
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""NVIDIA's lowest driver for each CUDA (CUDA compatibility guide, minor version compatibility)."""
CLOCK_SECONDS = 2.0
CODE_ROWS = ("dsft commit", "dsft code")
DRIVER_ROWS = ("GPU driver", "GPU type")
FEWEST_FREE_BYTES = GiB  # for the output folder, where the run's needs are not known


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing the doctor noticed."""

    code: str  # key of MESSAGES and of docs/doctor.md
    severity: Severity
    message: str
    where: str  # node names, or "here" for the machine that dsft doctor runs on
    why: str
    fix: str  # the command that helps, or what to change


def finding(code: str, where: str, message: str, fix: str, *, severity: Severity | None = None) -> Finding:
    """A finding with its kind's reason, and severity where no other is given."""
    usual, why = MESSAGES[code]
    return Finding(code=code, severity=severity or usual, message=message, where=where, why=why, fix=fix)


def join(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def check_node(node: str, facts: NodeFacts, *, quick: bool, nvme: bool = False) -> Iterator[Finding]:
    """Everything that one node's facts show: of its GPUs and slots, memory and limits, packages, and unless `quick` of
    what compiling operators needs and the space for caches. `nvme`: the run offloads to NVMe.
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
    for gpu in facts.rank_gpus:
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
    # A task of srun --gpus-per-task sees its own GPU alone; the smoke test finds a rank that has none.
    if gpus and slots > gpus and not (facts.ranks and facts.visible_gpus):
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
        fix = "echo '* - memlock unlimited' >> /etc/security/limits.conf, and log in again"
        yield finding("locked-memory", node, message, f"{fix} (sshd and slurmd have limits of their own)")
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
        yield finding("libaio", node, message, "apt-get install libaio-dev")
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
    rows, first = differences(facts), next(iter(facts.values()))
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
    """Clocks that are wrong, or differ without telling which is. `offsets`: seconds by which each node's is ahead of
    one of them; `not_synchronized`: nodes whose kernel says that no time service keeps it.
    """
    if len(offsets) < 2:
        return
    near = ([other for other in offsets if abs(offsets[other] - ahead) <= CLOCK_SECONDS] for ahead in offsets.values())
    agreeing = max(near, key=len)
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
        unknown = [other for other, addresses in answer.names.items() if not addresses]
        if unknown:
            fix = f"the same lines in /etc/hosts on every node, or DNS; then on {name}: getent hosts {unknown[0]}"
            yield finding("name-unresolved", name, f"{join(unknown)} does not resolve there", fix)


def check_master(
    master_node: str, address: str, port: int, taken: str, reached: dict[str, Reached], *, port_asked: bool
) -> Iterator[Finding]:
    """Whether rank 0's port is free (`taken`: who has it), and every node gets there. `port_asked`: the user named the
    port; else it is DeepSpeed's default, which dsft train does not take.
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
            look = f"ssh {target.name} 'ethtool IFACE; ip -s link; tc qdisc show': a lower speed, errors, a limit"
            fix = f"{look}; or leave it out: --exclude {target.name}"
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
            names, wanted = list(node.network.interfaces), value.split(",")
            # NCCL takes what a name may begin with, and after "=" whole names; gloo takes whole names alone.
            if variable == "GLOO_SOCKET_IFNAME":
                is_there = not {*wanted}.isdisjoint(names)
            elif value.startswith("="):
                is_there = not {*value[1:].split(",")}.isdisjoint(names)
            else:
                is_there = value.startswith("^") or any(name.startswith(tuple(wanted)) for name in names)
            if variable.endswith("_IFNAME") and value and not is_there:
                message = f"{variable}={value}, but there are {', '.join(names)}"
                fix = f"{variable}={used.get(name) or 'eth0'} in .deepspeed_env, or in the shell of {name}"
                yield finding("interface", name, message, fix)
    if len(facts) < 2:
        return
    known = {node: name for node, name in used.items() if name in facts[node].network.interfaces}
    cards = {node: facts[node].network.interfaces[name] for node, name in known.items()}
    mtus = {node: card.mtu for node, card in cards.items()}
    if mtus and (odd := spread({"MTU": mtus})[0]):
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
        off = "NCCL_IB_DISABLE=1 for all in .deepspeed_env"
        fix = f"ssh {without[0]} ibstat; load its driver or check the cable, or {off}"
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
        saves=values.get("save_strategy") not in ("no", False) or bool(values.get("save_minutes")),  # YAML's bare no
        nvme=any(offloads(read_zero_file(zero, []), to=("nvme",)) for zero in words["zero"]),
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
    """Configuration, data and model the same everywhere, or on the hub; the output folder writable everywhere and
    shared. `first`: the node that has made the probe file there.
    """

    def copied(path: str, node: str) -> str:
        """The command that puts it at the same place there."""
        # Without -R a folder would end inside the one of its name; the folders above keep their owners and modes there.
        return f"rsync -aR --no-implied-dirs {os.path.abspath(path)} {node}:/"

    read = {node: answer.config for node, answer in reached.items() if answer.config is not None}
    if files.config and read:  # a file that is on no node is reported by the reader of options
        odd = [node for node in reached if node not in read]
        texts = [f"it is not on {join(odd)}"] if odd else []
        usual = next(iter(read.values()))
        for key in dict.fromkeys(key for values in read.values() for key in values):
            nodes: dict[str, list[str]] = {}
            for node, values in read.items():
                nodes.setdefault(values.get(key, "not set"), []).append(node)
            if len(nodes) > 1:
                texts.append(f"{key} is " + ", ".join(f"{value[:80]} on {join(on)}" for value, on in nodes.items()))
                odd += [node for node in read if read[node].get(key) != usual.get(key)]
        if odd:
            sent = "`dsft launch --hostfile` sends the one from where it is started"
            fix = f"on {next(iter(read))}: {copied(files.config, odd[0])}; {sent}"
            message = f"{files.config}: {'; '.join(texts)}"
            severity = "note" if files.config_is_sent else None
            yield finding("config-differs", join([*dict.fromkeys(odd)]), message, fix, severity=severity)

    named_on_hub: set[str] = set()
    for source in (*files.data, *files.models):
        seen = {node: answer.contents[source] for node, answer in reached.items()}
        kind = "data" if source in files.data else "model"
        there, missing = [node for node in seen if seen[node]], [node for node in seen if not seen[node]]
        name = source.partition(":")[0]
        if there and missing:
            fix = f"on {there[0]}: {copied(source, missing[0])}; or mount the same folder on every node"
            yield finding(f"{kind}-missing", join(missing), f"{source} is on {join(there)} but not there", fix)
        elif there:
            odd, _ = spread({source: seen})
            if odd:
                texts = [
                    f"{join([node for node in seen if seen[node] == content])}: {plural(content.files, 'file')},"
                    f" {content.bytes:,} bytes, hash {content.hash}"
                    for content in dict.fromkeys(seen.values())
                ]
                good = next(node for node in seen if node not in odd)
                fix = f"on {good}: {copied(source, odd[0])}; or mount the same folder on every node"
                yield finding(f"{kind}-differs", join(odd), f"{source} differs ({'; '.join(texts)})", fix)
        elif is_path(source):
            if missing:
                message = f"{source} does not exist (seen from {os.getcwd()})"
                yield finding(f"{kind}-missing", join(missing), message, f"correct {kind}, or copy it there")
        elif name not in named_on_hub:  # two splits of one data set are one name
            named_on_hub.add(name)
            lacking = [node for node, answer in reached.items() if not answer.cached[name]]
            barred = [node for node in lacking if facts[node].hub_offline]
            download = f"hf download {name}{' --repo-type dataset' if kind == 'data' else ''}"
            if barred:
                message = f"{name} is neither a file nor in the hub's cache, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
                fix = f"on {barred[0]}: HF_HUB_OFFLINE=0 {download}; or name an existing folder"
                yield finding("hub-offline", join(barred), f"{message} is set", fix)
            elif lacking:
                fix = f"on each: {download}; or one HF_HOME that all nodes share"
                yield finding("hub-download", join(lacking), f"{name} is not in the hub's cache yet", fix)

    folder = files.output_dir
    for node, problem in ((name, node.output_error) for name, node in facts.items()) if folder else ():
        message = f"output_dir={folder}: {problem}"
        if "No space" in problem or "quota" in problem.lower():
            yield finding("disk", node, message, f"ssh {node} df -h {folder}; another output_dir, or make room")
        elif problem:
            fix = f"on {node}: mkdir -p {folder} && ls -ld {folder}; chown, remount, or another output_dir"
            yield finding("output-not-writable", node, message, fix)
    apart = [node for node, answer in reached.items() if answer.sees_probe is False]
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
