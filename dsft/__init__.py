"""dsft: DeepSpeed-backed finetuning and distributed perplexity for Hugging Face causal language models.

Importing it touches no GPU, environment variable, logger or network. See README.md.
"""

__version__ = "0.1.0"
