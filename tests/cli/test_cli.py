import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ranks import on_ranks, run_entry
from tiny import ARCHITECTURES

from dsft import errors
from dsft.cli.commands import COMMANDS, Command, PlanOptions
from dsft.cli.main import main, run_command
from dsft.errors import UserError
from dsft.quickstart.make_data import HELD_OUT_PERCENT, split_of, standard_library_docs, write_demo_data
from dsft.runtime import distributed


def test_plan_prints_a_table_and_nothing_else(run, tmp_path):
    cls, values = ARCHITECTURES["llama"]
    cls(**values).save_pretrained(tmp_path)
    table = run(
        [
            "dsft",
            "plan",
            "--model",
            tmp_path / "config.json",
            "--gpus",
            "8x80GB",
            "--nodes",
            "2",
            "--seq_len",
            "128",
            "--all",
        ]
    )
    assert (
        table.returncode == 0 and "3-offload-optimizer" in table.stdout and "is the fastest that fits" in table.stdout
    )
    assert not table.stderr.strip()


def test_the_version_is_that_of_the_package(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"dsft {importlib.metadata.version('dsft')}\n"


def test_garbage_is_collected_again_once_a_command_is_imported(tmp_path, monkeypatch, capsys):
    source = "import gc\nduring = gc.isenabled()\ndef run(options):\n    print(during, gc.isenabled())\n"
    (tmp_path / "room_of_a_command.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "plan", Command("a test's", "room_of_a_command:run", PlanOptions))
    main(["plan"])
    assert capsys.readouterr().out == "False True\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "--model", "./nowhere"], "model=./nowhere"),
        (["plan", "--model", "x", "--gpus", "8x80"], "'80' is not a size"),
        (["plan", "--model", "x", "--nodes", "0"], "--nodes 0"),
        (["merge", "./nowhere", "out"], "./nowhere: is no folder"),
        (["export", "./nowhere", "out"], "./nowhere: is no folder"),
        (["export", "./nowhere"], "out: missing"),
        (["plan", "--model", "x", "--methd", "lora"], "methd: unknown key; did you mean 'method'?"),
        (["plan"], "model: missing"),
        (["doctor", "--num_nodes", "two"], "num_nodes: expected a whole number, got 'two'"),
        (["trian"], "'trian' is no command; did you mean 'train'?"),
    ],
)
def test_commands_end_with_one_clear_line_and_2(arguments, expected):
    result = run_entry("dsft.cli.main", arguments)
    assert result.returncode == 2
    assert expected in result.stderr and result.stderr.count("dsft: error:") == 1 and "Traceback" not in result.stderr


LONG = "x" * 300
INIT = ["init", "--model", "m", "--data", "d", "--out"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["completion", "foo"], "shell: invalid choice: 'foo' (choose from bash, zsh, fish)"),
        ([*INIT, "file"], "file: exists"),
        ([*INIT, "file/run.yaml"], "file: File exists"),
        ([*INIT, f"{LONG}.yaml"], "File name too long"),
        ([*INIT, "/proc/run.yaml"], "/proc/run.yaml: No such file or directory"),
        (["demo-data", "file"], "file: exists and is no folder"),
        (["demo-data", LONG], "File name too long"),
        (["demo-data", "loop"], "loop: exists and is no folder"),
        (["quickstart", "file"], "file: exists and is no folder"),
        (["quickstart", LONG], "File name too long"),
        (["export", "file", "out"], "file: dsft export reads folders of models"),
        (["export", "folder", "loop"], "folder: holds neither safetensors"),
        (["verify", LONG], "File name too long"),
        (["checkpoints", LONG], "File name too long"),
        (["report", LONG], "File name too long"),
        (["compare", LONG], "File name too long"),
        (["plan", "--model", LONG], "File name too long"),
        (["plan", "--model", "m", "--hostfile", LONG], "File name too long"),
        (["plan", "--model", "m", "--host_memory", f"{10**300}GB"], "is not a size"),
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["eval", "--model", "m", "--data", "d", "--mode", "roling"],
            "mode: invalid choice 'roling' (choose from auto,",
        ),
        (
            ["eval", "--model", "m", "--data", "d", "--protocol", "gtpq"],
            "(choose from gptq, gptq-ptb-new, gptq-c4-new, llama.cpp, lm-eval, lm-eval-wikitext-2.0, hf,",
        ),
        (["eval", "--model", "m", "--data", "d", "--context_curve", "1"], "context_curve=1: name at least two lengths"),
        (["eval", "--model", "m", "--data", "d", "--hostfil", "h"], "hostfil: unknown key; did you mean 'hostfile'?"),
        (["train", "--config", "run.yaml", "--hostfil", "h"], "hostfil: unknown key; did you mean 'hostfile'?"),
        (["doctor", "--hostfil", "h"], "hostfil: unknown key; did you mean 'hostfile'?"),
        (["doctor", "--quick", "--only_finding"], "only_finding: unknown key; did you mean 'only_findings'?"),
        (["doctor", "hosts"], "unexpected argument 'hosts'"),
        (["plan", "--model", "m", "--calibrat"], "calibrat: unknown key; did you mean 'calibrate'?"),
        (["preview", "--model", "m", "--data", "d", "--sampels", "5"], "sampels: unknown key; did you mean 'samples'?"),
    ],
)
def test_mistyped_options_are_refused_before_torch_loads(arguments, expected, tmp_path):
    """With the nearest option of that command."""
    (tmp_path / "run.yaml").write_text("{model: m, data: d, output_dir: new}")
    for name in "md":
        (tmp_path / name).write_text("")
    code = (
        "import sys; from dsft.cli.main import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as end: assert end.code == 2\n"
        "loaded = {'torch', 'transformers', 'deepspeed', 'datasets'} & sys.modules.keys()\n"
        "assert not loaded, loaded"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert expected in result.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Written by two processes side by side."""
    folders = [tmp_path_factory.mktemp(name) for name in ("demo-a", "demo-b")]
    on_ranks(2, _write_demo_data, folders)
    return folders


def _write_demo_data(folders) -> None:
    write_demo_data(folders[distributed.rank()])


def test_demo_data_is_the_same_each_time(demo):
    first, second = demo
    files = [path.relative_to(first) for path in first.rglob("*") if path.is_file() and path.suffix != ".yaml"]
    assert len(files) >= 7
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)


def test_no_held_out_module_was_trained_on(demo):
    rows = {
        split: [json.loads(line) for line in (demo[0] / "instructions" / f"{split}.jsonl").open()]
        for split in ("train", "held_out")
    }
    assert len(rows["train"]) > 2000 and 100 < len(rows["held_out"]) < len(rows["train"])
    modules = {name for name, _ in standard_library_docs()}
    held_out = {name for name in modules if split_of(f"module {name}") == "held_out"}
    assert 0.5 * HELD_OUT_PERCENT < 100 * len(held_out) / len(modules) < 2 * HELD_OUT_PERCENT
    for column in ("prompt", "completion"):
        assert not {row[column] for row in rows["train"]} & {row[column] for row in rows["held_out"]}
    text = (demo[0] / "corpus" / "train.jsonl").read_text()
    held_out = [json.loads(line)["text"] for line in (demo[0] / "corpus" / "held_out.jsonl").open()]
    assert len(held_out) > 20 and not [
        part
        for part in [row["completion"] for row in rows["held_out"]] + "\n\n".join(held_out).split("\n\n")
        if len(part) > 200 and json.dumps(part)[1:-1] in text
    ]


def test_the_demo_model_has_1_to_2_million_parameters(demo):
    from dsft.config.options import TrainConfig
    from dsft.models.size import measure_model

    assert 1e6 < measure_model(TrainConfig(model=str(demo[0] / "model" / "config.json"))).size.num_params < 2e6


def test_another_system_than_linux_is_named(monkeypatch, capsys):
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    monkeypatch.setattr(errors, "sys", SimpleNamespace(platform="darwin", exit=sys.exit, **streams))
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    assert ended.value.code == 2 and "runs on Linux only, and this is darwin" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_named_with_its_option(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    card = tmp_path / "file" / "card.json"
    monkeypatch.setattr("dsft.cli.report.read_evaluations", lambda _: [])
    with pytest.raises(UserError, match=f"^--card {tmp_path}/file: File exists; name another file or folder$"):
        run_command("compare", ["results", "--card", str(card)])
    with pytest.raises(UserError, match=f"^{tmp_path}/file/demo/corpus: Not a directory; name another file or folder$"):
        run_command("demo-data", [f"{tmp_path}/file/demo"])  # which no option names

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dsft.runtime.disk.os.replace", full)
    with pytest.raises(UserError, match=r"^--card .*/card.json: No space left on device; free some space, or name"):
        run_command("compare", ["results", "--card", str(tmp_path / "card.json")])
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing half written is left"
