"""The `dsft` command: everything that is not itself launched on many ranks.

dsft train --config run.yaml      prints and runs the right `deepspeed` command for this machine
dsft eval --model M --data F      the same for perplexity
dsft launch --hostfile H train --config run.yaml    the same on many nodes, looked at first
dsft plan --model M --gpus 8x80GB --nodes 2
dsft preview --config run.yaml    a few samples as the model will see them, and figures of the data
dsft prepare --config run.yaml    tokenises the data ahead of a run, on a machine without GPUs
dsft doctor --hostfile H          examines the machines before a run starts on them
dsft export RUN_OR_CHECKPOINT OUT
dsft merge ADAPTER OUT
dsft checkpoints RUN              what a run can go on from
dsft verify CHECKPOINT            reads every file and compares it with what was written
dsft demo-data FOLDER
dsft quickstart FOLDER
"""

import argparse
import dataclasses
import sys
import warnings
from pathlib import Path

from dsft.errors import ends_with_clear_errors
from dsft.runtime.launcher_env import unset_single_process_env


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    if argv is None:  # a process of its own; a caller's process may hold the group of these variables
        unset_single_process_env()
        argv = sys.argv[1:]
    if argv and argv[0] in ("train", "eval", "launch"):
        # Their options are those of the YAML file, which the entry point reads; only launcher options are looked at
        # here.
        from dsft.cluster.launch.run import launch

        if set(argv[1:]) & {"-h", "--help"}:
            print(_options_help(next((word for word in argv if word in ("train", "eval")), "")))
            return
        sys.exit(launch(argv[1:] if argv[0] == "launch" else ["--no_preflight", *argv]))
    options, rest = _parser(argv).parse_known_args(argv)
    if argv[:1] == ["doctor"] or argv[0] in ("prepare", "preview"):
        options.run_options = rest  # those of the run to come, which its own reader checks
    elif rest:
        _parser(argv).error(f"unrecognized arguments: {' '.join(rest)}")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of the libraries among each other
    options.run(options)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    plan = commands.add_parser("plan", help="which DeepSpeed configuration fits, what it needs and how fast it is")
    if argv[:1] == ["plan"]:  # its options come with seconds of imports
        from dsft.cli.plan import add_options

        add_options(plan)
    doctor = commands.add_parser(
        "doctor", help="what is wrong with the machines of a run, and the command that mends it"
    )
    if argv[:1] == ["doctor"]:
        from dsft.cli.doctor import add_options as add_doctor_options

        add_doctor_options(doctor)
    for name, text, run in (
        ("prepare", "tokenise the data of a training ahead of it; takes the options of dsft train", _prepare),
        ("preview", "a few samples as the model will see them", _preview),
    ):
        command = commands.add_parser(name, help=text)
        if name == "preview":
            command.add_argument("--samples", type=int, default=3, help="to print")
        command.set_defaults(run=run)
    for name, text in (
        ("export", "a run or checkpoint as a plain Hugging Face folder"),
        ("merge", "an adapter into its base model"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("source")
        command.add_argument("out")
        command.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
        command.set_defaults(run=_export if name == "export" else _merge)
    for name, text, run in (
        ("checkpoints", "the checkpoints of a run", _checkpoints),
        ("verify", "whether a checkpoint is as it was written", _verify),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder")
        command.set_defaults(run=run)
    for name, text, run in (
        ("demo-data", "write the demo data set, tokenizer and configs", _demo_data),
        ("quickstart", "the whole job on the demo data", _quickstart),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder")
        command.set_defaults(run=run)
    commands.add_parser(
        "train", help="finetune on all GPUs of this machine: short for dsft launch --no_preflight train", add_help=False
    )
    commands.add_parser(
        "eval", help="perplexity on all GPUs of this machine: short for dsft launch --no_preflight eval", add_help=False
    )
    commands.add_parser(
        "launch", help="train or eval on many nodes, through deepspeed, torchrun, srun or accelerate", add_help=False
    )
    return parser


def _options_help(command: str) -> str:
    from dsft.cluster.launch.options import LaunchOptions

    if not command:
        return "\n".join(
            [
                "dsft launch [--OPTION VALUE ...] train|eval [--config FILE.yaml] [--OPTION VALUE ...]",
                "",
                *_fields_help(LaunchOptions),
                "",
                "dsft launch train --help lists the options of the training.",
            ]
        )
    from dsft.config.options import EvalConfig, TrainConfig

    lines = [
        f"dsft {command} [--config FILE.yaml] [--OPTION VALUE ...]",
        "",
        "dsft's own options (the same names in the file and as flags):",
        *_fields_help(EvalConfig if command == "eval" else TrainConfig),
    ]
    if command == "train":
        lines += [
            "",
            (
                "and every field of transformers.TrainingArguments by its own name (learning_rate, max_steps, report_to"
                " ...)."
            ),
        ]
    return "\n".join([*lines, "", "How the ranks are started:", *_fields_help(LaunchOptions)])


def _fields_help(cls: type) -> list[str]:
    from dsft.config.reader import is_option

    fields = [field for field in dataclasses.fields(cls) if is_option(field)]
    return [
        f"  --{field.name} (default:"
        f" {field.default if field.default is not dataclasses.MISSING else field.default_factory()})"
        for field in fields
    ]


def _prepare(options: argparse.Namespace) -> None:
    from dsft.cli.data import prepare_command

    prepare_command(options.run_options)


def _preview(options: argparse.Namespace) -> None:
    from dsft.cli.data import preview_command

    preview_command(options.run_options, samples=options.samples)


def _export(options: argparse.Namespace) -> None:
    from dsft.checkpoints.export import export

    print(f"dsft: written and read back: {export(options.source, options.out, dtype=options.dtype)}")


def _merge(options: argparse.Namespace) -> None:
    from dsft.checkpoints.export import merge

    print(f"dsft: merged, written and read back: {merge(options.source, options.out, dtype=options.dtype)}")


def _checkpoints(options: argparse.Namespace) -> None:
    from dsft.cli.checkpoints import show_checkpoints

    show_checkpoints(options.folder)


def _verify(options: argparse.Namespace) -> None:
    from dsft.cli.checkpoints import verify_checkpoint

    verify_checkpoint(options.folder)


def _demo_data(options: argparse.Namespace) -> None:
    from dsft.demo_data import write_demo_data

    for name, rows in write_demo_data(Path(options.folder)).items():
        print(f"dsft: {options.folder}/{name}.jsonl: {rows:,} rows")
    print(f"dsft: next: dsft train --config {options.folder}/full.yaml")


def _quickstart(options: argparse.Namespace) -> None:
    from dsft.cli.quickstart import run_quickstart

    run_quickstart(Path(options.folder))


if __name__ == "__main__":
    main()
