"""`dsft checkpoints RUN` and `dsft verify CHECKPOINT`: what can be resumed from, and whether it is as it was
written.
"""

from pathlib import Path

from dsft.checkpoints.manifest import checkpoints, files_of, integrity_errors, read_manifest
from dsft.cli.commands import FolderOptions
from dsft.errors import UserError, raise_if_any
from dsft.units import plural


def show_checkpoints(options: FolderOptions) -> None:
    """Print a run's checkpoints, oldest first, and how to go on from the newest whole one.

    Raises:
        UserError: where the folder holds none.
    """
    from rich.console import Console
    from rich.table import Table

    found = checkpoints(options.folder)
    if not found:
        raise UserError([f"{options.folder}: holds no checkpoints"])
    table = Table()
    for name in ("step", "loss", "GB", "ranks", "ZeRO", "whole"):
        table.add_column(name, justify="left" if name == "whole" else "right")
    whole = []
    for folder in found:
        lacks = integrity_errors(folder)
        manifest = read_manifest(folder) if not lacks else None
        values = manifest or {}
        size = sum(path.stat().st_size for path in files_of(folder)) / 1e9
        loss = values.get("loss")
        table.add_row(
            folder.name.rpartition("-")[2],
            "" if loss is None else f"{loss:.4g}",
            f"{size:.3g}",
            str(values.get("world_size", "")),
            str(values.get("zero_stage", "")),
            "yes" if not lacks else f"no: {lacks[0]}",
        )
        whole += [] if lacks else [folder]
    Console(width=200).print(table)
    if whole:
        ranks = (read_manifest(whole[-1]) or {})["world_size"]
        print(
            f"dsft: to go on from {whole[-1]}: the command of the run with --resume_from_checkpoint auto; on"
            f" {plural(ranks, 'rank')} bit by bit, on others with the same batches"
        )


def verify_checkpoint(options: FolderOptions) -> None:
    """Read every file of a checkpoint and hold it against its manifest.

    Raises:
        UserError: with everything that differs.
    """
    folder, path = options.folder, Path(options.folder)
    if not path.is_dir():
        raise UserError([f"{folder}: is no folder"])
    raise_if_any([f"{folder}: {fault}" for fault in integrity_errors(path, hashes=True)])
    files = files_of(path)
    print(
        f"dsft: {folder} is whole: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e9:.3g} GB, as"
        " they were written"
    )
