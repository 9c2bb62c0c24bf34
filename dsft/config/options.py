"""dsft's own options, beside every field of `transformers.TrainingArguments`, and how they are read.

One YAML file (`--config run.yaml`) and flags share the names; a flag wins over the file. Reading never touches a model,
a GPU or the network: that is `preparation.py`.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments

from dsft.config.reader import check_values, field_types, read_flags, read_yaml


@dataclass(kw_only=True)
class ModelFields:
    model: str | None = None
    """Hub id, local folder, or a `config.json` alone (random weights, seeded by `seed`; ZeRO-3 draws others than a
    whole model).
    """
    tokenizer: str | None = None
    """Hub id or folder; by default the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of computation; auto is bfloat16 on a GPU that has it, float32 elsewhere."""
    attn_implementation: str | None = None
    """eager, sdpa, flash_attention_2 ...; by default what transformers picks."""
    trust_remote_code: bool = False
    """Run code that a model repository brings along."""


@dataclass(kw_only=True)
class LoraFields:
    method: Literal["full", "lora", "qlora"] = "full"
    """full trains every weight; lora trains adapters; qlora trains adapters over a quantised base (GPU only)."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: int = 32
    """Scale: adapters are multiplied by alpha / r (alpha / sqrt(r) with use_rslora)."""
    lora_dropout: float = 0.0
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Module names or name endings to adapt; all-linear takes every linear layer but the head."""
    lora_modules_to_save: list[str] = field(default_factory=list)
    """Modules trained and saved in full beside the adapters (embeddings after new tokens, say)."""
    use_dora: bool = False
    """Weight-decomposed LoRA (arXiv 2402.09353)."""
    use_rslora: bool = False
    """Rank-stabilised scale (arXiv 2312.03732)."""
    adapter: str | None = None
    """Folder or hub id of an adapter to go on training; its own shape replaces the lora_* options."""
    quantization_bits: Literal[4, 8] = 4
    """Bits of the base model's weights with method qlora (bitsandbytes)."""


@dataclass(kw_only=True)
class DataFields:
    data: list[str] = field(default_factory=list)
    """Sources, each a file (txt, json, jsonl, csv, parquet, arrow, also .gz and .zst), a glob, a folder of files, or a
    hub data set as NAME,
    NAME:CONFIG or NAME:CONFIG:SPLIT."""
    data_format: Literal["auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca", "template"] = "auto"
    """auto goes by the columns of each source, see dsft/data/formats.py."""
    text_column: str = "text"
    prompt_template: str | None = None
    """With completion_template: a text with columns in braces that is given, such as "Question: {question}\\nAnswer:
    ".
    """
    completion_template: str | None = None
    """A text with columns in braces that is trained on, such as "{answer}"; without prompt_template it is laid end to
    end as text.
    """
    chat_template: str | None = None
    """A Jinja file or a preset (chatml, llama3, gemma, plain) in place of the tokenizer's own; the final model keeps
    it.
    """
    data_name: str | None = None
    """Configuration of a hub data set that names none."""
    data_split: str = "train"
    """Split of a hub data set that names none, slices included (train[:5%])."""
    seq_len: int = 1024
    """Longest sequence, in tokens. Text is cut into windows of this length."""
    train_on: Literal["auto", "all", "answers", "last"] = "auto"
    """What is learnt: all tokens; completions and all turns of assistants; only the last of these turns. auto is all
    for text, else answers.
    """
    too_long: Literal["truncate", "split", "drop", "error"] = "truncate"
    """What happens to a prompt and completion, or a chat, longer than seq_len; it is counted in run.json."""
    bad_rows: Literal["error", "drop"] = "error"
    """What happens to a row that cannot be used (no text, roles out of order ...); dropped ones are counted in
    run.json.
    """


@dataclass(kw_only=True)
class TrainDataFields(DataFields):
    eval_data: list[str] = field(default_factory=list)
    """Held-out data, in the same form."""
    eval_split: str = "validation"
    """Split of a hub data set given as eval_data."""
    eval_fraction: float = 0.0
    """Share of the rows of `data` held out (seeded) where eval_data is not given."""
    data_weights: list[float] = field(default_factory=list)
    """One for each entry of `data`: its share of the sequences of an epoch, which has as many as all sources
    together.
    """
    packing: bool = False
    """Lay several samples into one row of seq_len tokens (best fit), where none sees another; batch sizes then count
    rows.
    """
    batch_tokens: int | None = None
    """Without packing: fill each forward of a rank with sequences of like length up to so many tokens, padding
    included; replaces per_device_train_batch_size.
    """
    streaming: bool = False
    """Read and tokenise while training and keep nothing on disk, for corpora larger than it; needs max_steps."""
    shuffle_buffer: int = 2_000
    """With streaming: sequences among which the next one is drawn."""
    data_cache: str | None = None
    """Folder for prepared tokens; by default dsft/data in the user's cache. Ranks that share it prepare once."""


@dataclass(kw_only=True)
class TimeoutFields:
    """Seconds without progress after which a job of several ranks ends itself on all nodes, with the stacks of all
    ranks.
    """

    start_timeout: float = 300.0
    """Until all ranks have met."""
    load_timeout: float = 1800.0
    """Reading and tokenising data, loading weights, the first step."""
    step_timeout: float = 300.0
    """One forward and backward of training, an optimizer step, or a batch of an evaluation."""
    save_timeout: float = 1800.0
    """Writing a checkpoint or the final model."""
    lost_timeout: float = 60.0
    """Without a sign of life of a node (its power, its link) or of a frozen process."""


@dataclass(kw_only=True)
class TrainConfig(ModelFields, LoraFields, TrainDataFields, TimeoutFields):
    """Everything a training run is told."""

    zero: str = "auto"
    """auto (the planner's choice, see `dsft plan`), 0, 1, 2, 3, 2-offload, 3-offload-param, 3-offload-partial,
    3-offload-optimizer, 3-offload,
    3-hpz, 3-nvme, or the path of a DeepSpeed JSON."""
    memory_check: bool = True
    """Refuse to start what by prediction cannot fit."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; sets gradient_accumulation_steps, and lets the plan choose
    per_device_train_batch_size where that is not given.
    """
    save_minutes: float | None = None
    """A checkpoint at least every so many minutes, beside save_strategy."""
    resume_weights_only: bool = False
    """Take only the weights of resume_from_checkpoint: another optimizer, data or number of steps may follow, in a new
    output_dir.
    """
    overwrite: bool = False
    """Replace the run that output_dir holds."""
    training: dict[str, Any] = field(init=False, default_factory=dict)
    """The TrainingArguments fields that the user set, by name."""


@dataclass(kw_only=True)
class EvalConfig(ModelFields, DataFields, TimeoutFields):
    """Everything a perplexity evaluation is told. Each entry of `data` is a data set of its own."""

    model: list[str] = field(default_factory=list)
    """One or more of: hub id, folder, adapter's folder, run's folder, DeepSpeed checkpoint (also its global_step
    folder), config.json.
    """
    mode: Literal["auto", "windows", "sliding", "rolling", "answers"] = "auto"
    """What is scored, see dsft/perplexity/windows.py; auto is windows for text and answers for prompts with completions
    and
    chats.
    """
    stride: int | None = None
    """Tokens from one sliding window to the next; by default half of seq_len."""
    scope: Literal["corpus", "document"] = "corpus"
    """Sliding windows over all documents laid end to end, or over each by itself."""
    bos: Literal["auto", "on", "off"] = "auto"
    """BOS token before each document: as the tokenizer does, always, or never."""
    separator: str = "eos"
    """Between documents laid end to end: eos (the end token), none, or a text."""
    max_documents: int | None = None
    """Only the first so many documents of each data set."""
    zero: str = "auto"
    """0 holds one copy of the model per rank; 3 shards it over all ranks, 3-offload in host memory; a DeepSpeed JSON of
    stage 3
    may put parameters on NVMe; auto takes 0 where it fits."""
    batch_tokens: int | None = None
    """Tokens (padding included) per forward of one rank; by default 16384 on a GPU and 4096 on a CPU, whose caches are
    small, or one window.
    """
    verify: int = 0
    """So many random documents are scored once more the plain way (full logits, batch of one); the largest difference
    is reported.
    """
    output_dir: str | None = None
    """Folder for perplexity.json and documents.parquet, and to continue from after an interruption; by default only the
    screen.
    """
    seed: int = 42
    """Seed of the weights where the model is a config.json alone, and of the documents to verify."""


def read_config(cls: type, argv: Sequence[str], problems: list[str]):
    """The `cls` that `argv` (with `--config FILE`) describes. Every fault goes to `problems` and leaves the default."""
    flags = read_flags(argv, problems)
    path = flags.pop("config", None)
    values = read_yaml(path, problems) if isinstance(path, str) else {}
    if path is True:
        problems.append("--config: needs the path of a YAML file")
    return make_config(cls, values | flags, problems)


def make_config(cls: type, values: dict[str, Any], problems: list[str]):
    """The `cls` with these options by name, checked; faults go to `problems`."""
    own_types = field_types(cls)
    all_types = field_types(cls, TrainingArguments) if cls is TrainConfig else own_types
    if values.get("resume_from_checkpoint") is True:  # the bare flag, and what transformers' own scripts take
        values = values | {"resume_from_checkpoint": "auto"}
    checked = check_values(values, all_types, problems)
    for key in ("output_dir", "model", "tokenizer", "adapter"):
        if isinstance(checked.get(key), str):
            checked[key] = os.path.expanduser(checked[key])
    config = cls(**{key: value for key, value in checked.items() if key in own_types})
    if cls is TrainConfig:
        config.training = {key: value for key, value in checked.items() if key not in own_types}
    check_config(config, problems)
    return config


def as_dict(config) -> dict[str, Any]:
    """The configuration for run.json; tokens of services are left out."""
    values = dataclasses.asdict(config)
    values |= values.pop("training", {})
    return {key: value for key, value in values.items() if not key.endswith("_token")}


def check_config(config, problems: list[str]) -> None:
    """Contradictions visible in the options alone."""
    if not config.model:
        problems.append("model: missing; name a hub id, a local folder or a config.json")
    if not config.data:
        problems.append("data: missing; name a file, a folder, a glob or a hub data set")
    for field_ in dataclasses.fields(TimeoutFields):
        if not getattr(config, field_.name) > 0:
            problems.append(f"{field_.name}={getattr(config, field_.name)}: must be more than 0 seconds")
    if config.seq_len < 2:
        problems.append(
            f"seq_len={config.seq_len}: a window needs at least 2 tokens, one of context and one to predict"
        )
    if config.prompt_template and not config.completion_template:
        problems.append("prompt_template needs completion_template: what is trained on")
    if config.data_format == "template" and not config.completion_template:
        problems.append("data_format=template needs completion_template")
    if config.completion_template and config.data_format not in ("auto", "template"):
        problems.append(f"completion_template contradicts data_format={config.data_format}; keep one")
    if isinstance(config, TrainConfig):
        _check_training(config, problems)
    else:
        _check_evaluation(config, problems)


def _check_training(config: TrainConfig, problems: list[str]) -> None:  # noqa: C901
    training = config.training
    _check_train_data(config, problems)
    if not training.get("output_dir"):
        problems.append("output_dir: missing; name the folder of this run, for example runs/first")
    for key in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config"):
        if training.get(key):
            problems.append(
                f"{key}: dsft sets up sharding itself; use zero, which also takes the path of a DeepSpeed JSON"
            )
    half = {"bf16": "bfloat16", "fp16": "float16"}
    asked = [key for key in half if training.get(key)]
    if len(asked) == 2:
        problems.append("bf16 and fp16 are both true; keep one")
    elif asked and config.dtype not in ("auto", half[asked[0]]):
        problems.append(f"dtype={config.dtype} contradicts {asked[0]}=true; keep one")
    if config.resume_weights_only and not training.get("resume_from_checkpoint"):
        problems.append("resume_weights_only: name the checkpoint with resume_from_checkpoint")
    if config.save_minutes is not None and not config.save_minutes > 0:
        problems.append(f"save_minutes={config.save_minutes}: must be more than 0")
    if training.get("learning_rate", 0) < 0:
        problems.append(f"learning_rate={training['learning_rate']}: must not be negative")
    metric = training.get("metric_for_best_model")
    if metric and metric.removeprefix("eval_") not in ("loss", "perplexity"):
        problems.append(f"metric_for_best_model={metric}: evaluation gives loss and perplexity")
    if training.get("load_best_model_at_end") and training.get("save_only_model"):
        problems.append("load_best_model_at_end needs whole checkpoints; set save_only_model: false")
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "lora_r"):
        value = training.get(key, getattr(config, key, None))
        if value is not None and value < 1:
            problems.append(f"{key}={value}: must be at least 1")
    if config.global_batch_size and "gradient_accumulation_steps" in training:
        problems.append("global_batch_size and gradient_accumulation_steps are both set; keep one, the other follows")
    if config.method == "full" and config.adapter:
        problems.append(f"adapter={config.adapter} needs method lora or qlora; method is full")
    if not 0 <= config.lora_dropout < 1:
        problems.append(f"lora_dropout={config.lora_dropout}: must be at least 0 and less than 1")


def _check_train_data(config: TrainConfig, problems: list[str]) -> None:
    if not 0 <= config.eval_fraction < 1:
        problems.append(f"eval_fraction={config.eval_fraction}: must be at least 0 and less than 1")
    if config.data_weights and len(config.data_weights) != len(config.data):
        problems.append(
            f"data_weights: {len(config.data_weights)} weights for {len(config.data)} entries of data; give one for"
            " each"
        )
    if any(not weight > 0 for weight in config.data_weights):
        problems.append(
            f"data_weights={config.data_weights}: each must be more than 0; leave an entry of data out instead"
        )
    if config.batch_tokens is not None:
        if config.packing:
            problems.append("packing and batch_tokens are both set; packed rows are full already, keep one")
        if config.batch_tokens < config.seq_len:
            problems.append(
                f"batch_tokens={config.batch_tokens} is less than seq_len={config.seq_len}: one sequence must fit;"
                " raise batch_tokens"
            )
        for key in ("per_device_train_batch_size", "global_batch_size"):
            if config.training.get(key) or getattr(config, key, None):
                problems.append(
                    f"batch_tokens and {key} are both set; keep one: a batch filled by tokens has as many sequences as"
                    " fit (gradient_accumulation_steps counts such batches)"
                )
    if config.streaming:
        if not config.training.get("max_steps", -1) > 0:
            problems.append("streaming needs max_steps: how long the stream is is not known")
        if config.eval_fraction:
            problems.append("streaming has no rows to hold out a share of; give eval_data")
        if config.training.get("dataloader_num_workers", 0):
            problems.append(
                "streaming and dataloader_num_workers cannot be combined: each worker would read the whole stream"
            )
        if config.batch_tokens is not None:
            problems.append("streaming and batch_tokens cannot be combined; use packing")
    if config.shuffle_buffer < 1:
        problems.append(f"shuffle_buffer={config.shuffle_buffer}: must be at least 1")


def _check_evaluation(config: EvalConfig, problems: list[str]) -> None:
    if config.batch_tokens is not None and config.batch_tokens < config.seq_len:
        problems.append(
            f"batch_tokens={config.batch_tokens} is less than seq_len={config.seq_len}: one window must fit; raise"
            " batch_tokens"
        )
    if config.stride is not None and not 0 < config.stride < config.seq_len:
        problems.append(
            f"stride={config.stride}: must be at least 1 and less than seq_len={config.seq_len}, so that every token"
            " has context"
        )
    if config.max_documents is not None and config.max_documents < 1:
        problems.append(f"max_documents={config.max_documents}: must be at least 1")
    if config.bad_rows != "error":
        problems.append(f"bad_rows={config.bad_rows}: an evaluation scores every row; mend or remove the bad ones")
    if config.verify < 0:
        problems.append(f"verify={config.verify}: must be 0 or a number of documents")
