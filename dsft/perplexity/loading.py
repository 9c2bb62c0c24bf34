"""Finds what is known of models before their weights are loaded, and loads them for scoring: one copy on each rank, or
shards of ZeRO-3 over all ranks; one model at a time.

A model's identity is of its files (of an adapter and of its base). Those of hundreds of gigabytes are sampled, and
their times of change count.
"""

import contextlib
import dataclasses
import gc
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.run_folder import FINAL, damage, is_run
from dsft.config.deepspeed import read_zero_file
from dsft.config.options import UNQUANTISED, EvalConfig, TrainConfig
from dsft.errors import UserError, raise_if_any
from dsft.models.build import DTYPES, build_model, described_in, is_bare_config, resolve_dtype
from dsft.models.model_folder import adapter_base, has_only_shards, is_step_folder, located
from dsft.models.quantization import FORMATS, Quantization, format_problems, unknown_format
from dsft.models.size import ModelFacts, check_positions, check_sharding, measure_model
from dsft.models.tokenizer import check_tokenizer
from dsft.models.trials import architecture_problems
from dsft.models.weights import adapter_problems, weight_problems
from dsft.perplexity.modes import protocol_configs
from dsft.perplexity.results import REPORTS
from dsft.planner.evaluation_plan import evaluation_section, plan_evaluation
from dsft.runtime import distributed
from dsft.runtime.hardware import Machine, has_gpu

READ_ENDINGS = (".safetensors", ".bin", ".pt", ".json", ".py")
"""Of files that loading a model reads. The text of a tokenizer counts through the tokens that it makes."""
EDGE_BYTES, BLOCK_BYTES, BLOCKS = 1 << 20, 1 << 14, 64
"""Read of each file: both ends, the whole header, and blocks that are evenly spread."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Holds a model to evaluate, as far as it is known without its weights."""

    config: EvalConfig
    """The options with `model` being the one folder or hub id that is loaded."""
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelFacts | None
    """Of the model, of its base where it is an adapter."""

    @classmethod
    def of(cls, config: EvalConfig, model: str, problems: list[str], *, key: str = "model") -> "Candidate":
        """Find what `model` means: a run's folder means its final model.

        Args:
            key: the option that names it, for the messages.
        """
        faults: list[str] = []
        config = dataclasses.replace(config, model=str(Path(model) / FINAL) if is_run(model) else model)
        facts = _measure(config, faults)
        candidate = cls(
            config=config,
            tokenizer=check_tokenizer(config, faults, vocab_size=facts and facts.size.vocab_size)
            if facts or config.tokenizer
            else None,
            facts=facts,
        )
        faults += candidate.check_weights(local=True) if facts else []
        problems += [re.sub("^model(?==)", key, line) for line in faults]
        return candidate

    @property
    def name(self) -> str:
        """Name the model in results: a format that is made while it loads follows a colon."""
        quantization = self.facts.size.quantization
        made = quantization is not None and not quantization.lies_on_disk
        return f"{self.config.model}:{quantization.format}" if made else self.config.model

    def in_formats(self, formats: Iterable[str], problems: list[str]) -> "list[Candidate]":
        """Return the candidate in each format of the option `quantization`; alone where it is quantised on disk.

        What cannot be loaded so goes to `problems`.
        """
        if self.facts is None:
            return [self]
        size, on_disk = self.facts.size, self.facts.size.quantization
        if on_disk:
            problems += self._format_problems(on_disk)
        if on_disk or not formats:
            return [self]
        candidates = []
        for name in formats:
            quantization = None
            if name != UNQUANTISED:
                try:
                    quantization = self._fitted(name)
                except UserError as error:
                    problems += error.problems
            facts = dataclasses.replace(self.facts, size=dataclasses.replace(size, quantization=quantization))
            candidates.append(dataclasses.replace(self, facts=facts))
            if quantization:
                problems += candidates[-1]._format_problems(quantization)
        return candidates

    def _fitted(self, name: str) -> Quantization:
        """Fit a format to the layers of the model."""
        model = self.config.model
        if name not in FORMATS:
            raise UserError(unknown_format(name, [UNQUANTISED, *FORMATS]))
        if is_bare_config(model) or has_only_shards(model):
            raise UserError(
                f"quantization={name}: weights are quantised while they load from the files of a model, and {model} has"
                " none; name a folder or hub id (dsft export makes one of a checkpoint)"
            )
        return FORMATS[name].fitted(self.facts.linear_inputs, name=model)

    def _format_problems(self, quantization: Quantization) -> list[str]:
        config = self.config
        dtype = DTYPES[resolve_dtype(config.dtype)]
        problems = format_problems(config.model, self.facts.config, quantization, dtype=dtype)
        if config.zero not in ("auto", "0"):
            problems += check_sharding(self.facts.size, stage=3, model=self.name)
        return problems

    def configs(self) -> list[EvalConfig]:
        """Return the options of each protocol that is asked for; the options alone where none is."""
        return protocol_configs(self.config, self.facts.size.max_positions)

    def check_weights(self, *, local: bool) -> list[str]:
        """Compare the weights that lie in a folder, or those of the hub, with the config."""
        config = self.config
        base = adapter_base(described_in(config.model))
        problems = []
        if Path(base or config.model).exists() == local:
            problems += weight_problems(base or config.model, self.facts, revision=config.revision)
        if base and local:
            trust = config.trust_remote_code
            problems += adapter_problems(config.model, self.facts.config, key="model", trust_remote_code=trust)
        return problems


def with_bases(model: str) -> Iterator[str]:
    """Yield the model, and the base of each adapter down to a full model."""
    yield model
    if base := adapter_base(described_in(model)):
        yield from with_bases(base)


def _measure(config: EvalConfig, problems: list[str]) -> ModelFacts | None:
    """Measure the model that `config` names, or the base of an adapter, once nothing of a checkpoint has changed."""
    folder = config.model if is_bare_config(config.model) else described_in(config.model)
    names = ("revision", "trust_remote_code", "attn_implementation")
    options = {name: getattr(config, name) for name in names}
    try:
        for each in with_bases(config.model):
            raise_if_any([f"model={each}: {error}; it is damaged, use another" for error in damage(each)])
        base = adapter_base(folder)
        train_config = TrainConfig(model=base or folder, **options)
        facts = measure_model(train_config, scored=True, with_adapter=base is not None)
    except UserError as error:
        problems += error.problems
        return None
    longest = max(each.seq_len for each in protocol_configs(config, facts.size.max_positions))
    problems += check_positions(
        facts, seq_len=longest, model=config.model, key="context_curve" if config.context_curve else "seq_len"
    )
    problems += architecture_problems(config.model, facts.config, trust_remote_code=config.trust_remote_code)
    return facts


def model_identity(model: str, *, revision: str | None, seed: int) -> dict[str, str]:
    """Identify a model: `content` is the same for a copy, `changed` is not.

    Args:
        revision: of a model on the hub, whose commit is its identity.
        seed: of the random weights where the model is a config.json alone.
    """
    content, changed = hashlib.sha256(), hashlib.sha256()
    if is_bare_config(model):
        content.update(f"seed {seed}".encode())
    for name in with_bases(model):
        path = Path(name)
        if not path.exists():
            repository, gguf = located(name)
            file = gguf.get("gguf_file", "config.json")  # in the cache: the model has been measured
            cached = try_to_load_from_cache(repository, file, revision=revision)
            commit = Path(cached.removesuffix(file)).name if isinstance(cached, str) else revision
            content.update(f"{name} {commit}".encode())
            continue
        if path.is_file():
            files = [path]
        else:
            folder = Path(described_in(name))
            files = [file for file in folder.iterdir() if file.suffix in READ_ENDINGS and file.name != REPORTS]
            if is_step_folder(name):
                files += path.rglob("*.pt")
            elif has_only_shards(name):
                files += [*folder.glob("global_step*/*"), *folder.glob("latest")]
        for file in sorted(file for file in files if file.is_file()):
            facts = file.stat()
            content.update(f"{file.name} {facts.st_size}".encode())
            changed.update(f"{file.name} {facts.st_mtime_ns}".encode())
            for piece in _sample(file, facts.st_size):
                content.update(piece)
    return {"content": content.hexdigest(), "changed": changed.hexdigest()}


def _sample(path: Path, size: int) -> Iterator[bytes]:
    """Read the header, both ends and evenly spread blocks of a file."""
    with path.open("rb") as file:
        start = file.read(min(size, EDGE_BYTES))
        yield start
        if path.suffix == ".safetensors":  # its first 8 bytes are the length of its header
            yield file.read(max(0, min(int.from_bytes(start[:8], "little"), size) - EDGE_BYTES))
        for block in range(BLOCKS):
            file.seek(size * block // BLOCKS)
            yield file.read(BLOCK_BYTES)
        file.seek(max(0, size - EDGE_BYTES))
        yield file.read()


def choose_zero(candidate: Candidate, machine: Machine, dtype: str) -> str:
    """Choose as the planner does: one copy per rank where it fits, else shards of ZeRO-3, else shards in host memory.

    Raises:
        UserError: where nothing fits.
    """
    choice = plan_evaluation(
        candidate.facts,
        machine,
        dtype=dtype,
        seq_len=max(config.seq_len for config in candidate.configs()),
        batch_tokens=candidate.config.batch_tokens,
        sequence_parallel=candidate.config.sequence_parallel,
    )
    if not choice.plan.fits:
        longest = choice.longest_window
        fits = f" The longest window that fits has {longest:,} tokens." if longest else ""
        raise UserError(
            f"zero=auto for {candidate.name}: {choice.reason}{fits} Use more GPUs or nodes, a smaller batch_tokens or"
            " seq_len, sequence_parallel, or set zero yourself"
        )
    return choice.plan.zero


@contextlib.contextmanager
def loaded_for_scoring(
    config: Any, zero: str, dtype: str, quantization: Quantization | None = None
) -> Iterator[PreTrainedModel]:
    """Load the model of `config` in evaluation mode; its memory is given back at the end, for the next one."""
    _free_memory()  # an earlier sharded model is in cycles
    try:
        with _replicated(config, dtype, quantization) if zero == "0" else _sharded(config, zero, dtype) as model:
            yield model.eval()
    finally:
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _replicated(config: Any, dtype: str, quantization: Quantization | None) -> Iterator[PreTrainedModel]:
    model = build_model(config, dtype=dtype, seed=config.seed, quantization=quantization)
    if not quantization:
        model.to(distributed.device())
    try:
        yield model
    finally:
        for module in model.modules():  # frees the weights, whoever still holds the module
            module._parameters.clear()
            module._buffers.clear()


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
        distributed.extend_timeouts()
        try:
            yield engine.module
        finally:
            engine.destroy()
    finally:
        del registered
        unset_hf_deepspeed_config()
