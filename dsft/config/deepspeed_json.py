"""Composes the DeepSpeed configuration from the files in `ds_configs/`, and compares it with the options.

"auto" values in these files are filled by transformers from TrainingArguments.
"""

import json
from pathlib import Path
from typing import Any

from dsft.config.convert import DuplicateKey, unique_keys
from dsft.config.options import HALF_PRECISION, Decision, TrainConfig, decide
from dsft.config.sent_files import read_text
from dsft.errors import nearest

_HERE = Path(__file__).resolve().parent.parent
CONFIG_DIR = _HERE / "ds_configs" if (_HERE / "ds_configs").is_dir() else _HERE.parent / "ds_configs"
"""Inside an installed wheel, else in the checkout."""

SAME_THING = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
"""DeepSpeed key -> the option of ours that says the same."""


def known_names() -> list[str]:
    """The named configurations, as `zero` takes them: "0", "2-offload", "3-hpz" ..."""
    return sorted(path.stem.removeprefix("zero").replace("_", "-") for path in CONFIG_DIR.glob("zero*.json"))


def read_zero_file(zero: str, problems: list[str]) -> dict[str, Any]:
    """The DeepSpeed configuration called `zero` (a name or a path), as it stands in its file."""
    named = CONFIG_DIR / f"zero{zero.replace('-', '_')}.json"
    path = named if named.is_file() else Path(zero)
    if path.suffix != ".json":
        problems.append(
            f"zero={zero}: unknown; use auto, {', '.join(known_names())}, or the path of a DeepSpeed"
            f" JSON{nearest(zero, known_names())}"
        )
        return {}
    try:
        content = json.loads(read_text(path), object_pairs_hook=unique_keys, parse_constant=_no_json)
    except OSError as error:
        problems.append(f"zero={zero}: cannot be read ({error.strerror})")
        return {}
    except DuplicateKey as error:
        problems.append(f"zero={zero}: the key {error} is there twice; keep one")
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"zero={zero}: not valid JSON ({error})")
        return {}
    if not isinstance(content, dict):
        problems.append(f"zero={zero}: must hold a JSON object")
        return {}
    return content


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def get_value(deepspeed_config: dict[str, Any], key: str) -> Any:
    """Value of a dotted key, or None where it, or a section on the way, is missing."""
    for part in key.split("."):
        if not isinstance(deepspeed_config, dict) or part not in deepspeed_config:
            return None
        deepspeed_config = deepspeed_config[part]
    return deepspeed_config


def adopt(deepspeed_config: dict[str, Any], options: TrainConfig) -> tuple[list[Decision], list[str]]:
    """Takes the fixed numbers of a DeepSpeed JSON as decisions; where an option says something else, names both."""
    decisions: list[Decision] = []
    problems = []
    for key, name in SAME_THING.items():
        theirs = get_value(deepspeed_config, key)
        ours = decide(options, decisions).value(name)
        if theirs is None or theirs == "auto":
            continue
        if ours is None:
            decisions.append(Decision(name, theirs, f"{options.zero} says {key}={theirs}"))
        elif ours != theirs:
            problems.append(
                f'{options.zero} says {key}={theirs}, but {name}={ours}; keep one, or write "auto" in the JSON'
            )
    betas = get_value(deepspeed_config, "optimizer.params.betas")
    if not isinstance(betas, list) or len(betas) != 2:
        betas = ()
    for name, theirs in zip(("adam_beta1", "adam_beta2"), betas, strict=False):
        ours = options.value(name)
        if ours is None:
            decisions.append(Decision(name, theirs, f"{options.zero} says optimizer.params.betas={betas}"))
        elif ours != theirs:
            problems.append(f"{options.zero} says optimizer.params.betas={betas}, but {name}={ours}; keep one")
    for section, dtype in HALF_PRECISION.items():
        enabled = get_value(deepspeed_config, f"{section}.enabled")
        if enabled is True and options.dtype not in ("auto", dtype):
            problems.append(
                f'{options.zero} says {section}.enabled=true, but dtype={options.dtype}; keep one, or write "auto" in'
                " the JSON"
            )
    return decisions, problems


def check_nvme(deepspeed_config: dict[str, Any], zero: str) -> list[str]:
    """The folder that offload to NVMe writes to must exist on this node."""
    path = nvme_path(deepspeed_config)
    if not path or Path(path).is_dir():
        return []
    return [
        f"zero={zero}: nvme_path={path} is no folder here; copy {CONFIG_DIR / 'zero3_nvme.json'}, name a folder on a"
        " fast local disk, and give that file as zero"
    ]


def nvme_path(deepspeed_config: dict[str, Any]) -> str | None:
    """The folder that offload to NVMe writes to; None without such offload."""
    paths = [
        get_value(deepspeed_config, f"zero_optimization.{part}.nvme_path")
        for part in ("offload_optimizer", "offload_param")
    ]
    return next(filter(None, paths), None)


def compose(deepspeed_config: dict[str, Any], *, ranks_per_node: int) -> dict[str, Any]:
    """A copy completed for this job: precision sections that follow the flags, and hpZ groups of one node's ranks."""
    composed = json.loads(json.dumps(deepspeed_config))
    for section in ("bf16", "fp16"):
        composed.setdefault(section, {"enabled": "auto"})
    for key in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    ):
        composed.setdefault(key, "auto")
    zero = composed.setdefault("zero_optimization", {"stage": 0})
    if zero.get("zero_hpz_partition_size", 1) > 1:
        zero["zero_hpz_partition_size"] = ranks_per_node
    if zero.get("stage") == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # else the Trainer writes no model at the end
    return composed


def stage(deepspeed_config: dict[str, Any]) -> int:
    """ZeRO stage of a configuration; DeepSpeed's default is 0."""
    return get_value(deepspeed_config, "zero_optimization.stage") or 0


def offloads(deepspeed_config: dict[str, Any]) -> bool:
    """Whether optimizer or parameters leave the device."""
    devices = [
        get_value(deepspeed_config, f"zero_optimization.{part}.device")
        for part in ("offload_optimizer", "offload_param")
    ]
    return any(device not in (None, "none") for device in devices)
