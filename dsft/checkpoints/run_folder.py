"""Manages a run's folder: `run.json` (options, plan, versions, results) beside the checkpoints and `final/`."""

import contextlib
import html
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsft.checkpoints.manifest import (
    MANIFEST,
    TRAINER_STATE,
    checkpoints,
    discard,
    folders_of_steps,
    integrity_errors,
    read_trainer_state,
)
from dsft.config.options import TrainConfig
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.model_folder import FINAL, adapter_base, folder_of, has_only_shards, is_gguf, misnamed, read_object
from dsft.runtime.console import LOGS, say
from dsft.runtime.disk import LOCK, PROBE, check_writable
from dsft.runtime.launcher_env import ENV_FILE, LAUNCH, OPTIONS_FILE
from dsft.units import JsonObject, plural, write_json

RUN = "run.json"
METRICS = "metrics.jsonl"  # one object for each log of the training
SAMPLE = ("eval_prompt_{}", "eval_answer_{}")
"""Keys of a sample's texts in the log of an evaluation, by its number from 1 (the option generate_samples)."""
CARD = "README.md"
RESULTS_ON_THE_CARD = (
    *("eval_perplexity", "eval_loss", "eval_tokens", "train_loss", "steps", "tokens_seen", "seconds", "peak_gpu_gib"),
    "peak_host_gib",
)
OPTIONS_ON_THE_CARD = (
    *("learning_rate", "num_train_epochs", "max_steps", "global_batch_size", "per_device_train_batch_size", "seq_len"),
    *("adapter", "seed"),
)
UNFINISHED = ".unfinished"  # suffix of the folder that an export is written to until it is complete
FROM_WEIGHTS = "start from its weights: name it as model (of LoRA as adapter), with a new output_dir"
"""What to do if a checkpoint cannot be resumed."""


def samples_in(entry: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the samples in a log entry: (prompt, answer)."""
    prompt, answer = SAMPLE
    number = 1
    while answer.format(number) in entry:
        yield entry[prompt.format(number)], entry[answer.format(number)]
        number += 1


def check_output_dir(config, problems: list[str]) -> None:
    """Check that the folder is writable and contains no other run, unless `overwrite` or a resume is set."""
    path = Path(config.training["output_dir"])
    resume = config.training.get("resume_from_checkpoint")
    check_writable(str(path), problems)
    if resume and resume != "auto" and not os.path.isfile(Path(resume) / TRAINER_STATE):
        problems.append(f"resume_from_checkpoint={resume}: has no {TRAINER_STATE}; use auto or a checkpoint-N folder")
    if resume == "auto" and config.overwrite and LAUNCH not in os.environ:  # a restart of dsft launch has both
        problems.append(
            "overwrite and resume_from_checkpoint=auto are both set: one replaces the run, the other continues it; keep"
            " one"
        )
    if not path.is_dir():
        return
    for key in ("model", "tokenizer", "adapter"):
        name = getattr(config, key)
        if config.overwrite and name and Path(name).resolve().is_relative_to(path.resolve()):
            problems.append(
                f"overwrite: {key}={name} is inside output_dir={path} and would be lost; choose another output_dir"
            )
    has_only_final = (path / FINAL).is_dir() and not checkpoints(path)
    if resume == "auto" and not config.overwrite and has_only_final:
        problems.append(
            f"resume_from_checkpoint=auto: {path} contains a finished run without checkpoints; choose a new"
            " output_dir, or replace the run with --overwrite"
        )
    if not config.overwrite and not resume:
        # Another rank may be checking whether the folder is writable.
        names = {file.name for file in path.iterdir() if not file.name.startswith(PROBE)}
        names -= {LOCK, OPTIONS_FILE, ENV_FILE}
        # It may have failed before it wrote more than its logs.
        has_failed = names <= {RUN, LOGS} and known_run(path).get("status") == "failed"
        if names and not has_failed:
            content = "another run" if is_run(path) else "other files"
            problems.append(
                f"output_dir={path}: contains {content}; choose a new folder, continue it with --resume_from_checkpoint"
                " auto, or replace it with --overwrite"
            )


def clear_run(output_dir: str) -> None:
    """Remove an earlier run's checkpoints, final model and run.json. Raises UserError if one of them remains."""
    path = Path(output_dir)
    for folder in (*folders_of_steps(path), path / FINAL):
        try:
            discard(folder)
        except OSError as error:
            raise UserError(f"overwrite: {folder} cannot be removed ({error}); choose another output_dir") from None
    (path / RUN).unlink(missing_ok=True)


def resume_errors(folder: Path, *, verify: bool = True) -> list[str]:
    """List why a run cannot resume from a checkpoint, by its files, their sizes and the hashes of small ones; empty
    without `verify`. One without a manifest is another tool's if no folder beside it has one.
    """
    try:
        has_manifest = (folder / MANIFEST).is_file()
    except OSError as error:
        return [f"it cannot be read ({one_line(error)})"]
    beside = (*folders_of_steps(folder.parent), folder.parent / FINAL)
    is_other_tools = not has_manifest and not any((each / MANIFEST).is_file() for each in beside)
    return [] if is_other_tools or not verify else integrity_errors(folder)


def last_good(output_dir: str | Path, *, verify: bool = True, before: Path | None = None) -> Path | None:
    """Return the newest checkpoint without `resume_errors`, older than `before`; skipped ones are logged."""
    folders = checkpoints(output_dir)
    if before:
        folders = folders[: folders.index(before)]
    for folder in reversed(folders):
        errors = resume_errors(folder, verify=verify)
        if not errors:
            return folder
        say(f"{folder} is incomplete and is skipped: {'; '.join(errors[:3])}")
    return None


def last_checkpoint(config: TrainConfig, *, before: str | None = None) -> str | None:
    """Return the checkpoint to resume from, by its `resume_errors`; None starts from the beginning.
    Raises UserError if the named one is incomplete, or none can be used.
    `before`: a checkpoint that cannot be used; `auto` looks for an older one.
    """
    output_dir = config.training["output_dir"]
    resume = config.training.get("resume_from_checkpoint")
    job = os.environ.get(LAUNCH)
    # `overwrite` replaces the run that was there before this job of `dsft launch`, not this job's own checkpoints.
    of_another_job = job is not None and known_run(output_dir).get("job", job) != job
    if not resume or (config.overwrite and of_another_job):
        return None
    if resume != "auto":
        errors = resume_errors(Path(resume), verify=config.verify_resume)
        raise_if_any(
            [f"resume_from_checkpoint={resume}: {error}; it is incomplete, use another or auto" for error in errors]
        )
        return resume
    good = last_good(output_dir, verify=config.verify_resume, before=before and Path(before))
    if good is None and checkpoints(output_dir) and not config.overwrite:
        raise UserError(
            f"resume_from_checkpoint=auto: no checkpoint in {output_dir} can be used; start from scratch with"
            " --overwrite true, or take one as it is with --verify_resume false and its folder"
        )
    return str(good) if good else None


def known_run(folder: str | Path) -> JsonObject:
    """Return run.json; empty if it is missing or cannot be read: a resume writes it again."""
    with contextlib.suppress(UserError):
        return read_run(folder)
    return {}


def is_finished(checkpoint: str, training: JsonObject, *, patience: int | None = None) -> bool:
    """Return whether nothing is left to train after `checkpoint`. Raises UserError if it has no Trainer state."""
    state = read_trainer_state(checkpoint)
    stopping = (state.get("stateful_callbacks") or {}).get("EarlyStopping")  # from training/callbacks.py
    if patience and stopping and stopping["attributes"]["early_stopping_patience_counter"] >= patience:
        return True
    if training.get("max_steps", -1) > 0:
        return state["global_step"] >= training["max_steps"]
    return (state.get("epoch") or 0) >= training.get("num_train_epochs", 3.0)


def is_run(folder: str | Path) -> bool:
    return (Path(folder) / RUN).is_file()


def write_run(output_dir: str, **sections: Any) -> None:
    path = Path(output_dir) / RUN
    path.parent.mkdir(parents=True, exist_ok=True)
    content = known_run(output_dir) or {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": os.environ.get(LAUNCH),
    }
    write_json(path, content | sections)


def read_run(output_dir: str | Path) -> JsonObject:
    """Read run.json of a run. Raises UserError if the folder is not a run's, or run.json is not a JSON object."""
    if not is_run(output_dir):
        raise UserError(f"{output_dir}: is not a run folder: it has no {RUN}; name an output_dir of dsft train")
    return read_object(Path(output_dir) / RUN)


def read_options_of_run(output_dir: str) -> JsonObject:
    """Read the options that a run was started with. Raises UserError if there are none."""
    options = read_run(output_dir).get("config")
    if not isinstance(options, dict) or "model" not in options:
        raise UserError(f"{output_dir}: its run.json has no options of a training; name model and data instead")
    return options


def path_of(name: str, run_folder: str) -> str:
    """Find a file or folder that run.json names. Relative paths start where the training was started."""
    output_dir = Path(read_options_of_run(run_folder)["output_dir"])
    started_in = Path(run_folder).resolve()
    for part in reversed(output_dir.parts):
        if started_in.name != part:
            return name  # an absolute output_dir, or a run that was moved
        started_in = started_in.parent
    path = started_in / name
    return str(path) if path.exists() else name


def sealed_checkpoint(model: str) -> Path | None:
    """Return the checkpoint that the folder `model` is, or whose shards it is, if it has a manifest. A final model also
    has one, but users may edit it (its chat template, for example).
    """
    folder = folder_of(model)
    is_sealed = (folder / TRAINER_STATE).is_file() and (folder / MANIFEST).is_file()
    return folder if is_sealed else None


def damage(model: str) -> list[str]:
    """List the problems of the checkpoint `model`, by sizes and small files; `changed_files` reads all."""
    folder = sealed_checkpoint(model)
    errors = integrity_errors(folder) if folder else []
    if errors and has_only_shards(model):  # somebody removed the weights, which the shards also contain
        errors = [error for error in errors if not re.fullmatch(r"\S+\.safetensors\S* is missing", error)]
    return errors


def find_weights(source: str) -> Path:
    """Return the weights of `source`: a run's `final/` (else its last checkpoint), or the folder or GGUF file itself.
    Raises UserError if there are none.
    """
    folder = Path(source)
    if folder.is_file() and is_gguf(source):
        return folder
    if not folder.is_dir():
        raise UserError(f"{source}: is not a folder or a GGUF file")
    if is_run(folder):
        folder = folder / FINAL
        if not folder.is_dir():
            folder = last_good(source)
        if folder is None:
            raise UserError(f"{source}: the run has neither a final model nor a complete checkpoint yet")
    raise_if_any([f"{folder}: {error}; it is damaged, use another" for error in damage(str(folder))])
    has_files = any(folder.glob("*.safetensors")) or any(folder.glob("*model*.bin"))
    if not has_files and not has_only_shards(str(folder)):
        raise UserError(
            misnamed("model", source)
            or f"{source}: contains neither safetensors nor pickles (*.bin) nor a DeepSpeed global_step folder"
        )
    return folder


def find_adapter(source: str) -> Path:
    """Return the adapter folder of `source`, as `find_weights`. Raises UserError if it is not an adapter."""
    folder = find_weights(source)
    if adapter_base(str(folder)) is None:
        raise UserError(f"{folder}: is not an adapter: it has no adapter_config.json; use dsft export")
    return folder


def check_new_folder(out: str) -> None:
    """Raise UserError if there is anything at `out`, except an empty folder."""
    path = Path(out)
    is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if os.path.lexists(out) and not is_empty:
        raise UserError(f"{out}: exists; choose a new folder")


def model_card(run: JsonObject, *, data: str, held_out: str) -> str:
    """Return the README.md of a trained model, with the hub's metadata. Args: `run`: run.json of a finished run;
    `data` and `held_out`: counts as text, the latter empty if nothing was held out.
    """
    from huggingface_hub import ModelCardData  # not needed to read a run

    def listed(values, names):
        lines = []
        for name in names:
            value = values.get(name)
            if value not in (None, -1):
                lines.append(f"- {name}: {value:,.6g}" if isinstance(value, float) else f"- {name}: {value}")
        return "\n".join(lines)

    config = run["config"]
    data += f"\n\nHeld out: {held_out}" if held_out else ""
    # Local folders and data files mean nothing to the hub.
    metadata = ModelCardData(
        base_model=None if Path(config["model"]).exists() else config["model"],
        library_name="transformers" if config["method"] == "full" else "peft",
        pipeline_tag="text-generation",
        tags=["dsft", "deepspeed"],
    )
    text = f"""
# {Path(config["model"]).name}, finetuned ({config["method"]})

Trained from `{config["model"]}` with dsft on {run["machine"]}, {plural(run["world_size"], "rank")}.

## Data

{", ".join(f"`{name}`" for name in config["data"])}: {data}

## Training

{listed(config, OPTIONS_ON_THE_CARD)}
- plan: {run["plan"]["reason"]}

## Measured

{listed(run["results"], RESULTS_ON_THE_CARD)}

## Versions

{", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)}
"""
    # Names of folders and columns may contain anything, and Markdown renders HTML.
    return f"---\n{metadata.to_yaml()}\n---\n{html.escape(text, quote=False)}"
