"""Continues a prompt with a model, to see what it has learnt; and sets the tokens at which it stops."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, max_new_tokens: int = 40
) -> str:
    """Continue `prompt`, always with the likeliest token."""
    ids = tokenizer(prompt)["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # a tokenizer that closes each text must not close the prompt
    prompt_BT = torch.tensor([ids], device=model.device)
    output_BT = model.generate(
        input_ids=prompt_BT,
        attention_mask=torch.ones_like(prompt_BT),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(output_BT[0, len(ids) :], skip_special_tokens=True)


def stop_at(model: PreTrainedModel, ends: Iterable[int]) -> list[int]:
    """Adds the tokens that `ends` trained answers to those at which `model` stops; returns what was added.

    The generation configuration is saved with the model, and servers read it.
    """
    known = model.generation_config.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    if added := [token_id for token_id in ends if token_id not in known]:
        stops = [*known, *added]
        model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
    return added
