"""What a training leaves in its process."""

import transformers
from ranks import on_ranks, trained


def _shapes_after_training(case: dict) -> list[int]:
    trained(case)
    model = transformers.AutoModelForCausalLM.from_pretrained(case["model"])
    return [parameter.numel() for parameter in model.parameters()]


def test_a_training_under_zero_3_leaves_from_pretrained_of_its_process_as_it_was(options, tmp_path):
    (sizes,) = on_ranks(1, _shapes_after_training, options(tmp_path / "run", zero="3", max_steps=1))
    assert min(sizes) > 0
