"""Formats of the frozen base under method qlora: the method says that there are adapters, the format how the base lies
in memory.
"""

from dataclasses import dataclass

import torch
from transformers import BitsAndBytesConfig

from dsft.config.options import TrainConfig
from dsft.errors import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a base's linear layers are stored; bitsandbytes leaves embedding and head as they are."""

    format: str
    """As bitsandbytes and the option `quantization` name it."""
    bits: int
    """Of one weight, without scales."""
    scale_bytes: float = 0.0
    """Of one weight, its part of the scales."""

    @property
    def weight_bytes(self) -> float:
        return self.bits / 8 + self.scale_bytes

    def load_config(self, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
        """Say to transformers how weights are quantised while they are loaded."""
        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.format,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
            bnb_4bit_quant_storage=compute_dtype,  # so that DeepSpeed can shard the storage like any other weight
        )


_KNOWN = (
    # Double quantisation: one 8-bit scale per 64 weights, one fp32 scale per 256 of those (QLoRA paper, section 3).
    Quantization(format="nf4", bits=4, scale_bytes=1 / 64 + 4 / (64 * 256)),
    Quantization(format="int8", bits=8),
)
FORMATS = {quantization.format: quantization for quantization in _KNOWN}
"""By the option `quantization`. A new format is one value above."""


def quantization_of(options: TrainConfig) -> Quantization | None:
    """Return the format of the base under these options; None where it is not quantised.

    Raises:
        UserError: where there is no such format.
    """
    if options.method != "qlora":
        return None
    if options.quantization not in FORMATS:
        known = f"{', '.join(FORMATS)}{nearest(options.quantization, FORMATS)}"
        raise UserError([f"quantization={options.quantization}: is none of {known}"])
    return FORMATS[options.quantization]
