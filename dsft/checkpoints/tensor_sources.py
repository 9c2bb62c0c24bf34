"""Reads weights for an export one tensor at a time: from safetensors, DeepSpeed's shards, an adapter over its base.

No source holds the full model.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from peft import get_peft_model, get_peft_model_state_dict, load_peft_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dsft.errors import UserError
from dsft.models.lora import saved_lora_config
from dsft.models.model_folder import adapter_base
from dsft.models.pickles import check_weight_files
from dsft.models.size import empty_model, load_model_config
from dsft.models.zero_shards import OPTIMIZER_FILES, ZeroShards, step_folder

DTYPES_ON_DISK = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class NotStreamable(Exception):
    """Says why these weights cannot be taken one by one."""


class TensorSource(Protocol):
    """Gives tensors by their name on disk."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor: ...


class WeightsSource(TensorSource, Protocol):
    """Gives the weights of a model, one at a time."""

    dtype: torch.dtype
    """Of the weights as they are."""


class TensorsInMemory:
    """Gives tensors that are in memory already."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.shapes, self.read = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__


class SafetensorsFiles:
    """Gives the tensors of the `*.safetensors` of a folder, or of one of them."""

    def __init__(self, folder: Path):
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: Counter[str] = Counter()
        for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    tensor = tensors.get_slice(name)
                    self.files[name], self.shapes[name] = file, tuple(tensor.get_shape())
                    self.dtypes[tensor.get_dtype()] += 1

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


class SafetensorsSource(SafetensorsFiles):
    """Gives the weights of a model that lies in safetensors."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        if not self.dtypes or self.dtypes.keys() - DTYPES_ON_DISK.keys():
            raise NotStreamable(f"{folder} holds {', '.join(sorted(self.dtypes)) or 'no safetensors'}")
        self.dtype = DTYPES_ON_DISK[max(self.dtypes, key=self.dtypes.get)]


class ShardsSource:
    """Gives the weights of a fully finetuned model out of ZeRO's shards, in float32."""

    def __init__(self, checkpoint: Path, config: PreTrainedConfig, *, trust_remote_code: bool = False):
        if not any((step_folder(checkpoint) or checkpoint).glob(OPTIMIZER_FILES)):
            raise NotStreamable("it was saved under ZeRO 0, whose files hold the whole model")
        self.shards = ZeroShards(checkpoint)
        model = empty_model(config, trust_remote_code=trust_remote_code)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if self.shapes != self.shards.shapes:
            raise NotStreamable("some weights are not in the optimizer's shards, or have other names on disk")
        check_names_on_disk(config, self.shapes)
        self.dtype = config.dtype or torch.float32

    def read(self, name: str) -> torch.Tensor:
        return self.shards.read(name).view(self.shapes[name])


class MergedSource:
    """Gives the weights of an adapter merged into its base by peft, layer by layer."""

    def __init__(self, adapter: Path, *, trust_remote_code: bool = False):
        check_weight_files(adapter)
        base = local_folder(adapter_base(str(adapter)))
        self.base, self.weights = SafetensorsSource(base), load_peft_weights(str(adapter), device="cpu")
        self.shapes, self.dtype = self.base.shapes, self.base.dtype
        config = load_model_config(str(base), trust_remote_code=trust_remote_code)
        peft_config = saved_lora_config(str(adapter))
        with torch.device("meta"):
            empty = empty_model(config, trust_remote_code=trust_remote_code)
            adapted = get_peft_model(empty, peft_config, low_cpu_mem_usage=True)
        state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        needed = {name: tuple(tensor.shape) for name, tensor in state.items()}
        for name, tensor in self.weights.items():
            if needed.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
                raise UserError(
                    [
                        f"{adapter}: is of another base than {base}: {name} is {list(tensor.shape)}, and this base"
                        f" needs {list(needed[name])}; name its own base in adapter_config.json"
                    ]
                )
        self.layers = {
            name.removeprefix("base_model.model."): module
            for name, module in adapted.named_modules()
            if isinstance(module, LoraLayer | ModulesToSaveWrapper)
        }
        if any(isinstance(module, ParamWrapper) for module in self.layers.values()) or peft_config.bias != "none":
            raise NotStreamable("the adapter changes single parameters or biases")
        tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
        if absent := sorted(
            name for name in self.layers if f"{name}.weight" not in self.shapes or (tied and "embed" in name)
        ):
            raise NotStreamable(f"the adapter changes {absent[0]}, which has no weight of its own on disk")
        check_names_on_disk(config, [f"{name}.weight" for name in self.layers])
        for name, tensor in self.weights.items():
            if tensor.dtype in (torch.float16, torch.bfloat16):
                self.weights[name] = tensor.float()  # as peft does when it loads them over a base

    def read(self, name: str) -> torch.Tensor:
        layer_name, _, part = name.rpartition(".")
        layer = self.layers.get(layer_name)
        if layer is None:
            return self.base.read(name)
        if isinstance(layer, ModulesToSaveWrapper):
            return self.weights[f"base_model.model.{name}"].to(self.dtype)
        state = {
            key: (
                self.base.read(f"{layer_name}.{key.removeprefix('base_layer.')}")
                if key.startswith("base_layer.")
                else self._adapter_weight(layer_name, key)
            ).clone()
            for key in layer.state_dict()
        }
        merged = copy.deepcopy(layer)  # on meta: it costs nothing, and merging marks a layer
        merged.load_state_dict(state, assign=True)
        merged.merge(safe_merge=True)  # refuses NaN
        return getattr(merged.get_base_layer(), part).data

    def _adapter_weight(self, layer_name: str, key: str) -> torch.Tensor:
        """Return a weight of the adapter by its name in memory.

        `lora_A.default.weight` is `lora_A.weight` on disk; DoRA's `lora_magnitude_vector.default.weight` has no suffix.
        """
        name = f"base_model.model.{layer_name}.{key}".replace(".default", "")
        return self.weights[name] if name in self.weights else self.weights[name.removesuffix(".weight")]


def local_folder(model: str) -> Path:
    """Return the folder of a hub id's files on this machine, or the folder itself."""
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]))


def check_names_on_disk(config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Check that transformers' conversions (experts fused in memory) leave these parameters as they are on disk.

    Raises:
        NotStreamable: where they are not.
    """
    for conversion in get_checkpoint_conversion_mapping(config.model_type) or []:
        for pattern in (*conversion.source_patterns, *conversion.target_patterns):
            expression = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\^", "^"))
            if changed := next((name for name in names if expression.search(name)), None):
                raise NotStreamable(f"{config.model_type} keeps {changed} otherwise in memory than on disk")
