"""Computes perplexity over windows of text, with the same bits on any number of ranks."""
