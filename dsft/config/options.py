"""dsft's own options, beside every field of `transformers.TrainingArguments`, and tables of other trainers' names.

Options are immutable. A run's decisions make new options, each with its reason (`decide`). `reader.py` and `setup`
read and check them.

The text under each field is its help in `dsft train --help` and docs/reference.md, with one group for each class.
"""

import ast
import builtins
import collections
import dataclasses
import enum
import functools
import importlib.util
import json
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsft.config.user_code import KEYS, name_of

HALF_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}
"""Flag of TrainingArguments -> the `dtype` with the same meaning."""
UNQUANTISED = "none"
"""A value of an evaluation's `quantization`: the model as it is on disk."""

_WHOLE_MATRICES = (
    "GaLore and APOLLO project whole matrices, and ZeRO's shards are flat pieces of them; optim adamw_8bit takes a"
    " quarter of AdamW's memory, method lora less"
)
_GALORE = ["galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"]
REFUSED_OPTIMIZERS = {
    **dict.fromkeys([name + layerwise for name in _GALORE for layerwise in ("", "_layerwise")], _WHOLE_MATRICES),
    **dict.fromkeys(
        ("lomo", "adalomo"),
        "it updates weights within the backward pass, before ZeRO has added up the gradients of all ranks; use"
        " adamw_8bit or lion_8bit",
    ),
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
        "removed; use adamw_torch with lr_scheduler_type constant_with_warmup",
    ),
}
"""Refused values of `optim` -> why."""
REFUSED_ARGUMENTS = {
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config"),
        "dsft sets up sharding itself; use zero, which also takes the path of a DeepSpeed JSON",
    ),
    "accelerator_config": "dsft sets up accelerate itself; use global_batch_size and gradient_accumulation_steps",
    "parallelism_config": "dsft sets up its ranks itself; use zero, and sequence_parallel for long sequences",
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "evaluations compute in dtype, on the way as at the end; dsft eval --dtype evaluates in another",
    ),
    "do_predict": "dsft makes no predictions; dsft eval measures perplexity",
    "optim_target_modules": _WHOLE_MATRICES,
    "auto_find_batch_size": "a rank that tried again with a smaller batch would leave the others waiting, and"
    " steps would contain other samples than planned; leave per_device_train_batch_size to the plan",
    "save_on_each_node": "checkpoints are verified and resumed from one output_dir that all nodes share",
}
"""Refused fields of TrainingArguments, which would not do what they promise -> why."""
_IGNORED = {
    "use_cpu remove_unused_columns": "dsft sets it (DS_ACCELERATOR=cpu in the environment asks for CPU ranks)",
    "do_train do_eval": "dsft train always trains; eval_strategy decides when it evaluates",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend": "DeepSpeed"
    " reduces gradients, not torch's DistributedDataParallel",
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics"
    " batch_eval_metrics label_names": "dsft evaluates by itself: it sums nats over tokens and gathers no logits",
    "length_column_name": "dsft knows the length of each sequence",
    "average_tokens_across_devices": "the loss is always the mean over the trained tokens of all ranks",
    "skip_memory_metrics": "dsft logs peak memory by itself (peak_gpu_gib, peak_host_gib)",
    "logging_nan_inf_filter": "training stops at a loss that is NaN or infinite",
    "include_num_input_tokens_seen": "dsft counts the tokens of all ranks without padding",
    "use_cache": "a training reads no cache, and final/ has the model's own setting",
    "enable_jit_checkpoint": "dsft always saves at SIGTERM and SIGUSR1",
    "restore_callback_states_from_checkpoint": "a resume always takes the counts of dsft's callbacks",
}
IGNORED_ARGUMENTS = {name: why for names, why in _IGNORED.items() for name in names.split()}
"""Fields of TrainingArguments without effect -> why. They are dropped with a note."""
REMOVED_OPTIONS: dict[str, str] = {
    "resume_weights_only": "name the checkpoint as model (of LoRA as adapter), and a new output_dir",
    "nodes": "torchrun starts a run on every node: scripts/torchrun/train",
    "node_rank": "torchrun starts a run on every node: scripts/torchrun/train",
    "no_ssh": "on every node deepspeed --hostfile HOSTS --no_ssh --node_rank N dsft/train.py --config run.yaml",
    "slurm": "sbatch scripts/slurm/torchrun.sbatch --config run.yaml",
    "accelerate": "accelerate launch --config_file FILE dsft/train.py --config run.yaml",
    "write": "dsft plan --out FOLDER",
    "attention": "dsft plan follows attn_implementation",
    "all": "dsft plan --explain lists every candidate",
    "streaming": "data is tokenised once, on disk, and kept there (data_cache)",
    "shuffle_buffer": "data is tokenised once, on disk, and every epoch takes all of it in another order",
    "data_weights": "name an entry of data several times to train it as often in an epoch",
    "batch_tokens": "use packing, which fills rows of seq_len (dsft eval keeps batch_tokens)",
    "sequence_parallel": "an evaluation keeps each window on one rank (a training takes it); use zero 3 or 3-offload",
    "tiled_mlp": "use_liger_kernel takes less memory, sequence_parallel spreads long sequences over GPUs",
    "source_column": "list each source as an entry of data; dsft eval takes --group_by COLUMN",
    "suite": "name the data sets with data, such as Salesforce/wikitext:wikitext-2-raw-v1:test",
    "context_curve": "evaluate once for each seq_len, with mode sliding and scope document",
    "async_save": "checkpoints are written while training waits; leave it out",
    **dict.fromkeys(
        ("cheapest", "prices", "dollars_per_gpu_hour", "largest", "scaling"),
        "dsft plan compares machines: --gpus 1x4090,8xH100",
    ),
    **dict.fromkeys(("record", "calibrate", "machine"), "a run prints its own memory and time beside the plan's"),
    "fp32_reduction": 'name a DeepSpeed JSON with "communication_data_type": "fp32" as zero',
    "nvme": "NVMe offload is not planned; name a DeepSpeed JSON with it as zero",
    "gpu_type": "--gpus names the card: 8xH100",
    "tokens_per_step": "use global_batch_size",
    "num_nodes": "--include names the hosts to use: node-0@node-1; or name fewer in the host file",
    "wait_for_nodes": "once the node is back, start again with --resume_from_checkpoint auto, or --exclude it",
}
"""Removed options -> what to use instead."""
_SAME_MEANING = {
    "model": "model_name_or_path base_model model_name pretrained_model_name_or_path",
    "tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "revision": "model_revision",
    "dtype": "torch_dtype",
    "lora_r": "lora_rank r",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "modules_to_save additional_target",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
    "adapter": "lora_model_dir adapter_name_or_path",
    "data": "dataset_name dataset_path data_path train_file data_files",
    "data_name": "dataset_config dataset_config_name",
    "data_split": "dataset_train_split",
    "eval_data": "validation_file eval_dataset",
    "eval_fraction": "val_set_size val_size test_size",
    "text_column": "dataset_text_field",
    "data_cache": "dataset_prepared_path tokenized_path",
    "seq_len": "max_length max_seq_length max_seq_len cutoff_len sequence_len seq_length block_size",
    "packing": "sample_packing neat_packing",
    "per_device_train_batch_size": "micro_batch_size per_gpu_train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation accumulate_grad_batches",
    "num_train_epochs": "num_epochs epochs max_epochs",
    "learning_rate": "lr",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_steps": "warmup_ratio num_warmup_steps",
    "max_grad_norm": "clip_grad_norm gradient_clipping",
    "gradient_checkpointing": "enable_activation_checkpointing use_gradient_checkpointing activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "use_liger_kernel": "enable_liger_kernel",
    "torch_compile": "compile",
    "sequence_parallel": "sequence_parallel_degree sequence_parallel_size context_parallel_size",
    "router_aux_loss": "router_aux_loss_coef",
    "output_dir": "save_dir output_path output out",
    "resume_from_checkpoint": "resume auto_resume_from_checkpoints",
    "overwrite": "overwrite_output_dir",
    "eval_strategy": "evaluation_strategy",
    "logging_steps": "log_every_n_steps log_interval",
    "max_documents": "max_eval_samples limit",
}
OURS = {theirs: ours for ours, names in _SAME_MEANING.items() for theirs in names.split()}
"""Another trainer's name -> the option of dsft that takes the same value."""

_OTHER_FORM = {
    "flash_attention flash_attn sdp_attention": "not needed: transformers picks the attention kernel",
    "use_peft use_lora finetuning_type": "method is full, lora or qlora",
    "load_in_4bit load_in_8bit quantization_bit": "use method: qlora with quantization: nf4 or int8",
    "lora_target_linear": "not needed: all linear layers are adapted by default",
    "datasets dataset dataset_mixer": "data is a list of files or hub data sets, as [a.jsonl, owner/name:config:split]",
    "train_on_inputs assistant_only_loss completion_only_loss": "train_on is answers (the default), all or last",
    "template": "chat_template is a Jinja file or a preset; the tokenizer's own is the default",
    "zero_stage": "zero is auto, 0, 1, 2, 3, or the path of a DeepSpeed JSON",
    "batch_size train_batch_size": "global_batch_size counts the sequences of a step on all GPUs",
    "evals_per_epoch": "use eval_steps; below 1 it is a share of all steps",
    "saves_per_epoch": "use save_steps; below 1 it is a share of all steps",
    "wandb_project use_wandb": "use report_to: wandb, with WANDB_PROJECT in the environment",
    "nproc_per_node num_processes n_gpu": "dsft train --num_gpus N starts N ranks; the default is every GPU",
    "stage": "dsft train finetunes on text, prompts or chats; it has no stages such as dpo or rm",
    "tasks num_fewshot": "dsft eval measures perplexity; lm-evaluation-harness reads the folder of dsft export",
    "group_by_length": "use train_sampling_strategy: group_by_length",
}
HINTS = {theirs: hint for names, hint in _OTHER_FORM.items() for theirs in names.split()}
"""Another trainer's name whose value has another form in dsft -> what to write instead."""

SAME_VALUES = {
    ("zero", "zero0"): "0",
    ("zero", "zero1"): "1",
    ("zero", "zero2"): "2",
    ("zero", "zero3"): "3",
    ("zero", "zero2_offload"): "2-offload",
    ("zero", "zero3_offload"): "3-offload",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "fp16"): "float16",
    ("dtype", "fp32"): "float32",
    ("bf16", "auto"): None,  # dtype is auto
    ("lora_target_modules", "all"): "all-linear",
    ("lora_target_modules", "['all']"): "all-linear",
    ("optim", "adamw"): "adamw_torch",
    ("report_to", "none"): "none",
    ("resume_from_checkpoint", "true"): "auto",
    ("resume_from_checkpoint", "false"): None,
}
"""(option, another trainer's value in lower case) -> dsft's."""
LEARNING_RATES = {"full": 1e-5, "lora": 1e-4, "qlora": 1e-4}
"""Defaults by method: adapters take ten times the rate of full finetuning."""
TRAINING_DEFAULTS = {
    "logging_steps": 10,
    "logging_first_step": True,
    "report_to": "none",
    "save_total_limit": 2,
    "ddp_timeout": 1800,
    "greater_is_better": False,  # transformers' is True for names that do not end in "loss", such as perplexity
}
"""Defaults that replace TrainingArguments'."""
EVALUATES = {
    "eval_strategy": ("steps", "epoch"),
    "load_best_model_at_end": (True,),
    "eval_on_start": (True,),
    "save_strategy": ("best",),
}
"""Options of TrainingArguments -> the values that need held-out data."""


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """Model: what is loaded, and how it computes."""

    notes: tuple[str, ...] = field(default=(), metadata={"option": False})
    """Notes on names and values that were read as others."""
    model: str | None = None
    """Hub id, local folder, or a `config.json` alone (random weights, seeded by `seed`; ZeRO-3 draws others than the
    other stages)."""
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
    trust_checkpoint: bool = False
    """Read pickles (DeepSpeed's shards, `*.bin`) that ask for other classes than checkpoints contain: they may run any
    code."""


@dataclass(frozen=True, kw_only=True)
class LoraFields:
    """LoRA: adapters in place of all weights."""

    method: Literal["full", "lora", "qlora"] = "full"
    """full trains every weight; lora trains adapters; qlora trains adapters over a quantised base (GPU only)."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: int = 32
    """Scale: adapters are multiplied by alpha / r (alpha / sqrt(r) with use_rslora)."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs set to zero while training, from 0 to less than 1."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Module names or name endings to adapt; all-linear takes every linear layer but the head."""
    lora_modules_to_save: list[str] = field(default_factory=list)
    """Modules trained and saved in full beside the adapters (embeddings after new tokens, say)."""
    use_dora: bool = False
    """Weight-decomposed LoRA (arXiv 2402.09353)."""
    use_rslora: bool = False
    """Rank-stabilised scale (arXiv 2312.03732)."""
    lora_options: dict[str, Any] = field(default_factory=dict)
    """Further fields of peft.LoraConfig, such as {init_lora_weights: pissa, rank_pattern: {q_proj: 32}}."""
    loraplus_lr_ratio: float | None = None
    """LoRA+ (arXiv 2402.12354): learning rate of the adapters' B matrices, as a multiple of learning_rate."""
    adapter: str | None = None
    """Folder or hub id of an adapter to train further; its own shape replaces the lora_* options."""
    quantization: Literal["nf4", "int8"] = "nf4"
    """Format of the base model's weights with method qlora, such as nf4 or int8 (dsft/models/package.py)."""


@dataclass(frozen=True, kw_only=True)
class TrainedFields:
    """Parameters: which of those that the method trains are trained, by regular expressions found in their names."""

    trainable: list[str] = field(default_factory=list)
    """Train only what one of these finds, such as 'layers\\.3[01]\\.' and 'norm'; by default all."""
    frozen: list[str] = field(default_factory=list)
    """Leave out what one of these finds, such as embed_tokens; it is saved as it was."""
    add_tokens: list[str] = field(default_factory=list)
    """Texts that become one token each; `markers` stands for those of the chat template that the tokenizer splits.
    Embedding and head grow to a multiple of 64; LoRA trains the new rows alone."""
    learning_rates: dict[str, float] = field(default_factory=dict)
    """Regular expression -> factor of learning_rate, such as {embed_tokens: 0.1}; the first that matches counts."""


@dataclass(frozen=True, kw_only=True)
class DataFields:
    """Data: where it is, and how a row becomes tokens."""

    data: list[str] = field(default_factory=list)
    """Sources, each a file (parquet, arrow, or txt, json, jsonl, csv, tsv, these also with .gz, .bz2 or .zst), a
    glob, a folder of files, or a hub data set as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."""
    data_format: Literal["auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca", "template"] = "auto"
    """auto goes by the columns of each source, see docs/data.md."""
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    """Columns of a table that become a chat, such as {user: question, assistant: answer}; user may list several, system
    and history may be there too. {messages: COLUMN} names a column of whole chats."""
    as_chat: bool = False
    """Make chats of prompts with completions: a user's turn and an assistant's, in the chat template."""
    text_column: str = "text"
    """Column that contains the text, for data_format text."""
    prompt_template: str | None = None
    """With completion_template: a text with columns in braces that is given, such as
    "Question: {question}\\nAnswer: "."""
    completion_template: str | None = None
    """A text with columns in braces that is trained on, such as "{answer}"; without prompt_template the texts are
    joined end to end."""
    chat_template: str | None = None
    """A Jinja file or a preset such as chatml (dsft/models/templates) in place of the tokenizer's own; the final model
    keeps it."""
    map_row: Any = None
    """Your own function as module:function: it gets each row, a dict by column, and returns the row to use, or None to
    leave it out. See docs/python.md."""
    data_name: str | None = None
    """Configuration of a hub data set that names none."""
    data_split: str = "train"
    """Split of a hub data set that names none, slices included (train[:5%]), and of a folder or glob whose files are
    named as several splits."""
    seq_len: int = 1024
    """Longest sequence, in tokens. Text is cut into windows of this length."""
    train_on: Literal["auto", "all", "answers", "last"] = "auto"
    """What is trained: all tokens; completions and all turns of assistants; only the last of these turns. auto is all
    for text, else answers."""
    train_thinking: Literal["auto", "all", "last", "none"] = "auto"
    """Which reasoning of assistants is trained: auto is all there is; all also trains the empty think blocks that a
    template renders; last only that of the last answer; none only what follows it."""
    drop_unrendered: bool = False
    """Train chats of which the chat template leaves out a part (reasoning, a name, tools) without it, which are
    counted. Else they are bad rows."""
    chat_date: str | None = None
    """Day that a chat template prints, such as 2026-01-31; by default that of the first start, also in a resume."""
    drop_keys: list[str] = field(default_factory=list)
    """Columns, and keys of messages, to ignore that would be refused, such as images or score."""
    too_long: Literal["drop", "truncate", "split", "error"] = "drop"
    """What happens to a prompt and completion, or a chat, longer than seq_len; it is counted in run.json. A model
    that learns from truncated answers does not learn to stop."""
    bad_rows: Literal["error", "drop"] = "error"
    """What happens to a row that cannot be used (no text, two messages of one role in a row ...); dropped ones are
    counted in run.json."""
    data_cache: str | None = None
    """Folder for prepared tokens; by default dsft/data in the user's cache. Ranks that share it prepare once."""


@dataclass(frozen=True, kw_only=True)
class TrainDataFields(DataFields):
    """Training data: what is held out, and how sequences form batches."""

    eval_data: dict[str, str] | list[str] = field(default_factory=list)
    """Held-out data, in the same form. A mapping names each entry, as {chat: a.jsonl, code: b.jsonl}: then each is
    measured by itself too (eval_chat_loss, eval_code_perplexity), and their mean (eval_macro_loss)."""
    eval_split: str = "validation"
    """Split of a hub data set given as eval_data."""
    eval_fraction: float = 0.0
    """Share of the rows of `data` held out (seeded) if eval_data is not given; of a text file its end."""
    generate_samples: int | list[str] = 0
    """Prompts that are answered at each evaluation, in up to 64 tokens by greedy decoding, or how many of the
    held-out set: printed, logged and in the report. Under ZeRO-3 each rank then gathers all weights once."""
    packing: bool = False
    """Put several samples into one row of seq_len tokens (best fit), where none sees another; batch sizes then count
    rows."""


@dataclass(frozen=True, kw_only=True)
class ZeroFields:
    """ZeRO: how the states of training are sharded and offloaded."""

    zero: str = "auto"
    """auto (the planner's choice, see `dsft plan`), 0, 1, 2, 3, 2-offload, 3-offload-param, 3-offload-optimizer,
    3-offload, 3-hpz, or the path of a DeepSpeed JSON."""
    memory_check: bool = True
    """Refuse to start what by prediction cannot fit."""
    fp32_accumulation: bool | Literal["auto"] = "auto"
    """Add up the gradients of a step's micro batches in float32 if the model computes in half precision; ZeRO 2 and
    3 can. auto does in bfloat16 from 4 micro batches on if it fits, and zero=auto then takes no other."""
    states: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights' copy that the optimizer updates, of its gradients and its moments: bfloat16 takes half their
    memory, and loses updates that are small beside their weight (docs/methods.md). ZeRO 1 to 3, with dtype bfloat16."""


@dataclass(frozen=True, kw_only=True)
class StepFields:
    """Training: steps, saving and resuming."""

    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; sets gradient_accumulation_steps, and lets the plan choose
    per_device_train_batch_size if that is not given."""
    router_aux_loss: float | None = None
    """Of a mixture of experts: coefficient of the router's auxiliary loss, which spreads tokens over experts; 0 adds
    none. By default as the model's config has it."""
    sequence_parallel: int = 1
    """Ranks that share each sequence, so that long ones fit: it must divide the number of ranks and the model's heads.
    Batch sizes then count sequences of these ranks together."""
    tiled_loss: bool | Literal["auto"] = "auto"
    """Compute the loss for some tokens' logits at a time, so that those of all tokens never exist. auto does from a
    vocabulary of 32,000 if a trial finds the same loss and gradients."""
    compute_loss: Any = None
    """Your own loss as module:function: it gets logits [N, vocabulary] and labels [N] of trained tokens, and returns
    the loss of each, [N]. See docs/python.md."""
    callbacks: list[Any] = field(default_factory=list)
    """Your own classes of transformers.TrainerCallback as module:class. See docs/python.md."""
    save_minutes: float | None = None
    """Longest time between two checkpoints, in minutes, beside save_strategy."""
    verify_resume: bool = True
    """Compare every byte of the checkpoint to resume from with its manifest, before data and model load; auto takes the
    next older one if something has changed. A checkpoint as model or adapter is compared, too."""
    overwrite: bool = False
    """Replace the run in output_dir."""
    max_skipped_steps: int | None = None
    """End the training after so many optimizer steps in a row that DeepSpeed skips, since a gradient is infinite or
    NaN; by default 10, in fp16, which searches the loss's scale so, 17."""
    early_stopping_patience: int | None = None
    """End the training after so many evaluations in a row without a better metric_for_best_model (by default the
    held-out loss); load_best_model_at_end takes the best weights."""
    early_stopping_threshold: float = 0.0
    """How much better counts."""


@dataclass(frozen=True, kw_only=True)
class TimeoutFields:
    """Time limits: seconds without progress after which a job of several ranks ends itself on all nodes, with the
    stacks of all ranks."""

    start_timeout: float = 300.0
    """For the rendezvous of all ranks."""
    load_timeout: float = 1800.0
    """Reading and tokenising data, loading weights, the first step. A file that is read or written is progress."""
    compile_timeout: float = 3600.0
    """With torch_compile: the first step, in which ranks compile."""
    step_timeout: float = 300.0
    """One forward and backward of training, an optimizer step, or a batch of an evaluation. With offload to NVMe at
    least ten planned steps."""
    save_timeout: float = 1800.0
    """Writing a checkpoint or the final model: without a MiB read or written, however long it takes in all."""
    lost_timeout: float = 60.0
    """Without a heartbeat of a node (its power, its link) or of a frozen process."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelFields, LoraFields, TrainedFields, TrainDataFields, ZeroFields, StepFields, TimeoutFields):
    """All options of a training run."""

    training: Mapping[str, Any] = field(default_factory=dict, metadata={"option": False})
    """The TrainingArguments fields that are set, by name."""

    @property
    def has_held_out(self) -> bool:
        return bool(self.eval_data or self.eval_fraction)

    @property
    def held_out_entries(self) -> list[str]:
        """Entries of eval_data, named or not."""
        return [*self.eval_data.values()] if isinstance(self.eval_data, dict) else self.eval_data

    @property
    def held_out_names(self) -> list[str]:
        """Their names, in the same order; empty if they have none."""
        return [*self.eval_data] if isinstance(self.eval_data, dict) else []

    def value(self, name: str) -> Any:
        """Returns the option `name`, of dsft or of TrainingArguments; None if it is not set."""
        return getattr(self, name) if hasattr(self, name) else self.training.get(name)


@dataclass(frozen=True)
class Decision:
    name: str
    value: Any
    """None unsets an option of TrainingArguments."""
    reason: str


def decide(options: TrainConfig, decisions: Iterable[Decision]) -> TrainConfig:
    """Returns the options with the decisions applied, in their order."""
    for decision in decisions:
        if hasattr(options, decision.name):
            options = dataclasses.replace(options, **{decision.name: decision.value})
        else:
            training = dict(options.training)
            if decision.value is None:
                training.pop(decision.name, None)
            else:
                training[decision.name] = decision.value
            options = dataclasses.replace(options, training=training)
    return options


def flagged_dtype(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the dtype that the flags bf16 and fp16 ask for, and that flag; None without them."""
    for flag, dtype in HALF_PRECISION.items():
        if options.get(flag):
            return dtype, f"{flag}=true"
    if "bf16" in options and options.get("dtype", "auto") == "auto":
        return "float32", "bf16=false"
    return None


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ModelFields, DataFields, TimeoutFields):
    """Evaluation: what is scored, and how. Each entry of `data` is a data set of its own."""

    too_long: Literal["drop", "truncate", "split", "error"] = "truncate"
    """What happens to a prompt and completion, or a chat, longer than seq_len: drop scores nothing of it, truncate what
    is in its first seq_len tokens, and split each piece of seq_len tokens by itself."""

    model: list[str] = field(default_factory=list)
    """One or more of: hub id, folder, adapter's folder, run's folder, DeepSpeed checkpoint (also its global_step
    folder), config.json, GGUF file."""
    run: str | None = None
    """A training's run folder: its final model, the form of its data and its held-out data are taken, if no other
    option overrides them; so does --config with a training's file."""
    eval_fraction: float = 0.0
    """Score only the rows of `data` that a training with this eval_fraction and data_seed holds out."""
    data_seed: int = 42
    """Of the training, for eval_fraction."""
    mode: Literal["auto", "windows", "sliding", "rolling", "answers"] = "auto"
    """What is scored, see docs/perplexity.md; auto is windows for text and answers for prompts with completions and
    chats."""
    protocol: Literal["gptq", "llama.cpp", "lm-eval", "hf"] | None = None
    """What a paper or tool reports, such as gptq, lm-eval or hf, in place of mode, scope, bos and separator, see
    docs/perplexity.md. seq_len is the tool's own if it is not given."""
    has_seq_len: bool = field(default=True, metadata={"option": False})
    """Whether seq_len was named; else a protocol takes its own."""
    stride: int | None = None
    """Tokens from one sliding window to the next; by default half of seq_len."""
    scope: Literal["corpus", "document"] = "corpus"
    """Sliding windows over all documents joined end to end, or over each by itself."""
    bos: Literal["auto", "on", "off"] = "auto"
    """BOS token before each document: as the tokenizer does, always, or never."""
    separator: str = "eos"
    """Between documents joined end to end: eos (the end token), none, or a text."""
    max_documents: int | None = None
    """Largest number of documents of each data set, the first ones."""
    zero: str = "auto"
    """0 keeps one copy of the model per rank; 3 shards it over all ranks, 3-offload in host memory; a DeepSpeed JSON of
    stage 3 may offload parameters to the host; auto takes 0 if it fits."""
    batch_tokens: int | None = None
    """Tokens (padding included) per forward of one rank; by default 16384 on a GPU and 4096 on a CPU, whose caches are
    small, or one window."""
    quantization: list[Literal["none", "nf4", "int8"]] = field(default_factory=lambda: ["none"])
    """Formats of the weights, each with a result of each model: none (as they are on disk), or one that is
    made while they load, nf4 or int8. A model that is quantised
    on disk (GPTQ, AWQ, FP8, a GGUF file ...) is evaluated once, as it is; reference is never quantised."""
    reference: str | None = None
    """A second model, beside which every model predicts: KL divergence both ways, share of the same top tokens.
    It must have the same tokenizer."""
    group_by: list[str] = field(default_factory=list)
    """Columns of the data, such as domain: each splits the result into the documents of each of its values."""
    save_tokens: bool = False
    """Keep the nats of every scored token in tokens.parquet, a folder in output_dir."""
    verify: int = 0
    """Number of random documents that are scored again with full logits and a batch of one; the largest difference is
    reported."""
    output_dir: str | None = None
    """Folder for perplexity.json and documents.parquet, and to continue from after an interruption; by default results
    are only printed."""
    seed: int = 42
    """Seed of the weights if the model is a config.json alone, and of the documents to verify."""

    def value(self, name: str) -> Any:
        """The option called `name`; None if there is none, or it is not set."""
        return getattr(self, name, None)


@dataclass(kw_only=True)
class HostFields:
    """Hosts: those of a host file; without one this machine."""

    hostfile: str | None = None
    """DeepSpeed's host file: one line per node, `name slots=N`; reached through ssh from here."""
    include: str | None = None
    """Hosts and GPUs of the host file to use, as DeepSpeed writes it: node-0@node-1:0,2"""
    exclude: str | None = None
    """Hosts and GPUs of the host file to leave out, in the same form."""
    num_gpus: int | None = None
    """Ranks on each node; by default its GPUs, without GPUs 2."""
    master_addr: str | None = None
    """Address of the first node, to which all ranks connect; by default that of the first host."""
    master_port: int | None = None
    """By default a free port."""


@dataclass(kw_only=True)
class LaunchOptions(HostFields):
    """Launch: how the ranks are started; without a host file on all GPUs of this machine."""

    bind_cores_to_rank: bool = False
    """DeepSpeed's launcher ties each rank to cores of its own and the memory beside them, for offload (numactl)."""
    dry_run: bool = False
    """Print the command and stop."""
    no_preflight: bool = False
    """Start without examining the nodes first (see `dsft doctor`)."""
    max_restarts: int = 0
    """Number of times that a job is restarted after a fault, a training from its last checkpoint; not after exit codes
    2, 3, 4 and 75, nor after Ctrl-C."""


def common_options(options: TrainConfig | EvalConfig) -> dict[str, Any]:
    """Returns the options that must be the same on all ranks, by name.

    Each node's home folder is written as ~. `output_dir` is not compared if each node may have its own: in an
    evaluation, and in a training without checkpoints.
    """
    values = as_dict(options)
    left_out = {"data_cache", "local_rank"}  # of one machine
    if isinstance(options, EvalConfig) or values.get("save_strategy") == "no":
        left_out.add("output_dir")
    kept = {name: value for name, value in values.items() if name not in left_out}
    return json.loads(json.dumps(kept, ensure_ascii=False).replace(f'"{os.path.expanduser("~/")}', '"~/'))


def as_dict(options: TrainConfig | EvalConfig) -> dict[str, Any]:
    """Returns the options for run.json; tokens of services are left out."""
    code = {key: name_of(getattr(options, key)) for key in KEYS if hasattr(options, key)}
    values = dataclasses.asdict(dataclasses.replace(options, **code))
    values |= values.pop("training", {})
    values.pop("notes")
    return {key: value for key, value in values.items() if not key.endswith("_token")}


def shuffle_seed(arguments: Mapping[str, Any]) -> int:
    """Returns the seed of all random choices of data: `data_seed` if it is set (also 0), else `seed`."""
    data_seed = arguments.get("data_seed")
    return arguments.get("seed", 42) if data_seed is None else data_seed


@functools.cache
def argument_types() -> dict[str, Any]:
    """Maps each field of transformers.TrainingArguments to its type, read from the source: its import takes seconds."""
    folder = Path(importlib.util.find_spec("transformers").submodule_search_locations[0])
    # Names in the annotations: a class that is neither built in nor an enumeration is Any.
    names = collections.defaultdict(lambda: Any, vars(typing) | vars(builtins) | {"ExplicitEnum": enum.Enum})
    fields = []
    for file in ("trainer_utils.py", "training_args.py"):  # the enumerations, the fields
        for node in ast.parse((folder / file).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = " ".join(map(ast.unparse, node.bases))
            if "Enum" in bases:
                code = compile(ast.Module([node], []), file, "exec")
                exec(code, {}, names)
            elif node.name == "TrainingArguments":
                fields = node.body
    types = {}
    for node in fields:
        if isinstance(node, ast.AnnAssign) and "init=False" not in ast.unparse(node):
            types[node.target.id] = eval(ast.unparse(node.annotation), {}, names)
    return types
