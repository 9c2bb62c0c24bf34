"""User errors: collected, reported once, exit code 2.

A check never raises at the first fault: it appends to a list, and `raise_if_any` raises them together.
`ends_with_clear_errors` wraps an entry point: rank 0 prints the problems without a traceback and every rank ends with
exit code 2. It does not catch our own bugs: those keep their traceback and Python's exit code 1.
"""

import difflib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

EXIT_USER_ERROR = 2
EXIT_STOPPED = 3
"""Training stopped itself, for example at a NaN loss; what was saved before is intact."""
EXIT_UNSAVED = 4
"""Training went to its end, but a checkpoint on the way could not be saved."""
EXIT_REQUEUE = 75
"""Training saved and ended since it was asked to (SIGUSR1); the same command resumes it (EX_TEMPFAIL of sysexits.h)."""

RANK_0_SECONDS = 5
"""A launcher kills all ranks as soon as one has ended: the others give rank 0 so long to print the message first."""


class UserError(ValueError):
    """One or more problems of the user's input, each a full sentence that names the key or file and the way out."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))

    def __reduce__(self):
        """So that it can travel between ranks."""
        return UserError, (self.problems,)


class TrainingStopped(RuntimeError):
    """Training cannot continue (NaN loss); the message says at which step and what is left on disk."""


class Requeue(TrainingStopped):
    """Training was asked to stop and has saved; the message says how to resume."""


class Unsaved(TrainingStopped):
    """Training is done, its final model is written, but a checkpoint could not be saved."""


EXIT_CODES = {UserError: EXIT_USER_ERROR, Requeue: EXIT_REQUEUE, Unsaved: EXIT_UNSAVED, TrainingStopped: EXIT_STOPPED}


def raise_if_any(problems: list[str]) -> None:
    """Raise `UserError` with all of `problems`, or do nothing when there are none."""
    if problems:
        raise UserError(problems)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the known name most like `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


_exit_hooks: list[Callable[[int, list[str]], None]] = []


def on_exit(hook: Callable[[int, list[str]], None]) -> None:
    """Call `hook(exit code, lines of the message)` before a rank ends with an error of this module."""
    if hook not in _exit_hooks:
        _exit_hooks.append(hook)


def ends_with_clear_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate an entry point, so that a `UserError` or `TrainingStopped` is one message on rank 0 and one exit code
    everywhere.
    """

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except (UserError, TrainingStopped) as error:
            _end(error)

    return wrapped


def _end(error: UserError | TrainingStopped) -> NoReturn:
    code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    lines = error.problems if isinstance(error, UserError) else [str(error)]
    for hook in _exit_hooks:
        hook(code, lines)
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not rank.isdecimal() or int(rank) == 0:  # a rank that is no number may be the error
        head = "dsft: " if code == EXIT_REQUEUE else "dsft: error: "
        print("\n".join(head + line for line in lines), file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_0_SECONDS)
    if world_size.isdecimal() and int(world_size) > 1:
        # Skip interpreter shutdown: a process group with a dead peer would hang or add noise to the message.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def one_line(error: BaseException) -> str:
    """Cut a library's message to fit into a message of dsft."""
    return " ".join(str(error).split())[:300]
