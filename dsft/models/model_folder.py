"""Finds out what a model's name refers to (a folder, hub id, config, adapter, DeepSpeed's shards or GGUF file), and
loads chat templates. Does not import torch, so that a wrong path fails at once.
"""

import functools
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsft.config.reader import read_text
from dsft.errors import UserError, nearest, one_line

NO_GGUF = "GGUF is a format for inference; take the model that it was made from, or unpack it: dsft export FILE FOLDER"
OPTIMIZER_FILES = "*_optim_states.pt"
MODEL_FILES = "*_model_states.pt"  # files that DeepSpeed writes into a `global_step` folder
ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
# Chat templates: name -> file; the only list of them.
PRESETS = {path.stem: path for path in (Path(__file__).parent / "templates").glob("*.jinja")}
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# Model folders inside a run's folder: the final one, and the prefix of checkpoint-N (PREFIX_CHECKPOINT_DIR of
# transformers.trainer_utils, whose import takes seconds).
FINAL = "final"
CHECKPOINT = "checkpoint"


def is_step_folder(model: str) -> bool:
    """Whether `model` is the folder of DeepSpeed's shards inside a checkpoint."""
    return Path(model).is_dir() and Path(model).name.startswith("global_step")


def is_bare_config(model: str) -> bool:
    """Whether `model` is the path of a config file, which means random weights."""
    return model.endswith(".json") and Path(model).is_file()


def folder_of(model: str) -> Path:
    """Returns the folder `model`, or the checkpoint whose `global_step` folder it is."""
    return Path(model).parent if is_step_folder(model) else Path(model)


def described_in(model: str) -> str:
    """Returns the folder of config and tokenizer: that of a config file or a `global_step` folder, else `model`."""
    return str(Path(model).parent) if is_bare_config(model) or is_step_folder(model) else model


def has_only_shards(model: str) -> bool:
    """Whether the weights of `model` are in DeepSpeed's shards: in its `global_step` folder, or it is one."""
    if is_step_folder(model):
        return True
    has_weights = any(Path(model).glob("*.safetensors*"))
    return step_folder(model) is not None and not has_weights


def step_folder(checkpoint: str | Path) -> Path | None:
    """Returns the folder of DeepSpeed's files: `checkpoint` itself, or the folder in it that `latest` names, such as
    accelerate's pytorch_model, else the newest `global_step*`; None without any.
    """
    folder = Path(checkpoint)
    if any(folder.glob(OPTIMIZER_FILES)) or any(folder.glob(MODEL_FILES)):
        return folder
    # A power failure may have left the file empty. A folder outside the checkpoint is ignored.
    text = (folder / "latest").read_text(errors="replace") if (folder / "latest").is_file() else ""
    named = Path(text.strip()).name
    if named and named != ".." and (folder / named).is_dir():
        return folder / named
    return max(folder.glob("global_step*/"), key=number_in, default=None)


def number_in(path: Path) -> list[int]:
    """Returns the numbers in a file's name, the sort key of the files of ranks and steps."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def read_object(file: Path) -> dict[str, Any]:
    """Returns the content of a JSON file. Raises UserError, naming it, if it cannot be read or is not an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({one_line(error)}); copy or download it again") from None
    return content


def adapter_description(model: str) -> dict[str, Any] | None:
    """Returns the adapter_config.json of an adapter's folder, or of the checkpoint whose `global_step` folder `model`
    is; None if there is no adapter.
    Raises UserError if the file does not describe an adapter, or names its own folder as its base.
    """
    file = folder_of(model) / ADAPTER_CONFIG
    if not file.is_file():
        return None
    content = read_object(file)
    if not content.get("peft_type") or not content.get(BASE):
        raise UserError(
            f"{file}: does not describe an adapter of peft, with peft_type and {BASE} (hub id or folder); copy or"
            " download it again"
        )
    base = Path(content[BASE])
    beside = file.parent / base
    if base.is_dir() and base.samefile(file.parent):
        raise UserError(
            f"{file}: names its own folder as its base; move the adapter's files into a folder of their own"
        )
    if beside.is_dir() and not base.exists():
        content[BASE] = str(beside)
    return content


def adapter_base(model: str) -> str | None:
    """Returns the base model that an adapter names; None if `model` is not an adapter. Raises UserError as
    `adapter_description`, and if the base does not exist (`missing`).
    """
    content = adapter_description(model)
    if content is None:
        return None
    base = content[BASE]
    if problem := missing(BASE, base):
        raise UserError(f"{model}/{ADAPTER_CONFIG}: {problem}; set it to the new path of the base")
    return base


def with_bases(model: str) -> Iterator[str]:
    """Yield the model, and the base of each adapter down to a full model."""
    yield model
    if base := adapter_base(model):
        yield from with_bases(base)


def base_revision(model: str) -> str | None:
    """Returns the hub revision of the base that an adapter was trained on; None for the newest, and for a model."""
    return (adapter_description(model) or {}).get("revision")


def is_gguf(model: str) -> bool:
    return model.endswith(".gguf")


def located(model: str) -> tuple[str, dict[str, str]]:
    """Returns a folder or hub id, and the further arguments of from_pretrained: the name of a GGUF file in it."""
    if not is_gguf(model):
        return model, {}
    if Path(model).is_file():
        path = Path(model).resolve()
        return str(path.parent), {"gguf_file": path.name}
    owner, _, rest = model.partition("/")
    name, _, file = rest.partition("/")
    return f"{owner}/{name}", {"gguf_file": file}


def missing(key: str, name: str) -> str | None:
    """Returns the problem of option `key` if its value does not exist: it is neither a path nor a valid hub id, or the
    hub cannot be reached and the cache has no copy. Else None.
    """
    hub_id = r"[\w-][\w.-]*/[\w.-]+/.+" if is_gguf(name) else r"[\w-][\w.-]*(/[\w.-]+)?"
    if Path(name).exists():
        return None
    where = ""
    if re.fullmatch(hub_id, name):
        if hub_is_reachable():
            return None
        from huggingface_hub.constants import HF_HUB_CACHE  # after the environment variables that it reads are set

        folder = "--".join(["models", *name.split("/")[:2]])
        if (Path(HF_HUB_CACHE) / folder).is_dir():
            return None
        where = " here, and the hub cannot be reached"
    return f"{key}={name}: no such folder or file{where}{nearest(name, map(str, Path(name).parent.glob('*')))}"


@functools.cache
def hub_is_reachable() -> bool:
    """Tries to connect for 2 seconds. Without a hub, sets libraries to offline; they would retry for half a minute."""
    if any(map(os.environ.get, ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy"))):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=2).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return False
    return True


def misnamed(key: str, name: str) -> str | None:
    """Returns the problem of option `key`, which must name a model, adapter or tokenizer, if its value does not exist
    or is a run's folder, which contains models but is not one: then it suggests the final one or the newest checkpoint.
    """
    folder = Path(name)
    is_model = (folder / "config.json").exists() or (folder / ADAPTER_CONFIG).exists()
    if folder.is_dir() and not is_model:
        newest_first = sorted(folder.glob(f"{CHECKPOINT}-*/"), key=number_in, reverse=True)
        adapters = [file.parent for file in folder.glob(f"*/{ADAPTER_CONFIG}")]  # peft's named adapters
        for inside in (folder / FINAL, *newest_first, *adapters, *folder.glob("*.gguf")):
            if inside.exists():
                return f"{key}={name}: contains no model; use {inside}"
    return missing(key, name)


def load_template(name: str) -> str:
    """Returns the text of a preset or a file; for a JSON file (older multimodal packages), the value of its key
    chat_template. Raises ValueError if it is neither, or is not valid Jinja.
    """
    try:
        template = read_text(PRESETS.get(name, name))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{name} is neither a file that can be read ({error}) nor one of the presets {', '.join(sorted(PRESETS))}"
        ) from None
    if name.endswith(".json"):  # unparsed it would be valid Jinja, and its text would surround each chat
        try:
            template = json.loads(template)["chat_template"]
        except (ValueError, LookupError, TypeError):
            template = None
        if not isinstance(template, str):
            raise ValueError(f"{name} contains no text under the key chat_template")
    from jinja2 import Environment, TemplateSyntaxError

    try:  # {% generation %}, transformers' mark of an assistant's text, is not part of Jinja
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: not valid Jinja ({error.message})") from None
    return template
