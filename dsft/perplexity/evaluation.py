"""Evaluates models on data sets: loads each model replicated or sharded, and yields each result as soon as it is known.

Candidate (known without weights) -> zero -> loaded_for_scoring -> Evaluation of each data set
"""

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.verification import verify_weights
from dsft.config.deepspeed_json import check_nvme, read_zero_file, stage
from dsft.config.deepspeed_rules import read_sound_file
from dsft.config.options import UNQUANTISED, EvalConfig, common_options
from dsft.data.sequences import IGNORED
from dsft.data.sources import FormattedSource
from dsft.errors import raise_if_any
from dsft.models.build import resolve_dtype
from dsft.models.quantization import Quantization
from dsft.models.size import check_sharding
from dsft.perplexity.breakdown import Breakdown, build_breakdown
from dsft.perplexity.candidates import Candidate, choose_zero, read_data
from dsft.perplexity.exact_products import exact_products
from dsft.perplexity.identity import QUANTIZERS, fingerprint, model_identity, with_bases
from dsft.perplexity.kl import ChangeHistogram, divergence_of, refusal_of_pair
from dsft.perplexity.loading import loaded_for_scoring
from dsft.perplexity.modes import build_windows, check_mode
from dsft.perplexity.out_of_memory import out_of_memory_explained
from dsft.perplexity.recording import Recorder
from dsft.perplexity.report import Results
from dsft.perplexity.result import Evaluation
from dsft.perplexity.resume import ResumeLog
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.sequence_parallel import team_of
from dsft.perplexity.sequence_parallel_checks import refused_models
from dsft.perplexity.sums import Perplexity
from dsft.perplexity.windows import Windows
from dsft.planner.evaluation_plan import DEFAULT_BATCH_TOKENS
from dsft.planner.ulysses import refused_number
from dsft.runtime import distributed
from dsft.runtime.agreement import SAME_FILES, require_agreement, require_same_start
from dsft.runtime.console import say
from dsft.runtime.disk import check_writable
from dsft.runtime.hardware import Machine, has_gpu, peak_memory_bytes
from dsft.runtime.run_lock import only_run_in, wait_for_a_killed_run
from dsft.runtime.versions import versions
from dsft.units import padded_width
from dsft.watchdog import client as watchdog

OPTIONS = (
    *("protocol", "seq_len", "stride", "scope", "bos", "separator", "max_documents", "attn_implementation", "too_long"),
    *("group_by", "save_tokens", "sequence_parallel"),
)
"""That change a result or what is kept of it, beside mode, dtype, quantization and batch_tokens."""
TOKENS = "tokens.parquet"
"""Folder in output_dir."""


def evaluate(config: EvalConfig, problems: list[str] | None = None, *, progress: bool = False) -> Iterator[Evaluation]:
    """Yield the perplexity of each of `config.model` on each of `config.data`, as they come.

    Collective, after `distributed.start_ranks()`. With an output_dir each is written before it is yielded, and those
    that an earlier evaluation left there are taken over.

    Raises:
        UserError: with all problems of the options, the data and the models' folders, on every rank, before anything is
            loaded; or where another evaluation, or a training, writes into output_dir now.
        TrainingStopped: where a loss is NaN or infinite.
    """
    with only_run_in(config.output_dir) as left_lock:
        if left_lock:
            wait_for_a_killed_run()
        yield from _evaluate(config, [] if problems is None else problems, progress=progress)


def _evaluate(config: EvalConfig, problems: list[str], *, progress: bool) -> Iterator[Evaluation]:
    if config.run or config.context_curve:
        distributed.raise_together(problems)  # without the run, or the lengths, nothing else can be said
    require_same_start(common_options(config), problems)
    unset_hf_deepspeed_config()  # of a training earlier in this process: models are measured on the meta device
    check_mode(config.mode, problems)
    if config.output_dir:
        check_writable(config.output_dir, problems)
    if refusal := refused_number(config.sequence_parallel, distributed.world_size()):
        problems.append(refusal)
    if config.zero not in ("auto", "0"):
        _check_zero(config.zero, problems)
    named = [Candidate.of(config, name, problems) for name in config.model]
    candidates = [each for model in named for each in model.in_formats(config.quantization, problems)]
    reference = Candidate.of(config, config.reference, problems, key="reference") if config.reference else None
    if reference:
        reference.in_formats([], problems)
    data_sets = {source: read_data(source, config, named, problems) for source in config.data}
    distributed.raise_together([*dict.fromkeys(problems)])
    if reference:
        distributed.raise_together([line for each in named if (line := refusal_of_pair(each, reference))])
    _note_formats(config, named)
    models = [*named, *([reference] if reference else [])]
    distributed.raise_together(refused_models(models))
    distributed.raise_together([problem for model in models for problem in model.check_weights(local=False)])
    machine = distributed.smallest_machine()
    results = Results(Path(config.output_dir)) if config.output_dir else None
    verify_once = functools.cache(verify_weights)  # once for all of a model's formats
    for candidate in candidates:
        yield from _evaluate_candidate(
            candidate, reference, data_sets, machine, results, verify_once=verify_once, progress=progress
        )


def _note_formats(config: EvalConfig, models: list[Candidate]) -> None:
    for model in models:
        on_disk = model.facts.size.quantization
        if on_disk and {*config.quantization} - {UNQUANTISED}:
            say(f"note: {model.config.model} is quantised on disk ({on_disk.format}) and evaluated as it lies")


def _check_zero(zero: str, problems: list[str]) -> None:
    zero_file = read_sound_file(zero, problems)
    problems += check_nvme(zero_file, zero)
    if zero_file and stage(zero_file) != 3:
        problems.append(
            f"zero={zero}: evaluation holds a full model per rank (0) or shards of stage 3, not of stage"
            f" {stage(zero_file)}"
        )


def _evaluate_candidate(
    candidate: Candidate,
    reference: Candidate | None,
    data_sets: dict[str, FormattedSource],
    machine: Machine,
    results: Results | None,
    *,
    verify_once: Callable[[str], None],
    progress: bool,
) -> Iterator[Evaluation]:
    config = candidate.config
    dtype = resolve_dtype(config.dtype)
    jobs = _jobs(candidate, reference, data_sets, dtype, progress=progress)
    facts = {f"tokens of {job.name}": job.fingerprint for job in jobs}
    facts |= {f"files of {job.config.model}": job.model_hash for job in jobs}
    require_agreement({SAME_FILES: facts | {f"content of {config.zero}": read_zero_file(config.zero, [])}})
    known = {job.name: results and results.known(job.fingerprint, verified=bool(config.verify)) for job in jobs}
    candidates = [candidate, *([reference] if reference else [])]
    with contextlib.ExitStack() as stack:
        if not all(known.values()):
            for each in candidates:
                for model in with_bases(each.config.model):
                    verify_once(model)
            with out_of_memory_explained(config, "loading"):
                loaded = _load(candidates, machine, dtype, stack)
        for job in jobs:
            evaluation = known[job.name]
            log = None
            if evaluation is None:
                log = ResumeLog(Path(config.output_dir), job.fingerprint) if config.output_dir else None
                with out_of_memory_explained(config, "scoring"):
                    evaluation = _evaluate_job(loaded, candidate, job, machine, log, progress=progress)
            if results:
                results.add(evaluation)
            if log:  # a result that is written needs its parts no longer
                log.remove()
            yield evaluation


@dataclass(frozen=True)
class _Loaded:
    """Holds the model to evaluate, and the reference where there is one."""

    models: tuple[nn.Module, nn.Module | None]
    zero: list[str]


def _load(candidates: list[Candidate], machine: Machine, dtype: str, stack: contextlib.ExitStack) -> _Loaded:
    """Load a model, and a reference after it, until the stack is closed. Collective."""
    share = len(candidates)  # of the memory
    machine = replace(machine, device_bytes=machine.device_bytes // share, host_bytes=machine.host_bytes // share)
    zero = distributed.on_rank_0(  # whose measured speeds may differ from another host's
        lambda: [
            choose_zero(each, machine, dtype) if each.config.zero == "auto" else each.config.zero for each in candidates
        ]
    )
    for each, name in zip(candidates, zero, strict=True):
        stage = 0 if name == "0" else 3
        raise_if_any(check_sharding(each.facts.size, stage=stage, model=each.config.model))
    models: list[nn.Module] = [None] * share
    # Sharded ones last: while one is loaded, transformers would shard every other that it loads.
    for place in sorted(range(share), key=lambda place: zero[place] != "0"):
        each = candidates[place]
        models[place] = stack.enter_context(
            loaded_for_scoring(each.config, zero[place], dtype, each.facts.size.quantization)
        )
    return _Loaded((models[0], models[1] if share == 2 else None), zero)


@dataclass(frozen=True)
class _Job:
    """Holds one data set for one model, by one protocol."""

    source: str
    config: EvalConfig
    windows: Windows
    breakdown: Breakdown | None
    options: dict[str, Any]
    model_hash: str
    hashes: dict[str, str]
    fingerprint: str

    @property
    def name(self) -> str:
        protocol = self.options["protocol"]
        return f"{self.source} by {protocol}" if protocol else self.source

    @property
    def tokens_folder(self) -> Path | None:
        return Path(self.config.output_dir) / TOKENS / self.fingerprint[:16] if self.config.save_tokens else None


def _jobs(
    candidate: Candidate,
    reference: Candidate | None,
    data_sets: dict[str, FormattedSource],
    dtype: str,
    *,
    progress: bool,
) -> list[_Job]:
    """Prepare every data set, in every protocol. Collective."""
    prepared = [
        (source, config, build_windows(data, config, candidate.tokenizer, show_progress=progress))
        for source, data in data_sets.items()
        for config in candidate.configs()
    ]
    distributed.wait_long("prepared")  # nodes with caches of their own take their own time
    identity = _identity(candidate)
    model_hash = identity["content"]
    if reference:
        identity |= {f"reference {name}": value for name, value in _identity(reference).items()}
    jobs = []
    for source, config, windows in prepared:
        options, hashes = _options(config, windows, dtype, candidate.facts.size.quantization), windows.hashes()
        breakdown = build_breakdown(data_sets[source], config, candidate.tokenizer, windows)
        print_of_job = fingerprint(identity, hashes, options)
        jobs.append(_Job(source, config, windows, breakdown, options, model_hash, hashes, print_of_job))
    return jobs


def _identity(candidate: Candidate) -> dict[str, str]:
    config = candidate.config
    return model_identity(config.model, revision=config.revision, seed=config.seed)


def _options(config: EvalConfig, windows: Windows, dtype: str, quantization: Quantization | None) -> dict[str, Any]:
    """Return the options that change a result."""
    batch_tokens = config.batch_tokens or max(padded_width(config.seq_len), DEFAULT_BATCH_TOKENS[has_gpu()])
    options = {name: getattr(config, name) for name in OPTIONS}
    options |= {"dtype": dtype, "mode": windows.mode, "batch_tokens": batch_tokens}
    return options | {"quantization": str(quantization or UNQUANTISED)}


def _evaluate_job(
    loaded: _Loaded, candidate: Candidate, job: _Job, machine: Machine, log: ResumeLog | None, *, progress: bool
) -> Evaluation:
    config = job.config
    model, reference = loaded.models
    histogram = ChangeHistogram() if reference is not None else None
    observers = [observer for observer in (job.breakdown, histogram) if observer]
    recorder = Recorder(job.windows, log=log, observers=observers, tokens=job.tokens_folder)
    with watchdog.phase("evaluating"):
        start = time.perf_counter()
        result = evaluate_windows(
            model,
            job.windows,
            pad_token_id=candidate.tokenizer.pad_token_id,
            batch_tokens=job.options["batch_tokens"],
            device=distributed.device(),
            collective_forward=set(loaded.zero) != {"0"},
            reference=reference,
            recorder=recorder,
            team=team_of(config.sequence_parallel),
            progress=progress and distributed.rank() == 0,
        )
        seconds = time.perf_counter() - start
        difference = verify(model, job.windows, result, config.verify, seed=config.seed) if config.verify else None
    return Evaluation(
        perplexity=result,
        model=candidate.name,
        data=job.source,
        protocol=job.options["protocol"],
        mode=job.windows.mode,
        options=job.options,
        zero=loaded.zero[0],
        ranks=distributed.world_size(),
        machine=str(machine),
        groups=job.breakdown.report() if job.breakdown else {},
        divergence=divergence_of(result, config.reference, histogram) if histogram else None,
        tokens_folder=job.tokens_folder and str(job.tokens_folder),
        truncated_documents=job.windows.truncated_documents,
        seconds=seconds,
        model_hash=job.model_hash,
        hashes=job.hashes,
        fingerprint=job.fingerprint,
        versions=versions(*QUANTIZERS) if job.options["quantization"] != UNQUANTISED else versions(),
        verified_difference=difference,
        peak_memory_bytes=_peaks(),
    )


def _peaks() -> dict[str, int]:
    return {name: int(distributed.max_over_ranks(value)) for name, value in peak_memory_bytes().items()}


@torch.no_grad()
@exact_products()
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
