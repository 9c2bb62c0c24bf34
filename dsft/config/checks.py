"""Contradictions that the options show by themselves. Pure: each check returns its problems and changes nothing.

What needs the model, the data, the machine or the DeepSpeed JSON is checked in `run_setup/arguments.py`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from dsft.config.options import (
    HALF_PRECISION,
    REFUSED_ARGUMENTS,
    REFUSED_OPTIMIZERS,
    EvalConfig,
    TimeoutFields,
    TrainConfig,
)
from dsft.errors import nearest

MOST = 10**9
"""Of every whole number: what is beyond is a slip, and counters of libraries overflow not far from there."""
IN_A_STEP = """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps global_batch_size
    shuffle_buffer"""
AT_LEAST_1 = """lora_r lora_alpha max_documents sequence_parallel ddp_timeout dataloader_prefetch_factor
    early_stopping_patience max_skipped_steps max_new_tokens"""
MORE_THAN_0 = "logging_steps save_steps eval_steps save_minutes loraplus_lr_ratio"
NOT_NEGATIVE = """learning_rate weight_decay warmup_steps max_grad_norm adam_epsilon samples
    eval_delay verify steps_per_print generate_samples temperature early_stopping_threshold
    router_aux_loss"""
SHARES = "eval_fraction lora_dropout adam_beta1 adam_beta2 label_smoothing_factor"
BOUNDS: list[tuple[str, Callable[[float], bool], str]] = [
    # Lengths and sequences of a step are kept in memory.
    (IN_A_STEP, lambda value: 1 <= value <= 10**7, "be at least 1 and at most 10,000,000"),
    ("num_train_epochs", lambda value: 0 < value <= 10**6, "be more than 0 and at most 1,000,000"),
    ("neftune_noise_alpha", lambda value: 0 <= value <= 1000, "be at least 0 and at most 1,000"),
    ("num_gpus", lambda value: value <= 1024, "be at most 1,024: it counts those of one node"),
    ("master_port", lambda value: 0 <= value < 2**16, f"be at least 0 and less than {2**16:,}"),
    # Each is a process of its own, beside every rank.
    ("dataloader_num_workers", lambda value: 0 <= value <= 256, "be at least 0 and at most 256"),
    (AT_LEAST_1, lambda value: value >= 1, "be at least 1"),
    (MORE_THAN_0, lambda value: value > 0, "be more than 0"),
    (NOT_NEGATIVE, lambda value: value >= 0, "not be negative"),
    (SHARES, lambda value: 0 <= value < 1, "be at least 0 and less than 1"),
    ("seed data_seed", lambda value: 0 <= value < 2**32, f"be at least 0 and less than {2**32}"),
    ("max_steps", lambda value: value >= 1 or value == -1, "be at least 1, or -1 to go by num_train_epochs"),
    (
        " ".join(timeout.name for timeout in dataclasses.fields(TimeoutFields)),
        lambda value: 0 < value <= 10**6,
        "be more than 0 and at most 1,000,000 seconds",
    ),
]
"""(names of options, whether a value can be, what it must be)."""


def check_bounds(name: str, value: Any) -> list[str]:
    """Lists why the option `name` cannot have this value, if it is a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return []
    bounds = [f"must {text}" for names, is_possible, text in BOUNDS if name in names.split() and not is_possible(value)]
    if not bounds and isinstance(value, int) and abs(value) > MOST and name not in ("seed", "data_seed"):
        bounds = [f"must be at most {MOST:,}"]
    return [f"{name}={value}: {bound}" for bound in bounds]


def check_config(options: TrainConfig | EvalConfig) -> list[str]:
    """Lists the contradictions of the options alone."""
    problems = []
    if not options.model:
        problems.append("model: missing; name a hub id, a local folder or a config.json")
    if not options.data:
        problems.append("data: missing; name a file, a folder, a glob or a hub data set")
    if options.seq_len < 2:
        problems.append(
            f"seq_len={options.seq_len}: a window needs at least 2 tokens, one of context and one to predict"
        )
    if options.prompt_template and not options.completion_template:
        problems.append("prompt_template needs completion_template: what is trained on")
    if options.data_format == "template" and not options.completion_template:
        problems.append("data_format=template needs completion_template")
    if options.completion_template and options.data_format not in ("auto", "template"):
        problems.append(f"completion_template contradicts data_format={options.data_format}; keep one")
    if isinstance(options, TrainConfig):
        return problems + _check_training(options)
    return problems + _check_evaluation(options)


def _check_training(options: TrainConfig) -> list[str]:
    problems, training = [], options.training
    if options.data_weights and len(options.data_weights) != len(options.data):
        problems.append(
            f"data_weights: {len(options.data_weights)} weights for {len(options.data)} entries of data; give one for"
            " each"
        )
    if any(not weight > 0 for weight in options.data_weights):
        problems.append(
            f"data_weights={options.data_weights}: each must be more than 0; leave an entry of data out instead"
        )
    if options.streaming:
        if not training.get("max_steps", -1) > 0:
            problems.append("streaming needs max_steps: how long the stream is is not known")
        if options.eval_fraction:
            problems.append("streaming has no rows to hold out a share of; give eval_data")
        if training.get("dataloader_num_workers", 0):
            problems.append(
                "streaming and dataloader_num_workers cannot be combined: each worker would read the whole stream"
            )
        if options.source_column:
            problems.append(
                "streaming and source_column cannot be combined: how many sources there are is not known; give each"
                " an entry of data"
            )
        if options.batch_tokens is not None:
            problems.append("streaming and batch_tokens cannot be combined; use packing")
    if options.generate_samples and not options.has_held_out:
        problems.append("generate_samples: samples are made at evaluations; give eval_data or eval_fraction")
    if options.global_batch_size and "gradient_accumulation_steps" in training:
        problems.append("global_batch_size and gradient_accumulation_steps are both set; keep one, the other follows")
    if options.batch_tokens is not None:
        if options.packing:
            problems.append("packing and batch_tokens are both set; packed rows are full already, keep one")
        if options.batch_tokens < options.seq_len:
            problems.append(
                f"batch_tokens={options.batch_tokens} is less than seq_len={options.seq_len}: one sequence must fit;"
                " raise batch_tokens"
            )
        problems += [
            f"batch_tokens and {key} are both set; keep one: a batch filled by tokens has as many sequences as fit"
            " (gradient_accumulation_steps counts such batches)"
            for key in ("per_device_train_batch_size", "global_batch_size")
            if options.value(key)
        ]
    if not training.get("output_dir"):
        problems.append("output_dir: missing; name the folder of this run, for example runs/first")
    problems += [f"{key}: {why}" for key, why in REFUSED_ARGUMENTS.items() if training.get(key)]
    if (optimizer := training.get("optim")) in REFUSED_OPTIMIZERS:
        problems.append(f"optim={optimizer}: {REFUSED_OPTIMIZERS[optimizer]}")
    if options.resume_weights_only and not training.get("resume_from_checkpoint"):
        problems.append("resume_weights_only: name the checkpoint with resume_from_checkpoint")
    if options.compute_loss and training.get("label_smoothing_factor"):
        problems.append("compute_loss and label_smoothing_factor are both set; smooth labels in your own loss")
    problems += _check_held_out(options)
    if training.get("load_best_model_at_end") and training.get("save_only_model"):
        problems.append("load_best_model_at_end needs complete checkpoints; set save_only_model: false")
    problems += _check_patterns(options)
    if options.method == "full" and options.adapter:
        problems.append(f"adapter={options.adapter} needs method lora or qlora; method is full")
    halves = [(key, dtype) for key, dtype in HALF_PRECISION.items() if training.get(key)]
    if len(halves) == 2:
        return [*problems, "bf16 and fp16 are both true; keep one"]
    return problems + [
        f"dtype={options.dtype} contradicts {key}=true; keep one"
        for key, dtype in halves
        if options.dtype not in ("auto", dtype)
    ]


def _check_held_out(options: TrainConfig) -> list[str]:
    problems, training = [], options.training
    for name in options.held_out_names:
        if name == "macro" or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            problems.append(
                f"eval_data: {name!r} cannot name a set; use letters, digits, _ and -, and another word than macro,"
                " which is the mean of all sets"
            )
    metric, sets = training.get("metric_for_best_model"), [*options.held_out_names]
    sets += ["macro"] if sets else []
    known = ["loss", "perplexity", *(f"{name}_{measure}" for name in sets for measure in ("loss", "perplexity"))]
    if metric and metric.removeprefix("eval_") not in known:
        problems.append(f"metric_for_best_model={metric}: evaluation gives {', '.join(known)}{nearest(metric, known)}")
    if options.early_stopping_patience is not None and not options.has_held_out:
        problems.append("early_stopping_patience needs held-out data; give eval_data or eval_fraction")
    if options.early_stopping_patience is not None and training.get("eval_strategy") == "no":
        problems.append("early_stopping_patience needs evaluations; leave eval_strategy: no out")
    return problems


def _check_patterns(options: TrainConfig) -> list[str]:
    problems = []
    for name in ("trainable", "frozen", "learning_rates"):
        for pattern in getattr(options, name):
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"{name}: {pattern!r} is no regular expression ({error})")
    for pattern, factor in options.learning_rates.items():
        if not 0 < factor <= MOST:
            problems.append(f"learning_rates: {pattern}: {factor}: must be a number more than 0; frozen trains nothing")
    return problems


def _check_evaluation(options: EvalConfig) -> list[str]:
    problems = [
        f"{name}: {value} is named twice; name it once"
        for name in ("model", "data", "quantization", "group_by")
        for value, times in Counter(getattr(options, name)).items()
        if times > 1
    ]
    if options.batch_tokens is not None and options.batch_tokens < options.seq_len and not options.context_curve:
        problems.append(
            f"batch_tokens={options.batch_tokens} is less than seq_len={options.seq_len}: one window must fit; raise"
            " batch_tokens"
        )
    if options.stride is not None and not 0 < options.stride < options.seq_len:
        problems.append(
            f"stride={options.stride}: must be at least 1 and less than seq_len={options.seq_len}, so that every token"
            " has context"
        )
    if options.save_tokens and not options.output_dir:
        problems.append("save_tokens needs output_dir: the folder to keep the tokens in")
    if options.bad_rows != "error":
        problems.append(f"bad_rows={options.bad_rows}: an evaluation scores every row; fix or remove the bad ones")
    return problems
