"""What a user needs to know when memory runs out in an evaluation."""

import contextlib
from collections.abc import Iterator

from dsft.config.options import EvalConfig
from dsft.errors import UserError, one_line
from dsft.runtime.hardware import peak_memory_bytes
from dsft.runtime.out_of_memory import which_memory
from dsft.units import GiB


@contextlib.contextmanager
def out_of_memory_explained(config: EvalConfig, doing: str) -> Iterator[None]:
    """Turn a failed allocation inside a `with` into one clear error on this rank.

    Args:
        doing: in one word, for the message.

    Raises:
        UserError: with what to ask for instead.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (memory := which_memory(error)) is None:
            raise
        peaks = peak_memory_bytes()
        taken = peaks["gpu" if memory == "GPU" and "gpu" in peaks else "host"] / GiB
        raise UserError(
            [
                f"out of memory in {doing} {config.model} ({one_line(error)}): {taken:.3g} GiB of {memory} memory were"
                f" taken at most; use a smaller batch_tokens (here {config.batch_tokens or 'the default'}), more ranks"
                " with zero 3, or zero 3-offload where a GPU ran out"
            ]
        ) from error
