"""`dsft gpu-check`: holds what dsft claims against what the GPUs of this machine do."""
