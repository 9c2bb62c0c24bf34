"""What was written is compared with what was in memory."""

import pytest
import torch

from dsft.checkpoints.readback import TensorsInMemory, readback_errors

MEMORY = {f"layer.{number}.weight": torch.full((2, 3), float(number)) for number in range(10)}


def errors_of(changes: dict[str, torch.Tensor], **options) -> list[str]:
    return readback_errors(TensorsInMemory(MEMORY | changes), MEMORY, **options)


def test_what_was_written_as_it_was_has_no_errors():
    assert errors_of({}) == errors_of({}, sampled=0) == errors_of({}, sampled=3, num_elements=60) == []


def test_every_tensor_is_compared_unless_fewer_are_asked_for():
    changes = {name: tensor + 1 for name, tensor in MEMORY.items()}
    different = [f"{name} reads back differently from what was in memory" for name in MEMORY]
    assert errors_of(changes) == different
    assert errors_of(changes, sampled=5) == different[::2], "spread evenly"
    assert errors_of(changes, sampled=0) == [], "names and shapes alone"


@pytest.mark.parametrize("sampled", [None, 0, 3])
def test_shapes_are_compared_of_all_and_named_alone(sampled):
    changes = {"layer.9.weight": torch.zeros(3, 2), "layer.0.weight": torch.full((2, 3), 5.0)}
    expected = ["layer.9.weight is [3, 2] on disk, [2, 3] in memory"]
    assert errors_of(changes, sampled=sampled) == expected


def test_empty_and_missing_tensors_are_named_first():
    assert errors_of({"layer.4.weight": torch.zeros(0, 3)}) == ["layer.4.weight is empty on disk"]
    assert errors_of({}, num_elements=61) == ["61 trained elements expected, 60 written"]


def test_a_tensor_is_compared_in_the_dtype_it_was_written_in():
    third = {"weight": torch.full((2,), 1 / 3)}
    assert readback_errors(TensorsInMemory({"weight": third["weight"].bfloat16()}), third) == []
    adapter = {"lora_A.default.weight": torch.ones(2)}  # peft writes no adapter's name
    assert readback_errors(TensorsInMemory({"lora_A.weight": torch.zeros(2)}), adapter) != []
