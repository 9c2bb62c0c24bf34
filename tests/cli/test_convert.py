"""`dsft convert`: files of axolotl, LLaMA-Factory and TRL become a run.yaml that a training reads."""

import pytest
import yaml

from dsft.cli.main import main

AXOLOTL = {
    "base_model": "Qwen/Qwen3-0.6B",
    "datasets": [{"path": "owner/name", "name": "part", "split": "train", "type": "chat_template"}],
    "adapter": "qlora",
    "load_in_4bit": True,
    "sequence_len": 2048,
    "sample_packing": True,
    "evals_per_epoch": 4,
    "flash_attention": True,
    "wandb_project": None,
    "auto_resume_from_checkpoints": False,
    "output_dir": "out",
    "bf16": "auto",
}
LLAMA_FACTORY = {
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "template": "qwen",
}
TRL = {"model_name_or_path": "m", "dataset_name": "owner/name", "max_length": 512, "use_peft": True, "lr": 1e-4}
CASES = [
    (
        AXOLOTL,
        {
            "model": "Qwen/Qwen3-0.6B",
            "data": ["owner/name:part:train"],
            "method": "qlora",
            "quantization": "nf4",
            "seq_len": 2048,
            "packing": True,
            "output_dir": "out",
            "resume_from_checkpoint": False,
            "bf16": "auto",
        },
        ["evals_per_epoch", "flash_attention"],
    ),
    (LLAMA_FACTORY, {"method": "lora", "lora_r": 8, "lora_target_modules": "all"}, ["stage", "template"]),
    (TRL, {"model": "m", "data": "owner/name", "seq_len": 512, "method": "lora", "learning_rate": 1e-4}, []),
]


@pytest.mark.parametrize(("given", "expected", "left_out"), CASES, ids=["axolotl", "LLaMA-Factory", "TRL"])
def test_the_usual_options_are_converted_and_the_others_named(given, expected, left_out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(given))
    main(["convert", "theirs.yaml"])
    text = (tmp_path / "run.yaml").read_text()
    assert yaml.safe_load(text) == expected
    screen = capsys.readouterr().out
    for name in left_out:
        assert f"# {name}: left out" in text and f"dsft: {name}: left out" in screen
    assert not [line for line in screen.splitlines() if "to do" in line and "missing" not in line]


@pytest.mark.parametrize(("content", "expected"), [("", "contains no options"), (None, "cannot be read")])
def test_what_cannot_be_converted_is_one_line_and_makes_no_folder(content, expected, tmp_path, capsys):
    if content is not None:
        (tmp_path / "theirs.yaml").write_text(content)
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "theirs.yaml"), "--out", str(tmp_path / "new/run.yaml")])
    assert f"theirs.yaml: {expected}" in capsys.readouterr().err and not (tmp_path / "new").exists()
