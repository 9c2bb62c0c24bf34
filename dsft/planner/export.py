"""A plan as files: a DeepSpeed JSON with every number in it, and the accelerate YAML that starts it."""

import json
from pathlib import Path
from typing import Any

import yaml

from dsft.errors import UserError
from dsft.models.size import ModelSize
from dsft.planner.plan import Plan
from dsft.planner.zero_layout import resolve_auto
from dsft.runtime.hardware import Machine


def complete_config(plan: Plan, size: ModelSize, machine: Machine, *, dtype: str) -> dict[str, Any]:
    """The plan's DeepSpeed configuration without "auto", but for what only the training's options say (learning rate
    and the like).
    """
    config = plan.deepspeed_config
    return config | {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "train_batch_size": plan.micro_batch * plan.accumulation * machine.world_size,
        "gradient_clipping": 1.0,  # max_grad_norm of transformers.TrainingArguments
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "zero_optimization": {
            key: value
            for key, value in resolve_auto(config["zero_optimization"], size).items()
            if key in config["zero_optimization"]
        },
    }


def write_plan(folder: Path, plan: Plan, size: ModelSize, machine: Machine, *, dtype: str) -> list[Path]:
    """Write deepspeed.json and accelerate.yaml to `folder`; returns their paths.

    Raises:
        UserError: where one of them exists already, or the folder cannot be written.
    """
    paths = [folder / "deepspeed.json", folder / "accelerate.yaml"]
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise UserError([f"--write {folder}: {', '.join(existing)} exists; choose another folder or remove it"])
    launcher = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": str(paths[0].resolve()),
            "zero3_init_flag": plan.deepspeed_config["zero_optimization"].get("stage") == 3,
            "deepspeed_multinode_launcher": "standard",
        },
        "num_machines": machine.nodes,
        "num_processes": machine.world_size,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1" if machine.nodes == 1 else "10.0.0.1",
        "main_process_port": 29500,
        "main_training_function": "main",
        "use_cpu": not machine.has_gpu,
    }
    head = (
        f"# accelerate launch --config_file {paths[1].resolve()} dsft/train.py --config run.yaml"
        f" --activation_checkpointing {str(plan.activation_checkpointing).lower()}\n"
    )
    if machine.nodes > 1:
        head += "# Set main_process_ip to the first machine's address, and machine_rank to 1, 2 ... on the others.\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(
            json.dumps(complete_config(plan, size, machine, dtype=dtype), indent=2) + "\n", encoding="utf-8"
        )
        paths[1].write_text(head + yaml.safe_dump(launcher, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError([f"--write {folder}: cannot be written ({error.strerror})"]) from error
    return paths
