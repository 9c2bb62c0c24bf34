"""Perplexity of a model folder on a data set: loads the model replicated or sharded, scores, returns one result."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from dsft import ranks
from dsft.config import EvalConfig
from dsft.machine import GiB, Machine, peak_memory_bytes, this_machine
from dsft.model import adapter_base, build_model, resolve_dtype
from dsft.model_size import empty_model, load_model_config
from dsft.perplexity import Perplexity, evaluate_sequences
from dsft.preparation import check_tokenizer
from dsft.problems import UserError
from dsft.run_folder import FINAL, versions
from dsft.samples import build_samples, check_rows
from dsft.text_data import read_rows
from dsft.zero_config import read_zero_file

MODES = {"text": "windows", "prompt_completion": "answers", "messages": "answers"}
"""What is scored: every token of consecutive windows of seq_len, or only the tokens that finetuning trains on."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One result and how it came about."""

    perplexity: Perplexity
    mode: str
    model: str
    zero: str
    dtype: str
    counts: dict[str, int]
    seconds: float
    """Scoring alone, without loading."""
    peak_memory_bytes: dict[str, int]
    """Of the rank that needed most: "host", and "gpu" where there is one."""

    def report(self) -> dict[str, Any]:
        """For perplexity.json."""
        result = self.perplexity
        return {
            "model": self.model, "mode": self.mode, "perplexity": result.perplexity, "nats": result.nats, "tokens": result.tokens,
            "nats_per_token": result.loss, "sequences": result.sequences, "unscored_sequences": result.unscored_sequences,
            "data": self.counts, "zero": self.zero, "dtype": self.dtype, "ranks": ranks.world_size(), "seconds": self.seconds,
            "tokens_per_second": result.tokens / self.seconds, "peak_memory_bytes": self.peak_memory_bytes, "versions": versions(),
        }


def evaluate(config: EvalConfig, problems: list[str] | None = None, *, progress: bool = False) -> Evaluation:
    """Perplexity of `config.model` on `config.data`. Collective: every rank calls it, after `ranks.start_ranks()`.

    Raises:
        UserError: with all problems of the options, the data and the model's folder, on every rank.
        TrainingStopped: where a loss is NaN or infinite.
    """
    problems = [] if problems is None else problems
    tokenizer, rows, num_params = None, None, 0
    if config.model:
        if (Path(config.model) / "run.json").is_file():
            config.model = str(Path(config.model) / FINAL)
        tokenizer = check_tokenizer(config, problems)
        num_params = _count_params(config, problems)
    try:
        if config.data:
            rows = read_rows(config.data, config, key="data", split=config.data_split)
            check_rows(rows, config, tokenizer, key="data", problems=problems)
    except UserError as error:
        problems += error.problems
    ranks.raise_together(problems)

    dtype = resolve_dtype(config.dtype)
    machine = this_machine(nodes=ranks.world_size() // ranks.ranks_per_node(), ranks_per_node=ranks.ranks_per_node())
    zero = choose_zero(num_params, machine, dtype) if config.zero == "auto" else config.zero
    samples = build_samples(rows, config, tokenizer, key="data")
    model, _keep = load_for_scoring(config, zero, dtype)
    start = time.perf_counter()
    result = evaluate_sequences(
        model, samples.sequences, pad_token_id=tokenizer.pad_token_id, batch_tokens=config.batch_tokens, device=ranks.device(),
        collective_forward=zero != "0", progress=progress and ranks.rank() == 0,
    )
    return Evaluation(
        perplexity=result, mode=MODES[samples.data_format], model=config.model, zero=zero, dtype=dtype, counts=samples.counts,
        seconds=time.perf_counter() - start,
        peak_memory_bytes={name: int(ranks.max_over_ranks(value)) for name, value in peak_memory_bytes().items()},
    )


def choose_zero(num_params: int, machine: Machine, dtype: str) -> str:
    """One copy per rank where weights and 30 % for activations fit; else shards of ZeRO-3; else shards in host memory."""
    needed = 1.3 * num_params * (4 if dtype == "float32" else 2)
    if needed < machine.device_bytes:
        return "0"
    return "3" if needed / machine.world_size + 4 * GiB < machine.device_bytes else "3-offload"


def load_for_scoring(config: EvalConfig, zero: str, dtype: str) -> tuple[PreTrainedModel, Any]:
    """The model in evaluation mode, and an object to keep alive as long as the model is used."""
    if zero == "0":
        return build_model(config, dtype=dtype, seed=config.seed).to(ranks.device()).eval(), None
    import deepspeed

    deepspeed_config = read_zero_file(zero, [])
    section = {key: value for key, value in deepspeed_config["zero_optimization"].items() if value != "auto" and key != "offload_optimizer"}
    deepspeed_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "steps_per_print": 10**9,
        "zero_optimization": section,
    }
    registered = HfDeepSpeedConfig(deepspeed_config)  # from_pretrained shards while this object lives
    model = build_model(config, dtype=dtype, seed=config.seed)
    engine = deepspeed.initialize(model=model, config=deepspeed_config)[0]
    engine.module.eval()
    return engine.module, (registered, engine)


def _count_params(config: EvalConfig, problems: list[str]) -> int:
    name = adapter_base(config.model) or config.model
    try:
        model = empty_model(load_model_config(name, revision=config.revision, trust_remote_code=config.trust_remote_code), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        problems.append(f"model={config.model}: no causal language model can be read there ({' '.join(str(error).split())[:300]})")
        return 0
    return sum(p.numel() for p in model.parameters())
