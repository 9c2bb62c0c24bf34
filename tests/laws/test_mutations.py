"""Small damage to good input: each ends in one clear message, or in the right result; never in a traceback.

A seed draws one of a training's inputs and one damage to it. What is read then is compared with what plain libraries
(yaml, json, safetensors, the tokenizer) read of the same damaged file.
"""

import json
import random
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import grid
from safetensors.torch import load_file
from tiny import with_labels
from transformers import AutoTokenizer

from dsft.config.deepspeed import get_value
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.data.training_data import load_training_data
from dsft.errors import UserError
from dsft.models.build import build_model
from dsft.runtime.distributed import smallest_machine
from dsft.setup.decide import resolve_run

OPTIONS = {
    "seq_len": 32,
    "learning_rate": 1e-3,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "method": "full",
    "packing": False,
    "eval_fraction": 0.1,
    "save_strategy": "steps",
    "seed": 7,
    "too_long": "truncate",
    "disable_tqdm": True,
    "save_total_limit": 2,
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1000,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1000000,
        "allgather_bucket_size": 1000000,
    },
}
SEEDS = range(300)
QUICK = range(0, 300, 15)


class Inputs:
    """The files of one training, damaged in one place."""

    def __init__(self, folder: Path, tiny: Path, rng: random.Random):
        self.rng, self.folder = rng, folder
        self.yaml, self.deepspeed, self.rows = folder / "run.yaml", folder / "zero.json", folder / "texts.jsonl"
        self.model = folder / "model"
        shutil.copytree(tiny / "model", self.model)
        shutil.copy(tiny / "texts.jsonl", self.rows)
        self.options = OPTIONS | {
            "model": str(self.model),
            "data": str(self.rows),
            "output_dir": str(folder / "run"),
            "zero": str(self.deepspeed),
            "data_cache": str(folder / "cache"),
        }
        self.deepspeed.write_text(json.dumps(DEEPSPEED, indent=1))
        self.yaml.write_text(yaml.safe_dump(self.options, sort_keys=False))

    def damage(self, kind: str) -> str:
        """Returns what was done."""
        files = {
            "yaml": self.yaml,
            "deepspeed": self.deepspeed,
            "rows": self.rows,
            "weights": self.model / "model.safetensors",
            "config": self.model / "config.json",
        }
        if kind in ("yaml", "deepspeed", "config") and self.rng.random() < 0.7:
            return f"{kind}: {_damage_value(self.rng, files[kind])}"
        return f"{kind}: {_damage_bytes(self.rng, files[kind])}"


def _damage_bytes(rng: random.Random, path: Path) -> str:
    content = path.read_bytes()
    # Of weights, whose bytes are mostly numbers, half of the damage goes to the header.
    place = rng.randrange(min(len(content), 600) if rng.random() < 0.5 else len(content))
    damage = rng.choice(["cut", "drop", "insert", "change", "repeat", "empty"] if rng.random() < 0.9 else ["cut"])
    changed = {
        "cut": content[:place],
        "drop": content[:place] + content[place + 1 :],
        "insert": content[:place] + bytes([rng.randrange(256)]) + content[place:],
        "change": content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
        "repeat": content[: place + 20] + content[place:],
        "empty": b"",
    }[damage]
    path.write_bytes(changed)
    return f"{damage} at byte {place}"


def _damage_value(rng: random.Random, path: Path) -> str:
    is_yaml = path.suffix == ".yaml"
    content = yaml.safe_load(path.read_text()) if is_yaml else json.loads(path.read_text())
    section = content
    if (inner := [value for value in content.values() if isinstance(value, dict)]) and rng.random() < 0.5:
        section = rng.choice(inner)
    key = rng.choice(sorted(section))
    if rng.random() < 0.4:
        place = rng.randrange(len(key))
        wrong = key[:place] + rng.choice(["", rng.choice(string.ascii_lowercase), key[place] * 2]) + key[place + 1 :]
        changed = {wrong if name == key else name: value for name, value in section.items()}
        done = f"{key} -> {wrong}"
    else:
        junk = [None, True, "many", -1, 0, 1.5, 10**12, [1, 2], {"a": 1}, "", "nan", 3, "auto", float("nan"), "\ud800"]
        value = rng.choice(junk[:-1])
        changed = section | {key: value}
        done = f"{key} = {value!r}"
    section.clear()
    section |= changed
    path.write_text(yaml.safe_dump(content, sort_keys=False) if is_yaml else json.dumps(content, indent=1))
    return done


def train_until_the_first_loss(inputs: Inputs) -> tuple[TrainConfig, object, object, torch.nn.Module]:
    """Everything a training does up to its first loss, in this process."""
    problems: list[str] = []
    options = read_config(TrainConfig, ["--config", str(inputs.yaml)], problems)
    run = resolve_run(options, machine=smallest_machine(), problems=problems)
    data = load_training_data(run.options, run.data, run.held_out, run.tokenizer)
    model = build_model(run.options, dtype=run.options.dtype, seed=run.options.value("seed") or 42)
    batch = data.collator([data.items[0]])
    model(**with_labels(batch), use_cache=False)
    return run, data, model


def right_options(inputs: Inputs, run) -> None:
    """Each value of the YAML file is in the run, in the type of its option."""
    for name, value in yaml.safe_load(inputs.yaml.read_text()).items():
        resolved = run.options.value(name)
        if name == "data":
            resolved = resolved[0] if not isinstance(value, list) else resolved
        if isinstance(value, float | int) and not isinstance(value, bool):
            assert resolved == pytest.approx(value), name
        elif value is None:  # an option that is not set
            assert resolved in (None, TrainConfig().value(name)) or name in ("bf16", "fp16"), name
        elif isinstance(value, bool):
            assert resolved is value or name in ("bf16", "fp16"), name
        elif name not in ("output_dir",):
            assert str(getattr(resolved, "value", resolved)).lower() in (str(value).lower(), "auto"), name


def right_deepspeed(inputs: Inputs, run) -> None:
    def leaves(place: str, value):
        if isinstance(value, dict):
            for name, part in value.items():
                yield from leaves(f"{place}.{name}" if place else name, part)
        elif value != "auto":
            yield place, value

    for place, value in leaves("", json.loads(inputs.deepspeed.read_text())):
        assert get_value(run.plan.deepspeed_config, place) == value, place


def right_tokens(inputs: Inputs, data) -> None:
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    rows = [json.loads(line) for line in inputs.rows.read_text(encoding="utf-8").splitlines() if line.strip()]
    expected = sum(len(tokenizer(row["text"])["input_ids"]) + 1 for row in rows)  # and the end token
    assert data.counts["tokens"] + data.held_out_counts["tokens"] == expected


def right_weights(inputs: Inputs, model: torch.nn.Module) -> None:
    stored = load_file(inputs.model / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), stored[name].numpy(), equal_nan=True), name


CHECKS: dict[str, Callable] = {
    "yaml": lambda inputs, run, data, model: right_options(inputs, run),
    "deepspeed": lambda inputs, run, data, model: right_deepspeed(inputs, run),
    "rows": lambda inputs, run, data, model: right_tokens(inputs, data),
    "weights": lambda inputs, run, data, model: right_weights(inputs, model),
    "config": lambda inputs, run, data, model: right_weights(inputs, model),
}


@pytest.mark.parametrize("seed", grid(SEEDS, QUICK))
def test_damaged_input_is_named_in_one_message_or_read_right(tiny, tmp_path, seed):
    rng = random.Random(seed)
    kind = rng.choice(["yaml", "yaml", "deepspeed", "rows", "weights", "config"])
    inputs = Inputs(tmp_path, tiny, rng)
    done = inputs.damage(kind)
    print(done)
    try:
        run, data, model = train_until_the_first_loss(inputs)
    except UserError as error:
        print("\n".join(error.problems))
        named = {re.match(r"\w*", problem)[0] for problem in error.problems}
        most = len(named) if "yaml" in done and "byte" in done else 1  # a file that is cut lacks several keys
        assert len(error.problems) == most, (done, error.problems)
        message = error.problems[0]
        assert "\n" not in message and 20 < len(message) < 900, (done, message)
        assert not re.search(r"Traceback|<class|object at 0x", message), (done, message)
        named = {
            "rows": "texts.jsonl",
            "weights": "model",
            "config": "model",
            "deepspeed": "zero.json",
            "yaml": "",
        }[kind]
        assert named in message, (done, message)
        return
    CHECKS[kind](inputs, run, data, model)
