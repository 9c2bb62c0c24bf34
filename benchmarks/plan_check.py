"""The planner beside real training: predicted and measured memory and time of a step, over a grid of runs.

    python benchmarks/plan_check.py --grid NAME --out results.json

    cpu      1 and 2 ranks, models of 0.5 B and 1 B parameters, up to 20 GiB
    ranking  which of ZeRO 0-3, with and without checkpointing, is fastest on 2 ranks
    gpu      all GPUs of this machine, 0.5 B to 8 B parameters, under 8 minutes on one H200
    tiny     the same path in two minutes

Each run is `dsft train` with random weights of a real architecture (no download), a few optimizer steps, on the demo
corpus cut into full sequences. Training itself compares: the figures are those of `plan_check` in its run.json. Memory
is not fitted to anything. In the grid `cpu` glibc is told to give freed memory back at once: else it keeps up to a
fifth more than is held under ZeRO-3, whose gathered layers come and go, and resident memory would show that instead
(seen with a model of 0.1 B; a GPU's allocator has its own share, `FRAGMENTATION` in dsft/planner/plans.py). For the
time of a step the machine is calibrated first (`dsft plan --calibrate`). What it does not do: several nodes, hpZ, NVMe,
quantised bases.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoTokenizer, Qwen3Config

from dsft.cli.quickstart import write_demo_data
from dsft.planner.zero_layout import FULL_TRAINING
from dsft.runtime.hardware import GiB

STEPS = 5
# Published shapes of Qwen3 (config.json of the models); the 1b is Llama 3.2 1B's widths. Vocabulary as the demo
# tokenizer's on CPU: its logits would drown the rest there.
SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "0.1b": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "0.5b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
# model, method, zero, activation checkpointing, sequences of a micro batch, tokens of a sequence, ranks (None: one per
# GPU), dtype
GRIDS = {
    "tiny": [
        ("tiny", "full", "1", False, 2, 64, 2, "float32"),
        ("tiny", "full", "3", True, 2, 64, 2, "float32"),
        ("tiny", "lora", "2", False, 2, 64, 1, "float32"),
    ],
    "cpu": [
        ("1b", "full", "0", False, 1, 64, 1, "bfloat16"),
        ("1b", "full", "3", False, 1, 64, 1, "bfloat16"),
        ("1b", "full", "3", True, 1, 64, 2, "bfloat16"),
        ("1b", "full", "3-offload-optimizer", False, 1, 64, 1, "bfloat16"),
        ("1b", "lora", "0", False, 1, 64, 2, "float32"),
        ("1b", "lora", "1", False, 1, 64, 2, "float32"),
        ("1b", "lora", "2", False, 1, 64, 2, "bfloat16"),
        ("1b", "lora", "3", True, 1, 64, 2, "float32"),
        ("0.5b", "full", "1", False, 1, 64, 2, "float32"),
        ("0.5b", "full", "2", True, 1, 64, 2, "float32"),
        ("0.5b", "full", "3", False, 1, 256, 2, "float32"),
        ("0.5b", "full", "2-offload", False, 1, 64, 2, "bfloat16"),
        ("0.5b", "full", "3-offload", False, 1, 64, 2, "float32"),
    ],
    "gpu": [
        ("0.5b", "full", "1", False, 2, 2048),
        ("0.5b", "full", "1", True, 2, 2048),
        ("0.5b", "full", "3", False, 1, 4096),
        ("0.5b", "lora", "1", False, 2, 2048),
        ("1.7b", "full", "1", False, 1, 2048),
        ("1.7b", "full", "2-offload", True, 1, 4096),
        ("1.7b", "full", "3-offload", True, 1, 4096),
        ("4b", "full", "1", True, 1, 2048),
        ("8b", "lora", "1", False, 1, 2048),
        ("8b", "lora", "1", True, 1, 4096),
        ("8b", "lora", "3", True, 1, 4096),
    ],
}
GRIDS["ranking"] = [
    ("0.1b", method, zero, checkpointing, 2, 128, 2, "float32")
    for method in ("full", "lora")
    for zero in ("0", "1", "2", "3")
    for checkpointing in (False, True)
]
GRIDS["gpu"] = [(*case, None, "bfloat16") for case in GRIDS["gpu"]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", choices=list(GRIDS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="no run is started after so many (default: %(default)s)"
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs, from 0")
    parser.add_argument("--verbose", action="store_true", help="show what the runs print")
    return parser.parse_args()


def write_model(folder: Path, name: str, vocab_size: int) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    Qwen3Config(
        **SHAPES[name],
        vocab_size=vocab_size,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(path)
    return path / "config.json"


def train(folder: Path, case: tuple, tokenizer: Path, vocab_size: int, *, verbose: bool, returns_freed: bool) -> dict:
    name, method, zero, checkpointing, micro, seq_len, ranks, dtype = case
    model = write_model(folder, name, vocab_size)
    if method == "lora":
        model = saved_base(folder, name, model)
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "dsft.cli.main",
        "train",
        "--model",
        str(model),
        "--tokenizer",
        str(tokenizer),
        "--data",
        str(folder / "demo/corpus/train.jsonl"),
        "--method",
        method,
        "--zero",
        zero,
        "--activation_checkpointing",
        str(checkpointing).lower(),
        "--per_device_train_batch_size",
        str(micro),
        "--seq_len",
        str(seq_len),
        "--dtype",
        dtype,
        "--max_steps",
        str(STEPS),
        "--save_strategy",
        "no",
        "--output_dir",
        str(output),
        "--memory_check",
        "false",
        *(["--num_gpus", str(ranks)] if ranks else []),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if returns_freed:
        environment |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(command, env=environment, capture_output=not verbose, text=True)
    case_as_dict = dict(
        zip(("model", "method", "zero", "checkpointing", "micro_batch", "seq_len", "ranks", "dtype"), case, strict=True)
    )
    if done.returncode:
        return case_as_dict | {"failed": (done.stdout or "")[-1500:] + (done.stderr or "")[-1500:]}
    run = json.loads((output / "run.json").read_text())
    shutil.rmtree(output)
    return case_as_dict | {"check": run["results"]["plan_check"][FULL_TRAINING]}


def saved_base(folder: Path, name: str, config: Path) -> Path:
    """Random weights in a folder: an adapter needs a base that can be loaded again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / f"{name}-weights"
    if not path.is_dir():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16).save_pretrained(path)
    return path


def print_table(rows: list[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows if "check" in row for name in row["check"]))
    print(
        "\n| model | method | ZeRO | ckpt | batch | ranks | dtype | "
        + " | ".join(f"{name}: predicted / measured" for name in names)
        + " |"
    )
    print("|---" * (7 + len(names)) + "|")
    for row in rows:
        start = (
            f"| {row['model']} | {row['method']} | {row['zero']} | {'on' if row['checkpointing'] else 'off'} |"
            f" {row['micro_batch']} x {row['seq_len']} | {row['ranks'] or 'all GPUs'} | {row['dtype']} | "
        )
        if "check" not in row:
            print(start + " | ".join(["failed"] * len(names)) + " |")
            continue
        cells = []
        for name in names:
            check = row["check"][name]
            scale = 1 if "time" in name else GiB
            cells.append(f"{check['predicted'] / scale:.2f} / {check['measured'] / scale:.2f} ({check['error']:+.0%})")
        print(start + " | ".join(cells) + " |")


def rankings(rows: list[dict]) -> list[dict]:
    """For runs that differ only in ZeRO and checkpointing: how much slower the predicted fastest was than the measured
    fastest.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if "check" in row:
            groups.setdefault(
                tuple(row[name] for name in ("model", "method", "micro_batch", "seq_len", "ranks", "dtype")), []
            ).append(row)
    ranking = []
    for group in groups.values():
        if len(group) < 3:
            continue
        chosen = min(group, key=lambda row: row["check"]["time of a step"]["predicted"])
        fastest = min(group, key=lambda row: row["check"]["time of a step"]["measured"])
        ratio = chosen["check"]["time of a step"]["measured"] / fastest["check"]["time of a step"]["measured"]
        name = "{model} {method}, {micro_batch} x {seq_len}, {ranks} ranks, {dtype}".format(**chosen)
        ranking.append(
            {
                "group": name,
                "predicted_fastest": chosen["zero"],
                "measured_fastest": fastest["zero"],
                "time_over_fastest": ratio,
            }
        )
        print(
            f"\n{name}: predicted fastest ZeRO {chosen['zero']}, measured fastest ZeRO {fastest['zero']}; the predicted"
            f" one took {ratio:.2f} of its time"
        )
    return ranking


def main() -> None:
    args = parse_arguments()
    begun = time.time()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_demo_data(folder / "demo")
        tokenizer = folder / "demo/model"
        vocab_size = 151936 if args.grid == "gpu" else len(AutoTokenizer.from_pretrained(tokenizer))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        first = write_model(folder, GRIDS[args.grid][0][0], vocab_size)
        for dtype in {case[-1] for case in GRIDS[args.grid]}:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "dsft.cli.main",
                    "plan",
                    "--model",
                    str(first),
                    "--dtype",
                    dtype,
                    "--calibrate",
                    "--json",
                ],
                check=True,
                capture_output=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        speeds = json.loads((folder / "cache/dsft/speeds.json").read_text())
        for number, case in enumerate(GRIDS[args.grid]):
            if (args.only is not None and number not in args.only) or time.time() - begun > args.seconds:
                continue
            rows.append(
                train(folder, case, tokenizer, vocab_size, verbose=args.verbose, returns_freed=args.grid == "cpu")
            )
            print(
                f"{time.time() - begun:5.0f} s  {case}: {rows[-1].get('check') or rows[-1]['failed'][-300:]}",
                file=sys.stderr,
            )
    print_table(rows)
    ranking = rankings(rows)
    surroundings = {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "speeds": speeds,
        "versions": {
            package: importlib.metadata.version(package) for package in ("torch", "transformers", "deepspeed", "peft")
        },
        "steps": STEPS,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps(surroundings | {"rankings": ranking, "runs": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
