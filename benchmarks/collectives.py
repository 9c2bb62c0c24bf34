"""Bytes that one step of training passes to DeepSpeed's collectives, by kind, under ZeRO 0 to 3 and hpZ, in full and
with LoRA: counted on 4 gloo ranks, in trainings of a small Llama in bf16. hpZ's nodes have 2 ranks.

    python benchmarks/collectives.py > benchmarks/results/collectives_cpu.json

A gather counts the whole that each rank gets, a reduction the whole that each rank gives; what a link carries follows
from the algorithm (a ring sends (n - 1) / n of it, twice that in an all-reduce).
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
WAYS = {"0": {}, "1": {}, "1, to one rank": {}, "2": {}, "2, to one rank": {}, "3": {}, "3, hpZ": {}}
KINDS = {  # of deepspeed.comm -> which argument holds the whole
    "all_reduce": ("all-reduce", 0),
    "reduce": ("reduce to one", 0),
    "allgather_fn": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_fn": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}
COLUMNS = {
    "gathered": ("all-gather",),
    "to_all": ("all-reduce",),
    "to_one": ("reduce to one", "reduce-scatter"),
}
LEAST = 4096
"""Bytes of a call: smaller ones are norms and flags."""


def counted(cases: list[dict]) -> list[dict[str, int]]:
    """Bytes by kind in the third of four steps of each training, on this rank."""
    from deepspeed import comm
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups
    from ranks import trained

    calls: Counter[str] = Counter()
    after_steps: list[Counter[str]] = []
    depth = [0]  # some of these functions call others of them

    def counting(name: str, function, place: int):
        def wrapped(*args, **kwargs):
            whole = args[place] if len(args) > place else None
            if whole is not None and not depth[0] and (num_bytes := whole.numel() * whole.itemsize) >= LEAST:
                group = kwargs.get("group")
                ranks = comm.get_world_size(group) if group is not None else comm.get_world_size()
                calls[f"{name}, {ranks} ranks"] += num_bytes
                calls["calls"] += 1
            depth[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1

        return wrapped

    for name, (kind, place) in KINDS.items():
        setattr(comm, name, counting(kind, getattr(comm, name), place))
    step = DeepSpeedEngine.step

    def counted_step(engine, *args, **kwargs):
        result = step(engine, *args, **kwargs)
        after_steps.append(calls.copy())
        return result

    DeepSpeedEngine.step = counted_step
    results = []
    for options in cases:
        calls.clear()
        after_steps.clear()
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # of the training before
        trained(options)
        results.append(dict(after_steps[2] - after_steps[1]))
    return results


def main() -> None:
    from ranks import on_ranks
    from tiny import write_texts, write_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from dsft.config.deepspeed import read_zero_file
    from dsft.config.options import TrainConfig
    from dsft.models.measure import measure_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        widths = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096}
        LlamaForCausalLM(LlamaConfig(**widths, num_attention_heads=4, num_key_value_heads=4)).save_pretrained(model)
        write_tokenizer(model)
        write_texts(model / "texts.jsonl", 60)
        rows, cases = [], []
        for method in ("full", "lora"):
            size = measure_model(TrainConfig(model=str(model), method=method)).size
            for way in WAYS:
                content = read_zero_file(way[0], [])
                zero = content["zero_optimization"]
                if way[0] in "12":
                    zero["use_multi_rank_bucket_allreduce"] = "one rank" not in way
                if way[0] == "3":
                    numbers = dict.fromkeys(("stage3_param_persistence_threshold", "stage3_max_reuse_distance"), 0)
                    zero |= numbers | {"stage3_prefetch_bucket_size": 1000, "reduce_bucket_size": 100_000}
                    zero |= {"zero_hpz_partition_size": 2} if "hpZ" in way else {}
                path = Path(folder, f"{way} {method}.json")
                path.write_text(json.dumps(content))
                rows.append({"zero": way, "method": method, "trained_bytes": 2 * size.num_trainable})
                rows[-1]["weight_bytes"] = 2 * size.num_params
                cases.append(
                    {
                        **{"model": str(model), "zero": str(path)},
                        **{"data": [str(model / "texts.jsonl")], "seq_len": 32, "max_steps": 4, "method": method},
                        **{"dtype": "bfloat16", "output_dir": str(Path(folder, path.stem)), "save_strategy": "no"},
                        **{"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1},
                    }
                )
        counts = on_ranks(4, counted, cases)[0]
    for row, count in zip(rows, counts, strict=True):
        row["calls"] = count.pop("calls")
        row["bytes"] = count
        for column, kinds in COLUMNS.items():
            parts = [
                f"{num_bytes / 2**20:.2f} MiB{f' in {ranks} ranks' if ranks != '4' else ''}"
                for name, num_bytes in sorted(count.items())
                for kind, ranks in [name.removesuffix(" ranks").split(", ")]
                if kind in kinds
            ]
            row[column] = " + ".join(parts) or "-"
    print(json.dumps({"ranks": 4, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
