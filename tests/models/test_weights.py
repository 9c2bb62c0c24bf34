"""Weights that are missing, of another shape, left over or unreadable end a run before it starts."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import flags, grid
from ranks import on_ranks, run_entry, train, train_all
from safetensors.torch import load_file, save_file
from tiny import write_model, write_tokenizer
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from dsft.api import evaluate, evaluate_all
from dsft.checkpoints.export import export
from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError
from dsft.models.build import build_model, weight_problems
from dsft.models.measure import load_model_config, measure_model

LOST = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def change_tensors(folder: Path, change, *, file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def shard(folder: Path) -> list[Path]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    return sorted(folder.glob("model-*.safetensors"))


def as_pickle(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


DAMAGES = {
    "missing": (lambda folder: change_tensors(folder, lambda tensors: tensors.pop(LOST)), [LOST, "missing"]),
    "mismatched": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({LOST: torch.ones(3, 5)})),
        [f"{LOST} is [3, 5] in its weights, [48, 32] by its config"],
    ),
    "unexpected": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({"extra.weight": torch.ones(3)})),
        ["extra.weight", "no place in the model", "save_pretrained"],
    ),
    "truncated": (lambda folder: cut(folder / "model.safetensors"), ["model.safetensors: cannot be read"]),
    "corrupt": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 900), ["cannot be read"]),
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), ["contains a config but no weights"]),
    "shard-lost": (lambda folder: shard(folder)[1].unlink(), ["model-00002-of-", "is not there", INDEX]),
    "shard-cut": (lambda folder: cut(shard(folder)[0]), ["model-00001-of-", "cannot be read"]),
    "index-corrupt": (
        lambda folder: shard(folder) and (folder / INDEX).write_text('{"weight_map": '),
        [f"{INDEX}: cannot be read"],
    ),
    "pickle-cut": (lambda folder: cut(as_pickle(folder)), ["pytorch_model.bin: cannot be read"]),
}


def damaged(tiny: Path, folder: Path, kind: str) -> Path:
    shutil.copytree(tiny / "model", folder)
    DAMAGES[kind][0](folder)
    return folder


def problems_in(folder: Path) -> list[str]:
    return weight_problems(str(folder), measure_model(TrainConfig(model=str(folder))))


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_named_once(tiny, tmp_path, kind):
    problems = problems_in(damaged(tiny, tmp_path / kind, kind))
    assert len(problems) == 1, problems
    assert all(part in problems[0] for part in [f"model={tmp_path / kind}", *DAMAGES[kind][1]]), problems[0]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_weights_are_read_straight_to_the_gpu(tiny, monkeypatch, name, method):
    """The meta device stands for the GPU."""
    monkeypatch.setattr("dsft.models.build.has_gpu", lambda: True)
    monkeypatch.setattr("dsft.runtime.distributed.device", lambda: torch.device("meta"))
    model = build_model(TrainConfig(model=str(tiny / name), method=method), dtype="float32")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_sharded_weights_of_either_format_and_tied_ones_are_whole(tiny, tmp_path):
    for name, change in {"shards": shard, "pickle": as_pickle}.items():
        change(shutil.copytree(tiny / "model", tmp_path / name))
        assert problems_in(tmp_path / name) == []
    for architecture in ("gpt2", "gemma3", "mixtral"):  # tied, tied, experts stored one by one
        assert problems_in(write_model(tmp_path / architecture, architecture)) == []


def test_another_copy_of_a_tensor_that_transformers_would_load_is_refused(tiny, tmp_path):
    """An overlay that sorts before the shards loses to their stale copy; one that sorts after them wins."""
    for overlay, problems in {"abliterated": 1, "z": 0, "z/model": 0}.items():
        folder = Path(shutil.copytree(tiny / "model", tmp_path / overlay))
        shard(folder)
        (folder / f"{overlay}.safetensors").parent.mkdir(exist_ok=True)
        save_file({LOST: torch.ones(48, 32)}, folder / f"{overlay}.safetensors", metadata={"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][LOST] = f"{overlay}.safetensors"
        (folder / INDEX).write_text(json.dumps(index))
        refusals = problems_in(folder)
        assert len(refusals) == problems and all("abliterated.safetensors" in each for each in refusals), refusals
        with pytest.raises(UserError, match="remove that copy") if problems else contextlib.nullcontext():
            export(str(folder), str(tmp_path / "out" / overlay))


def claim_tied(folder: Path) -> Path:
    description = json.loads((folder / "config.json").read_text())
    assert not description["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(description | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("change", [shard, as_pickle])
def test_a_head_of_its_own_is_kept_whatever_the_config_says(tiny, options, tmp_path, change):
    """A merged adapter with modules_to_save keeps the claim of its base that embedding and head are tied."""
    plain = tiny / "model"
    claimed = Path(shutil.copytree(plain, tmp_path / "model"))
    change(claimed)
    claim_tied(claimed)
    losses, perplexities = [], []
    for name, model in {"plain": plain, "claimed": claimed}.items():
        run = options(tmp_path / name, model=str(model), zero="3")
        train_all(1, [run], tmp_path / f"{name}.log")
        losses.append(torch.load(tmp_path / name / "logits.pt"))
        words = {"model": [str(model)], "data": [str(tiny / "held_out.jsonl")], "seq_len": 32, "zero": "3"}
        perplexities += on_ranks(1, _perplexity, words)
    torch.testing.assert_close(losses[1], losses[0])
    assert perplexities[0] == perplexities[1]
    final = tmp_path / "claimed" / "final"
    description = json.loads((final / "config.json").read_text())
    assert description["tie_word_embeddings"] is False
    assert description["rope_theta"] == 10000, "for transformers 4"
    assert "lm_head.weight" in load_file(final / "model.safetensors")
    out = export(str(claimed), str(tmp_path / "out"))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_of_another_name_on_disk_is_compared_too(tmp_path):
    """GPT-NeoX's is embed_out there."""
    folder = claim_tied(write_model(tmp_path / "model", "gpt_neox"))
    assert not load_model_config(str(folder)).tie_word_embeddings


def _perplexity(evaluation: dict) -> float:
    return next(evaluate_all(EvalConfig(**evaluation))).perplexity.perplexity


def test_shards_with_a_head_that_the_config_ties_are_refused(tiny, tmp_path):
    folder = claim_tied(Path(shutil.copytree(tiny / "model", tmp_path / "checkpoint-2")))
    (folder / "model.safetensors").unlink()
    (folder / "global_step2").mkdir()
    weights = {"module": AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict()}
    torch.save(weights, folder / "global_step2" / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="1 tensor of its weights have no place in the model, lm_head.weight"):
        build_model(EvalConfig(model=str(folder)), dtype="float32")


@pytest.mark.parametrize("part", ["w1", "w2"])
def test_an_expert_that_is_missing_on_disk_is_named(tmp_path, part):
    """transformers fuses the experts while they load, and would make up those of a layer that lacks one."""
    folder, lost = write_model(tmp_path / "model", "mixtral"), f"experts.2.{part}.weight"
    change_tensors(folder, lambda tensors: tensors.pop(next(name for name in tensors if name.endswith(lost))))
    problems = problems_in(folder)
    assert len(problems) == 1 and "missing" in problems[0], problems
    with pytest.raises(UserError, match="its config"):
        build_model(TrainConfig(model=str(folder)), dtype="float32")


def _refusals(training: dict, evaluation: dict) -> list[str]:
    """What this rank says of a training, an evaluation, and a load without the checks before them."""

    def load() -> None:
        section = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(training["zero"])}}
        registered = HfDeepSpeedConfig(section)  # shards while it lives
        build_model(TrainConfig(model=training["model"]), dtype="float32")
        del registered

    said = []
    for start in (lambda: train(training), lambda: next(evaluate_all(EvalConfig(**evaluation))), load):
        try:
            start()
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind", grid(["missing", "mismatched", "unexpected"], ["missing"]))
@pytest.mark.parametrize("zero", grid(["0", "3"], ["3"]))
def test_every_rank_refuses_them_sharded_or_not(tiny, options, tmp_path, kind, zero):
    folder = damaged(tiny, tmp_path / kind, kind)
    training = options(tmp_path / "run", model=str(folder), zero=zero)
    evaluation = {"model": [str(folder)], "data": [str(tiny / "held_out.jsonl")], "seq_len": 32, "zero": zero}
    for trained, evaluated, loaded in on_ranks(2, _refusals, training, evaluation):
        assert all(DAMAGES[kind][1][0] in text and "\n" not in text for text in (trained, evaluated)), (
            trained,
            evaluated,
        )
        # Under ZeRO-3 transformers reports no tensors that are left over.
        assert LOST in loaded or kind == "unexpected"
    assert not (tmp_path / "run" / "final").exists()


@pytest.fixture
def adapter(tiny, tmp_path) -> Path:
    config = TrainConfig(model=str(tiny / "model"), method="lora", lora_modules_to_save=["lm_head"])
    build_model(config, dtype="float32").save_pretrained(tmp_path / "adapter")
    return write_tokenizer(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop(min(name for name in tensors if "lora_A" in name)), ["lora_A", "missing"]),
        (lambda tensors: tensors.pop("base_model.model.lm_head.weight"), ["lm_head", "missing"]),
        (
            lambda tensors: tensors.update({"base_model.model.model.layers.7.x.lora_A.weight": torch.ones(2, 2)}),
            ["layers.7"],
        ),
        (lambda tensors: tensors.update({min(tensors): torch.ones(3, 3)}), ["[3, 3]"]),
    ],
    ids=["tensor", "module", "unexpected", "mismatched"],
)
def test_a_damaged_adapter_is_refused_in_training_and_evaluation(tiny, options, adapter, tmp_path, change, expected):
    change_tensors(adapter, change, file="adapter_model.safetensors")
    run = options(tmp_path / "run", method="lora", adapter=str(adapter))
    evaluation = {"model": str(adapter), "data": str(tiny / "held_out.jsonl"), "seq_len": 32}
    result = run_entry("dsft.train", flags(run))
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("dsft: error:") == 1 and "Traceback" not in result.stderr
    with pytest.raises(UserError) as caught:
        evaluate(**evaluation, progress=False)
    for text, name in ((result.stderr, f"adapter={adapter}"), (str(caught.value), f"model={adapter}")):
        assert all(part in text for part in [name, *expected]), text


def test_an_adapter_that_lost_its_file_or_whose_file_is_cut_names_it(tiny, options, adapter, tmp_path):
    evaluation = {"model": str(adapter), "data": str(tiny / "held_out.jsonl"), "seq_len": 32, "progress": False}
    assert evaluate(**evaluation).perplexity.tokens > 0
    cut(adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"adapter_model.safetensors: cannot be read"):
        evaluate(**evaluation)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors"):
        evaluate(**evaluation)
