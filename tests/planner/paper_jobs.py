"""Jobs on paper for the planner's tests."""

import dataclasses

from dsft.config.options import TrainConfig
from dsft.planner.activations import Job
from dsft.run_setup.resolve import resolve_offline
from dsft.runtime.hardware import Machine
from dsft.units import GB

EIGHT_GPUS = Machine(nodes=1, ranks_per_node=8, device_bytes=80 * GB, host_bytes=1000 * GB, has_gpu=True)


def paper_job(
    options: TrainConfig, *, attention: str | None = "flash", machine: Machine = EIGHT_GPUS, **changes
) -> Job:
    """The job of a training with these options and changes of them; with all logits, if they do not say otherwise."""
    return resolve_offline(
        dataclasses.replace(options, **({"tiled_loss": False} | changes)), machine, attention=attention
    ).job
