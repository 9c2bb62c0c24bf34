"""Builds the model, with adapters or a quantised base if asked for, after comparing its weights with its config.

Under ZeRO-3 the DeepSpeed configuration must be registered before (by `TrainingArguments` or `HfDeepSpeedConfig`): only
then are weights sharded while they load.

transformers and peft initialise missing or mismatched tensors randomly, and drop unexpected ones. Here their own
loading runs over empty tensors (names and shapes, no memory, no content is read), with all its renamings, ties and
exceptions; what it reports is an error. A file that cannot be read is named.
"""

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils.integrations import gather_params_ctx
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import GENERATION_CONFIG_NAME

from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.adapters import (
    add_lora,
    gathered_rows,
    grow_embeddings,
    grow_for,
    select_trained,
    unwrapped,
)
from dsft.models.measure import ModelFacts, empty_model, load_model_config, set_router_loss
from dsft.models.model_folder import (
    ADAPTER_CONFIG,
    MODEL_FILES,
    OPTIMIZER_FILES,
    adapter_base,
    described_in,
    folder_of,
    has_only_shards,
    is_bare_config,
    is_gguf,
    located,
    read_object,
    step_folder,
)
from dsft.models.package import (
    FORMATS,
    Quantization,
    auto_class,
    cast_weights,
    freeze_unreached,
    from_config,
    quantization_on_disk,
    unpacking_config,
)
from dsft.models.weight_files import (
    ADAPTER_FILES,
    WEIGHT_FILES,
    ZeroShards,
    empty_tensors,
    find_files,
    load_pickle,
    safe_unpickling,
)
from dsft.runtime import distributed, replaced
from dsft.runtime.hardware import has_gpu
from dsft.units import plural

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_PLACE = "of its weights have no place in the model"
# Buffers of masks that files of GPT-2, GPT-Neo, GPT-J and CodeGen still contain.
MASKS = re.compile(r"\.attn(\.attention)?\.((masked_)?bias|causal_mask)$")


def resolve_dtype(dtype: str) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_gpu() and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def build_model(
    config, *, dtype: str, seed: int = 42, quantization: Quantization | None = None, new_tokens: Sequence[int] = ()
) -> PreTrainedModel:
    """Builds the causal language model of `config`, with trainable adapters if the method has them.

    Args:
        seed: for random weights if the model is only a config.json, and for new adapters.
        quantization: of a model that is scored; it is loaded on this rank's device.
        new_tokens: tokens that need new rows.
    """
    compute_dtype = DTYPES[resolve_dtype(dtype)]
    method = getattr(config, "method", "full")
    source = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    options = {"dtype": compute_dtype, "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    # Straight to the GPU, without a copy in host memory; under ZeRO-3 weights are sharded on the way.
    device = distributed.device() if has_gpu() and not is_deepspeed_zero3_enabled() else None
    set_seed(seed)
    with safe_unpickling(trust=config.trust_checkpoint):
        if is_bare_config(config.model):
            with device or contextlib.nullcontext():
                model = from_config(load_model_config(config.model, **source), **options)
        else:
            load_config = None
            if method == "qlora":
                load_config = FORMATS[config.quantization].load_config(compute_dtype)
            elif method == "lora" or (quantization and quantization.is_unpacked):
                base = adapter_base(config.model) or config.model  # the base of an adapter that is scored
                load_config = unpacking_config(load_model_config(base, **source))
            if quantization and not load_config:
                load_config = quantization.load_config(compute_dtype)
            if load_config:
                options["quantization_config"] = load_config
            if device or quantization:
                options["device_map"] = {"": distributed.device()}
            model = load_weights(config.model, revision=config.revision, **options)
            is_unpacked = (load_config or quantization) and not getattr(model, "is_quantized", False)
            if is_unpacked:
                cast_weights(model, compute_dtype)
        if method == "qlora":
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if method == "full":
            grow_embeddings(model, new_tokens)
        else:
            if config.adapter:
                take_generation_config(model, Path(config.adapter))
            model = add_lora(model, config, new_tokens, seed=seed)
    if isinstance(config, TrainConfig):
        raise_if_any(select_trained(model, config.trainable, config.frozen))
    if (coefficient := getattr(config, "router_aux_loss", None)) is not None:
        inner = unwrapped(model)
        set_router_loss(inner.config, coefficient)
        inner.router_aux_loss_coef = coefficient  # its constructor has copied the earlier value from the config
    if is_deepspeed_zero3_enabled() and model.config.model_type == "recurrent_gemma":
        # transformers rounds it to bfloat16, but zero.Init casts such buffers to the model's dtype.
        normalizer = unwrapped(model).model.normalizer
        normalizer.copy_(normalizer.bfloat16())
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    is_listed = any(name.endswith("experts") for name in lists)
    must_agree = isinstance(config, TrainConfig) or is_deepspeed_zero3_enabled()
    if is_listed and must_agree and distributed.world_size() > 1:
        # In a repository's own code: ranks would wait for each other, or add up gradients of different experts.
        raise UserError(
            f"model={config.model}: its experts are a list of modules, of which each rank reaches others; use one rank,"
            " or a class of transformers, which has the experts of a layer in one parameter"
        )
    return model


def load_weights(name: str, **options) -> PreTrainedModel:
    """Loads the model of a hub id or folder; for an adapter folder, its base with the adapter (not merged); for a
    checkpoint that contains only DeepSpeed's shards (of any ZeRO stage and number of ranks), from these.
    Raises UserError on every rank if a weight would differ from the one on disk.
    """
    folder = Path(name)
    if has_only_shards(name):
        return _load_zero_shards(folder, **options)
    if base := adapter_base(name):
        model = load_weights(base, **options)
        grow_for(model, name)
        take_generation_config(model, folder)
        with replaced("token_rows", gathered_rows):
            return PeftModel.from_pretrained(model, name)
    # Adapters store this name: an absolute one stays valid in another working folder.
    name = str(folder.resolve()) if folder.is_dir() else name
    place, gguf = located(name)
    if not gguf:
        try:
            find_files(name, WEIGHT_FILES, options.get("revision"))  # downloads them to be compared with the config
        except UserError as error:
            raise UserError([f"model={name}: {problem}" for problem in error.problems]) from None
    source = {key: options.get(key) for key in ("revision", "trust_remote_code")}
    config = load_model_config(name, **source)
    auto = AutoModelForCausalLM if gguf else auto_class(config)
    with quiet_report():
        model, problems = _read(name, partial(auto.from_pretrained, place, config=config, **options, **gguf))
    distributed.raise_together(problems)
    if getattr(model, "_weight_conversions", None):
        # Under ZeRO-3 transformers also keeps those that matched nothing on disk, and would save Gemma 3 under other
        # names.
        model._weight_conversions = [each for each in model._weight_conversions if each.was_used()]
    return freeze_unreached(model)


def take_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Loads the generation_config.json beside an adapter, which replaces its base's, or beside DeepSpeed's shards."""
    if (folder / GENERATION_CONFIG_NAME).is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _load_zero_shards(folder: Path, **options) -> PreTrainedModel:
    """Loads the weights that DeepSpeed saved: whole under ZeRO 0, else gathered from its shards."""
    checkpoint = Path(described_in(str(folder)))
    state = {}  # on rank 0 alone: one copy in host memory, not one per rank

    def read():
        saved = step_folder(folder)
        try:
            if any(saved.glob(OPTIMIZER_FILES)):
                from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

                ZeroShards(saved)  # its error names the file that cannot be read, or the missing rank
                with contextlib.redirect_stdout(io.StringIO()):  # it prints a dozen lines
                    state.update(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=saved.name))
            else:  # ZeRO 0 keeps the weights whole
                state.update(load_pickle(next(saved.glob(MODEL_FILES)))["module"])
        except Exception as error:  # any, from DeepSpeed
            raise UserError(f"model={folder}: its shards cannot be read ({one_line(error)})") from error
        return {*state}

    names = distributed.on_rank_0(read)
    base = adapter_base(str(checkpoint))
    if base:
        model = load_weights(base, **options)
        adapters = grow_for(model, str(checkpoint))
        with replaced("token_rows", gathered_rows):
            model = get_peft_model(model, adapters)
    else:
        config = load_model_config(str(checkpoint), trust_remote_code=options.get("trust_remote_code", False))
        if options["dtype"] == "auto":
            options["dtype"] = config.dtype or torch.float32
        options = {key: value for key, value in options.items() if key not in ("revision", "device_map")}
        model = from_config(config, **options)
    take_generation_config(unwrapped(model), checkpoint)
    wanted = [name for name, parameter in model.named_parameters() if parameter.requires_grad or not base]
    if missing := sorted({*wanted} - names):
        raise UserError(f"model={folder}: {_tensors(missing, 'of the model missing from its shards')}")
    tensors = model.state_dict(keep_vars=True)

    def check_places():
        lost = [*(names - tensors.keys())]
        first_names = {}
        for name, tensor in tensors.items():
            first = first_names.setdefault(id(tensor), name)
            is_saved_twice = first != name and {first, name} <= names  # although tied
            if is_saved_twice and not torch.equal(state[name], state[first]):
                lost.append(name)
        if lost:
            raise UserError(
                f"model={folder}: {_tensors(lost, NO_PLACE)}; if this is the head, set tie_word_embeddings to false in"
                " its config.json"
            )

    distributed.on_rank_0(check_places)
    wanted += [name for name, _ in model.named_buffers() if name in names]
    with torch.no_grad():
        for name in wanted:
            tensor = tensors[name]
            # One weight at a time is gathered on every rank, filled by rank 0, and sharded again.
            with gather_params_ctx([tensor]):
                if distributed.rank() == 0:
                    tensor.copy_(state.pop(name))
            if not hasattr(tensor, "ds_id"):
                distributed.copy_from_rank_0(tensor)
    return model


def weight_problems(model: str, facts: ModelFacts, *, revision: str | None = None) -> list[str]:
    """Lists the problems of the weights of a folder or hub id, which are downloaded if they are not here yet. Those of
    DeepSpeed's shards and of weights that are quantised on disk show only when these are loaded.
    """
    if is_bare_config(model) or is_gguf(model) or has_only_shards(model) or quantization_on_disk(facts.config):
        return []
    try:
        files = find_files(model, WEIGHT_FILES, revision)
        if not files:
            return [f"model={model}: contains a config but no weights; for random weights name its config.json"]
        tensors = empty_tensors(files)
        # Without their scales integers would be cast to other weights.
        integers = []
        for name, tensor in tensors.items():
            if name.endswith("weight") and not tensor.is_floating_point():
                integers.append(name)
        if integers:
            raise UserError(
                f"{_tensors(integers, 'contain integers')}, and its config has no quantization_config; use the model"
                " that it was made from, or one whose config.json has it"
            )
    except UserError as error:
        return [f"model={model}: {problem}" for problem in error.problems]
    load = facts.architecture.from_pretrained
    load = partial(load, None, config=copy.deepcopy(facts.config), state_dict=tensors, device_map="meta")
    with quiet_report():
        return _read(model, load)[1]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to score, before its weights are loaded."""

    config: EvalConfig  # the options; `model` is the one folder or hub id that is loaded
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelFacts | None  # of the model, or of an adapter's base, with the format that it is loaded in

    @property
    def name(self) -> str:
        """Name of the model in results; a colon and the format follow if it is quantised while it loads."""
        quantization = self.facts.size.quantization
        is_made = quantization is not None and not quantization.lies_on_disk
        return f"{self.config.model}:{quantization.format}" if is_made else self.config.model


def check_weights(options: TrainConfig | EvalConfig, facts: ModelFacts, *, local: bool) -> list[str]:
    """Lists the differences between weights and config: of folders if `local`, else of hub ids (downloaded for it)."""
    model = options.model
    adapter = getattr(options, "adapter", None)
    key = "adapter"
    if isinstance(options, EvalConfig) and (base := adapter_base(model)):
        model, adapter, key = base, model, "model"
    problems = []
    if Path(model).exists() == local:
        problems += weight_problems(model, facts, revision=options.revision)
    if adapter and Path(adapter).exists() == local:
        problems += adapter_problems(adapter, facts.config, key=key, trust_remote_code=options.trust_remote_code)
    for folder in filter(None, (model, adapter)):
        file = folder_of(folder) / GENERATION_CONFIG_NAME
        try:
            if local and file.is_file():
                read_object(file)
        except UserError as error:  # transformers would ignore the file, and its stop tokens would be lost
            problems += error.problems
    return problems


def _read(model: str, load: Callable[..., tuple[PreTrainedModel, dict]]) -> tuple[PreTrainedModel | None, list[str]]:
    """Returns the model that `load` returns, and problems: tensors not loaded as they are on disk, by its report."""
    try:
        # Mismatched tensors are then in the report, like missing ones.
        loaded, info = load(output_loading_info=True, ignore_mismatched_sizes=True)
    except RuntimeError as error:  # about experts, and under ZeRO-3 about shapes, which only rank 0 sees
        if not re.search(r"automatic conversion of the weights|Error\(s\) in loading state_dict", str(error)):
            raise
        return None, [f"model={model}: its weights do not fit its config ({one_line(error)}); get its files again"]
    if getattr(loaded.config, "quantization_config", None):
        info["unexpected_keys"] = set()  # scales and the like, which belong to the quantised weights
    problems = []
    if missing := info["missing_keys"]:
        problems.append(
            f"{_tensors(missing, 'of the model missing from its weights')}; they would be initialised randomly. Copy or"
            " download the model again"
        )
    problems += [
        f"{name} is {list(shape)} in its weights, {list(expected)} by its config; are both of the same model?"
        for name, shape, expected in sorted(info["mismatched_keys"])[:1]
    ]
    if unexpected := [name for name in info["unexpected_keys"] if not MASKS.search(name)]:
        problems.append(
            f"{_tensors(unexpected, NO_PLACE)}; is its config of another model? Where they may go, load and save it"
            " once with transformers (from_pretrained, save_pretrained)"
        )
    return loaded, [f"model={model}: {problem}" for problem in problems]


def adapter_problems(
    adapter: str, config: PreTrainedConfig, *, key: str = "adapter", trust_remote_code: bool = False
) -> list[str]:
    """Lists the problems of an adapter over the base of `config`; `key` is the option that names it."""
    if has_only_shards(adapter):
        return []
    try:
        files = find_files(adapter, ADAPTER_FILES)
        if not files:
            return [f"{key}={adapter}: has no {ADAPTER_FILES[0]}"]
        tensors = empty_tensors(files)
        base = empty_model(config, trust_remote_code=trust_remote_code)
        peft_config = grow_for(base, adapter)
    except UserError as error:
        return [f"{key}={adapter}: {problem.removeprefix(adapter + '/')}" for problem in error.problems]
    try:
        with warnings.catch_warnings(action="ignore"):
            model = get_peft_model(base, peft_config, low_cpu_mem_usage=True)
            state = model.state_dict(keep_vars=True)
            result = set_peft_model_state_dict(model, tensors)
    except KeyError as error:  # from peft: a module that was saved whole
        return [f"{key}={adapter}: 1 tensor of the adapter missing from its weights, {error}"]
    except (RuntimeError, ValueError) as error:  # target modules, shapes
        reason = one_line(error)
        return [f"{key}={adapter}: does not fit its base ({reason}); name its own base in {ADAPTER_CONFIG}"]
    absent = {*result.missing_keys}
    loaded = {id(parameter) for name, parameter in state.items() if name not in absent}
    # One vector bank in all layers is saved once.
    missing = [name for name in absent if state[name].requires_grad and id(state[name]) not in loaded]
    if missing:
        return [
            f"{key}={adapter}: {_tensors(missing, 'of the adapter missing from its weights')}; if it was trained on the"
            " text class of a package, merge it there: peft, over AutoModelForCausalLM"
        ]
    # Beside a whole embedding peft saves the trained rows of it, or of a tied head, again, and does not read them.
    repeated = set()
    for name, parameter in state.items():
        if id(parameter) in loaded:
            repeated.add(name.replace(".default", ""))
    if unexpected := {*result.unexpected_keys} - repeated:
        return [f"{key}={adapter}: {_tensors(unexpected, NO_PLACE)}; was it trained on another base?"]
    return []


def _tensors(names: Iterable[str], predicate: str) -> str:
    first, *others = sorted(names)
    return f"{plural(1 + len(others), 'tensor')} {predicate}, {f'the first is {first}' if others else first}"


@contextlib.contextmanager
def quiet_report() -> Iterator[None]:
    """Hides transformers' own report and its progress bar."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
