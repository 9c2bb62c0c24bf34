"""Computes perplexity over windows of text, bit-identical on any number of ranks."""
