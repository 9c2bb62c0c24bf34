"""The files of a run, by its options: which have to be there on each node, with which content. Asks the agents, then
judges their answers.

Reads the options without transformers, which takes seconds to import; what is wrong with them otherwise, `run_plan.py`
says.
"""

import os
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dsft.cluster.doctor.findings import Finding, finding, join
from dsft.cluster.doctor.sessions import Sessions
from dsft.config.reader import read_file_and_flags
from dsft.data.readers import is_path
from dsft.units import GiB, plural

FEWEST_FREE_BYTES = GiB
"""Where the run's needs are not known."""


@dataclass(kw_only=True)
class RunFiles:
    """What a run reads and writes, as its options name it."""

    data: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """Model, tokenizer and adapter."""
    output_dir: str = ""
    saves: bool = True
    """Whether checkpoints are written while training."""
    nvme: bool = False


def read_run_files(argv: list[str]) -> RunFiles | None:
    """The files that `dsft train` or `dsft eval` with these options would use; None without options."""
    if not argv:
        return None
    problems: list[str] = []  # said by the plan, or by training itself
    values = read_file_and_flags(argv, problems)
    words = {
        key: _words(values.get(key))
        for key in ("data", "eval_data", "model", "tokenizer", "adapter", "output_dir", "zero")
    }
    return RunFiles(
        data=words["data"] + words["eval_data"],
        models=[*dict.fromkeys(words["model"] + words["tokenizer"] + words["adapter"])],
        output_dir="".join(words["output_dir"][:1]),
        saves=str(values.get("save_strategy", "steps")) != "no",
        nvme="nvme" in "".join(words["zero"]),
    )


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [] if value in (None, True) else [str(value)]


def examine_files(sessions: Sessions, files: RunFiles, facts: dict[str, dict[str, Any]]) -> list[Finding]:
    """Data and model the same everywhere, the output folder writable everywhere and shared."""
    sources = [*files.data, *files.models]
    found: list[Finding] = []
    if sources:
        answers = sessions.ask("contents", sources=sources)
        named = {source: {node: answer[source] for node, answer in answers.items()} for source in sources}
        for source in sources:
            found += check_content(source, named[source], "data" if source in files.data else "model")
        on_hub = [
            source.partition(":")[0] for source, seen in named.items() if not any(seen.values()) and not is_path(source)
        ]  # of NAME:CONFIG:SPLIT the name
        if on_hub:
            found += check_hub(files, sessions.ask("cached", names=on_hub), facts)
    if files.output_dir:
        found += _examine_output(sessions, files)
    return found


def check_content(source: str, seen: dict[str, dict[str, Any] | None], kind: str) -> list[Finding]:
    """`seen`: what `paths.contents` says of one file, folder or glob on each node."""
    there, missing = (
        [node for node, content in seen.items() if content],
        [node for node, content in seen.items() if not content],
    )
    copy = f"rsync -aR {source} {{}}:/" if os.path.isabs(source) else f"rsync -a {source} {{}}:{os.getcwd()}/{source}"
    if not there:
        return (
            [
                finding(
                    f"{kind}-missing",
                    join(missing),
                    f"{source} does not exist (seen from {os.getcwd()})",
                    f"correct {kind}, or copy it there",
                )
            ]
            if missing and is_path(source)
            else []
        )
    if missing:
        return [
            finding(
                f"{kind}-missing",
                join(missing),
                f"{source} is on {join(there)} but not there",
                f"on {there[0]}: {copy.format(missing[0])}; or mount the same folder on every node",
            )
        ]
    prints = {node: (content["files"], content["bytes"], content["hash"]) for node, content in seen.items()}
    if len(set(prints.values())) == 1:
        return []
    usual = Counter(prints.values()).most_common(1)[0][0]  # of equally many, the first node's
    odd = [node for node, content in prints.items() if content != usual]
    text = "; ".join(
        f"{join([node for node in prints if prints[node] == content])}: {plural(content[0], 'file')},"
        f" {content[1]:,} bytes, hash {content[2]}"
        for content in dict.fromkeys(prints.values())
    )
    good = next(node for node in prints if node not in odd)
    return [
        finding(
            f"{kind}-differs",
            join(odd),
            f"{source} differs ({text})",
            f"on {good}: {copy.format(odd[0])}; or mount the same folder on every node",
        )
    ]


def check_hub(files: RunFiles, cached: dict[str, dict[str, bool]], facts: dict[str, dict[str, Any]]) -> list[Finding]:
    """Names on the hub: in the cache of each node, or to be downloaded by it."""
    found = []
    for name in dict.fromkeys(one for answer in cached.values() for one in answer):
        lacking = [node for node, answer in cached.items() if not answer[name]]
        offline = [node for node in lacking if facts[node]["hub_offline"]]
        kind = " --repo-type dataset" if any(name == source.partition(":")[0] for source in files.data) else ""
        if offline:
            found.append(
                finding(
                    "hub-offline",
                    join(offline),
                    f"{name} is neither a file nor in the hub's cache, and HF_HUB_OFFLINE is set",
                    f"on {offline[0]}: HF_HUB_OFFLINE=0 hf download {name}{kind}; or name an existing folder",
                )
            )
        elif lacking:
            found.append(
                finding(
                    "hub-download",
                    join(lacking),
                    f"{name} is not in the hub's cache yet",
                    f"on each: hf download {name}{kind}; or one HF_HOME that all nodes share",
                )
            )
    return found


def _examine_output(sessions: Sessions, files: RunFiles) -> list[Finding]:
    first = sessions.standing[0]
    probe = f".dsft-doctor-{uuid.uuid4().hex[:12]}"
    answers = sessions.ask(
        "output",
        each={
            node: {"folder": files.output_dir, "probe": probe if node == first else ""} for node in sessions.standing
        },
    )
    path = answers[first]["probe"] if first in answers else ""
    seen: dict[str, bool] = {}
    if path:
        seen = sessions.ask("sees", path=path, each={node: {} for node in sessions.standing if node != first})
        sessions.ask("remove", path=path, each={first: {}})
    return check_output(files, first, {node: answer["writing"] for node, answer in answers.items()}, seen)


def check_output(files: RunFiles, first: str, writing: dict[str, str], seen: dict[str, bool]) -> list[Finding]:
    """`writing`: why each node cannot write to the folder (empty: it can); `seen`: whether the others see what `first`
    wrote.
    """
    found = []
    for node, problem in writing.items():
        if "No space" in problem or "quota" in problem.lower():
            found.append(
                finding(
                    "disk",
                    node,
                    f"output_dir={files.output_dir}: {problem}",
                    f"ssh {node} df -h {files.output_dir}; another output_dir, or make room",
                )
            )
        elif problem:
            found.append(
                finding(
                    "output-not-writable",
                    node,
                    f"output_dir={files.output_dir}: {problem}",
                    f"on {node}: mkdir -p {files.output_dir} && ls -ld {files.output_dir}; chown, remount, or another"
                    " output_dir",
                )
            )
    apart = [node for node, sees in seen.items() if not sees]
    if apart:
        # The last model is gathered on rank 0, so that without checkpoints nothing is lost.
        found.append(
            finding(
                "output-not-shared",
                join(apart),
                f"output_dir={files.output_dir}: a file made on {first} does not show there",
                "mount one network folder (NFS, Lustre ...) there on every node and set output_dir to it; without"
                " checkpoints (--save_strategy no) local disks do",
                severity="error" if files.saves else "note",
            )
        )
    return found


def check_disk(files: RunFiles, facts: dict[str, dict[str, Any]], needed_bytes: int | None) -> list[Finding]:
    """Free space for what the run writes (`needed_bytes`, None where it is not known)."""
    found = []
    for node, one in facts.items():
        free = one["disks"].get(files.output_dir)
        if free is None:
            continue
        if needed_bytes and free < needed_bytes:
            found.append(
                finding(
                    "disk",
                    node,
                    f"output_dir={files.output_dir}: {free / GiB:.1f} GiB free, the run writes about"
                    f" {needed_bytes / GiB:.1f} (weights and checkpoints)",
                    "another output_dir, a smaller save_total_limit, or save_only_model: true",
                )
            )
        elif not needed_bytes and free < FEWEST_FREE_BYTES:
            found.append(
                finding(
                    "disk",
                    node,
                    f"output_dir={files.output_dir}: {free / GiB:.2f} GiB free",
                    f"ssh {node} df -h {files.output_dir}; another output_dir, or make room",
                    severity="warning",
                )
            )
    return found
