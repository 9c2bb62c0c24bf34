"""Verifies a checkpoint before it is used: every byte against the manifest, and that no pickle runs code."""

import threading
import time
from pathlib import Path

from dsft.checkpoints.manifest import content_errors, files_of, shares_of_ranks
from dsft.checkpoints.run_folder import sealed_checkpoint
from dsft.errors import raise_if_any
from dsft.models.model_folder import has_only_shards, is_step_folder
from dsft.models.pickles import is_read_pickle, pickle_errors
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.watchdog import client as watchdog


class Verification:
    """Hashes this rank's share of a checkpoint in a thread, while a training's data and model load."""

    def __init__(self, checkpoint: str, *, hashes: bool, weights_only: bool = False):
        """
        Args:
            hashes: else only the pickles are looked at.
            weights_only: leave out DeepSpeed's shards, unless the weights lie in them, and the look at pickles: who
                loads weights looks at theirs.
        """
        self.folder = Path(checkpoint).parent if is_step_folder(checkpoint) else Path(checkpoint)
        self.seconds, self._weights_only = 0.0, weights_only
        files = files_of(self.folder)
        if weights_only and not has_only_shards(checkpoint):
            files = [file for file in files if not is_step_folder(str(file.parent))]
        self._files = shares_of_ranks(files, distributed.world_size())[distributed.rank()]
        self._errors: list[str] = []
        self._thread = threading.Thread(target=self._hash, daemon=True)
        if hashes:
            self._thread.start()

    def _hash(self) -> None:
        start = time.monotonic()
        try:
            self._errors = content_errors(self.folder, self._files)
        except OSError as error:
            self._errors = [str(error)]
        self.seconds = time.monotonic() - start

    def errors(self) -> list[str]:
        """Return what has changed since the checkpoint was written, on any rank. Collective.

        Raises:
            UserError: where a pickle asks for a class that no checkpoint holds.
        """
        start = time.monotonic()
        while self._thread.is_alive():
            watchdog.heartbeat()
            self._thread.join(1)
        distributed.wait_long("verification")
        errors, waited = distributed.from_all(self._errors), time.monotonic() - start
        if self._thread.ident:
            say(f"{self.folder}: hashed in {self.seconds:.3g} s, {waited:.3g} s of them waited for")
        if not errors and not self._weights_only:
            distributed.raise_together(pickle_errors(file for file in self._files if is_read_pickle(file)))
        return errors


def verify_weights(model: str) -> None:
    """Hash all that loading the weights of `model` reads, where it is a checkpoint with a manifest. Collective.

    Raises:
        UserError: on every rank, with each file whose content has changed.
    """
    if distributed.on_rank_0(lambda: sealed_checkpoint(model)) is not None:
        errors = Verification(model, hashes=True, weights_only=True).errors()
        raise_if_any([f"{model}: {error}; it is damaged, use another" for error in errors])
