"""Options from YAML and flags; what no run can mean is refused, by name and once."""

import enum
import random
import typing
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import pytest
import yaml

from dsft.cli.commands import ChatOptions, PlanOptions, PreviewOptions
from dsft.config.options import HINTS, OURS, EvalConfig, LaunchOptions, TrainConfig
from dsft.config.reader import (
    BOUNDS,
    check_values,
    convert,
    field_types,
    make_config,
    read_command,
    read_config,
    read_flags,
    read_yaml,
    training_types,
)
from dsft.errors import UserError


def test_names_of_other_trainers_are_not_options_and_mean_options_that_exist():
    ours = training_types().keys() | field_types(EvalConfig).keys()
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # names, than the oldest transformers
    assert (OURS.keys() | HINTS.keys()) & ours <= {"dataset_name", *newer}
    assert set(OURS.values()) <= ours
    assert OURS.keys() & HINTS.keys() == set()


def test_a_name_of_another_trainer_is_taken_with_a_note_and_not_beside_ours():
    problems: list[str] = []
    given = {"base_model": "m", "data": "d", "output_dir": "o", "cutoff_len": 512, "zero": "zero2", "dtype": "bf16"}
    given["lora_target"] = ["all"]
    config = make_config(TrainConfig, given, problems)
    assert problems == []
    assert (config.model, config.seq_len, config.zero, config.dtype) == ("m", 512, "2", "bfloat16")
    assert config.lora_target_modules == ["all-linear"]
    names = {"base_model": "model", "cutoff_len": "seq_len", "lora_target": "lora_target_modules"}
    assert config.notes == tuple(f"{theirs}: read as {ours}" for theirs, ours in names.items())
    make_config(TrainConfig, given | {"seq_len": 256}, problems)
    assert problems == ["cutoff_len: unknown key; seq_len is set too, and has the same meaning: keep one"]


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "auto_resume_from_checkpoints"])
@pytest.mark.parametrize(("value", "checkpoint"), [(False, None), ("false", None), (True, "auto"), ("true", "auto")])
def test_a_switch_in_place_of_a_checkpoint_is_none_or_the_last_one(name, value, checkpoint):
    problems: list[str] = []
    config = make_config(TrainConfig, {"model": "m", "data": "d", "output_dir": "o", name: value}, problems)
    assert problems == [] and config.value("resume_from_checkpoint") == checkpoint


def test_a_flag_given_twice_is_one_list_where_its_field_is_a_list_and_a_problem_elsewhere():
    problems: list[str] = []
    words = "--data a b --seq_len 8 --data=c --seq-len 9 --packing --packing false --local_rank=0"
    flags, _ = read_flags(words.split())
    checked = check_values(flags, field_types(TrainConfig), problems)
    assert checked == {"data": ["a", "b", "c"]}
    assert problems == [
        "seq_len: given 2 times (8, 9); keep one",
        "packing: given 2 times (True, false); keep one",
    ]
    problems.clear()
    read_config(TrainConfig, ["--config", "a.yaml", "--config", "b.yaml"], problems)
    assert "--config: needs the path of one YAML file" in problems


def test_a_key_that_stands_twice_in_a_file_is_named_with_its_lines(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: x\nfsdp_config:\n  a: 1\n  a: 2\n")
    problems: list[str] = []
    read_yaml(str(path), problems)
    assert problems == [f"--config {path}: not valid YAML: line 4: duplicate key a, first on line 3; keep one"]
    problems.clear()
    read_config(TrainConfig, ["--learning_rates", '{"a": 1, "a": 2}'], problems)
    assert "learning_rates: line 1: duplicate key a, first on line 1; keep one" in problems


def test_nested_aliases_are_refused_since_they_have_no_end(tmp_path):
    (tmp_path / "run.yaml").write_text("lora_options: &a {x: 1}\nfsdp_config:\n  <<: *a\n  y: 2\n")
    assert read_yaml(str(tmp_path / "run.yaml"), [])["fsdp_config"] == {"x": 1, "y": 2}
    lines = ["a: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 9))]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    problems: list[str] = []
    read_yaml(str(tmp_path / "run.yaml"), problems)
    assert "line 5: more than 10 aliases (*name); write them out" in problems[0]


def test_a_command_takes_its_own_options_from_among_the_others():
    """A switch takes no word but true or false, so that the word behind it stays where it is."""
    words = (
        "train --no_preflight --num-gpus 2 --packing --bind_cores_to_rank false --data a b --dry_run=true --hostfile"
    )
    flags, left = read_flags(words.split(), field_types(LaunchOptions))
    switches = {"no_preflight": True, "bind_cores_to_rank": "false", "dry_run": "true"}
    assert flags == switches | {"num_gpus": "2", "hostfile": True}
    assert " ".join(left) == "train --packing --data a b"


@dataclass
class Copy:
    source: str
    out: str
    _: KW_ONLY
    dtype: Literal["auto", "float32"] = "auto"
    parts: list[int] = field(default_factory=list)


def test_a_lone_yaml_is_the_configuration(tmp_path):
    file, problems = tmp_path / "run.yaml", []
    file.write_text("model: m\ndata: t.jsonl\noutput_dir: out\n")
    config = read_config(TrainConfig, [str(file), "--learning_rate", "0.1"], problems)
    assert problems == [] and (config.model, config.training["learning_rate"]) == ("m", 0.1)


def test_words_of_a_command_may_stand_before_between_and_after_its_flags():
    expected = Copy("a", "b", dtype="float32")
    for line in ("a b --dtype float32", "a --dtype float32 b", "--dtype=float32 a b"):
        assert read_command(Copy, line.split()) == expected
    assert read_command(Copy, ["a", "b", "--parts", "1", "2", "--parts", "3"]).parts == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("a b c", ["unexpected argument 'c'"]),
        ("a b --dtyp float32", ["--dtyp: unknown key; did you mean 'dtype'?"]),
        (
            "a b --dtype double --parts x",
            ["dtype: invalid choice: 'double' (choose from auto, float32", "parts: expected a whole number, got 'x'"],
        ),
    ],
)
def test_a_command_names_every_word_it_cannot_use(line, named):
    with pytest.raises(UserError) as error:
        read_command(Copy, line.split())
    assert len(error.value.problems) == len(named)
    assert all(problem.startswith(start) for problem, start in zip(error.value.problems, named, strict=True))


def test_a_text_that_yaml_reads_as_a_number_with_a_point_is_asked_for_in_quotes(tmp_path):
    path, problems = tmp_path / "a.yaml", []
    path.write_text("model: m\ndata: x\noutput_dir: o\nrevision: 1.10\nlora_target_modules: [a, 1.50]\nzero: 3\n")
    config = read_config(TrainConfig, ["--config", str(path)], problems)
    assert sorted(problems) == [
        "lora_target_modules: expected a text, got the number 1.5; write it in quotes",
        "revision: expected a text, got the number 1.1; write it in quotes",
    ]
    assert config.zero == "3"
    assert read_config(TrainConfig, ["--revision", "1.10"], []).revision == "1.10"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: 1\nb: [\n", "not valid YAML"),
        (b"a: \xff\n", "not valid UTF-8 (invalid start byte at byte 3)"),
        (b"- a\n- b\n", "must contain 'key: value' lines, found a list"),
        (b"a: \x00", "not valid YAML"),
        (b"day: !!int x\n", "not valid YAML"),
        (None, "cannot be read (No such file or directory)"),
    ],
    ids=["syntax", "bytes", "list", "control character", "type", "missing"],
)
def test_an_unreadable_file_is_the_only_problem(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    for cls in (TrainConfig, EvalConfig):
        problems: list[str] = []
        assert read_config(cls, ["--config", str(path), "--seq_len", "8"], problems) == cls()
        assert len(problems) == 1 and problems[0].startswith(f"--config {path}: {expected}"), problems


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("1e-4", float, 1e-4),
        (3, float, 3.0),
        ("7", int, 7),
        ("-7", int, -7),
        ("true", bool, True),
        ("no", bool, False),
        ("none", int | None, None),
        ("a", list[str], ["a"]),
        (["a", "b"], list[str], ["a", "b"]),
        ("x", str | list[str], "x"),
        ('{"a": 1}', dict | str, {"a": 1}),
        ({"a": "1e-6", "b": "-.5E3", "c": "1.2.3e5"}, dict, {"a": 1e-6, "b": -500.0, "c": "1.2.3e5"}),
        (4, Literal[4, 8], 4),
        ("8", Literal[4, 8], 8),
        (3, str, "3"),
    ],
)
def test_values_of_files_and_flags_take_the_field_s_type(value, hint, expected):
    assert convert(value, hint) == expected


WRONG = [("1.5", int), (1.5, int), (True, int), ("x", float), (1, bool), ("5", Literal[4, 8]), ({}, str), ("{", dict)]


@pytest.mark.parametrize(("value", "hint"), WRONG)
def test_wrong_types_are_refused(value, hint):
    with pytest.raises(ValueError):
        convert(value, hint)


def values_of(hint, chance: random.Random) -> object:
    """Some value of an option of this type, as a YAML file has it; None where it takes no plain one."""
    members = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return chance.choice(members)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return chance.choice([*hint]).value
    if typing.get_origin(hint) in (list, Sequence):
        return [values_of(members[0], chance) for _ in range(chance.randint(1, 3))]
    if members:
        return values_of(next((each for each in members if isinstance(each, type)), members[0]), chance)
    words = ["a", "true", "1e-4", "ü", "x y", "no", "3", "a=b", "{", "null: 1"]
    plain = {bool: chance.random() < 0.5, int: chance.randint(-9, 9), float: chance.uniform(-9, 9)}
    return (plain | {str: chance.choice(words), typing.Any: "my_code:name"}).get(hint)


@pytest.mark.parametrize("cls", [TrainConfig, EvalConfig])
@pytest.mark.parametrize("seed", range(6))
def test_a_file_and_flags_with_the_same_options_are_the_same_run_or_the_same_problems(tmp_path, cls, seed):
    """Of every option, those of transformers included; some values are refused, with the same words."""
    chance = random.Random(seed)
    types = dict(training_types() if cls is TrainConfig else field_types(cls))
    types.pop("local_rank", None)  # a launcher adds that flag
    drawn = {name: values_of(types[name], chance) for name in chance.sample(sorted(types), k=25)}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(drawn, allow_unicode=True))
    words = []
    for name, value in drawn.items():
        texts = [str(item) for item in (value if isinstance(value, list) else [value])]
        words += [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]
    of_file, of_flags = [], []
    first, second = read_config(cls, ["--config", str(path)], of_file), read_config(cls, words, of_flags)
    assert first == second
    # A value is quoted as it was given: 3 in a file, '3' on a command line.
    assert [problem.replace("'", "") for problem in of_file] == [problem.replace("'", "") for problem in of_flags]


TRAIN = {"model": "m", "data": "d.jsonl", "output_dir": "run"}
EVAL = {"model": "m", "data": "d.jsonl"}


def problems_of(cls: type, **changes) -> list[str]:
    problems: list[str] = []
    make_config(cls, (TRAIN if cls is TrainConfig else EVAL) | changes, problems)
    return problems


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_steps", 0, "must be at least 1, or -1"),
        ("lora_options", "{" * 3000, "neither JSON nor YAML"),
        ("dataloader_num_workers", 100_000, "must be at least 0 and at most 256"),
        ("load_timeout", 1e300, "at most 1,000,000 seconds"),
        ("data_seed", 2**32, "must be at least 0 and less than 4294967296"),
    ],
)
def test_a_number_out_of_bounds_is_named_once_with_its_bounds(name, value, expected):
    problems = problems_of(TrainConfig, **{name: value})
    assert len(problems) == 1 and problems[0].startswith(name) and expected in problems[0], problems


@pytest.mark.parametrize("cls", [TrainConfig, EvalConfig, LaunchOptions, PlanOptions, PreviewOptions])
def test_no_whole_number_is_beyond_what_libraries_count(cls):
    hints = training_types() if cls is TrainConfig else field_types(cls)
    names = [name for name, hint in hints.items() if int in (hint, *typing.get_args(hint))]
    assert names
    for value in (10**30, -(10**30)):
        problems: list[str] = []
        check_values(dict.fromkeys(names, value), hints, problems)
        named = [problem.partition("=")[0] for problem in problems]
        assert named == names, f"{value}: {sorted(set(names) ^ set(named))}"


def test_every_bound_is_of_an_option_and_lets_its_default_through():
    """A bound of a name that no option has any more would hold nothing."""
    types = training_types() | field_types(EvalConfig, LaunchOptions, PreviewOptions, ChatOptions, PlanOptions)
    names = [*BOUNDS]
    assert len(set(names)) == len(names) and set(names) <= types.keys()
    assert problems_of(TrainConfig) == problems_of(EvalConfig) == []
    assert problems_of(TrainConfig, max_steps=-1, save_steps=0.5, weight_decay=0, data_seed=0, seed=0) == []


CONTRADICTIONS = [
    {"global_batch_size": 8, "gradient_accumulation_steps": 2},
    {"packing": True, "train_sampling_strategy": "random"},
    {"early_stopping_threshold": 0.1},
    {"seq_len": 1},
    {"dataloader_persistent_workers": True},
    {"metric_for_best_model": "bleu"},
    {"metric_for_best_model": "eval_code_los", "eval_data": {"code": "a"}},
    {"eval_data": {"macro": "a"}},
    {"eval_data": {"a set": "a"}},
    {"early_stopping_patience": 2},
    {"early_stopping_patience": 2, "eval_data": ["a"], "eval_strategy": "no"},
    {"optim": "galore_adamw_layerwise"},
    {"optim": "adalomo"},
    {"load_best_model_at_end": True, "save_only_model": True},
    {"adapter": "a"},
    {"bf16": True, "fp16": True},
    {"bf16": True, "dtype": "float32"},
    {"prompt_template": "{a}"},
    {"data_format": "template"},
    {"completion_template": "{a}", "data_format": "text"},
]
"""Options that cannot stand together, one fault each."""


@pytest.mark.parametrize("changes", CONTRADICTIONS, ids=str)
def test_a_contradiction_is_one_problem_that_names_an_option_of_it_and_goes_with_either(changes):
    problems = problems_of(TrainConfig, **changes)
    assert len(problems) == 1 and any(name in problems[0] for name in changes), problems
    if len(changes) > 1:  # without one of its options there is no contradiction left
        left = [problems_of(TrainConfig, **{key: changes[key] for key in changes if key != name}) for name in changes]
        assert [] in left, left


@pytest.mark.parametrize(
    ("changes", "is_fine"),
    [
        ({"stride": 1, "seq_len": 8}, True),
        ({"stride": 7, "seq_len": 8}, True),
        ({"stride": 8, "seq_len": 8}, False),
        ({"batch_tokens": 8, "seq_len": 8}, True),
        ({"batch_tokens": 7, "seq_len": 8}, False),
        ({"batch_tokens": 512, "protocol": "llama.cpp"}, True),  # whose windows have 512 tokens
        ({"save_tokens": True}, False),
        ({"quantization": ["none", "nf4", "none"]}, False),
        ({"save_tokens": True, "output_dir": "o"}, True),
        ({"bad_rows": "drop"}, False),
    ],
    ids=str,
)
def test_an_evaluation_that_contradicts_itself_is_refused_and_its_neighbour_is_not(changes, is_fine):
    assert (problems_of(EvalConfig, **changes) == []) == is_fine


def test_none_is_a_text_where_texts_are_taken_and_null_leaves_an_option_unset():
    problems: list[str] = []
    given = {"model": "m", "data": "d", "output_dir": "o", "report_to": "none", "run_name": "none", "lora_r": None}
    config = make_config(TrainConfig, given, problems)
    assert problems == []
    assert config.training["report_to"] == config.training["run_name"] == "none" and config.lora_r == 16
    assert make_config(TrainConfig, given | {"report_to": "None"}, problems).training["report_to"] == "none"
    config = make_config(TrainConfig, given | {"report_to": None}, problems)
    assert problems == [] and config.training["report_to"] == "none"  # as by default
