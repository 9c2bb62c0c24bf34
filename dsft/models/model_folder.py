"""Looks at what the folder that a model's name gives holds, and says what is wrong where that is no model."""

import re
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from dsft.errors import one_line
from dsft.models.zero_shards import step_folder

FINAL = "final"
"""Folder of the final model inside a run's."""


def is_step_folder(model: str) -> bool:
    """Whether `model` is the folder of DeepSpeed's own shards inside a checkpoint."""
    return Path(model).is_dir() and Path(model).name.startswith("global_step")


def has_only_shards(model: str) -> bool:
    """Whether the weights of `model` lie in DeepSpeed's shards: in its `global_step` folder, or it is one."""
    folder = Path(model)
    return is_step_folder(model) or (
        folder.is_dir() and not any(folder.glob("*.safetensors*")) and any(folder.glob("global_step*"))
    )


def is_missing_path(name: str) -> bool:
    """Whether `name` can only be a path, and nothing is there: no hub id looks so, or the folder above it exists."""
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    in_a_folder = "/" in name and Path(name).parent.is_dir()
    return not Path(name).exists() and (in_a_folder or not is_hub_id)


def model_inside(name: str) -> Path | None:
    """The model that a run's folder holds and is not itself: the final one, else the newest checkpoint."""
    folder = Path(name)
    if not folder.is_dir() or any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
        return None
    newest_first = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    return next((path for path in (folder / FINAL, *newest_first) if path.is_dir()), None)


def no_model(model: str, error: BaseException, config: PreTrainedConfig | None) -> str:
    """Says why no model can be built of `model`, and the way out that its folder shows."""
    folder = Path(model)
    if is_missing_path(model):
        return f"model={model}: there is no such folder or file"
    if folder.is_file() and folder.suffix != ".json":
        return (
            f"model={model}: is a file; name the folder of a model, or a config.json. Of a GGUF file, take the model"
            " that it was made from: GGUF is a format for inference"
        )
    if config is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        return f"model={model}: its architecture {config.model_type} is no causal language model, which dsft trains"
    why = one_line(error)
    if inside := model_inside(model):
        return f"model={model}: holds no model of its own; name the one inside it, {inside}"
    if any(folder.glob("*.gguf")):
        why = "GGUF is a format for inference; take the model that it was made from"
    way_out = (
        "; DeepSpeed's shards lie there without a description: copy config.json and the tokenizer's files of the model"
        " they were trained from beside them"
        if step_folder(model) is not None
        else ""
    )
    return f"model={model}: no causal language model can be built from what is there ({why}){way_out}"


def no_adapter(adapter: str, error: BaseException) -> str:
    """Says why no adapter can be taken from `adapter`."""
    why = one_line(error)
    if is_missing_path(adapter):
        why = "there is no such folder"
    elif inside := model_inside(adapter):
        why = f"holds no adapter of its own; name the one inside it, {inside}"
    return f"adapter={adapter}: {why}"
