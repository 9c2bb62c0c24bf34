"""What DeepSpeed would ignore or cannot read of a DeepSpeed JSON, found before anything starts.

DeepSpeed takes a key that it does not know for none at all, so that a misspelt section trains something else without a
word. Which keys it knows only its own reading says: it is given each entry of the file in a mapping that notes what it
asks for. Its pydantic models refuse unknown keys themselves.
"""

import inspect
import json
import logging
import math
from collections.abc import Collection, Iterator, KeysView
from typing import Any

from dsft.config.deepspeed_json import read_zero_file
from dsft.errors import nearest, one_line

AUTO = "auto"
FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
"""Entries whose "auto" transformers fills (integrations/deepspeed.py), beside some inside of sections."""
NUMBERS = {
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "train_batch_size": int,
    "zero_optimization.stage": int,
    "gradient_clipping": float,
    "optimizer.params.lr": float,
    "optimizer.params.eps": float,
    "optimizer.params.weight_decay": float,
    "scheduler.params.warmup_max_lr": float,
    "scheduler.params.warmup_num_steps": int,
    "scheduler.params.total_num_steps": int,
}
"""Values that dsft or transformers compares with options: DeepSpeed itself would take "3" for 3."""
SECTIONS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler")
"""Entries that dsft reads itself."""
NO_DEFAULT = ("zero_optimization.stage", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
"""Where "auto" would mean one thing to accelerate and another to DeepSpeed."""
ADAM = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""What DeepSpeed itself takes from the parameters of an Adam (engine.py)."""


def read_sound_file(zero: str, problems: list[str]) -> dict[str, Any]:
    """The DeepSpeed configuration called `zero`, as `read_zero_file` reads it; empty where something of it is wrong."""
    content = read_zero_file(zero, problems)
    faults = check_deepspeed_json(content, zero)
    problems += faults
    return {} if faults else content


def check_deepspeed_json(content: dict[str, Any], zero: str) -> list[str]:
    """Lists everything of a DeepSpeed JSON that DeepSpeed would ignore or cannot read; `zero` names the file."""
    problems = []
    for key, value in content.items():
        if value != AUTO:
            problems += _check_numbers(key, value) or _check_entry(key, value)
        elif key not in FILLED:
            problems += _check_entry(key, {}) or [f'{key}="auto": nothing fills this in; write it, or leave it out']
    halves = [name for name in ("bf16", "fp16") if _enabled(content.get(name))]
    if len(halves) == 2:
        problems.append("bf16.enabled and fp16.enabled are both true; keep one")
    return [f"zero={zero}: {problem}" for problem in problems]


def _enabled(section: Any) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True


def _check_numbers(key: str, value: Any) -> list[str]:
    """Checks the values that are numbers to dsft, and where "auto" cannot stand."""
    problems = []
    for place, number in _leaves(key, value):
        kind = NUMBERS.get(place)
        is_number = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        if number == AUTO:
            if place.removesuffix(".device") in NO_DEFAULT:
                problems.append(f'{place}="auto": nothing fills this in; write it, or leave it out')
        elif kind is int and not (is_number and number == int(number)):
            problems.append(f"{place}={json.dumps(number)}: must be a whole number")
        elif kind is float and not is_number:
            problems.append(f"{place}={json.dumps(number)}: must be a number")
        elif kind is int and place in FILLED and number < 1:
            problems.append(f"{place}={number}: must be at least 1")
    return problems


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield place, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{place}.{name}", inner)


def _check_entry(key: str, value: Any) -> list[str]:
    """Lets DeepSpeed read one entry of the file."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger
    from pydantic import ValidationError

    not_an_object = f"{key}={json.dumps(value)}: must be a JSON object; leave it out for DeepSpeed's default"
    if key in SECTIONS and not isinstance(value, dict):
        return [not_an_object]
    parts: list[str] = []
    if key in ("optimizer", "scheduler"):
        parts, value = _check_type_and_parameters(key, value), value | {"params": {}}
    # bf16, since dsft always adds one: the old name bfloat16 would be ignored beside it.
    content = _Section({"train_micro_batch_size_per_gpu": 1, "bf16": {}} | {key: value})
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        DeepSpeedConfig(content)
    except ValidationError as error:
        return parts + [_fault(key, fault) for fault in error.errors()]
    except Exception as error:  # DeepSpeed raises a dozen kinds; each is the user's to see in one line
        wants_object = isinstance(error, TypeError | AttributeError) and not isinstance(value, dict)
        return [*parts, not_an_object if wants_object else f"{key}: {one_line(error)}"]
    finally:
        logger.setLevel(level)
    return parts + [f"{place}: unknown key{nearest(name, known)}" for place, name, known in content.unknown()]


def _fault(key: str, fault: dict[str, Any]) -> str:
    """Puts what pydantic found wrong in one line."""
    place = ".".join(map(str, (key, *fault["loc"])))
    if fault["type"] == "extra_forbidden":
        return f"{place}: unknown key{nearest(str(fault['loc'][-1]), _names_of_models())}"
    return f"{place}: {one_line(fault['msg'])}"


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


class _Section(dict):
    """A mapping of the file that notes which keys it is asked for. "auto" is not there, as DeepSpeed's models take it;
    transformers fills it before DeepSpeed reads the file.
    """

    def __init__(self, content: dict[str, Any]):
        present = {name: value for name, value in content.items() if value != AUTO}
        super().__init__(
            {name: _Section(value) if isinstance(value, dict) else value for name, value in present.items()}
        )
        self.content = content
        self.asked: set[str] = set()
        self.is_taken_whole = False

    def __contains__(self, name: Any) -> bool:
        self.asked.add(name)
        return super().__contains__(name)

    def __getitem__(self, name: Any) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[Any]:
        self.is_taken_whole = True
        return super().__iter__()

    def keys(self) -> KeysView:
        return KeysView(self)

    def items(self) -> Any:
        self.is_taken_whole = True
        return super().items()

    def __copy__(self) -> "_Section":
        return self

    def unknown(self, place: str = "") -> Iterator[tuple[str, str, Collection[str]]]:
        """Yields (place, name, names that are known there) of each key that nobody asked for."""
        if (
            self.is_taken_whole or not self.asked
        ):  # by a pydantic model, which refuses unknown keys itself, but for "auto"
            names = _names_of_models()
            for leaf, value in _leaves("", self.content):
                if value == AUTO and (name := leaf.rpartition(".")[2]) not in names:
                    yield f"{place}{leaf[1:]}", name, names
            return
        for name in self.content:
            if name not in self.asked:
                yield f"{place}{name}", name, self.asked
            elif isinstance(section := dict.get(self, name), _Section):
                yield from section.unknown(f"{place}{name}.")


def _check_type_and_parameters(key: str, section: dict[str, Any]) -> list[str]:
    """Compares the type of an optimizer or scheduler, and its parameters, with the class that DeepSpeed will make."""
    name, parameters = section.get("type"), section.get("params", {})
    if not isinstance(name, str):
        return [f"{key}.type: {'missing' if name is None else json.dumps(name)}; name its class, for example AdamW"]
    if not isinstance(parameters, dict):
        return [f"{key}.params={json.dumps(parameters)}: must be a JSON object"]
    classes, known = (_optimizers if key == "optimizer" else _schedulers)(name)
    if not classes:
        return [f"{key}.type: {name!r} is unknown{nearest(name, known)}"]
    signatures = [inspect.signature(cls).parameters for cls in classes]
    first = {next(iter(signature)) for signature in signatures}
    taken = {parameter for signature in signatures for parameter in signature} - first
    if name.lower() in ("adam", "adamw"):
        taken |= {*ADAM}
    required = [
        parameter.name
        for parameter in signatures[0].values()
        if parameter.default is parameter.empty and parameter.name not in first
    ]
    return [
        f"{key}.params.{given}: unknown key{nearest(given, taken)}" for given in parameters if given not in taken
    ] + [f"{key}.params.{parameter}: missing" for parameter in required if parameter not in parameters]


def _optimizers(name: str) -> tuple[list[type], Collection[str]]:
    """Returns (the classes that `name` may become, all names)."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    known_classes = {
        "Adam": [FusedAdam, DeepSpeedCPUAdam, torch.optim.Adam],
        "AdamW": [FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW],
        "Adagrad": [DeepSpeedCPUAdagrad, torch.optim.Adagrad],
        "Lamb": [FusedLamb],
        "Lion": [FusedLion, DeepSpeedCPULion],
    }
    classes = {known.lower(): kinds for known, kinds in known_classes.items()}.get(name.lower())
    plain = getattr(torch.optim, name, None)
    return classes or ([plain] if inspect.isclass(plain) and name != "Optimizer" else []), known_classes


def _schedulers(name: str) -> tuple[list[type], Collection[str]]:
    from deepspeed.runtime import lr_schedules

    known = lr_schedules.VALID_LR_SCHEDULES
    return [getattr(lr_schedules, name)] if name in known else [], known
