"""Loss and gradient norm of every step, by dsft and by TRL's SFTTrainer, on a real model and the same rows in order.

    scripts/real_model real_model
    python benchmarks/beside_trl.py real_model --out benchmarks/results/beside_trl_cpu.json

Both train SmolLM2-135M-Instruct, full and with LoRA, in float32 on one CPU rank, with AdamW at a constant rate. TRL
gets the token ids and trained tokens that dsft makes of the chats. Speed is tokens without padding per CPU-second, from
the end of the first step to that of the last. With --picture both curves are drawn.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BATCH, SEED = 4, 42
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
RATES = {"full": 5e-5, "lora": 1e-3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="of scripts/real_model")
    parser.add_argument("--methods", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="PNG file of the curves")
    parser.add_argument("--one", nargs=2, metavar=("SUBJECT", "RUN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: 2 or more; speed is measured after the first")
    if args.one:
        {"dsft": train_by_dsft, "trl": train_by_trl}[args.one[0]](args, args.methods[0], Path(args.one[1]))
        return
    results = {}
    for method in args.methods:
        for subject in ("dsft", "trl"):
            with tempfile.TemporaryDirectory() as run:
                words = [str(args.folder), "--steps", str(args.steps), "--methods", method, "--one", subject, run]
                environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                subprocess.run([sys.executable, __file__, *words], env=environment, check=True)
                results[f"{method} {subject}"] = json.loads((Path(run) / "steps.json").read_text())
        ours, theirs = (results[f"{method} {subject}"] for subject in ("dsft", "trl"))
        for name in ("loss", "grad_norm"):
            apart = [abs(mine / other - 1) for mine, other in zip(ours[name], theirs[name], strict=True)]
            print(f"{method}: {name}: {apart[0]:.1e} apart at the first step, {max(apart):.1e} at most (relative)")
        print(f"{method}: tokens per CPU-second: dsft {ours['speed']:.1f}, TRL {theirs['speed']:.1f}")
    results["made with"] = {name: version(name) for name in ("torch", "transformers", "deepspeed", "peft", "trl")}
    results["made with"]["cores"] = os.cpu_count()
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.picture:
        draw(results, args)


def draw(results: dict, args: argparse.Namespace) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(args.methods), figsize=(5 * len(args.methods), 3.2), squeeze=False)
    for panel, method in zip(panels[0], args.methods, strict=True):
        for subject, style in {"trl": {"lw": 5, "alpha": 0.35}, "dsft": {"lw": 1.5}}.items():
            panel.plot(range(1, args.steps + 1), results[f"{method} {subject}"]["loss"], label=subject, **style)
        panel.set(title=method, xlabel="step", ylabel="loss")
        panel.legend()
    figure.tight_layout()
    figure.savefig(args.picture, dpi=120)


class Meter:
    """Keeps what each step logs, and the CPU time between the first step and the last."""

    def __init__(self):
        from transformers import TrainerCallback, trainer

        meter = self
        self.times: list[float] = []
        self.logged: list[dict] = []

        class Metered(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                meter.times.append(time.process_time())

            def on_train_end(self, args, state, control, **kwargs):
                meter.logged = [entry for entry in state.log_history if "grad_norm" in entry]

        trainer.DEFAULT_CALLBACKS.append(Metered)

    def write(self, run: Path, rows: list[dict]) -> None:
        seen = sum(len(row["input_ids"]) for row in rows[BATCH : BATCH * len(self.times)])
        steps = {name: [float(entry[name]) for entry in self.logged] for name in ("loss", "grad_norm")}
        (run / "steps.json").write_text(json.dumps(steps | {"speed": seen / (self.times[-1] - self.times[0])}))


def common_arguments(args: argparse.Namespace, method: str) -> dict:
    return {
        "max_steps": args.steps,
        "learning_rate": RATES[method],
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": BATCH,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": SEED,
    }


def dsft_options(args: argparse.Namespace, method: str, run: Path) -> dict:
    return {
        "model": str(args.folder / "base"),
        "data": [str(args.folder / "train.jsonl")],
        "seq_len": 256,
        "dtype": "float32",
        "zero": "1",  # under 0 in float32 DeepSpeed keeps no norm of the gradients
        "output_dir": str(run / "run"),
        "method": method,
        **({f"lora_{name.removeprefix('lora_')}": value for name, value in LORA.items()} if method == "lora" else {}),
        **common_arguments(args, method),
    }


def rows_of_dsft(args: argparse.Namespace, method: str, run: Path) -> list[dict]:
    """Token ids and labels as dsft makes them, in the order of the file."""
    from dsft.config.options import TrainConfig
    from dsft.config.reader import make_config
    from dsft.data.training_data import load_training_data
    from dsft.runtime.hardware import this_machine
    from dsft.setup.decide import check_run

    problems: list[str] = []
    options = make_config(TrainConfig, dsft_options(args, method, run), problems)
    checked = check_run(options, this_machine(ranks_per_node=1), problems)
    data = load_training_data(checked.options, list(checked.data), [], checked.tokenizer)
    return [{key: value.tolist() for key, value in data.items[i][0].items()} for i in range(BATCH * args.steps)]


def train_by_dsft(args: argparse.Namespace, method: str, run: Path) -> None:
    rows = rows_of_dsft(args, method, run)
    import yaml

    from dsft.train import main as train

    meter = Meter()
    (run / "run.yaml").write_text(yaml.safe_dump(dsft_options(args, method, run)))
    train(["--config", str(run / "run.yaml")])
    meter.write(run, rows)


def train_by_trl(args: argparse.Namespace, method: str, run: Path) -> None:
    rows, meter = rows_of_dsft(args, method, run), Meter()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        **common_arguments(args, method),
        output_dir=str(run / "run"),
        use_cpu=True,
        report_to="none",
        max_length=256,
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,
    )
    columns = {
        "input_ids": [row["input_ids"] for row in rows],
        "completion_mask": [[int(label != -100) for label in row["labels"]] for row in rows],
    }
    model = AutoModelForCausalLM.from_pretrained(args.folder / "base", dtype=torch.float32)
    set_seed(SEED)
    SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "base"),
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **LORA)
        if method == "lora"
        else None,
    ).train()
    meter.write(run, rows)


if __name__ == "__main__":
    main()
