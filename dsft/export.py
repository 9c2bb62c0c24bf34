"""Turns a run, a checkpoint or an adapter into a plain Hugging Face folder, and reads back what was written.

    dsft export runs/first exported          # final model of a run, or any checkpoint-N; adapters are merged
    dsft merge runs/lora/final merged        # an adapter into its base
"""

import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dsft.checkpoints import checkpoints
from dsft.model import DTYPES, adapter_base, described_in, is_step_folder, load_weights
from dsft.problems import UserError
from dsft.run_folder import FINAL


def find_weights(source: str) -> Path:
    """The folder with weights that `source` means: a run's `final/` (else its last checkpoint), or the folder itself.

    Raises:
        UserError: where no weights are found.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise UserError([f"{source}: is no folder"])
    if (folder / "run.json").is_file():
        found = [folder / FINAL] if (folder / FINAL).is_dir() else checkpoints(source)
        if not found:
            raise UserError([f"{source}: the run has neither a final model nor a complete checkpoint yet"])
        return found[-1]
    if not is_step_folder(source) and not any(folder.glob("*.safetensors")) and not any(folder.glob("global_step*")):
        raise UserError([f"{source}: holds neither safetensors nor a DeepSpeed global_step folder"])
    return folder


def export(source: str, out: str, *, dtype: str = "auto") -> Path:
    """Write `source` as safetensors, config and tokenizer to the new folder `out`; an adapter is merged into its base.

    Args:
        dtype: of the written weights; "auto" keeps the source's.

    Raises:
        UserError: where `source` holds no weights or `out` holds files already.
    """
    folder, target = find_weights(source), Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError([f"{out}: exists and is not empty; choose a new folder"])
    beside = target.absolute().with_name(f"{target.name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(described_in(str(folder)))
        model = _load(folder, dtype)
    except (OSError, ValueError) as error:
        raise UserError([f"{source}: cannot be loaded ({' '.join(str(error).split())[:300]})"]) from None
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    check_export(model, beside)
    if target.is_dir():
        target.rmdir()  # it is empty
    beside.rename(target)
    return target


def merge(adapter: str, out: str, *, dtype: str = "auto") -> Path:
    """`export` of something that must be an adapter (or a run that trained one).

    Raises:
        UserError: where it is none.
    """
    folder = find_weights(adapter)
    if adapter_base(str(folder)) is None:
        raise UserError([f"{folder}: is no adapter, it has no adapter_config.json; use dsft export"])
    return export(str(folder), out, dtype=dtype)


def _load(folder: Path, dtype: str) -> PreTrainedModel:
    options = {"dtype": "auto" if dtype == "auto" else DTYPES[dtype]}
    model = load_weights(str(folder), **options)
    return model.merge_and_unload(safe_merge=True) if isinstance(model, PeftModel) else model  # safe_merge refuses NaN


@torch.no_grad()
def check_export(model: PreTrainedModel, folder: Path) -> None:
    """Load `folder` as its user will and compare every weight with `model`.

    Raises:
        RuntimeError: naming the first weight that differs.
    """
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        raise RuntimeError(f"{folder}: {len(missing)} weights are missing from what was written, the first is {missing[0]}")
    written = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, written[name]):
            raise RuntimeError(f"{folder}: {name} reads back differently from what was written")
