"""What a checkpoint costs: seconds that training stands still, bytes, and memory of a rank while it is written, by
model size, in real trainings on 2 CPU ranks.

    python benchmarks/save_cost.py --params 25e6 120e6 350e6 --zero 2 3

Memory is a rank's own (RssAnon + RssShmem), sampled every 20 ms; "extra" is its peak while a save lies in .saving, over
its peak outside of saves.
Prints JSON. Random weights, a few steps.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, nargs="+", default=[25e6, 120e6, 350e6])
    parser.add_argument("--zero", nargs="+", default=["2", "3"])
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for params in options.params:
            write(Path(folder, f"{params:.0f}"), params)
            for zero in options.zero:
                rows.append(measure(Path(folder), Path(folder, f"{params:.0f}"), zero))
                print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"cores": os.cpu_count(), "ranks": 2, "rows": rows}, indent=1))


def write(folder: Path, params: float) -> None:
    """A Llama's config and tokenizer, and some text."""
    from tiny import write_texts, write_tokenizer
    from transformers import LlamaConfig

    layers = 12
    width = int((params / layers / 12) ** 0.5) // 64 * 64
    LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=4096,
    ).save_pretrained(folder)
    write_tokenizer(folder)
    write_texts(folder / "texts.jsonl", 60)


def measure(folder: Path, model: Path, zero: str) -> dict:
    from ranks import ranks_below

    out = folder / "run"
    command = [
        sys.executable,
        "-m",
        "dsft.cli.main",
        "train",
        "--num_gpus",
        "2",
        "--model",
        model / "config.json",
        "--tokenizer",
        model,
        "--data",
        model / "texts.jsonl",
        "--seq_len",
        "32",
        "--zero",
        zero,
        "--per_device_train_batch_size",
        "1",
        "--max_steps",
        "3",
        "--save_steps",
        "1",
        "--save_total_limit",
        "1",
        "--output_dir",
        out,
        "--overwrite",
        "--disable_tqdm",
        "true",
        "--memory_check",
        "false",
    ]
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=os.environ | {"DS_ACCELERATOR": "cpu"}, stdout=subprocess.DEVNULL
    )
    outside: dict[int, int] = {}
    during: dict[int, int] = {}
    while process.poll() is None:
        saving = any((out / ".saving").glob("*/*"))
        peaks = during if saving else outside
        if saving or not any(out.glob("final/*")):
            for pid in ranks_below(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), own_bytes(pid))
        time.sleep(0.02)
    assert process.returncode == 0
    saves = json.loads((out / "run.json").read_text())["results"]["saves"]
    return {
        "params": written_elements(out / "final"),
        "zero": zero,
        "saves": saves["number"],
        "seconds_each": round(saves["seconds"] / saves["number"], 2),
        "checkpoint_gb": round(saves["largest_bytes"] / 1e9, 3),
        "stalled_seconds_per_gb": round(saves["seconds"] / saves["number"] / (saves["largest_bytes"] / 1e9), 2),
        "rank_peak_gb": round(max(outside.values()) / 1e9, 3),
        "extra_gb_of_each_rank_while_saving": [round((during[pid] - outside[pid]) / 1e9, 3) for pid in sorted(during)],
    }


def written_elements(folder: Path) -> int:
    from dsft.models.weight_files import shapes_in

    return sum(math.prod(shape) for shape in shapes_in(folder).values())


def own_bytes(pid: int) -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    except OSError:
        return 0
    return sum(1024 * int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in lines)


if __name__ == "__main__":
    main()
