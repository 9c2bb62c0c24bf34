"""What trainings and evaluations ran, from the files that they wrote; makes benchmarks/support.md of it.

    scripts/test --support cpu_py311                 after the tests, where all passed: benchmarks/results/support/
    python scripts/support.py > benchmarks/support.md      the page, from all sessions that are kept

A fact is read from run.json of a training that is done, and from perplexity.json of an evaluation: nobody writes one
down. A fault that tests cause on purpose leaves no run that is done. What is not in the page was not tried.
"""

import contextlib
import json
import re
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SESSIONS = ROOT / "benchmarks" / "results" / "support"
METHODS = ("full", "LoRA", "DoRA", "QLoRA")
DEEDS = ("train", "resume", "evaluate", "export")
HEAD = """# What was tried, and where

Made by `python scripts/support.py` from what the tests' own runs wrote: the options in run.json and perplexity.json.
Every session of tests below passed all of them. Those of no tests are single runs, or a quickstart. Nothing here is a
claim by hand; an empty cell was not tried.

- **train**: the training was done.
- **resume**: the same, from a checkpoint.
- **evaluate**: perplexity of held-out data on the way, or of the run's folder afterwards.
- **export**: `final/` was written as a plain folder, read back and counted.
- In brackets: the largest number of ranks. After the semicolon: how many runs.
- CPU ranks and GPUs have tables of their own. Each GPU was alone: NCCL between GPUs is open.
  `scripts/test --gpu` tries them ([gpus.md](gpus.md))."""


def read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def architecture(*folders: str | None) -> str | None:
    """Returns the model_type of the first config.json of these folders, which may also be such a file."""
    paths = [Path(folder) for folder in folders if folder]
    configs = (read_json(path if path.suffix == ".json" else path / "config.json") for path in paths)
    return next((config["model_type"] for config in configs if "model_type" in config), None)


def zero_of(run: dict[str, Any]) -> str:
    """Returns the configuration's name; of a DeepSpeed JSON of one's own its stage."""
    zero = run["plan"]["zero"]
    stage = (run["deepspeed"] or {}).get("zero_optimization", {}).get("stage", 0)
    return f"a JSON of one's own, stage {stage}" if zero.endswith(".json") else zero


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """Lists what the runs below a folder did."""
    scored = {
        str(Path(result["model"]).resolve())
        for path in folder.rglob("perplexity.json")
        for result in read_json(path).get("results", [])
        if isinstance(result, dict) and isinstance(result.get("model"), str)
    }
    facts = []
    for path in folder.rglob("run.json"):
        run = read_json(path)
        machine = re.match(r"(\d+) nodes? x (\d+) (.*?) of ", run.get("machine", ""))
        if run.get("status") != "done" or not machine:
            continue
        config, results, final = run["config"], run.get("results") or {}, path.parent / "final"
        method = config["method"]
        deeds = {
            "train": True,
            "resume": bool(config.get("resume_from_checkpoint")),
            "evaluate": "eval_perplexity" in results
            or not scored.isdisjoint({str(path.parent.resolve()), str(final.resolve())}),
            "export": bool(results.get("final_model")) and final.is_dir(),
        }
        facts.append(
            {
                "architecture": architecture(str(final), config["model"]),
                "method": "DoRA" if config["use_dora"] else {"full": "full", "lora": "LoRA"}.get(method, "QLoRA"),
                "zero": zero_of(run),
                "ranks": run["world_size"],
                "nodes": int(machine[1]),
                "devices": machine[3],
                "launchers": run.get("launchers", []),
                "versions": {name: version for name, version in run["versions"].items() if name != "dsft"},
                "deeds": [deed for deed in DEEDS if deeds[deed]],
            }
        )
    return facts


def record(name: str, folder: Path, words: list[str], num_tests: int) -> None:
    """Keeps the facts of a session of tests, equal ones once with their number."""
    counted: dict[str, int] = defaultdict(int)
    versions: dict[str, set[str]] = defaultdict(set)
    for fact in facts_of(folder):
        for library, version in fact.pop("versions").items():
            versions[library].add(version)
        counted[json.dumps(fact, sort_keys=True)] += 1
    session = {
        "date": datetime.now(UTC).date().isoformat(),
        "tests": num_tests,
        "pytest": words,
        "versions": {library: sorted(each) for library, each in sorted(versions.items())},
        "facts": [json.loads(fact) | {"runs": number} for fact, number in sorted(counted.items())],
    }
    SESSIONS.mkdir(parents=True, exist_ok=True)
    # A fact a line, so that a change is one.
    lines = ",\n".join(f"  {json.dumps(fact)}" for fact in session.pop("facts"))
    head = json.dumps(session)[:-1]
    (SESSIONS / f"{name}.json").write_text(f'{head}, "facts": [\n{lines}\n]}}\n', encoding="utf-8")


def launched_by(fact: dict[str, Any]) -> str:
    """Returns the launcher's name of its programs."""
    programs = " ".join(fact["launchers"])
    for name in ("accelerate", "torchrun", "deepspeed", "mpirun", "srun"):
        if name in programs or (name == "torchrun" and "torch.distributed" in programs):
            return name
    return "none: one process, or ranks that a test forked"


def cell(facts: list[dict[str, Any]]) -> str:
    """Writes which deeds facts prove, each with the largest number of ranks, and the number of runs."""
    words = []
    for deed in DEEDS:
        if ranks := [fact["ranks"] for fact in facts if deed in fact["deeds"]]:
            words.append(f"{deed} ({max(ranks)})")
    return f"{', '.join(words)}; {sum(fact['runs'] for fact in facts)}" if words else ""


def crossed(facts: list[dict[str, Any]], row: str, column: str, title: str) -> str:
    """Writes the table of two fields of facts."""
    at: dict[tuple[str, str], list] = defaultdict(list)
    for fact in facts:
        at[str(fact[row]), str(fact[column])].append(fact)
    columns = METHODS if column == "method" else sorted({name for _, name in at})
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in sorted({name for name, _ in at}):
        lines.append(f"| {name} | {' | '.join(cell(at[name, other]) for other in columns)} |")
    return "\n".join(lines)


def page() -> str:
    """Returns the text of benchmarks/support.md."""
    sessions = {path.stem: read_json(path) for path in sorted(SESSIONS.glob("*.json"))}
    facts = [fact for session in sessions.values() for fact in session["facts"] if fact["architecture"]]
    for fact in facts:
        fact["launcher"] = launched_by(fact)
        several = "test hosts (namespaces of one machine)" if fact["nodes"] > 1 else "one machine"
        fact["where"] = several if "CPU" in fact["devices"] else f"GPU: {fact['devices']}"
    on_gpus = [fact for fact in facts if fact["where"].startswith("GPU")]
    on_cpus = [fact for fact in facts if fact not in on_gpus]
    parts = [HEAD, "## Methods and ZeRO, on CPU ranks", crossed(on_cpus, "zero", "method", "zero")]
    parts += ["## Methods and ZeRO, on one GPU", crossed(on_gpus, "zero", "method", "zero")]
    parts += ["## Architectures", crossed(facts, "architecture", "method", "model_type")]
    parts += ["## Launchers", crossed(facts, "launcher", "where", "launcher")]
    versions: dict[str, set[str]] = defaultdict(set)
    for session in sessions.values():
        for name, numbers in session["versions"].items():
            versions[name] |= {*numbers}
    lines = [f"| {name} | {', '.join(sorted(each))} |" for name, each in sorted(versions.items())]
    parts += ["## Versions", "\n".join(["| library | versions |", "|---|---|", *lines])]
    lines = [
        f"| {name} | {session['date']} | {session['tests']} | {sum(fact['runs'] for fact in session['facts'])} |"
        f" `{' '.join(session['pytest'])}` |"
        for name, session in sessions.items()
    ]
    parts += [
        "## Sessions",
        "\n".join(["| session | date | tests | runs that were done | pytest, or the runs |", "|---" * 5 + "|", *lines]),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
