"""Evaluates models on data sets: loads each model replicated or sharded, and yields each result as soon as it is known.

_Candidate (known without weights) -> zero -> loaded_for_scoring -> Evaluation of each data set
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.run_folder import FINAL
from dsft.config.deepspeed_json import check_nvme, read_zero_file, stage
from dsft.config.deepspeed_rules import read_sound_file
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.sequences import IGNORED
from dsft.data.sources import FormattedSource
from dsft.data.training_data import check_sources
from dsft.errors import UserError
from dsft.models.build import adapter_base, described_in, is_bare_config, resolve_dtype
from dsft.models.size import ModelFacts, check_positions, measure_model
from dsft.models.tokenizer import check_tokenizer
from dsft.perplexity.identity import fingerprint, model_identity
from dsft.perplexity.loading import loaded_for_scoring
from dsft.perplexity.report import Results
from dsft.perplexity.result import Evaluation
from dsft.perplexity.resume import ResumeLog
from dsft.perplexity.scoring import Perplexity, evaluate_windows
from dsft.perplexity.windows import Windows, build_windows, check_mode
from dsft.planner.evaluation_plan import DEFAULT_BATCH_TOKENS, all_evaluation_plans, choose_evaluation
from dsft.planner.job import Job, attention_of
from dsft.planner.speeds import speeds_of
from dsft.runtime import distributed
from dsft.runtime.disk import check_writable
from dsft.runtime.hardware import Machine, has_gpu, peak_memory_bytes
from dsft.runtime.versions import versions
from dsft.units import padded_width
from dsft.watchdog import client as watchdog

OPTIONS = ("seq_len", "stride", "scope", "bos", "separator", "max_documents", "attn_implementation", "too_long")
"""That change a result, beside mode, dtype and batch_tokens."""


def evaluate(config: EvalConfig, problems: list[str] | None = None, *, progress: bool = False) -> Iterator[Evaluation]:
    """Yield the perplexity of each of `config.model` on each of `config.data`, as they come.

    Collective, after `distributed.start_ranks()`. With an output_dir each is written before it is yielded, and those
    that an earlier evaluation left there are taken over.

    Raises:
        UserError: with all problems of the options, the data and the models' folders, on every rank, before anything is
            loaded.
        TrainingStopped: where a loss is NaN or infinite.
    """
    problems = [] if problems is None else problems
    unset_hf_deepspeed_config()  # of a training earlier in this process: models are measured on the meta device
    check_mode(config.mode, problems)
    if config.output_dir:
        check_writable(config.output_dir, problems)
    if config.zero not in ("auto", "0"):
        _check_zero(config.zero, problems)
    candidates = [_Candidate.of(config, name, problems) for name in config.model]
    data_sets = {source: _read(source, config, candidates, problems) for source in config.data}
    distributed.raise_together([*dict.fromkeys(problems)])
    machine = distributed.smallest_machine()
    results = Results(Path(config.output_dir)) if config.output_dir else None
    for candidate in candidates:
        yield from _evaluate_candidate(candidate, data_sets, machine, results, progress=progress)


def _check_zero(zero: str, problems: list[str]) -> None:
    zero_file = read_sound_file(zero, problems)
    problems += check_nvme(zero_file, zero)
    if zero_file and stage(zero_file) != 3:
        problems.append(
            f"zero={zero}: evaluation holds a full model per rank (0) or shards of stage 3, not of stage"
            f" {stage(zero_file)}"
        )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """Holds a model to evaluate, as far as it is known without its weights."""

    config: Any
    """The EvalConfig with `model` being the one folder or hub id that is loaded."""
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelFacts | None
    """Of the model, of its base where it is an adapter."""

    @classmethod
    def of(cls, config: EvalConfig, model: str, problems: list[str]) -> "_Candidate":
        """Find what `model` means: a run's folder stands for its final model."""
        is_run = (Path(model) / "run.json").is_file()
        config = dataclasses.replace(config, model=str(Path(model) / FINAL) if is_run else model)
        facts = _measure(config, problems)
        return cls(
            config=config,
            tokenizer=check_tokenizer(config, problems) if facts or config.tokenizer else None,
            facts=facts,
        )


def _measure(config: EvalConfig, problems: list[str]) -> ModelFacts | None:
    """Measure the model that `config` names, or the base of an adapter."""
    folder = config.model if is_bare_config(config.model) else described_in(config.model)
    names = ("revision", "trust_remote_code", "attn_implementation")
    options = {name: getattr(config, name) for name in names}
    try:
        facts = measure_model(TrainConfig(model=adapter_base(folder) or folder, **options))
    except UserError as error:
        problems += error.problems
        return None
    problems += check_positions(facts, seq_len=config.seq_len, model=config.model)
    return facts


def _read(source: str, config: EvalConfig, candidates: list[_Candidate], problems: list[str]) -> FormattedSource | None:
    """Read the first rows of a source with the tokenizer of each model."""
    checked = [
        check_sources(
            [source], config, candidate.tokenizer, key="data", split=config.data_split, problems=problems, keep_all=True
        )
        for candidate in candidates
    ]
    return next((sources[0] for sources in checked if sources), None)


def choose_zero(candidate: _Candidate, machine: Machine, dtype: str) -> str:
    """Choose as the planner does: one copy per rank where it fits, else shards of ZeRO-3, else shards in host memory.

    Raises:
        UserError: where nothing fits.
    """
    job = Job(
        size=candidate.facts.size,
        model_config=candidate.facts.config,
        dtype=dtype,
        seq_len=candidate.config.seq_len,
        attention=attention_of(candidate.facts, seq_len=candidate.config.seq_len, padded=False),
    )
    speeds = speeds_of(machine, dtype=job.dtype)
    plans = all_evaluation_plans(job, machine, speeds, batch_tokens=candidate.config.batch_tokens)
    chosen, why = choose_evaluation(plans, machine)
    if not chosen.fits:
        raise UserError(
            [
                f"zero=auto for {candidate.config.model}: {why} Use more GPUs or nodes, a smaller batch_tokens or"
                " seq_len, or set zero yourself"
            ]
        )
    return chosen.zero


def _evaluate_candidate(
    candidate: _Candidate,
    data_sets: dict[str, FormattedSource],
    machine: Machine,
    results: Results | None,
    *,
    progress: bool,
) -> Iterator[Evaluation]:
    config = candidate.config
    dtype = resolve_dtype(config.dtype)
    identity = model_identity(config.model, revision=config.revision, seed=config.seed)
    jobs = []
    for source, data in data_sets.items():
        windows = build_windows(data, config, candidate.tokenizer)
        options = _options(config, windows, dtype)
        jobs.append(_Job(source, windows, options, identity["content"], fingerprint(identity, windows, options)))
    known = {job.source: results and results.known(job.fingerprint, verified=bool(config.verify)) for job in jobs}
    if all(known.values()):
        zero, loading = "", contextlib.nullcontext()
    else:
        zero = choose_zero(candidate, machine, dtype) if config.zero == "auto" else config.zero
        loading = loaded_for_scoring(config, zero, dtype)
    with loading as model:
        for job in jobs:
            evaluation = known[job.source]
            log = None
            if evaluation is None:
                log = ResumeLog(Path(config.output_dir), job.fingerprint) if config.output_dir else None
                evaluation = _evaluate_job(model, candidate, job, zero, machine, log, progress=progress)
            if results:
                results.add(evaluation)
            if log:  # a result that is written needs its parts no longer
                log.remove()
            yield evaluation


@dataclass(frozen=True)
class _Job:
    """Holds one data set for one model."""

    source: str
    windows: Windows
    options: dict[str, Any]
    model_hash: str
    fingerprint: str


def _options(config: Any, windows: Windows, dtype: str) -> dict[str, Any]:
    """Return the options that change a result."""
    batch_tokens = config.batch_tokens or max(padded_width(config.seq_len), DEFAULT_BATCH_TOKENS[has_gpu()])
    options = {name: getattr(config, name) for name in OPTIONS}
    return options | {"dtype": dtype, "mode": windows.mode, "batch_tokens": batch_tokens}


def _evaluate_job(
    model: nn.Module,
    candidate: _Candidate,
    job: _Job,
    zero: str,
    machine: Machine,
    log: ResumeLog | None,
    *,
    progress: bool,
) -> Evaluation:
    config = candidate.config
    with watchdog.phase("evaluating"):
        start = time.perf_counter()
        result = evaluate_windows(
            model,
            job.windows,
            pad_token_id=candidate.tokenizer.pad_token_id,
            batch_tokens=job.options["batch_tokens"],
            device=distributed.device(),
            collective_forward=zero != "0",
            log=log,
            progress=progress and distributed.rank() == 0,
        )
        seconds = time.perf_counter() - start
        difference = verify(model, job.windows, result, config.verify, seed=config.seed) if config.verify else None
    return Evaluation(
        perplexity=result,
        model=config.model,
        data=job.source,
        mode=job.windows.mode,
        options=job.options,
        zero=zero,
        ranks=distributed.world_size(),
        machine=str(machine),
        truncated_documents=job.windows.truncated_documents,
        seconds=seconds,
        model_hash=job.model_hash,
        fingerprint=job.fingerprint,
        versions=versions(),
        verified_difference=difference,
        peak_memory_bytes={name: int(distributed.max_over_ranks(value)) for name, value in peak_memory_bytes().items()},
    )


@torch.no_grad()
def verify(model: nn.Module, windows: Windows, result: Perplexity, number: int, *, seed: int) -> float:
    """Score `number` random documents again, each window alone with full logits, and compare their nats.

    Returns the largest relative difference. Every rank does the same work, so that it holds for a sharded model too.
    Collective under ZeRO-3.
    """
    scored = [document for document, tokens in enumerate(result.document_tokens) if tokens]
    chosen = set(random.Random(seed).sample(scored, min(number, len(scored))))
    plain = dict.fromkeys(chosen, 0.0)
    for window in range(len(windows.spans)):
        documents, counts = windows.pieces(window)
        if chosen.isdisjoint(documents.tolist()):
            continue
        watchdog.heartbeat()
        ids, targets = (
            torch.from_numpy(array.astype("int64")).to(distributed.device())
            for array in windows.inputs_and_targets(window)
        )
        log_probs_TV = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        is_scored_T = targets != IGNORED
        nats = -log_probs_TV[is_scored_T].gather(1, targets[is_scored_T][:, None])[:, 0].double().cpu()
        for document, part in zip(documents.tolist(), nats.split(counts.tolist()), strict=True):
            if document in plain:
                plain[document] += part.sum().item()
    return max(abs(result.document_nats[document] - nats) / max(abs(nats), 1e-12) for document, nats in plain.items())
