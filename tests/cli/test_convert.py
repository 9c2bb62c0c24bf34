"""`dsft convert`: public configurations of axolotl, LLaMA-Factory and TRL are read as their trainers read them."""

import json
from pathlib import Path

import pytest
import yaml

from dsft.cli.main import main
from dsft.config.elsewhere import DEFAULTS, TRAINERS
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.run_setup.named_files import check_named_files

EXAMPLES = yaml.safe_load(Path(__file__).with_name("trainer_files.yaml").read_text(encoding="utf-8"))
LISTED = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "dpo_en_demo": {"ranking": True, "file_name": "dpo.json"},
    "mllm_demo": {"file_name": "mllm.json", "columns": {"messages": "messages", "images": "images"}},
    "on_hub": {"hf_hub_url": "owner/name", "subset": "all", "columns": {"prompt": "question"}},
}
"""As LLaMA-Factory's data/dataset_info.json has them."""
TODO = ("output_dir: missing", "data: missing")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a user of LLaMA-Factory stands, with its data."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(LISTED))
    for name in ("identity.json", "alpaca_en_demo.json"):
        Path("data", name).write_text('[{"instruction": "Hi", "output": "Hello"}]')
    Path("data/c4_demo.jsonl").write_text('{"text": "some text"}\n')
    Path("saves/llama3-8b/lora/sft").mkdir(parents=True)
    Path("saves/llama3-8b/lora/sft/adapter_config.json").write_text("{}")
    return tmp_path


def convert(folder: Path, given: dict | str, *options: str) -> tuple[dict, str]:
    """The options of the file that is written, and its text."""
    source = folder / ("run.sh" if isinstance(given, str) else "theirs.yaml")
    source.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    (folder / "run.yaml").unlink(missing_ok=True)
    main(["convert", str(source), "--output", str(folder / "run.yaml"), *options])
    text = (folder / "run.yaml").read_text()
    return yaml.safe_load(text) or {}, text


@pytest.mark.parametrize("example", EXAMPLES, ids=[example["source"] for example in EXAMPLES])
def test_a_public_configuration_is_read_as_its_trainer_reads_it(example, folder, capsys):
    given = example.get("command") or example["given"]
    if "refused" in example:
        with pytest.raises(SystemExit):
            convert(folder, given)
        error = capsys.readouterr().err
        assert [name for name in example["refused"] if name not in error] == []
        assert not (folder / "run.yaml").exists()
        return
    values, text = convert(folder, given)
    assert values == example["becomes"]
    named = {line[2:].split(":")[0] for line in text.split("to look at:")[-1].splitlines() if line.startswith("# ")}
    assert {name for names in named for name in names.split(", ")} >= set(example.get("named", []))
    screen = capsys.readouterr().out
    assert [name for name in example.get("named", []) if f"dsft: {name}" not in screen] == []
    # a training takes it, but for what the example lacks
    problems: list[str] = []
    config = read_config(TrainConfig, ["--config", str(folder / "run.yaml")], problems)
    assert [problem for problem in problems if not problem.startswith(TODO)] == []
    assert check_named_files(config) == []
    # nothing of it vanishes
    if isinstance(given, dict):
        silent = [name for name in given if name not in text and given[name] not in (False, 0, "sft", "none")]
        assert silent == []


def test_ten_examples_of_each_trainer_are_held():
    for trainer in TRAINERS:
        assert sum(example["trainer"] == trainer for example in EXAMPLES) >= 10
    assert DEFAULTS.keys() == TRAINERS.keys()


def test_a_deepspeed_json_that_is_here_is_the_users_own_and_else_one_of_dsft(folder):
    given = {
        "base_model": "m",
        "datasets": [{"path": "owner/name"}],
        "deepspeed": "ds/zero3_bf16_cpuoffload_params.json",
    }
    assert convert(folder, given)[0]["zero"] == "3-offload-param"
    Path("ds").mkdir()
    Path(given["deepspeed"]).write_text("{}")
    assert convert(folder, given)[0]["zero"] == given["deepspeed"]
    values, text = convert(folder, given | {"deepspeed": {"zero_optimization": {"stage": 2}}})
    assert "zero" not in values and "# deepspeed: write this object to a JSON file" in text


def test_data_sets_of_axolotl_become_entries_of_data(folder):
    Path("own.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n')
    prompt = {
        "format": "Q: {instruction} {input}",
        "field_instruction": "q",
        "field_input": "note",
        "field_output": "a",
    }
    values, _ = convert(folder, {"base_model": "m", "datasets": [{"path": "own.jsonl", "type": prompt}]})
    assert values["data"] == ["own.jsonl"]
    assert (values["prompt_template"], values["completion_template"]) == ("Q: {q} {note}", "{a}")
    several = [
        {
            "path": "owner/one",
            "name": "part",
            "split": "train[:5%]",
            "type": "chat_template",
            "roles_to_train": ["user"],
        },
        {"path": "owner/two", "split": "train[:9]", "field_messages": "talk", "message_field_role": "who"},
        {"path": "json", "data_files": ["own.jsonl"], "split": "test"},
        {"path": "owner/text", "type": "completion", "field": "chapter", "shards": 4},
    ]
    values, text = convert(folder, {"base_model": "m", "datasets": several})
    assert values["data"] == ["owner/one:part:train[:5%]", "owner/two::train[:9]", "own.jsonl", "owner/text"]
    assert (values["data_format"], values["text_column"]) == ("text", "chapter")
    for note in (
        *("owner/two: rename the column talk to messages", "own.jsonl: a file has no split", "shards: no count"),
        *("owner/two: rename the keys of its messages", "owner/one: roles_to_train user: dsft trains answers"),
        "# datasets: its entries have several forms",
    ):
        assert note in text


def test_files_by_split_become_those_of_the_split_that_is_trained(folder):
    files = {"train": ["own.jsonl", "more.jsonl"], "test": "held.jsonl"}
    given = {"base_model": "m", "datasets": [{"path": "json", "data_files": files}]}
    values, text = convert(folder, given)
    assert values["data"] == ["own.jsonl", "more.jsonl"] and "data_files: test left out" in text
    held_out = given | {"test_datasets": [{"path": "json", "data_files": files, "split": "test"}]}
    assert convert(folder, held_out)[0]["eval_data"] == ["held.jsonl"]


def test_data_sets_of_llamafactory_are_looked_up_in_their_list(folder):
    given = {"stage": "sft", "model_name_or_path": "m", "dataset": "on_hub, identity", "val_size": 100}
    values, text = convert(folder, given)
    assert values["data"] == ["owner/name:all", "data/identity.json"]
    assert "rename its columns question" in text and "# val_size: 100 rows are held out there" in text
    values, text = convert(folder, given | {"dataset_dir": "elsewhere"})
    assert values["data"] == ["on_hub", "identity"] and "elsewhere/dataset_info.json, which is not here" in text


def test_a_shell_script_has_variables_and_lines_that_go_on(folder):
    script = (
        "#!/bin/bash\nMODEL=owner/name\n# trl sft --packing\ntrl sft \\\n  --model_name_or_path ${MODEL} \\\n  --bf16\n"
    )
    values, _ = convert(folder, script)
    assert values["model"] == "owner/name" and values["bf16"] is True and "packing" not in values
    for before, after in (
        ("", " > train.log 2>&1 &"),
        ("cd work && X=1 nohup ", " 2>&1 | tee x.log"),
        ("", "; echo --done"),
    ):
        line = f"{before}trl sft --model_name_or_path m --response_template '<|x|>' --dataset_name d --seed 2{after}"
        values, text = convert(folder, line)
        assert (values["data"], values["seed"]) == (["d"], 2) and "response_template: <|x|>" in text
    Path("more.yaml").write_text("packing: true\nlearning_rate: 1\n")
    values, _ = convert(folder, "trl sft --config more.yaml --model_name_or_path m --learning_rate 3e-4")
    assert values["packing"] is True and values["learning_rate"] == 3e-4
    Path("more.yaml").write_text("base_model: m\nsaves_per_epoch: 0.25\nnum_epochs: 4\n")
    values, text = convert(folder, "axolotl train more.yaml --learning-rate 3e-4")
    assert values["model"] == "m" and values["learning_rate"] == 3e-4
    assert values["save_strategy"] == "epoch" and "save_steps" not in values, "1.0 would be every step"
    assert "# saves_per_epoch: at most once in the whole run" in text


@pytest.mark.parametrize(
    ("given", "options", "problem"),
    [
        ({"seed": 1}, (), "no options of axolotl, llamafactory, trl in it; name the trainer with --from"),
        ({"base_model": "m", "rl": "dpo"}, (), "rl=dpo: dsft trains supervised"),
        ({"base_model": "m", "relora": True}, (), "relora: dsft trains all weights"),
        ({"base_model": "m"}, ("--from", "axolotls"), "did you mean 'axolotl'?"),
        ("echo nothing", (), "expected a .yaml file, or one command line with options; found 0"),
        ("trl sft --a 'b", (), "not a command line (No closing quotation)"),
        ("python scripts/grpo.py --model m", (), "grpo: dsft trains supervised"),
        ("accelerate launch --num_processes 2 trl", (), "dsft trains supervised"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(given, options, problem, folder, capsys):
    with pytest.raises(SystemExit) as ended:
        convert(folder, given, *options)
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and problem in lines[0]
    assert not (folder / "run.yaml").exists()


def test_a_value_that_no_trainer_reads_is_named_and_a_file_that_exists_is_kept(folder, capsys):
    given = {
        "base_model": "m",
        "evals_per_epoch": "often",
        "optimizer": "lion_of_mine",
        "lora_target_modules": "x.(y|z)",
        "flash_attention": "of_mine",
    }
    values, text = convert(folder, given | {"adapter": "lora"})
    assert "# evals_per_epoch: 'often' cannot be read as axolotl has it" in text
    assert "# optimizer: optim: invalid choice: 'lion_of_mine'" in text and "optim" not in values
    assert "# lora_target_modules: a regular expression" in text
    assert "# flash_attention: of_mine: no counterpart; eager, sdpa, " in text
    with pytest.raises(SystemExit):
        main(["convert", "theirs.yaml"])
    assert "run.yaml: exists; name another file with --output" in capsys.readouterr().err
    assert (folder / "run.yaml").read_text() == text


def test_the_trainer_may_be_named(folder):
    theirs = {"model_name_or_path": "m", "additional_target": "embed_tokens,lm_head"}
    values, _ = convert(folder, theirs, "--from", "llamafactory")
    assert values["lora_alpha"] == 16 and values["lora_modules_to_save"] == ["embed_tokens", "lm_head"]
    assert "lora_alpha" not in convert(folder, {"model_name_or_path": "m"}, "--from", "trl")[0]


@pytest.mark.parametrize("given", [{"activation_offloading": True}, {"gradient_checkpointing": "offload"}], ids=str)
def test_activations_that_a_trainer_offloads_are_offloaded(folder, given):
    values, text = convert(folder, {"base_model": "m", "gradient_checkpointing": True} | given)
    assert values["gradient_checkpointing"] is True, text
    assert values["activation_checkpointing_kwargs"] == {"offload": True}
