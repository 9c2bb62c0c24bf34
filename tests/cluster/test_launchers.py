"""Every launcher, for real, on several test hosts: each trains the same model under ZeRO-3, to the losses and
perplexities of one process.

The global batch is 12 sequences everywhere, so that 1, 2, 3 and 4 ranks take the same steps. These tests start the
shipped files of scripts/, ds_configs/accelerate/ and hostfiles/, changed only in the lines that a user edits.
"""

import shutil
import time
from pathlib import Path

import pytest
import yaml
from conftest import flags, read_json
from ranks import run_entry
from tiny import write_model, write_texts

from cluster.hosts import ROOT
from cluster.slurm import Slurm

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
STEPS = 3
LAUNCH_SECONDS = 600


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A folder, which all hosts see, with model/, data and run.yaml; the checkout's own run.yaml would look like
    this.
    """
    folder = tmp_path_factory.mktemp("job")
    write_model(folder / "model")
    write_texts(folder / "train.jsonl", 120)
    write_texts(folder / "held_out.jsonl", 31, seed=1)
    options = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "held_out.jsonl"),
        "seq_len": 64,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "global_batch_size": 12,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "eval_on_start": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(options | {"zero": "3"}))
    (folder / "accelerate_run.yaml").write_text(yaml.safe_dump(options))  # accelerate's file says the stage
    return folder


@pytest.fixture(scope="module")
def one_process(job) -> dict:
    """The run that all others must agree with: one rank, no launcher."""
    result = run_entry("dsft.train", ["--config", job / "run.yaml", "--output_dir", job / "one"])
    return checked(result, job / "one", ranks=1, nodes=1)


@pytest.fixture(scope="module")
def two_hosts(four_hosts, job) -> Path:
    """A run on node-0 and node-1, started from the checkout with a relative --config, with a checkpoint after step 2.

    Their own names are 127.0.1.1 in /etc/hosts, as on Debian: without GLOO_SOCKET_IFNAME the ranks could not connect.
    """
    hostfile = four_hosts.hostfile(job / "4x1", [1, 1, 1, 1])
    shutil.copytree(ROOT / "dsft", job / "checkout" / "dsft")
    shutil.copytree(ROOT / "ds_configs", job / "checkout" / "ds_configs")
    shutil.copy(job / "run.yaml", job / "checkout" / "run.yaml")
    command = f"deepspeed --hostfile {hostfile} --num_nodes 2 dsft/train.py --config run.yaml".split()
    command += f"--output_dir {job}/2x1 --save_strategy steps --save_steps 2".split()
    with four_hosts[0].own_name_on_loopback(), four_hosts[1].own_name_on_loopback():
        result = four_hosts[0].run(command, cwd=job / "checkout", timeout=LAUNCH_SECONDS)
    checked(result, job / "2x1", ranks=2, nodes=2)
    return job / "2x1"


def checked(result, folder: Path, *, ranks: int, nodes: int) -> dict:
    """run.json of a run that succeeded, on that many ranks and nodes."""
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert result.stdout.count("dsft: done: ") == 1  # rank 0 alone speaks
    content = read_json(folder / "run.json")
    assert (
        content["status"] == "done"
        and content["world_size"] == ranks
        and content["deepspeed"]["zero_optimization"]["stage"] == 3
    )
    return content


def assert_same_training(content: dict, expected: dict) -> None:
    """The losses within 1e-4 (sums in another order); the held-out perplexity before training to the last bit, that
    after it within 1e-4.
    """
    losses, known = (
        [entry["loss"] for entry in run["results"]["log"] if "loss" in entry] for run in (content, expected)
    )
    assert len(losses) == STEPS and losses == pytest.approx(known, rel=1e-4)
    (before, after), (known_before, known_after) = (
        [entry["eval_perplexity"] for entry in run["results"]["log"] if "eval_perplexity" in entry]
        for run in (content, expected)
    )
    assert before == known_before and after == pytest.approx(known_after, rel=1e-4) and after < 0.6 * before


@pytest.fixture
def nothing_left(hosts):
    """After the test: no rank, launcher or ssh lives on any host."""
    before = {pid for host in hosts for pid, _ in host.processes()}
    yield
    deadline = time.monotonic() + 60
    while (left := [command for host in hosts for pid, command in host.processes() if pid not in before]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not left


def start_on_each(hosts, command, *, cwd=ROOT, **environment):
    """`command(i)` on each of the hosts at once; the first one's result, once all have ended."""
    others = [
        host.start(command(i), cwd=cwd, stdout=None, stderr=None, **environment) for i, host in enumerate(hosts) if i
    ]
    result = hosts[0].run(command(0), cwd=cwd, timeout=LAUNCH_SECONDS, **environment)
    assert [other.wait(LAUNCH_SECONDS) for other in others] == [result.returncode] * len(others)
    return result


@pytest.mark.exhaustive
def test_two_hosts_that_call_themselves_127_0_1_1_train_what_one_process_trains(two_hosts, one_process):
    assert_same_training(read_json(two_hosts / "run.json"), one_process)


@pytest.mark.parametrize(
    ("slots", "choice", "ranks", "nodes"),
    [
        pytest.param([2, 2, 2, 2], ["--exclude", "node-2@node-3"], 4, 2, id="2x2"),
        pytest.param([2, 2, 2, 2], ["--num_gpus", "1"], 4, 4, id="4x1"),
        pytest.param([2, 2, 2, 2], ["--include", "node-1:0@node-3"], 3, 2, id="1+2"),
    ],
)
@pytest.mark.exhaustive  # test_launch.py holds the same of `dsft launch`, which starts deepspeed through pdsh too
def test_deepspeed_through_pdsh(hosts, job, one_process, nothing_left, slots, choice, ranks, nodes):
    hostfile, out = hosts.hostfile(job / "hostfile", slots), job / f"pdsh-{ranks}-{nodes}"
    first = hosts[1 if "--include" in choice else 0]
    words = f"dsft/train.py --config {job}/run.yaml --output_dir {out}".split()
    result = first.run(["deepspeed", "--hostfile", hostfile, *choice, *words], timeout=LAUNCH_SECONDS)
    assert_same_training(checked(result, out, ranks=ranks, nodes=nodes), one_process)


@pytest.mark.exhaustive
def test_a_checkpoint_of_two_hosts_goes_on_on_two_others(hosts, job, one_process, two_hosts, nothing_left):
    hostfile = hosts.hostfile(job / "others", [1, 1], first=2)
    command = f"deepspeed --hostfile {hostfile} dsft/train.py --config {job}/run.yaml --output_dir {job}/resumed"
    command += f" --eval_on_start false --resume_from_checkpoint {two_hosts}/checkpoint-2"
    result = hosts[2].run(command.split(), timeout=LAUNCH_SECONDS)
    resumed, complete = checked(result, job / "resumed", ranks=2, nodes=2), read_json(two_hosts / "run.json")
    assert f"resuming from {two_hosts / 'checkpoint-2'}" in result.stdout
    assert [entry["loss"] for entry in resumed["results"]["log"] if "loss" in entry] == [
        entry["loss"] for entry in complete["results"]["log"] if "loss" in entry
    ]  # the same bits
    assert resumed["results"]["eval_loss"] == complete["results"]["eval_loss"]


@pytest.mark.exhaustive
def test_perplexity_on_several_hosts_has_the_bits_of_one_process(hosts, job, two_hosts, nothing_left):
    from dsft.api import evaluate

    hostfile, options = (
        hosts.hostfile(job / "eval-hosts", [1, 2]),
        {"model": str(two_hosts / "final"), "data": str(job / "held_out.jsonl"), "seq_len": 64, "zero": "3"},
    )
    result = hosts[0].run(
        ["deepspeed", "--hostfile", hostfile, "dsft/eval_ppl.py", *flags(options), "--output_dir", job / "perplexity"],
        timeout=LAUNCH_SECONDS,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    [score] = read_json(job / "perplexity" / "perplexity.json")["results"]
    alone = evaluate(**(options | {"zero": "0"}), progress=False).perplexity
    assert (score["nats"], score["tokens"]) == (alone.nats, alone.tokens)


def accelerate_file(job: Path, hosts, form: str) -> Path:
    """The shipped file for two nodes, edited as a user would, for hosts of one slot; with full paths, for a folder
    that is not the checkout.
    """
    settings = yaml.safe_load((ROOT / f"ds_configs/accelerate/zero3_2x8{form}.yaml").read_text()) | {
        "num_processes": 2,
        "main_process_ip": hosts[0].name,
    }
    engine = settings["deepspeed_config"]
    engine["deepspeed_config_file"] = str(ROOT / engine["deepspeed_config_file"])
    if "deepspeed_hostfile" in engine:
        engine["deepspeed_hostfile"] = str(hosts.hostfile(job / "accelerate-hosts", [1, 1]))
    path = job / f"accelerate{form}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["", "_pdsh", "_nossh"], ids=["standard", "pdsh", "nossh"])
def test_accelerate(hosts, job, one_process, nothing_left, form):
    file, out = accelerate_file(job, hosts, form), job / f"accelerate{form}"
    (job / "cwd").mkdir(exist_ok=True)  # accelerate leaves a .deepspeed_env in the folder it is started from

    def command(machine: int) -> list:
        words = f"accelerate launch --config_file {file} --machine_rank {machine} {ROOT}/dsft/train.py"
        return f"{words} --config {job}/accelerate_run.yaml --output_dir {out}".split()

    started_on = [hosts[0]] if form == "_pdsh" else [hosts[0], hosts[1]]
    assert_same_training(
        checked(start_on_each(started_on, command, cwd=job / "cwd"), out, ranks=2, nodes=2), one_process
    )


@pytest.mark.exhaustive
def test_torchrun_on_every_node(hosts, job, one_process, nothing_left):
    result = start_on_each(
        [hosts[0], hosts[1]],
        lambda _: ["scripts/torchrun/train", "--config", job / "run.yaml", "--output_dir", job / "torchrun"],
        HEAD="node-0",
        NODES="2",
        RANKS_PER_NODE="1",
    )
    # Which node holds rank 0 is c10d's choice, and rank 0 alone prints.
    assert result.returncode == 0, result.stderr[-6000:]
    assert_same_training(read_json(job / "torchrun" / "run.json"), one_process)
    assert read_json(job / "torchrun" / "run.json")["world_size"] == 2


@pytest.mark.exhaustive
def test_mpirun(hosts, job, one_process, nothing_left):
    hostfile = hosts.hostfile(job / "mpi-hosts", [1, 2])
    result = hosts[0].run(
        ["scripts/mpi/train", "--config", job / "run.yaml", "--output_dir", job / "mpi"],
        HOSTFILE=str(hostfile),
        NET="10.77.0.0/24",
        timeout=LAUNCH_SECONDS,
    )
    assert_same_training(checked(result, job / "mpi", ranks=3, nodes=2), one_process)


@pytest.fixture(scope="module")
def slurm(four_hosts, tmp_path_factory):
    with Slurm([four_hosts[0], four_hosts[1]], tmp_path_factory.mktemp("slurm") / "files") as slurm:
        yield slurm


def submit(slurm, script: str, folder: Path, *words, **environment) -> int:
    """The shipped batch script for these hosts without GPUs, with so much time that SLURM never ends it by itself; its
    output goes to `folder`/out.txt.
    """
    folder.mkdir(exist_ok=True)
    return slurm.submit(
        ["--gres=none", "--time=60", f"--output={folder}/out.txt", f"scripts/slurm/{script}.sbatch", *words],
        **environment,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("script", "per_node"), [("torchrun", 1), ("tasks", 2)])
def test_sbatch(hosts, slurm, job, one_process, nothing_left, script, per_node):
    folder = job / f"sbatch-{script}"
    words = ["--config", job / "run.yaml", "--output_dir", folder / "run"]
    number = submit(slurm, script, folder, *words, RANKS_PER_NODE=str(per_node))
    ended = slurm.wait(number, timeout=LAUNCH_SECONDS)
    log = (folder / "out.txt").read_text()
    assert ended["JobState"] == "COMPLETED", log[-6000:]
    content = read_json(folder / "run" / "run.json")
    assert content["world_size"] == 2 * per_node and log.count("dsft: done: ") == 1
    assert_same_training(content, one_process)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("script", "per_node"), [("torchrun", 1), ("tasks", 1)])
def test_before_its_time_ends_a_run_saves_goes_back_into_the_queue_and_goes_on(
    hosts, slurm, job, nothing_left, script, per_node
):
    folder = job / f"requeued-{script}"
    words = f"--config {job}/run.yaml --output_dir {folder}/run --max_steps 30 --eval_on_start false".split()
    number = submit(slurm, script, folder, *words, RANKS_PER_NODE=str(per_node))
    wait_until(
        lambda: (folder / "out.txt").is_file() and "step      1 " in (folder / "out.txt").read_text(), LAUNCH_SECONDS
    )
    assert (
        hosts[0].run(["scancel", "--batch", "--signal=USR1", number]).returncode == 0
    )  # what SLURM itself sends at --signal=B:USR1@300
    slurm.wait(number, until=lambda job: job["Restarts"] == "1", timeout=LAUNCH_SECONDS)
    assert read_json(folder / "run" / "run.json")["status"] == "preempted"
    wait_until(lambda: not any("slurm_script" in command for _, command in hosts[0].processes()))
    hosts[0].run(
        ["scontrol", "update", f"JobId={number}", "StartTime=now+2seconds"]
    )  # SLURM waits two minutes otherwise; not at all, and its nodes refuse the job
    ended = slurm.wait(number, until=lambda job: job["JobState"] in ("COMPLETED", "FAILED"), timeout=2 * LAUNCH_SECONDS)
    log = (folder / "out.txt").read_text()
    assert ended["JobState"] == "COMPLETED" and "asked to stop" in log and "resuming from" in log, log[-6000:]
    content = read_json(folder / "run" / "run.json")
    assert content["status"] == "done" and content["results"]["steps"] == 30


def wait_until(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.exhaustive
def test_one_machine_plays_two_nodes_with_the_shipped_host_file(hosts, job, one_process, nothing_left):
    command = "deepspeed --hostfile hostfiles/local-2x1 dsft/train.py"
    words = f"--config {job}/run.yaml --output_dir {job}/local".split()
    result = hosts[3].run([*command.split(), *words], timeout=LAUNCH_SECONDS)
    assert_same_training(checked(result, job / "local", ranks=2, nodes=2), one_process)
