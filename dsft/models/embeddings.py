"""Rows of embedding and head for tokens that a model was not trained with.

New rows begin at the mean of the others, so that a new token is as likely as an average one. What is rounded up to a
multiple of ROWS_MULTIPLE begins there too. transformers draws random rows, others on each rank.
"""

import contextlib
from collections.abc import Iterable

import torch
from peft import PeftConfig
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.units import plural

ROWS_MULTIPLE = 64
"""Of a grown vocabulary: products of other widths take GPUs up to a third longer."""


def grown_vocab(tokens: Iterable[int], vocab_size: int) -> int:
    """Returns the rows that a model of `vocab_size` has with these tokens."""
    needed = max(tokens, default=0) + 1
    return vocab_size if needed <= vocab_size else -(-needed // ROWS_MULTIPLE) * ROWS_MULTIPLE


def new_rows(tokens: Iterable[int], vocab_size: int) -> list[int]:
    """Returns the rows that begin at the mean: those of new tokens, and all that a model of `vocab_size` had not."""
    return sorted({*tokens, *range(vocab_size, grown_vocab(tokens, vocab_size))})


def tokens_of(adapters: PeftConfig | None) -> list[int]:
    """Returns the tokens whose rows an adapter trains: it needs a base that has these."""
    indices = getattr(adapters, "trainable_token_indices", None) or []
    lists = indices.values() if isinstance(indices, dict) else [indices]
    return sorted({token for each in lists for token in each})


def without_rows(adapter: str, adapters: PeftConfig, tokens: Iterable[int]) -> list[str]:
    """Says that a saved adapter trains no rows for some new tokens; empty where it does."""
    lost = {*tokens} - {*tokens_of(adapters)}
    return [f"add_tokens: {adapter} has no rows for {plural(len(lost), 'token')}; train a new one"] if lost else []


def grow_for(model: PreTrainedModel, adapters: PeftConfig) -> None:
    """Gives a base the rows that its adapter trains and it has not. Collective."""
    vocab_size = model.config.get_text_config().vocab_size
    grow_embeddings(model, [token for token in tokens_of(adapters) if token >= vocab_size])


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """Gives embedding and head rows for `tokens`, where there are new ones; the meta device is enough. Collective."""
    tokens, vocab_size = [*tokens], model.config.get_text_config().vocab_size
    rows = new_rows(tokens, vocab_size)
    if not rows:
        return
    if grown_vocab(tokens, vocab_size) > vocab_size:
        model.resize_token_embeddings(grown_vocab(tokens, vocab_size), mean_resizing=False)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in {p: None for end in ends if end is not None for p in end.parameters()}:  # tied ones once
        gathered = contextlib.nullcontext()
        if is_deepspeed_zero3_enabled() and hasattr(parameter, "ds_id"):
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with gathered:
            if parameter.device.type != "meta":
                is_old = torch.ones(len(parameter), dtype=torch.bool, device=parameter.device)
                is_old[rows] = False
                parameter[rows] = parameter[is_old].float().mean(0).to(parameter.dtype)
