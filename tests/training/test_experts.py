"""Mixtures of experts train to the same losses on any ranks and stage, also where ranks reach other experts."""

import json

import pytest
import torch
from conftest import read_json
from ranks import train_all
from tiny import write_jsonl, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.build import build_model

pytestmark = pytest.mark.launch
LISTED = """
import torch
from torch import nn
from transformers import LlamaForCausalLM

class Experts(nn.Module):
    def __init__(self, mlps, width):
        super().__init__()
        self.gate = nn.Linear(width, len(mlps), bias=False)
        self.experts = nn.ModuleList(mlps)

    def forward(self, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            places = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, places, self.experts[number](flat[places]) * shares[places, None])
        return out.reshape(hidden.shape)

class Listed(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Experts([type(layer.mlp)(config) for _ in range(8)], config.hidden_size)
        self.post_init()
"""


def write_listed(folder):
    """A model whose experts are modules of a list, as remote code has them; of 8, a token takes one."""
    write_model(folder)
    (folder / "modeling_listed.py").write_text(LISTED)
    config = read_json(folder / "config.json")
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_listed.Listed"}, "architectures": ["Listed"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    how = {"trust_remote_code": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **how), **how)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def losses(options, tmp_path_factory):
    """(ranks, stage) -> losses; each rank has one short row of few tokens in a micro batch."""
    folder = tmp_path_factory.mktemp("experts")
    rows = [{"prompt": word * 2, "completion": f" {word}"} for word in ("a", "of", "the", "big", "node", "fast")]
    data = str(write_jsonl(folder / "rows.jsonl", rows))
    model = str(write_model(folder / "model", "mixtral", num_local_experts=8, num_experts_per_tok=1))
    losses_of = {}
    for world, zeros in ((1, ["2"]), (2, ["2", "3"])):
        cases = {
            (world, zero): options(
                folder / f"{world}-{zero}",
                model=model,
                data=data,
                zero=zero,
                max_steps=4,
                logging_steps=1,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=2 // world,
                dtype="float32",
            )
            for zero in zeros
        }
        output = train_all(world, list(cases.values()), folder / f"log-{world}")
        for case, told in cases.items():
            assert (folder / told["output_dir"] / "logits.pt").is_file(), output[-5000:]
            log = read_json(folder / told["output_dir"] / "run.json")["results"]["log"]
            losses_of[case] = [entry["loss"] for entry in log if "loss" in entry]
    return losses_of


@pytest.mark.parametrize("zero", ["2", "3"])
def test_ranks_that_reach_other_experts_train_to_the_losses_of_one_rank(losses, zero):
    assert losses[2, zero] == pytest.approx(losses[1, "2"], rel=1e-4)


def test_experts_in_a_list_are_refused_on_several_ranks(tmp_path, monkeypatch):
    """Ranks that reach different ones would wait for each other, or add up their gradients."""
    options = TrainConfig(model=str(write_listed(tmp_path / "listed")), trust_remote_code=True)
    assert build_model(options, dtype="float32")
    monkeypatch.setattr("dsft.models.build.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match="its experts are a list of modules, of which each rank reaches others"):
        build_model(options, dtype="float32")


def test_the_loss_of_the_router_is_logged(options, tiny, tmp_path):
    model = str(write_model(tmp_path / "model", "mixtral"))
    cases = {name: {"router_aux_loss": value} for name, value in {"none": None, "off": 0.0, "on": 0.1}.items()}
    runs = [options(tmp_path / name, model=model, logging_steps=1, **changes) for name, changes in cases.items()]
    output = train_all(1, runs, tmp_path / "log")
    lines = {name: read_json(tmp_path / name / "run.json")["results"]["log"][0] for name in cases}
    assert "aux_loss" not in lines["none"] and "aux_loss" not in lines["off"], output
    assert 0.1 < lines["on"]["aux_loss"] < 0.4, "at an even load the loss is the number of experts that a token takes"
    assert lines["on"]["loss"] == pytest.approx(lines["off"]["loss"], rel=1e-5)
