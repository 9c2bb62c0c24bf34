"""The option `states: bfloat16`: what DeepSpeed then keeps, writes and resumes from, and where it is refused."""

import pytest
import torch
from conftest import grid, needed_cases, read_json
from ranks import on_ranks, train_all
from test_resume_options import _refusals
from tiny import write_model

from dsft.checkpoints.manifest import integrity_errors
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.models.measure import measure_model
from dsft.models.weight_files import FP32, ZeroShards
from dsft.setup.arguments import checkpoint_size

STEPS, SAVED_AT = 5, 3
RUNS = {
    "1": {"zero": "1"},
    "2, sums of 4": {"zero": "2", "gradient_accumulation_steps": 4},
    "3, sums of 4": {"zero": "3", "gradient_accumulation_steps": 4},
    "3, lora": {"zero": "3", "method": "lora"},
}
"""On 2 ranks; from 4 micro batches on gradients are added up in float32."""
QUICK = ("2, sums of 4", "3, lora")
REFUSED = {
    "states=bfloat16 cannot be combined with zero=0": {"zero": "0"},
    "states=bfloat16 cannot be combined with zero=3-nvme": {"zero": "3-nvme"},
    "states=bfloat16 needs dtype bfloat16, which is float32 here": {"dtype": "float32"},
    "states: bfloat16 then, float32 now": {"states": "float32", "resume_from_checkpoint": "2, sums of 4"},
}


@pytest.fixture(scope="module")
def runs(request, options, tmp_path_factory):
    """Only what selected tests need is trained."""
    needed = needed_cases(request)
    folder = tmp_path_factory.mktemp("states")
    model = str(write_model(folder / "model", hidden_size=128, intermediate_size=512))

    def case(name: str, **changes) -> dict:
        words = {"model": model, "dtype": "bfloat16", "states": "bfloat16", "max_steps": STEPS, "logging_steps": 1}
        words |= {"save_strategy": "steps", "save_steps": SAVED_AT, "save_total_limit": 9}
        if "resume_from_checkpoint" in changes:
            changes["resume_from_checkpoint"] = str(
                folder / changes["resume_from_checkpoint"] / f"checkpoint-{SAVED_AT}"
            )
        return options(folder / name, **words | changes)

    runs = {name: words for name, words in RUNS.items() if name in needed}
    resumed = [case(f"{name}, resumed", **words, resume_from_checkpoint=name) for name, words in runs.items()]
    log = train_all(2, [case(name, **words) for name, words in runs.items()] + resumed, folder / "log-2")
    words = {"zero": "3", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    log += train_all(1, [case("on one rank", **words, resume_from_checkpoint="2, sums of 4")], folder / "log-1")
    (refusals,) = on_ranks(1, _refusals, [case(f"no {name}", **words) for name, words in enumerate(REFUSED.values())])
    return folder, case, log, refusals


def losses(run) -> list[float]:
    return [entry["loss"] for entry in read_json(run / "run.json")["results"]["log"] if "loss" in entry]


@pytest.mark.launch
@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(RUNS, QUICK))
def test_masters_and_moments_are_bfloat16_and_a_resume_is_bit_identical(runs, name):
    folder, case, log, _ = runs
    shards = ZeroShards(folder / name / f"checkpoint-{STEPS}")
    pieces = [piece for each in shards._pieces.values() for piece in each]
    assert shards.states == {"exp_avg", "exp_avg_sq"}
    assert {flat.dtype for piece in pieces for flat in piece.flats.values()} == {torch.bfloat16}, log[-3000:]
    assert losses(folder / f"{name}, resumed") == losses(folder / name) and len(losses(folder / name)) == STEPS
    for key in (FP32, *shards.states):
        first = next(iter(shards.shapes))
        again = ZeroShards(folder / f"{name}, resumed" / f"checkpoint-{STEPS}").read(first, key, 0, 100)
        assert torch.equal(shards.read(first, key, 0, 100), again) and again.abs().max() > 0
    if name == "3, lora":
        return
    config = make_config(TrainConfig, case(name, **RUNS[name]), [])
    size = checkpoint_size(config, measure_model(config).size, read_json(folder / name / "run.json")["deepspeed"])
    checkpoint = folder / name / f"checkpoint-{STEPS}"
    files = [*checkpoint.rglob("*.pt"), checkpoint / "model.safetensors"]
    counted = size.weight_bytes + size.state_bytes
    assert abs(sum(file.stat().st_size for file in files) / counted - 1) < 0.05
    assert integrity_errors(checkpoint, hash_tensors=True) == []


@pytest.mark.launch
@pytest.mark.cases("2, sums of 4")
def test_a_resume_on_other_ranks_and_in_another_stage_goes_on(runs):
    folder = runs[0]
    assert losses(folder / "on one rank") == pytest.approx(losses(folder / "2, sums of 4"), rel=0.01)


@pytest.mark.launch
@pytest.mark.cases("2, sums of 4")
@pytest.mark.parametrize("named", REFUSED)
def test_what_deepspeed_has_not_and_another_type_on_a_resume_are_refused(runs, named):
    assert named in runs[3][list(REFUSED).index(named)]
