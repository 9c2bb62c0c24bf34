"""What the watchdog of a large job costs on rank 0's node:

    python benchmarks/watchdog_scale.py --ranks 2048 --seconds 600

The coordinator is the real one, in the real sidecar of a rank that only waits. The other ranks are connections of one
process here, which send what their sidecars would. Reports the CPU time of that sidecar, and which connections were
lost.
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
client.connect(client.endpoint())
print(json.dumps(client.endpoint()), flush=True)
sys.stdin.read()
client.close()
os._exit(0)
"""
LOST_TIMEOUT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2048)
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
    port, token = json.loads(rank_0.stdout.readline())
    mine = f'"pid": {rank_0.pid},'
    [sidecar] = [each for each in psutil.process_iter(["cmdline"]) if mine in " ".join(each.info["cmdline"] or ())]

    poller, ranks = Poller(), []
    for rank in range(1, options.ranks):
        ranks.append(connect(("127.0.0.1", port), token))
        ranks[-1].send("hello", rank=rank, host=f"node-{rank // 8}")
        poller.add(ranks[-1])
    heard = keep_in_touch(poller, ranks, options.seconds, sidecar)
    for rank in ranks:
        rank.send("close", exit_code=0, lines=[])
    rank_0.stdin.close()
    sidecar.wait(60)
    print(f"lost connections: {sum(count == 0 for count in heard.values())} of {len(ranks)}; exit code {rank_0.wait()}")


def keep_in_touch(
    poller: Poller, ranks: list[Connection], seconds: float, sidecar: psutil.Process
) -> dict[Connection, int]:
    """Send heartbeats, each rank at its own moment; returns how many have come to each, 0 for one that was lost."""
    start, every = time.monotonic(), heartbeat_seconds(LOST_TIMEOUT)
    due = {rank: start + every * place / len(ranks) for place, rank in enumerate(ranks)}
    heard, reported = dict.fromkeys(ranks, 0), start
    cpu, most = sum(sidecar.cpu_times()[:2]), 0
    while (now := time.monotonic()) < start + seconds:
        for rank in poller.ready(0.05):
            heard[rank] += sum(message["type"] == "heartbeat" for message in rank.read())
        for rank in ranks:
            if now >= due[rank]:
                due[rank] += every
                rank.send("heartbeat")
            if rank.closed:
                heard[rank] = 0
        if now - reported > 60 or now + 0.06 > start + seconds:
            reported, used = now, sum(sidecar.cpu_times()[:2]) - cpu
            most = max(most, sidecar.memory_info().rss)
            print(
                f"{now - start:.0f} s: {used:.2f} s of CPU, {used / (now - start):.2%} of a core,"
                f" {most / 2**20:.0f} MiB, {sidecar.num_fds()} files,"
                f" {sum(rank.closed for rank in ranks)} of {len(ranks)} connections lost",
                flush=True,
            )
    return heard


if __name__ == "__main__":
    main()
