"""`dsft convert`: files of axolotl, LLaMA-Factory and TRL become a run.yaml that a training reads."""

import pytest
import yaml

from dsft.cli.main import main

FILES = {
    "axolotl": {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": [{"path": "owner/name", "name": "part", "split": "train", "type": "chat_template"}],
        "adapter": "qlora",
        "load_in_4bit": True,
        "lora_r": 8,
        "sequence_len": 2048,
        "sample_packing": True,
        "micro_batch_size": 2,
        "num_epochs": 1,
        "evals_per_epoch": 4,
        "flash_attention": True,
        "wandb_project": None,
        "output_dir": "out",
    },
    "llamafactory": {
        "model_name_or_path": "m",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all-linear",
        "cutoff_len": 1024,
        "template": "qwen",
        "output_dir": "out",
    },
    "trl": {"model_name_or_path": "m", "dataset_name": "owner/name", "max_length": 512, "use_peft": True, "lr": 1e-4},
}
EXPECTED = {
    "axolotl": {
        "model": "Qwen/Qwen3-0.6B",
        "data": ["owner/name:part:train"],
        "method": "qlora",
        "quantization": "nf4",
        "lora_r": 8,
        "seq_len": 2048,
        "packing": True,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1.0,
        "output_dir": "out",
    },
    "llamafactory": {
        "model": "m",
        "method": "lora",
        "lora_r": 8,
        "lora_target_modules": "all-linear",
        "seq_len": 1024,
        "output_dir": "out",
    },
    "trl": {"model": "m", "data": "owner/name", "seq_len": 512, "method": "lora", "learning_rate": 1e-4},
}


@pytest.mark.parametrize("trainer", FILES)
def test_the_usual_options_are_converted_and_the_others_named(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FILES[trainer]))
    main(["convert", "theirs.yaml"])
    text = (tmp_path / "run.yaml").read_text()
    assert yaml.safe_load(text) == EXPECTED[trainer]
    screen = capsys.readouterr().out
    left_out = {"axolotl": ["evals_per_epoch", "flash_attention"], "llamafactory": ["stage", "template"], "trl": []}
    for name in left_out[trainer]:
        assert f"# {name}: left out" in text and f"dsft: {name}: left out" in screen
