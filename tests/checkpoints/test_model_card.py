"""The README of a trained model says what it was made of and what was measured."""

import yaml

from dsft.checkpoints.model_card import model_card

RUN = {
    "config": {
        "model": "org/base",
        "method": "lora",
        "data": ["a.jsonl", "b.jsonl"],
        "learning_rate": 1e-4,
        "max_steps": -1,
        "num_train_epochs": 2.0,
        "global_batch_size": None,
        "seq_len": 64,
        "lora_r": 16,
        "hub_token": "secret",
    },
    "machine": "2 x H100",
    "world_size": 2,
    "plan": {"reason": "ZeRO-2 is the fastest that fits"},
    "results": {"eval_perplexity": 12.34567891, "tokens_seen": 1234567, "peak_gpu_gib": None, "steps": 8, "log": []},
    "versions": {"torch": "2.9", "bitsandbytes": None},
}


def parts(run: dict, **changes) -> tuple[dict, str]:
    card = model_card(run, **{"data": "40 rows", "held_out": ""} | changes)
    assert card.startswith("---\n")
    _, header, text = card.split("---\n", 2)
    return yaml.safe_load(header), text


def test_the_card_names_base_data_options_measurements_and_versions():
    header, text = parts(RUN, held_out="10 rows")
    assert header["base_model"] == "org/base" and header["library_name"] == "peft"
    assert header["pipeline_tag"] == "text-generation" and header["tags"] == ["dsft", "deepspeed"]
    assert "# base, finetuned (lora)" in text and "Trained from `org/base` with dsft on 2 x H100, 2 ranks." in text
    assert "`a.jsonl`, `b.jsonl`: 40 rows\n\nHeld out: 10 rows" in text
    sections = {part.split("\n")[0]: part.split("\n\n")[1].splitlines() for part in text.split("## ")[2:]}
    assert sections["Training"] == [
        "- learning_rate: 0.0001",
        "- num_train_epochs: 2.0",
        "- seq_len: 64",
        "- lora_r: 16",
        "- plan: ZeRO-2 is the fastest that fits",
    ]
    assert sections["Measured"] == [
        "- held-out perplexity: 12.3457",
        "- optimizer steps: 8",
        "- tokens seen: 1,234,567",
    ]
    assert sections["Versions"] == ["torch 2.9"]
    assert "secret" not in text


def test_a_full_finetuning_of_a_local_folder_names_no_base_of_the_hub_and_no_adapter(tmp_path):
    config = RUN["config"] | {"method": "full", "model": str(tmp_path)}
    header, text = parts(RUN | {"config": config, "world_size": 1})
    assert "base_model" not in header and header["library_name"] == "transformers"
    assert "lora_r" not in text and "1 rank." in text and "Held out" not in text
