"""Turns a run, a checkpoint, an adapter or a quantised model into a plain Hugging Face folder.

    dsft export runs/first exported          # final model of a run, or any checkpoint-N; adapters are merged
    dsft merge runs/lora/final merged        # an adapter into its base

transformers loads the model, peft merges an adapter, and the whole model must fit into host memory.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import cached_file

from dsft.checkpoints.manifest import share_files
from dsft.checkpoints.run_folder import UNFINISHED, check_new_folder, find_adapter, find_weights
from dsft.checkpoints.save import verify_weights
from dsft.config.reader import Values
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.adapters import unwrapped
from dsft.models.build import DTYPES, adapter_problems, load_weights
from dsft.models.measure import empty_model, load_model_config
from dsft.models.model_folder import adapter_base, base_revision, described_in, is_gguf, located
from dsft.models.package import GGUF, cast_weights, unpacking_config
from dsft.models.tokenizer import tokenizer_folder
from dsft.models.weight_files import safe_unpickling
from dsft.runtime.hardware import free_host_bytes
from dsft.units import GB, write_json

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
LAYERED_ROPE = ("gemma3_text", "gemma3n_text", "olmo3")
"""Values of `model_type` in transformers 4 whose rotary angles differ by kind of layer: transformers 4 and 5 read the
old keys. Newer classes read these as the angles of all layers, and refuse them (Gemma 4).
"""


def export(
    source: str,
    out: str,
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    trust_checkpoint: bool = False,
) -> Path:
    """Write `source` as safetensors, config and tokenizer to the new folder `out`; an adapter is merged into its base.
    Raises UserError if `source` has no weights or is a damaged checkpoint, or `out` already has files.

    Args:
        dtype: of the written weights; "auto" is the one in the source's config, float32 for a GGUF file.
        max_shard_size: of each written file.
        trust_remote_code: run code from the model's repository; it is copied to `out`.
        trust_checkpoint: read pickles that ask for any class, see models/weight_files.py.
    """
    folder = str(find_weights(source))
    target = Path(out)
    if is_gguf(target.name.lower()):
        raise UserError(f"{out}: dsft writes a folder of safetensors; name one, and convert it with llama.cpp")
    check_new_folder(out)
    verify_weights(folder)
    options = {"revision": base_revision(folder), "trust_remote_code": trust_remote_code}
    beside = target.absolute().with_name(f"{target.name}{UNFINISHED}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with safe_unpickling(trust=trust_checkpoint):
            model = _load(folder, dtype, options)
            model.save_pretrained(beside, max_shard_size=max_shard_size)
            copy_processor(adapter_base(folder) or folder, beside)
            tokenizer, gguf = located(tokenizer_folder(folder))
            AutoTokenizer.from_pretrained(tokenizer, **gguf, **options).save_pretrained(beside)
        add_keys_of_transformers_4(beside, tokenizer)
        share_files(beside)
        beside.rename(target)
    except UserError:
        raise
    # From transformers and peft: truncated files, NaN, adapters that cannot be merged, missing packages.
    except (OSError, ValueError, RuntimeError, SafetensorError, ImportError) as error:
        raise UserError(f"{source}: cannot be exported ({one_line(error)})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # after a failure, gigabytes
    return target


def merge(source: str, out: str, **options: Any) -> Path:
    """Export an adapter, or a run that trained one, merged. Raises UserError if it is neither."""
    return export(str(find_adapter(source)), out, **options)


def _load(folder: str, dtype: str, options: Values) -> PreTrainedModel:
    """Load a whole model, with its adapter merged, and unpacked if its quantised format allows it."""
    base = adapter_base(folder)
    if base and adapter_base(base):
        raise UserError(f"{folder}: its base {base} is an adapter itself; merge that first, and name the result")
    trust = options["trust_remote_code"]
    config = load_model_config(base or folder, **options)
    written_dtype = DTYPES.get(dtype) or config.dtype or torch.float32
    num_params = empty_model(config, trust_remote_code=trust).num_parameters()
    needed = num_params * written_dtype.itemsize
    free = free_host_bytes()
    if needed > free:
        raise UserError(
            f"{folder}: the full model takes {needed / GB:.3g} GB of memory, and {free / GB:.3g} GB are free here"
        )
    if base:
        raise_if_any(adapter_problems(folder, config, key="adapter", trust_remote_code=trust))
    unpacking = GGUF.load_config(written_dtype) if is_gguf(folder) else unpacking_config(config)
    of_weights = {"dtype": DTYPES.get(dtype, "auto")}
    if unpacking:
        of_weights = {"dtype": written_dtype, "quantization_config": unpacking}
    model = load_weights(folder, **options, **of_weights)
    if unpacking:
        inner = unwrapped(model)
        inner._weight_conversions = None  # or transformers packs them again
        cast_weights(inner, written_dtype)
        text_config = inner.config.get_text_config(decoder=True)
        if hasattr(text_config, "quantization_config"):
            del text_config.quantization_config
    if isinstance(model, PeftModel):
        model = _merged(model)
    return model


def _merged(adapted: PeftModel) -> PreTrainedModel:
    """Merge with peft. An adapter may change one of two tied weights: untie them, and tie equal ones again."""
    inner = adapted.get_base_model()
    embedding = _weight_of(inner.get_input_embeddings())
    head = _weight_of(inner.get_output_embeddings())
    was_tied = embedding is head
    if was_tied:
        for module in inner.get_output_embeddings().modules():
            if module._parameters.get("weight") is head:
                module.weight = torch.nn.Parameter(head.detach().clone(), requires_grad=False)
    model = adapted.merge_and_unload(safe_merge=True)  # refuses NaN
    if was_tied:
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        is_tied = torch.equal(embedding.weight, head.weight)
        if is_tied:
            head.weight = embedding.weight
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = is_tied
    return model


def _weight_of(module: torch.nn.Module | None) -> torch.Tensor | None:
    """Return the weight of an embedding or head below peft's wrappers."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        module = module.original_module
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return None if module is None else module.weight


def add_keys_of_transformers_4(folder: Path, tokenizer: str) -> None:
    """Add the keys that transformers 4 and programs built on it read to a saved model and its tokenizer; transformers 5
    has rope_theta and rope_scaling in one dictionary, and one class for most tokenizers.

    Args:
        tokenizer: folder or hub id of the original tokenizer, whose class is kept.
    """
    config_file = folder / "config.json"
    tokenizer_file = folder / TOKENIZER_CONFIG_FILE
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
        for section in filter(None, (config, config.get("text_config"))):
            rope = dict(section.get("rope_parameters") or {})
            if any(isinstance(value, dict) for value in rope.values()):  # by kind of layer
                if section["model_type"] not in LAYERED_ROPE:
                    continue
                section["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
                rope = dict(rope["full_attention"])
            for key in ("rope_theta", "partial_rotary_factor"):
                if key in rope:
                    section[key] = rope.pop(key)
            if section["model_type"] == "gpt_neox":  # with different names
                section["rotary_emb_base"] = section.get("rope_theta")
                section["rotary_pct"] = section.get("partial_rotary_factor")
            if rope.get("rope_type") == "longrope" and section["model_type"] == "phi3":  # exactly three keys
                rope = {"type": "longrope", **{key: rope[key] for key in ("short_factor", "long_factor")}}
            if rope and rope != {"rope_type": "default"}:
                section["rope_scaling"] = rope
        write_json(config_file, config)
    if tokenizer_file.is_file():
        config = json.loads(tokenizer_file.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = _tokenizer_class(tokenizer)
            if isinstance(config.get("extra_special_tokens"), list):
                config["additional_special_tokens"] = config.pop("extra_special_tokens")
            write_json(tokenizer_file, config)


def _tokenizer_class(tokenizer: str) -> str:
    """Return the class in a tokenizer's own file, or transformers 4's class for any tokenizer.json."""
    file = cached_file(
        tokenizer,
        TOKENIZER_CONFIG_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    name = None
    if file:
        name = json.loads(Path(file).read_text(encoding="utf-8")).get("tokenizer_class")
    if name in (None, "", "TokenizersBackend"):
        return "PreTrainedTokenizerFast"
    return name


def copy_processor(package: str, folder: Path, revision: str | None = None) -> None:
    package, _ = located(described_in(package))
    for name in PROCESSOR_FILES:
        path = cached_file(package, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if path and not (folder / name).exists():
            shutil.copyfile(path, folder / name)  # without its mode: a save could not sync a read-only file
