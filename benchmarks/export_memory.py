"""Peak memory of `dsft export` and `dsft merge` over the largest file that they write, for a model made here.

    python benchmarks/export_memory.py --params 1e9 --max_shard_size 1GB

Memory is what the process has of its own at most (VmHWM less the mapped files it reads, which the kernel takes back at
will: RssAnon + RssShmem are
sampled every 10 ms), over what it had before the first tensor. Prints JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MEASURED = """
import json, sys, threading, time
import dsft.checkpoints.export
def own():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))
start, peak, stop = own(), 0, False
def watch():
    global peak
    while not stop:
        peak = max(peak, own())
        time.sleep(0.01)
thread = threading.Thread(target=watch)
thread.start()
began = time.perf_counter()
dsft.checkpoints.export.export(sys.argv[1], sys.argv[2], dtype=sys.argv[3], max_shard_size=sys.argv[4])
seconds = time.perf_counter() - began
stop = True
thread.join()
print(json.dumps({"peak_bytes": peak - start, "seconds": seconds}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--max_shard_size", default="1GB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.params)
        rows = []
        for source, dtype in (("model", "auto"), ("model", "float32"), ("lora", "auto"), ("dora", "auto")):
            out = Path(folder, "out")
            result = subprocess.run(
                [sys.executable, "-c", MEASURED, f"{folder}/{source}", out, dtype, options.max_shard_size],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            largest = max(path.stat().st_size for path in out.glob("*.safetensors"))
            whole = sum(path.stat().st_size for path in out.glob("*.safetensors"))
            measured = json.loads(result.stdout.splitlines()[-1])
            rows.append(
                {
                    "source": source,
                    "dtype": dtype,
                    "model_bytes": whole,
                    "largest_file_bytes": largest,
                    **measured,
                    "peak_over_largest_file": round(measured["peak_bytes"] / largest, 2),
                }
            )
            shutil.rmtree(out)
    print(
        json.dumps(
            {"params": options.params, "max_shard_size": options.max_shard_size, "cores": os.cpu_count(), "rows": rows},
            indent=1,
        )
    )


def write(folder: Path, params: float) -> None:
    """A Llama in bf16 of about so many parameters, and two adapters over it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from tiny import write_tokenizer

    layers, vocabulary = 24, 32000
    width = int((params / layers / 12) ** 0.5) // 64 * 64
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=vocabulary,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    for name in ("lora", "dora"):
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear", use_dora=name == "dora")
        ).save_pretrained(folder / name)
        write_tokenizer(folder / name)


if __name__ == "__main__":
    main()
