"""Preparation of data, beside TRL and LLaMA-Factory on the same files with the same tokenizer and number of processes;
and how full batches and packed rows are.

    python benchmarks/data_speed.py --text FILE.txt --instructions DIR_OF_JSONL --tokenizer DIR --trl_python
    VENV/bin/python --llamafactory_python VENV/bin/python

`--instructions`: JSONL files with `question` and `answer`. Seconds are from the files on disk to sequences on disk or
in the tool's own data set, without
imports: TRL's load_dataset and SFTTrainer._prepare_dataset with packing "bfd", LLaMA-Factory's get_dataset with
    packing, dsft's check_sources and load_training_data with
packing; each tool with an empty cache. Rounds alternate between the tools. Prints JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--instructions", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--trl_python")
    parser.add_argument("--llamafactory_python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=6, help="of each file, one after the other, each row numbered")
    parser.add_argument("--tool", choices=TOOLS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.tool:
        print(json.dumps(TOOLS[options.tool](options.folder, str(options.tokenizer.resolve()))))
        return
    pythons = {"dsft": sys.executable, "trl": options.trl_python, "llamafactory": options.llamafactory_python}
    results: dict[str, dict[str, list[dict]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for kind, rows in (("text", text_rows(options)), ("instructions", instruction_rows(options))):
            folder = Path(work, kind)
            folder.mkdir()
            (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            for _ in range(options.rounds):
                for tool, python in pythons.items():
                    if python:
                        results.setdefault(kind, {}).setdefault(tool, []).append(
                            run(tool, python, folder, options.tokenizer)
                        )
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "processor": platform.machine(),
                "seq_len": SEQ_LEN,
                "fullness": fullness(options),
                "preparation": {
                    kind: {tool: summary(rounds) for tool, rounds in tools.items()} for kind, tools in results.items()
                },
            },
            indent=1,
        )
    )


def text_rows(options: argparse.Namespace) -> list[dict]:
    """The file's paragraphs, about 10 lines each."""
    lines = options.text.read_text(encoding="utf-8").splitlines(keepends=True)
    return [
        {"text": f"{copy} {start} " + "".join(lines[start : start + 10])}
        for copy in range(options.copies)
        for start in range(0, len(lines), 10)
    ]


def instruction_rows(options: argparse.Namespace) -> list[dict]:
    rows = [
        json.loads(line)
        for path in sorted(options.instructions.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [
        {"prompt": f"{copy} {row['question']}\n", "completion": row["answer"]}
        for copy in range(options.copies)
        for row in rows
    ]


def run(tool: str, python: str, folder: Path, tokenizer: Path) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "HF_HOME": cache,
            "HF_DATASETS_CACHE": f"{cache}/datasets",
            "XDG_CACHE_HOME": cache,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "DISABLE_VERSION_CHECK": "1",
        }
        result = subprocess.run(
            [python, __file__, "--tool", tool, "--folder", str(folder), "--tokenizer", str(tokenizer)],
            env=environment,
            capture_output=True,
            text=True,
        )
    if result.returncode:
        raise SystemExit(f"{tool}: {result.stderr[-3000:]}")
    measured = json.loads(result.stdout.splitlines()[-1])
    print(tool, folder.name, measured, file=sys.stderr, flush=True)
    return measured


def summary(rounds: list[dict]) -> dict:
    seconds = statistics.median(run["seconds"] for run in rounds)
    tokens = rounds[0]["tokens"]
    return {
        "version": rounds[0]["version"],
        "tokens": tokens,
        "seconds": [round(run["seconds"], 2) for run in rounds],
        "tokens_per_second": round(tokens / seconds),
    }


def of_dsft(folder: Path, tokenizer: str) -> dict:
    sys.path[0] = str(ROOT)
    from dsft import __version__
    from dsft.config.options import TrainConfig
    from dsft.data.training_data import check_sources, load_training_data
    from dsft.models.tokenizer import load_tokenizer

    config = TrainConfig(tokenizer=tokenizer, data=[str(folder / "data.jsonl")], seq_len=SEQ_LEN, packing=True)
    loaded = load_tokenizer(config)
    start = time.perf_counter()
    data = load_training_data(
        config,
        check_sources(config.data, config, loaded, key="data", problems=[]),
        [],
        loaded,
    )
    return {"seconds": time.perf_counter() - start, "tokens": data.counts["tokens"], "version": __version__}


def of_trl(folder: Path, tokenizer: str) -> dict:
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.pad_token = loaded.eos_token
    config = trl.SFTConfig(
        output_dir=str(folder / "out"),
        max_length=SEQ_LEN,
        packing=False,
        dataset_num_proc=os.cpu_count(),
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=len(loaded)
        )
    )
    few = load_dataset("json", data_files=str(folder / "data.jsonl"), split="train[:8]")
    trainer = trl.SFTTrainer(model=model, args=config, train_dataset=few, processing_class=loaded)
    config.packing_strategy = "bfd"
    start = time.perf_counter()
    rows = load_dataset(
        "json", data_files=str(folder / "data.jsonl"), split="train", cache_dir=str(folder / f"again-{os.getpid()}")
    )
    made = trainer._prepare_dataset(rows, loaded, config, True, None, "train")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(map(len, made["input_ids"])), "version": trl.__version__}


def of_llamafactory(folder: Path, tokenizer: str) -> dict:
    import llamafactory.extras.env as env
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from transformers import AutoTokenizer

    is_text = folder.name == "text"
    columns = {"prompt": "text"} if is_text else {"prompt": "prompt", "response": "completion"}
    (folder / "dataset_info.json").write_text(json.dumps({"bench": {"file_name": "data.jsonl", "columns": columns}}))
    arguments = get_train_args(
        {
            "model_name_or_path": tokenizer,
            "stage": "pt" if is_text else "sft",
            "do_train": True,
            "dataset_dir": str(folder),
            "dataset": "bench",
            "template": "default",
            "cutoff_len": SEQ_LEN,
            "packing": True,
            "preprocessing_num_workers": os.cpu_count(),
            "output_dir": str(folder / "out-lf"),
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        }
    )
    model_arguments, data_arguments, training_arguments = arguments[:3]
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    template = get_template_and_fix_tokenizer(loaded, data_arguments)
    start = time.perf_counter()
    made = get_dataset(
        template,
        model_arguments,
        data_arguments,
        training_arguments,
        stage="pt" if is_text else "sft",
        tokenizer=loaded,
    )["train_dataset"]
    seconds = time.perf_counter() - start
    pad = loaded.pad_token_id
    return {
        "seconds": seconds,
        "tokens": (
            sum(sum(mask != 0 for mask in row) for row in made["attention_mask"])
            if pad is not None
            else sum(map(len, made["input_ids"]))
        ),
        "version": env.VERSION,
    }


TOOLS = {"dsft": of_dsft, "trl": of_trl, "llamafactory": of_llamafactory}


def fullness(options: argparse.Namespace) -> list[dict]:
    """Fill rate of packed rows of the instruction sets, by file and length of a row."""
    sys.path[0] = str(ROOT)
    from dsft.config.options import TrainConfig
    from dsft.data.training_data import check_sources, load_training_data
    from dsft.models.tokenizer import load_tokenizer

    rates = []
    for path in sorted(options.instructions.glob("*.jsonl")):
        for seq_len in (512, 1024, 2048, 4096):
            with tempfile.TemporaryDirectory() as cache:
                config = TrainConfig(
                    tokenizer=str(options.tokenizer),
                    data=[str(path)],
                    seq_len=seq_len,
                    data_cache=cache,
                    prompt_template="{question}\n",
                    completion_template="{answer}",
                    packing=True,
                )
                tokenizer = load_tokenizer(config)
                sources = check_sources(config.data, config, tokenizer, key="data", problems=[])
                counts = load_training_data(config, sources, [], tokenizer).counts
                rates.append(
                    {
                        "file": path.name,
                        "seq_len": seq_len,
                        "samples": counts["sequences"],
                        "tokens": counts["tokens"],
                        "packed_rows": counts["packed_rows"],
                        "fill_rate": counts["fill_rate"],
                    }
                )
    return rates


if __name__ == "__main__":
    main()
