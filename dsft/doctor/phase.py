"""One phase of the examination on one node: `python -m dsft.doctor.phase facts|reach|measure`.

Reads a line of JSON, answers with a line of JSON that begins with MARK (login scripts may print too), and ends when
its input does: the head closes it, or the connection is gone. Never imports torch; `measure` starts a process that
does.

    facts    what this node is; afterwards it listens on its open ports, and its probe file stays, until the end
    reach    connects to the open ports of all other nodes, and looks at the run's files
    measure  this node's ranks of the smoke test; tells of their progress while it runs
"""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from dsft.doctor.gather import addresses_of, node_facts
from dsft.doctor.reach import (
    Listener,
    config_values,
    connect_all,
    file_content,
    is_cached,
    listen,
    make_probe,
    sees,
)
from dsft.runtime.launcher_env import outgoing_address

MARK = "dsft-doctor:"
LIFE_SECONDS = 180
"""A phase that is older ends itself, whatever the connection says."""


def facts(
    held: ExitStack,
    *,
    slots: int | None,
    ranks: list[int] = (),
    master_port: int | None,
    output_dir: str,
    compiles: bool,
) -> dict[str, Any]:
    """`NodeFacts` of this node. What it opens stays open as long as `held` does.

    Args:
        master_port: to be listened on as well; None: no port is to be tried.
        output_dir: of the run, where a probe file is made; empty: none.
        compiles: whether to try the compiler.
    """
    folders = [output_dir] if output_dir else []
    gathered = node_facts(slots=slots, ranks=ranks, folders=folders, compiles=compiles)
    listener, taken = Listener(), ""
    held.callback(listener.close)
    if master_port:
        master, taken = listen(master_port)
        if master:
            held.callback(master.close)
    probe, error = make_probe(output_dir, held) if output_dir else ("", "")
    answer = dataclasses.replace(
        gathered, open_port=listener.port, master_port_taken=taken, probe=probe, output_error=error
    )
    return dataclasses.asdict(answer)


def reach(
    held: ExitStack,
    *,
    targets: list[dict[str, Any]],
    names: list[str],
    master: str,
    sources: list[str],
    hub_names: list[str],
    config: str,
    probe: str,
) -> dict[str, Any]:
    """`Reached` of this node.

    Args:
        targets: `Target`s to connect to.
        names: of the other nodes, to be resolved.
        master: address of rank 0's node.
        sources: files, folders and globs of the run.
        hub_names: models and data sets that may have to be downloaded.
        config: of the run, a YAML file; empty: none.
        probe: a file that the first node has made; empty: none.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        resolved = dict(zip(names, pool.map(addresses_of, names), strict=True))
    contents = {source: file_content(source) for source in sources}
    return {
        "connections": [dataclasses.asdict(connection) for connection in connect_all(targets)],
        "names": resolved,
        "outgoing": outgoing_address(master) or "",
        "contents": {source: content and dataclasses.asdict(content) for source, content in contents.items()},
        "cached": {name: is_cached(name) for name in hub_names},
        "config": config_values(config) if config else None,
        "sees_probe": sees(probe) if probe else None,
    }


def measure(held: ExitStack, read_input: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Start the ranks' process, which imports torch, then let it measure; what its ranks say is passed on as it comes.

    Returns:
        Exit code and last words of the process, also where it ended before the input came.
    """
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "dsft.doctor.smoke"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    held.callback(_kill, process)
    for line in process.stdout:
        if not line.startswith(MARK):
            continue
        content = json.loads(line[len(MARK) :])
        say(event=content)
        if "ready" in content:
            values = read_input()
            with suppress(BrokenPipeError):  # its exit code and last words say why
                process.stdin.write(json.dumps(values) + "\n")
                process.stdin.flush()
    code = process.wait()
    errors.seek(0)
    return {"code": code, "last_words": errors.read()[-2000:] or f"exit code {code}"}


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too


def say(**content: Any) -> None:
    """One line for the head."""
    sys.stdout.write(MARK + json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, held, inputs = sys.argv[1], ExitStack(), queue.Queue()

    def end(*signal_and_frame: Any) -> None:
        held.close()
        os._exit(0)

    def read() -> None:
        for line in sys.stdin:
            inputs.put(json.loads(line))
        end()

    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIFE_SECONDS)
    threading.Thread(target=read, daemon=True).start()
    try:
        if name == "measure":
            answer = measure(held, inputs.get)
        else:
            answer = {"facts": facts, "reach": reach}[name](held, **inputs.get())
    except Exception as error:  # the head reports it as a finding
        say(failed=f"{type(error).__name__}: {error}")
    else:
        say(answer=answer)
    threading.Event().wait()  # until the input ends


if __name__ == "__main__":
    main()
