"""The `dsft` command: everything that is not itself launched on many ranks.

    dsft train --config run.yaml      prints and runs the right `deepspeed` command for this machine
    dsft eval --model M --data F      the same for perplexity
    dsft plan --model M --gpus 8x80GB --nodes 2
    dsft export RUN_OR_CHECKPOINT OUT
    dsft merge ADAPTER OUT
    dsft demo-data FOLDER
    dsft quickstart FOLDER
"""

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path

from dsft.problems import UserError, ends_with_clear_errors


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("train", "eval"):
        # Their options are those of the YAML file, which the entry point reads; only launcher options are looked at here.
        from dsft.launching import launch

        if set(argv[1:]) & {"-h", "--help"}:
            print(_options_help(argv[0]))
            return
        sys.exit(launch({"train": "dsft.train", "eval": "dsft.eval_ppl"}[argv[0]], argv[1:]))
    options = _parser().parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the libraries among each other
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    plan = commands.add_parser("plan", help="which DeepSpeed configuration fits, and why")
    plan.add_argument("--model", required=True, help="hub id, local folder or config.json; no weights are read")
    plan.add_argument("--method", choices=["full", "lora", "qlora"], default="full")
    plan.add_argument("--lora_r", type=int, default=16)
    plan.add_argument("--seq_len", type=int, default=1024, help="tokens per sequence")
    plan.add_argument("--per_device_train_batch_size", type=int, default=1, help="sequences of one forward on one GPU")
    plan.add_argument("--gpus", help="GPUs of one node and the memory of one, for example 8x80GB; by default this machine's")
    plan.add_argument("--nodes", type=int, default=1)
    plan.add_argument("--host_memory", help="memory of one node, for example 1TB (default with --gpus: 1TB)")
    plan.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 with --gpus, else what this machine takes")
    plan.add_argument("--trust_remote_code", action="store_true")
    plan.add_argument("--json", action="store_true", help="machine-readable")
    plan.set_defaults(run=_plan)
    for name, text in (("export", "a run or checkpoint as a plain Hugging Face folder"), ("merge", "an adapter into its base model")):
        command = commands.add_parser(name, help=text)
        command.add_argument("source")
        command.add_argument("out")
        command.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
        command.set_defaults(run=_export if name == "export" else _merge)
    for name, text, run in (("demo-data", "write the demo data set, tokenizer and configs", _demo_data), ("quickstart", "the whole job on the demo data", _quickstart)):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder")
        command.set_defaults(run=run)
    commands.add_parser("train", help="finetune on all GPUs of this machine, or of --hostfile", add_help=False)
    commands.add_parser("eval", help="perplexity on all GPUs of this machine, or of --hostfile", add_help=False)
    return parser


def _options_help(command: str) -> str:
    from dsft.config import EvalConfig, TrainConfig

    cls = TrainConfig if command == "train" else EvalConfig
    lines = [f"dsft {command} [--config FILE.yaml] [--OPTION VALUE ...]", "", "dsft's own options (the same names in the file and as flags):"]
    for field in dataclasses.fields(cls):
        if field.init:
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            lines.append(f"  --{field.name} (default: {default})")
    if command == "train":
        lines += ["", "and every field of transformers.TrainingArguments by its own name (learning_rate, max_steps, report_to ...)."]
    lines += ["", "Passed to the deepspeed launcher: --hostfile --num_nodes --num_gpus --include --exclude --master_addr --master_port"]
    return "\n".join(lines)


def _plan(options: argparse.Namespace) -> None:
    from dsft.api import plan
    from dsft.machine import Machine, parse_bytes, parse_gpus, this_machine
    from dsft.model import resolve_dtype
    from dsft.screen import print_plans

    if options.nodes < 1:
        raise UserError([f"--nodes {options.nodes}: must be at least 1"])
    if options.gpus:
        gpus, gpu_bytes = parse_gpus(options.gpus)
        machine = Machine(nodes=options.nodes, ranks_per_node=gpus, device_bytes=gpu_bytes, host_bytes=parse_bytes(options.host_memory or "1TB"), has_gpu=True)
    else:
        machine = this_machine(nodes=options.nodes)
        if options.host_memory:
            machine = dataclasses.replace(machine, host_bytes=parse_bytes(options.host_memory))
    chosen, candidates, size = plan(
        options.model, machine=machine, method=options.method, lora_r=options.lora_r, seq_len=options.seq_len,
        per_device_train_batch_size=options.per_device_train_batch_size, trust_remote_code=options.trust_remote_code,
        dtype=options.dtype or ("bfloat16" if options.gpus else resolve_dtype("auto")),
    )
    if options.json:
        print(json.dumps({
            "chosen": dataclasses.asdict(chosen), "candidates": [dataclasses.asdict(one) for one in candidates],
            "model": dataclasses.asdict(size), "machine": dataclasses.asdict(machine),
        }, indent=2))
    else:
        print_plans(chosen, candidates, size, machine)


def _export(options: argparse.Namespace) -> None:
    from dsft.export import export

    print(f"dsft: written and read back: {export(options.source, options.out, dtype=options.dtype)}")


def _merge(options: argparse.Namespace) -> None:
    from dsft.export import merge

    print(f"dsft: merged, written and read back: {merge(options.source, options.out, dtype=options.dtype)}")


def _demo_data(options: argparse.Namespace) -> None:
    from dsft.demo_data import write_demo_data

    for name, rows in write_demo_data(Path(options.folder)).items():
        print(f"dsft: {options.folder}/{name}.jsonl: {rows:,} rows")
    print(f"dsft: next: dsft train --config {options.folder}/full.yaml")


def _quickstart(options: argparse.Namespace) -> None:
    from dsft.quickstart import run_quickstart

    run_quickstart(Path(options.folder))


if __name__ == "__main__":
    main()
