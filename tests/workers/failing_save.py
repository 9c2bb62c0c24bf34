"""`dsft.train` on ranks of which the second has a full disk from its second checkpoint on."""

import errno
import os
import sys

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import dsft.train


def main() -> None:
    save = TorchCheckpointEngine.save

    def save_or_fail(engine, state_dict, path, *args, **kwargs):
        if os.environ["RANK"] == "1" and "checkpoint-1/" not in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(engine, state_dict, path, *args, **kwargs)

    TorchCheckpointEngine.save = save_or_fail
    try:
        dsft.train.main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # as at the top of a program; a forked process does not call it
        os._exit(1)
