"""Compares what the ranks were told before they work together.

A rank with other options, other code or another library computes something else, and nothing fails: under ZeRO-3 its
shards are updated with another learning rate, say, and the run ends with exit code 0.
"""

import hashlib
import socket
from collections.abc import Mapping
from typing import Any

from dsft.errors import raise_if_any
from dsft.runtime.console import say
from dsft.runtime.distributed import from_all, rank
from dsft.runtime.versions import code_hash, numeric_versions, untested_versions

SAME_OPTIONS = (
    "give every node the same options and files; `dsft launch --hostfile` sends those from where it is started"
)
SAME_FILES = "copy the same files to every node, or mount one folder"
SAME_CODE = "copy one checkout to every node, or mount it there"
SAME_LIBRARIES = "on every node: pip install -c constraints.txt -e ."
LONGEST_VALUE = 80
"""Characters of a value in a message; of a longer one its beginning and a hash."""
NOT_SET = "not set"


def require_same_start(options: Mapping[str, Any], problems: list[str]) -> None:
    """Compare options, code and libraries, right after the ranks have met; name libraries that were never tested.
    Collective.

    Args:
        options: by name, as this rank has read them.
        problems: of reading them. Where any rank has some, nothing is compared: they are the cause, and are raised with
            all others later.

    Raises:
        UserError: on every rank, as `require_agreement`.
    """
    if any(from_all([bool(problems)])):
        return
    libraries = {f"version of {name}": version for name, version in numeric_versions().items()}
    if untested := untested_versions():
        say(f"warning: never tested with {', '.join(untested)}; constraints.txt has versions that were")
    require_agreement({SAME_OPTIONS: options, SAME_CODE: {"code of dsft": code_hash()}, SAME_LIBRARIES: libraries})


def require_agreement(facts_by_remedy: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare facts over all ranks. Collective.

    Args:
        facts_by_remedy: what the user can do about a difference -> name -> value on this rank.

    Raises:
        UserError: on every rank, with a line for each fact that differs: its values, their hosts and ranks.
    """
    # Plain values only: a rank with other code reads them too.
    mine = {name: (_shown(value), remedy) for remedy, facts in facts_by_remedy.items() for name, value in facts.items()}
    if len(set(from_all([content_hash(repr(sorted(mine.items())))]))) == 1:
        return
    everywhere = from_all([(socket.gethostname(), rank(), mine)])
    names = dict.fromkeys(name for _, _, facts in everywhere for name in facts)
    raise_if_any([problem for name in names if (problem := _difference(name, everywhere))])


def content_hash(content: str | bytes) -> str:
    """Hash the content of a file for a comparison."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:12]


def _shown(value: Any) -> str:
    text = NOT_SET if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... (hash {content_hash(text)})"


def _difference(name: str, everywhere: list[tuple[str, int, dict[str, tuple[str, str]]]]) -> str | None:
    places: dict[str, list[tuple[str, int]]] = {}
    for host, number, facts in everywhere:
        places.setdefault(facts.get(name, (NOT_SET, ""))[0], []).append((host, number))
    if len(places) == 1:
        return None
    remedy = next(facts[name][1] for _, _, facts in everywhere if name in facts)
    values = ", ".join(f"{value} on {_where(ranks)}" for value, ranks in places.items())
    return f"{name} differs between the ranks: {values}; {remedy}"


def _where(ranks: list[tuple[str, int]]) -> str:
    hosts = list(dict.fromkeys(host for host, _ in ranks))
    named = ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
    return f"{named} ({f'rank {ranks[0][1]}' if len(ranks) == 1 else f'{len(ranks)} ranks'})"
