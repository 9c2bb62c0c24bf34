"""Finds out how an architecture computes, by running a small model of it with random weights; no weights are loaded.

    architecture_problems  is it causal?
    row_rules              which rows may share a batch? (runs the loaded model itself)
    try_packing            can packed samples be kept apart, and with which attention?
    attention_like_eager   which GPU attention computes the same as eager attention, without its matrix?
    trains_in_tiles        does the tiled loss (chunked_head.py) have the same value and gradients?

If the architecture's own code fails on small sizes, each answer is the safe one.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dsft.errors import UserError, one_line
from dsft.models.build import DTYPES
from dsft.models.chunked_head import distance, next_tokens, sums_of_nats, tile_loss
from dsft.models.measure import empty_model, max_positions, without_zero_init
from dsft.models.package import from_config
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.runtime.hardware import has_gpu
from dsft.units import IGNORED, padded_width

SMALL_SIZES = {
    128: ("vocab_size", "vocab_size_per_layer_input"),
    64: ("hidden_size", "intermediate_size", "n_embd", "ffn_dim", "word_embed_proj_dim"),
    # The last row: ranks of latent attention.
    32: (
        *("moe_intermediate_size", "shared_expert_intermediate_size"),
        *("q_lora_rank", "kv_lora_rank", "o_lora_rank"),
    ),
    # Head widths; Mamba's states and chunk sizes.
    16: (
        *("head_dim", "rotary_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("mamba_d_state", "state_size", "mamba_chunk_size", "chunk_size"),
    ),
    # Heads of attention, of its indexer, and of linear attention; experts.
    4: (
        *("num_attention_heads", "n_head", "index_n_heads", "index_num_heads"),
        *("linear_num_heads", "linear_num_value_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    ),
    2: ("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"),
    1: ("n_group", "topk_group"),
    None: ("n_inner",),
}
# Of vision and audio towers, which no trial runs.
SMALL_TOWER_SIZES = {
    64: ("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"),
    16: ("head_dim",),
    4: ("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads"),
    2: ("depth", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers"),
    1: ("num_global_layers", "conf_num_hidden_layers"),
}
SMALL = {name: size for size, names in SMALL_SIZES.items() for name in names}
SMALL_TOWER = {name: size for size, names in SMALL_TOWER_SIZES.items() for name in names}
LARGEST_TRIED = 100_000_000  # parameters; far above any architecture whose sizes are all in SMALL


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: operators of a small model are faster than the synchronisation of busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_model(
    config: PreTrainedConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = SMALL["num_attention_heads"],
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Build the architecture of `config` with few, narrow layers, at least one of each kind, and an even number of
    attention `heads`. The trials below pass their `options` to it. Its random weights are always the same, so that plan
    and training get the same answer.

    Raises:
        ValueError: if it would have more than LARGEST_TRIED parameters.
        Exception: any, from an architecture's own code at unexpected sizes.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    for name in small.sub_configs:
        part = getattr(small, name, None)
        is_tower = text is not small or name in ("vision_config", "audio_config")
        if part is not text and isinstance(part, PreTrainedConfig) and is_tower:
            for size, value in SMALL_TOWER.items():
                if type(vars(part).get(size)) is int:
                    setattr(part, size, value)
    # Narrow layers, with key heads in proportion: one, all, or half.
    known_heads = getattr(text, "num_attention_heads", None)
    key_heads = {1: 1, known_heads: heads}.get(getattr(text, "num_key_value_heads", None), heads // 2)
    sizes = SMALL | dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), SMALL["head_dim"] * heads)
    sizes |= {"num_attention_heads": heads, "n_head": heads, "num_key_value_heads": key_heads}
    if hasattr(text, "qk_rope_head_dim"):  # latent attention derives it
        del sizes["head_dim"]
    for name, value in sizes.items():
        if isinstance(vars(text).get(text.attribute_map.get(name, name)), int):
            setattr(text, name, value)
    text.pad_token_id = 0
    # At least two layers, and at least one of each kind.
    kinds = vars(text).get(text.attribute_map.get("layer_types", "layer_types"))
    layers = 2
    if kinds:
        layers = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    text.num_hidden_layers = min(layers, text.num_hidden_layers)
    if kinds:
        text.layer_types = kinds[:layers]
    rope = getattr(text, "rope_parameters", None) or {}
    if sections := rope.get("mrope_section"):
        # A head's angles are split between time, height and width as in the model (Qwen-VL).
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        angles = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        fewer = [section * angles // sum(sections) for section in sections]
        rope["mrope_section"] = [angles - sum(fewer[1:]), *fewer[1:]]
    num_params = empty_model(small, trust_remote_code=trust_remote_code).num_parameters()
    if num_params > LARGEST_TRIED:
        raise ValueError(f"it would have {num_params:,} parameters")
    with without_zero_init(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = from_config(
            small, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
    return model.to(device)


NOT_CAUSAL = (
    "its tokens see later ones, as an encoder's do, so it predicts nothing; a causal language model is needed (some"
    " architectures become one with is_decoder: true in their config)"
)


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """Which rows may share a batch without changing each other's logits."""

    limits: tuple[int, ...] = ()
    """Lengths beyond which the model computes differently, or not at all, ascending. A batch and its padding stay on
    one side of each."""
    alone: bool = False  # each row is a separate batch, without padding
    multiple: int = 1  # every batch is padded to a multiple of this length, even if `alone` or beyond a limit

    def joined(self, other: "RowRules") -> "RowRules":
        limits = {*self.limits, *other.limits}
        return RowRules(limits=tuple(sorted(limits)), alone=self.alone or other.alone)

    def width(self, longest: int) -> int:
        """Return the padded length of a batch, at least one token: a document of one token has no inputs."""
        longest = max(1, int(longest))
        shortest = -(-longest // self.multiple) * self.multiple
        padded = -(-padded_width(longest) // self.multiple) * self.multiple
        crosses_limit = any(longest <= limit < padded for limit in self.limits)
        return shortest if self.alone or crosses_limit else padded

    def share(self, longest: int, length: int) -> bool:
        """Whether a row of `length` may join a batch whose longest row has `longest` tokens."""
        return not self.alone and not any(length <= limit < longest for limit in self.limits)


def length_limits(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the lengths beyond which a model of `config` computes differently, or not at all."""
    # transformers selects the factors of longrope by the longest row of a batch, and scales a dynamic RoPE with it
    # (modeling_rope_utils.py, dynamic_rope_update).
    text = config.get_text_config()
    of_longrope = rope_types(text).get("longrope", {}).get("original_max_position_embeddings")
    limits = {max_positions(text), of_longrope} - {None}
    return tuple(sorted(limits))


def rope_types(text: PreTrainedConfig) -> dict[str, dict]:
    rope = getattr(text, "rope_parameters", None) or {}
    types = {}
    for section in (rope, *rope.values()):
        if isinstance(section, dict) and "rope_type" in section:
            types[section["rope_type"]] = section
    return types


@torch.no_grad()
def row_rules(model: nn.Module) -> RowRules:
    """Find the rules of a loaded model, by a trial. Collective. UserError if its tokens see later ones."""
    later, neighbour = (distributed.max_over_ranks(value) for value in _differences(model))
    # Quantised products may also round the inputs (LLM.int8(): depending on the rows of a batch).
    in_full = next(model.parameters()).dtype == torch.float32 and not getattr(model, "is_quantized", False)
    if later > (1e-4 if in_full else 0.2):
        raise UserError(f"model={model.config.name_or_path or model.config.model_type}: {NOT_CAUSAL}")
    noise = 1e-5 if in_full else 5e-2  # rounding, if experts get other batches
    if alone := max(later, neighbour) > noise:
        say("note: rows of a batch change each other's logits in this architecture; each is a batch of its own")
    return RowRules(limits=length_limits(model.config), alone=alone)


@one_thread()
def architecture_problems(model: str, config: PreTrainedConfig, **options) -> list[str]:
    """Explain why an architecture predicts nothing; empty if it does, or no small model of it can be tried."""
    try:
        later, _ = _differences(small_model(config, **options).eval())
    except Exception:  # any, from an architecture's own code at unexpected sizes
        return []
    return [f"model={model}: {NOT_CAUSAL}"] if later > 1e-5 else []


def random_tokens(model: nn.Module, rows: int, length: int, *, first: int = 0) -> torch.Tensor:
    """Return random ids [rows, length] not below `first`, always the same, on the model's device."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(first, vocab_size, (rows, length), generator=generator)
    return ids_BT.to(model.device)


@torch.no_grad()
def _differences(model: nn.Module) -> tuple[float, float]:
    """Return how much later tokens, and other rows of a batch, change a row's logits, relative to the largest."""
    length = min([16, *length_limits(model.config)])  # the logits of the first half are compared
    ids = random_tokens(model, 2, length)
    later = ids.clone()
    neighbour = ids.clone()
    later[0, length // 2 :] = ids[1, length // 2 :]
    neighbour[1] = ids[1].flip(0)

    def first_half(ids_BT):
        return model(input_ids=ids_BT, use_cache=False).logits[0, : length // 2].double()

    expected = first_half(ids)
    return distance(first_half(later), expected), distance(first_half(neighbour), expected)


# GPU attention that keeps packed samples apart without a T x T matrix, fastest first: flash-attn if it is installed,
# else from the hub by the package kernels (transformers 5.23, modeling_flash_attention_utils.py,
# FLASH_ATTN_KERNEL_FALLBACK); torch's own, which triton compiles.
KERNELS = ("flash_attention_2", "flex_attention")


def try_packing(
    config: PreTrainedConfig,
    *,
    asked: str | None,
    dtype: str,
    kernels: tuple[str, ...] = KERNELS,
    trust_remote_code: bool = False,
) -> tuple[str | None, str | None]:
    """Return (the attention for packed rows, why samples cannot share rows). The attention is the first of `kernels`
    that runs here and keeps samples apart, else the one `asked` for; None for transformers' default. Collective.
    """
    picks = asked is None and has_gpu() and dtype != "float32"
    candidates = [*kernels, None] if picks else [asked]
    for implementation in candidates:
        try_it = partial(
            isolation_problem,
            config,
            attn_implementation=implementation,
            trust_remote_code=trust_remote_code,
        )
        needs_gpu = "flash" in (implementation or "")
        if needs_gpu or (implementation in KERNELS and has_gpu()):
            # Each rank may have other packages, another compiler or no connection.
            problem_here = try_it(device=distributed.device(), dtype=DTYPES[dtype])
            problems = filter(None, distributed.from_all([problem_here]))
            problem = next(problems, None)
        else:
            problem = distributed.on_rank_0(partial(try_it, device="cpu", dtype=torch.float32))
        if problem is None:
            break
    return implementation, problem


@one_thread()
@torch.no_grad()
def isolation_problem(config: PreTrainedConfig, *, dtype: torch.dtype, **options) -> str | None:
    """Explain why packed samples would see each other in this architecture; None if they do not: changed tokens of the
    first sample must not change the logits of the second, which must also be the same if it is alone in the row.
    """
    try:
        model = small_model(config, dtype=dtype, **options).eval()
        ids = random_tokens(model, 1, 48)
        flipped = ids[:, :20].flip(1)
        changed = torch.cat([flipped, ids[:, 20:]], 1)
        flash = "flash" in model.config._attn_implementation

        def second_sample(ids_BT, lengths):
            inputs = positions(lengths, ids.device, flash=flash)
            return model(input_ids=ids_BT, use_cache=False, **inputs).logits[0, -28:].double()

        expected = second_sample(ids, [20, 28])
        leaked = distance(second_sample(changed, [20, 28]), expected)
        differs = distance(expected, second_sample(ids[:, 20:], [28]))
        if model.device.type != "cpu":  # a kernel may have no backward, or not support dropout
            with torch.enable_grad():
                packed = positions([20, 28], ids.device, flash=flash)
                logits = model.train()(input_ids=ids, use_cache=False, **packed).logits
                logits.float().sum().backward()
    except Exception as error:  # any, from an architecture's own code at unexpected sizes or positions
        why = f"{type(error).__name__}: {one_line(error)[:200]}"
        return f"it cannot be tried with a small model of this architecture ({why})"
    # With other tokens experts get other batches, which changes the last bits.
    if not leaked <= (1e-5 if dtype == torch.float32 else 0):
        return f"tokens of one sample change the logits of the next one in the row (by {leaked:.1e} of the largest)"
    if not differs < (1e-4 if dtype == torch.float32 else 5e-2):
        return f"a sample's logits in a row differ from those alone by {differs:.1e} of the largest"
    return None


def attention_like_eager(
    config: PreTrainedConfig,
    *,
    dtype: str,
    kernels: tuple[str, ...] = KERNELS,
    trust_remote_code: bool = False,
) -> str | None:
    """Return the first of `kernels` that computes the same as eager attention on every rank, for a model without sdpa;
    None if none does. Packed rows need more (`try_packing`). Collective.
    """
    options = {"device": distributed.device(), "dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    for kernel in kernels if dtype != "float32" else ():
        if all(distributed.from_all([is_like_eager(config, kernel, **options)])):
            return kernel
    return None


@one_thread()
def is_like_eager(config: PreTrainedConfig, attn_implementation: str, *, dtype: torch.dtype, **options) -> bool:
    try:
        results = []
        for implementation in ("eager", attn_implementation):
            model = small_model(config, dtype=dtype, attn_implementation=implementation, **options).train()
            ids_BT = random_tokens(model, 2, 48)
            results.append(_gradients(model, model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss))
    except Exception:  # any, from an architecture's own code at unexpected sizes
        return False
    # Kernels add up the gradients of grouped keys in different orders.
    return _all_close(*results, noise=1e-5 if dtype == torch.float32 else 0.1)


def positions(lengths: list[int], device: torch.device | str = "cpu", *, flash: bool = False) -> dict[str, Any]:
    """Return the arguments that mark the sequences of one row: position_ids [1, T] that restart at each, from which
    transformers builds its block mask (masking_utils.find_packed_sequence_indices), and for flash attention's varlen
    form the bounds.
    """
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    if not flash:
        return {"position_ids": position_ids}
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {
        "position_ids": position_ids,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@one_thread()
def trains_in_tiles(config: PreTrainedConfig, **options) -> bool:
    """Whether a small model of this architecture has the same loss and gradients in tiles as from its logits, and no
    auxiliary loss, which tiles leave out.
    """
    try:
        model = small_model(config, **options).eval()
        ids_BT = random_tokens(model, 2, 16, first=3)
        targets_BT = next_tokens(ids_BT, IGNORED)
        targets_BT[0, :9] = IGNORED
        outputs = model(input_ids=ids_BT, use_cache=False)
        if torch.is_tensor(outputs.get("aux_loss")):
            return False
        logits_NV = outputs.logits.float().flatten(0, 1)
        plain_loss, _ = sums_of_nats(logits_NV, targets_BT.flatten())
        plain = _gradients(model, plain_loss)
        if not tile_loss(model, rows=7):
            return False
        tiled_loss, _ = model(input_ids=ids_BT, use_cache=False, targets=targets_BT)["sums"]
        tiled = _gradients(model, tiled_loss)
    except Exception:  # any, from an architecture's own code at unexpected sizes
        return False
    return _all_close(tiled, plain, noise=1e-5)


def _gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss and the gradients of the trained parameters: zeros for experts that no token reached."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trained, materialize_grads=True)]


def _all_close(results: list[torch.Tensor], references: list[torch.Tensor], *, noise: float) -> bool:
    """Whether no element of loss and gradients differs by more than `noise` of its tensor's largest. A gradient below a
    thousandth of the largest of all is what cancellation leaves of larger ones, and differs by their rounding.
    """
    least = 1e-3 * max(gradient.abs().max() for gradient in references[1:])
    for result, reference in zip(results, references, strict=True):
        largest = reference.abs().max().clamp(min=least)
        difference = (result - reference).abs().max()
        if not difference <= noise * largest:  # nor if it is NaN
            return False
    return True
