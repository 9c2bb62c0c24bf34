"""A training run on transformers.Trainer and DeepSpeed."""
