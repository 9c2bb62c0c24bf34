"""Turns a run, a checkpoint, an adapter, a GGUF file or a model packed as MXFP4 into a plain Hugging Face folder.

    dsft export runs/first exported          # final model of a run, or any checkpoint-N; adapters are merged
    dsft merge runs/lora/final merged        # an adapter into its base

Where weights have the same names on disk and in memory, they pass through memory one file of the result at a time; else
the full model is loaded. What the package holds beside the language model (towers for images, `mtp.*`) is copied as it
is, with the package's config (`keep_left_out`, for a training too).
"""

import copy
import json
import math
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from peft import PeftModel, load_peft_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf_files
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from dsft.checkpoints.manifest import TRAINER_STATE, share_files
from dsft.checkpoints.readback import check_export, check_written, verify_weights
from dsft.checkpoints.run_folder import (
    UNFINISHED,
    check_new_folder,
    find_adapter,
    find_weights,
    is_run,
    path_of,
    read_options_of_run,
)
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.build import DTYPES, load_empty, load_weights, placed_adapter
from dsft.models.model_folder import (
    OPTIMIZER_FILES,
    adapter_base,
    base_revision,
    folder_of,
    has_only_shards,
    is_bare_config,
    is_gguf,
    located,
    step_folder,
)
from dsft.models.package import names_saved
from dsft.models.quantization import GGUF, cast_weights, quantization_on_disk, unpacking_config
from dsft.models.size import empty_model, load_model_config
from dsft.models.tokenizer import tokenizer_folder
from dsft.models.trained import merge_problems, not_streamable, ties_embeddings, unwrapped
from dsft.models.weight_files import (
    WEIGHT_FILES,
    SafetensorsFiles,
    ZeroShards,
    check_weight_files,
    find_files,
    safe_unpickling,
    safetensors_of,
)
from dsft.runtime import patches
from dsft.runtime.console import progress_bar, say
from dsft.runtime.hardware import free_host_bytes
from dsft.units import GB


class NotStreamable(Exception):
    """Explains why these weights cannot be taken one by one."""


class SafetensorsSource(SafetensorsFiles):
    """Gives the weights of a model that lies in safetensors, one at a time as all sources."""

    def __init__(self, model: str, revision: str | None = None):
        super().__init__(*safetensors_of(model, revision))
        kinds = {*self.dtypes.values()}
        if not kinds or kinds - {*DTYPES.values()}:
            raise NotStreamable(f"{model} holds {', '.join(sorted(map(str, kinds))) or 'no safetensors'}")


class Mxfp4Source(SafetensorsFiles):
    """Gives weights whose experts are packed as MXFP4, unpacked to transformers' numbers (integrations/mxfp4.py)."""

    def __init__(self, folder: Path):
        super().__init__(*safetensors_of(str(folder)))
        for packed in [name for name in self.shapes if name.endswith("_blocks")]:
            experts, outputs, blocks, num_bytes = self.shapes.pop(packed)
            name = packed.removesuffix("_blocks")
            if self.shapes.pop(f"{name}_scales", None) is None:
                raise UserError(f"{folder}: {packed} has no {name}_scales beside it; copy or download it again")
            self.shapes[name] = (experts, 2 * blocks * num_bytes, outputs)  # two weights in a byte
            self.dtypes[name] = torch.bfloat16

    def read(self, name: str) -> torch.Tensor:
        if name in self.files:
            return super().read(name)
        packed = zip(super().read(f"{name}_blocks"), super().read(f"{name}_scales"), strict=True)
        unpacked = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        for expert, (blocks, scales) in enumerate(packed):  # all at once take several times their bytes
            unpacked[expert] = convert_moe_packed_tensors(blocks[None], scales[None], dtype=unpacked.dtype)[0]
        return unpacked


class ShardsSource:
    """Gives the weights of a fully finetuned model out of ZeRO's shards, in float32."""

    def __init__(self, checkpoint: Path, *, revision: str | None, trust_remote_code: bool):
        if adapter_base(str(checkpoint)) is not None:
            raise NotStreamable("its adapter lies in DeepSpeed's shards")
        if not any((step_folder(checkpoint) or checkpoint).glob(OPTIMIZER_FILES)):
            raise NotStreamable("it was saved under ZeRO 0, whose files hold the whole model")
        config = load_model_config(str(checkpoint), revision=revision, trust_remote_code=trust_remote_code)
        self.shards = ZeroShards(checkpoint)
        model = empty_model(config, trust_remote_code=trust_remote_code)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if self.shapes != self.shards.shapes:
            raise NotStreamable("some weights are not in the optimizer's shards, or have other names on disk")
        check_names_on_disk(config, self.shapes)
        self.dtypes = dict.fromkeys(self.shapes, config.dtype or torch.float32)

    def read(self, name: str) -> torch.Tensor:
        return self.shards.read(name).view(self.shapes[name])


class MergedSource:
    """Gives the weights of an adapter merged into its base by peft, layer by layer; no weight needs another."""

    def __init__(
        self, adapter: Path, base_name: str, *, dtype: torch.dtype | None, revision: str | None, trust_remote_code: bool
    ):
        """Raises UserError where the adapter cannot be merged, or not all of its tensors have a place. `dtype`: of the
        written weights; None for that of the base.
        """
        self.dtype = dtype
        if adapter_base(base_name) is not None:
            raise UserError(
                f"{adapter}: its base {base_name} is an adapter itself; merge that first, and name the result"
            )
        check_weight_files(adapter)
        config = load_model_config(base_name, revision=revision, trust_remote_code=trust_remote_code)
        vocab_size = config.get_text_config().vocab_size
        try:
            tensors = load_peft_weights(str(adapter), device="cpu")
            # On the meta device, with the adapter's tensors by their names there.
            adapted, placed = placed_adapter(str(adapter), config, tensors, trust_remote_code=trust_remote_code)
            raise_if_any(merge_problems(adapted))
        except UserError as error:
            problems = [f"{adapter}: {problem.removeprefix(f'{adapter}/')}" for problem in error.problems]
            raise UserError(problems) from None
        if why := not_streamable(adapted.peft_config["default"]):
            raise NotStreamable(why)
        self.base = SafetensorsSource(base_name, revision)
        self.shapes, self.dtypes = self.base.shapes, self.base.dtypes
        inner = adapted.get_base_model()
        if inner.config.get_text_config().vocab_size != vocab_size:
            raise NotStreamable("the adapter has other rows than its base")
        ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
        is_changed = any(isinstance(end, BaseTunerLayer | AuxiliaryTrainingWrapper) for end in ends)
        if is_changed and ties_embeddings(inner):
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
            return self.replaced[name]
        layer_name, _, part = name.rpartition(".")
        layer = self.layers.get(layer_name)
        if layer is None:
            return self.base.read(name)
        state = {}
        for key in layer.state_dict():
            if (tensor := self.of_layers.get(f"{layer_name}.{key}")) is None:
                tensor = self.base.read(f"{layer_name}.{key.removeprefix('base_layer.')}")
                tensor = tensor.to(torch.promote_types(tensor.dtype, self.dtype or tensor.dtype))  # not rounded before
            state[key] = tensor.clone()
        merged = copy.deepcopy(layer)  # on meta: it costs nothing, and merging marks a layer
        merged.load_state_dict(state, assign=True)
        merged.merge(safe_merge=True)  # refuses NaN
        return getattr(merged.get_base_layer(), part).data


def gguf_dtype(reader: Any) -> torch.dtype:
    """The type of a GGUF file's matrices where they are plain; else float32, which holds packed weights exactly."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return str_to_torch_dtype.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32


class GgufSource:
    """Gives the weights of a GGUF file, unpacked one at a time to the numbers that transformers gives them."""

    def __init__(self, file: Path):
        """Raises UserError where the file is an adapter, a tower for images or a part."""
        from gguf import GGUFReader  # here: an extra of the package

        config, self.reader = load_model_config(str(file)), GGUFReader(file)
        (kind,) = gguf_files.read_field(self.reader, "general.type") or ["model"]
        (parts,) = gguf_files.read_field(self.reader, "split.count") or [1]
        if parts > 1:
            raise UserError(f"{file}: is one of {parts} parts; join them with llama.cpp's llama-gguf-split --merge")
        if kind != "model":
            raise UserError(f"{file}: holds no model but its {kind}")
        model = empty_model(config)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        check_names_on_disk(config, self.shapes)
        (architecture,) = gguf_files.read_field(self.reader, "general.architecture")
        self.converter = gguf_files.TENSOR_PROCESSORS.get(architecture, gguf_files.TensorProcessor)(config.to_dict())
        self.names = gguf_files.get_gguf_hf_weights_map(model, self.converter)
        self.tensors = {self.names[tensor.name]: tensor for tensor in self.reader.tensors if tensor.name in self.names}
        if absent := sorted(self.shapes.keys() - self.tensors.keys()):
            raise NotStreamable(f"{absent[0]} is not one tensor of the file")
        self.dtypes = dict.fromkeys(self.shapes, gguf_dtype(self.reader))

    def read(self, name: str) -> torch.Tensor:
        from gguf import dequantize

        tensor = self.tensors[name]
        unpacked = dequantize(tensor.data, tensor.tensor_type)
        known = {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": {}}}
        return torch.from_numpy(self.converter.process(unpacked, tensor.name, **known).weights.copy())


def check_names_on_disk(config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Raise NotStreamable where transformers has these parameters otherwise in memory (fused experts) than on disk."""
    for conversion in get_checkpoint_conversion_mapping(config.model_type) or []:
        for pattern in (*conversion.source_patterns, *conversion.target_patterns):
            expression = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\^", "^"))
            if changed := next((name for name in names if expression.search(name)), None):
                raise NotStreamable(f"{config.model_type} keeps {changed} otherwise in memory than on disk")


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
    Raises UserError where `source` holds no weights or is a damaged checkpoint, or `out` holds files already.

    Args:
        dtype: of the written weights; "auto" keeps the source's, and float32 for packed ones of a GGUF file.
        max_shard_size: of a file of the result, which is about what is in memory at a time.
        trust_remote_code: run code that the model brings along; it is copied to `out`.
        trust_checkpoint: read pickles whatever they ask for, see models/weight_files.py.
    """
    folder, target = find_weights(source), Path(out)
    check_new_folder(out)
    verify_weights(str(folder))
    base = adapter_base(str(folder))
    known = {"revision": base_revision(str(folder)), "trust_remote_code": trust_remote_code}
    # Inside of a folder that is there: it may be the current one, a link, or a disk of its own.
    beside = target / UNFINISHED if target.is_dir() else target.absolute().with_name(f"{target.name}{UNFINISHED}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with safe_unpickling(trust=trust_checkpoint):
            try:  # weight by weight
                if base is not None and not has_only_shards(str(folder)):
                    weights = MergedSource(folder, base, dtype=DTYPES.get(dtype), **known)
                elif is_gguf(str(folder)):
                    weights = GgufSource(folder)
                elif has_only_shards(str(folder)):
                    weights = ShardsSource(folder, **known)
                else:
                    on_disk = quantization_on_disk(load_model_config(str(folder), **known))
                    is_unpacked = on_disk and on_disk.unpacked_by_export
                    weights = Mxfp4Source(folder) if is_unpacked else SafetensorsSource(str(folder))
                _write_streamed(folder, beside, weights, dtype, max_shard_size=max_shard_size, **known)
            except NotStreamable as why:
                say(f"the full model is loaded into memory: {why}")
                _write_loaded(folder, beside, dtype, max_shard_size=max_shard_size, **known)
            place, gguf = located(tokenizer_folder(str(folder)))
            AutoTokenizer.from_pretrained(place, **gguf, **known).save_pretrained(beside)
        share_files(beside)
        if target.is_dir():
            for path in [*beside.iterdir()]:
                path.rename(target / path.name)
        else:
            beside.rename(target)
    except UserError:
        raise
    # A GGUF file that is cut, safetensors that are, and a package that a quantised model needs.
    except (OSError, ValueError, struct.error, SafetensorError, ImportError) as error:
        raise UserError(f"{source}: cannot be exported ({one_line(error)})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # of what failed, gigabytes
    return target


def merge(source: str, out: str, **options: Any) -> Path:
    """Export what must be an adapter, or a run that trained one. Raises UserError where it is none."""
    return export(str(find_adapter(source)), out, **options)


def _write_loaded(
    folder: Path, out: Path, dtype: str, *, max_shard_size: str, revision: str | None, trust_remote_code: bool
) -> None:
    known = {"revision": revision, "trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {"dtype": DTYPES.get(dtype, "auto"), **known}
    base, gguf = adapter_base(str(folder)), is_gguf(str(folder))
    package = base or str(folder)
    config = load_model_config(package, **known)
    unpacking, in_memory = None if gguf else unpacking_config(config), DTYPES.get(dtype)
    if gguf:
        from gguf import GGUFReader

        written_dtype = in_memory or gguf_dtype(GGUFReader(folder))
        options |= {"dtype": written_dtype, "quantization_config": GGUF.load_config(written_dtype)}
        in_memory = torch.float32  # to which transformers unpacks all of it
    elif unpacking:
        options["quantization_config"], in_memory = unpacking, in_memory or config.dtype or torch.bfloat16
    if in_memory:
        needed = empty_model(config, trust_remote_code=trust_remote_code).num_parameters() * in_memory.itemsize
    else:
        needed = sum(Path(file).stat().st_size for file in find_files(package, WEIGHT_FILES, revision))
    free = free_host_bytes()
    if needed > free:
        raise UserError(
            f"{folder}: the full model takes {needed / GB:.3g} GB of memory, and {free / GB:.3g} GB are free here"
        )
    model = load_weights(str(folder), **options)
    inner = unwrapped(model)
    if unpacking or gguf:  # experts get the names of the architecture's own files
        patches.replace("unpacked_weights", lambda _: None, on=inner)
    if unpacking:
        cast_weights(inner, DTYPES.get(dtype, inner.config.dtype))
        text_config = inner.config.get_text_config(decoder=True)
        if hasattr(text_config, "quantization_config"):
            del text_config.quantization_config
    if isinstance(model, PeftModel):
        model = _merged(model)
    model.save_pretrained(out, max_shard_size=max_shard_size)
    left_out = find_left_out(package, model, **known)
    keep_left_out(out, model, left_out)
    if left_out and left_out.text_only:
        say(f"{out} is the language model alone, without {left_out.parts}: {left_out.text_only}")
    check_export(out, model, trust_remote_code=trust_remote_code)


def _merged(adapted: PeftModel) -> PreTrainedModel:
    """Let peft merge. Of two tied weights an adapter may change one: they are merged apart, and tied again if equal.
    A function of its own, so that the weights before the merge are free when the model is saved.
    """
    inner, weights = adapted.get_base_model(), []
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    for module in ends if ends[1] is not None else []:
        if isinstance(module, AuxiliaryTrainingWrapper):
            module = module.original_module
        weights.append((module.get_base_layer() if isinstance(module, BaseTunerLayer) else module).weight)
    was_tied = len(weights) == 2 and weights[0] is weights[1]
    if was_tied:
        for module in ends[1].modules():
            if module._parameters.get("weight") is weights[0]:
                module.weight = torch.nn.Parameter(weights[0].detach().clone(), requires_grad=False)
    model = adapted.merge_and_unload(safe_merge=True)  # refuses NaN
    if was_tied:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = torch.equal(embedding.weight, head.weight)
        if is_tied:
            head.weight = embedding.weight
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = is_tied
    return model


def _write_streamed(
    folder: Path,
    out: Path,
    weights: SafetensorsSource | Mxfp4Source | ShardsSource | MergedSource | GgufSource,
    dtype: str,
    *,
    max_shard_size: str,
    revision: str | None,
    trust_remote_code: bool,
) -> None:
    """Write files of up to `max_shard_size`, each read back before the next one begins, and what describes them."""
    known = {"trust_remote_code": trust_remote_code}
    out.mkdir(parents=True)
    dtypes = dict.fromkeys(weights.shapes, DTYPES[dtype]) if dtype in DTYPES else weights.dtypes
    on_meta = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in weights.shapes.items()}
    split = split_torch_state_dict_into_shards(on_meta, max_shard_size=max_shard_size)
    num_bytes = sum(tensor.nbytes for tensor in on_meta.values())
    with progress_bar(is_shown=True, total=num_bytes, desc="Writing weights", unit="B", unit_scale=True) as bar:
        for file, names in split.filename_to_tensors.items():
            # All at first: among the temporary tensors of a merge they would leave gaps.
            tensors = {name: torch.empty(weights.shapes[name], dtype=dtypes[name]) for name in names}
            for name, tensor in tensors.items():
                tensor.copy_(weights.read(name))
            save_file(tensors, out / file, metadata={"format": "pt"})
            check_written(out / file, SafetensorsFiles(out / file), tensors)
            bar.update(sum(tensor.nbytes for tensor in tensors.values()))
            del tensors, tensor
    if split.is_sharded:
        write_index(out, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    base, checkpoint = adapter_base(str(folder)), folder_of(str(folder))
    described = Path(base) if base else checkpoint
    if base and not described.is_dir():  # on the hub
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
        described = Path(snapshot_download(str(described), revision=revision, allow_patterns=patterns))
    config = load_model_config(str(described), **known)
    elements: Counter[torch.dtype] = Counter()
    for name, tensor in on_meta.items():
        elements[dtypes[name]] += tensor.numel()
    config.dtype = elements.most_common(1)[0][0]
    if isinstance(weights, Mxfp4Source):
        del config.quantization_config
    config.save_pretrained(out)
    if is_gguf(str(folder)):  # it describes all of itself; what lies beside it belongs to others
        GenerationConfig.from_model_config(config).save_pretrained(out)
        return check_export(out)
    code = described.glob("*.py") if getattr(config, "auto_map", None) else ()
    # An adapter's own goes before its base's.
    for file in (described / GENERATION_CONFIG_NAME, checkpoint / GENERATION_CONFIG_NAME, *code):
        if file.is_file():
            shutil.copyfile(file, out / file.name)  # not its mode: a model may be read-only
    copy_processor(str(described), out)
    _keep_left_out_of_run(checkpoint, out, is_as_on_disk=isinstance(weights, SafetensorsSource), **known)
    has_same_names = isinstance(weights, SafetensorsSource | MergedSource)
    check_export(out, source=base or str(folder) if has_same_names else "", **known)


def _keep_left_out_of_run(checkpoint: Path, out: Path, *, is_as_on_disk: bool, trust_remote_code: bool) -> None:
    """Add what the package that a run trained holds beside the language model of the run's checkpoint.
    `is_as_on_disk`: whether `out` has the names of the package, as what a training saves, and its shards have not.
    """
    run, known = checkpoint.parent, {"trust_remote_code": trust_remote_code}
    is_of_run = (checkpoint / TRAINER_STATE).is_file() and is_run(run)
    if not is_of_run or adapter_base(str(checkpoint)) is not None:
        return
    options = read_options_of_run(str(run))
    package, revision = path_of(options["model"], str(run)), options["revision"]
    if is_bare_config(package) or has_only_shards(package):
        return
    try:
        config = load_model_config(package, revision=revision, **known)
        if quantization_on_disk(config):
            if config.get_text_config(decoder=True) is not config:
                say(f"{out} is the language model alone: {package} is quantised on disk, and what is trained is not")
            return
        model = load_empty(package, revision=revision, **known)
        left_out = find_left_out(package, model, revision=revision, **known)
    except (OSError, ValueError, UserError):
        say(f"note: {package}, which the run trained, cannot be read: {out} is what the checkpoint holds alone")
        return
    if left_out and not is_as_on_disk:
        left_out = replace(left_out, text_only="DeepSpeed's shards have other names than the package")
    if left_out and left_out.text_only:
        say(f"{out} is the language model alone, without {left_out.parts}: {left_out.text_only}")
    model.config = load_model_config(str(out), **known)
    keep_left_out(out, model, left_out)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What of a package's weights no model in memory holds: the towers of a text class, layers for several tokens."""

    package: str
    """Folder or hub id."""
    revision: str | None
    """Of a package on the hub."""
    config: PreTrainedConfig
    """Of the package."""
    files: dict[str, Path]
    """Name of a tensor on disk -> path of the safetensors file that holds it."""
    num_bytes: int
    text_only: str | None
    """Why a saved model is the language model alone; None where these weights are kept beside it."""

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
    text, on_disk = config.get_text_config(decoder=True), SafetensorsFiles(*safetensors_of(package, revision))
    # Whether a tensor has a place, as transformers decides while it loads (core_model_loading.py,
    # convert_and_load_state_dict_in_model).
    conversions = getattr(model, "_weight_conversions", None) or []
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    # Around an adapted layer peft puts its own.
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    left = set()
    for name in on_disk.files:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name not in state:
            left.add(name)
    loaded = on_disk.files.keys() - left
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
    if (left or is_text_class) and quantization_on_disk(config):
        why = "the package is quantised on disk, and what is trained is not"
    elif is_text_class and not on_disk.files:
        why = "the package is not in safetensors"
    elif is_text_class and loaded - names_saved(model):
        why = "the package has other names on disk than transformers saves"
    return LeftOut(
        package=package,
        revision=revision,
        config=config,
        files={name: on_disk.files[name] for name in sorted(left)},
        num_bytes=on_disk.num_bytes(left),
        text_only=why,
    )


def keep_left_out(folder: Path, model: PreTrainedModel, left_out: LeftOut | None) -> None:
    """Copies what was left out into the folder of the saved `model`, with the package's config, file by file."""
    if left_out is None or left_out.text_only:
        return
    copy_processor(left_out.package, folder, left_out.revision)
    if left_out.files:
        whole = folder / SAFE_WEIGHTS_NAME
        if whole.is_file():  # which transformers would take for all of the model
            trained = SafetensorsFiles(whole.rename(folder / TRAINED))
            total = trained.num_bytes(trained.files)
            index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(trained.files, TRAINED)}
        else:
            index = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))
        if both := left_out.files.keys() & index["weight_map"].keys():
            raise RuntimeError(f"{sorted(both)[0]} is trained, and would be written as it was")
        for number, file in enumerate(dict.fromkeys(left_out.files.values()), start=1):
            names, kept = [name for name, path in left_out.files.items() if path == file], KEPT.format(number)
            with safe_open(file, framework="pt") as tensors:
                save_file({name: tensors.get_tensor(name) for name in names}, folder / kept, {"format": "pt"})
            index["weight_map"] |= dict.fromkeys(names, kept)
        index["metadata"]["total_size"] += left_out.num_bytes
        write_index(folder, index)
    if type(left_out.config) is not type(model.config):
        config = copy.deepcopy(left_out.config)
        part = next(name for name in config.sub_configs if type(getattr(config, name)) is type(model.config))
        setattr(config, part, copy.deepcopy(model.config))
        config.dtype = model.config.dtype
        config.save_pretrained(folder)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Writes which file of a folder holds which tensor."""
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def copy_processor(package: str, folder: Path, revision: str | None = None) -> None:
    """Copies what makes tensors of images and sound, where the package has it."""
    for name in PROCESSOR_FILES:
        path = cached_file(package, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if path and not (folder / name).exists():
            shutil.copyfile(path, folder / name)  # not its mode: a save could not sync what is read-only
