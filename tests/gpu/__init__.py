"""Compares what dsft predicts and promises with what the GPUs of this machine do: `scripts/test --gpu`."""
