"""Starts the smoke test on all nodes that answered, follows its ranks, and names those that do not come to the end."""

from typing import Any

from dsft.cluster.doctor.check_links import check_answers
from dsft.cluster.doctor.facts import usable_gpus
from dsft.cluster.doctor.findings import Finding, Report
from dsft.cluster.doctor.links import all_rounds, combine, ring_rounds
from dsft.cluster.doctor.sessions import Sessions

GROUP_SECONDS = 15
"""A rank gives up waiting for another after so long."""
LIMIT_SECONDS = 40.0
"""For the whole test; each rank ends itself before (`smoke.LIFE_SECONDS`)."""
IMPORT_SECONDS = 60.0
"""For torch's import, from a slow disk; it began before the other checks."""
GRACE_SECONDS = 15.0
"""A node may take so much longer than the first one for either."""


class Progress:
    """What the ranks have said so far."""

    def __init__(self):
        self.stages: dict[int, str] = {}
        self.failures: list[tuple[int, str]] = []
        self.measured: dict[int, dict[str, Any]] = {}

    def hear(self, event: dict[str, Any]) -> None:
        rank = event["rank"]
        if "failed" in event:
            self.failures.append((rank, event["failed"]))
        else:
            self.stages[rank] = event["stage"]
            if "measured" in event:
                self.measured[rank] = event["measured"]


def run_smoke(
    report: Report, sessions: Sessions, *, master: str, port: int, interfaces: dict[str, str]
) -> tuple[list[Finding], list[list[int]]]:
    """Sets `report.links` where all ranks came to the end. Returns findings and the ranks of each standing node, in
    order.

    Args:
        interfaces: where gloo has to be told which one to use, because a node's own name leads elsewhere.
    """
    names = list(report.slots)
    ranks, world = [], 0
    for name in names:
        # A launcher may have dealt them to the nodes in turn; the doctor's own go node by node.
        ranks.append(report.facts[name].get("ranks") or list(range(world, world + report.slots[name])))
        world += report.slots[name]
    rounds = (ring_rounds if report.quick else all_rounds)(len(names)) if len(names) > 1 else []
    each = {
        name: {"node": number, "gpu": bool(usable_gpus(report.facts[name])), "interface": interfaces.get(name, "")}
        for number, name in enumerate(names)
    }
    progress = Progress()
    ready = sessions.ask(
        "ready", timeout_seconds=IMPORT_SECONDS, grace_seconds=GRACE_SECONDS, each={name: {} for name in names}
    )
    never_started = {name: words for name, words in ready.items() if words}
    if never_started or len(ready) < len(names):
        others = {
            rank: "done" for number, name in enumerate(names) if name in ready for rank in ranks[number]
        }  # were ready, and were not started
        return check_answers(others, [], names, ranks, never_started), ranks
    answers = sessions.ask(
        "smoke",
        timeout_seconds=LIMIT_SECONDS,
        grace_seconds=GRACE_SECONDS,
        each=each,
        nodes=ranks,
        rounds=rounds,
        master=master,
        port=port,
        group_seconds=GROUP_SECONDS,
        on_event=progress.hear,
    )
    if len(progress.measured) == world:
        node_of = [node for _, node in sorted((rank, node) for node, of_node in enumerate(ranks) for rank in of_node)]
        report.links = combine([progress.measured[rank] for rank in range(world)], node_of)
        return [], ranks
    never_started = {
        name: answers[name]["last_words"]
        for number, name in enumerate(names)
        if name in answers and answers[name]["code"] and not any(rank in progress.stages for rank in ranks[number])
    }
    return check_answers(progress.stages, progress.failures, names, ranks, never_started), ranks
