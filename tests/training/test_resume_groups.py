"""A run goes on where the same ranks and ZeRO stage cut the optimizer's states otherwise: into sub groups of another
size, or into the one group of a DeepSpeed JSON's optimizer in place of the Trainer's two.
"""

import json

import pytest
from conftest import ROOT, grid, read_json
from ranks import on_ranks, trained

pytestmark = pytest.mark.launch

JSONS = {
    "optimizer in a JSON": ("zero1.json", {}),
    "offload": ("zero3_offload_optimizer.json", {"sub_group_size": 2000}),
    "small sub groups": ("zero3.json", {"sub_group_size": 2000}),
}
OTHER = {"optimizer in a JSON": "1", "offload": "3-offload-optimizer", "small sub groups": "3"}
"""What each is resumed with."""
ADAM = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}


def losses(cases: list[dict]) -> list[list[float]]:
    return [[entry["loss"] for entry in trained(case).state.log_history if "loss" in entry] for case in cases]


@pytest.mark.parametrize("kind", grid(JSONS, ["optimizer in a JSON", "offload"]))
def test_states_that_are_cut_otherwise_are_taken_over(options, tmp_path, kind):
    shipped, changes = JSONS[kind]
    content = read_json(ROOT / "ds_configs" / shipped)
    content["zero_optimization"] |= changes
    if kind == "optimizer in a JSON":
        content["optimizer"] = {"type": "AdamW", "params": ADAM}
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    case = {"max_steps": 4, "logging_steps": 1}
    run = options(tmp_path / "run", zero=str(path), **case, save_strategy="steps", save_steps=2)
    again = run | {"zero": OTHER[kind], "output_dir": str(tmp_path / "again"), "save_strategy": "no"}
    again["resume_from_checkpoint"] = str(tmp_path / "run" / "checkpoint-2")
    whole, resumed = on_ranks(2, losses, [run, again])[0]
    assert len(whole) == 4 and resumed[-2:] == pytest.approx(whole[-2:], rel=1e-5)
