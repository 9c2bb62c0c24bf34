"""Which parameters are trained, and at what share of the learning rate, by patterns of their names.

A pattern is a regular expression that is found anywhere in a name, as `named_parameters` of the model in transformers
has it, without peft's wrappers: `layers\\.(0|1)\\.`, `norm`, `lora_B`. A tied head has its own name and the
embedding's.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from dsft.config.options import TrainConfig

WRAPPERS = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
LORA_PLUS = r"\.lora_(embedding_)?B\."
"""The matrices that start at zero (arXiv 2402.12354)."""


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Maps each trained parameter to its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(WRAPPERS.sub("", name))
    return names


def _is_found(pattern: str, names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def select_trained(model: nn.Module, trainable: Collection[str], frozen: Collection[str]) -> list[str]:
    """Freezes what of the trained parameters no pattern of `trainable` finds, where there is one, or one of `frozen`
    does. Returns the problems: patterns that find nothing, nothing left.
    """
    if not (trainable or frozen):
        return []
    names = _names(model)
    problems = _unmatched("trainable", trainable, names) + _unmatched("frozen", frozen, names)
    for parameter, aliases in names.items():
        is_chosen = not trainable or any(_is_found(pattern, aliases) for pattern in trainable)
        parameter.requires_grad_(is_chosen and not any(_is_found(pattern, aliases) for pattern in frozen))
    if names and not problems and not any(parameter.requires_grad for parameter in names):
        problems.append("trainable and frozen leave nothing to train; take a pattern away")
    return problems


def _unmatched(option: str, patterns: Iterable[str], names: dict[nn.Parameter, list[str]]) -> list[str]:
    known = [name for aliases in names.values() for name in aliases]
    return [
        f"{option}: {pattern!r} finds no parameter that is trained{_like(pattern, known)}"
        for pattern in patterns
        if not _is_found(pattern, known)
    ]


def _like(pattern: str, names: list[str]) -> str:
    """Names what the model has instead: the parameter whose name is most alike, else the first."""
    alike = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3) or names[:1]
    return f"; such as {alike[0]}" if alike else ""


def learning_rates(options: TrainConfig) -> dict[str, float]:
    """Returns pattern -> factor of the learning rate; the first that finds a parameter counts."""
    plus = {LORA_PLUS: options.loraplus_lr_ratio} if options.loraplus_lr_ratio and options.method != "full" else {}
    return dict(options.learning_rates) | plus


def rate_problems(model: nn.Module, rates: Mapping[str, float]) -> list[str]:
    """Lists patterns of learning rates that find nothing which is trained."""
    return _unmatched("learning_rates", rates, _names(model))


def rate_factors(model: nn.Module, rates: Mapping[str, float]) -> dict[nn.Parameter, float]:
    """Maps each trained parameter to its factor of the learning rate."""
    return {
        parameter: next((factor for pattern, factor in rates.items() if _is_found(pattern, aliases)), 1.0)
        for parameter, aliases in _names(model).items()
    }
