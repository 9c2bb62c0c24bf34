"""Keeps the checkpoints of a run's folder: each is complete, or is not there. What the ranks do together is in save.py.

A checkpoint is written in `.saving/`, synced, listed in its `manifest.json` with sizes and hashes, and then moved to
its name. A folder is first moved to `.removed/`, then deleted; what cannot be deleted (a network file system keeps open
files, a mount lies in it) stays there, and the next removal tries again.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Literal

from dsft.errors import UserError, one_line
from dsft.job import beat as watchdog
from dsft.models.model_folder import CHECKPOINT
from dsft.runtime.console import say

REMOVED = ".removed"
STAGING = ".saving"
REPLACED = ".replaced"
MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
TENSOR_FILES = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of the files that are large and that nothing reads before all of a checkpoint is verified."""
SEAL = "sha256"
"""Of the manifest itself, in it."""
PART_BYTES = 2**26
"""Of a file, that are brought to the disk at once."""
_OF_RANK = re.compile(r"(?:pp_rank|rng_state)_(\d+)")
"""In the name of a file that one rank has written."""


def discard(folder: Path, *, if_possible: bool = False) -> list[str]:
    """Move a folder to `.removed/` beside it and empty that; returns what could not be removed, with the reason.
    Raises OSError where it cannot be moved; with `if_possible` it stays then, and is returned too.
    """
    try:
        if folder.exists():
            trash = folder.parent / REMOVED
            trash.mkdir(exist_ok=True)
            folder.rename(trash / f"{folder.name}.{time.time_ns()}")
        return empty_trash(folder.parent)
    except OSError as error:
        if not if_possible:
            raise
        return [f"{folder}: {one_line(error)}"]


def empty_trash(output_dir: Path) -> list[str]:
    """Remove what earlier removals left. Returns what could not be deleted, with the reason."""
    errors: list[str] = []
    trash = output_dir / REMOVED
    if trash.exists():
        for folder, _, names in os.walk(trash):
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(Path(folder, name))
                watchdog.heartbeat()  # large files take a slow file system its time
        shutil.rmtree(trash, onerror=lambda _, path, error: errors.append(f"{path}: {one_line(error[1])}"))
    return errors[:1]  # the others follow from the first


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    """Name the folder that the checkpoint of `step` has once it is complete."""
    return Path(output_dir) / f"{CHECKPOINT}-{step}"


def files_of(folder: Path) -> list[Path]:
    """List every file of a checkpoint but its manifest, in one order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def shares_of_ranks(files: list[Path], world_size: int, *, readers: Sequence[int] = ()) -> list[list[Path]]:
    """Deal out files to be read: to each rank its own shards, which its node has in memory, and the rest, largest
    first, evenly to `readers` (ranks; all by default).
    """
    readers = readers or range(world_size)
    shares: list[list[Path]] = [[] for _ in range(world_size)]
    held = [0] * world_size
    matches = {file: _OF_RANK.search(file.name) for file in files}
    for file in sorted(files, key=lambda file: (matches[file] is None, -file.stat().st_size)):
        match = matches[file]
        reader = int(match[1]) % world_size if match else min(readers, key=held.__getitem__)
        shares[reader].append(file)
        held[reader] += file.stat().st_size
    return [sorted(share) for share in shares]


def hash_and_sync(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file, and bring it to the disk: part by part, so that progress shows."""
    digest = hashlib.sha256()
    with path.open("r+b") as file:  # Python flushes no map of a file that is open for reading alone
        mapped, end = None, 0
        with contextlib.suppress(OSError, ValueError):  # it is empty, or its file system maps none
            mapped = mmap.mmap(file.fileno(), 0)
            end = len(mapped)
        while True:
            if (start := file.tell()) < end:
                mapped.flush(start, min(PART_BYTES, end - start))
            if not (part := file.read(PART_BYTES)):
                break
            digest.update(part)
        os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def share_files(folder: Path) -> None:
    """Let those read a new folder's files whom the umask lets: safetensors' are their owner's alone."""
    for file in files_of(folder):
        with contextlib.suppress(PermissionError):
            file.chmod(file.stat().st_mode | folder.stat().st_mode & 0o666)


def publish(staged: Path, manifest: dict[str, Any]) -> Path:
    """Write the manifest and move what is staged to its name, over an earlier one. Returns its folder."""
    with (staged / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(sealed(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    share_files(staged)
    for folder in (*(path for path in staged.rglob("*") if path.is_dir()), staged):
        _sync_folder(folder)
    final, replaced = staged.parent.parent / staged.name, staged.parent.parent / REPLACED
    if final.exists():
        discard(replaced)
        replaced.mkdir()
        final.rename(replaced / final.name)
    try:
        staged.rename(final)
    except OSError:
        if (replaced / final.name).exists():
            (replaced / final.name).rename(final)
        raise
    _sync_folder(final.parent)
    for folder in (staged.parent, replaced):
        discard(folder, if_possible=True)
    return final


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean_up(output_dir: str | Path) -> list[Path]:
    """Remove what killed saves left, which is returned, and put back a checkpoint that was about to be replaced."""
    root, removed = Path(output_dir), []
    for moved in (root / REPLACED).glob("*"):
        if not (root / moved.name).exists():
            moved.rename(root / moved.name)
    for folder in (root / STAGING, root / REPLACED):
        if folder.is_dir():
            removed += [*folder.iterdir()] or [folder]
            discard(folder, if_possible=True)
    empty_trash(root)
    return removed


def folders_of_steps(output_dir: str | Path) -> list[Path]:
    """List folders at a checkpoint's name, oldest step first. checkpoint-8-copy is the user's."""
    paths = Path(output_dir).glob(f"{CHECKPOINT}-*")
    folders = [path for path in paths if re.fullmatch(rf"{CHECKPOINT}-[0-9]+", path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))


def checkpoints(output_dir: str | Path) -> list[Path]:
    """List those of `folders_of_steps` with a Trainer's state or a manifest, complete or not."""
    return [
        path
        for path in folders_of_steps(output_dir)
        if any((path / name).is_file() for name in (TRAINER_STATE, MANIFEST))
    ]


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest, empty where there is none. Raises ValueError where it is not what was written."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return {}
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or not manifest:
        raise ValueError(f"{path} holds no JSON object, or an empty one")
    if SEAL in manifest and manifest != sealed(manifest):
        raise ValueError(f"{path} has changed")
    return manifest


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add a hash of a manifest's content, which decides how a run resumes."""
    content = {name: value for name, value in manifest.items() if name != SEAL}
    return content | {SEAL: hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Return the Trainer's state that a checkpoint holds. Raises UserError where it is none."""
    path = folder / TRAINER_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
            raise ValueError("it names no global_step")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a Trainer's state ({error}); use another checkpoint") from None
    return state


def manifest_hash(folder: Path) -> str:
    """Distinguish one checkpoint from another at the same path, on hosts that may not share it."""
    path = folder / MANIFEST
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return f"no {MANIFEST}" if folder.is_dir() else "no such folder"


def integrity_errors(folder: Path, *, hashes: Literal["none", "small", "all"] = "small") -> list[str]:
    """Compare a checkpoint with its manifest: files, sizes, and hashes of all files or of those that are no tensors."""
    try:
        manifest = read_manifest(folder)
        if not manifest:
            return [f"it has no {MANIFEST}"]
        files = {name: listed["size"] for name, listed in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    errors = []
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            errors.append(f"{name} is missing")
        elif path.stat().st_size != size:
            errors.append(f"{name} has {path.stat().st_size:,} bytes, {size:,} were written")
    hashed = [file for file in files_of(folder) if hashes == "all" or file.suffix not in TENSOR_FILES]
    return errors or (content_errors(folder, hashed) if hashes != "none" else [])


def content_errors(folder: Path, files: list[Path]) -> list[str]:
    """Read those `files` of a checkpoint that its manifest lists, and name each whose content is another."""
    listed, errors = read_manifest(folder).get("files", {}), []
    for path in files:
        if (name := str(path.relative_to(folder))) in listed:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != listed[name]["sha256"]:
                    errors.append(f"the content of {name} has changed")
    return errors


def resume_errors(folder: Path, *, other_tools: Container[str] | None = None) -> list[str]:
    """List why a run cannot resume from a checkpoint, by its files, their sizes and the hashes of small ones.
    `other_tools`: names of the checkpoints that need no manifest, since another tool wrote them; None means all, and
    leaves out the hashes.
    """
    needs_manifest = other_tools is not None and folder.name not in other_tools
    if not needs_manifest and not (folder / MANIFEST).is_file():
        return []
    return integrity_errors(folder, hashes="none" if other_tools is None else "small")


def last_good(
    output_dir: str | Path, *, other_tools: Container[str] | None = None, before: Path | None = None
) -> tuple[Path | None, list[tuple[Path, list[str]]]]:
    """Find the newest checkpoint without `resume_errors`, and the newer ones that are skipped, with theirs, and logged.
    `before`: a checkpoint; it and all newer ones are left out.
    """
    skipped: list[tuple[Path, list[str]]] = []
    folders = checkpoints(output_dir)
    for folder in reversed(folders[: folders.index(before)] if before else folders):
        errors = resume_errors(folder, other_tools=other_tools)
        if not errors:
            return folder, skipped
        say(f"{folder} is incomplete and is skipped: {'; '.join(errors[:3])}")
        skipped.append((folder, errors))
    return None, skipped


def prune(output_dir: str | Path, *, limit: int | None, best: str | None, newest: Path | None = None) -> list[str]:
    """Remove the oldest checkpoints beyond `limit`; the newest and the `best` stay. Returns what could not be removed.
    `newest`: by default the one of the highest step. Those of higher steps are of a future that was given up (they are
    damaged, say), and go first.
    """
    folders = checkpoints(output_dir)
    if not limit or len(folders) <= limit:
        return empty_trash(Path(output_dir))
    newest = newest or folders[-1]
    keep = {newest, *(path for path in folders if best and path.resolve() == Path(best).resolve())}
    position = folders.index(newest)
    others = [path for path in (*folders[position:], *folders[:position]) if path not in keep]
    removed = others[: len(folders) - max(limit, len(keep))]
    return [error for path in removed for error in discard(path, if_possible=True)]
