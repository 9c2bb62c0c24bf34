"""Every function of a library that dsft replaces, and why (tests/without_patches.py has the test that fails without).
No other module assigns into a library. If a library has fixed its bug, the replacement does no harm.
"""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

PATCHES = {
    # Under ZeRO-3 it gathers the rows of trained tokens on CUDA only, and fails on CPU ranks (seen in peft 0.21.2).
    "token_rows": "peft.tuners.trainable_tokens.layer.TrainableTokensLayer._collect_token_weights",
}
"""Name of a patch -> the replaced `module.Class.method`, below its reason and the newest version that needs it."""

WITHOUT = "DSFT_WITHOUT_PATCH"
"""Variable with the name of a patch to leave out, to show that it is needed (tests/without_patches.py)."""


def replaced(name: str, replacement: Callable[..., Any]) -> AbstractContextManager:
    """Replace a method of a library inside a `with`."""
    patch = mock.patch(PATCHES[name], replacement)
    return contextlib.nullcontext() if os.environ.get(WITHOUT) == name else patch
