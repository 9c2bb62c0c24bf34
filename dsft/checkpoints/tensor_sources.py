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
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dsft.models.lora import not_streamable
from dsft.models.model_folder import adapter_base
from dsft.models.size import empty_model
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
    """Gives the weights of an adapter merged into its base by peft, layer by layer.

    Takes what needs no other weight than the merged one (lora.py has the list). Each tensor of the adapter belongs to
    one weight on disk.
    """

    def __init__(self, adapter: Path, adapted: PeftModel, placed: dict[str, torch.Tensor], config: PreTrainedConfig):
        """Args:
        adapted: the base with the adapter on the meta device; its tensors are `placed`, see weights.placed_adapter.
        """
        if why := not_streamable(adapted.peft_config["default"]):
            raise NotStreamable(why)
        base = local_folder(adapter_base(str(adapter)))
        self.base = SafetensorsSource(base)
        self.shapes, self.dtype = self.base.shapes, self.base.dtype
        inner = adapted.get_base_model()
        ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
        tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
        if tied and any(isinstance(end, BaseTunerLayer | AuxiliaryTrainingWrapper) for end in ends):
            raise NotStreamable("the adapter changes one of two tied weights")
        self.layers = {name: module for name, module in inner.named_modules() if isinstance(module, LoraLayer)}
        self.of_layers, self.replaced = {}, {}
        for in_memory, tensor in placed.items():
            name = in_memory.removeprefix("base_model.model.")
            if any(name.startswith(f"{layer}.") for layer in self.layers):
                # peft computes with adapters of half precision in float32
                half = tensor.dtype in (torch.float16, torch.bfloat16) and ".base_layer." not in name
                self.of_layers[name] = tensor.float() if half else tensor
            else:
                self.replaced[name.replace(".modules_to_save.default.", ".")] = tensor
        changed = [*(f"{name}.weight" for name in self.layers), *self.replaced]
        if absent := sorted(set(changed) - self.shapes.keys()):
            raise NotStreamable(f"the adapter changes {absent[0]}, which has no such name on disk")
        check_names_on_disk(config, changed)

    def read(self, name: str) -> torch.Tensor:
        if name in self.replaced:
            return self.replaced[name].to(self.dtype)
        layer_name, _, part = name.rpartition(".")
        layer = self.layers.get(layer_name)
        if layer is None:
            return self.base.read(name)
        state = {}
        for key in layer.state_dict():
            if (tensor := self.of_layers.get(f"{layer_name}.{key}")) is None:
                tensor = self.base.read(f"{layer_name}.{key.removeprefix('base_layer.')}")
            state[key] = tensor.clone()
        merged = copy.deepcopy(layer)  # on meta: it costs nothing, and merging marks a layer
        merged.load_state_dict(state, assign=True)
        merged.merge(safe_merge=True)  # refuses NaN
        return getattr(merged.get_base_layer(), part).data


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
