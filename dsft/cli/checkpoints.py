"""`dsft checkpoints`, `verify`, `export` and `merge`: what can be resumed from, whether it is complete, and a plain
Hugging Face folder of it, read back before they say so.

Problems of the folders are reported before torch is loaded, which takes seconds.
"""

import dataclasses
from pathlib import Path

from dsft.checkpoints.manifest import MANIFEST, checkpoints, files_of, integrity_errors, read_manifest
from dsft.checkpoints.run_folder import FINAL, check_new_folder, find_adapter, find_weights
from dsft.cli.commands import ExportOptions, FolderOptions
from dsft.errors import UserError, raise_if_any
from dsft.models.pickles import is_read_pickle, pickle_errors
from dsft.runtime import quick_imports
from dsft.runtime.console import set_up_screen, show_table, show_text
from dsft.units import GB, plural


def show_checkpoints(options: FolderOptions) -> None:
    """Print a run's checkpoints, oldest first, and how to resume from the newest complete one.

    Raises:
        UserError: where the folder holds none.
    """
    from rich.table import Table

    folders = checkpoints(options.folder)
    if not folders:
        raise UserError([f"{options.folder}: holds no checkpoints"])
    table, newest, ranks = Table(), None, None
    for name in ("step", "loss", "GB", "ranks", "ZeRO", "complete"):
        table.add_column(name, justify="left" if name == "complete" else "right")
    for folder in folders:
        errors = integrity_errors(folder)
        manifest = {} if errors else read_manifest(folder)
        loss = manifest.get("loss")
        table.add_row(
            folder.name.rpartition("-")[2],
            "" if loss is None else f"{loss:.4g}",
            f"{_num_bytes(folder) / GB:.3g}",
            str(manifest.get("world_size", "")),
            str(manifest.get("zero_stage", "")),
            f"no: {errors[0]}" if errors else "yes",
        )
        if not errors:
            newest, ranks = folder, manifest.get("world_size")
    show_table(table)
    if newest and ranks:
        show_text(
            f"dsft: to resume from {newest}: the command of the run with --resume_from_checkpoint auto; on"
            f" {plural(ranks, 'rank')} bit by bit, on others with the same batches"
        )


def verify_checkpoint(options: FolderOptions) -> None:
    """Read every file of a checkpoint, or of all that a run's folder holds, and compare it with the manifest.

    Raises:
        UserError: with everything that differs, and every pickle that asks for foreign classes.
    """
    path = Path(options.folder)
    if not path.is_dir():
        raise UserError([f"{path}: is no folder"])
    folders = [path]
    if not (path / MANIFEST).is_file():  # a run's folder, else its files are reported as missing
        folders = [*checkpoints(path), *(folder for folder in [path / FINAL] if folder.is_dir())] or [path]
    raise_if_any([f"{folder}: {error}" for folder in folders for error in integrity_errors(folder, hashes="all")])
    raise_if_any(pickle_errors(file for folder in folders for file in files_of(folder) if is_read_pickle(file)))
    for folder in folders:
        files = plural(len(files_of(folder)), "file")
        show_text(f"dsft: {folder} is complete: {files}, {_num_bytes(folder) / GB:.3g} GB, as they were written")


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def run_export(options: ExportOptions) -> None:
    """Export a run or a checkpoint."""
    find_weights(options.source)
    check_new_folder(options.out)
    set_up_screen()
    with quick_imports():
        from dsft.checkpoints.export import export

    show_text(f"dsft: written and read back: {export(**dataclasses.asdict(options))}")


def run_merge(options: ExportOptions) -> None:
    """Merge an adapter into its base model."""
    find_adapter(options.source)
    check_new_folder(options.out)
    set_up_screen()
    with quick_imports():
        from dsft.checkpoints.export import merge

    show_text(f"dsft: merged, written and read back: {merge(**dataclasses.asdict(options))}")
