"""The process and the machine it runs on: ranks, launcher variables, hardware, screen and logs."""

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import large libraries within this context: a fourth of the time goes into looking for garbage in code that
    stays. What exists at the end is never looked at again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def quiet_libraries() -> None:
    """Hide warnings of the libraries among each other, and DeepSpeed's that it finds no GPU, or does not look."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # the error of a lost network follows
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
