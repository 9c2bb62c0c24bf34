"""A DeepSpeed JSON: read from `ds_configs/` or the user's file, checked, compared with the options, completed.

transformers fills "auto" values from TrainingArguments. DeepSpeedConfig is made before ranks start, and its errors are
shown with the entry's name. Unknown entries, which DeepSpeed ignores, are refused.
"""

import inspect
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dsft.config.options import HALF_PRECISION, Decision, TrainConfig, decide
from dsft.config.reader import check_bounds, convert, read_text
from dsft.errors import nearest, one_line

_HERE = Path(__file__).resolve().parent.parent
CONFIG_DIR = _HERE / "ds_configs" if (_HERE / "ds_configs").is_dir() else _HERE.parent / "ds_configs"
"""In an installed wheel, else in the checkout."""

DeepSpeedJson = dict[str, Any]
"""A DeepSpeed configuration or a section of one, as in its JSON."""
SAME_MEANING = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", int),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "train_batch_size": ("global_batch_size", int),
    "gradient_clipping": ("max_grad_norm", float),
    "optimizer.params.lr": ("learning_rate", float),
    "optimizer.params.betas.0": ("adam_beta1", float),
    "optimizer.params.betas.1": ("adam_beta2", float),
    "optimizer.params.eps": ("adam_epsilon", float),
    "optimizer.params.weight_decay": ("weight_decay", float),
    "scheduler.params.warmup_max_lr": ("learning_rate", float),
    "scheduler.params.warmup_num_steps": ("warmup_steps", int),
    "scheduler.params.total_num_steps": ("max_steps", int),
    "bf16.enabled": ("bf16", bool),
    "fp16.enabled": ("fp16", bool),
}
"""Place in DeepSpeed's configuration -> the option with the same meaning, and its type."""
AUTO = "auto"
NUMBERS = tuple(key for key in SAME_MEANING if "." not in key)
FILLED = (
    "optimizer.params.betas",
    "scheduler.params.warmup_min_lr",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
"""Other entries whose "auto" transformers fills (integrations/deepspeed.py)."""
SECTIONS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "timers")
"""Entries that dsft reads."""
OTHER_SECTIONS = """
zero_optimization timers activation_checkpointing aio tensorboard wandb comet csv_monitor flops_profiler elasticity
compression_training comms_logger hybrid_engine eigenvalue nebula autotuning compile tensor_parallel amp
weight_quantization progressive_layer_drop datastates graph_harvesting checkpoint pipeline"""
"""Entries whose names are not constants of deepspeed/runtime/config.py."""
OFFLOADED = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "Muon")
"""Those of DeepSpeed, for hints."""
NOT_FOR_SHARDS = {
    "lamb": "it scales steps by the norms of whole weights",
    "adafactor": "it factors the moments of whole weights",
}
"""Types of optimizers, in lower case, that are wrong over shards -> why."""
ALLOWED = {
    "zero_optimization.cpu_offload": ([False], 'an old name; write "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ([False], 'an old name; write "offload_param": {"device": "cpu"}'),
    "zero_optimization.zenflow": ([], "DeepSpeed copies the weights transposed, and trains a scrambled model"),
    "expert_parallel.enabled": ([False], "DeepSpeed saves the experts of one rank alone; ZeRO-3 shards them"),
    "hybrid_engine.enabled": ([False], "it is for reinforcement learning with DeepSpeed's own generation"),
    "pipeline": ([], "it needs a model made as DeepSpeed's PipelineModule"),
    "tensor_parallel.autotp_size": (
        [0, 1],
        "tensor parallelism is not supported: the Trainer would feed the ranks that share a layer different sequences;"
        " ZeRO-3 shards the weights too",
    ),
    "data_efficiency.enabled": ([False], "it needs DeepSpeed's data loader, and the Trainer has its own"),
    "autotuning.enabled": ([False], "DeepSpeed ends the run once it has measured some steps; zero=auto chooses"),
    "checkpoint.load_universal": ([False], "dsft resumes on other ranks and stages without universal checkpoints"),
    "managed_gradient_accumulation": ([True], "the Trainer lets DeepSpeed count the micro batches of a step"),
    "gradient_allreduce_op": (
        ["mean"],
        "the loss is made for gradients that are averaged; others would be too large by the number of ranks",
    ),
}
"""Settings that DeepSpeed accepts, and that train something else or fail later: place -> (right values, why)."""
REMOVED_NAMES = {
    "3-nvme": "offload to NVMe is not planned any more; name a DeepSpeed JSON of your own with it",
    "3-offload-partial": "removed; use 3-offload-optimizer",
}
"""Removed configurations -> what to use instead."""


def known_names() -> list[str]:
    """Returns the named configurations: "0", "2-offload", "3-hpz" ..."""
    names = [path.stem.removeprefix("zero") for path in CONFIG_DIR.glob("zero*.json")]
    return sorted(name.replace("_", "-") for name in names)


def read_zero_file(zero: str, problems: list[str]) -> DeepSpeedJson:
    """Returns the DeepSpeed configuration `zero` (a name or a path) as in its file; {} if it cannot be read."""
    path = CONFIG_DIR / f"zero{zero.replace('-', '_')}.json"
    if not path.is_file():
        path = Path(zero)
    if path.suffix != ".json":
        names = known_names()
        hint = f"unknown; use auto, {', '.join(names)}, or the path of a DeepSpeed JSON{nearest(zero, names)}"
        problems.append(f"zero={zero}: {REMOVED_NAMES.get(zero, hint)}")
        return {}
    try:
        content = json.loads(read_text(path), object_pairs_hook=_mapping, parse_float=_number)
    except OSError as error:
        problems.append(f"zero={zero}: cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        problems.append(f"zero={zero}: not valid JSON ({error})")
    else:
        if isinstance(content, dict):
            return content
        problems.append(f"zero={zero}: must be a JSON object")
    return {}


def _mapping(pairs: list[tuple[str, Any]]) -> DeepSpeedJson:
    """Makes the mapping of a JSON object; json.loads silently takes the last of repeated keys."""
    content = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"duplicate key {key!r}; keep one")
        content[key] = value
    return content


def _number(text: str) -> float:
    """Reads 1e4 and 16.0 as whole numbers, which DeepSpeed and transformers need."""
    value = float(text)
    return int(value) if value.is_integer() else value


def get_value(deepspeed_config: DeepSpeedJson, place: str) -> Any:
    """Returns the value at a place such as optimizer.params.betas.0; None if it or a section on the way is missing."""
    value = deepspeed_config
    for part in place.split("."):
        try:
            value = value[int(part) if isinstance(value, list) else part]
        except (LookupError, TypeError, ValueError):
            return None
    return value


def adopt(deepspeed_config: DeepSpeedJson, options: TrainConfig, problems: list[str]) -> list[Decision]:
    """Makes decisions of the fixed numbers in a DeepSpeed JSON; an option with another value is a problem."""
    decisions = []
    for place, (name, _) in SAME_MEANING.items():
        theirs = get_value(deepspeed_config, place)
        if theirs is None or theirs == AUTO:
            continue
        ours = decide(options, decisions).value(name)
        option = f"{name}={ours}"
        if name in HALF_PRECISION and options.dtype != "auto":
            ours = options.dtype == HALF_PRECISION[name]
            option = f"dtype={options.dtype}"
        if ours is None:
            decisions.append(Decision(name, theirs, f"{options.zero} has {place}={theirs}"))
        elif ours != theirs:
            problems.append(
                f'{options.zero} has {place}={json.dumps(theirs)}, but {option}; keep one, or write "auto" in the JSON'
            )
    return decisions


def compose(
    deepspeed_config: DeepSpeedJson, *, hpz_ranks: int | None = None, bf16_states: bool = False
) -> DeepSpeedJson:
    """Returns a copy completed for this job. `hpz_ranks`: size of hpZ's second partition, the ranks of a node."""
    composed = json.loads(json.dumps(deepspeed_config))
    for section in ("bf16", "fp16"):
        composed.setdefault(section, {"enabled": "auto"})
    if bf16_states:  # the option `states: bfloat16`
        composed["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    for key in NUMBERS:
        composed.setdefault(key, "auto")
    zero = composed.setdefault("zero_optimization", {"stage": 0})
    if hpz_ranks and zero.get("zero_hpz_partition_size", 1) > 1:
        zero["zero_hpz_partition_size"] = hpz_ranks
    if zero.get("stage") == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # else the Trainer saves no final model
        zero.pop("stage3_gather_fp16_weights_on_model_save", None)  # its old name, refused beside it
    # With it DeepSpeed records the positions of weights in its shards in the wrong order (_link_all_hp_params in
    # stage_1_and_2.py): checkpoints would be read wrong.
    zero.pop("round_robin_gradients", None)
    # DeepSpeed's throughput timer synchronises with the device in each micro batch (utils/timer.py).
    composed.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    return composed


def stage(deepspeed_config: DeepSpeedJson) -> int:
    """Returns the ZeRO stage of a configuration; DeepSpeed's default is 0."""
    return get_value(deepspeed_config, "zero_optimization.stage") or 0


def offloads(deepspeed_config: DeepSpeedJson, *, to: Collection[str] = ("cpu", "nvme")) -> bool:
    return any(get_value(deepspeed_config, f"{part}.device") in to for part in OFFLOADED)


def read_sound_file(zero: str, problems: list[str]) -> DeepSpeedJson:
    """Returns the DeepSpeed configuration `zero` if it is sound; else {}, and its faults go to `problems`."""
    content = read_zero_file(zero, problems)
    faults = check_deepspeed_json(content, zero)
    problems += faults
    return {} if faults else content


def check_deepspeed_json(content: DeepSpeedJson, zero: str) -> list[str]:
    """Lists entries of a DeepSpeed JSON that DeepSpeed would ignore or cannot read; `zero` names the file."""
    from deepspeed.runtime import config as names

    texts = [value for value in vars(names).values() if isinstance(value, str)]
    known = {text for text in texts if text.islower()}
    known.update(OTHER_SECTIONS.split())
    problems = [f"{key}: unknown key{nearest(key, known)}" for key in content if key not in known]
    for place in (*SECTIONS, "optimizer.params", "scheduler.params"):
        parent, _, key = place.rpartition(".")
        section = get_value(content, parent) if parent else content
        if isinstance(section, dict) and not isinstance(section.get(key, {}), dict):
            problems.append(f"{place}={json.dumps(section[key])}: must be a JSON object; leave it out for the default")
    if problems:
        return [f"zero={zero}: {problem}" for problem in problems]
    level = json.dumps(get_value(content, "zero_optimization.stage"))
    if level not in ("null", '"auto"', "0", "1", "2", "3"):
        problems.append(f"zero_optimization.stage={level}: must be 0, 1, 2 or 3, without quotes")
    for place, (name, kind) in SAME_MEANING.items():
        value = get_value(content, place)
        if value is None or value == AUTO or kind is bool:
            continue
        if not isinstance(value, int | float):
            problems.append(f"{place}: must be a number, not {json.dumps(value)}")
            continue
        try:
            problems += [place + bound.removeprefix(name) for bound in check_bounds(name, convert(value, kind))]
        except ValueError as error:  # a fraction
            problems.append(f"{place}: {error}")
    for place in places_of_auto(content):
        if place not in (*SAME_MEANING, *FILLED):
            problems.append(f'{place}="auto": nothing fills this in; write it, or leave it out')
    for place, (right, why) in ALLOWED.items():
        value = get_value(content, place)
        if value is not None and value not in right:
            problems.append(f"{place}: {why}; leave it out")
    for key in ("optimizer", "scheduler"):
        if key in content:
            problems += _check_type(key, content)
    # Each entry is sound by itself; DeepSpeed checks them together. dsft sets the batches.
    if not problems:
        problems = _errors_of_deepspeed({key: value for key, value in content.items() if key not in NUMBERS})
    return [f"zero={zero}: {problem}" for problem in problems]


def places_of_auto(section: DeepSpeedJson, prefix: str = "") -> list[str]:
    places = []
    for key, value in section.items():
        if isinstance(value, dict):
            places += places_of_auto(value, f"{prefix}{key}.")
        elif value == AUTO:
            places.append(prefix + key)
    return places


def _check_type(key: str, content: DeepSpeedJson) -> list[str]:
    """Returns the problems of an optimizer or a scheduler, which DeepSpeed would find after the model has loaded."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    section = content[key]
    unknown = sorted(section.keys() - {"type", "params", "legacy_fusion"})
    if unknown:
        return [f"{key}.{name}: unknown key{nearest(name, ['type', 'params'])}" for name in unknown]
    name = str(section.get("type"))
    kind = name.lower()
    problem = ""
    if key == "scheduler":
        if name not in VALID_LR_SCHEDULES:
            problem = f"{name!r} is unknown{nearest(name, VALID_LR_SCHEDULES)}"
    elif kind not in DEEPSPEED_OPTIMIZERS and not inspect.isclass(getattr(torch.optim, name, None)):
        problem = f"{name!r} is unknown{nearest(name, OPTIMIZERS)}"
    elif not stage(content) or kind in map(str.lower, OPTIMIZERS):
        return []
    elif kind in NOT_FOR_SHARDS:
        why = NOT_FOR_SHARDS[kind]
        problem = f"{kind}: {why}, and ZeRO's shards are flat pieces of them; use stage 0, or AdamW"
    elif not content.get("zero_allow_untested_optimizer"):
        # asserted after the model has loaded (engine.py, _do_optimizer_sanity_check)
        problem = (
            f"{kind}: DeepSpeed has not tested it over ZeRO's shards; add zero_allow_untested_optimizer=true, or use"
            " AdamW"
        )
    return [f"{key}.type: {problem}"] if problem else []


def _errors_of_deepspeed(content: DeepSpeedJson) -> list[str]:
    """Returns DeepSpeed's own errors, with the section that raises them."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    names = set()
    for model in DeepSpeedConfigModel.__subclasses__():
        names.update(model.model_fields)

    def find_errors(sections: DeepSpeedJson) -> list[str]:
        try:
            # dsft always adds bf16, beside which the old name bfloat16 would be ignored.
            DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "bf16": {}} | sections)
        except ValidationError as error:
            problems = []
            for fault in error.errors():
                place = ".".join(map(str, fault["loc"]))
                hint = nearest(place.rpartition(".")[2], names) if fault["type"] == "extra_forbidden" else ""
                problems.append(f".{place}: {fault['msg']}{hint}")
            return problems
        except Exception as error:  # DeepSpeed raises a dozen kinds
            return [f": {one_line(error)}"]
        return []

    errors = find_errors(content)
    for key in content if errors else ():
        if not find_errors({other: value for other, value in content.items() if other != key}):
            return [f"{key}{error}" for error in errors]
    return [error.lstrip(".: ") for error in errors]


def follow_options(deepspeed_config: DeepSpeedJson, options: TrainConfig) -> DeepSpeedJson:
    """Returns a copy of a sound file in which the options fill optimizer and scheduler: DeepSpeed's rate is 1e-3."""
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    followed = dict(deepspeed_config)
    optimizer = followed.get("optimizer")
    if optimizer:
        kind = optimizer["type"].lower()
        is_adam = kind in ("adam", "adamw")
        names = ["lr"]
        # torch's Rprop, SparseAdam and LBFGS have no weight decay.
        is_torchs = kind not in DEEPSPEED_OPTIMIZERS
        if not is_torchs or "weight_decay" in inspect.signature(getattr(torch.optim, optimizer["type"])).parameters:
            names.append("weight_decay")
        if is_adam:
            names.append("eps")
        has_betas = {"adam_beta1", "adam_beta2"} & options.training.keys()
        # Lion and Muon have other defaults.
        if is_adam or (has_betas and kind in ("lion", "muon")):
            names.append("betas")
        filled = dict.fromkeys(names, AUTO)
        # torch's Adam, which needs no compiler, unless a parameter chooses an implementation.
        chosen = {"bias_correction", "set_grad_none", "torch_adam", "fused", "foreach"}
        if is_adam and not offloads(deepspeed_config) and chosen.isdisjoint(optimizer.get("params", {})):
            filled |= {"torch_adam": True, "fused": True}
        followed["optimizer"] = optimizer | {"params": filled | optimizer.get("params", {})}
    scheduler = followed.get("scheduler")
    if scheduler:
        parameters = inspect.signature(getattr(lr_schedules, scheduler["type"])).parameters
        names = {"warmup_max_lr", "warmup_num_steps", "total_num_steps"} & parameters.keys()
        filled = dict.fromkeys(names, AUTO)
        followed["scheduler"] = scheduler | {"params": filled | scheduler.get("params", {})}
    return followed
