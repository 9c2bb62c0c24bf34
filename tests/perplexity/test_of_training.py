"""An evaluation takes from a training what both must share."""

import json

import pytest
import yaml
from conftest import read_json
from ranks import run_entry, train_all
from tiny import write_jsonl, write_pairs

from dsft.api import evaluate
from dsft.checkpoints.run_folder import FINAL, write_run
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.perplexity.modes import protocol_config
from dsft.perplexity.of_training import evaluation_config, read_evaluation

TEMPLATES = {"prompt_template": "Q: {ask}\nA: ", "completion_template": "{answer}", "too_long": "truncate"}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Trained: `share`, which holds a share of its texts out, and `templates`, with held-out rows in columns."""
    folder = tmp_path_factory.mktemp("runs")
    base = {"model": str(tiny / "model"), "seq_len": 48, "max_steps": 2, "per_device_train_batch_size": 2}
    base |= {"learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, "eval_strategy": "steps"}
    rows = [json.loads(line) for line in write_pairs(folder / "pairs.jsonl", 30).read_text().splitlines()]
    rows = write_jsonl(folder / "rows.jsonl", [{"ask": row["prompt"], "answer": row["completion"] * 3} for row in rows])
    share = base | {"data": str(tiny / "texts.jsonl"), "eval_fraction": 0.2, "data_seed": 3}
    templates = base | TEMPLATES | {"data": str(rows), "eval_data": str(rows), "train_on": "all", "eval_steps": 2}
    cases = {"share": share, "templates": templates}
    train_all(1, [case | {"output_dir": str(folder / name)} for name, case in cases.items()], folder / "log")
    for name, case in cases.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(case | {"output_dir": str(folder / name)}))
    return folder


@pytest.mark.parametrize("name", ["share", "templates"])
def test_the_evaluation_of_a_run_is_that_of_its_training(runs, name):
    logged = read_json(runs / name / "run.json")["results"]
    evaluation = evaluate(run=str(runs / name), progress=False)
    assert evaluation.perplexity.perplexity == pytest.approx(logged["eval_perplexity"], rel=1e-6)
    # Documents are the units, whatever windows they are cut into.
    bounds = [logged[f"eval_perplexity_{end}"] for end in ("low", "high")]
    assert evaluation.intervals["perplexity"] == pytest.approx(bounds, rel=1e-5)
    assert evaluation.model == str(runs / name / "final")


def test_a_file_of_a_training_is_read_by_the_evaluation(runs, tmp_path):
    """The command line alone adds where results go."""
    config, out = runs / "share.yaml", tmp_path / "out"
    done = run_entry("dsft.eval_ppl", ["--config", config, "--output_dir", out])
    assert done.returncode == 0, done.stderr
    (report,) = read_json(out / "perplexity.json")["results"]
    assert report["model"] == str(runs / "share" / "final") and not (runs / "share" / "perplexity.json").exists()


def test_a_protocol_keeps_its_own_length_beside_that_of_a_training(tmp_path):
    """By the training's file as by its run; what is named for the evaluation counts."""
    run = tmp_path / "run"
    values = {"model": "m", "data": ["d.jsonl"], "eval_data": ["e.jsonl"], "output_dir": str(run), "seq_len": 48}
    write_run(str(run), config=values)
    (run / FINAL).mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"max_steps": 1}))
    for words in (["--config", str(tmp_path / "run.yaml")], ["--run", str(run)]):

        def lengths(*more: str, words: list[str] = words) -> list[int]:
            config = read_evaluation([*words, *more], problems := [])
            assert not problems
            return [protocol_config(config, 4096).seq_len]

        assert (lengths(), lengths("--protocol", "gptq")) == ([48], [2048]), words
        assert lengths("--protocol", "gptq", "--seq_len", "64") == [64], words
        assert lengths("--protocol", "hf", "--stride", "512") == [1024], words


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16: true", "bfloat16"), ("bf16: false", "float32"), ("dtype: float16\nbf16: false", "float16"), ("", "auto")],
)
def test_an_evaluation_computes_in_what_the_flags_of_its_training_ask_for(tmp_path, given, dtype):
    values = f"model: m\ndata: d.jsonl\neval_data: e.jsonl\noutput_dir: {tmp_path}\nmax_steps: 1\n{given}\n"
    (tmp_path / "run.yaml").write_text(values)
    config = read_evaluation(["--config", str(tmp_path / "run.yaml")], problems := [])
    assert (config.dtype, problems) == (dtype, [])


def test_what_is_read_of_a_training(runs, tiny, tmp_path):
    values = yaml.safe_load((runs / "templates.yaml").read_text()) | {"output_dir": str(tmp_path / "new")}

    def read(*flags: str, **changes):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | changes))
        problems: list[str] = []
        return read_evaluation(["--config", str(tmp_path / "run.yaml"), *flags], problems), problems

    config, problems = read()
    assert problems == [] and config.model == [str(tiny / "model")]  # nothing is trained yet
    shared = {"train_on": "all", "seq_len": 48} | TEMPLATES
    assert {name: getattr(config, name) for name in shared} == shared and config.output_dir is None
    config, problems = read("--model", "other", "--data", "a.jsonl", "--seq_len", "32", eval_data=[])
    assert problems == [] and (config.model, config.data, config.seq_len) == (["other"], ["a.jsonl"], 32)
    assert "has no held-out data" in " ".join(read(eval_data=[])[1])
    assert "leraning_rate: unknown key" in " ".join(read(leraning_rate=1.0)[1])
    config = evaluation_config({"run": str(runs / "templates")}, problems := [])
    assert not problems and {name: getattr(config, name) for name in shared} == shared


def test_an_option_that_a_training_s_file_leaves_out_is_that_of_the_training(tmp_path):
    """It drops what is too long, and an evaluation by itself cuts it."""
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: d.jsonl\neval_data: e.jsonl\noutput_dir: new\nmax_steps: 1\n")
    for more, expected in (([], "drop"), (["--too_long", "split"], "split")):
        config = read_evaluation(["--config", str(file), *more], problems := [])
        assert (config.too_long, config.seq_len, problems) == (expected, TrainConfig.seq_len, [])


def test_a_model_of_a_run_has_the_tokenizer_that_it_was_trained_with(tmp_path):
    """The final folder has it, with the tokens of add_tokens; the one that `tokenizer` names has them not."""
    (tmp_path / "final").mkdir()
    options = {"model": "base", "tokenizer": "theirs", "chat_template": "chatml", "output_dir": str(tmp_path)}
    write_run(str(tmp_path), config=options | {"data": ["d.jsonl"], "eval_data": ["e.jsonl"], "add_tokens": ["<act>"]})

    def names(**given) -> tuple:
        config = evaluation_config({"run": str(tmp_path)} | given, problems := [])
        assert not problems
        return config.tokenizer, config.chat_template

    assert (
        names() == names(model=str(tmp_path / "checkpoint-10")) == names(model=["base", str(tmp_path)]) == (None, None)
    )
    assert names(model="base") == ("theirs", "chatml")
    assert names(tokenizer="mine") == ("mine", None)


def test_a_run_that_cannot_be_evaluated_is_one_problem(runs, tmp_path):
    for run, part in ((tmp_path, "is not a run folder"), (tmp_path / "started", "has no final model yet")):
        if run != tmp_path:
            run.mkdir()
            (run / "run.json").write_text((runs / "share" / "run.json").read_text())
        with pytest.raises(UserError, match=part) as caught:
            evaluate(run=str(run), progress=False)
        assert len(caught.value.problems) == 1, caught.value.problems
