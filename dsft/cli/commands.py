"""The commands of `dsft`, their options, and their help texts. Imports no library, so that help is instant."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from dsft.config.options import EvalConfig, HostFields, LaunchOptions, TrainConfig


@dataclass(kw_only=True)
class QuestionFields:
    """Question: what is asked of the run that the options of a training describe. No weights are read."""

    perplexity: bool = False
    """Plan evaluation instead of training."""
    longest: bool = False
    """The longest sequence that fits, instead of a plan for `seq_len`."""
    tokens: float | None = None
    """Tokens of the data, for example 1e9: hours of the whole training are printed."""


@dataclass(kw_only=True)
class HardwareFields:
    """Hardware: by default this machine, measured."""

    hostfile: str | None = None
    """DeepSpeed's host file: one line per node, `name slots=N`."""
    nodes: int = 1
    """Number of nodes."""
    gpus: str | None = None
    """GPUs of one node, by card or by the memory of one: 8xH100 or 8x80GB; several with commas are compared."""
    host_memory: str | None = None
    """Memory of one node, for example 768GB; by default this machine's, and 1TB of a machine on paper."""
    interconnect: str = ""
    """For example nvlink+ib400, nvlink+8xib400, pcie, pcie4+eth25, eth10 (Gbit/s of a card, cards per node)."""


@dataclass(kw_only=True)
class PlanOptions(QuestionFields, HardwareFields):
    """Output: a few lines, unless another form is chosen."""

    json: bool = False
    """Machine-readable."""
    explain: bool = False
    """Every candidate, what was assumed, and every term of the chosen plan with its formula."""
    out: str | None = None
    """Folder to write the chosen plan to, as deepspeed.json."""


@dataclass(kw_only=True)
class DoctorOptions(HostFields):
    """Examination: how much of it, and what is printed."""

    quick: bool = False
    """Without compiling a program, and without measuring rates."""
    only_findings: bool = False
    """Without the tables, if nothing is wrong."""
    json: bool = False
    """One JSON object on standard output."""


@dataclass(kw_only=True)
class PrepareOptions:
    """Prepare: no options but those of the training."""


@dataclass(kw_only=True)
class PreviewOptions:
    """Preview: what is printed."""

    samples: int = 3
    """Samples to print, evenly spread over the data."""


@dataclass(kw_only=True)
class InitOptions:
    """Init: what the file contains."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Hub id, local folder or config.json."""
    data: list[str]
    """Files, folders, globs or hub data sets."""
    method: Literal["full", "lora", "qlora"] = "full"
    """full trains every weight; lora trains adapters; qlora trains adapters over a quantised base."""
    output_dir: str = "runs/first"
    """Folder of the run."""
    out: str = "run.yaml"
    """The file to write."""


@dataclass
class ExportOptions:
    """Export: from where, to where, in which type."""

    source: str
    """A run's folder, a checkpoint, an adapter or a GGUF file."""
    out: str
    """A new folder."""
    _: KW_ONLY
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the written weights; auto keeps theirs, and takes float32 for packed ones of a GGUF file."""
    trust_remote_code: bool = False
    """Run code that a model repository brings along."""
    trust_checkpoint: bool = False
    """Read pickles that ask for other classes than checkpoints contain: they may run any code."""


@dataclass
class MergeOptions(ExportOptions):
    """Export: from where, to where, in which type."""


@dataclass
class ConvertOptions:
    """Conversion: of which file, and where to."""

    file: str
    """A YAML file of axolotl, LLaMA-Factory or TRL."""
    _: KW_ONLY
    out: str = "run.yaml"
    """The file to write."""


@dataclass
class ChatOptions:
    """Chat: with which model, and how it answers."""

    model: str
    """A run's folder, a checkpoint, an adapter, an exported folder or a hub id."""
    _: KW_ONLY
    prompt: str | None = None
    """One turn: the answer is printed, and nothing else."""
    system: str | None = None
    """The system message before the first turn, if the template has a place for it."""
    raw: bool = False
    """Continue each line as text, without a chat template and earlier lines."""
    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """Of the distribution that tokens are drawn from; 0 is greedy decoding."""
    chat_template: str | None = None
    """A Jinja file or a preset such as chatml in place of the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of computation; auto is bfloat16 on a GPU that has it, float32 elsewhere."""
    trust_remote_code: bool = False
    """Run code that a model repository brings along."""
    trust_checkpoint: bool = False
    """Read pickles that ask for other classes than checkpoints contain: they may run any code."""


@dataclass
class FolderOptions:
    """Folder: the one to look at."""

    folder: str
    """A run's output_dir, or a checkpoint."""


@dataclass
class QuickstartOptions:
    """Quickstart: where, and with which model."""

    folder: str = "quickstart"
    """A new folder."""
    _: KW_ONLY
    offline: bool = False
    """Download nothing: a small model is trained on Python's documentation first, and takes the real one's place."""


@dataclass
class CompareOptions:
    """Comparison: of which results, and with which."""

    results: list[str]
    """Folders that `dsft eval --output_dir` wrote, each with one model or several."""
    _: KW_ONLY
    base: str | None = None
    """The model that all others are compared with, as its results name it or by the end of its path; by default the
    first."""
    json: bool = False
    """One JSON object on standard output."""
    group_by: str | None = None
    """A column that the results were grouped by: the documents of each of its values are compared by themselves."""


@dataclass
class ReportOptions:
    """Report: of which runs, and where to."""

    runs: list[str]
    """Folders of runs; with several, their curves share charts."""
    _: KW_ONLY
    out: str | None = None
    """The page; by default report.html in the folder of the first run."""


@dataclass(frozen=True)
class Command:
    summary: str
    """One line of `dsft --help`, and the first line of the command's help."""
    function: str
    """module:function, called with the options and, if `run_options` is set, the run's words."""
    options: type
    run_options: type | None = None
    """Options of the run that the command starts, examines or prepares."""
    common: frozenset[str] = frozenset()
    """Options that help shows by default; empty for all."""
    details: str = ""


_TRAIN = """model dtype method lora_r adapter data chat_template seq_len train_on eval_data eval_fraction packing zero
    global_batch_size output_dir per_device_train_batch_size learning_rate num_train_epochs max_steps save_steps
    resume_from_checkpoint hostfile num_gpus"""
_EVAL = "run model dtype data seq_len mode stride max_documents zero batch_tokens output_dir hostfile num_gpus"
_DOCTOR = """\
  dsft doctor                                  this machine
  dsft doctor --hostfile H --config run.yaml   every host of H through ssh
  dsft doctor --hostfile H --quick             what dsft launch does by default
  srun -n 16 dsft doctor                       the ranks of a launcher, no ssh

mpirun -n 16 dsft doctor works as srun does. torchrun, deepspeed and
accelerate launch start it with --module dsft.cli.doctor.
It looks before any training process starts: drivers, versions, ports, clocks,
memory and disks of every node, then a sum over all ranks and its rate.
docs/doctor.md explains each finding. Options that are not listed here are the
run's own, as dsft train takes them (--output_dir ...).
Exit code 0 without errors, 2 with."""
_LAUNCHED = "The command that is run is printed first; --dry_run prints it and stops."
_PLANNED = """\
Takes the options of dsft train and its --config beside its own, and decides as it would on such a machine.
Exit code 1 if nothing fits."""
_CONVERTED = (
    "Every option without a counterpart is named, on the screen and in the file; docs/migrating.md has the names."
)
_RUN_OPTIONS = "Takes the options of dsft train beside its own; output_dir may be left out."

COMMANDS = {
    "init": Command("write a commented run.yaml to begin with", "dsft.cli.run_files:write_run_file", InitOptions),
    "convert": Command(
        "turn a file of axolotl, LLaMA-Factory or TRL into a run.yaml",
        "dsft.cli.run_files:convert_file",
        ConvertOptions,
        details=_CONVERTED,
    ),
    "train": Command(
        "finetune on all GPUs of this machine", "", LaunchOptions, TrainConfig, frozenset(_TRAIN.split()), _LAUNCHED
    ),
    "eval": Command(
        "measure perplexity on all GPUs of this machine",
        "",
        LaunchOptions,
        EvalConfig,
        frozenset(_EVAL.split()),
        _LAUNCHED,
    ),
    "compare": Command("compare results of dsft eval, with intervals", "dsft.cli.folders:run_compare", CompareOptions),
    "report": Command(
        "write a page about runs: curves, perplexity, memory, options",
        "dsft.cli.folders:run_report",
        ReportOptions,
        details="Results of dsft eval over several models in a run's folder, or beside it, are part of the page.",
    ),
    "launch": Command(
        "train or evaluate on many nodes, which are examined first",
        "",
        LaunchOptions,
        details="dsft launch train --help lists the options of the training.",
    ),
    "plan": Command(
        "show which DeepSpeed configuration fits, and how fast it is",
        "dsft.cli.plan:run",
        PlanOptions,
        TrainConfig,
        details=_PLANNED,
    ),
    "doctor": Command(
        "find what is wrong with the machines of a run, and how to fix it",
        "dsft.cli.doctor:run",
        DoctorOptions,
        TrainConfig,
        details=_DOCTOR,
    ),
    "preview": Command(
        "show some samples as the model will see them",
        "dsft.cli.data:run",
        PreviewOptions,
        TrainConfig,
        details=_RUN_OPTIONS,
    ),
    "prepare": Command(
        "tokenise the data of a training ahead of it",
        "dsft.cli.data:run",
        PrepareOptions,
        TrainConfig,
        details=_RUN_OPTIONS,
    ),
    "checkpoints": Command("list what a run can resume from", "dsft.cli.folders:show_checkpoints", FolderOptions),
    "verify": Command(
        "check that a checkpoint is as it was written", "dsft.cli.folders:verify_checkpoint", FolderOptions
    ),
    "export": Command(
        "write a run or checkpoint as a plain Hugging Face folder", "dsft.cli.folders:export_or_merge", ExportOptions
    ),
    "merge": Command("merge an adapter into its base model", "dsft.cli.folders:export_or_merge", MergeOptions),
    "chat": Command("talk to a run, a checkpoint or an exported model", "dsft.cli.folders:run_chat", ChatOptions),
    "quickstart": Command("run the whole job on a small real model", "dsft.cli.quickstart:run", QuickstartOptions),
}
"""Name -> command, in the order of `dsft --help`."""
