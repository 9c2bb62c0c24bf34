"""All checks, most valuable first."""

import importlib.util
import shutil
from collections.abc import Iterator

from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.runtime.software import compiler
from gpu import faults, perplexities, share, trainings
from gpu.check import Check, Row, Setting, needs_gpu, needs_large_model
from gpu.trainings import planned_training


def _in(module: str, name: str):
    """Make a check of a function whose module imports torch: only the check's own process does."""

    def check(setting: Setting) -> Iterator[Row]:
        return getattr(importlib.import_module(f"gpu.{module}"), name)(setting)

    return check


def _lacks_quantisation(setting: Setting) -> str:
    has_package = importlib.util.find_spec("bitsandbytes") is not None
    return needs_gpu(setting) or ("" if has_package else "needs bitsandbytes: pip install 'dsft[gpu]'")


def _lacks_disk(setting: Setting) -> str:
    from dsft.models.measure import measure_model  # here: torch
    from dsft.models.weight_files import weight_bytes_in
    from dsft.setup.arguments import checkpoint_size

    if not weight_bytes_in(str(setting.path("base"))):
        return ""
    words = trainings.options(setting, "whole", **trainings.SAVING) | {"model": str(setting.path("base"))}
    options = make_config(TrainConfig, words | {"dtype": "bfloat16" if setting.has_gpu else "float32"}, [])
    size, free = checkpoint_size(options, measure_model(options).size), shutil.disk_usage(setting.folder).free
    wanted = size.total_bytes + size.final_bytes  # two runs, of which one keeps checkpoints
    return "" if free >= wanted else f"needs {wanted / 1e9:.0f} GB of disk where --out lies, {free / 1e9:.0f} are free"


def _lacks_compiler(setting: Setting) -> str:
    name = compiler()
    return "" if shutil.which(name) else f"needs a C++ compiler for DeepSpeed's CPUAdam; {name} is not there"


FILES = Check(name="files", run=_in("files", "make_files"), seconds=180)
"""Comes first, whatever is chosen: the others work on them."""
OFFLOAD = {"zero": "3-offload-optimizer", "activation_checkpointing": True}
CHECKS = (
    Check(name="facts", run=_in("speeds", "facts"), seconds=60),
    Check(name="full-1", run=planned_training(zero="1", activation_checkpointing=False), seconds=120),
    Check(name="lora-1", run=planned_training(zero="1", method="lora", activation_checkpointing=False), seconds=120),
    Check(name="perplexity", run=perplexities.perplexity, seconds=180),
    Check(name="masks", run=_in("speeds", "masks"), seconds=120),
    Check(name="full-3", run=planned_training(zero="3", activation_checkpointing=True), seconds=120),
    Check(name="nan", run=faults.nan_loss, seconds=60),
    Check(name="out-of-memory", run=faults.out_of_memory, seconds=120, lacks=needs_large_model),
    Check(name="kill", run=faults.killed_rank, seconds=120),
    Check(name="signal", run=faults.asked_to_stop, seconds=120),
    Check(name="perplexity-again", run=perplexities.perplexity, seconds=180),
    Check(name="resume", run=trainings.resume, seconds=180, lacks=_lacks_disk),
    Check(name="packing", run=trainings.packed_training, seconds=120),
    Check(
        name="qlora",
        run=planned_training(zero="1", method="qlora", activation_checkpointing=True),
        seconds=120,
        lacks=_lacks_quantisation,
    ),
    Check(name="lora-3", run=planned_training(zero="3", method="lora", activation_checkpointing=True), seconds=120),
    Check(name="full-2", run=planned_training(zero="2", activation_checkpointing=True), seconds=120),
    Check(name="offload", run=planned_training(**OFFLOAD), seconds=180, lacks=_lacks_compiler),
)

SHARE = Check(name="share", run=share.collectives, seconds=90)
"""Comes first with --share, whatever is chosen: the others need collectives."""
FP32 = {"dtype": "float32"}
BF16 = {"dtype": "bfloat16"}
STAGES = [FP32 | {"zero": zero} for zero in ("3", "2", "3-hpz", "1", "0")]
METHODS = [
    FP32 | {"zero": "3", "sequence_parallel": 2},
    FP32 | {"zero": "3", "packing": True},
    *(FP32 | {"zero": zero, "method": "lora"} for zero in ("3", "2")),
    *(BF16 | {"zero": zero} for zero in ("3", "2", "3-hpz")),
]
OFFLOADS = [FP32 | {"zero": zero} for zero in ("2-offload", "3-offload-optimizer")]
QLORA = BF16 | {"zero": "2", "method": "qlora"}
SHARE_CHECKS = (
    Check(name="share-stages", run=share.beside_one_rank(*STAGES), seconds=180),
    Check(name="share-perplexity", run=share.perplexity, seconds=120),
    *(Check(name=f"share-{name}", run=share.fault(name), seconds=60) for name in share.FAULTS),
    Check(name="share-memory", run=share.memory, seconds=150),
    Check(name="share-methods", run=share.beside_one_rank(*METHODS), seconds=180),
    Check(name="share-checkpoints", run=share.checkpoints, seconds=180, lacks=_lacks_disk),
    Check(name="share-qlora", run=share.beside_one_rank(QLORA), seconds=90, lacks=_lacks_quantisation),
    Check(name="share-offload", run=share.beside_one_rank(*OFFLOADS), seconds=180, lacks=_lacks_compiler),
)
