"""Builds models and tokenizers, measures them, adds adapters, and reads sharded weights."""
