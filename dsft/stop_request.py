"""SIGUSR1 asks a training to save and end, so that it can go on later: SLURM sends it before the time limit (`--signal=USR1@300`)."""

import signal

_asked = False


def listen() -> None:
    """From now on SIGUSR1 is noted. Any one rank that gets it is enough: the trainer lets all ranks agree."""
    signal.signal(signal.SIGUSR1, _note)


def is_asked() -> bool:
    """Whether this rank was told."""
    return _asked


def _note(number: int, frame: object) -> None:
    global _asked
    _asked = True
