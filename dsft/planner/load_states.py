"""Memory while a model is loaded and handed to DeepSpeed.

transformers maps checkpoint files into memory (under ZeRO-3 on rank 0 alone): pages that the kernel takes back when it
needs them, so they are not counted; a file system that cannot map them needs the complete checkpoint on top. From there
weights go straight to the GPU.
"""

from dsft.planner.host_memory import process_term
from dsft.planner.limits import ASSUMED
from dsft.planner.terms import Term
from dsft.planner.zero_layout import ZeroLayout, frozen_bytes


def load_terms(layout: ZeroLayout, *, device_bytes: int | None = None) -> list[Term]:
    """List what one device, and one node's host memory, hold before training.

    Args:
        device_bytes: memory of a GPU; None for enough.
    """
    size, weight_bytes, trained = layout.size, layout.weight_bytes, layout.num_trainable
    # Adapters are in full on every rank until DeepSpeed shards them; over a quantised base it also converts them.
    adapter_bytes = 4 if layout.packed else weight_bytes
    adapters = adapter_bytes * trained if size.lora_r else 0
    all_trained = (weight_bytes * trained, f"{weight_bytes} x {trained:,}")
    weights, how = frozen_bytes(layout) if size.lora_r or not trained else all_trained
    terms = [process_term(layout, phase="load")]
    if layout.stage == 3:
        terms += _shards(layout, weights, how, adapters)
    elif layout.packed and layout.has_gpu:
        if trained:
            plain = size.embedding_params + size.head_params  # prepare_model_for_kbit_training makes these fp32
            weights, how = weights + (4 - weight_bytes) * plain, f"{how}, embedding and head in fp32"
        terms.append(_load(layout, "weights", weights, how, place="device"))
    else:
        terms.append(_load(layout, "weights", weights, how, place="device"))
        if layout.stage in (1, 2) and trained:
            terms += _flat_copy(layout, weights + adapters, device_bytes)
    formula, place = f"{adapter_bytes} x {trained:,}", "host" if layout.has_gpu and layout.stage == 3 else "device"
    return terms + ([_load(layout, "adapters", adapters, formula, place=place)] if adapters else [])


def _flat_copy(layout: ZeroLayout, loaded_bytes: int, device_bytes: int | None) -> list[Term]:
    """List what becomes the flat tensor of the trained weights (stage_1_and_2.py): on a GPU it takes what is free, so
    it is not counted; where that is too little, weights and copy are both in host memory.
    """
    flat = layout.weight_bytes * layout.num_trainable
    how = f"{layout.weight_bytes} x {layout.num_trainable:,} (flatten_dense_tensors_aligned)"
    if not layout.has_gpu:
        return [_load(layout, "flat copy of trained weights", flat, how, place="device")]
    outside = ASSUMED.total_bytes(layout.communicators)
    if device_bytes is None or loaded_bytes + flat + outside <= device_bytes:
        return []
    return [_load(layout, "trained weights and their flat copy", 2 * flat, f"2 x {how}", place="host")]


def _shards(layout: ZeroLayout, weights: int, how: str, adapters: int) -> list[Term]:
    """List what zero.Init makes of these bytes of weights: shards, one module after the other."""
    # Of offload to NVMe at most: each shard is written out as it is made.
    on_host = layout.has_gpu and layout.param_device != "none"
    shards, over = weights // layout.world_size, layout.zero["zero_hpz_partition_size"]
    # The module comes before the adapters.
    largest = layout.weight_bytes * layout.size.largest_module_params - (0 if layout.has_gpu else adapters)
    module_formula = f"{layout.weight_bytes} x {layout.size.largest_module_params:,}"
    terms = [
        _load(layout, "shards", shards, f"({how}) / {layout.world_size}", place="host" if on_host else "device"),
        _load(layout, "one module, gathered", max(0, largest), module_formula, place="device"),
    ]
    if over > 1 and layout.param_device == "none":
        terms.append(_load(layout, "secondary partition", weights // over, f"({how}) / {over}", place="device"))
    return terms


def _load(layout: ZeroLayout, name: str, num_bytes: int, formula: str, *, place: str) -> Term:
    ranks = layout.ranks_per_node if place == "host" else 1
    return Term(
        name=name,
        num_bytes=ranks * num_bytes,
        phase="load",
        place=place,
        formula=f"{ranks} ranks x {formula}" if ranks > 1 else formula,
    )
