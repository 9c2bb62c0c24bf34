"""The process and its machine: ranks, launcher variables, hardware, screen and logs."""

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import large libraries inside a `with`, without garbage collection, which takes a fourth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def quiet_libraries() -> None:
    """Hide warnings between libraries, and DeepSpeed's that it finds no GPU, or does not look for one."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # warns before the error of a lost network
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
