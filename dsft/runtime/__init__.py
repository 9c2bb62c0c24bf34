"""The process and its machine: ranks, launcher variables, hardware, screen and logs. Here is how libraries are
imported, silenced and patched: no other module assigns into a library (tests/test_layout.py).
"""

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

PATCHES = {
    # Under ZeRO-3 it gathers the rows of trained tokens on CUDA only, and fails on CPU ranks (seen in peft 0.21.2).
    "token_rows": "peft.tuners.trainable_tokens.layer.TrainableTokensLayer._collect_token_weights",
}
"""Name of a patch -> the method of a library that `replaced` replaces, below its reason and the newest version that
needs it. It does no harm once the library has fixed its bug. A test fails without it (tests/models/test_embeddings.py).
"""


def replaced(name: str, replacement: Callable) -> AbstractContextManager:
    """Replace a method of a library inside a `with`."""
    from unittest import mock  # it imports asyncio

    return mock.patch(PATCHES[name], replacement)


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
