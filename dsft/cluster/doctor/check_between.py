"""Findings about nodes as compared to each other: versions, clocks, names, addresses, ports, interfaces. Pure: facts
in, findings out.
"""

from collections import Counter
from typing import Any

from dsft.cluster.doctor.findings import Finding, finding, join

CLOCK_SECONDS = 2.0
CODE_ROWS = ("dsft commit", "dsft code")
DRIVER_ROWS = ("GPU driver", "GPU type")


def differences(facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Versions that are not the same on all nodes: row -> node -> version."""
    rows = next(iter(facts.values()))["versions"] if facts else {}
    table = {row: {node: one["versions"].get(row, "none") for node, one in facts.items()} for row in rows}
    return {row: versions for row, versions in table.items() if len(set(versions.values())) > 1}


def check_versions(facts: dict[str, dict[str, Any]]) -> list[Finding]:
    """One finding for packages, one for dsft's own code, one for drivers and GPU types."""
    found, rows = [], differences(facts)
    packages = [row for row in rows if row not in CODE_ROWS + DRIVER_ROWS]
    if packages:
        odd = _odd_nodes({row: rows[row] for row in packages})
        pins = " ".join(
            f"{row}=={_usual(rows[row])}" for row in packages if row not in ("python", "torch's CUDA", "dsft", "NCCL")
        )
        text = "; ".join(f"{row}: {_spread(rows[row])}" for row in packages)
        python = next(iter(facts.values()))["python_path"]
        mend = (
            f"on {join(odd)}: {python} -m pip install {pins or '-c constraints.txt -e .'}"
            if "python" not in packages
            else "install every node from the same Python and constraints.txt, or mount one environment on all"
        )
        found.append(finding("versions", join(odd), text, mend))
    code = [row for row in CODE_ROWS if row in rows]
    if "dsft code" in code:  # the same files are the same code, whatever git says
        odd = _odd_nodes({row: rows[row] for row in code})
        folder = next(iter(facts.values()))["folder"]
        found.append(
            finding(
                "code",
                join(odd),
                "; ".join(f"{row}: {_spread(rows[row])}" for row in code),
                f"rsync -a --delete {folder}/ {odd[0]}:{folder}/, or git pull on every node",
            )
        )
    drivers = [row for row in DRIVER_ROWS if row in rows]
    if drivers:
        found.append(
            finding(
                "driver-versions",
                join(_odd_nodes({row: rows[row] for row in drivers})),
                "; ".join(f"{row}: {_spread(rows[row])}" for row in drivers),
                "the same driver on every node; leave nodes with other GPUs out (--exclude)",
            )
        )
    return found


def check_clocks(offsets: dict[str, float]) -> list[Finding]:
    """`offsets`: seconds by which each node's clock is ahead of this machine's."""
    if len(offsets) < 2:
        return []
    usual = sorted(offsets.values())[(len(offsets) - 1) // 2]
    off = {node: offset - usual for node, offset in offsets.items() if abs(offset - usual) > CLOCK_SECONDS}
    return [
        finding(
            "clocks",
            node,
            f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the others'",
            f"on {node}: timedatectl set-ntp true (or chronyc makestep)",
        )
        for node, seconds in off.items()
    ]


def check_names(facts: dict[str, dict[str, Any]], reached: dict[str, dict[str, Any]]) -> list[Finding]:
    """Own names on loopback, and names of other nodes that do not resolve."""
    if len(facts) < 2:
        return []
    found = []
    for node, one in facts.items():
        own = one["network"]["own_name"]
        if "GLOO_SOCKET_IFNAME" not in one["network"]["variables"] and (
            not own or all(address.startswith("127.") or address == "::1" for address in own)
        ):
            address = (one["network"]["addresses"] or ["ADDRESS"])[0]
            says = f"resolves to {', '.join(own)} there" if own else "does not resolve there"
            found.append(
                finding(
                    "own-name",
                    node,
                    f"its own name {one['host']} {says}",
                    f"on {node}, in /etc/hosts: `{address} {one['host']}` instead of 127.0.1.1; or"
                    f" `GLOO_SOCKET_IFNAME={interface_of(one, address) or 'eth0'}` in .deepspeed_env",
                )
            )
    for node, answer in reached.items():
        unknown = [name for name, addresses in answer["names"].items() if not addresses and name != node]
        if unknown:
            found.append(
                finding(
                    "name-unresolved",
                    node,
                    f"{join(unknown)} does not resolve there",
                    f"the same lines in /etc/hosts on every node, or DNS; then on {node}: getent hosts {unknown[0]}",
                )
            )
    return found


def check_master(
    master_node: str,
    address: str,
    port: int,
    facts: dict[str, dict[str, Any]],
    reached: dict[str, dict[str, Any]],
    *,
    asked: bool,
) -> list[Finding]:
    """Whether rank 0's port is free, and every node gets there.

    Args:
        asked: whether the user named the port; else it is DeepSpeed's default, which dsft train does not take.
    """
    found = []
    if taken := facts[master_node]["master_port_taken"]:
        code = "master-port-busy" if asked else "default-port-busy"
        found.append(
            finding(
                code,
                master_node,
                f"port {port} is {taken}",
                f"--master_port with a free one, or end what listens: ssh {master_node} ss -ltnp sport = :{port}",
            )
        )
    for node, answer in reached.items():
        results = {target["kind"]: target["result"] for target in answer["targets"] if target["name"] == master_node}
        to_port, to_other = results.get("master", ""), results.get("open", "")
        if to_port == "" or taken or not to_port.startswith("!"):
            continue
        if not to_other.startswith("!"):
            found.append(
                finding(
                    "port-blocked",
                    f"{node} -> {master_node}",
                    f"port {port} of {address} {_words(to_port)}, other ports answer: a firewall blocks it",
                    f"--master_port with another one, or on {master_node}: iptables -I INPUT -p tcp --dport {port} -j"
                    " ACCEPT",
                )
            )
        elif results.get("name", "!").startswith("!"):
            continue  # check_network says that nothing gets through
        else:
            found.append(
                finding(
                    "master-address",
                    f"{node} -> {master_node}",
                    f"{address}, the first that `hostname -I` prints on {master_node}, {_words(to_port)} from {node},"
                    f" but its name leads to {master_node}",
                    f"--master_addr {master_node}",
                )
            )
    return found


def check_network(facts: dict[str, dict[str, Any]], reached: dict[str, dict[str, Any]]) -> list[Finding]:
    """Whether every node reaches every other, and the right one, on a port of its choice."""
    found, blocked = [], []
    for node, answer in reached.items():
        for target in answer["targets"]:
            if target["kind"] == "open" and target["result"].startswith("!"):
                blocked.append((node, target["name"], target))
            elif (
                target["kind"] in ("open", "name")
                and target["name"] in facts
                and not target["result"].startswith("!")
                and target["result"] != facts[target["name"]]["host"]
            ):
                found.append(
                    finding(
                        "wrong-machine",
                        node,
                        f"{target['address']} ({target['name']}) is {target['result']} from there, not"
                        f" {facts[target['name']]['host']}",
                        f"on {node}: getent hosts {target['name']}; correct /etc/hosts or DNS, or the doubled address",
                    )
                )
    for towards in dict.fromkeys(name for _, name, _ in blocked):
        froms = [(node, target) for node, name, target in blocked if name == towards]
        target = froms[0][1]
        found.append(
            finding(
                "network-blocked",
                f"{join([node for node, _ in froms])} -> {towards}",
                f"port {target['port']} of {target['address']}, opened for this test, {_words(target['result'])}",
                f"on {towards}: iptables -I INPUT -s ADDRESSES_OF_THE_NODES -j ACCEPT (or ufw allow from ...); without"
                f" a firewall: ip route get {target['address']}",
            )
        )
    return found


def check_interfaces(facts: dict[str, dict[str, Any]], used: dict[str, str]) -> list[Finding]:
    """MTU and speed of the interface between the nodes (`used`: node -> its name), those that variables name, and
    InfiniBand.
    """
    found = []
    for node, one in facts.items():
        for variable, value in one["network"]["variables"].items():
            prefixes = [word.strip("=") for word in value.split(",") if not word.startswith("^")]
            if (
                variable.endswith("_IFNAME")
                and prefixes
                and not value.startswith("^")
                and not any(name.startswith(prefix) for prefix in prefixes for name in one["network"]["interfaces"])
            ):
                found.append(
                    finding(
                        "interface",
                        node,
                        f"{variable}={value}, but there are {', '.join(one['network']['interfaces'])}",
                        f"{variable}={used.get(node) or 'eth0'} in .deepspeed_env, or in the shell of {node}",
                    )
                )
    if len(facts) < 2:
        return found
    cards = {
        node: facts[node]["network"]["interfaces"][name]
        for node, name in used.items()
        if name in facts[node]["network"]["interfaces"]
    }
    mtus = {node: card["mtu"] for node, card in cards.items()}
    if len(set(mtus.values())) > 1:
        odd = _odd_nodes({"mtu": {node: str(mtu) for node, mtu in mtus.items()}})
        usual = _usual({node: str(mtu) for node, mtu in mtus.items()})
        found.append(
            finding(
                "mtu",
                join(odd),
                f"MTU: {_spread({node: f'{mtu} ({used[node]})' for node, mtu in mtus.items()})}",
                f"on {odd[0]}: ip link set {used[odd[0]]} mtu {usual}",
            )
        )
    speeds = {node: card["mbit"] for node, card in cards.items() if card["mbit"] > 0}
    if speeds and min(speeds.values()) < max(speeds.values()):
        slow = [node for node, speed in speeds.items() if speed < max(speeds.values())]
        found.append(
            finding(
                "interface-speed",
                join(slow),
                f"speed in Mbit/s: {_spread({node: str(speed) for node, speed in speeds.items()})}",
                f"ssh {slow[0]} ethtool {used[slow[0]]}: another cable or port, or another interface"
                " (NCCL_SOCKET_IFNAME)",
            )
        )
    with_ib = [node for node, one in facts.items() if one["network"]["infiniband"]]
    if with_ib and len(with_ib) < len(facts):
        without = [node for node in facts if node not in with_ib]
        found.append(
            finding(
                "infiniband",
                join(without),
                f"no active InfiniBand port, unlike {join(with_ib)}",
                f"ssh {without[0]} ibstat; load its driver or check the cable, or NCCL_IB_DISABLE=1 for all in"
                " .deepspeed_env",
            )
        )
    return found


def interface_of(facts: dict[str, Any], address: str) -> str:
    """The interface that has `address`; empty where none has."""
    return next((name for name, one in facts["network"]["interfaces"].items() if address in one["addresses"]), "")


def _words(result: str) -> str:
    return {"!timeout": "does not answer", "!refused": "refuses connections", "!unresolved": "does not resolve"}.get(
        result, f"cannot be reached ({result.lstrip('!')})"
    )


def _usual(values: dict[str, str]) -> str:
    """What most nodes have; of equally many, what the first has."""
    return Counter(values.values()).most_common(1)[0][0]


def _odd_nodes(rows: dict[str, dict[str, str]]) -> list[str]:
    return list(
        dict.fromkeys(node for values in rows.values() for node, value in values.items() if value != _usual(values))
    )


def _spread(values: dict[str, str]) -> str:
    """ "2.13.0 on node-0, node-1; 2.12.0 on node-2"."""
    return ", ".join(
        f"{value} on {join([node for node, one in values.items() if one == value])}"
        for value in dict.fromkeys(values.values())
    )
