"""Manages the checkpoints of a run's folder: each is complete or missing. The collective part of a save is in save.py.

A checkpoint is written in `.saving/`, synced, listed in its `manifest.json` with sizes and hashes, and then renamed. A
folder is first moved to `.removed/`, then deleted; files that cannot be deleted (a network file system keeps open ones)
stay there, and the next removal tries again.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from dsft.errors import UserError, one_line
from dsft.job import beat as watchdog
from dsft.models.model_folder import CHECKPOINT, number_in, read_object
from dsft.units import JsonObject

REMOVED = ".removed"
STAGING = ".saving"
MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
TENSOR_FILES = (".safetensors", ".bin", ".pt", ".pth")
"""Extensions of the large files, which are read only after the whole checkpoint is verified."""
SEAL = "sha256"  # key of the manifest's own hash


def discard(folder: Path) -> None:
    """Move a folder, if it exists, to `.removed/` beside it, and empty that."""
    trash = folder.parent / REMOVED
    if folder.exists():
        trash.mkdir(exist_ok=True)
        folder.rename(trash / f"{folder.name}.{time.time_ns()}")
    shutil.rmtree(trash, ignore_errors=True)


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir) / f"{CHECKPOINT}-{step}"


def files_of(folder: Path) -> list[Path]:
    """List every file of a checkpoint except its manifest, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def share_of(files: list[Path], *, reader: int, readers: int) -> list[Path]:
    """Return the files for one of several readers, with about as many bytes as the others'."""
    return sorted(files, key=lambda file: -file.stat().st_size)[reader::readers]


def hash_and_sync(path: Path) -> JsonObject:
    """Sync a file to disk; return its size in bytes and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def share_files(folder: Path) -> None:
    """Set the files of a new folder to the mode of the umask: safetensors writes files that only the owner can read."""
    for file in files_of(folder):
        with contextlib.suppress(PermissionError):
            file.chmod(file.stat().st_mode | folder.stat().st_mode & 0o666)


def publish(staged: Path, manifest: JsonObject) -> Path:
    """Write the manifest and rename the staged folder, replacing an earlier one. Returns the new path."""
    with (staged / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(sealed(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    share_files(staged)
    folders = [path for path in staged.rglob("*") if path.is_dir()]
    for folder in (*folders, staged, *staged.parents[:2]):
        _sync_folder(folder)
    final = staged.parents[1] / staged.name
    discard(final)
    staged.rename(final)  # after a failure, or a kill before it, `clean_up` does it
    _sync_folder(final.parent)
    with contextlib.suppress(OSError):  # the next save removes it
        discard(staged.parent)
    return final


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean_up(output_dir: str | Path) -> list[Path]:
    """Remove the leftovers of killed saves, and return them. A complete folder, with its manifest, gets its name."""
    staging = Path(output_dir) / STAGING
    for staged in staging.glob("*/"):
        final = Path(output_dir) / staged.name
        if not final.exists() and not integrity_errors(staged):
            staged.rename(final)  # an error ends the start: what is complete is not discarded
    removed = [*staging.glob("*")]
    discard(staging)
    return removed


def folders_of_steps(output_dir: str | Path) -> list[Path]:
    """List folders with a checkpoint's name, oldest step first. checkpoint-8-copy belongs to the user."""
    paths = Path(output_dir).glob(f"{CHECKPOINT}-*/")
    return sorted((path for path in paths if re.fullmatch(rf"{CHECKPOINT}-[0-9]+", path.name)), key=number_in)


def checkpoints(output_dir: str | Path) -> list[Path]:
    """List the `folders_of_steps` with a Trainer's state or a manifest, complete or not, or unreadable."""
    folders = []
    for path in folders_of_steps(output_dir):
        try:
            if (path / TRAINER_STATE).is_file() or (path / MANIFEST).is_file():
                folders.append(path)
        except OSError:
            folders.append(path)
    return folders


def bytes_of(folder: Path) -> int:
    """Return the bytes of a checkpoint's files; 0 for one that cannot be read."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in files_of(folder))
    return 0


def read_manifest(folder: str | Path) -> JsonObject:
    """Return the manifest, empty if there is none. Raises UserError if it is not as it was written."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return {}
    manifest = read_object(path)
    if not manifest or (SEAL in manifest and manifest != sealed(manifest)):
        raise UserError(f"{path}: has changed since it was written; use another checkpoint")
    return manifest


def sealed(manifest: JsonObject) -> JsonObject:
    """Return a manifest with the hash of its content, which decides how a run resumes."""
    content = dict(manifest)
    content.pop(SEAL, None)
    text = json.dumps(content, sort_keys=True)
    return content | {SEAL: hashlib.sha256(text.encode()).hexdigest()}


def read_trainer_state(checkpoint: str | Path) -> JsonObject:
    """Return the Trainer's state in a checkpoint. Raises UserError if it is not one."""
    path = Path(checkpoint) / TRAINER_STATE
    state = read_object(path)
    if not isinstance(state.get("global_step"), int):
        raise UserError(f"{path}: has no global_step; use another checkpoint")
    return state


def integrity_errors(folder: Path, *, hash_tensors: bool = False) -> list[str]:
    """List the differences of a checkpoint from its manifest: files, sizes, and hashes of all files or of all except
    tensors. Unreadable files are errors like changed ones.
    """
    try:
        manifest = read_manifest(folder)
        if not manifest:
            return [f"it has no {MANIFEST}"]
        sizes = {name: listed["size"] for name, listed in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    errors = []
    try:
        for name, size in sizes.items():
            path = folder / name
            if not path.is_file():
                errors.append(f"{name} is missing")
            elif path.stat().st_size != size:
                errors.append(f"{name} has {path.stat().st_size:,} bytes, {size:,} were written")
        hashed = [file for file in files_of(folder) if hash_tensors or file.suffix not in TENSOR_FILES]
    except OSError as error:
        return [f"it cannot be read ({one_line(error)})"]
    return errors or content_errors(folder, hashed)


def content_errors(folder: Path, files: list[Path]) -> list[str]:
    """Read those of a checkpoint's `files` that its manifest lists, and name each with different content."""
    listed = read_manifest(folder).get("files", {})
    errors = []
    for path in files:
        watchdog.heartbeat()
        name = str(path.relative_to(folder))
        if name not in listed:
            continue
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            errors.append(f"{name} cannot be read ({one_line(error)})")
            continue
        if digest != listed[name]["sha256"]:
            errors.append(f"the content of {name} has changed")
    return errors


def prune(output_dir: str | Path, *, limit: int | None, best: str | None, newest: Path) -> None:
    """Remove the oldest checkpoints beyond `limit`, except the newest and the `best`.
    `newest`: what was just saved. Those of higher steps are from an abandoned continuation (they are damaged, for
    example), and are removed first.
    """
    folders = checkpoints(output_dir)
    if not limit or len(folders) <= limit:
        return
    keep = {newest.name, Path(best or newest).name}
    position = folders.index(newest)
    others = [folder for folder in folders[position:] + folders[:position] if folder.name not in keep]
    for folder in others[: len(folders) - limit]:
        discard(folder)
