"""`dsft launch`: the right command of the right launcher, and an exit code that tells the truth."""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, flags, grid, read_json
from dsft.doctor.findings import read_run_files
from ranks import ranks_below, train_all

from dsft.cli.main import main
from dsft.config.deepspeed import read_zero_file
from dsft.config.reader import read_file_and_flags, sent_files
from dsft.errors import UserError
from dsft.launch import supervise
from dsft.launch.environment import forwarded, launcher_environment, shared_environment
from dsft.launch.launchers import (
    LAUNCHERS,
    RUNNERS,
    Launcher,
    LaunchOptions,
    build_command,
    read_launch,
    shown,
)
from dsft.launch.supervise import launch, preflight_command, resumed, without_lost
from dsft.watchdog.messages import LauncherLink
from dsft.watchdog.processes import VARIABLE, descendants, is_dsft, is_launcher, start_time


def command(words: str) -> list[str]:
    """The command as it is shown, for these words after `dsft launch`."""
    return shlex.split(shown(build_command(*read_launch(words.split()))))


def test_cores_are_bound_by_the_launcher_that_can_alone(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    bound = command("--bind_cores_to_rank --num_gpus 2 train --model m")
    assert "--bind_cores_to_rank" in bound[: bound.index("--module")]
    with pytest.raises(UserError, match="of DeepSpeed's launcher, and --nodes takes another"):
        read_launch(["--bind_cores_to_rank", "--nodes", "2", "train"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="numactl is not here; apt-get install numactl"):
        read_launch(["--bind_cores_to_rank", "train"])


def test_a_first_host_that_ssh_does_not_reach_is_one_line_without_a_preflight(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'ssh: connect to host a port 22: No route to host' >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setenv("DSFT_JOB", "an earlier one")
    words = ["--hostfile", str(tmp_path / "hosts"), "--no_preflight", "train"]
    with pytest.raises(UserError, match="^a: the host does not answer .*No route to host"):
        launch([*words, "--model", "m", "--data", "d", "--output_dir", str(tmp_path)])
    options, _, _ = read_launch(words)
    assert without_lost(options.launcher, "train", []) == ""  # no node is left


def test_a_restart_that_nodes_do_not_come_back_for_names_the_command_without_them(tmp_path, monkeypatch):
    words = "ssh: connect to host b port 22: No route to host"
    script = f"""#!/bin/sh
case "$*" in *" b true") echo '{words}' >&2; exit 255;; esac
"""
    (tmp_path / "ssh").write_text(script)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\nb slots=1\nc slots=1\n")
    options, name, script = read_launch(["--hostfile", str(hosts), "--exclude", "c", "train", "--seed", "1"])
    assert without_lost(options.launcher, name, script) == (
        f"without b: dsft launch --hostfile {hosts} --exclude c@b train --seed 1"
    )
    options, name, script = read_launch(["--hostfile", str(hosts), "--num_gpus", "1", "train", "--seed", "1"])
    assert without_lost(options.launcher, name, script) == (
        f"without b: dsft launch --hostfile {hosts} --include a:0@c:0 train --seed 1"
    )
    assert build_command(*read_launch(shlex.split(without_lost(options.launcher, name, script))[4:]))


@pytest.mark.parametrize(
    ("way", "goes_on"),
    [
        (
            ["--nodes", "3", "--num_gpus", "8", "--master_addr", "node-0"],
            "dsft launch --nodes 2 --num_gpus 8 --master_addr node-0 train --seed 1 (on each node that is left,"
            " numbered from 0)",
        ),
        (
            ["--hostfile", "HOSTS", "--no_ssh"],
            "dsft launch --hostfile HOSTS --exclude node-1 --no_ssh train --seed 1 (on each node that is left, numbered"
            " from 0)",
        ),
        (
            ["--slurm"],
            "sbatch or salloc with --exclude node-1 --nodes 1, and there dsft launch --slurm train --seed 1",
        ),
        (
            ["--accelerate", "zero3_2x8.yaml"],
            "dsft launch --nodes 1 --num_gpus 8 --master_addr node-0 train --seed 1 --zero ds_configs/zero3.json (on"
            " each node that is left, numbered from 0)",
        ),
        (
            ["--accelerate", "zero3_2x8_pdsh.yaml"],
            "dsft launch --hostfile hostfiles/2x8 --include node-0:0,1,2,3,4,5,6,7 train --seed 1 --zero"
            " ds_configs/zero3.json",
        ),
    ],
)
def test_a_lost_node_is_followed_by_the_command_that_goes_on_without_it(way, goes_on, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    away = 'case "$*" in *" node-1 true") echo "connect: No route to host" >&2; exit 255;; esac'
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{away}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("node-0 slots=1\nnode-1 slots=1\n")
    places = {"HOSTS": str(tmp_path / "hosts")} | {
        name: f"ds_configs/accelerate/{name}" for name in ("zero3_2x8.yaml", "zero3_2x8_pdsh.yaml")
    }
    options, name, script = read_launch([*(places.get(word, word) for word in way), "train", "--seed", "1"])
    expected = goes_on.replace("HOSTS", places["HOSTS"])
    assert without_lost(options.launcher, name, script, ["node-1"]) == f"without node-1: {expected}"
    # What is named is a command: it is read without an error.
    read_launch(shlex.split(expected.partition("dsft launch ")[2].partition(" (on")[0]))
    if "accelerate" not in way[0] or "pdsh" not in way[1]:
        assert without_lost(options.launcher, name, script, []) == ""


def test_a_host_file_goes_to_deepspeed_with_its_filters_and_everything_else_to_the_script(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    script = "--config run.yaml --learning_rate 1e-4"
    words = command(f"--hostfile hostfiles/2x8 --exclude=node-1:0 train --master_port=1234 {script}")
    assert " ".join(words[:5]) == "deepspeed --hostfile hostfiles/2x8 --exclude node-1:0" and "--num_gpus" not in words
    assert words[words.index("--master_port") + 1] == "1234"
    assert words[words.index("--module") :] == f"--module dsft.train {script}".split()


@pytest.mark.parametrize(("number", "is_forced"), [("1", True), ("2", False)])
def test_the_ranks_of_a_single_node_are_started_there(monkeypatch, number, is_forced):
    """By itself DeepSpeed's launcher starts them on the machine where it is called, whichever the host file names."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    words = command(f"--hostfile hostfiles/2x8 --num_nodes {number} train")
    assert ("--force_multi" in words[: words.index("--module")]) == is_forced


def test_without_options_the_command_takes_this_machine_and_a_free_port():
    first, second = command("train"), command("eval")
    assert first[:3] == ["deepspeed", "--num_gpus", second[2]] and int(first[2]) >= 1
    assert first[3] == "--master_port" and 1024 < int(first[4]) < 65536
    assert second[-1] == "dsft.eval_ppl"


@pytest.mark.parametrize(
    ("number", "begin"),
    [
        ("", "deepspeed --master_port"),  # DeepSpeed takes all that are visible
        ("--num_gpus 2", "deepspeed --master_port"),
        ("--num_nodes 1", "deepspeed --master_port"),
        ("--num_gpus 1", "python -u -m dsft.train"),  # its first GPU is number 4
    ],
)
def test_gpus_that_the_user_made_visible_are_the_ones_that_are_taken(monkeypatch, number, begin):
    monkeypatch.setattr("dsft.launch.launchers.has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert " ".join(command(f"{number} train")).startswith(begin)


@pytest.mark.parametrize(
    ("visible", "way_out"), [("4,5", "names 2; lower it"), ("GPU-5a1b,GPU-77c3", "--nodes 1 --master_addr 127.0.0.1")]
)
def test_visible_gpus_that_the_launcher_cannot_take_are_refused(monkeypatch, visible, way_out):
    monkeypatch.setattr("dsft.launch.launchers.has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=way_out):
        command("--num_gpus 3 train")


def test_more_ranks_than_gpus_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr("dsft.launch.launchers.has_gpu", lambda: True)
    monkeypatch.setattr("dsft.launch.launchers.default_ranks", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert command("--num_gpus 2 train")
    with pytest.raises(UserError, match="--num_gpus 3: this machine has 2 GPUs; lower it"):
        command("--num_gpus 3 train")


def test_one_rank_is_a_process_of_the_launch_and_knows_that_it_is_alone():
    assert command("train --num_gpus 1 --max_steps 4") == ["python", "-u", "-m", "dsft.train", "--max_steps", "4"]
    link = LauncherLink()
    environment, _ = launcher_environment(LaunchOptions(num_gpus=1).launcher, [], link)
    link.close()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    assert environment.items() >= (place | {VARIABLE: ""}).items()
    assert LaunchOptions(num_gpus=2).launcher.variables == {}


def test_the_first_words_of_an_evaluation_are_its_models():
    words = command("--num_gpus 1 eval base base.gguf --reference base")
    assert words[-5:] == ["--model", "base", "base.gguf", "--reference", "base"]


def test_nodes_without_ssh_take_their_place_from_the_environment(monkeypatch):
    kubernetes = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in kubernetes.items():  # as its training operator sets them
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "NODE_RANK"):  # another test of this process may have been a rank
        monkeypatch.delenv(name, raising=False)
    static = "--node_rank 1 --master_addr 10.0.0.1 --master_port 23456"
    expected = f"torchrun --nnodes 2 --nproc_per_node 8 {static} --module dsft.train"
    words = command("--nodes 2 --num_gpus 8 train")
    at = words.index("--rdzv_id")
    assert words[:at] + words[at + 2 :] == expected.split()
    monkeypatch.delenv("RANK")
    rendezvous = "--rdzv_backend c10d --rdzv_endpoint 10.0.0.1:23456"
    assert command("--nodes 2 train")[7:11] == rendezvous.split()
    words = command("--hostfile hostfiles/2x8 --no-ssh --node_rank 1 train")
    assert " ".join(words[3:8]) == "--no_ssh --node_rank 1 --master_addr 10.0.0.1" and "23456" in words


def meeting(words: str) -> tuple[str, str]:
    """(where, by which id) the nodes of a job under torchrun meet."""
    launcher = command(words)
    return launcher[launcher.index("--rdzv_endpoint") + 1], launcher[launcher.index("--rdzv_id") + 1]


def test_jobs_of_two_folders_with_a_run_yaml_each_do_not_meet(monkeypatch, tmp_path):
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    for name in ("MASTER_PORT", "RANK", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    seen = {}
    for name, text in {
        "a": "output_dir: run\ndata: a.jsonl\n",
        "b": "output_dir: run\ndata: a.jsonl\n",
        "a/other run": "output_dir: other\ndata: a.jsonl\n",
        "a/other data": "output_dir: run\ndata: b.jsonl\n",
        "a/stale": "output_dir: run\ndata: a.jsonl\nlearning_rate: 0.1\n",
    }.items():
        folder = tmp_path / name.partition("/")[0]
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        # Of some folders two ports are the same by chance (one of 10,000); not of these.
        monkeypatch.setattr("os.getcwd", lambda place=folder.name: f"/jobs/{place}")
        (folder / "run.yaml").write_text(text)
        seen[name] = meeting("--nodes 2 train --config run.yaml")
    # A node whose copy is stale meets the others and is told in what it differs.
    assert seen.pop("a/stale") == seen["a"]
    endpoints, ids = zip(*seen.values(), strict=True)
    assert len(set(endpoints)) == len(set(ids)) == 4


def test_jobs_given_on_every_node_get_an_id_and_a_port_of_their_own(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    for name in ("MASTER_PORT", "RANK", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    launch = "--nodes 2 train --config run.yaml --output_dir runs/{} --data_cache /scratch/{}"
    first, again, other = (meeting(launch.format(*names)) for names in (("a", "x"), ("a", "y"), ("b", "x")))
    assert first == again and first[0].startswith("node-0:2")
    assert first[0] != other[0] and first[1] != other[1]
    no_ssh = "--hostfile hostfiles/2x8 --no_ssh --node_rank 0 train --output_dir runs/{}"
    ports = {command(no_ssh.format(name))[command(no_ssh.format(name)).index("--master_port") + 1] for name in "aab"}
    assert len(ports) == 2 and "29500" not in ports


@pytest.mark.parametrize(("port", "beside"), [("29500", "29501"), ("65534", "65535"), ("65535", "65534")])
def test_the_preflight_meets_at_a_port_beside_the_launchs_own(monkeypatch, port, beside):
    monkeypatch.setenv("MASTER_PORT", port)
    options, name, script = read_launch(["--nodes", "2", "--master_addr", "node-0", "train", "--model", "m"])
    assert f"node-0:{beside}" in preflight_command(options.launcher, name, script)


def preflight(*words: str) -> list[str]:
    options, name, script = read_launch([*words])
    return preflight_command(options.launcher, name, script)


def value(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def test_the_preflight_without_ssh_starts_one_rank_on_each_node_that_a_filter_leaves(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--hostfile", "hostfiles/2x8", "--no_ssh", "--node_rank", "0", "train"]
    started = preflight("--exclude", "node-1:0", *words)
    assert value(started, "--include") == "node-0:0@node-1:1" and not {"--exclude", "--num_gpus"} & {*started}
    assert value(preflight(*words), "--num_gpus") == "1"


def test_the_preflight_of_this_machine_looks_at_the_ranks_and_the_port_of_the_launch():
    started = preflight("--num_gpus", "2", "--master_port", "1234", "train")
    assert (value(started, "--num_gpus"), value(started, "--master_port")) == ("2", "1234")


def test_the_preflight_of_chosen_gpus_of_this_machine_runs_on_these():
    """On all others it failed where another job has filled one."""
    started = preflight("--include", "localhost:2,3", "train")
    assert RUNNERS["deepspeed"] in started and value(started, "--include") == "localhost:2,3"
    assert value(started, "--module") == "dsft.cli.doctor"


@pytest.mark.parametrize(("name", "saves"), [("train", True), ("eval", False)])
def test_only_a_trainings_folder_must_be_shared(name, saves, monkeypatch):
    """Each node may have its own of an evaluation, whose launch was refused."""
    monkeypatch.chdir(ROOT)
    started = preflight("--hostfile", "hostfiles/2x8", name, "--model", "m", "--output_dir", "out")
    assert read_run_files(started[started.index("--only_findings") + 1 :]).saves == saves


def test_a_restart_that_waits_prints_what_is_found_where_that_has_changed(tmp_path, monkeypatch, capfd):
    """Not at each look, for it ends with the seconds that the look took."""
    look = "import pathlib, sys, time\ncount = pathlib.Path('count')\n"
    look += "looks = count.write_text((count.read_text() if count.exists() else '') + '.')\n"
    look += "print('error: node-1: full' if looks < 4 else 'error: node-1: silent')\n"
    look += "print(f'dsft doctor: 2 nodes, 1 error; {time.time()} s')\nsys.exit(2 * (looks < 6))"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "preflight_command", lambda *_: [sys.executable, "-c", look])
    monkeypatch.setattr(supervise, "WAIT_SECONDS", 0)
    options, name, script = read_launch(["--hostfile", str(ROOT / "hostfiles/2x8"), "train"])
    supervise.wait_until_examined(options.launcher, name, script)
    printed = capfd.readouterr().out
    assert (printed.count(": full"), printed.count(": silent")) == (1, 1)


@pytest.mark.parametrize(
    ("name", "continues"),
    [("train", "the same command with --resume_from_checkpoint auto resumes"), ("eval", "the same command continues")],
)
def test_a_restart_that_waits_in_vain_names_what_continues(name, continues, monkeypatch):
    monkeypatch.setattr(supervise, "preflight_command", lambda *_: [sys.executable, "-c", "raise SystemExit(2)"])
    monkeypatch.setattr(supervise, "without_lost", lambda *_: "")
    words = ["--hostfile", str(ROOT / "hostfiles/2x8"), "--wait_for_nodes", "0", name]
    options, name, script = read_launch(words)
    with pytest.raises(UserError, match=f"not ready .*; .*{continues}$"):
        supervise.wait_until_examined(options.launcher, name, script)


def test_one_launch_for_all_nodes_sends_the_configuration_and_what_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("zero: zero.json\nchat_template: chatml\nlearning_rate: 0.1\n")
    (tmp_path / "zero.json").write_text("{}")
    options = read_launch(["--hostfile", str(ROOT / "hostfiles/2x8"), "train"])[0]
    variables, notes = shared_environment(options.launcher, ["--config", "run.yaml"])
    assert notes == [] and variables.items() <= forwarded(variables).items()
    monkeypatch.setenv("DSFT_FILES", variables["DSFT_FILES"])
    assert set(sent_files()) == {"run.yaml", "zero.json"}
    (tmp_path / "run.yaml").unlink()
    assert read_file_and_flags(["--config", "run.yaml", "--seed", "1"], []) == {
        "zero": "zero.json",
        "chat_template": "chatml",
        "learning_rate": 0.1,
        "seed": "1",
    }
    assert read_zero_file("zero.json", []) == {}


def test_accelerates_pdsh_form_sends_and_is_examined_like_a_host_file(tmp_path, monkeypatch):
    """Its other forms are given on every machine: nothing is sent, and each machine examines itself."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "run.yaml").write_text("learning_rate: 0.1\n")
    script, files, hosts = ["--config", str(tmp_path / "run.yaml")], {}, {}
    for form in ("_pdsh", "", "_nossh"):
        options = read_launch(["--accelerate", f"ds_configs/accelerate/zero3_2x8{form}.yaml", "train"])[0]
        variables, notes = shared_environment(options.launcher, script)
        assert notes == [] and variables["DSFT_JOB"]
        monkeypatch.setenv("DSFT_FILES", variables.get("DSFT_FILES", ""))
        files[form], hosts[form] = set(sent_files()), [(node.name, node.slots) for node in options.launcher.ssh_nodes()]
        words = preflight_command(options.launcher, "train", script)
        assert ("--hostfile" in words) == (form == "_pdsh") and words[-2:] == script
        assert value(words, "--num_gpus") == "8"
    assert files == {"_pdsh": {str(tmp_path / "run.yaml")}, "": set(), "_nossh": set()}
    assert hosts == {"_pdsh": [("node-0", 8), ("node-1", 8)], "": [], "_nossh": []}


@pytest.mark.parametrize(("port", "examined"), [(None, "29500"), (0, None), (1234, "1234")])
def test_the_port_that_accelerate_takes_is_the_one_that_is_examined(port, examined, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = yaml.safe_load(Path("ds_configs/accelerate/zero3_2x8_pdsh.yaml").read_text())
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(settings | {"main_process_port": port}))
    words = preflight("--accelerate", str(tmp_path / "accelerate.yaml"), "train")
    assert value(words, "--master_port") == examined


@pytest.mark.parametrize("content", ["", "a: [", "num_machines: 2\n"])
def test_a_file_of_accelerate_that_names_no_hosts_ends_with_its_name(content, tmp_path):
    (tmp_path / "accelerate.yaml").write_text(content)
    options = read_launch(["--accelerate", str(tmp_path / "accelerate.yaml"), "train"])[0]
    with pytest.raises(UserError, match="accelerate.yaml: "):
        options.launcher.ssh_nodes()


@pytest.mark.parametrize(
    ("content", "told"), [("hub_token: hf_abc\n", "holds hub_token and is not sent"), ("#" * 2, "")]
)
def test_a_configuration_with_a_token_is_not_sent(content, told, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(content)
    options = read_launch(["--hostfile", str(ROOT / "hostfiles/2x8"), "train"])[0]
    variables, notes = shared_environment(options.launcher, ["--config", str(tmp_path / "run.yaml")])
    monkeypatch.setenv("DSFT_FILES", variables["DSFT_FILES"])
    assert (told in " ".join(notes)) and (str(tmp_path / "run.yaml") in sent_files()) == (not told)


class Ray(Launcher):
    processes = ("raylet",)

    def command(self, module: str, script: list[str]) -> list[str]:
        return ["raylet", module]


def test_a_launcher_is_one_value_that_the_watchdog_of_its_ranks_is_told(monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "no_ssh", Ray)
    options = LaunchOptions(no_ssh=True)
    assert LaunchOptions(no_ssh=True, nodes=2).ways == ["nodes", "no_ssh"]
    assert build_command(options, "train", []) == ["raylet", "dsft.train"]
    words = ["/usr/bin/raylet", "--x", "1"]
    assert not is_launcher(words)
    environment, _ = launcher_environment(options.launcher, [], link := LauncherLink())
    link.close()
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    assert is_launcher(words)
    assert is_launcher(["/env/bin/torchrun"])
    assert not is_launcher(["-bash"])


def test_the_watchdog_knows_the_processes_of_launchers_that_were_started_by_hand():
    python = ["/env/bin/python3.12", "-u"]
    for name, module in RUNNERS.items():
        assert is_launcher([*python, "-m", module, "--x", "1"])
        assert is_launcher([*python, f"/env/bin/{name.split()[0]}"])
    for line in (
        "srun --nodes 2 python",
        "slurmstepd: [7.0]",
        "pdsh -S -w a,b",
        "python -Xdev -um deepspeed.launcher.launch",
    ):
        assert is_launcher(line.split(" ")), line


@pytest.mark.parametrize("name", ["dsft", "deepspeed", "accelerate", "torchrun", "srun", "mpirun"])
def test_a_folder_or_an_option_named_like_a_launcher_makes_none(name):
    python = f"/home/{name}/.venv/bin/python"
    lines = [
        [python, "-m", "ipykernel_launcher", "-f", f"/run/{name}.json"],
        [python, f"/home/{name}/sweep.py", name],
        [python, "-c", f"import {name}", name],
        [python, "-m", "pytest", f"tests/{name}"],
        [python, "-W", name, f"{name}_sweep.py"],
        ["bash", f"/home/{name}/start.sh"],
        ["nohup", "bash", f"{name}.sh"],
        [python],
    ]
    assert not any(map(is_launcher, lines))


@pytest.mark.parametrize(("name", "answer"), [("dsft", True), ("torchrun", False)])
def test_a_watchdog_spares_dsft_itself_which_starts_failed_ranks_again(tmp_path, name, answer):
    (tmp_path / name).write_text("print(flush=True), input()")
    words, pipe = [sys.executable, str(tmp_path / name)], subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe)
    process.stdout.readline()  # a process that has just begun may have no words yet
    assert is_dsft(process.pid) == answer
    process.communicate(b"\n")
    assert not is_dsft(process.pid)


def test_accelerate_gets_the_script_and_this_nodes_number():
    file = "ds_configs/accelerate/zero3_2x8.yaml"
    words = command(f"--accelerate {file} --node_rank 1 --master_addr n0 eval --model m")
    launcher = f"accelerate launch --config_file {file} --machine_rank 1 --main_process_ip n0"
    assert words == f"{launcher} {ROOT}/dsft/eval_ppl.py --model m".split()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--hostfiles x train", "expected train or eval, got '--hostfiles'"),
        ("--hostfile hostfiles/2x8", "expected train or eval, got nothing"),
        ("--hostfile ./nowhere train", "--hostfile ./nowhere: there is no such file"),
        ("--hostfile hostfiles/2x8 --nodes 2 train", "--hostfile and --nodes: choose one way"),
        ("--nodes two train", "nodes: expected a whole number, got 'two'"),
        ("--nodes=-1 train", "nodes=-1: must be at least 1"),
        ("--num_gpus 0 train", "num_gpus=0: must be 1 to 1,024, on each node; leave it out for all"),
        ("--hostfile hosts --num_nodes 0 train", "num_nodes=0: must be at least 1; leave it out for all"),
        ("--nodes 0 train", "nodes=0: must be at least 1"),
        ("--hostfile hostfiles/2x8 --max_restarts=-1 train", "max_restarts=-1: must not be negative"),
        ("--hostfile hostfiles/2x8 --wait_for_nodes=-1 train", "wait_for_nodes=-1.0: must not be negative"),
        ("--hostfile", "hostfile: needs a value"),
        ("--hostfile= train", "--hostfile: needs a value"),
        ("--nodes= train", "nodes: "),
        ("--nodes 2 --nodes 3 train", "--nodes is given 2 times (2, 3); keep one"),
        ("--nodes 2 train", "set --master_addr or MASTER_ADDR"),
        ("--nodes 2 --node_rank 2 --master_addr n0 train", "node rank 2: nodes are numbered from 0 to 1"),
        ("--no_ssh train", "--no_ssh: name the nodes"),
        ("--nodes 2 --include a train", "--include chooses from a host file"),
        ("--num_nodes 2 train", "--num_nodes 2: it chooses from a host file; name one with --hostfile"),
        ("--include worker-1:0 train", "--include worker-1:0: it chooses from a host file; name one with --hostfile"),
        ("--exclude localhost:0@worker-1 train", "--exclude localhost:0@worker-1: it chooses from a host file"),
        ("--include localhost:0 --num_gpus 1 train", "--num_gpus, --include and --exclude cannot be combined"),
        ("--accelerate ds_configs/accelerate/zero3_2x8.yaml --num_gpus 2 train", "--num_gpus 2: --accelerate takes"),
        (
            "--hostfile hostfiles/2x8 --no_ssh --node_rank 2 train",
            "node rank 2: nodes are numbered from 0 to 1 (--host",
        ),
        ("--hostfile hostfiles/2x8 --node_rank 1 train", "--node_rank 1: this one command starts all ranks; leave it"),
        ("--slurm --node_rank 1 train", "--node_rank 1: this one command starts all ranks; leave it out"),
        ("--hostfile hostfiles/2x8 --no_ssh train", "name this node's number"),
    ],
)
def test_a_wrong_option_is_named(words, named, monkeypatch):
    for name in ("MASTER_ADDR", "RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=None) as error:
        command(words)
    assert named in str(error.value)


@pytest.mark.parametrize("missing", ["ID", "NODELIST", "NUM_NODES"])
def test_a_job_of_slurm_has_each_of_its_variables(missing, monkeypatch):
    for name, value in {"ID": "1", "NODELIST": "node-[0-1]", "NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    assert command("--slurm train")[:3] == ["srun", "--nodes", "2"]
    monkeypatch.delenv(f"SLURM_JOB_{missing}")
    with pytest.raises(UserError, match="this is no SLURM job"):
        command("--slurm train")


@pytest.mark.parametrize("given", [[], ["--resume_from_checkpoint"], ["--resume-from-checkpoint=a"]])
def test_a_restart_resumes_from_the_last_checkpoint_whatever_the_first_start_did(given, tmp_path):
    """An option that stands twice would be refused. Until there is one, a checkpoint that was named is taken again: a
    restart with auto would begin from scratch.
    """
    out = ["--output_dir", str(tmp_path)]
    starts = ([*given, *out], [*out, *given])
    if "=" in "".join(given):
        assert all(resumed(words) == words for words in starts)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "manifest.json").touch()
    assert all(resumed(words) == [*out, "--resume_from_checkpoint", "auto"] for words in starts)


@pytest.mark.parametrize(
    ("words", "launched"),
    [
        ("train --max_steps 4", "--no_preflight train --max_steps 4"),
        ("train --no_preflight --dry_run", "train --no_preflight --dry_run"),
        ("train --no-preflight=false", "train --no-preflight=false"),
        ("launch --nodes 2 train", "--nodes 2 train"),
    ],
)
def test_only_launch_looks_first_unless_told_otherwise(words, launched, monkeypatch):
    calls = []
    monkeypatch.setattr("dsft.launch.supervise.launch", lambda argv: calls.append(argv) or 0)
    with pytest.raises(SystemExit, match="0"):
        main(words.split())
    assert calls == [launched.split()]


@pytest.fixture(scope="module")
def job(tiny, tmp_path_factory):
    """Starts `dsft train` for long on 2 ranks in the background and waits for its first step; gives (process, log,
    output_dir).
    """
    started = []

    def start(*words: str):
        folder = tmp_path_factory.mktemp("job")
        config = {
            "model": str(tiny / "model"),
            "data": str(tiny / "texts.jsonl"),
            "output_dir": str(folder / "run"),
            "seq_len": 64,
            "max_steps": 100_000,
            "per_device_train_batch_size": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "disable_tqdm": True,
            "logging_steps": 1,
            "lost_timeout": 10,
            "zero": "2",
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        log = folder / "log"
        process = subprocess.Popen(
            [sys.executable, "-m", "dsft.cli.main", "launch", *words, "train", "--config", str(folder / "run.yaml")],
            cwd=ROOT,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        until = time.monotonic() + 600
        while "step      1 " not in log.read_text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()
        return process, log, folder / "run"

    yield start
    for process in started:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """With all that it started, where it still runs."""
    for pid in (*descendants(process.pid), process.pid) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def the_rank_of(launch: int) -> int:
    """The one rank that a launch has as a process of its own."""
    (rank,) = [pid for pid in descendants(launch) if b"dsft.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return rank


def all_end(pids: list[int]) -> bool:
    until = time.monotonic() + 120
    while time.monotonic() < until and any(start_time(pid) for pid in pids):
        time.sleep(0.2)
    return not any(start_time(pid) for pid in pids)


@pytest.mark.launch
@pytest.mark.exhaustive  # test_supervise holds it without a training
def test_a_second_ctrl_c_ends_every_process_and_says_so_without_a_traceback(job):
    process, log, _ = job()
    family = descendants(process.pid)
    os.kill(ranks_below(process.pid)[1], signal.SIGSTOP)  # so that the first one cannot be followed
    process.send_signal(signal.SIGINT)
    until = time.monotonic() + 60
    while "a second one terminates them at once" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 128 + signal.SIGINT
    assert all_end(family), log.read_text()
    assert "dsft: Ctrl-C: terminating all ranks" in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.exhaustive
@pytest.mark.launch
def test_a_killed_launch_takes_its_ranks_along(job):
    process, log, _ = job()
    family = descendants(process.pid)
    process.kill()
    process.wait(60)
    assert all_end(family), log.read_text()


@pytest.mark.launch
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_saves_and_ends_with_the_code_to_requeue(job, number):
    process, log, folder = job()
    process.send_signal(number)
    assert process.wait(300) == 75, log.read_text()
    assert read_json(folder / "run.json")["status"] == "preempted" and "asked to stop" in log.read_text()
    assert list(folder.glob("checkpoint-*/trainer_state.json"))


@pytest.mark.launch
@pytest.mark.parametrize("ranks", grid([1, 2], [1]))
def test_a_run_whose_rank_is_killed_starts_again_from_its_last_checkpoint_and_saves_when_it_is_asked_to_end(job, ranks):
    """A single rank is a process of the launch itself; DeepSpeed's launcher starts two."""
    process, log, folder = job("--max_restarts", "1", "--no_preflight", "--num_gpus", str(ranks))

    def wait_for(condition) -> None:
        until = time.monotonic() + 300
        while not condition() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    wait_for(lambda: any(folder.glob("checkpoint-*/trainer_state.json")))  # the first may be gone before it is seen
    last_rank = ranks_below(process.pid)[1] if ranks > 1 else the_rank_of(process.pid)
    os.kill(last_rank, signal.SIGKILL)
    wait_for(lambda: "step " in log.read_text().partition("resuming from")[2])
    process.send_signal(signal.SIGUSR1)
    assert process.wait(600) == 75, log.read_text()
    text = log.read_text()
    assert "was killed from outside" in text and "restart 1 of 1, from the last checkpoint" in text
    assert "asked to stop" in text.partition("resuming from")[2]
    assert read_json(folder / "run.json")["status"] == "preempted"
    assert list(folder.glob("checkpoint-*/trainer_state.json"))


@pytest.mark.launch
@pytest.mark.exhaustive
def test_an_overwrite_whose_first_attempt_dies_while_loading_does_not_resume_the_run_it_replaces(options, tmp_path):
    words = {"save_strategy": "steps", "save_steps": 2, "zero": "2", "lost_timeout": 10}
    out, log = tmp_path / "run", tmp_path / "log"
    train_all(2, [options(out, max_steps=4, **words)], tmp_path / "replaced")
    command = [sys.executable, "-m", "dsft.cli.main", "train", "--num_gpus", "2", "--max_restarts", "1"]
    command += flags(options(out, max_steps=2, overwrite=True, **words))
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)

    def wait_for(text: str) -> None:
        until = time.monotonic() + 600
        while text not in log.read_text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        assert text in log.read_text(), log.read_text()[-3000:]

    try:
        wait_for("dsft: plan: ")
        os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
        wait_for("restart 1 of 1")
        assert (out / "checkpoint-4").exists(), "it died before it replaced anything"
        assert process.wait(600) == 0, log.read_text()[-3000:]
    finally:
        kill(process)
    assert read_json(out / "run.json")["results"]["steps"] == 2 and "resuming from" not in log.read_text()
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
