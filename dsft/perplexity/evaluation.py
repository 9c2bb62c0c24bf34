"""Evaluates models on data sets: loads one model at a time, replicated or sharded, and yields each result as soon as it
is complete. A result's fingerprint covers everything that it depends on, so that an evaluation that resumes or reuses
results never mixes two models.
"""

import contextlib
import functools
import gc
import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.save import verify_weights
from dsft.config.deepspeed import read_zero_file
from dsft.config.options import UNQUANTISED, EvalConfig
from dsft.config.reader import Values
from dsft.data.formats import FormattedSource
from dsft.errors import UserError, one_line
from dsft.job import beat as watchdog
from dsft.models.build import Candidate, build_model, check_weights, resolve_dtype
from dsft.models.measure import ModelSize
from dsft.models.model_folder import with_bases
from dsft.models.package import PACKAGES
from dsft.models.tokenizer import check_ids
from dsft.models.weight_files import model_identity
from dsft.perplexity.documents import build_windows, group_documents
from dsft.perplexity.modes import WINDOW_OPTIONS, Windows, protocol_config
from dsft.perplexity.results import Evaluation, Perplexity, Recorder, Results, on_data
from dsft.perplexity.scoring import evaluate_windows
from dsft.planner.choose import evaluation_section, plan_evaluation, tokens_at_once
from dsft.runtime import distributed
from dsft.runtime.distributed import SAME_FILES, require_agreement
from dsft.runtime.hardware import Machine, has_gpu, memory_errors_explained, peak_memory_bytes, reset_peaks
from dsft.runtime.software import versions

TOKENS = "tokens.parquet"  # folder in output_dir
SHOWN_TOKENS = 32  # of a document, in comparisons
OTHER_OPTIONS = ("attn_implementation", "max_documents", "group_by", "save_tokens", "reference", "verify")
"""Options that decide how a result is computed and what of it is stored, as the user set them."""
SCORING = 18  # version: raised by changes of the code that change nats or the stored results
LIBRARIES = ("dsft", "torch", "deepspeed", "transformers", "peft")  # packages whose versions can change nats


def evaluate_models(
    config: EvalConfig,
    candidates: list[Candidate],
    reference: Candidate | None,
    data_sets: dict[str, FormattedSource],
    *,
    progress: bool = False,
) -> Iterator[Evaluation]:
    """Yield the result of each model on each data set as soon as it is complete. Collective.

    With an output_dir each is written before it is yielded, and results of an earlier evaluation there are reused.

    Raises:
        UserError: if a model does not fit or cannot be split over ranks, or a mode does not fit the data.
        TrainingStopped: if a loss is NaN or infinite.
    """
    others = [reference] if reference else []
    scored = {each.config.model: each for each in (*candidates, *others)}
    problems = []
    for each in scored.values():  # the last check: it downloads weights from the hub
        problems += check_weights(each.config, each.facts, local=False)
    distributed.raise_together(problems)
    machine = distributed.smallest_machine()
    dtype = resolve_dtype(config.dtype)
    results = Results(Path(config.output_dir)) if config.output_dir else None
    verify_once = functools.cache(verify_weights)  # once for all formats of a model
    for candidate in candidates:
        reset_peaks()  # peaks are per model
        jobs = _jobs(candidate, reference, data_sets, dtype, progress=progress)
        facts = {f"content of {config.zero}": read_zero_file(config.zero, [])}
        for _, about in jobs:
            facts[f"tokens of {on_data(about['data'], about['protocol'])}"] = about["fingerprint"]
            facts[f"files of {candidate.config.model}"] = about["model_hash"]
        require_agreement({SAME_FILES: facts})
        cached = [results and results.find(about) for _, about in jobs]
        with _out_of_memory_explained(candidate.config), contextlib.ExitStack() as stack:
            if not all(cached):
                for each in (candidate, *others):
                    for model in with_bases(each.config.model):
                        verify_once(model)
                models, zero = _load([candidate, *others], machine, dtype, stack)
            for (windows, about), evaluation in zip(jobs, cached, strict=True):
                recorder = None
                if evaluation is None:
                    about |= {"zero": zero[0], "machine": str(machine)}
                    options = {
                        "pad_token_id": candidate.tokenizer.pad_token_id,
                        "device": distributed.device(),
                        "collective_forward": set(zero) != {"0"},
                    }
                    evaluation, recorder = _evaluate_job(models, windows, about, config, options, progress=progress)
                if results:
                    results.add(evaluation)
                if recorder:  # the partial results are not needed after the result is written
                    recorder.remove()
                yield evaluation


def _load(
    candidates: list[Candidate], machine: Machine, dtype: str, stack: contextlib.ExitStack
) -> tuple[list[nn.Module], list[str]]:
    """Load a model, and a reference after it, until the stack is closed; return both and their `zero`. Collective."""
    share = len(candidates)  # models that share the memory
    machine = replace(machine, device_bytes=machine.device_bytes // share, host_bytes=machine.host_bytes // share)
    # On one rank, since measured speeds may differ between hosts.
    zero = distributed.on_rank_0(lambda: [choose_zero(each, machine, dtype) for each in candidates])
    models = [None] * share
    # Sharded models last: while one is loaded, transformers would also shard every other one.
    for place in sorted(range(share), key=lambda place: zero[place] != "0"):
        each = candidates[place]
        loading = loaded_for_scoring(each.config, zero[place], dtype, each.facts.size)
        models[place] = stack.enter_context(loading)
    return models, zero


def choose_zero(candidate: Candidate, machine: Machine, dtype: str) -> str:
    """Return the option `zero`; for auto a copy per rank if it fits, else shards. Raises UserError if nothing fits."""
    if candidate.config.zero != "auto":
        return candidate.config.zero
    plan = plan_evaluation(
        candidate.facts,
        machine,
        dtype=dtype,
        seq_len=protocol_config(candidate.config, candidate.facts.size.max_positions).seq_len,
        batch_tokens=candidate.config.batch_tokens,
    )
    if plan.fits:
        return plan.zero
    fits = ""
    if plan.longest_window:
        fits = f" The longest window that fits has {plan.longest_window:,} tokens."
    raise UserError(
        f"zero=auto for {candidate.name}: {plan.reason}{fits} Use more GPUs or nodes, a smaller batch_tokens or"
        " seq_len, or set zero yourself"
    )


def _jobs(
    candidate: Candidate,
    reference: Candidate | None,
    data_sets: dict[str, FormattedSource],
    dtype: str,
    *,
    progress: bool,
) -> list[tuple[Windows, Values]]:
    """Prepare every data set: its windows, and the fields of its Evaluation known before scoring. Collective."""
    facts = candidate.facts
    config = protocol_config(candidate.config, facts.size.max_positions)
    configs = [each.config for each in (candidate, reference) if each]
    identities = [model_identity(each.model, revision=each.revision, seed=each.seed) for each in configs]
    quantization = str(facts.size.quantization or UNQUANTISED)
    installed = versions(*PACKAGES if quantization != UNQUANTISED else ())
    jobs = []
    for source, data in data_sets.items():
        data = replace(data, rules=replace(data.rules, seq_len=config.seq_len))  # answers are cut to it
        windows = build_windows(data, config, candidate.tokenizer, show_progress=progress)
        for ids in (windows.tokens, [windows.first_token or 0]):
            check_ids(ids, candidate.tokenizer, facts.size.vocab_size)
        groups = {}
        hashes = windows.hashes()
        decisive = dict(hashes)
        for column in config.group_by:
            groups[column] = group_documents(column, data, config, windows)
            labels = json.dumps(groups[column].tolist())
            decisive[f"groups by {column}"] = hashlib.sha256(labels.encode()).hexdigest()
        distributed.wait_long("prepared")  # nodes with separate caches may take different times
        options = {name: getattr(config, name) for name in ("protocol", "seq_len", *WINDOW_OPTIONS, *OTHER_OPTIONS)}
        options |= {
            "dtype": dtype,
            "mode": windows.mode,
            "batch_tokens": tokens_at_once(config.batch_tokens, config.seq_len, has_gpu=has_gpu()),
            "quantization": quantization,
        }
        about = {
            "model": candidate.name,
            "data": source,
            "protocol": config.protocol,
            "mode": windows.mode,
            "options": options,
            "reference": config.reference,
            "truncated_documents": windows.truncated_documents,
            "model_hash": identities[0]["content"],
            "hashes": hashes,
            "document_groups": groups,
            "document_texts": candidate.tokenizer.batch_decode(
                windows.excerpts(SHOWN_TOKENS), skip_special_tokens=True
            ),
            "fingerprint": fingerprint(identities, decisive, options, installed),
            "tokens_folder": None,
            "versions": installed,
        }
        if config.save_tokens:
            about["tokens_folder"] = str(Path(config.output_dir) / TOKENS / about["fingerprint"][:16])
        jobs.append((windows, about))
    return jobs


def _evaluate_job(
    models: list[nn.Module],
    windows: Windows,
    about: Values,
    config: EvalConfig,
    options: Values,
    *,
    progress: bool,
) -> tuple[Evaluation, Recorder]:
    """Score a data set, or its rest after an interruption. Collective. `options`: for `evaluate_windows`."""
    partial = tokens = None
    if about["tokens_folder"]:
        tokens = Path(about["tokens_folder"])
    elif config.output_dir:
        partial = Path(config.output_dir) / "partial" / about["fingerprint"][:32]
    recorder = Recorder(windows, partial=partial, tokens=tokens)
    difference = None
    with watchdog.phase("evaluating"):
        start = time.perf_counter()
        result = evaluate_windows(
            models[0],
            windows,
            batch_tokens=about["options"]["batch_tokens"],
            reference=models[1] if len(models) > 1 else None,
            recorder=recorder,
            progress=progress and distributed.rank() == 0,
            **options,
        )
        seconds = time.perf_counter() - start
        if config.verify:
            difference = verify(models[0], windows, result, config.verify, seed=config.seed, **options)
    peaks = {name: int(distributed.max_over_ranks(value)) for name, value in peak_memory_bytes().items()}
    evaluation = Evaluation(
        **about,
        perplexity=result,
        ranks=distributed.world_size(),
        seconds=seconds,
        verified_difference=difference,
        peak_memory_bytes=peaks,
    )
    return evaluation, recorder


def verify(model: nn.Module, windows: Windows, result: Perplexity, number: int, *, seed: int, **options: Any) -> float:
    """Score `number` random documents again, each window alone with full logits, and return the largest relative
    difference of their nats. Collective. `options`: for `evaluate_windows`.
    """
    scored = np.flatnonzero(result.document_tokens).tolist()
    chosen = random.Random(seed).sample(scored, min(number, len(scored)))
    _, ends, scored_from = windows.spans.T
    wanted_W = np.zeros(len(ends), bool)
    for document in chosen:
        wanted_W |= (scored_from < windows.document_ends[document]) & (ends > windows.document_starts[document])
    windows = replace(windows, spans=windows.spans[wanted_W], weights=None)
    plain = evaluate_windows(model, windows, batch_tokens=1, in_parts=False, **options)
    expected = plain.document_nats[chosen]
    differences = np.abs(result.document_nats[chosen] - expected)
    return float((differences / np.maximum(np.abs(expected), 1e-12)).max())


def fingerprint(
    models: list[dict[str, str]], windows: dict[str, str], options: Values, installed: dict[str, str]
) -> str:
    """Hash everything that a result depends on, over all ranks, since nodes may have separate copies. Collective. Args:
    `models`: `model_identity` of the model and of a reference; `windows`: their `hashes()`, and those of the document
    groups; `installed`: versions.
    """
    device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if has_gpu():
        device = torch.cuda.get_device_name()
    libraries = {name: version for name, version in installed.items() if name in (*LIBRARIES, *PACKAGES)}
    on_this_rank = json.dumps([models, device, libraries])
    everywhere = sorted(set(distributed.from_all([on_this_rank])))
    content = json.dumps([SCORING, everywhere, options, windows], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


@contextlib.contextmanager
def loaded_for_scoring(config: Any, zero: str, dtype: str, size: ModelSize | None = None) -> Iterator[PreTrainedModel]:
    """Load the model of `config` to evaluate it, with its `size` if sharded or quantised; on exit free its memory."""
    quantization = size.quantization if size else None

    def free_memory():
        gc.collect()
        if has_gpu():
            torch.cuda.empty_cache()

    free_memory()  # an earlier sharded model is in reference cycles
    try:
        if zero == "0":
            model = build_model(config, dtype=dtype, seed=config.seed, quantization=quantization)
            if not quantization:
                model.to(distributed.device())
            try:
                yield model.eval()
            finally:
                for module in model.modules():  # frees the weights even if something still references the module
                    module._parameters.clear()
                    module._buffers.clear()
        else:
            import deepspeed

            section = evaluation_section(zero, distributed.ranks_per_node())
            with contextlib.ExitStack() as stack:
                deepspeed_config = {
                    "train_micro_batch_size_per_gpu": 1,
                    "bf16": {"enabled": dtype == "bfloat16"},
                    "fp16": {"enabled": dtype == "float16"},
                    "steps_per_print": 10**9,
                    "zero_optimization": section,
                }
                _registered = HfDeepSpeedConfig(deepspeed_config)  # from_pretrained shards while this object lives
                stack.callback(unset_hf_deepspeed_config)
                model = build_model(config, dtype=dtype, seed=config.seed)
                engine = deepspeed.initialize(model=model, config=deepspeed_config)[0]
                stack.callback(engine.destroy)
                distributed.extend_timeouts()
                yield engine.module.eval()
    finally:
        model = engine = None  # without references their memory can be freed
        free_memory()


def _out_of_memory_explained(config: EvalConfig) -> contextlib.AbstractContextManager[None]:
    advice = (
        f"use a smaller batch_tokens (here {config.batch_tokens or 'the default'}), more ranks with zero 3, or zero"
        " 3-offload if a GPU ran out"
    )
    return memory_errors_explained(lambda error, _: f"in evaluating {config.model} ({one_line(error)}); {advice}")
