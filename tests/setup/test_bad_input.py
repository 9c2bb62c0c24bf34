"""Each mistake of a user gives one sentence that names the key or file and the way out, before weights load."""

import json
import shutil
import subprocess

import pytest

from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.runtime.hardware import this_machine
from dsft.setup.arguments import check_hub
from dsft.setup.decide import check_run, resolve_run, resume_decisions


@pytest.fixture
def problems_of(options, tmp_path):
    def check(*, world_size: int = 2, **changes) -> list[str]:
        problems: list[str] = []
        config = make_config(TrainConfig, options(tmp_path / "run", **changes), problems)
        return list(check_run(config, this_machine(ranks_per_node=world_size), problems).problems)

    return check


def test_a_good_configuration_has_no_problems(problems_of):
    assert problems_of() == []
    assert problems_of(method="lora", zero="3", eval_fraction=0.2, global_batch_size=8) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": "no/such/set", "data_split": "train"}, ["data: no/such/set"]),
        ({"method": "lora", "lora_modules_to_save": ["nothing"]}, ["lora_modules_to_save: 'nothing'"]),
        (
            {
                "load_best_model_at_end": True,
                "eval_fraction": 0.2,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "save_strategy": "steps",
                "save_steps": 3,
            },
            ["round multiple"],
        ),
        ({"adapter": "./nowhere", "method": "lora"}, ["adapter=./nowhere"]),
        ({"report_to": ["tensorboard", "none"]}, ["report_to=", "none is not supported"]),
        ({"optim": "adamw_bnb_8bit"}, ["optim=adamw_bnb_8bit: ", "bitsandbytes"]),
        ({"optim": "lion_32bit"}, ["optim=lion_32bit: ", "bitsandbytes"]),
        ({"optim": "grokadamw"}, ["optim=grokadamw: ", "grokadamw"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_mistake_is_named_once(problems_of, changes, expected):
    problems = problems_of(**changes)
    assert len(problems) == 1, problems
    assert all(part in problems[0] for part in expected), problems[0]


def test_quantisation_names_what_it_cannot_be_combined_with(problems_of, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    for zero in ("3", "3-offload", "2-offload", str(path)):
        assert any(
            f"method=qlora cannot be combined with zero={zero}" in problem and "else method lora" in problem
            for problem in problems_of(method="qlora", zero=zero)
        )


@pytest.mark.filterwarnings("error")
def test_what_a_library_takes_is_no_problem_and_no_warning(problems_of):
    end = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 2e-3}}
    assert problems_of(learning_rate=5e-3, **end) == []
    for how in ({"use_reentrant": True}, {"every_n_layers": 2, "offload": True}):
        assert problems_of(activation_checkpointing=True, activation_checkpointing_kwargs=how) == []
    (problem,) = problems_of(learning_rate=-1)
    assert problem.startswith("learning_rate=-1")


OTHERS = {"list": "[]", "null": "null", "text": '"x"', "nothing": "", "bytes": b"\xff\xfe"}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_model_that_holds_something_else_is_one_problem(problems_of, tiny, tmp_path, file, content):
    folder = shutil.copytree(tiny / "model", tmp_path / "model")
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    problems = problems_of(model=str(folder))
    assert len(problems) == 1 and str(folder) in problems[0], problems


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_an_adapter_s_description_that_holds_something_else_is_one_problem(problems_of, tmp_path, content):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "tokenizer.json").touch()
    for more in ({}, {"add_tokens": ["<tool>"]}):  # for which tokens are looked at first
        (problem,) = problems_of(method="lora", adapter=str(folder), **more)
        assert f"{folder}/adapter_config.json: " in problem and "tokenizer: none" not in problem


def test_a_push_to_the_hub_is_refused_without_one():
    (problem,) = check_hub(TrainConfig(training={"push_to_hub": True, "hub_token": "hf_of_nobody"}))
    assert problem.startswith("push_to_hub: login to the hub failed") and "leave it out" in problem
    assert check_hub(TrainConfig()) == []


def test_a_checkpoint_of_a_plain_trainer_is_refused_with_what_can_be_taken_of_it(tiny, tmp_path):
    plain = tmp_path / "plain" / "checkpoint-1"
    shutil.copytree(tiny / "model", plain)
    (plain / "trainer_state.json").write_text('{"global_step": 1}')
    training = {"output_dir": str(tmp_path / "run"), "resume_from_checkpoint": str(plain)}
    with pytest.raises(UserError, match="contains no DeepSpeed states.* start from its weights.* a new output_dir"):
        resume_decisions(TrainConfig(training=training), 1)
    for content in OTHERS.values():
        (plain / "trainer_state.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match="trainer_state.json: (cannot be read as JSON|has no global_step)"):
            resume_decisions(TrainConfig(training=training), 1)


def test_all_problems_come_at_once(problems_of):
    problems = problems_of(bogus=1, max_steps="x", data="nowhere.jsonl", zero="9", model="./nowhere")
    assert len(problems) >= 5
    for part in ("bogus", "max_steps", "nowhere.jsonl", "zero=9", "model=./nowhere"):
        assert any(part in problem for problem in problems), part


@pytest.mark.parametrize(
    ("section", "changes", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            {"per_device_train_batch_size": 2},
            ["train_micro_batch_size_per_gpu=4", "per_device_train_batch_size=2"],
        ),
        ({"bf16": {"enabled": True}}, {"dtype": "float32"}, ["bf16.enabled=true", "dtype=float32"]),
        ({"bf16": {"enabled": False}}, {"dtype": "bfloat16"}, ["bf16.enabled=false", "dtype=bfloat16"]),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}, ["gradient_clipping=0.5", "max_grad_norm=1.0"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
            {"learning_rate": 1e-4},
            ["optimizer.params.lr=1e-05", "learning_rate=0.0001"],
        ),
    ],
)
def test_a_deepspeed_json_that_contradicts_flags_names_both_values(problems_of, tmp_path, section, changes, expected):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | section))
    problems = problems_of(zero=str(path), **changes)
    assert len(problems) == 1, problems
    assert all(part in problems[0] for part in expected), problems[0]


def test_a_deepspeed_json_sets_what_no_flag_says_and_its_optimizer_gets_the_learning_rate(options, tmp_path):
    content = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    config = make_config(TrainConfig, options(tmp_path / "run", zero=str(path), per_device_train_batch_size=None), [])
    checked = check_run(config, this_machine(ranks_per_node=2))
    assert checked.problems == [] and checked.options.value("per_device_train_batch_size") == 3
    reasons = {decision.name: decision.reason for decision in checked.decisions}
    assert reasons["per_device_train_batch_size"] == f"{path} has train_micro_batch_size_per_gpu=3"
    assert checked.zero_file["optimizer"]["params"]["lr"] == "auto", "DeepSpeed's own would be 1e-3"


def test_the_folder_of_another_run_is_refused_and_stays_as_it_was(problems_of, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    problems = problems_of()
    assert len(problems) == 1 and "contains another run" in problems[0] and "--overwrite" in problems[0]
    assert (
        problems_of(overwrite=True) == []
        and problems_of(resume_from_checkpoint="auto") == []
        and problems_of(resume_from_checkpoint=True) == []
    )
    assert (folder / "run.json").read_text() == "{}"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 100 KB; root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_too_small_or_full_is_refused(problems_of, options, small_disk):
    config = make_config(TrainConfig, options(small_disk / "run"), [])
    with pytest.raises(UserError, match="the final model .* GB free"):
        resolve_run(config, machine=this_machine(ranks_per_node=1))
    (small_disk / "filler").write_bytes(b"x" * 98 * 1024)
    assert any(
        "cannot be written (No space left on device)" in problem
        for problem in problems_of(output_dir=str(small_disk / "run"))
    )


def test_a_folder_without_weights_and_a_foreign_tokenizer_are_refused(problems_of, tiny, tmp_path):
    folder = shutil.copytree(tiny / "model", tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    assert "contains a config but no weights" in problems_of(model=str(folder))[0]
    content = json.loads((tiny / "model" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"vocab_size": 100}))
    problems = problems_of(model=str(folder / "config.json"))
    assert len(problems) == 1 and "but the model has embeddings for 100" in problems[0]


def test_an_adapter_over_random_weights_is_refused(problems_of, tiny):
    problems = problems_of(model=str(tiny / "model" / "config.json"), method="lora")
    assert len(problems) == 1 and "an adapter is nothing without its base" in problems[0]


def test_overwrite_never_deletes_what_the_run_starts_from(problems_of, tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "run" / "final")
    problems = problems_of(model=str(tmp_path / "run" / "final"), overwrite=True)
    assert len(problems) == 1 and "is inside output_dir" in problems[0]


def test_a_finished_run_without_checkpoints_is_not_trained_again_by_a_resume(problems_of, tmp_path):
    (tmp_path / "run" / "final").mkdir(parents=True)
    problems = problems_of(resume_from_checkpoint="auto")
    assert len(problems) == 1 and "contains a finished run without checkpoints" in problems[0]
