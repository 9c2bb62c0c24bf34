"""Speed of training: dsft beside transformers' Trainer, TRL's SFTTrainer and a bare loop, on CPU ranks.

    python benchmarks/train.py --out train.json
    benchmarks/trl_environment.sh trl_env
    python benchmarks/train.py --trl_python trl_env/bin/python --out train.json

Every subject trains the same Llama from the same weights, on the same token ids in the same order, with as many
sequences per step, in the same precision, by AdamW with a constant rate and gradients clipped at 1:

- dsft: `dsft.train`, which decides what it decides for a user: in bf16 weights of bf16 with fp32 masters, where the
  others on one rank have fp32 weights and autocast;
- trainer: `transformers.Trainer` as run_clm sets it up; under ZeRO-3 with DeepSpeed's own bucket sizes;
- trl: `SFTTrainer`, in an environment of its own; under ZeRO-3 as the Trainer;
- bare: a loop of a dozen lines; under ZeRO-3 `deepspeed.initialize`, with its own bucket sizes.

Subjects alternate, each in new processes with one thread per rank. Speed is tokens without padding per CPU-second of
all ranks and their children, which a busy machine disturbs little, and per second. The first WARM_STEPS do not count.
"first step" is the CPU time of all ranks from the start of Python to the end of the first step. Peak memory is the
largest resident set of one rank. Losses are means over LOG_STEPS.

What it does not do: GPUs, several nodes, tokenising (every subject finds its tokens ready).
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SEQ_LEN, BATCH = 256, 4
STEPS, WARM_STEPS, LOG_STEPS = 25, 5, 5
LEARNING_RATE, SEED = 1e-3, 42
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: what is trained."""

    bf16: bool = False
    lora: bool = False
    ranks: int = 1
    instructions: bool = False
    packing: bool = False

    @property
    def batch(self) -> int:
        """Sequences of one step on one rank."""
        return BATCH * (4 if self.instructions and not self.packing else 1)


ROWS = {
    "fp32": Row(),
    "bf16": Row(bf16=True),
    "lora": Row(lora=True),
    "zero3": Row(ranks=2),
    "zero3_bf16": Row(ranks=2, bf16=True),
    "zero3_lora": Row(ranks=2, lora=True),
    "padded": Row(instructions=True),
    "packed": Row(instructions=True, packing=True),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--subjects", nargs="+", default=["dsft", "trainer", "trl", "bare"], choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--trl_python", help="Python of an environment with TRL; without, TRL is left out")
    parser.add_argument("--machine", default="quiet machine", help="for the results: quiet or loaded")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--verbose", action="store_true", help="let the subjects write to the screen")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- what all subjects get ------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Writes model, data and, as dsft makes them, the token ids of every step."""
    from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

    from dsft.cli.quickstart import write_demo_data
    from dsft.config.options import TrainConfig
    from dsft.config.reader import make_config
    from dsft.data.batches import EpochSampler, PaddedToFullSteps
    from dsft.data.training_data import load_training_data
    from dsft.run_setup.resolve import check_run
    from dsft.runtime.hardware import this_machine

    write_demo_data(folder / "demo")
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    for file in (folder / "demo" / "model").glob("tokenizer*"):
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    for name in ("corpus", "instructions"):
        source = folder / "demo" / name / "train.jsonl"
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:1500]), encoding="utf-8")
        problems: list[str] = []
        options = make_config(TrainConfig, dsft_options(folder, name=name, output_dir=folder / "unused"), problems)
        checked = check_run(options, this_machine(ranks_per_node=1), problems)
        for pack in (False, True) if name == "instructions" else (False,):
            data = load_training_data(
                checked.options, list(checked.data), [], checked.tokenizer, pack=pack, flash=False, limits=()
            )
            order = range(STEPS * 2 * 4 * BATCH)
            if pack:  # dsft draws the order of packed rows itself
                order = list(EpochSampler(PaddedToFullSteps(data.items, BATCH), seed=SEED, step=lambda: 0))
                order = order[: STEPS * BATCH]
            items = [data.items[i] for i in order]
            rows = [joined(item) if pack else {key: values.tolist() for key, values in item.items()} for item in items]
            (folder / f"{'packed' if pack else name}_rows.json").write_text(json.dumps(rows), encoding="utf-8")


def joined(sequences: list[dict]) -> dict:
    """Lays the sequences of a packed row end to end."""
    row = {key: [value for each in sequences for value in each[key].tolist()] for key in ("input_ids", "labels")}
    return row | {"position_ids": [place for each in sequences for place in range(len(each["input_ids"]))]}


def dsft_options(folder: Path, *, name: str, output_dir: Path) -> dict:
    return {
        "model": str(folder / "model"),
        "data": [str(folder / f"{name}.jsonl")],
        "seq_len": SEQ_LEN,
        "data_cache": str(folder / "cache"),
        "output_dir": str(output_dir),
        "overwrite": True,
        **common_arguments(),
    }


def common_arguments() -> dict:
    return {
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_steps": LOG_STEPS,
        "logging_first_step": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": SEED,
    }


def read_rows(folder: Path, row: Row, *, packed: bool = False) -> list[dict]:
    """Reads the rows of all steps; those that dsft packed on request, since TRL packs its own."""
    name = "packed" if packed else "instructions" if row.instructions else "corpus"
    return json.loads((folder / f"{name}_rows.json").read_text(encoding="utf-8"))


def collate(rows: list[dict]) -> dict:
    """Pads on the right to a multiple of 8, as the collators of every peer do; full windows get no mask."""
    import torch

    longest = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
    blanks = [longest - len(row["input_ids"]) for row in rows]
    batch = {
        "input_ids": [row["input_ids"] + [0] * blank for row, blank in zip(rows, blanks, strict=True)],
        "labels": [row["labels"] + [-100] * blank for row, blank in zip(rows, blanks, strict=True)],
    }
    if "position_ids" in rows[0]:  # packed: where they restart, transformers' models see no further back
        positions = [[*row["position_ids"], *range(blank)] for row, blank in zip(rows, blanks, strict=True)]
        batch["position_ids"] = positions
    else:
        batch["attention_mask"] = [[1] * (longest - blank) + [0] * blank for blank in blanks]
    return {key: torch.tensor(values) for key, values in batch.items()}


# --- measuring ------------------------------------------------------------------------------------------------------


class Meter:
    """Takes the time after each step, and writes what was measured when training ends."""

    def __init__(self, folder: Path):
        self.path, self.marks = folder / f"rank{os.environ.get('RANK', '0')}.json", []

    def step(self, tokens_seen: int = 0) -> None:
        self.marks.append({"cpu": cpu_seconds(), "wall": time.perf_counter(), "tokens": tokens_seen})

    def end(self, losses: list[float]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.path.write_text(json.dumps({"marks": self.marks, "losses": losses, "peak_bytes": peak}))


def cpu_seconds() -> float:
    """Of this process and all processes that it has started."""
    import psutil

    seconds = time.process_time() + sum(os.times()[2:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            seconds += sum(child.cpu_times()[:2])
    return seconds


def meter_trainers(meter: Meter) -> None:
    """Has every Trainer of this process call `meter`."""
    from transformers import TrainerCallback, trainer

    class Metered(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            meter.step(state.num_input_tokens_seen)

        def on_train_end(self, args, state, control, **kwargs):
            meter.end([entry["loss"] for entry in state.log_history if "loss" in entry])

    trainer.DEFAULT_CALLBACKS.append(Metered)


# --- subjects -------------------------------------------------------------------------------------------------------


def dsft_subject(row: Row, folder: Path, meter: Meter) -> None:
    from dsft.runtime import quick_imports
    from dsft.train import main

    with quick_imports():  # as main does
        meter_trainers(meter)
    name = "instructions" if row.instructions else "corpus"
    options = dsft_options(folder, name=name, output_dir=meter.path.parent / "run") | {
        "per_device_train_batch_size": row.batch,
        "dtype": "bfloat16" if row.bf16 else "float32",
        "packing": row.packing,
        "zero": "3" if row.ranks > 1 else "auto",
    }
    if row.lora:
        options |= {"method": "lora", **{f"lora_{key.removeprefix('lora_')}": value for key, value in LORA.items()}}
    words = []
    for key, value in options.items():
        words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    main([word.lower() if word in ("True", "False") else word for word in words])


def trainer_subject(row: Row, folder: Path, meter: Meter) -> None:
    meter_trainers(meter)
    from transformers import Trainer, TrainingArguments

    if row.ranks > 1:
        import deepspeed

        deepspeed.init_distributed(verbose=False)
    args = TrainingArguments(**trainer_arguments(row, meter), deepspeed=deepspeed_config(row) or None)
    trainer = Trainer(
        model=load_model(row, folder),
        args=args,
        train_dataset=read_rows(folder, row, packed=row.packing),
        data_collator=collate,
    )
    trainer.train()


def trainer_arguments(row: Row, meter: Meter) -> dict:
    return common_arguments() | {
        "output_dir": str(meter.path.parent / "run"),
        "per_device_train_batch_size": row.batch,
        "bf16": row.bf16,
        "use_cpu": True,
        "report_to": "none",
    }


def deepspeed_config(row: Row) -> dict:
    if row.ranks == 1:
        return {}
    return {
        "train_micro_batch_size_per_gpu": row.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": row.bf16},
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3},
    }


def load_model(row: Row, folder: Path):
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    # Trainer's bf16 is autocast over fp32 weights; DeepSpeed's has bf16 weights and fp32 masters.
    dtype = torch.bfloat16 if row.bf16 and row.ranks > 1 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    if row.lora:
        from peft import LoraConfig, get_peft_model

        set_seed(SEED)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA))
    return model


def trl_subject(row: Row, folder: Path, meter: Meter) -> None:
    meter_trainers(meter)
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    if row.ranks > 1:
        import deepspeed

        deepspeed.init_distributed(verbose=False)
    rows = read_rows(folder, row)
    dataset = {"input_ids": [r["input_ids"] for r in rows]}
    if row.instructions:
        dataset["completion_mask"] = [[int(label != -100) for label in r["labels"]] for r in rows]
    args = SFTConfig(
        **trainer_arguments(row, meter),
        deepspeed=deepspeed_config(row) or None,
        max_length=SEQ_LEN,
        packing=row.packing,
        completion_only_loss=row.instructions,
        pad_to_multiple_of=8,
        gradient_checkpointing=False,
        include_num_input_tokens_seen="non_padding" if row.packing else "no",
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA) if row.lora else None
    model = load_model(dataclasses.replace(row, lora=False), folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(dataset),
        processing_class=tokenizer,
        peft_config=adapters,
    ).train()


def bare_subject(row: Row, folder: Path, meter: Meter) -> None:
    import torch
    from torch.nn.utils import clip_grad_norm_

    rank, rows = int(os.environ.get("RANK", "0")), read_rows(folder, row, packed=row.packing)
    if row.ranks > 1:
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed(verbose=False)
        config = deepspeed_config(row)
        registered = HfDeepSpeedConfig(config)
    model = load_model(row, folder).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    if row.ranks > 1:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        del registered
    losses = []
    for step in range(STEPS):
        start = (step * row.ranks + rank) * row.batch
        batch = collate(rows[start : start + row.batch])
        if row.ranks > 1:
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=row.bf16):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
            clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        meter.step()
    means = torch.tensor([statistics.mean(losses[i : i + LOG_STEPS]) for i in range(0, STEPS, LOG_STEPS)])
    if row.ranks > 1:
        torch.distributed.all_reduce(means)
    meter.end((means / row.ranks).tolist())


SUBJECTS = {"dsft": dsft_subject, "trainer": trainer_subject, "trl": trl_subject, "bare": bare_subject}


# --- runs and tables ------------------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace, subject: str, name: str, folder: Path) -> dict:
    """One training in processes of its own."""
    row = ROWS[name]
    python = args.trl_python if subject == "trl" else sys.executable
    with tempfile.TemporaryDirectory(dir=folder) as out:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.ranks)]
        words = [__file__, "--one", subject, "--rows", name, "--folder", str(folder), "--out", out]
        command = [python, *(launcher if row.ranks > 1 else []), *words]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=not args.verbose, text=True)
        results = [json.loads(path.read_text()) for path in sorted(Path(out).glob("rank*.json"))]
        if done.returncode or len(results) != row.ranks:
            raise RuntimeError(f"{subject}, {name}: exit code {done.returncode}\n{(done.stderr or '')[-3000:]}")
    return {"subject": subject, "row": name} | summarise_one(results, row, read_rows(folder, row, packed=row.packing))


def summarise_one(results: list[dict], row: Row, rows: list[dict]) -> dict:
    first, last = ([result["marks"][i] for result in results] for i in (WARM_STEPS - 1, STEPS - 1))
    per_step = row.ranks * row.batch
    tokens = sum(len(r["input_ids"]) for r in rows[WARM_STEPS * per_step : STEPS * per_step])
    if row.packing and last[0]["tokens"]:  # TRL packs other rows
        tokens = last[0]["tokens"] - first[0]["tokens"]
    cpu = sum(b["cpu"] - a["cpu"] for a, b in zip(first, last, strict=True))
    return {
        "tokens_per_cpu_second": tokens / cpu,
        "tokens_per_second": tokens / (last[0]["wall"] - first[0]["wall"]),
        "first_step_cpu_seconds": sum(result["marks"][0]["cpu"] for result in results),
        "peak_bytes": max(result["peak_bytes"] for result in results),
        "losses": results[0]["losses"],
    }


def table(runs: list[dict]) -> list[dict]:
    """One line for each row and subject: medians over the rounds, and dsft's ratio within each round."""
    lines = []
    for name in dict.fromkeys(run["row"] for run in runs):
        of_row = [run for run in runs if run["row"] == name]
        dsft = [run for run in of_row if run["subject"] == "dsft"]
        for subject in dict.fromkeys(run["subject"] for run in of_row):
            of_subject = [run for run in of_row if run["subject"] == subject]
            figures = ("tokens_per_cpu_second", "tokens_per_second", "first_step_cpu_seconds", "peak_bytes")
            line = {"row": name, "subject": subject}
            line |= {figure: statistics.median(run[figure] for run in of_subject) for figure in figures}
            if len(dsft) == len(of_subject):
                ratios = [
                    a["tokens_per_cpu_second"] / b["tokens_per_cpu_second"]
                    for a, b in zip(dsft, of_subject, strict=True)
                ]
                line["dsft_over_this"] = statistics.median(ratios)
            lines.append(line | {"losses": of_subject[0]["losses"]})
    return lines


def print_markdown(lines: list[dict]) -> None:
    print("| row | subject | tokens/CPU-s | tokens/s | CPU-s to first step | peak MiB | dsft / this | losses |")
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        print(
            f"| {line['row']} | {line['subject']} | {line['tokens_per_cpu_second']:,.0f} |"
            f" {line['tokens_per_second']:,.0f} | {line['first_step_cpu_seconds']:.1f} |"
            f" {line['peak_bytes'] / 2**20:,.0f} | {line.get('dsft_over_this', float('nan')):.3f} |"
            f" {' '.join(f'{loss:.3f}' for loss in line['losses'])} |"
        )


def surroundings(args: argparse.Namespace) -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("torch", "transformers", "deepspeed", "accelerate", "peft")
    versions = {name: importlib.metadata.version(name) for name in names}
    if args.trl_python:
        version = "import importlib.metadata; print(importlib.metadata.version('trl'))"
        versions["trl"] = subprocess.check_output([args.trl_python, "-c", version], text=True).strip()
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
        "machine": args.machine,
        "python": platform.python_version(),
        "versions": versions,
        "steps": STEPS,
        "warm_steps": WARM_STEPS,
        "seq_len": SEQ_LEN,
        "rounds": args.rounds,
    }


def main() -> None:
    args = parse_arguments()
    if args.one:
        SUBJECTS[args.one](ROWS[args.rows[0]], args.folder, Meter(args.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        runs = []
        for number in range(args.rounds):
            for name in args.rows:
                for subject in args.subjects:
                    if subject != "trl" or args.trl_python:
                        try:
                            runs.append({"round": number, **run_one(args, subject, name, Path(folder))})
                        except RuntimeError as error:  # the others' figures stay
                            print(error, file=sys.stderr, flush=True)
                            continue
                        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    lines = table(runs)
    print_markdown(lines)
    if args.out:
        results = {**surroundings(args), "table": lines, "runs": runs}
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
