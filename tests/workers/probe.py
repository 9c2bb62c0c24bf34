"""The input whose logits tell whether two models are the same."""

import torch

PROBE = torch.arange(1, 33).view(1, 32)
