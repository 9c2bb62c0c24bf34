"""Perplexity of models on data sets: loads each model replicated or sharded, scores each data set, keeps each result as
soon as it is known.
"""

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

from dsft.checkpoints.run_folder import FINAL, check_writable
from dsft.config.deepspeed_json import check_nvme, check_section, read_zero_file, stage
from dsft.config.options import EvalConfig, TrainConfig
from dsft.data.sequences import IGNORED
from dsft.data.training_data import FormattedSource, check_sources
from dsft.errors import UserError
from dsft.models.build import adapter_base, build_model, described_in, is_bare_config, resolve_dtype
from dsft.models.size import ModelFacts, check_positions, measure_model
from dsft.models.tokenizer import check_tokenizer
from dsft.perplexity.resume import PartialResults, fingerprint, model_hash
from dsft.perplexity.scoring import Perplexity, evaluate_windows
from dsft.perplexity.windows import Windows, build_windows
from dsft.planner.evaluation_plan import (
    DEFAULT_BATCH_TOKENS,
    all_evaluation_plans,
    choose_evaluation,
    evaluation_section,
)
from dsft.planner.plan import Job, attention_of
from dsft.planner.speeds import speeds_of
from dsft.runtime import distributed
from dsft.runtime.hardware import Machine, has_gpu, peak_memory_bytes
from dsft.runtime.versions import versions
from dsft.units import padded_width
from dsft.watchdog import client as watchdog


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One result and how it came about."""

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
    scored_tokens_now: int
    """Tokens fed to the model in `seconds`, over all ranks."""
    peak_memory_bytes: dict[str, int]
    """Of the rank that needed most: "host", and "gpu" where there is one."""
    model_hash: str
    largest_difference: float | None
    """With `verify`: largest |nats - plain nats| / plain nats over the documents that were scored again."""

    def report(self) -> dict[str, Any]:
        """For perplexity.json; docs of the modes are in dsft/perplexity/windows.py."""
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
            "tokens_per_second": self.scored_tokens_now / self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "model_hash": self.model_hash,
            "verified_difference": self.largest_difference,
            "definition": f"perplexity = exp(nats / tokens), mode {self.mode} of dsft/perplexity/windows.py",
            "versions": versions(),
        }


def evaluate(config: EvalConfig, problems: list[str] | None = None, *, progress: bool = False) -> Iterator[Evaluation]:
    """Perplexity of each of `config.model` on each of `config.data`, as they come. Collective, after
    `distributed.start_ranks()`.

    Raises:
        UserError: with all problems of the options, the data and the models' folders, on every rank, before anything is
            loaded.
        TrainingStopped: where a loss is NaN or infinite.
    """
    problems = [] if problems is None else problems
    unset_hf_deepspeed_config()  # of a training earlier in this process: models are measured on the meta device
    if config.output_dir:
        check_writable(config.output_dir, problems)
    if config.zero not in ("auto", "0"):
        zero_file = read_zero_file(config.zero, problems)
        problems += check_section(zero_file, config.zero) + check_nvme(zero_file, config.zero)
        if zero_file and stage(zero_file) != 3:
            problems.append(
                f"zero={config.zero}: evaluation holds the model whole (0) or in shards of stage 3, not of stage"
                f" {stage(zero_file)}"
            )
    models = [_Candidate.find(dataclasses.replace(config, model=name), problems) for name in config.model]
    data_sets = {source: _read(source, config, models, problems) for source in config.data}
    distributed.raise_together([*dict.fromkeys(problems)])

    machine = distributed.smallest_machine()
    for candidate in models:
        dtype = resolve_dtype(config.dtype)
        zero = choose_zero(candidate, machine, dtype) if config.zero == "auto" else config.zero
        all_windows = {source: build_windows(data, config, candidate.tokenizer) for source, data in data_sets.items()}
        with loaded_for_scoring(candidate.config, zero, dtype) as model:
            for source, windows in all_windows.items():
                yield _evaluate_one(model, candidate, windows, source, zero, dtype, progress=progress)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A model to evaluate, as far as it is known without its weights."""

    config: Any
    """The EvalConfig with `model` being one name."""
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelFacts | None
    """Of the model, of its base where it is an adapter."""

    @classmethod
    def find(cls, config: EvalConfig, problems: list[str]) -> "_Candidate":
        if (Path(config.model) / "run.json").is_file():
            config = dataclasses.replace(config, model=str(Path(config.model) / FINAL))
        facts = _measure(config, problems)
        return cls(
            config=config,
            tokenizer=check_tokenizer(config, problems) if facts or config.tokenizer else None,
            facts=facts,
        )


def _read(source: str, config: EvalConfig, models: list[_Candidate], problems: list[str]) -> FormattedSource | None:
    """The source, looked at with the tokenizer of each model."""
    found = [
        check_sources(
            [source], config, candidate.tokenizer, key="data", split=config.data_split, problems=problems, keep_all=True
        )
        for candidate in models
    ]
    return next((data[0] for data in found if data), None)


def _measure(config: EvalConfig, problems: list[str]) -> ModelFacts | None:
    name = adapter_base(described_in(config.model)) or (
        config.model if is_bare_config(config.model) else described_in(config.model)
    )
    try:
        facts = measure_model(
            TrainConfig(
                model=name,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                attn_implementation=config.attn_implementation,
            )
        )
    except UserError as error:
        problems += error.problems
        return None
    problems += check_positions(facts, seq_len=config.seq_len, model=config.model)
    return facts


def choose_zero(candidate: _Candidate, machine: Machine, dtype: str) -> str:
    """As the planner says: one copy per rank where it fits, else shards of ZeRO-3, else shards in host memory.

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
    chosen, why = choose_evaluation(
        all_evaluation_plans(
            job, machine, speeds_of(machine, dtype=job.dtype), batch_tokens=candidate.config.batch_tokens
        ),
        machine,
    )
    if not chosen.fits:
        raise UserError(
            [
                f"zero=auto for {candidate.config.model}: {why} Use more GPUs or nodes, a smaller batch_tokens or"
                " seq_len, or set zero yourself"
            ]
        )
    return chosen.zero


class loaded_for_scoring:
    """The model in evaluation mode inside a `with`; its memory is given back at the end, for the next one."""

    def __init__(self, config: Any, zero: str, dtype: str):
        self.config, self.zero, self.dtype = config, zero, dtype
        self.registered = self.engine = None

    def __enter__(self) -> PreTrainedModel:
        if self.zero == "0":
            return build_model(self.config, dtype=self.dtype, seed=self.config.seed).to(distributed.device()).eval()
        import deepspeed

        zero_file = read_zero_file(self.zero, [])
        deepspeed_config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "fp16": {"enabled": self.dtype == "float16"},
            "steps_per_print": 10**9,
            "zero_optimization": evaluation_section(self.zero),
            **({"aio": zero_file["aio"]} if "aio" in zero_file else {}),
        }
        self.registered = HfDeepSpeedConfig(deepspeed_config)  # from_pretrained shards while this object lives
        model = build_model(self.config, dtype=self.dtype, seed=self.config.seed)
        self.engine = deepspeed.initialize(model=model, config=deepspeed_config)[0]
        return self.engine.module.eval()

    def __exit__(self, *_) -> None:
        if self.engine is not None:
            self.engine.destroy()
            unset_hf_deepspeed_config()
        self.registered = self.engine = None
        gc.collect()
        if has_gpu():
            torch.cuda.empty_cache()


def _evaluate_one(
    model: nn.Module, candidate: _Candidate, windows: Windows, source: str, zero: str, dtype: str, *, progress: bool
) -> Evaluation:
    config = candidate.config
    names = ("seq_len", "stride", "scope", "bos", "separator", "max_documents", "attn_implementation", "too_long")
    batch_tokens = config.batch_tokens or max(padded_width(config.seq_len), DEFAULT_BATCH_TOKENS[has_gpu()])
    options = {name: getattr(config, name) for name in names} | {
        "dtype": dtype,
        "mode": windows.mode,
        "batch_tokens": batch_tokens,
    }
    partial = None
    if config.output_dir:
        partial = PartialResults(Path(config.output_dir), fingerprint(config.model, windows, options))
    start = time.perf_counter()
    fed: list[int] = []
    with watchdog.phase("evaluating"):
        result = evaluate_windows(
            model,
            windows,
            pad_token_id=candidate.tokenizer.pad_token_id,
            batch_tokens=batch_tokens,
            device=distributed.device(),
            collective_forward=zero != "0",
            done=partial and partial.done,
            save=partial and partial.save,
            fed=fed,
            progress=progress and distributed.rank() == 0,
        )
    seconds = time.perf_counter() - start
    difference = verify(model, windows, result, config.verify, seed=config.seed) if config.verify else None
    if partial is not None:
        partial.remove()
    return Evaluation(
        perplexity=result,
        model=config.model,
        data=source,
        mode=windows.mode,
        options=options,
        zero=zero,
        truncated_documents=windows.counts.get("truncated", 0),
        seconds=seconds,
        scored_tokens_now=sum(fed),
        model_hash=model_hash(config.model),
        largest_difference=difference,
        peak_memory_bytes={name: int(distributed.max_over_ranks(value)) for name, value in peak_memory_bytes().items()},
    )


@torch.no_grad()
def verify(model: nn.Module, windows: Windows, result: Perplexity, number: int, *, seed: int) -> float:
    """Score `number` random documents again, each window alone with full logits; the largest relative difference of
    their nats.

    Every rank does the same work, so that it holds for a sharded model too. Collective under ZeRO-3.
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
        where = targets != IGNORED
        nats = -log_probs_TV[where].gather(1, targets[where][:, None])[:, 0].double().cpu()
        for document, part in zip(documents.tolist(), nats.split(counts.tolist()), strict=True):
            if document in plain:
                plain[document] += part.sum().item()
    return max(abs(result.document_nats[document] - nats) / max(abs(nats), 1e-12) for document, nats in plain.items())
