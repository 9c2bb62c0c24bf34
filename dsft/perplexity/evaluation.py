"""Evaluates models on data sets: loads each model replicated or sharded, and yields each result as soon as it is known.

Candidate (known without weights) -> zero -> loaded_for_scoring -> Evaluation of each data set

A result has a fingerprint of all that it depends on, so that an evaluation that resumes or takes over results never
mixes two models: the files of the model (of an adapter and of its base), the tokens with their windows, the options,
the versions of the libraries, and the kind of device.
"""

import contextlib
import functools
import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.readback import verify_weights
from dsft.config.deepspeed import check_nvme, read_sound_file, read_zero_file, stage
from dsft.config.options import UNQUANTISED, EvalConfig, common_options
from dsft.data.formats import FormattedSource
from dsft.data.sources import HeldOut
from dsft.data.training_data import check_sources
from dsft.errors import one_line, raise_if_any
from dsft.models.build import resolve_dtype
from dsft.models.quantization import PACKAGES
from dsft.models.size import check_sharding
from dsft.perplexity.breakdown import Breakdown, build_breakdown
from dsft.perplexity.documents import build_windows
from dsft.perplexity.kl import ChangeHistogram, divergence_of, refusal_of_pair
from dsft.perplexity.loading import Candidate, choose_zero, loaded_for_scoring, model_identity, with_bases
from dsft.perplexity.modes import WINDOW_OPTIONS, mode_problems
from dsft.perplexity.results import Evaluation, Recorder, Results, ResumeLog
from dsft.perplexity.scoring import evaluate_windows, exact_products
from dsft.perplexity.sequence_parallel import refused_model, team_of
from dsft.perplexity.sums import Perplexity
from dsft.perplexity.windows import Windows
from dsft.planner.evaluation_plan import default_batch_tokens, refused_number
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.runtime.disk import check_writable
from dsft.runtime.distributed import SAME_FILES, only_run_in, require_agreement, require_same_start
from dsft.runtime.hardware import (
    Machine,
    Memory,
    has_gpu,
    memory_errors_explained,
    peak_memory_bytes,
    wait_for_freed_gpu,
)
from dsft.runtime.versions import versions
from dsft.units import IGNORED, GiB
from dsft.watchdog import client as watchdog

TOKENS = "tokens.parquet"
"""Folder in output_dir."""
HOW_OPTIONS = (
    *("dtype", "quantization", "batch_tokens", "attn_implementation", "sequence_parallel"),
    *("max_documents", "group_by", "save_tokens"),
)
"""Options that say how a result was computed and what is kept of it."""


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
            wait_for_freed_gpu()
        candidates, reference, data_sets = _check(config, problems or [])
        machine, dtype = distributed.smallest_machine(), resolve_dtype(config.dtype)
        results = Results(Path(config.output_dir)) if config.output_dir else None
        verify_once = functools.cache(verify_weights)  # once for all of a model's formats
        for candidate in candidates:
            jobs = _jobs(candidate, reference, data_sets, dtype, progress=progress)
            facts = {f"tokens of {job.name}": job.fingerprint for job in jobs}
            facts |= {f"files of {job.config.model}": job.model_hash for job in jobs}
            facts |= {f"content of {config.zero}": read_zero_file(config.zero, [])}
            require_agreement({SAME_FILES: facts})
            known = {job.name: results and results.known(job.fingerprint, verified=bool(config.verify)) for job in jobs}
            loaded = [candidate, *([reference] if reference else [])]
            with contextlib.ExitStack() as stack:
                if not all(known.values()):
                    for each in loaded:
                        for model in with_bases(each.config.model):
                            verify_once(model)
                    with _out_of_memory_explained(candidate.config, "loading"):
                        models, zero = _load(loaded, machine, dtype, stack)
                for job in jobs:
                    evaluation = known[job.name]
                    log = None
                    if evaluation is None:
                        log = ResumeLog(Path(config.output_dir), job.fingerprint) if config.output_dir else None
                        with _out_of_memory_explained(candidate.config, "scoring"):
                            evaluation = _evaluate_job(models, zero, candidate, job, machine, log, progress=progress)
                    if results:
                        results.add(evaluation)
                    if log:  # a result that is written needs its parts no longer
                        log.remove()
                    yield evaluation


def _check(
    config: EvalConfig, problems: list[str]
) -> tuple[list[Candidate], Candidate | None, dict[str, FormattedSource]]:
    """Return the models in each of their formats, the reference, and the data sets, before weights load. Collective.

    Raises:
        UserError: with all problems.
    """
    problems += mode_problems(config)
    if config.run or config.context_curve:
        distributed.raise_together(problems)  # without the run, or the lengths, nothing else can be said
    require_same_start(common_options(config), problems)
    unset_hf_deepspeed_config()  # of a training earlier in this process: models are measured on the meta device
    if config.output_dir:
        check_writable(config.output_dir, problems)
    if refusal := refused_number(config.sequence_parallel, distributed.world_size()):
        problems.append(refusal)
    if config.zero not in ("auto", "0"):
        zero_file = read_sound_file(config.zero, problems)
        problems += check_nvme(zero_file, config.zero)
        if zero_file and stage(zero_file) != 3:
            problems.append(
                f"zero={config.zero}: evaluation holds a full model per rank (0) or shards of stage 3, not of stage"
                f" {stage(zero_file)}"
            )
    models = [Candidate.of(config, name, problems) for name in config.model]
    in_formats = [each for model in models for each in model.in_formats(config.quantization, problems)]
    reference = Candidate.of(config, config.reference, problems, key="reference") if config.reference else None
    if reference:
        reference.in_formats([], problems)
    data_sets = {}
    for source in config.data:  # with the tokenizer of each model
        how = {"key": "data", "split": config.data_split, "problems": problems, "keep_all": True}
        checked = [check_sources([source], config, model.tokenizer, **how) for model in models]
        data = next((sources[0] for sources in checked if sources), None)
        if data and config.eval_fraction:
            share = HeldOut(fraction=config.eval_fraction, seed=config.data_seed, wanted=True)
            data = replace(data, held_out=share)
        data_sets[source] = data
    distributed.raise_together([*dict.fromkeys(problems)])
    if reference:
        distributed.raise_together([line for each in models if (line := refusal_of_pair(each, reference))])
    if {*config.quantization} - {UNQUANTISED}:
        for model in models:
            if on_disk := model.facts.size.quantization:
                say(f"note: {model.config.model} is quantised on disk ({on_disk.format}) and evaluated in it")
    loaded = [*models, *([reference] if reference else [])]
    if config.sequence_parallel > 1:
        refusals = [
            refused_model(
                each.facts,
                size=config.sequence_parallel,
                seq_len=max(options.seq_len for options in each.configs()),
                model=each.config.model,
                trust_remote_code=config.trust_remote_code,
            )
            for each in loaded
        ]
        distributed.raise_together([reason for reason in refusals if reason])
    distributed.raise_together([problem for model in loaded for problem in model.check_weights(local=False)])
    return in_formats, reference, data_sets


def _load(
    candidates: list[Candidate], machine: Machine, dtype: str, stack: contextlib.ExitStack
) -> tuple[list[nn.Module], list[str]]:
    """Load a model, and a reference after it, until the stack is closed; return both and their `zero`. Collective."""
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
    return models, zero


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
    identity = {}
    for prefix, each in (("", candidate), *([("reference ", reference)] if reference else [])):
        config = each.config
        identity_of_model = model_identity(config.model, revision=config.revision, seed=config.seed)
        identity |= {f"{prefix}{name}": value for name, value in identity_of_model.items()}
    model_hash = identity["content"]
    quantization = candidate.facts.size.quantization
    jobs = []
    for source, config, windows in prepared:
        options = {name: getattr(config, name) for name in ("protocol", "seq_len", *WINDOW_OPTIONS, *HOW_OPTIONS)}
        options |= {
            "dtype": dtype,
            "mode": windows.mode,
            "batch_tokens": config.batch_tokens or default_batch_tokens(config.seq_len, has_gpu=has_gpu()),
            "quantization": str(quantization or UNQUANTISED),
        }
        hashes = windows.hashes()
        breakdown = build_breakdown(data_sets[source], config, candidate.tokenizer, windows)
        print_of_job = fingerprint(identity, hashes, options)
        jobs.append(_Job(source, config, windows, breakdown, options, model_hash, hashes, print_of_job))
    return jobs


def _evaluate_job(
    models: list[nn.Module],
    zero: list[str],
    candidate: Candidate,
    job: _Job,
    machine: Machine,
    log: ResumeLog | None,
    *,
    progress: bool,
) -> Evaluation:
    config = job.config
    model, reference = [*models, None][:2]
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
            collective_forward=set(zero) != {"0"},
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
        zero=zero[0],
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
        versions=versions(*PACKAGES) if job.options["quantization"] != UNQUANTISED else versions(),
        verified_difference=difference,
        peak_memory_bytes={name: int(distributed.max_over_ranks(value)) for name, value in peak_memory_bytes().items()},
    )


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


SCORING = 5
"""A change of code that changes nats, or what is kept of a result, raises it."""
LIBRARIES = ("dsft", "torch", "deepspeed", "transformers", "peft")
"""Whose versions can change nats."""


def fingerprint(model: dict[str, str], windows: dict[str, str], options: dict[str, Any]) -> str:
    """Hash everything that a result depends on, over all ranks: nodes may hold copies of their own. Collective.

    Args:
        model: its `model_identity`.
        windows: their `hashes()`.
    """
    device = torch.cuda.get_device_name() if has_gpu() else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    quantizers = PACKAGES if options.get("quantization", UNQUANTISED) != UNQUANTISED else ()
    libraries = {name: version for name, version in versions(*quantizers).items() if name in (*LIBRARIES, *quantizers)}
    everywhere = sorted(set(distributed.from_all([json.dumps([model, device, libraries])])))
    content = json.dumps([SCORING, everywhere, options, windows], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _out_of_memory_explained(config: EvalConfig, doing: str) -> contextlib.AbstractContextManager[None]:
    """
    Args:
        doing: in one word, for the message.
    """

    def explanation(error: BaseException, memory: Memory) -> str:
        peaks = peak_memory_bytes()
        taken = peaks["gpu" if memory == "GPU" and "gpu" in peaks else "host"] / GiB
        return (
            f"in {doing} {config.model} ({one_line(error)}): {taken:.3g} GiB of {memory} memory were taken at most; use"
            f" a smaller batch_tokens (here {config.batch_tokens or 'the default'}), more ranks with zero 3, or zero"
            " 3-offload where a GPU ran out"
        )

    return memory_errors_explained(explanation)
