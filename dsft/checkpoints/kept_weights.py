"""Keeps, beside a trained language model, the weights of its package that no text model holds.

The text class of a package leaves towers for images and layers for several tokens (`mtp.*`) on disk. They are copied
as they are, under their own names, and the folder gets the package's own config: so it serves images as the package
that it was made from did, and transformers' causal-LM class loads the trained language model out of it.
"""

import copy
import json
import math
import re
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from dsft.models.build import is_bare_config
from dsft.models.model_folder import has_only_shards, is_gguf
from dsft.models.package import names_saved
from dsft.models.size import load_model_config
from dsft.models.weights import files_of_tensors


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What of a package's weights no model in memory holds: the towers of a text class, layers for several tokens."""

    package: str
    """Folder or hub id."""
    config: PreTrainedConfig
    """Of the package."""
    files: dict[str, str]
    """Name of a tensor on disk -> path of the safetensors file that holds it."""
    num_bytes: int
    text_only: str | None
    """Why a saved model is the language model alone; None where these weights are kept beside it."""

    @property
    def kept_bytes(self) -> int:
        """Counts what a saved model has of it."""
        return 0 if self.text_only else self.num_bytes

    @property
    def parts(self) -> str:
        """Names the parts, for one line of the log."""
        known = {".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in self.files}
        return ", ".join(sorted(known))


TRAINED, KEPT = "model-trained.safetensors", "model-kept-{:05}.safetensors"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of what makes tensors of images and sound."""
OLD_BUFFERS = ("rotary_emb.inv_freq", "position_ids")


def find_left_out(
    package: str, model: PreTrainedModel, *, revision: str | None = None, trust_remote_code: bool = False
) -> LeftOut | None:
    """Compares the tensors of a package on disk with the `model` that was loaded from it; None of a language model that
    is loaded in full.
    """
    if is_bare_config(package) or is_gguf(package) or has_only_shards(package):
        return None
    config = load_model_config(package, revision=revision, trust_remote_code=trust_remote_code)
    text, files = config.get_text_config(decoder=True), files_of_tensors(package, revision)
    # Whether a tensor has a place, as transformers decides while it loads (core_model_loading.py,
    # convert_and_load_state_dict_in_model).
    conversions = getattr(model, "_weight_conversions", None) or []
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    # Around an adapted layer peft puts its own.
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    left = set()
    for name in files:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name not in state:
            left.add(name)
    loaded = files.keys() - left
    loaded_modules = {name.rpartition(".")[0] for name in loaded}
    # Scales of quantised weights and old buffers belong to the language model; nothing is made of them again.
    left = {name for name in left if name.rpartition(".")[0] not in loaded_modules and not name.endswith(OLD_BUFFERS)}
    if text is config:
        # Of layers that predict several tokens: `mtp.*`, or after the last (DeepSeek-V3).
        num_layers = getattr(text, "num_hidden_layers", None) or math.inf
        layers = {name: re.search(r"\blayers\.(\d+)\.", name) for name in left}
        left = {name for name, layer in layers.items() if "mtp" in name or (layer and int(layer[1]) >= num_layers)}
    if not left and text is config:
        return None
    is_text_class, why = type(config) is not type(model.config), None
    if getattr(config, "quantization_config", None) and (left or is_text_class):
        why = "the package is quantised on disk, and what is trained is not"
    elif is_text_class and not files:
        why = "the package is not in safetensors"
    elif is_text_class and loaded - names_saved(model):
        why = "the package has other names on disk than transformers saves"
    num_bytes = 0
    for file, names in _by_file(files, left).items():
        with safe_open(file, framework="pt") as tensors:
            num_bytes += sum(_num_bytes(tensors.get_slice(name)) for name in names)
    return LeftOut(
        package=package,
        config=config,
        files={name: files[name] for name in left},
        num_bytes=num_bytes,
        text_only=why,
    )


def _num_bytes(tensor: Any) -> int:
    """Returns the bytes of a slice of safetensors."""
    bits = int("".join(filter(str.isdigit, tensor.get_dtype().partition("_")[0])) or 8)  # BF16, F32, F8_E4M3, BOOL
    return math.prod(tensor.get_shape()) * bits // 8


def _by_file(files: dict[str, str], names: list[str]) -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for name in names:
        grouped[files[name]].append(name)
    return dict(grouped)


def keep_left_out(folder: Path, model: PreTrainedModel, left_out: LeftOut | None) -> None:
    """Copies what was left out into the folder to which `model` has been saved, with the package's config.

    One file of the package is in memory at a time.
    """
    if left_out is None or left_out.text_only:
        return
    copy_processor(left_out.package, folder)
    if left_out.files:
        _copy_tensors(folder, left_out)
    if type(left_out.config) is not type(model.config):
        config = copy.deepcopy(left_out.config)
        part = next(name for name in config.sub_configs if type(getattr(config, name)) is type(model.config))
        setattr(config, part, copy.deepcopy(model.config))
        config.dtype = model.config.dtype
        config.save_pretrained(folder)


def _copy_tensors(folder: Path, left_out: LeftOut) -> None:
    """Adds files with what was left out, and an index over all."""
    index_file, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if whole.is_file():  # which transformers would take for all of the model
        whole.rename(folder / TRAINED)
        with safe_open(folder / TRAINED, framework="pt") as tensors:
            total = sum(_num_bytes(tensors.get_slice(name)) for name in tensors.keys())
            index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors.keys(), TRAINED)}
    else:
        index = json.loads(index_file.read_text(encoding="utf-8"))
    if trained := left_out.files.keys() & index["weight_map"].keys():
        raise RuntimeError(f"{sorted(trained)[0]} is trained, and would be written as it was")
    for number, (file, names) in enumerate(_by_file(left_out.files, sorted(left_out.files)).items(), start=1):
        with safe_open(file, framework="pt") as tensors:
            save_file(
                {name: tensors.get_tensor(name) for name in names}, folder / KEPT.format(number), {"format": "pt"}
            )
        index["weight_map"] |= dict.fromkeys(names, KEPT.format(number))
    index["metadata"]["total_size"] += left_out.num_bytes
    index_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_processor(package: str, folder: Path) -> None:
    """Copies what makes tensors of images and sound, where the package has it."""
    for name in PROCESSOR_FILES:
        path = cached_file(package, name, _raise_exceptions_for_missing_entries=False)
        if path and not (folder / name).exists():
            shutil.copy(path, folder)
