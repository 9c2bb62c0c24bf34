"""A process beside each rank that kills the rank when it is stopped or has lost rank 0, and then its launcher, which
may wait for nodes that are cut off. Standard library only, started as a file so that it needs 10 MB and 30 ms:

    python -S -E guard.py RANK_PID LAUNCHER_PID SECONDS IF_STOPPED IF_LOST

The rank writes to this process's standard input once a second; the last word is "bye". LAUNCHER_PID is 0 if the
launcher must not be killed. The last two are messages, empty if another rank prints them.
"""

import contextlib
import os
import select
import signal
import sys
import time

PAUSE_SECONDS = 5.0  # between two checks: a longer pause means that this process was stopped too, with the whole job
LAUNCHER_SECONDS = 5.0  # for the launcher to exit on its own, and again after SIGTERM


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped the process."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def main() -> None:
    rank = int(sys.argv[1])
    launcher = int(sys.argv[2])
    seconds = float(sys.argv[3])
    if_stopped, if_lost = sys.argv[4:]
    rank_exit = os.pidfd_open(rank)
    launcher_exit = os.pidfd_open(launcher) if launcher else None
    if os.fork():  # leaves the rank's process tree: DeepSpeed's launcher would wait 30 s for this process
        os._exit(0)
    last_word = last_look = time.monotonic()
    while True:
        ready, _, _ = select.select([0, rank_exit], [], [], 1.0)
        now = time.monotonic()
        if now - last_look > PAUSE_SECONDS:
            last_word = now
        last_look = now
        if rank_exit in ready:
            break
        if 0 in ready:
            words = os.read(0, 4096)
            if b"bye" in words:
                return
            last_word = now
            if not words:
                time.sleep(0.1)  # the rank has closed its end of the pipe, and exits
        elif now - last_word > seconds:
            message = if_stopped if is_stopped(rank) else if_lost
            if message:
                with contextlib.suppress(OSError):
                    os.write(2, f"{message}\n".encode())
            signal.pidfd_send_signal(rank_exit, signal.SIGKILL)
            break
    if launcher_exit is None:
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # an ssh session lasts as long as a process has its pipes open
    for number in (signal.SIGTERM, signal.SIGKILL):
        if select.select([launcher_exit], [], [], LAUNCHER_SECONDS)[0]:
            return
        signal.pidfd_send_signal(launcher_exit, number)


if __name__ == "__main__":
    main()
