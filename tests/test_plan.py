import dataclasses

import pytest
from transformers import AutoConfig

from dsft.api import plan
from dsft.config import TrainConfig
from dsft.machine import GB, GiB, Machine, parse_bytes, parse_gpus, this_machine
from dsft.model_size import measure_model
from dsft.plan import activation_bytes, all_plans, choose_plan, state_bytes
from dsft.problems import UserError
from tiny import ARCHITECTURES

LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 8192, "tie_word_embeddings": False}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for name, values in (("8b", LLAMA_8B), ("70b", LLAMA_70B)):
        ARCHITECTURES["llama"][0](**values).save_pretrained(folder / name)
    return {name: str(folder / name / "config.json") for name in ("8b", "70b")}


def gpus(number: int = 8, gigabytes: int = 80, *, nodes: int = 1, host: int = 1000) -> Machine:
    return Machine(nodes=nodes, ranks_per_node=number, device_bytes=gigabytes * GB, host_bytes=host * GB, has_gpu=True)


def test_parameters_are_counted_exactly(configs):
    assert measure_model(TrainConfig(model=configs["8b"])).num_params == 8_030_261_248  # as published for Llama 3.1 8B
    assert measure_model(TrainConfig(model=configs["70b"])).num_params == 70_553_706_496
    # r x (in + out) of the seven linear layers, times layers
    per_layer = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert measure_model(TrainConfig(model=configs["8b"], method="lora", lora_r=16)).num_trainable == 32 * per_layer


@pytest.mark.parametrize(
    ("name", "machine", "method", "zero"),
    [
        ("8b", gpus(), "full", "1"),
        ("8b", gpus(8, 48), "full", "2"),
        ("8b", gpus(1, 80), "lora", "1"),
        ("8b", gpus(1, 80), "full", "2-offload"),
        ("8b", gpus(1, 24), "qlora", "1"),
        ("70b", gpus(8, 80), "lora", "3"),
        ("70b", gpus(8, 80, nodes=2), "full", "3-offload-optimizer"),
        ("70b", gpus(8, 80, nodes=4), "full", "3"),
        ("70b", gpus(8, 80, nodes=2), "lora", "3-hpz"),
    ],
)
def test_the_choice_for_known_models_and_machines(configs, name, machine, method, zero):
    chosen, candidates, _ = plan(configs[name], machine=machine, method=method, dtype="bfloat16")
    assert chosen.fits and chosen.zero == zero, chosen
    assert chosen.reason and any(dataclasses.replace(chosen, reason="") == one for one in candidates)


def test_what_does_not_fit_names_the_resource_that_binds(configs):
    size = measure_model(TrainConfig(model=configs["70b"]))
    chosen = choose_plan(size, gpus(1, 24, host=200), micro_batch_tokens=1024, half=True)
    assert not chosen.fits and "nothing fits" in chosen.reason and "GiB of host memory" in chosen.reason
    # 2 x 8 x 80 GB with 768 GB hosts: killed in practice when the optimizer is offloaded
    forced = choose_plan(size, gpus(8, 80, nodes=2, host=600), micro_batch_tokens=1024, half=True, zero="3-offload-optimizer")
    assert forced.binds == "host memory"


def test_states_follow_the_zero_paper(configs):
    size, machine = measure_model(TrainConfig(model=configs["8b"])), gpus(8)
    psi = size.num_params
    bucket = 2 * 2 * 200_000_000
    assert state_bytes("1", size, machine, half=True)[0] == pytest.approx(4 * psi + 12 * psi / 8 + bucket)
    assert state_bytes("2", size, machine, half=True)[0] == pytest.approx(2 * psi + 14 * psi / 8 + bucket)
    live = 2 * 1e9
    buckets = 2 * 2 * (4096**2 + size.largest_module_params)
    assert state_bytes("3", size, machine, half=True)[0] == pytest.approx(16 * psi / 8 + live + buckets)


def test_more_of_anything_never_needs_less(configs):
    size = measure_model(TrainConfig(model=configs["8b"]))
    for checkpointing in (False, True):
        assert activation_bytes(size, 2048, checkpointing=checkpointing, half=True) == 2 * activation_bytes(size, 1024, checkpointing=checkpointing, half=True)
    assert activation_bytes(size, 1024, checkpointing=True, half=True) < activation_bytes(size, 1024, checkpointing=False, half=True)
    peaks = [all_plans(size, gpus(n), micro_batch_tokens=1024, half=True)[2].device_bytes for n in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_planned(tmp_path, architecture):
    cls, values = ARCHITECTURES[architecture]
    cls(**values).save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tmp_path)
    for method in ("full", "lora"):
        chosen, _, size = plan(str(tmp_path / "config.json"), machine=gpus(), method=method, seq_len=128, dtype="bfloat16")
        assert chosen.fits and 0 < size.num_trainable <= size.num_params


@pytest.mark.parametrize("text", ["80", "80G", "GB", "-1GB", "0GB", "80 gigabytes"])
def test_sizes_are_read_strictly(text):
    with pytest.raises(UserError, match="80GB"):
        parse_bytes(text)


def test_gpus_are_a_number_and_a_size():
    assert parse_gpus("8x80GB") == (8, 80 * GB)
    assert parse_gpus("2x40GiB") == (2, 40 * GiB)
    for text in ("0x80GB", "80GB", "8x", "x80GB", "8x80G"):
        with pytest.raises(UserError):
            parse_gpus(text)


def test_this_machine_is_measured():
    machine = this_machine(ranks_per_node=2)
    assert machine.ranks_per_node == 2 and 0 < machine.device_bytes <= machine.host_bytes or machine.has_gpu
