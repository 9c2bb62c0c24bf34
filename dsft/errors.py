"""User errors. Checks do not raise at the first problem: they append to a list, and `raise_if_any` raises all at once.

`ends_with_clear_errors` wraps an entry point: rank 0 prints the problems without a traceback and every rank exits with
code 2. It does not catch our own bugs: those keep their traceback and Python's exit code 1.
"""

import contextlib
import difflib
import errno
import functools
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from dsft.units import printable

EXIT_USER_ERROR = 2
EXIT_STOPPED = 3
EXIT_UNSAVED = 4
EXIT_NOT_STARTED = 5
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: the run can be resumed
EXIT_INTERRUPTED = 130  # Ctrl-C: 128 plus the signal number, as in shells
MOST_SECONDS = 10
"""Limit of `limited_time`."""
RANK_0_SECONDS = 8  # for rank 0 to print the message: a launcher kills all ranks as soon as one exits


class UserError(ValueError):
    """One or more problems of the user's input, each a full sentence with the key or file and the remedy."""

    exit_code = EXIT_USER_ERROR

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))

    def __reduce__(self):
        """Make it picklable, to be sent between ranks."""
        return UserError, (self.problems,)


class _TimeIsUp(BaseException):
    """Not an Exception, so that no code in the body catches it."""


@contextlib.contextmanager
def limited_time(doing: str) -> Iterator[None]:
    """Raise UserError if the body, such as a foreign template, computes for over MOST_SECONDS. Main thread only."""

    def stop(*_):
        raise _TimeIsUp

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, stop)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)  # CPU time, since a busy machine takes longer
    try:
        yield
    except _TimeIsUp:
        raise UserError(f"{doing} takes more than {MOST_SECONDS} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)


class TrainingStopped(RuntimeError):
    """Training cannot continue (NaN loss); the message names the step and what remains on disk."""

    exit_code = EXIT_STOPPED


class Requeue(TrainingStopped):
    """Training was asked to stop (SIGUSR1) and has saved; the message says how to resume."""

    exit_code = EXIT_REQUEUE


class Unsaved(TrainingStopped):
    """Training is done, but its final model or a checkpoint could not be saved; the message names what remains."""

    exit_code = EXIT_UNSAVED


class NotStarted(RuntimeError):
    """The rendezvous timed out (`start_timeout`); the message names the rank, and what to check."""

    exit_code = EXIT_NOT_STARTED


def raise_if_any(problems: list[str]) -> None:
    """Raise `UserError` with all of `problems`, if there are any."""
    if problems:
        raise UserError(problems)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {match[0]!r}?" if match else ""


def without_second_errors(problems: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the problems without those of options that `known` problems already name or suggest."""
    names = set()
    for problem in known:
        names.update(re.findall(r"(?:^-*|did you mean ')(\w+)", problem))
    # A name of one word, such as model, also occurs in many sentences.
    return [problem for problem in problems if names.isdisjoint(re.findall(r"\w+_\w+|\w+(?=[:=])", problem))]


def ends_with_clear_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate an entry point: an error of this module, or Ctrl-C, is one message on rank 0, one exit code on all."""

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        from dsft.job import beat  # here, since it imports this module

        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name) is None:  # closed by a shell's 2>&-: the next opened file would get the output
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                os.set_inheritable(descriptor, True)  # open may return this very descriptor
                setattr(sys, name, os.fdopen(descriptor, "w"))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a notebook's is not
                stream.reconfigure(errors="replace")  # a terminal may not be UTF-8
        try:
            if sys.platform != "linux":  # /proc, fork, NCCL
                text = f"dsft runs on Linux only, and this is {sys.platform}: use WSL, a container or a host"
                raise UserError(text)
            try:
                return main(*args, **kwargs)
            except OSError as error:
                # An impossible path, or another user's file.
                of_paths = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS)
                has_begun = beat.progress.phase not in ("starting", "loading")
                if error.filename is None or error.errno not in of_paths or has_begun:
                    raise
                raise UserError([f"{error.filename}: {error.strerror}; choose another path"]) from error
        except (UserError, NotStarted, TrainingStopped, KeyboardInterrupt) as error:
            code = getattr(error, "exit_code", EXIT_INTERRUPTED)
            lines = error.problems if isinstance(error, UserError) else [str(error) or "interrupted (Ctrl-C)"]
            lines = [*map(printable, lines)]
            is_error = code not in (EXIT_REQUEUE, EXIT_INTERRUPTED)
            passed_on = [f"error: {line}" if is_error else line for line in lines]
            is_passed_on = beat.close(code, passed_on)
            is_rank_0 = os.environ.get("RANK", "0") == "0"  # as text: this variable itself may be wrong
            if is_rank_0 or (not is_passed_on and os.environ.get("LOCAL_RANK", "0") == "0"):
                head = "dsft: error: " if is_error else "dsft: "
                print("\n".join(head + line for line in lines), file=sys.stderr, flush=True)
            if not is_rank_0:
                time.sleep(RANK_0_SECONDS)
            if os.environ.get("WORLD_SIZE", "1") != "1":
                # Skip interpreter shutdown: a process group with a dead peer would hang or add noise to the message.
                sys.stdout.flush()
                os._exit(code)
            sys.exit(code)

    return wrapped


def one_line(error: BaseException) -> str:
    """Return a library's message, shortened for one of dsft; without one, the error's name (KeyboardInterrupt)."""
    return " ".join(str(error).split())[:300] or type(error).__name__
