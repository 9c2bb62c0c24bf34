"""Words that a shell or a launcher understands reach the ranks as `dsft launch` has read them."""

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from launch.words import WORDS

from dsft.errors import UserError
from dsft.launch.environment import write_env_file
from dsft.launch.launchers import build_command, quoting, read_launch
from dsft.runtime import patches
from dsft.runtime.launcher_env import check_words, digest_of_words


def given_to_launcher(way: list[str], monkeypatch) -> list[str]:
    """The words of a training in the launcher's command line, for WORDS after `dsft launch`."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("dsft.launch.launchers.sys.executable", "/usr/bin/python")
    monkeypatch.setattr("dsft.launch.launchers.os.getcwd", lambda: "/data")
    options, _, _ = read_launch([*way, "train"])
    return build_command(options, "train", WORDS)[-len(WORDS) :]


def through_deepspeeds_pdsh(words: list[str]) -> list[str]:
    """What a node's shell makes of the words for DeepSpeed's launcher."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    arguments = PDSHRunner(Namespace(user_args=words, user_script="script"), "").user_arguments
    command = as_pdsh_sends(" ".join(["printf '%%s\\0'", *arguments]))
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def as_pdsh_sends(command: str) -> str:
    for format, value in {"%%": "\0", "%h": "node-0", "%n": "0", "%u": "root", "\0": "%"}.items():
        command = command.replace(format, value)
    return command


def accelerate_file(tmp_path, form: str, machines: int) -> str:
    settings = yaml.safe_load((ROOT / f"ds_configs/accelerate/zero3_2x8{form}.yaml").read_text())
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(settings | {"num_machines": machines}))
    return str(tmp_path / "accelerate.yaml")


@pytest.mark.parametrize("way", ["hostfile", "one node", "accelerate"])
def test_words_reach_the_nodes_through_deepspeeds_pdsh_as_they_were_given(way, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    ways = {
        "hostfile": ["--hostfile", "hostfiles/2x8", "--master_addr", "n"],
        "one node": ["--hostfile", "hostfiles/2x8", "--num_nodes", "1", "--master_addr", "n"],
        "accelerate": ["--accelerate", accelerate_file(tmp_path, "_pdsh", 2)],
    }
    assert through_deepspeeds_pdsh(given_to_launcher(ways[way], monkeypatch)) == WORDS


@pytest.mark.parametrize("way", ["nodes", "slurm", "accelerate standard", "accelerate on one machine"])
def test_torchrun_fills_nothing_into_the_words(way, monkeypatch, tmp_path):
    from torch.distributed.elastic.utils.api import macros

    monkeypatch.chdir(ROOT)
    for name, value in {"ID": "1", "NODELIST": "node-[0-1]", "NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    ways = {
        "nodes": ["--nodes", "2", "--master_addr", "n"],
        "slurm": ["--slurm"],
        "accelerate standard": ["--accelerate", accelerate_file(tmp_path, "", 2)],
        "accelerate on one machine": ["--accelerate", accelerate_file(tmp_path, "", 1)],
    }
    assert macros.substitute(given_to_launcher(ways[way], monkeypatch), "3") == WORDS


@pytest.mark.parametrize("way", ["this machine", "no ssh", "accelerate nossh"])
def test_launchers_that_read_nothing_get_the_words_as_they_are(way, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    ways = {
        "this machine": [],
        "no ssh": ["--hostfile", "hostfiles/2x8", "--no_ssh", "--node_rank", "0"],
        "accelerate nossh": ["--accelerate", accelerate_file(tmp_path, "_nossh", 2)],
    }
    assert given_to_launcher(ways[way], monkeypatch) == WORDS


NASTY = "my runs & more; $HOME %h 'x' \"y\""


def test_folders_that_a_shell_reads_otherwise_reach_the_nodes_through_deepspeeds_pdsh(monkeypatch, tmp_path):
    """DeepSpeed writes `cd FOLDER;` into the command of a node: two words end in the home folder there."""
    from deepspeed.launcher import runner

    (tmp_path / NASTY).mkdir()
    monkeypatch.chdir(tmp_path / NASTY)
    python = tmp_path / NASTY / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$0" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    launch = ["--hostfile", str(ROOT / "hostfiles/2x8"), "--master_addr", "n", "train", "--seed", "1"]
    assert build_command(*read_launch(launch))[:3] == [str(python), "-m", "dsft.launch.launchers"]
    arguments = runner.parse_args(["--master_addr", "n", "--module", "dsft.train", "a b"])
    with patches.replaced("pdsh_quotes", quoting):
        command, _, _ = runner.PDSHRunner(arguments, "WORLD").get_cmd({}, {"node-0": [0]})
    sent = as_pdsh_sends(" ".join(command[command.index("node-0") + 1 :]))
    there = subprocess.run(["sh", "-c", sent], capture_output=True, text=True, check=True, cwd="/").stdout.split("\0")
    assert there[:2] == [str(tmp_path / NASTY), str(python)] and there[-3:-1] == ["dsft.train", "a b"]


def test_accelerates_pdsh_form_refuses_such_folders(monkeypatch, tmp_path):
    (tmp_path / NASTY).mkdir()
    monkeypatch.chdir(ROOT)
    options, name, script = read_launch(["--accelerate", accelerate_file(tmp_path, "_pdsh", 2), "train"])
    hostfile = ROOT / "hostfiles/2x8"
    settings = Path(options.accelerate).read_text().replace("hostfiles/2x8", str(hostfile))
    Path(options.accelerate).write_text(settings)
    monkeypatch.chdir(tmp_path / NASTY)
    with pytest.raises(UserError, match="the working folder .*accelerate starts .*--hostfile, which quotes"):
        build_command(options, name, script)


def test_variables_reach_the_nodes_as_they_are():
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner(Namespace(user_args=[], user_script="script"), "")
    values = [word for word in WORDS if word == word.strip() and "\n" not in word]
    file = write_env_file({f"X{number}": word for number, word in enumerate(values)})
    for line in file.read_text().splitlines():
        runner.add_export(*line.split("=", 1))
    file.unlink()
    exports = "".join(f"export {name}={value}; " for name, value in runner.exports.items()).replace("%%", "%")
    command = f"{exports}{shlex.quote(sys.executable)} -c 'import os, json; print(json.dumps(dict(os.environ)))'"
    there = json.loads(subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout)
    assert [there[f"X{number}"] for number in range(len(values))] == values


def test_a_rank_that_got_other_words_ends_with_them(monkeypatch):
    for words in (["--run_name", "R&D"], ["--run_name", "R&D", "--local_rank=1"]):
        monkeypatch.setenv("DSFT_WORDS", digest_of_words(["--run_name", "R&D"]))
        check_words(words)
        assert "DSFT_WORDS" not in os.environ  # what this rank starts has words of its own
        check_words(["others"])
    monkeypatch.setenv("DSFT_WORDS", digest_of_words(["--run_name", "R&D", "--seed", "7"]))
    with pytest.raises(UserError, match=re.escape("it got --run_name R.")):
        check_words(["--run_name", "R"])


def test_scripts_hand_torchrun_two_dollars_for_one():
    for script in ("scripts/torchrun/train", "scripts/slurm/torchrun.sbatch"):
        assert r'"${@//\$/\$\$}"' in (ROOT / script).read_text()
    printed = subprocess.run(["bash", "-c", r"""printf '%s\0' "${@//\$/\$\$}" """, "-", *WORDS], capture_output=True)
    assert printed.stdout.decode().split("\0")[:-1] == [word.replace("$", "$$") for word in WORDS]
