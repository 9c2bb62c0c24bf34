"""Selects the trained parameters: LoRA adapters through peft, rows of new tokens, and parameters by name patterns.
Also checks which saved adapters of peft dsft can score and merge.
"""

import contextlib
import copy
import dataclasses
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.integrations import gather_params_ctx
from torch import nn
from transformers import PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from dsft.config.options import LoraFields, TrainConfig
from dsft.errors import UserError, limited_time, nearest, one_line
from dsft.models.model_folder import ADAPTER_CONFIG, adapter_description
from dsft.models.package import unreached
from dsft.models.weight_files import ADAPTER_FILES, empty_tensors, find_files
from dsft.runtime import replaced
from dsft.units import plural

ALL_LINEAR = "all-linear"
# Values of `model_type` for which peft refuses to adapt out_proj: Mamba's kernel reads its weight.
MAMBA_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
# Types of saved adapters that are scored, merged and trained further. A merge by peft computes the same as base and
# adapter (each in tests/checkpoints/test_export_adapters.py).
ADAPTER_TYPES = {
    *("BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING"),
    *("LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD"),
    *("SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
}
# Fields of LoRA that dsft plans, evaluates and merges.
LORA_FIELDS = {
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "layers_to_transform"),
    *("layers_pattern", "init_lora_weights", "eva_config"),
    *("trainable_token_indices", "target_parameters", "lora_bias", "ensure_weight_tying"),
}
QLORA_STARTS = (True, False, "gaussian", "orthogonal")  # values of `init_lora_weights` that need no weights of the base
# Others need the data, or change the base in a way that cannot be reproduced from the saved adapter. peft repeats the
# last two each time it loads the adapter.
LORA_STARTS = (*QLORA_STARTS, "mica", "pissa", "olora")
# A grown vocabulary is padded to a multiple of this: products of other widths take a GPU up to a third longer.
ROWS_MULTIPLE = 64
WRAPPERS = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
LORA_PLUS = r"\.lora_(embedding_)?B\."  # the matrices that start at zero (arXiv 2402.12354)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model of transformers, without peft's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def add_lora(
    model: PreTrainedModel, options: TrainConfig, new_tokens: Iterable[int] = (), *, seed: int = 42
) -> PeftModel:
    """Returns `model` with trainable adapters: those of the folder `options.adapter`, else new ones. `new_tokens`: as
    in `adapters_of`; `seed`: for the initial weights of new adapters.
    """
    adapters = adapters_of(options, model, new_tokens)
    set_seed(seed)
    # Adapters have the base's dtype, and DeepSpeed keeps fp32 masters of them. peft would make them fp32, and under
    # ZeRO-3 DeepSpeed leaves them so: every product of an adapter is then in fp32, and its inputs are saved twice.
    with warnings.catch_warnings(), replaced("token_rows", gathered_rows):
        # From peft's own pattern for fused experts.
        warnings.filterwarnings("ignore", "The following alpha_pattern keys did not match .*gate_up_proj")
        if options.adapter:
            adapted = PeftModel.from_pretrained(model, options.adapter, is_trainable=True, autocast_adapter_dtype=False)
        else:
            adapted = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    adapted.peft_config["default"].revision = options.revision  # of the base, for all that load the adapter
    if tokens_of(adapters):  # only their rows of the embedding are saved
        adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    return adapted


def adapted_for_a_look(model: PreTrainedModel, adapters: PeftConfig) -> PeftModel:
    """Returns `model` with a copy of `adapters`, into which peft writes the targets that it found, without warnings."""
    doing = "a regular expression of the adapter, such as target_modules,"
    with warnings.catch_warnings(action="ignore"), limited_time(doing):
        return get_peft_model(model, copy.deepcopy(adapters))


def gathered_rows(_: nn.Module, weight: nn.Parameter, rows: list[int], width: int) -> torch.Tensor:
    """Returns rows of a sharded weight, on every rank. Collective."""
    with gather_params_ctx([weight], modifier_rank=None):
        return weight[rows].clone()


def saved_lora_config(adapter: str) -> PeftConfig:
    """Reads the config of a saved adapter of any type. Raises UserError if its type or one of its fields is not
    supported, OSError or ValueError if there is none.
    """
    folder = adapter
    if not Path(adapter).exists():
        folder = str(Path(cached_file(adapter, ADAPTER_CONFIG)).parent)
    content = adapter_description(folder)
    if content is None:
        raise ValueError(f"it has no {ADAPTER_CONFIG}")
    file = f"{adapter}/{ADAPTER_CONFIG}"
    kind = content["peft_type"]
    if kind not in ADAPTER_TYPES:
        raise UserError(f"{file}: an adapter of type {kind} is not supported; use peft itself")
    defaults = {field.name: field.default for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    supported = defaults.keys()
    if kind == "LORA":
        supported = LORA_FIELDS | {field.name for field in dataclasses.fields(PeftConfig)}
    for name, value in sorted(content.items()):
        if value and name not in supported and value != defaults.get(name):  # peft drops unknown fields
            library = "dsft" if name in defaults else "the installed peft"
            raise UserError(f"{file}: sets {name}, which {library} does not support; use peft itself, or a newer one")
    if kind == "LORA" and content.get("init_lora_weights", True) not in (*LORA_STARTS, None, "eva"):
        raise UserError(
            f"{file}: init_lora_weights {content['init_lora_weights']!r} changed the base at its start, which cannot be"
            " repeated from what was saved; save it with peft's path_initial_model_for_weight_conversion"
        )
    try:
        config = PeftConfig.from_pretrained(folder)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise UserError(f"{file}: cannot be read by peft ({one_line(error)})") from None
    config.inference_mode = False  # as saved, it would freeze the adapter
    return config


def lora_config(options: LoraFields, model: PreTrainedModel, rows: Sequence[int] = ()) -> LoraConfig:
    """Builds peft's configuration from the lora_* options, for a model (on the meta device) whose embedding and head
    have new `rows` to train. peft raises ValueError, TypeError or ImportError if fields contradict each other.
    """
    fields = dict(options.lora_options)
    left_out = _left_out(model)
    excluded = [rf"{re.escape(beginning.removesuffix('.'))}(\..*)?" for beginning in left_out]
    asked = fields.pop("exclude_modules", None) or []
    if isinstance(asked, str):
        excluded.append(f"(?:{asked})")
    else:
        excluded += [rf"(.*\.)?{re.escape(name)}" for name in asked]
    targets = options.lora_target_modules
    if targets == [ALL_LINEAR]:
        targets = ALL_LINEAR
        if model.config.model_type in MAMBA_TYPES:
            excluded.append(r"(.*\.)?out_proj")
        fused = []  # parameters that contain all experts of a layer
        for name, parameter in model.named_parameters():
            if ".experts." in name and len(getattr(parameter, "ds_shape", parameter.shape)) == 3:
                fused.append(name)
        if any(name.startswith(left_out) for name in fused):  # by full name: towers have such names, too
            experts = {name for name in fused if not name.startswith(left_out)}
        else:
            experts = {".".join(name.split(".")[-3:]) for name in fused}
        if experts:
            fields.setdefault("target_parameters", sorted(experts))
    if rows:
        # With tied weights peft trains the head's rows with the embedding's; it reads this from the model's config.
        ends = [*_ends(model)]
        if getattr(model.config, "tie_word_embeddings", False):
            ends = ends[:1]
        fields["trainable_token_indices"] = {end: [*rows] for end in ends}
    with warnings.catch_warnings(action="ignore"):
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=options.lora_r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=targets,
            exclude_modules="|".join(excluded) or None,
            modules_to_save=options.lora_modules_to_save or None,
            use_dora=options.use_dora,
            use_rslora=options.use_rslora,
            **fields,
        )


def _ends(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the embedding and, if there is one, the head, by their names."""
    names = {module: name for name, module in model.named_modules()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {names[end]: end for end in ends if end is not None}


def _is_meant(name: str, target: str) -> bool:
    """Whether `target` is the module's name or a suffix of it, as peft matches them."""
    return f".{name}".endswith(f".{target}")


def _left_out(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns name prefixes of modules that LoRA does not adapt: those that no text token passes through, and linear
    layers that compute something else (the router of Llama 4 returns two tensors).
    """
    routers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).__name__.endswith(("Router", "GroupedLinear")):
            routers.append(f"{name}.")
    return (*routers, *unreached(model))


def adapters_of(options: TrainConfig, model: PreTrainedModel, new_tokens: Iterable[int] = ()) -> PeftConfig | None:
    """Returns the adapters that a training of `model` starts with: none, those of a saved adapter, or new ones. Adds
    the rows that these and `new_tokens` need to the model. Collective.
    Raises UserError if a saved adapter cannot be trained further.
    """
    saved = None
    if options.adapter and options.method != "full":
        saved = grow_for(model, options.adapter, is_trained=True)
        if lost := {*new_tokens} - {*tokens_of(saved)}:
            number = plural(len(lost), "token")
            raise UserError(f"add_tokens: {options.adapter} has no rows for {number}; train a new one")
    rows = grow_embeddings(model, new_tokens)
    return None if options.method == "full" else saved or lora_config(options, model, rows)


def check_lora_options(model: PreTrainedModel, options: TrainConfig) -> list[str]:
    """Lists problems of the lora_* options: fields that dsft does not support, and names that match nothing in `model`
    (on the meta device), which peft ignores silently. What peft itself refuses is left to it.
    """
    problems = []
    for name in sorted(options.lora_options.keys() - (LORA_FIELDS - {"eva_config"})):
        problems.append(f"lora_options: {name} is not a supported field of peft.LoraConfig{nearest(name, LORA_FIELDS)}")
    starts = QLORA_STARTS if options.method == "qlora" else LORA_STARTS
    start = options.lora_options.get("init_lora_weights", True)
    if start not in starts:
        choices = ", ".join(map(str, starts))
        problems.append(f"lora_options: init_lora_weights={start} is not supported here; choose from {choices}")
    if options.add_tokens:
        ends = _ends(model)
        whole = [name for name in options.lora_modules_to_save if any(_is_meant(end, name) for end in ends)]
        if whole or "trainable_token_indices" in options.lora_options:
            other = f"lora_modules_to_save: {whole[0]}" if whole else "lora_options: trainable_token_indices"
            problems.append(f"{other}: add_tokens trains the rows of new tokens; leave one out")
    modules = dict(model.named_modules())
    left_out = _left_out(model)
    layers = []
    linear = set()
    for name, module in modules.items():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)) and not f"{name}.".startswith(left_out):
            layers.append(name)
            linear.add(name.rpartition(".")[2])
    for option, names in (("lora_target_modules", layers), ("lora_modules_to_save", modules)):
        for target in getattr(options, option):
            if target != ALL_LINEAR and not any(_is_meant(name, target) for name in names):
                problems.append(
                    f"{option}: {target!r} matches no layer of {options.model} that it can train; its linear"
                    f" layers and embeddings are {', '.join(sorted(linear))}; several are a list, [a, b],"
                    " or words of a flag"
                )
    return problems


def tokens_of(adapters: PeftConfig | None) -> list[int]:
    """Returns the tokens whose rows an adapter trains: its base must have these rows."""
    tokens = set()
    for name in ("trainable_token_indices", "token_indices"):  # of LoRA, and of the type TRAINABLE_TOKENS
        indices = getattr(adapters, name, None) or []
        for some in indices.values() if isinstance(indices, dict) else [indices]:
            tokens.update(some)
    return sorted(tokens)


def grow_for(model: PreTrainedModel, adapter: str, *, is_trained: bool = False) -> PeftConfig:
    """Resizes a base to the rows that a saved adapter contains, or else adds the rows that it trains and the base
    lacks. Returns the adapter's configuration. Collective. Raises UserError as `saved_lora_config`, if the adapter was
    saved without a grown head or embedding (if peft adapts one of them, it does not save the other), or if further
    training (`is_trained`) would not save these.
    """
    adapters = saved_lora_config(adapter)
    vocab_size = model.config.get_text_config().vocab_size
    tensors = {}
    with contextlib.suppress(UserError):  # reported by `adapter_problems`
        tensors = empty_tensors(find_files(adapter, ADAPTER_FILES))
    ends = _ends(model)
    held = {}  # end -> its rows; peft saves both whole once they were resized, even if untrained
    wrappers = r"((base_layer|token_adapter|original_module)\.)*"
    for end, module in ends.items():
        names = re.compile(rf"base_model\.model\.{re.escape(end)}\.{wrappers}weight")
        shape = getattr(module.weight, "ds_shape", module.weight.shape)  # whole shape of a ZeRO-3 shard
        for name, tensor in tensors.items():
            if names.fullmatch(name) and tensor.shape[1:] == shape[1:]:  # another width belongs to another base
                held[end] = len(tensor)
    if not held:
        grow_embeddings(model, [token for token in tokens_of(adapters) if token >= vocab_size])
        return adapters
    rows = max(held.values())  # the adapter contains their values
    if rows == vocab_size:
        return adapters
    kept = {ends[name].weight for name in held}  # a tied one is saved with the other
    for name, module in ends.items():
        if rows > vocab_size and module.weight not in kept:
            raise UserError(
                f"{adapter}/{ADAPTER_CONFIG}: trained over {rows:,} tokens and saved without its {name}, of which the"
                f" base has {vocab_size:,} rows; merge it where it was trained, or train it with {name} in"
                " modules_to_save"
            )
    trained = getattr(adapters, "modules_to_save", None) or ()
    for name in held:
        if is_trained and not any(_is_meant(name, target) for target in trained):
            raise UserError(
                f"adapter={adapter}: has a {name} of {rows:,} rows, its base one of {vocab_size:,}, and a training"
                " would not save it; merge both first (dsft merge), and train a new adapter of the result"
            )
    model.resize_token_embeddings(rows, mean_resizing=False)
    return adapters


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, tokens: Iterable[int]) -> list[int]:
    """Adds rows for `tokens` to embedding and head, and returns all new ones; the meta device is enough. Collective.

    New rows start at the mean of the others, so that a new token is as likely as an average one. This includes the
    padding to a multiple of ROWS_MULTIPLE. transformers draws random rows, different ones on each rank.
    """
    tokens = [*tokens]
    before = model.config.get_text_config().vocab_size
    needed = max(tokens, default=0) + 1
    grown = before
    if needed > before:
        grown = -(-needed // ROWS_MULTIPLE) * ROWS_MULTIPLE
        model.resize_token_embeddings(grown, mean_resizing=False)
    if rows := sorted({*tokens, *range(before, grown)}):
        parameters = chain.from_iterable(end.parameters() for end in _ends(model).values())
        for parameter in dict.fromkeys(parameters):  # tied ones once
            with gather_params_ctx([parameter]):
                if parameter.device.type != "meta":
                    parameter[rows] = 0
                    parts = parameter.split(2**14)  # a sum of all would copy bfloat16 to float32 on a CPU
                    total = sum(part.sum(0, dtype=torch.float32) for part in parts)
                    mean = total / (len(parameter) - len(rows))
                    parameter[rows] = mean.to(parameter.dtype)
    return rows


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Maps each trained parameter to its names in transformers (`named_parameters`), without peft's wrappers. A tied
    head has its own name and the embedding's.
    """
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(WRAPPERS.sub("", name))
    return names


def _is_found(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether one of `patterns`, such as `layers\\.(0|1)\\.` or `norm`, matches anywhere in one of `names`."""
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def select_trained(
    model: nn.Module, trainable: Collection[str], frozen: Collection[str], rates: Iterable[str] = ()
) -> list[str]:
    """Freezes trained parameters that match no pattern of `trainable` (if there are any), or match one of `frozen`.
    Returns the problems: patterns without a match, also those of `rates` among the rest, or nothing left to train.
    """
    names = _names(model)
    problems = _unmatched("trainable", trainable, names) + _unmatched("frozen", frozen, names)
    if problems:
        return problems
    for parameter, aliases in names.items():
        is_chosen = not trainable or _is_found(trainable, aliases)
        parameter.requires_grad_(is_chosen and not _is_found(frozen, aliases))
    left = _names(model)
    if names and not left:
        return ["trainable and frozen leave nothing to train; take a pattern away"]
    return _unmatched("learning_rates", rates, left)


def _unmatched(option: str, patterns: Iterable[str], names: dict[nn.Parameter, list[str]]) -> list[str]:
    all_names = [name for aliases in names.values() for name in aliases]
    such_as = f"; such as {all_names[0]}" if all_names else ""
    problems = []
    for pattern in patterns:
        if not _is_found([pattern], all_names):
            problems.append(f"{option}: {pattern!r} finds no parameter that is trained{such_as}")
    return problems


def learning_rates(options: TrainConfig) -> dict[str, float]:
    """Returns pattern -> factor of the learning rate; the first match counts."""
    rates = dict(options.learning_rates)
    if options.loraplus_lr_ratio and options.method != "full":
        rates[LORA_PLUS] = options.loraplus_lr_ratio
    return rates


def rate_factors(model: nn.Module, rates: Mapping[str, float]) -> dict[nn.Parameter, float]:
    factors = {}
    for parameter, aliases in _names(model).items():
        matching = (factor for pattern, factor in rates.items() if _is_found([pattern], aliases))
        factors[parameter] = next(matching, 1.0)
    return factors
