"""A DeepSpeed JSON: read from `ds_configs/` or the user's file, checked, compared with the options, completed.

transformers fills "auto" values from TrainingArguments. DeepSpeed makes its own configuration of the file before ranks
start; its errors are shown with the entry's name. An entry that it does not know, it would ignore: these are refused.
"""

import contextlib
import inspect
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dsft.config.options import HALF_PRECISION, Decision, TrainConfig, decide
from dsft.config.reader import DuplicateKey, check_bounds, read_text, unique_keys
from dsft.errors import nearest, one_line

_HERE = Path(__file__).resolve().parent.parent
CONFIG_DIR = _HERE / "ds_configs" if (_HERE / "ds_configs").is_dir() else _HERE.parent / "ds_configs"
"""Inside an installed wheel, else in the checkout."""

SAME_THING = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", int),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "train_batch_size": ("global_batch_size", int),
    "gradient_clipping": ("max_grad_norm", float),
    "optimizer.params.lr": ("learning_rate", float),
    "optimizer.params.eps": ("adam_epsilon", float),
    "optimizer.params.weight_decay": ("weight_decay", float),
    "scheduler.params.warmup_max_lr": ("learning_rate", float),
    "scheduler.params.warmup_num_steps": ("warmup_steps", int),
    "scheduler.params.total_num_steps": ("max_steps", int),
    "bf16.enabled": ("bf16", bool),
    "fp16.enabled": ("fp16", bool),
}
"""DeepSpeed key -> the option of ours with the same meaning, and its type."""
AUTO = "auto"
FILLED = tuple(key for key in SAME_THING if "." not in key)
"""Entries whose "auto" transformers fills (integrations/deepspeed.py), beside some inside of sections."""
FILLED_PARAMETERS = {
    **{place: (name,) for place, (name, _) in SAME_THING.items() if ".params." in place},
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "scheduler.params.warmup_min_lr": (),
}
"""Parameters of optimizer and scheduler whose "auto" it fills -> the options that say what with."""
SECTIONS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "timers")  # entries that dsft reads itself
OTHER_SECTIONS = """
zero_optimization timers activation_checkpointing aio tensorboard wandb comet csv_monitor flops_profiler elasticity
compression_training comms_logger hybrid_engine eigenvalue nebula autotuning compile tensor_parallel amp
weight_quantization progressive_layer_drop datastates graph_harvesting checkpoint pipeline"""
"""Entries whose names are not constants of deepspeed/runtime/config.py, since modules of their own read them."""
OFFLOADED = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
NO_DEFAULT = (
    *("zero_optimization.stage", "zero_optimization.zero_hpz_partition_size", "tensor_parallel.autotp_size"),
    *OFFLOADED,
)
"""Where "auto" would mean one thing to accelerate or to dsft, and another to DeepSpeed."""
WITHOUT_BETAS = ("sgd", "adagrad", "rmsprop", "adadelta", "rprop", "asgd")
WITHOUT_EPS = ("sgd", "lion", "rprop", "asgd")
"""Types of optimizers, in small letters, that lack a parameter of Adam."""
NS_METHODS = ("gram", "standard")
NOT_FOR_SHARDS = {
    "lamb": "it scales steps by the norms of whole weights, and ZeRO's shards are flat pieces of them; use stage 0, or"
    " AdamW",
    "adafactor": "it factors the moments of whole weights, and ZeRO's shards are flat pieces of them; use stage 0, or"
    " AdamW",
    "lbfgs": "it computes the loss several times in a step, which no Trainer does; use AdamW",
    "sparseadam": "it takes sparse gradients, and those of these models are dense; use AdamW",
}
"""Types of optimizers, in small letters, that mean nothing over shards -> why."""
RIGHT_IN_STAGE_0 = ("lamb", "adafactor")
"""Of these, those that do under stage 0."""
REFUSED = {
    "zero_optimization.zenflow": "DeepSpeed copies the weights transposed, and trains and saves a scrambled model",
    "expert_parallel.enabled": "DeepSpeed 0.19.8's AutoEP does not start with transformers 5.23, and saves the experts"
    " of one rank alone; ZeRO-3 shards them",
    "hybrid_engine.enabled": "it is for reinforcement learning with DeepSpeed's own generation",
    "pipeline": "it is for DeepSpeed's PipelineModule, and models of transformers are none",
    "data_efficiency.enabled": "it needs DeepSpeed's data loader, and the Trainer has its own",
    "autotuning.enabled": "DeepSpeed ends the run once it has measured some steps; zero=auto and dsft plan choose",
    "checkpoint.load_universal": "dsft writes no universal checkpoint, and resumes on other ranks and stages without",
    "zero_optimization.round_robin_gradients": "DeepSpeed notes the places of weights in its shards in another order"
    " than it keeps them (_link_all_hp_params in stage_1_and_2.py), so checkpoints are read wrong",
    "managed_gradient_accumulation": "the Trainer lets DeepSpeed count the micro batches of a step",
    "gradient_allreduce_op": "the loss is made for gradients that are averaged; others would be too large by the number"
    " of ranks",
}
"""Settings that DeepSpeed reads and that train something else, or fail after the model has loaded: place -> why."""
HARMLESS = {"managed_gradient_accumulation": True, "gradient_allreduce_op": "mean"}
"""What may stand in these places, where it is not false."""


REMOVED_NAMES = {
    "3-nvme": "offload to NVMe is not planned any more; name a DeepSpeed JSON of your own with it",
    "3-offload-partial": "removed; use 3-offload-optimizer",
}
"""Configurations that were named once -> what to use instead."""


def known_names() -> list[str]:
    """The named configurations, as `zero` takes them: "0", "2-offload", "3-hpz" ..."""
    return sorted(path.stem.removeprefix("zero").replace("_", "-") for path in CONFIG_DIR.glob("zero*.json"))


def read_zero_file(zero: str, problems: list[str]) -> dict[str, Any]:
    """The DeepSpeed configuration called `zero` (a name or a path), as it stands in its file; {} where it cannot be."""

    def no_number(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    def number(text: str) -> float:  # 1e4 and 16.0 are whole numbers where DeepSpeed and transformers count with them
        return int(value) if (value := float(text)).is_integer() else value

    named = CONFIG_DIR / f"zero{zero.replace('-', '_')}.json"
    path, content = named if named.is_file() else Path(zero), None
    if zero in REMOVED_NAMES:
        problem = REMOVED_NAMES[zero]
    elif path.suffix != ".json":
        names = known_names()
        problem = f"unknown; use auto, {', '.join(names)}, or the path of a DeepSpeed JSON{nearest(zero, names)}"
    else:
        try:
            content = json.loads(
                read_text(path), object_pairs_hook=unique_keys, parse_constant=no_number, parse_float=number
            )
            problem = "must hold a JSON object"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        except DuplicateKey as error:
            problem = f"duplicate key {error}; keep one"
        except (ValueError, RecursionError) as error:
            problem = f"not valid JSON ({error})"
    if isinstance(content, dict):
        return content
    problems.append(f"zero={zero}: {problem}")
    return {}


def get_value(deepspeed_config: dict[str, Any], key: str) -> Any:
    """Value of a dotted key, or None where it, or a section on the way, is missing."""
    for part in key.split("."):
        if not isinstance(deepspeed_config, dict) or part not in deepspeed_config:
            return None
        deepspeed_config = deepspeed_config[part]
    return deepspeed_config


def adopt(deepspeed_config: dict[str, Any], options: TrainConfig) -> tuple[list[Decision], list[str]]:
    """Takes the fixed numbers of a DeepSpeed JSON as decisions; where an option has another value, names both."""
    decisions: list[Decision] = []
    problems, way_out = [], 'keep one, or write "auto" in the JSON'
    given = [(key, name, get_value(deepspeed_config, key)) for key, (name, _) in SAME_THING.items()]
    betas = get_value(deepspeed_config, "optimizer.params.betas")
    if isinstance(betas, list):
        given += [("optimizer.params.betas", *each) for each in zip(("adam_beta1", "adam_beta2"), betas, strict=True)]
    for key, name, theirs in given:
        if theirs is None or theirs == AUTO:
            continue
        ours = decide(options, decisions).value(name)
        held = f"{options.zero} has {key}={get_value(deepspeed_config, key)}"
        if ours is None:
            decisions.append(Decision(name, theirs, held))
        elif ours != theirs:
            problems.append(f"{held}, but {name}={ours}; {way_out}")
    for section, dtype in HALF_PRECISION.items():
        enabled = get_value(deepspeed_config, f"{section}.enabled")
        contradicts = options.dtype not in ("auto", dtype) if enabled is True else options.dtype == dtype
        if isinstance(enabled, bool) and contradicts:
            held = f"{options.zero} has {section}.enabled={json.dumps(enabled)}"
            problems.append(f"{held}, but dtype={options.dtype}; {way_out}")
    return decisions, problems


def check_nvme(deepspeed_config: dict[str, Any], zero: str) -> list[str]:
    """The folder that offload to NVMe writes to must exist on this node."""
    path = nvme_path(deepspeed_config)
    is_here = not path or Path(path).is_dir()
    return [] if is_here else [f"zero={zero}: nvme_path={path} is not a folder here; name one on a fast local disk"]


def nvme_path(deepspeed_config: dict[str, Any]) -> str | None:
    """The folder that offload to NVMe writes to; None without such offload, whatever path a file still names."""
    parts = [part for part in OFFLOADED if get_value(deepspeed_config, f"{part}.device") == "nvme"]
    return next(filter(None, (get_value(deepspeed_config, f"{part}.nvme_path") for part in parts)), None)


def compose(
    deepspeed_config: dict[str, Any], *, hpz_ranks: int | None = None, bf16_states: bool = False
) -> dict[str, Any]:
    """A copy completed for this job: precision sections that follow the flags, no timer that waits for the device, and
    where given hpZ's second partition over `hpz_ranks`, those of a node, and an optimizer's states in bfloat16.
    """
    composed = json.loads(json.dumps(deepspeed_config))
    for section in ("bf16", "fp16"):
        composed.setdefault(section, {"enabled": "auto"})
    if bf16_states:  # the option `states: bfloat16`
        composed["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    for key in FILLED:
        composed.setdefault(key, "auto")
    zero = composed.setdefault("zero_optimization", {"stage": 0})
    if hpz_ranks and zero.get("zero_hpz_partition_size", 1) > 1:
        zero["zero_hpz_partition_size"] = hpz_ranks
    if zero.get("stage") == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # else the Trainer writes no model at the end
    # On by default, DeepSpeed's throughput timer waits for the device in each micro batch and step (utils/timer.py).
    composed.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    return composed


def stage(deepspeed_config: dict[str, Any]) -> int:
    """ZeRO stage of a configuration; DeepSpeed's default is 0."""
    return get_value(deepspeed_config, "zero_optimization.stage") or 0


def offloads(deepspeed_config: dict[str, Any], *, to: Collection[str] = ("cpu", "nvme")) -> bool:
    """Whether optimizer or parameters leave the device, for one of `to`."""
    return any(get_value(deepspeed_config, f"{part}.device") in to for part in OFFLOADED)


def read_sound_file(zero: str, problems: list[str]) -> dict[str, Any]:
    """The DeepSpeed configuration called `zero`, as `read_zero_file` reads it; empty where something of it is wrong."""
    content = read_zero_file(zero, problems)
    faults = check_deepspeed_json(content, zero)
    problems += faults
    return {} if faults else content


def check_deepspeed_json(content: dict[str, Any], zero: str) -> list[str]:
    """Lists everything of a DeepSpeed JSON that DeepSpeed would ignore or cannot read; `zero` names the file."""
    problems, at = [], partial(get_value, content)
    for key, value in content.items():
        if value != AUTO:
            problems += _check_entry(key, value)
        elif key not in FILLED:
            problems += _check_entry(key, {}) or [f'{key}="auto": nothing fills this in; write it, or leave it out']
    for place, (name, kind) in SAME_THING.items():
        value = at(place)
        if value in (None, AUTO) or kind is bool:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or kind(value) != value:
            problems.append(f"{place}={json.dumps(value)}: must be a {'whole ' if kind is int else ''}number")
        else:
            problems += [f"{place}{bound.removeprefix(name)}" for bound in check_bounds(name, value)]
    problems += [
        f'{place}="auto": nothing fills this in; write it, or leave it out'
        for place in NO_DEFAULT
        if AUTO in (at(place), at(f"{place}.device"))
    ]
    if all(at(f"{half}.enabled") is True for half in HALF_PRECISION):
        problems.append("bf16.enabled and fp16.enabled are both true; keep one")

    # What DeepSpeed takes and a training must not have.
    problems += [
        f"{place}: {why}; leave it out"
        for place, why in REFUSED.items()
        if at(place) not in (None, HARMLESS.get(place, False))
    ]
    optimizer, zero_stage = str(at("optimizer.type")).lower(), at("zero_optimization.stage")
    if optimizer == "muon":
        method = at("optimizer.params.ns_method")
        if method not in (None, *NS_METHODS):
            problems.append(f"optimizer.params.ns_method={json.dumps(method)}: choose from {', '.join(NS_METHODS)}")
        # stage3.py: "Muon and reduce scatter cannot be used together", once the model is loaded
        if zero_stage == 3 and at("zero_optimization.reduce_scatter") is not False:
            problems.append("optimizer.type Muon: stage 3 needs zero_optimization.reduce_scatter=false; add it")
    own_adam = optimizer in ("adam", "adamw") and not at("optimizer.params.torch_adam")
    if own_adam and at("optimizer.params.amsgrad"):  # fused_adam.py and cpu_adam.py, once the model is loaded
        problems.append("optimizer.params.amsgrad: DeepSpeed's own Adam has none; add torch_adam=true, or leave it out")
    if optimizer in NOT_FOR_SHARDS and (zero_stage or optimizer not in RIGHT_IN_STAGE_0):
        problems.append(f"optimizer.type {at('optimizer.type')}: {NOT_FOR_SHARDS[optimizer]}")
    if zero_stage and isinstance(at("optimizer.type"), str) and not at("zero_allow_untested_optimizer"):
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

        tested = {each.__name__.lower() for each in ZERO_SUPPORTED_OPTIMIZERS} | {"muon", *NOT_FOR_SHARDS}
        # engine.py, _do_optimizer_sanity_check, asserts it once the model is loaded; without offload Adagrad is torch's
        is_torchs = optimizer == "adagrad" and not at("zero_optimization.offload_optimizer.device")
        if is_torchs or not any(name.endswith(optimizer) for name in tested):
            problems.append(
                f"optimizer.type {at('optimizer.type')}: DeepSpeed has not tested it over ZeRO's shards; add"
                " zero_allow_untested_optimizer=true, or take AdamW"
            )
    offloads = at("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    for half in ("bf16", "fp16"):  # base_optimizer.py, _configure_master_weights, asserts both once the model is loaded
        if not at(f"{half}.{half}_master_weights_and_grads"):
            continue
        keeps_fp32 = not at(f"{half}.bf16_optimizer_states")
        if keeps_fp32 and not offloads:
            others = " or bf16.bf16_optimizer_states=true" if half == "bf16" else ""
            problems.append(f"{half}.{half}_master_weights_and_grads: needs offload_optimizer.device=cpu{others}")
        elif offloads and not keeps_fp32 and optimizer not in ("adam", "adamw"):
            problems.append("bf16.bf16_optimizer_states: with offload it needs an optimizer of type AdamW in this file")
    if at("zero_optimization.offload_optimizer.super_offload") and zero_stage != 3:
        problems.append("zero_optimization.offload_optimizer.super_offload: has no effect below stage 3; leave it out")

    if not problems:  # each entry is sound by itself: DeepSpeed compares them with each other; batches are dsft's
        try:
            _read_as_deepspeed({key: value for key, value in content.items() if value != AUTO and key not in FILLED})
        except Exception as error:  # DeepSpeed raises a dozen kinds; each is the user's to see in one line
            problems.append(one_line(error))
    return [f"zero={zero}: {problem}" for problem in problems]


def _check_entry(key: str, value: Any) -> list[str]:
    """Returns the problems of one entry of the file: DeepSpeed's own error, or a name that DeepSpeed does not read."""
    from deepspeed.runtime import config as names
    from pydantic import ValidationError

    known = {name for name in vars(names).values() if isinstance(name, str) and name.islower()}
    known |= {*OTHER_SECTIONS.split()}
    if key not in known:
        return [f"{key}: unknown key{nearest(key, known)}"]
    if key in (*SECTIONS, "pipeline") and not isinstance(value, dict):
        return [f"{key}={json.dumps(value)}: must be a JSON object; leave it out for DeepSpeed's default"]
    if key in FILLED:  # numbers, checked with the options of the same meaning
        return []
    if key in ("optimizer", "scheduler"):
        return _check_type(key, value)
    try:  # stage 1, which every setting of another entry goes with; all entries together are tried afterwards
        _read_as_deepspeed({"zero_optimization": {"stage": 1}} | {key: value})
    except ValidationError as error:
        return [f"{key}.{'.'.join(map(str, fault['loc']))}: {_fault(fault)}" for fault in error.errors()]
    except Exception as error:  # DeepSpeed raises a dozen kinds; each is shown in one line
        return [f"{key}: {one_line(error)}"]
    return []


def _fault(fault: Mapping[str, Any]) -> str:
    """Returns the text of one error of pydantic."""
    if fault["type"] == "extra_forbidden":
        return f"unknown key{nearest(str(fault['loc'][-1]), _names_of_models())}"
    return one_line(fault["msg"])


def _check_type(key: str, section: dict[str, Any]) -> list[str]:
    """Returns the problems of an optimizer or a scheduler: a type that DeepSpeed does not know."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    unknown = section.keys() - {"type", "params", "legacy_fusion"}
    if unknown:
        return [f"{key}.{name}: unknown key{nearest(name, ['type', 'params'])}" for name in sorted(unknown)]
    name = section.get("type")
    if not isinstance(name, str):
        return [f"{key}.type: {'missing' if name is None else json.dumps(name)}; name its class, for example AdamW"]
    if key == "scheduler":
        known = VALID_LR_SCHEDULES
        is_known = name in known
    else:
        known = ["Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon"]
        is_known = name.lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, name)
    return [] if is_known else [f"{key}.type: {name!r} is unknown{nearest(name, known)}"]


def _read_as_deepspeed(content: dict[str, Any]) -> None:
    """Makes DeepSpeed's configuration of some entries, without the values that transformers fills in."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # bf16, since dsft always adds one: the old name bfloat16 would be ignored beside it.
    with _quiet_deepspeed():
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "bf16": {}} | _without_auto(content))


def _without_auto(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value != AUTO
    }


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _names_of_models() -> set[str]:
    """Lists the fields of all of DeepSpeed's pydantic models."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models, names = [DeepSpeedConfigModel], set()
    while models:
        model = models.pop()
        models += model.__subclasses__()
        for name, field in model.model_fields.items():
            names |= {name, field.alias or name}
    return names


def follow_options(deepspeed_config: dict[str, Any], options: TrainConfig) -> dict[str, Any]:
    """A copy in which the optimizer and the scheduler of a sound file follow the options in what it leaves out, for
    which DeepSpeed has defaults of its own: 1e-3 for a learning rate. Of others only what is given is followed.
    """
    from deepspeed.runtime import lr_schedules

    followed = dict(deepspeed_config)
    for place, names in FILLED_PARAMETERS.items():
        key, _, parameter = place.split(".")
        section = followed.get(key)
        if section is None or not (parameter == "lr" or any(options.value(name) is not None for name in names)):
            continue
        kind = section["type"].lower()
        if key == "scheduler":
            is_taken = parameter in inspect.signature(getattr(lr_schedules, section["type"])).parameters
        else:
            is_taken = kind not in {"betas": WITHOUT_BETAS, "eps": WITHOUT_EPS}.get(parameter, ())
        if is_taken:
            followed[key] = section | {"params": {parameter: AUTO} | section.get("params", {})}
    return followed
