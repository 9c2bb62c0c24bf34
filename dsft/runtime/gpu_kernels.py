"""Tells whether this torch has kernels for a GPU."""

import re

from dsft.errors import UserError


def require_kernels(gpu: int) -> None:
    """Refuse a GPU for which this torch was not built: its first kernel would end with a traceback.

    Raises:
        UserError: with the card and what torch has.
    """
    import torch

    names = torch.cuda.get_arch_list() if torch.version.cuda else []
    major, minor = torch.cuda.get_device_capability(gpu)
    if not names or any(_runs(name, 10 * major + minor) for name in names):
        return
    raise UserError(
        [
            f"{torch.cuda.get_device_name(gpu)} has compute capability {major}.{minor}, and torch {torch.__version__}"
            f" is built for {', '.join(names)} alone. Install one that is built for it; cards before Turing need the"
            " one for CUDA 12.6"
        ]
    )


def _runs(name: str, capability: int) -> bool:
    """Whether code for `name` (sm_80, compute_90) runs: binaries within a major version, PTX on any newer card."""
    kind, _, version = name.partition("_")
    least = int(re.match(r"\d+", version)[0])
    return least <= capability and (kind == "compute" or least // 10 == capability // 10)
