"""Every deadline and interval of the watchdog, in seconds.

The limits that users set are options (`config.TimeoutFields`). The others follow each other when a rank fails: its
sidecar reports it, the coordinator collects what else fails, says what came first, and has all ranks ended.
"""

PHASE_LIMITS = {
    "starting": "start_timeout",
    "loading": "load_timeout",
    "training": "step_timeout",
    "evaluating": "step_timeout",
    "saving": "save_timeout",
}
"""Phase of a rank -> the option that limits it, in seconds without progress."""

MOVES_FILES = ("loading", "saving")
"""Phases in which a rank that reads or writes files makes progress: libraries write a shard of 50 GB in one call, of
which no heartbeat comes.
"""
PROGRESS_BYTES = 2**20
"""Read or written at least, to be progress: what a waiting rank says to others is less."""

IMPORT_SECONDS = 60.0
"""For a rank to import its libraries, from a slow disk, before it tries to meet the others."""
POLL_SECONDS = 0.5
"""How often a sidecar looks at its rank; also the least time between two heartbeats of a rank."""
CONNECT_SECONDS = 20.0
"""For a sidecar to reach the coordinator, at most."""
CONNECT_LAUNCHER_SECONDS = 5.0
"""For the coordinator to reach `dsft launch`."""
STRANGER_SECONDS = 10.0
"""For a connection to prove that it is of the job."""
SILENCE_SECONDS = 1.0
"""How often the silence of all nodes is looked at."""
EXIT_SECONDS = 60.0
"""For a rank to exit after it has said that it ends in order; one that does other work then is believed so far."""

RANK_0_FIRST_SECONDS = 1.5
"""For rank 0 to end with the same message as another rank, which it prints itself."""
LEAVE_SECONDS = 8.0
"""From the first rank that ends with a message of its own to the end of those that did not."""
COLLECT_SECONDS = 2.0
"""After the first report: its causes and consequences reach the coordinator within this time."""
COLLECT_STACKS_SECONDS = 6.0
"""The same where stacks are asked for."""
STACKS_SECONDS = 2.0
"""For a rank to write its stacks."""
VERDICT_SECONDS = 20.0
"""A rank with an error waits so long to be ended, so that what failed first is said first."""
TERMINATE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 1.0
"""For a process to be gone after SIGKILL."""
END_SECONDS = 15.0
"""For sidecars to end their ranks and hang up, before the coordinator stops waiting."""
LAUNCHER_SECONDS = 15.0
"""For a launcher to end after its ranks."""
END_LAUNCHER_SECONDS = 10.0
"""Between SIGTERM and SIGKILL for a launcher, which may be ending other nodes."""


def heartbeat_seconds(lost_timeout: float) -> float:
    """Return the time between two heartbeats of a sidecar or the coordinator."""
    return min(2.0, lost_timeout / 4)
