"""Bytes and plurals as dsft writes them."""

KiB, MiB, GiB, TiB = 1024, 1024**2, 1024**3, 1024**4
MB, GB, TB = 1000**2, 1000**3, 1000**4
BYTES = {"MB": MB, "GB": GB, "TB": TB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
"""Unit as users may write it -> its bytes."""


def in_gib(num_bytes: float) -> str:
    """Write bytes in GiB with three digits, or as a full number from 1,000 GiB on."""
    return f"{num_bytes / GiB:.3g} GiB" if num_bytes < 1000 * GiB else f"{num_bytes / GiB:,.0f} GiB"


def plural(number: int, noun: str) -> str:
    """Write "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
