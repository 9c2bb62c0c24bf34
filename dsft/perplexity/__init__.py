"""Perplexity over windows of text: the same bits on any number of ranks."""
