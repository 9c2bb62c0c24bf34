"""Speed of training: dsft beside transformers' Trainer, TRL's SFTTrainer and a bare loop, on CPU ranks or one GPU.

    python benchmarks/train.py --out train.json
    benchmarks/trl_environment.sh trl_env
    python benchmarks/train.py --trl_python trl_env/bin/python --out train.json
    python benchmarks/train.py --rows gpu_lora gpu_full --trl_python trl_env/bin/python --out train_gpu.json

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

Rows of a GPU have published shapes with random weights in bf16 (full finetuning beside dsft: fp32 weights and
autocast), and peak memory is what torch allocated. dsft, the Trainer and TRL run there with Liger's kernels too, and
dsft with `torch_compile`. No subject checkpoints activations.

What it does not do: several GPUs, several nodes, tokenising (every subject finds its tokens ready).
"""

import argparse
import contextlib
import dataclasses
import functools
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SEQ_LEN, BATCH = 256, 4
GPU_SEQ_LEN = 4096
STEPS, WARM_STEPS, LOG_STEPS = 25, 5, 5
GPU_STEPS = 15
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
    shape: str = ""
    """A published model of `USUAL_MODELS`, on a GPU; without, a small Llama on CPU ranks."""
    sequences: int = BATCH

    @property
    def batch(self) -> int:
        """Sequences of one step on one rank."""
        return self.sequences * (4 if self.instructions and not self.packing else 1)

    @property
    def seq_len(self) -> int:
        return GPU_SEQ_LEN if self.shape else SEQ_LEN

    @property
    def steps(self) -> int:
        return GPU_STEPS if self.shape else STEPS

    @property
    def model(self) -> str:
        """Its folder's name."""
        return self.shape.rpartition("/")[2] or "model"


ROWS = {
    "fp32": Row(),
    "bf16": Row(bf16=True),
    "lora": Row(lora=True),
    "zero3": Row(ranks=2),
    "zero3_bf16": Row(ranks=2, bf16=True),
    "zero3_lora": Row(ranks=2, lora=True),
    "padded": Row(instructions=True),
    "packed": Row(instructions=True, packing=True),
    "gpu_lora": Row(bf16=True, lora=True, shape="meta-llama/Llama-3.1-8B", sequences=2),
    "gpu_full": Row(bf16=True, shape="meta-llama/Llama-3.2-1B", sequences=4),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all of CPU ranks")
    parser.add_argument("--subjects", nargs="+", choices=[*SUBJECTS, *GPU_SUBJECTS], help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--trl_python", help="Python of an environment with TRL; without, TRL is left out")
    parser.add_argument("--machine", default="quiet machine", help="for the results: quiet or loaded")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step on a GPU; not for times")
    parser.add_argument("--verbose", action="store_true", help="let the subjects write to the screen")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- what all subjects get ------------------------------------------------------------------------------------------


def prepare(folder: Path, rows: list[Row]) -> None:
    """Writes models, data and, as dsft makes them, the token ids of every step."""
    import torch
    from python_docs import write_python_docs
    from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

    from dsft.config.options import TrainConfig
    from dsft.config.reader import make_config
    from dsft.data.epoch import EpochSampler
    from dsft.data.training_data import load_training_data
    from dsft.models.measure import usual_config
    from dsft.runtime.hardware import this_machine
    from dsft.setup.decide import check_run

    write_python_docs(folder / "demo")
    small = LlamaConfig(
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
    for row in {row.model: row for row in rows}.values():
        set_seed(SEED)
        with torch.device("cuda" if row.shape else "cpu"):
            config, dtype = (usual_config(row.shape), torch.bfloat16) if row.shape else (small, torch.float32)
            AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder / row.model)
        for file in (folder / "demo" / "model").glob("tokenizer*"):
            (folder / row.model / file.name).write_bytes(file.read_bytes())
    for name in ("corpus", "instructions"):
        source = folder / "demo" / name / "train.jsonl"
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:1500]), encoding="utf-8")
    for row in {row_file(row, packed=row.packing): row for row in rows}.values():
        problems: list[str] = []
        options = make_config(TrainConfig, dsft_options(row, folder, output_dir=folder / "unused"), problems)
        checked = check_run(options, this_machine(ranks_per_node=1), problems)
        for pack in {False, row.packing}:
            packed = dataclasses.replace(checked.options, packing=pack)
            data = load_training_data(packed, list(checked.data), [], checked.tokenizer)
            order = range(row.steps * (row.batch if row.shape else 2 * 4 * BATCH))
            if pack:  # dsft draws the order of packed rows itself
                order = list(EpochSampler(data.items, per_step=BATCH, seed=SEED, step=lambda: 0))
                order = order[: STEPS * BATCH]
            items = [data.items[i] for i in order]
            made = map(joined, items)
            if not pack:
                made = ({key: values.tolist() for key, values in each.items()} for (each,) in items)
            (folder / row_file(row, packed=pack)).write_text(json.dumps([*made]), encoding="utf-8")


def joined(sequences: list[dict]) -> dict:
    """Lays the sequences of a packed row end to end."""
    row = {key: [value for each in sequences for value in each[key].tolist()] for key in ("input_ids", "labels")}
    return row | {"position_ids": [place for each in sequences for place in range(len(each["input_ids"]))]}


def dsft_options(row: Row, folder: Path, *, output_dir: Path) -> dict:
    return {
        "model": str(folder / row.model),
        "data": [str(folder / ("instructions.jsonl" if row.instructions else "corpus.jsonl"))],
        "seq_len": row.seq_len,
        "data_cache": str(folder / "cache"),
        "output_dir": str(output_dir),
        "overwrite": True,
        **common_arguments(row),
    }


def common_arguments(row: Row) -> dict:
    return {
        "max_steps": row.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_steps": LOG_STEPS,
        "logging_first_step": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": SEED,
    }


def row_file(row: Row, *, packed: bool) -> str:
    name = "packed" if packed else "instructions" if row.instructions else "corpus"
    return f"{name}_{row.seq_len}_{row.model}.json"


def read_rows(folder: Path, row: Row, *, packed: bool = False) -> list[dict]:
    """Reads the rows of all steps; those that dsft packed on request, since TRL packs its own."""
    return json.loads((folder / row_file(row, packed=packed)).read_text(encoding="utf-8"))


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

    def __init__(self, folder: Path, row: Row, *, profile: bool):
        self.path, self.marks = folder / f"rank{os.environ.get('RANK', '0')}.json", []
        self.has_gpu, self.profile_at, self.profiler = bool(row.shape), WARM_STEPS if profile else -1, None

    def step(self, tokens_seen: int = 0) -> None:
        import torch

        if self.has_gpu:
            torch.cuda.synchronize()
        self.marks.append({"cpu": cpu_seconds(), "wall": time.perf_counter(), "tokens": tokens_seen})
        if len(self.marks) == self.profile_at:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        elif self.profiler:
            self.profiler.stop()
            kernels = self.profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40)
            self.path.with_name("profile.txt").write_text(kernels, encoding="utf-8")
            self.profiler = None

    def end(self, losses: list[float]) -> None:
        import torch

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.has_gpu:
            peak = torch.cuda.max_memory_allocated()
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


def dsft_subject(row: Row, folder: Path, meter: Meter, **given: bool) -> None:
    from dsft.runtime import quick_imports
    from dsft.train import main

    with quick_imports():  # as main does
        meter_trainers(meter)
    options = dsft_options(row, folder, output_dir=meter.path.parent / "run") | {
        "per_device_train_batch_size": row.batch,
        "dtype": "bfloat16" if row.bf16 else "float32",
        "packing": row.packing,
        "zero": "3" if row.ranks > 1 else "auto",
        **given,
    }
    if row.packing:  # whose order is that of the packed rows
        del options["train_sampling_strategy"]
    if row.lora:
        options |= {"method": "lora", **{f"lora_{key.removeprefix('lora_')}": value for key, value in LORA.items()}}
    words = []
    for key, value in options.items():
        words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    main([word.lower() if word in ("True", "False") else word for word in words])


def trainer_subject(row: Row, folder: Path, meter: Meter, **given: bool) -> None:
    meter_trainers(meter)
    from transformers import Trainer, TrainingArguments

    if row.ranks > 1:
        import deepspeed

        deepspeed.init_distributed(verbose=False)
    args = TrainingArguments(**trainer_arguments(row, meter), deepspeed=deepspeed_config(row) or None, **given)
    trainer = Trainer(
        model=load_model(row, folder),
        args=args,
        train_dataset=read_rows(folder, row, packed=row.packing),
        data_collator=collate,
    )
    trainer.train()


def trainer_arguments(row: Row, meter: Meter) -> dict:
    return common_arguments(row) | {
        "output_dir": str(meter.path.parent / "run"),
        "per_device_train_batch_size": row.batch,
        "bf16": row.bf16,
        "use_cpu": not row.shape,
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


def load_model(row: Row, folder: Path, *, adapted: bool = True):
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    # Trainer's bf16 is autocast over fp32 weights; DeepSpeed's has bf16 weights and fp32 masters.
    dtype = torch.bfloat16 if row.bf16 and (row.ranks > 1 or (row.shape and row.lora)) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder / row.model, dtype=dtype)
    if row.lora and adapted:
        from peft import LoraConfig, get_peft_model

        set_seed(SEED)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA))
    return model


def trl_subject(row: Row, folder: Path, meter: Meter, **given: bool) -> None:
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
        max_length=row.seq_len,
        packing=row.packing,
        completion_only_loss=row.instructions,
        pad_to_multiple_of=8,
        gradient_checkpointing=False,
        include_num_input_tokens_seen="non_padding" if row.packing else "no",
        **given,
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA) if row.lora else None
    model = load_model(row, folder, adapted=False)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / row.model)
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
    place = torch.device("cuda" if row.shape else "cpu")
    model = load_model(row, folder).to(place).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    if row.ranks > 1:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        del registered
    losses = []
    for step in range(row.steps):
        start = (step * row.ranks + rank) * row.batch
        batch = {key: values.to(place) for key, values in collate(rows[start : start + row.batch]).items()}
        if row.ranks > 1:
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        else:
            with torch.autocast(place.type, torch.bfloat16, enabled=row.bf16):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
            clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        meter.step()
    means = torch.tensor([statistics.mean(losses[i : i + LOG_STEPS]) for i in range(0, row.steps, LOG_STEPS)])
    if row.ranks > 1:
        torch.distributed.all_reduce(means)
    meter.end((means / row.ranks).tolist())


SUBJECTS = {"dsft": dsft_subject, "trainer": trainer_subject, "trl": trl_subject, "bare": bare_subject}
GPU_SUBJECTS = {
    "dsft_liger": functools.partial(dsft_subject, use_liger_kernel=True),
    "dsft_compile": functools.partial(dsft_subject, torch_compile=True),
    "trainer_liger": functools.partial(trainer_subject, use_liger_kernel=True),
    "trl_liger": functools.partial(trl_subject, use_liger_kernel=True),
}


# --- runs and tables ------------------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace, subject: str, name: str, folder: Path) -> dict:
    """One training in processes of its own."""
    row = ROWS[name]
    python = args.trl_python if subject.startswith("trl") else sys.executable
    with tempfile.TemporaryDirectory(dir=folder) as out:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.ranks)]
        words = [__file__, "--one", subject, "--rows", name, "--folder", str(folder), "--out", out]
        words += ["--profile"] if args.profile else []
        command = [python, *(launcher if row.ranks > 1 else []), *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if not row.shape:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=not args.verbose, text=True)
        results = [json.loads(path.read_text()) for path in sorted(Path(out).glob("rank*.json"))]
        if done.returncode or len(results) != row.ranks:
            raise RuntimeError(f"{subject}, {name}: exit code {done.returncode}\n{(done.stderr or '')[-3000:]}")
        if args.profile:
            print(subject, name, (Path(out) / "profile.txt").read_text(encoding="utf-8"), sep="\n", flush=True)
    return {"subject": subject, "row": name} | summarise_one(results, row, read_rows(folder, row, packed=row.packing))


def summarise_one(results: list[dict], row: Row, rows: list[dict]) -> dict:
    first, last = ([result["marks"][i] for result in results] for i in (WARM_STEPS - 1, row.steps - 1))
    per_step = row.ranks * row.batch
    tokens = sum(len(r["input_ids"]) for r in rows[WARM_STEPS * per_step : row.steps * per_step])
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
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("torch", "transformers", "deepspeed", "accelerate", "peft")
    versions = {name: importlib.metadata.version(name) for name in names}
    if args.trl_python:
        version = "import importlib.metadata; print(importlib.metadata.version('trl'))"
        versions["trl"] = subprocess.check_output([args.trl_python, "-c", version], text=True).strip()
    return {
        "gpu": torch.cuda.get_device_name() if any(ROWS[name].shape for name in args.rows) else "",
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""),
        "cores": os.cpu_count(),
        "machine": args.machine,
        "python": platform.python_version(),
        "versions": versions,
        "steps": {name: ROWS[name].steps for name in args.rows},
        "warm_steps": WARM_STEPS,
        "seq_len": {name: ROWS[name].seq_len for name in args.rows},
        "rounds": args.rounds,
    }


def main() -> None:
    args = parse_arguments()
    if args.one:
        row = ROWS[args.rows[0]]
        (SUBJECTS | GPU_SUBJECTS)[args.one](row, args.folder, Meter(args.out, row, profile=args.profile))
        return
    args.rows = args.rows or [name for name, row in ROWS.items() if not row.shape]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), [ROWS[name] for name in args.rows])
        runs = []
        for number in range(args.rounds):
            for name in args.rows:
                for subject in args.subjects or [*SUBJECTS, *(GPU_SUBJECTS if ROWS[name].shape else [])]:
                    if not subject.startswith("trl") or args.trl_python:
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
