"""What the watchdog of a large job costs on rank 0's node:

    python benchmarks/watchdog_scale.py --ranks 2048 --seconds 600

The coordinator is the real one, in the real sidecar of a rank that only waits. The other ranks are connections of one
process here, which send what their sidecars would: one for each node, behind which stand its ranks, or one for each
rank (`--ranks_per_node 1`). Reports the CPU time of that sidecar, and which connections were lost.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from dsft.watchdog.messages import Connection, Poller, connect, heartbeat_seconds, raise_file_limit

ROOT = Path(__file__).resolve().parent.parent
RANK = """
import json, os, sys
from types import SimpleNamespace
from dsft.watchdog import client
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": sys.argv[1]}
client.start(SimpleNamespace(start_timeout=300, lost_timeout=60, load_timeout=86400))
client.connect([client.endpoint()])
print(json.dumps(client.endpoint()), flush=True)
sys.stdin.read()
client.close()
os._exit(0)
"""
LOST_TIMEOUT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--ranks_per_node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    raise_file_limit()
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", RANK, str(options.ranks)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _, _, port, token = json.loads(rank_0.stdout.readline())
    mine = f'"pid": {rank_0.pid},'
    [sidecar] = [each for each in psutil.process_iter(["cmdline"]) if mine in " ".join(each.info["cmdline"] or ())]

    poller, nodes = Poller(), []
    for first in range(1, options.ranks, options.ranks_per_node):
        node = connect(("127.0.0.1", port), token)
        node.send("hello", host=f"node-{first}")
        for rank in range(first, min(first + options.ranks_per_node, options.ranks)):
            node.send("join", rank=rank)
        poller.add(node)
        nodes.append(node)
    heard = keep_in_touch(poller, nodes, options.seconds, sidecar)
    for node, (first, last) in zip(nodes, ranks_of(nodes, options), strict=True):
        for rank in range(first, last):
            node.send("close", rank=rank, exit_code=0, lines=[])
    rank_0.stdin.close()
    sidecar.wait(60)
    print(f"lost connections: {sum(count == 0 for count in heard.values())} of {len(nodes)}; exit code {rank_0.wait()}")


def ranks_of(nodes: list[Connection], options: argparse.Namespace) -> list[tuple[int, int]]:
    firsts = range(1, options.ranks, options.ranks_per_node)
    return [(first, min(first + options.ranks_per_node, options.ranks)) for first in firsts]


def keep_in_touch(
    poller: Poller, nodes: list[Connection], seconds: float, sidecar: psutil.Process
) -> dict[Connection, int]:
    """Send heartbeats, each node at its own moment; returns how many have come to each, 0 for one that was lost."""
    start, every = time.monotonic(), heartbeat_seconds(LOST_TIMEOUT)
    due = {node: start + every * place / len(nodes) for place, node in enumerate(nodes)}
    heard, reported = dict.fromkeys(nodes, 0), start
    cpu, most = sum(sidecar.cpu_times()[:2]), 0
    while (now := time.monotonic()) < start + seconds:
        for node in poller.ready(0.05):
            heard[node] += sum(message["type"] == "heartbeat" for message in node.read())
        for node in nodes:
            if now >= due[node]:
                due[node] += every
                node.send("heartbeat")
            if node.closed:
                heard[node] = 0
        if now - reported > 60 or now + 0.06 > start + seconds:
            reported, used = now, sum(sidecar.cpu_times()[:2]) - cpu
            most = max(most, sidecar.memory_info().rss)
            print(
                f"{now - start:.0f} s: {used:.2f} s of CPU, {used / (now - start):.2%} of a core,"
                f" {most / 2**20:.0f} MiB, {sidecar.num_fds()} files,"
                f" {sum(node.closed for node in nodes)} of {len(nodes)} connections lost",
                flush=True,
            )
    return heard


if __name__ == "__main__":
    main()
