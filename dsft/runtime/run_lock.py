"""Keeps two runs, trainings or evaluations, out of one folder: rank 0 holds `.lock` there while its process lives.

On the same machine the process is looked at. From another one only the heartbeat can be: the time of the file, by the
clock of the file system that both see.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dsft.errors import UserError
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.runtime.hardware import has_gpu, wait_for_freed_gpu
from dsft.runtime.lock_file import Owner, create, file_system_time, owner_of

LOCK = ".lock"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0


@contextlib.contextmanager
def only_run_in(output_dir: str | None) -> Iterator[bool]:
    """Hold the lock of `output_dir` inside a `with`. A folder that cannot be written is left to the checks. Collective.

    Gives whether the run before this one was killed: it left its lock.

    Raises:
        UserError: on every rank, where another run is alive there.
    """
    lock = RunLock(Path(output_dir)) if output_dir and distributed.rank() == 0 else None
    was_killed = distributed.on_rank_0(lambda: lock.acquire() if lock else False)
    try:
        yield was_killed
    finally:
        if lock:
            lock.release()


def wait_for_a_killed_run() -> None:
    """Wait for the memory of the GPUs that an earlier run's dying processes hold: a plan would not count on it."""
    if has_gpu() and (seconds := wait_for_freed_gpu()):
        say(f"the earlier run was killed: waited {seconds:.0f} s for the memory of its GPUs")


def is_held(folder: Path) -> bool:
    """Whether a living run holds `folder`, as far as can be told without waiting: one on another machine may have been
    killed less than STALE_SECONDS ago.
    """
    file = folder / LOCK
    owner, beat = owner_of(file), _modified(file)
    if owner and owner.is_here():
        return owner.is_alive()
    try:
        now = file_system_time(file) if beat else 0.0
    except OSError:  # a reader may not write there
        now = time.time()
    return bool(beat) and now - beat <= STALE_SECONDS


class RunLock:
    """Holds one folder for this process."""

    def __init__(self, folder: Path):
        self.file, self._ended = folder / LOCK, threading.Event()
        self._made_folder = self._is_held = False

    def acquire(self) -> bool:
        """Take the lock, over a stale one where there is one; returns whether there was.

        Raises:
            UserError: naming the owner, where it is alive.
        """
        was_stale = False
        try:
            self._made_folder = not self.file.parent.exists()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            while (descriptor := create(self.file)) is None:
                self._take_away_stale()
                was_stale = True
            os.close(descriptor)
        except OSError:
            return False
        self._is_held = True
        threading.Thread(target=self._beat, daemon=True).start()
        return was_stale

    def release(self) -> None:
        """Give the folder back; one that was made for the lock alone goes."""
        self._ended.set()
        if self._is_held and owner_of(self.file) == Owner.this_process():
            self.file.unlink(missing_ok=True)
        if self._made_folder:
            with contextlib.suppress(OSError):  # the run wrote into it
                self.file.parent.rmdir()

    def _take_away_stale(self) -> None:
        owner = owner_of(self.file)
        if not self._is_stale(owner):
            who = f"process {owner.pid} on {owner.host}" if owner else "another process"
            raise UserError(
                [
                    f"output_dir={self.file.parent}: {who} is writing there now; wait for its end, or choose another"
                    " folder"
                ]
            )
        stale = self.file.with_name(f"{LOCK}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # another start was faster
            self.file.rename(stale)
            if owner_of(stale) != owner:  # it took the lock in between: that is its lock
                stale.rename(self.file)
            stale.unlink(missing_ok=True)

    def _is_stale(self, owner: Owner | None) -> bool:
        if not is_held(self.file.parent):
            return True
        if owner and owner.is_here():
            return False
        beat, until = _modified(self.file), time.monotonic() + STALE_SECONDS
        say(f"{self.file} is of a run on another machine; waiting up to {STALE_SECONDS:.0f} s for its heartbeat")
        while time.monotonic() < until:
            time.sleep(0.2)
            if _modified(self.file) != beat:
                return False
        return True

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                os.utime(self.file)


def _modified(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0
