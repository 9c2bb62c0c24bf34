import importlib.metadata
import json
import subprocess
import sys

import pytest
from tiny import write_model, write_texts

from dsft.cli.main import main, run_command
from dsft.errors import UserError


def test_the_version_is_that_of_the_package(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"dsft {importlib.metadata.version('dsft')}\n"


@pytest.mark.parametrize("words", [["help", "verify"], ["verify", "--help"]])
def test_help_of_a_command_is_that_command_s(words, capsys):
    main(words)
    assert capsys.readouterr().out.startswith("dsft verify FOLDER\n")


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "name a YAML file"),
        (["merge", "file"], "--out must be given"),
        (["quickstart", "file"], "file: File exists"),
        (["export", "file", "out"], "file: is not a folder or a GGUF file"),
        (["verify", LONG], "File name too long"),
        (["plan", "--model", "m", "--host_memory", f"{10**300}GB"], "is not a size"),
        (["plan", "--model", "m", "--nodes", "0"], "nodes=0: must be at least 1"),
        (["preview", "--model", "m", "--data", "file", "--samples", "-1"], "samples=-1: must not be negative"),
        (["train", "--model", "m", "--data", "file", "--output_dir", "o", "--num_gpus", f"{10**9}"], "num_gpus="),
        (["launch", "--master_port", "99999999", "train"], "master_port=99999999: must be at least 0 and less than"),
    ],
    ids=lambda value: " ".join(value).replace(LONG, "LONG")[-60:] if isinstance(value, list) else "",
)
def test_a_word_that_no_command_can_use_gives_one_line(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and expected in error and error.count("dsft: error:") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "loop"], "nothing is written"


MISTYPED = {
    "eval --model m --data d --mode roling": "mode: invalid choice: 'roling' (choose from auto,",
    "eval --model m --data d --protocol gtpq": "(choose from gptq, llama.cpp, lm-eval, hf)",
    "eval --model m --data d --context_curve 1": "context_curve: removed; evaluate once for each seq_len",
    "eval --model m --data d --hostfil h": "hostfil: unknown key; did you mean 'hostfile'?",
    "train --config run.yaml --hostfil h": "hostfil: unknown key; did you mean 'hostfile'?",
    "doctor --hostfil h": "hostfil: unknown key; did you mean 'hostfile'?",
    "doctor --quick --only_finding": "only_finding: unknown key; did you mean 'only_findings'?",
    "doctor hosts": "unexpected argument 'hosts'",
    "plan --model m --interconnec x": "interconnec: unknown key; did you mean 'interconnect'?",
    "preview --model m --data d --sampels 5": "sampels: unknown key; did you mean 'samples'?",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, list]:
    """Exit code, libraries that are loaded by then, and standard error of each of MISTYPED, in one new process."""
    folder = tmp_path_factory.mktemp("mistyped")
    (folder / "run.yaml").write_text("{model: m, data: d, output_dir: new}")
    for name in "md":
        (folder / name).write_text("")
    code = (
        "import contextlib, io, json, sys; from dsft.cli.main import main\n"
        "results = {}\n"
        f"for words in {list(MISTYPED)}:\n"
        "    code, error = 0, io.StringIO()\n"
        "    try:\n"
        "        with contextlib.redirect_stderr(error): main(words.split())\n"
        "    except SystemExit as end: code = end.code\n"
        "    loaded = {'torch', 'transformers', 'deepspeed', 'datasets'} & sys.modules.keys()\n"
        "    results[words] = code, sorted(loaded), error.getvalue()\n"
        "print(json.dumps(results))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.mark.parametrize("words", MISTYPED)
def test_mistyped_options_are_refused_before_torch_loads(refused, words):
    """With the nearest option of that command."""
    code, loaded, error = refused[words]
    assert (code, loaded) == (2, []) and MISTYPED[words] in error


def test_a_training_that_is_done_is_not_started_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "train.jsonl", 4)
    write_model(tmp_path / "base")
    (tmp_path / "run" / "final").mkdir(parents=True)
    for name in ("run.yaml", "run/options.yaml"):
        (tmp_path / name).write_text("{model: base, data: train.jsonl, output_dir: run, max_steps: 7}")
    (tmp_path / "run" / "run.json").write_text('{"status": "done", "results": {"steps": 7}}')
    for more in ([], ["--resume_from_checkpoint", "auto"]):
        with pytest.raises(SystemExit) as ended:
            main(["train", "run.yaml", *more])
        assert not ended.value.code and "run: finished at step 7; --overwrite" in capsys.readouterr().out


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}/file/demo: Not a directory; name another file, folder or disk$"):
        run_command("quickstart", [f"{tmp_path}/file/demo", "--offline"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing half written is left"
