"""Products of float32 in full precision, whatever training does."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 without TF32 inside a `with`, whatever the option `tf32` or the environment says.

    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which images of NVIDIA set, speaks to cuBLAS's own setting.
    """
    settings = (torch.backends, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
