"""Real trainings on 2 ranks, then one look at what each left on disk."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags, grid, needed_cases, read_json
from peft import PeftModel
from ranks import PROBE, run_entry, train_all
from tiny import ARCHITECTURES, write_model
from transformers import AutoModelForCausalLM

from dsft.checkpoints.export import export
from dsft.checkpoints.manifest import checkpoints
from dsft.cli.main import main
from dsft.errors import EXIT_STOPPED

pytestmark = pytest.mark.launch
KINDS = [
    (architecture, method, zero) for architecture in ARCHITECTURES for method in ("full", "lora") for zero in ("2", "3")
]
QUICK = [
    ("llama", "full", "3"),
    ("gpt2", "full", "2"),  # a tied head, learned positions
    ("gemma3", "lora", "3"),  # a tied head, sliding windows
    ("qwen2_moe", "lora", "2"),  # experts
]
"""Architectures that differ in structure, both methods in both stages."""
VARIANTS = [
    "dora",
    "adapter-continued",
    "checkpointing",
    "bf16",
    "stage-0",
    "stage-1",
    "own-file",
    "offload",
    "offload-param",
    "chat",
]
STAGES = VARIANTS[4:9]
OF_OTHERS = ["stage-1", "offload", "checkpointing", "own-file", "chat"]
"""What other quick cases hold too: resharding trains in stage 1, offload-param offloads the optimizer as well, dora
recomputes activations, test_resume_groups.py goes on from the runs of two files with the stages that they are of, and
test_answers_end.py exports a model of chats.
"""
CONTINUES = {
    "resumed": "uninterrupted",
    "lora-resumed": "lora-uninterrupted",
    "adapter-continued": "lora-uninterrupted",
}
"""Cases that begin with what another one has left."""


@pytest.fixture(scope="module")
def runs(request, tiny, options, tmp_path_factory):
    """Folder with one run per case that a selected test needs; all trained by the same ranks."""
    folder = tmp_path_factory.mktemp("runs")
    cases = []
    needed = needed_cases(request)
    for architecture in ARCHITECTURES:
        if any(name.startswith(f"{architecture}-") for name in needed):
            write_model(folder / f"model-{architecture}", architecture)
    for architecture, method, zero in KINDS:
        lora = {"lora_r": 4} if method == "lora" else {}
        cases.append(
            options(
                folder / f"{architecture}-{method}-{zero}",
                model=str(folder / f"model-{architecture}"),
                method=method,
                zero=zero,
                **lora,
            )
        )
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 5, "max_steps": 4, "logging_steps": 1}
    held_out = {"eval_data": str(tiny / "held_out.jsonl"), "eval_on_start": True}
    small, large = ({"per_device_eval_batch_size": size} | held_out for size in (1, 16))
    pairs = {"data": str(tiny / "pairs.jsonl"), "logging_steps": 1, "zero": "2"}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "report_to": "tensorboard"}
    best |= {"learning_rate": 0.3, "lr_scheduler_type": "constant", "eval_data": held_out["eval_data"]}
    dora = {"use_dora": True, "use_rslora": True, "lora_target_modules": ["q_proj", "down_proj"]}
    dora |= {"lora_modules_to_save": ["lm_head"], "activation_checkpointing": True}
    others = {
        "accumulate-1": pairs | large | {"per_device_train_batch_size": 4},
        "accumulate-4": pairs | {"per_device_train_batch_size": 1, "global_batch_size": 8},
        "uninterrupted": saves | small | {"zero": "3"},
        "resumed": saves | small | {"zero": "3"},
        "lora-uninterrupted": saves | {"zero": "2", "method": "lora"},
        "lora-resumed": saves | {"zero": "2", "method": "lora"},
        "best": best | {"zero": "2", "max_steps": 4, "save_strategy": "steps", "save_steps": 1},
        "dora": dora | {"zero": "3", "method": "lora"},
        "adapter-continued": {"zero": "3", "method": "lora", "adapter": str(folder / "lora-uninterrupted" / "final")},
        "checkpointing": {"zero": "3", "activation_checkpointing": True, "method": "lora"},
        "bf16": {"zero": "3", "bf16": True, "gradient_accumulation_steps": 2},
        "stage-0": {"zero": "0"},
        "stage-1": {"zero": "1"},
        "own-file": {"zero": str(ROOT / "ds_configs" / "zero2.json")},
        "offload": {"zero": "3-offload"},
        "offload-param": {"zero": "3-offload-param"},
        "chat": {"model": str(tiny / "chat"), "data": str(_chats(folder / "chats.jsonl"))},
    }
    for name, source in CONTINUES.items():
        if name.endswith("resumed"):
            others[name]["resume_from_checkpoint"] = str(folder / source / "checkpoint-2")
    cases += [options(folder / name, **changes) for name, changes in others.items()]
    needed |= {CONTINUES[name] for name in needed & CONTINUES.keys()}
    cases = [case for case in cases if Path(case["output_dir"]).name in needed]
    assert {Path(case["output_dir"]).name for case in cases} == needed
    train_all(2, cases, folder / "log.txt")
    return folder


def _chats(path):
    from tiny import sentences, write_jsonl

    return write_jsonl(
        path,
        [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
            for text in sentences(20, longest=8)
        ],
    )


def trained_logits(folder):
    assert (folder / "logits.pt").is_file(), f"{folder.name} did not end; see log.txt beside it"
    return torch.load(folder / "logits.pt")


def logits_of(model):
    with torch.no_grad():
        return model.eval()(PROBE).logits


def weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.cases("{architecture}-{method}-{zero}")
@pytest.mark.parametrize(("architecture", "method", "zero"), grid(KINDS, QUICK))
def test_every_architecture_trains_saves_and_loads_in_plain_transformers(runs, architecture, method, zero):
    folder, base = runs / f"{architecture}-{method}-{zero}", runs / f"model-{architecture}"
    expected = trained_logits(folder)
    model = AutoModelForCausalLM.from_pretrained(base if method == "lora" else folder / "final")
    if method == "lora":
        model = PeftModel.from_pretrained(model, folder / "final")
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-6)
    assert (
        logits_of(AutoModelForCausalLM.from_pretrained(base)) - expected
    ).abs().max() > 1e-2  # it has learnt something


@pytest.mark.cases("{architecture}-{method}-2", "{architecture}-{method}-3")
@pytest.mark.parametrize(
    ("architecture", "method"),
    grid([(a, m) for a, m, zero in KINDS if zero == "2"], [("qwen2_moe", "lora")]),
)
def test_stage_2_and_3_train_the_same_model(runs, architecture, method):
    """In as many floating-point operations, though parameters of stage 3 are empty."""
    folders = [runs / f"{architecture}-{method}-{zero}" for zero in "23"]
    torch.testing.assert_close(*map(trained_logits, folders), rtol=1e-3, atol=1e-4)
    flos = [read_json(folder / "run.json")["results"]["log"][-1]["total_flos"] for folder in folders]
    assert flos[0] == flos[1] > 0


@pytest.mark.cases("uninterrupted", "accumulate-1")
def test_evaluation_in_training_does_not_move_with_batch_size_or_stage(runs, tiny):
    from dsft.api import evaluate

    alone = evaluate(
        model=str(tiny / "model"), data=str(tiny / "held_out.jsonl"), seq_len=64, progress=False
    ).perplexity
    for name in ("uninterrupted", "accumulate-1"):
        first = next(entry for entry in read_json(runs / name / "run.json")["results"]["log"] if "eval_loss" in entry)
        assert first["eval_tokens"] == alone.tokens
        assert first["eval_loss"] == pytest.approx(alone.loss, rel=1e-6)
        assert first["eval_perplexity"] == pytest.approx(alone.perplexity, rel=1e-5)


@pytest.mark.cases("uninterrupted")
def test_the_last_evaluation_is_that_of_the_saved_model(runs, tiny):
    from dsft.api import evaluate

    folder = runs / "uninterrupted"
    alone = evaluate(model=str(folder), data=str(tiny / "held_out.jsonl"), seq_len=64, progress=False)
    assert read_json(folder / "run.json")["results"]["eval_loss"] == pytest.approx(alone.perplexity.loss, rel=1e-6)


@pytest.mark.cases("accumulate-1", "accumulate-4")
def test_accumulation_can_be_exchanged_for_batch_size(runs):
    """Sequences of different lengths: the loss is a mean over tokens, not over micro batches."""
    at_once, in_four = (weights(runs / f"accumulate-{n}" / "final") for n in (1, 4))
    for name in at_once:
        torch.testing.assert_close(at_once[name], in_four[name], rtol=1e-4, atol=1e-5)
    losses = [
        [
            entry["loss"]
            for entry in read_json(runs / f"accumulate-{n}" / "run.json")["results"]["log"]
            if "loss" in entry
        ]
        for n in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.cases("{prefix}uninterrupted", "{prefix}resumed")
@pytest.mark.parametrize("prefix", grid(["", "lora-"], [""]))
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(runs, prefix):
    uninterrupted, resumed = (
        read_json(runs / f"{prefix}{name}" / "run.json")["results"]["log"] for name in ("uninterrupted", "resumed")
    )
    losses = [{entry["step"]: entry["loss"] for entry in log if "loss" in entry} for log in (uninterrupted, resumed)]
    assert losses[0] == losses[1] and set(losses[0]) == {1, 2, 3, 4}
    assert torch.equal(trained_logits(runs / f"{prefix}uninterrupted"), trained_logits(runs / f"{prefix}resumed"))


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", ["uninterrupted", "lora-uninterrupted"])
def test_a_run_that_is_done_is_as_it_was_written(runs, name, capsys):
    main(["verify", str(runs / name)])
    assert capsys.readouterr().out.count(" is complete: ") == 3, "two checkpoints and final/"
    assert "learning_rate" in (runs / name / "final" / "README.md").read_text(), "dsft's card, not peft's"


@pytest.mark.cases("best")
def test_the_best_model_is_kept(runs):
    results = read_json(runs / "best" / "run.json")["results"]
    evaluations = [entry["eval_loss"] for entry in results["log"] if "eval_loss" in entry]
    assert (
        results["eval_loss"] == min(evaluations) < evaluations[-2]
    )  # the last entry is the best model, evaluated again
    assert str(checkpoints(str(runs / "best"))[0]) == results["best_checkpoint"]


@pytest.mark.cases("best")
def test_tensorboard_gets_the_loss(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list((runs / "best").rglob("events.out.tfevents.*"))
    events = [event for file in files for event in _scalars(EventAccumulator(str(file)).Reload(), "eval/loss")]
    logged = [
        (entry["step"], pytest.approx(entry["eval_loss"], rel=1e-5))
        for entry in read_json(runs / "best" / "run.json")["results"]["log"]
        if "eval_loss" in entry
    ]
    assert sorted((event.step, event.value) for event in events if event.step < 4) == [
        pair for pair in logged if pair[0] < 4
    ]


def _scalars(accumulator, tag: str) -> list:
    return accumulator.Scalars(tag) if tag in accumulator.Tags()["scalars"] else []


@pytest.mark.cases("dora")
def test_dora_rslora_targets_and_modules_to_save_reach_peft(runs):
    adapter = read_json(runs / "dora" / "final" / "adapter_config.json")
    assert adapter["use_dora"] and adapter["use_rslora"]
    assert set(adapter["target_modules"]) == {"q_proj", "down_proj"} and adapter["modules_to_save"] == ["lm_head"]


@pytest.mark.cases("adapter-continued", "lora-uninterrupted")
def test_an_adapter_can_be_trained_on(runs):
    shape = read_json(runs / "adapter-continued" / "final" / "adapter_config.json")
    assert shape["r"] == 16
    assert (trained_logits(runs / "adapter-continued") - trained_logits(runs / "lora-uninterrupted")).abs().max() > 1e-3


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(VARIANTS, [name for name in VARIANTS if name not in OF_OTHERS]))
def test_each_variant_exports_to_a_plain_folder_with_the_trained_logits(runs, tmp_path, name):
    out = export(str(runs / name), str(tmp_path / "out"))
    loaded = logits_of(AutoModelForCausalLM.from_pretrained(out)).float()
    tolerance = 5e-2 if name == "bf16" else 1e-4
    torch.testing.assert_close(loaded, trained_logits(runs / name).float(), rtol=tolerance, atol=tolerance)


@pytest.mark.cases("llama-full-3", "{name}")
@pytest.mark.parametrize("name", grid(STAGES, [name for name in STAGES if name not in OF_OTHERS]))
def test_stages_and_files_agree(runs, name):
    expected = trained_logits(runs / "llama-full-3")
    torch.testing.assert_close(trained_logits(runs / name), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.cases("{name}")
@pytest.mark.parametrize(
    ("name", "zero"),
    grid(
        [(name, zero) for name in ("uninterrupted", "lora-uninterrupted") for zero in "03"],
        [("uninterrupted", "3"), ("lora-uninterrupted", "0")],
    ),
)
def test_perplexity_reads_shards_directly(runs, tiny, name, zero):
    """The folder of DeepSpeed's own shards, of 2 ranks under ZeRO-3 and ZeRO-2, read in one process, gives what the
    saved model gives.
    """
    from dsft.api import evaluate

    options = {"data": str(tiny / "held_out.jsonl"), "seq_len": 64, "zero": zero, "progress": False}
    shards = evaluate(model=str(runs / name / "checkpoint-4" / "global_step4"), **options).perplexity
    assert shards.nats == pytest.approx(evaluate(model=str(runs / name / "final"), **options).perplexity.nats, rel=1e-6)


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", ["uninterrupted", "lora-uninterrupted"])
def test_shards_alone_can_be_exported(runs, tmp_path, name):
    source = shutil.copytree(runs / name / "checkpoint-4", tmp_path / "shards")
    next(source.glob("*model.safetensors")).unlink()
    final = weights(export(str(runs / name / "final"), str(tmp_path / "final")))
    for each in (source, source / "global_step4"):
        shards = weights(export(str(each), str(tmp_path / f"of-{each.name}")))
        torch.testing.assert_close(shards, final, rtol=0, atol=0 if name == "uninterrupted" else 1e-7)


@pytest.mark.cases("gemma3-lora-3")
def test_run_json_tells_the_whole_story(runs):
    content = read_json(runs / "gemma3-lora-3" / "run.json")
    assert content["status"] == "done" and content["world_size"] == 2
    assert content["config"]["learning_rate"] == 1e-2 and content["config"]["zero"] == "3"
    assert content["plan"]["zero"] == "3" and content["plan"]["reason"]
    assert {"torch", "deepspeed", "transformers"} <= content["versions"].keys()
    results = content["results"]
    assert results["steps"] == 2 and results["tokens_seen"] == 2 * 2 * 2 * 64
    assert results["tokens_per_second"] > 0 and results["peak_host_gib"] > 0
    assert any("loss" in entry and "grad_norm" in entry for entry in results["log"])


def test_a_model_of_nan_weights_stops_at_the_first_step(options, tiny, tmp_path):
    folder = shutil.copytree(tiny / "model", tmp_path / "nan")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    model.save_pretrained(folder)
    result = run_entry("dsft.train", flags(options(tmp_path / "run", model=str(folder))))
    assert result.returncode == EXIT_STOPPED, result.stderr
    assert result.stderr.count("dsft: error: the loss is NaN or infinite at step 1; nothing had been saved yet") == 1
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_loss_that_overflows_stops_is_reported_and_leaves_the_checkpoint_as_it_was(options, tiny, tmp_path):
    # The warm-up's first step has learning rate 0, the second overflows the weights, the third sees it.
    changes = {
        "max_steps": 9,
        "learning_rate": 1e30,
        "warmup_steps": 4,
        "max_grad_norm": 0,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 5,
    }
    result = run_entry("dsft.train", flags(options(tmp_path / "run", **changes)), world=2)
    assert result.returncode == EXIT_STOPPED, result.stdout + result.stderr
    assert (
        result.stderr.count("is NaN or infinite at step 3; the last checkpoint") == 1
        and "is untouched" in result.stderr
    )
    before, kept = weights(tiny / "model"), weights(tmp_path / "run" / "checkpoint-1")
    assert all(torch.equal(before[name], kept[name]) for name in before)
    content = read_json(tmp_path / "run" / "run.json")
    assert content["status"] == "stopped" and "NaN or infinite" in content["error"] and content["results"]["steps"] >= 1


def test_overwrite_replaces_a_run_and_auto_continues_one(options, tmp_path):
    out = tmp_path / "run"
    saving = {"save_strategy": "steps", "save_steps": 2}

    def train(**changes):
        return run_entry("dsft.train", flags(options(out, **changes)))

    assert train(**saving).returncode == 0
    assert train().returncode == 2
    continued = train(max_steps=4, resume_from_checkpoint="auto", **saving)
    assert continued.returncode == 0 and "resuming from" in continued.stdout
    assert read_json(out / "run.json")["results"]["steps"] == 4
    final = (out / "final" / "model.safetensors").read_bytes()
    finished = train(max_steps=4, resume_from_checkpoint="auto", **saving)
    assert finished.returncode == 0 and "training is already complete" in finished.stdout
    assert (out / "final" / "model.safetensors").read_bytes() == final
    assert train(overwrite=True).returncode == 0
    assert read_json(out / "run.json")["results"]["steps"] == 2 and not checkpoints(str(out))
