"""Evaluates models on data sets: loads each model replicated or sharded, and yields each result as soon as it is known.

_Candidate (known without weights) -> zero -> loaded_for_scoring -> Evaluation of each data set
"""

import contextlib
import dataclasses
import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.run_folder import FINAL
from dsft.config.deepspeed_json import check_nvme, read_zero_file, stage
from dsft.config.deepspeed_rules import read_sound_file
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.sequences import IGNORED
from dsft.data.sources import FormattedSource
from dsft.data.training_data import check_sources
from dsft.errors import UserError
from dsft.models.build import adapter_base, build_model, described_in, is_bare_config, resolve_dtype
from dsft.models.size import ModelFacts, check_positions, measure_model
from dsft.models.tokenizer import check_tokenizer
from dsft.perplexity.resume import ResumeLog, fingerprint, model_hash
from dsft.perplexity.scoring import Perplexity, evaluate_windows
from dsft.perplexity.windows import Windows, build_windows, check_mode
from dsft.planner.evaluation_plan import (
    DEFAULT_BATCH_TOKENS,
    all_evaluation_plans,
    choose_evaluation,
    evaluation_section,
)
from dsft.planner.job import Job, attention_of
from dsft.planner.speeds import speeds_of
from dsft.runtime import distributed
from dsft.runtime.disk import check_writable
from dsft.runtime.hardware import Machine, has_gpu, peak_memory_bytes
from dsft.runtime.versions import versions
from dsft.units import padded_width
from dsft.watchdog import client as watchdog


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds one result and how it came about."""

    perplexity: Perplexity
    model: str
    data: str
    mode: str
    options: dict[str, Any]
    """seq_len, stride, scope, bos, separator, dtype, batch_tokens ... as they were."""
    zero: str
    truncated_documents: int
    """Answers cut to seq_len; their cut-off tokens are not scored."""
    seconds: float
    """Scoring alone, without loading; of this run, where an earlier one had scored a part."""
    peak_memory_bytes: dict[str, int]
    """Of the rank that needed most: "host", and "gpu" where there is one."""
    model_hash: str
    largest_difference: float | None
    """With `verify`: largest |nats - plain nats| / plain nats over the documents that were scored again."""

    def report(self) -> dict[str, Any]:
        """Return the report for perplexity.json; docs of the modes are in dsft/perplexity/windows.py."""
        result = self.perplexity
        return {
            "model": self.model,
            "data": self.data,
            "mode": self.mode,
            "perplexity": result.perplexity,
            "nats": result.nats,
            "tokens": result.tokens,
            "nats_per_token": result.loss,
            "bytes": result.bytes,
            "words": result.words,
            "word_perplexity": result.word_perplexity,
            "byte_perplexity": result.byte_perplexity,
            "bits_per_byte": result.bits_per_byte,
            "documents": result.documents,
            "unscored_documents": result.unscored_documents,
            "truncated_documents": self.truncated_documents,
            "options": self.options,
            "zero": self.zero,
            "ranks": distributed.world_size(),
            "seconds": self.seconds,
            "tokens_per_second": result.fed_tokens / self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "model_hash": self.model_hash,
            "verified_difference": self.largest_difference,
            "definition": f"perplexity = exp(nats / tokens), mode {self.mode} of dsft/perplexity/windows.py",
            "versions": versions(),
        }


OPTIONS = ("seq_len", "stride", "scope", "bos", "separator", "max_documents", "attn_implementation", "too_long")
"""That change a result, beside mode, dtype and batch_tokens."""


def evaluate(config: EvalConfig, problems: list[str] | None = None, *, progress: bool = False) -> Iterator[Evaluation]:
    """Yield the perplexity of each of `config.model` on each of `config.data`, as they come.

    Collective, after `distributed.start_ranks()`.

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
    for candidate in candidates:
        yield from _evaluate_candidate(candidate, data_sets, machine, progress=progress)


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
    candidate: _Candidate, data_sets: dict[str, FormattedSource], machine: Machine, *, progress: bool
) -> Iterator[Evaluation]:
    config = candidate.config
    dtype = resolve_dtype(config.dtype)
    zero = choose_zero(candidate, machine, dtype) if config.zero == "auto" else config.zero
    all_windows = {source: build_windows(data, config, candidate.tokenizer) for source, data in data_sets.items()}
    with loaded_for_scoring(config, zero, dtype) as model:
        for source, windows in all_windows.items():
            yield _evaluate_windows(model, candidate, windows, source, zero, dtype, progress=progress)


@contextlib.contextmanager
def loaded_for_scoring(config: Any, zero: str, dtype: str) -> Iterator[PreTrainedModel]:
    """Load the model of `config` in evaluation mode; its memory is given back at the end, for the next one."""
    _free_memory()  # an earlier sharded model is in cycles
    try:
        with _replicated(config, dtype) if zero == "0" else _sharded(config, zero, dtype) as model:
            yield model.eval()
    finally:
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _replicated(config: Any, dtype: str) -> Iterator[PreTrainedModel]:
    model = build_model(config, dtype=dtype, seed=config.seed).to(distributed.device())
    try:
        yield model
    finally:
        model.to("meta")  # frees the weights, whoever still holds the module


@contextlib.contextmanager
def _sharded(config: Any, zero: str, dtype: str) -> Iterator[PreTrainedModel]:
    import deepspeed

    zero_file = read_zero_file(zero, [])
    deepspeed_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "steps_per_print": 10**9,
        "zero_optimization": evaluation_section(zero),
        **({"aio": zero_file["aio"]} if "aio" in zero_file else {}),
    }
    registered = HfDeepSpeedConfig(deepspeed_config)  # from_pretrained shards while this object lives
    try:
        model = build_model(config, dtype=dtype, seed=config.seed)
        engine = deepspeed.initialize(model=model, config=deepspeed_config)[0]
        try:
            yield engine.module
        finally:
            engine.destroy()
    finally:
        del registered
        unset_hf_deepspeed_config()


def _evaluate_windows(
    model: nn.Module, candidate: _Candidate, windows: Windows, source: str, zero: str, dtype: str, *, progress: bool
) -> Evaluation:
    config = candidate.config
    batch_tokens = config.batch_tokens or max(padded_width(config.seq_len), DEFAULT_BATCH_TOKENS[has_gpu()])
    options = {name: getattr(config, name) for name in OPTIONS}
    options |= {"dtype": dtype, "mode": windows.mode, "batch_tokens": batch_tokens}
    log = None
    if config.output_dir:
        log = ResumeLog(Path(config.output_dir), fingerprint(config.model, windows, options))
    start = time.perf_counter()
    with watchdog.phase("evaluating"):
        result = evaluate_windows(
            model,
            windows,
            pad_token_id=candidate.tokenizer.pad_token_id,
            batch_tokens=batch_tokens,
            device=distributed.device(),
            collective_forward=zero != "0",
            log=log,
            progress=progress and distributed.rank() == 0,
        )
    seconds = time.perf_counter() - start
    difference = verify(model, windows, result, config.verify, seed=config.seed) if config.verify else None
    if log:
        log.remove()
    return Evaluation(
        perplexity=result,
        model=config.model,
        data=source,
        mode=windows.mode,
        options=options,
        zero=zero,
        truncated_documents=windows.truncated_documents,
        seconds=seconds,
        model_hash=model_hash(config.model),
        largest_difference=difference,
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
