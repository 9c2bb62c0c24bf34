"""Reads what is known of a run: run.json, metrics.jsonl, checkpoints, and the evaluations beside it.

A run that is still running, stopped early or was killed has less of it; nothing here asks for the rest.
"""

import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from dsft.checkpoints.manifest import TRAINER_STATE, checkpoints, read_trainer_state
from dsft.checkpoints.run_folder import FINAL, METRICS, RUN, is_run, path_of, read_options_of_run, read_run
from dsft.errors import UserError, raise_if_any
from dsft.perplexity.results import REPORTS, Results
from dsft.runtime.console import say
from dsft.runtime.disk import is_held

ANSWERS = "answers.jsonl"
"""Beside an evaluation's results: a row has "prompt", and for each model its name and its answer."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint that is there, with the held-out perplexity that training logged at its step."""

    name: str
    step: int
    tokens_seen: int  # over all ranks, without padding
    evaluation: dict[str, float]  # the log entry of its step with eval_perplexity; empty where there is none


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One result of `dsft eval`."""

    run: str  # name of the run whose model it is; empty for another model, such as the base
    model: str  # as a person would call it: checkpoint-60, final, or the path of another
    tokens_seen: int | None  # of the model, over all ranks; None where that is not known
    report: dict[str, Any]  # of perplexity.json
    documents: list[dict[str, Any]]
    """Rows of documents.parquet that have scored tokens, from the fewest nats per token to the most."""

    @property
    def title(self) -> str:
        return f"{self.run}/{self.model}" if self.run else self.model


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as it came."""

    name: str  # the shortest end of its path that no other run of the report has
    folder: Path
    facts: dict[str, Any]  # the content of run.json
    log: list[dict[str, Any]]  # one entry for each time that training logged, as in metrics.jsonl
    checkpoints: list[Checkpoint]

    @property
    def results(self) -> dict[str, Any]:
        """What the end wrote; empty before any, and where training was started again after it."""
        return {} if self.facts.get("status") in ("running", "failed") else self.facts.get("results") or {}

    @property
    def status(self) -> str:
        """As the run has written it, or killed where it could not."""
        status = self.facts.get("status", "running")
        return "killed" if status == "running" and not is_held(self.folder) else status

    @property
    def total_seconds(self) -> float:
        """Since training was last started, without loading; 0 before anything was timed."""
        return self.results.get("seconds") or next(reversed(self.values("train_runtime")), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Where `total_seconds` went; empty before anything was timed."""
        timed = [index for index, entry in enumerate(self.log) if "train_runtime" in entry]
        restarts = [
            earlier + 1
            for earlier, later in pairwise(timed)  # the clock of training starts at 0 each time
            if self.log[later]["train_runtime"] < self.log[earlier]["train_runtime"]
        ]
        attempt, total = self.log[restarts[-1] if restarts else 0 :], self.total_seconds
        saving = [entry.get("save_seconds", 0.0) for entry in attempt]  # which a run that still runs has alone
        stalls = {
            "waiting for data": sum(entry.get("data_wait_seconds", 0.0) for entry in attempt),
            "evaluation": sum(entry.get("eval_runtime", 0.0) for entry in attempt),
            "saving": self.results.get("saves", {}).get("seconds") or max(saving, default=0.0),
        }
        return {"training": max(total - sum(stalls.values()), 0.0)} | stalls if total else {}

    def values(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log if entry.get(name) is not None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a page shows."""

    runs: list[Run]
    evaluations: list[Measured]
    answers: list[dict[str, str]]  # of the evaluations' folders: the prompt, and what each model answers, by its name

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Name -> how to show it beside loss and perplexity, as run.json has it (InReport in training/metrics.py)."""
        return {name: shown for run in self.runs for name, shown in run.facts.get("metrics", {}).items()}

    def parts(self, kind: Literal["source", "eval"]) -> dict[str, str]:
        """Sources of what was trained, or sets of what was held out -> the metric that has their loss."""
        logged = dict.fromkeys(name for run in self.runs for entry in run.log for name in entry)
        return {match[1]: name for name in logged if (match := re.fullmatch(f"{kind}_(.+)_loss", name))}


def read_report(folders: list[str]) -> Report:
    """Read runs, and the evaluations of their models in their folders and beside them; a folder of an evaluation may
    stand among those of runs, and is taken whole.
    """
    paths = list(dict.fromkeys(Path(folder).expanduser() for folder in folders))
    named = [path for path in paths if not is_run(path) and (path / REPORTS).is_file()]
    run_folders = [path for path in paths if path not in named]
    problems = [
        f"{path}: holds neither {RUN} nor {REPORTS}; name the output_dir of a training"
        for path in run_folders
        if not is_run(path)
    ]
    if not run_folders:
        problems.append(f"{', '.join(folders)}: holds an evaluation, and no run is named")
    raise_if_any(problems)
    parts = [folder.resolve().parts for folder in run_folders]
    shortened = (["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts))))
    names = next((names for names in shortened if len(set(names)) == len(names)), [str(path) for path in run_folders])
    runs = []
    for folder, name in zip(run_folders, names, strict=True):
        try:
            read_options_of_run(str(folder))  # without them it is no run of dsft
            facts = read_run(str(folder))
            path, log = folder / METRICS, []
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
            for entry in (json.loads(line) for line in lines if line.endswith("\n")):  # a kill may cut off the last
                # Values that are NaN or infinite are left out, such as the gradient norm of a skipped step.
                known = {key: value for key, value in entry.items() if value is not None}
                log.append({key: value for key, value in known.items() if isinstance(value, str) or isfinite(value)})
            evaluated: dict[int, dict[str, float]] = {}
            for entry in log:
                if "eval_perplexity" in entry:  # with load_best_model_at_end the last step's second one is of the best
                    evaluated.setdefault(entry["step"], entry)
            saved = []
            for path in checkpoints(folder):
                if not (path / TRAINER_STATE).is_file():  # a checkpoint that is damaged, or was removed just now
                    continue
                state = read_trainer_state(path)
                step, tokens_seen = state["global_step"], state.get("num_input_tokens_seen", 0)
                entry = evaluated.get(step, {})
                saved.append(Checkpoint(name=path.name, step=step, tokens_seen=tokens_seen, evaluation=entry))
        except ValueError as error:
            raise UserError(f"{folder}: {RUN}, {METRICS} or a {TRAINER_STATE} cannot be read ({error})") from None
        runs.append(Run(name=name, folder=folder, facts=facts, log=log, checkpoints=saved))

    named, evaluations, answers = [path.resolve() for path in named], [], []
    beside = []
    for folder in run_folders:
        around = folder.resolve().parent  # where others may keep what this user may not read
        siblings = sorted(around.iterdir()) if os.access(around, os.R_OK) else []
        paths = (folder, *sorted(folder.iterdir()), *siblings)
        beside += [path.resolve() for path in paths if os.path.isfile(path / REPORTS)]
    for folder in dict.fromkeys((*named, *beside)):
        try:
            results, measured = Results(folder), []
        except UserError as error:
            if folder in named:
                raise
            say(f"note: the report is without what lies beside the runs: {error}")
            continue
        for key, report in results.reports.items():
            name, model, tokens_seen = _model_of(report["model"], runs)
            rows = [row for row in results.documents[key].to_pylist() if row["tokens"]]
            rows.sort(key=lambda row: row["nats"] / row["tokens"])
            measured.append(Measured(run=name, model=model, tokens_seen=tokens_seen, report=report, documents=rows))
        if folder in named or any(item.run for item in measured):
            evaluations += measured
            answers += _read_answers(folder / ANSWERS)
    return Report(runs=runs, evaluations=evaluations, answers=answers)


def _read_answers(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    rows = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError:
                row = line
            if row is not None and not (isinstance(row, dict) and all(isinstance(text, str) for text in row.values())):
                raise UserError(f"{path}: line {number} is no JSON object of texts; correct it, or rename the file")
            rows += [row] if row else []
    return rows


def _model_of(model: str, runs: list[Run]) -> tuple[str, str, int | None]:
    """Find whose model a result is of: run, the model's name there, tokens seen; ("", model, None) if no run's."""
    for run in runs:
        path, root = Path(path_of(model, str(run.folder))).resolve(), run.folder.resolve()
        if not path.is_relative_to(root):
            continue
        tokens = {checkpoint.name: checkpoint.tokens_seen for checkpoint in run.checkpoints}
        results = run.facts.get("results") or {}  # of the end that wrote final/
        best = results.get("best_checkpoint")
        if path != root and (name := str(path.relative_to(root))) != FINAL:
            return run.name, name, tokens.get(name.partition("/")[0])  # also of the shards in a checkpoint
        if best and run.facts["config"].get("load_best_model_at_end"):
            return run.name, FINAL, tokens.get(Path(best).name)
        return run.name, FINAL, results.get("tokens_seen")
    return "", model, None
