"""Faults of a job of two hosts under each launcher: what the user reads, exit codes, seconds, and what is left running.

    python benchmarks/faults.py --results faults.jsonl --launchers dsft torchrun --faults kill_rank cut_20s
    python benchmarks/faults.py --results faults.jsonl --out benchmarks/results/faults_cpu.json
    python benchmarks/faults.py --results faults.jsonl --table

Each case is a real training of a tiny model, one CPU rank on each of two test hosts (tests/cluster/hosts.py: namespaces
of Linux with sshd), with the time-outs that a user gets. Needs root and the Debian packages named in hosts.py; all
cases take about two hours on two cores. Real networks and GPUs are not tried.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cluster.hosts import Host, Started, TestHosts
from tiny import write_model, write_texts

LAUNCHERS = ["dsft", "deepspeed", "torchrun", "accelerate", "accelerate_pdsh"]
START_SECONDS = 600
PATIENCE_SECONDS = 700
"""From the fault to the end of the command; then it counts as a hang."""
LEFT_SECONDS = 10
"""From the end of the command to the first look at what is left."""
CLEAN_SECONDS = 60
"""The same, for the last look."""
ENDLESS = {"max_steps": 100_000, "save_strategy": "no"}
SIXTY_STEPS = {"max_steps": 60, "save_strategy": "no"}


class Job:
    """A training on two hosts. `commands`: those that a user types, one or one on each host."""

    def __init__(self, hosts: TestHosts, folder: Path, launcher: str, options: dict, words: list[str]):
        self.hosts, self.folder, self.launcher = hosts, folder, launcher
        self.output_dir = folder / "run"
        folder.mkdir()
        script = "train" if launcher == "dsft" else ROOT / "dsft/train.py"
        files = ["--config", folder.parent / "configs/run.yaml", "--output_dir", self.output_dir]
        script_words = [script, *files, *(f"--{key}={value}" for key, value in options.items())]
        if not launcher.startswith("accelerate"):  # accelerate's file says the stage
            script_words += ["--zero", "3"]
        on_each = launcher in ("torchrun", "accelerate")
        self.commands: list[Started] = []
        for number, host in enumerate(hosts if on_each else hosts[:1]):
            command = [*command_of(launcher, hosts, folder, number, words), *script_words]
            log = (folder / f"screen-{number}.log").open("w")
            self.commands.append(host.start(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT))
        self.ended_at: dict[int, float] = {}

    def screen(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("screen-*.log")))

    def is_running(self) -> bool:
        """Whether a command has not ended; notes when each did."""
        for number, command in enumerate(self.commands):
            if number not in self.ended_at and command.poll() is not None:
                self.ended_at[number] = time.monotonic()
        return len(self.ended_at) < len(self.commands)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition() and self.is_running() and time.monotonic() < deadline:
            time.sleep(0.1)

    def trains(self) -> bool:
        """Whether the first step is done."""
        return bool(re.search(r"^(node-\d: )?step +1 ", self.screen(), re.M))

    def signal_rank(self, number: int, signal_number: int) -> None:
        for host in self.hosts:
            for pid, command in host.processes():
                with contextlib.suppress(OSError):
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if "train" in command and "watchdog" not in command and f"RANK={number}".encode() in variables:
                        host.kill(pid, signal_number)

    def sidecars(self) -> list[bool]:
        """Whether a rank has started, for each host."""
        return [any("dsft.watchdog.sidecar" in command for _, command in host.processes()) for host in self.hosts]

    def bits(self) -> str:
        """Digest of the trained weights."""
        files = sorted(self.output_dir.glob("final/*.safetensors"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12] if files else ""


def command_of(launcher: str, hosts: TestHosts, folder: Path, number: int, words: list[str]) -> list:
    """What a user types on host `number`, up to the script; `words` go to `dsft launch`."""
    hostfile = hosts.hostfile(folder / "hosts", [1, 1])
    if launcher == "dsft":
        return ["dsft", "launch", "--hostfile", hostfile, *words]
    if launcher == "deepspeed":
        return ["deepspeed", "--hostfile", hostfile]
    if launcher == "torchrun":
        meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node-0:29500", "--rdzv_id", folder.name]
        return ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", *meeting]
    form = "_pdsh" if launcher == "accelerate_pdsh" else ""
    settings = yaml.safe_load((ROOT / f"ds_configs/accelerate/zero3_2x8{form}.yaml").read_text())
    settings["num_processes"] = 2
    engine = settings["deepspeed_config"]
    engine["deepspeed_config_file"] = str(ROOT / engine["deepspeed_config_file"])
    if form:
        engine["deepspeed_hostfile"] = str(hostfile)
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    return ["accelerate", "launch", "--config_file", folder / "accelerate.yaml", "--machine_rank", number]


@dataclass(frozen=True)
class Fault:
    """What is done to a job, and when."""

    title: str
    actions: list[tuple[float, Callable[[Job], None]]] = field(default_factory=list)
    """(seconds after the moment, what is done). The moment is the first step, or see `early`."""
    early: bool = False
    """The moment is when each host has a rank, which has not met the others."""
    options: dict = field(default_factory=lambda: ENDLESS)
    words: tuple[str, ...] = ("--no_preflight",)
    """Options of `dsft launch`."""
    on_node_1: Callable[[Path], tuple[str, str]] = lambda folder: ("true", "true")
    """(shell command that begins it, that ends it) on node-1, for a folder, around the job."""
    jobs: int = 1


def power_off(job: Job) -> None:
    """The host is silent from one moment to the next, and nothing of it runs when it is back, but sshd."""
    job.hosts[1].cut()
    end_processes(job.hosts[1], lambda command: True)


def kill_ssh_sessions(job: Job) -> None:
    """sshd's end of each session with node-1: ssh ends with 255."""
    end_processes(job.hosts[1], lambda command: "@notty" in command)


def end_processes(host: Host, chosen: Callable[[str], bool]) -> None:
    for process in host.all_processes():
        with contextlib.suppress(psutil.Error):
            if process.pid != host.init_pid and chosen(" ".join(process.cmdline())):
                process.kill()


def other_file(original: Path, change: Callable[[str], str]) -> Callable[[Path], tuple[str, str]]:
    """`original` has another content on one host."""

    def commands(folder: Path) -> tuple[str, str]:
        (folder / "other").write_text(change(original.read_text()))
        return f"mount --bind {folder / 'other'} {original}", f"umount {original}"

    return commands


def other_configuration(folder: Path) -> tuple[str, str]:
    return f"mount --bind {folder / 'stale'} {folder / 'configs'}", f"umount {folder / 'configs'}"


PEFT = importlib.metadata.distribution("peft")
FAULTS = {
    "none": Fault("nothing", options=SIXTY_STEPS),
    "kill_rank": Fault("rank 1 killed (SIGKILL)", [(0, lambda job: job.signal_rank(1, signal.SIGKILL))]),
    "stop_rank": Fault("rank 1 stopped (SIGSTOP)", [(0, lambda job: job.signal_rank(1, signal.SIGSTOP))]),
    "cut_20s": Fault(
        "link of node-1 cut for 20 s",
        [(0, lambda job: job.hosts[1].cut()), (20, lambda job: job.hosts[1].heal())],
        options=SIXTY_STEPS,
    ),
    "cut_5min": Fault(
        "link of node-1 cut for 5 minutes",
        [(0, lambda job: job.hosts[1].cut()), (300, lambda job: job.hosts[1].heal())],
    ),
    "power_off": Fault(
        "power of node-1 off, on again after 100 s",
        [(0, power_off), (100, lambda job: job.hosts[1].heal())],
        options={"max_steps": 60, "save_strategy": "steps", "save_steps": 20},
        words=("--max_restarts", "1", "--wait_for_nodes", "300"),
    ),
    "kill_ssh": Fault("ssh sessions with node-1 killed", [(0, kill_ssh_sessions)], options=SIXTY_STEPS),
    "kill_launcher_early": Fault(
        "launcher killed before the rendezvous", [(0, lambda job: job.commands[0].kill())], early=True
    ),
    "kill_launcher": Fault("launcher killed", [(0, lambda job: job.commands[0].kill())]),
    "two_jobs": Fault("two jobs at once", options={"max_steps": 20, "save_strategy": "no"}, jobs=2),
    "stale_config": Fault(
        "another learning_rate in node-1's run.yaml",
        options={"max_steps": 5},
        words=(),
        on_node_1=other_configuration,
    ),
    "stale_code": Fault(
        "another state of dsft's code on node-1",
        options={"max_steps": 5},
        words=(),
        on_node_1=other_file(ROOT / "dsft/api.py", lambda text: text + "\n# older\n"),
    ),
    "other_version": Fault(
        "another version of peft on node-1",
        options={"max_steps": 5},
        words=(),
        on_node_1=other_file(
            Path(PEFT._path, "METADATA"),
            lambda text: text.replace(f"\nVersion: {PEFT.version}\n", "\nVersion: 0.1.0\n"),
        ),
    ),
}


@contextlib.contextmanager
def changed(host: Host, begin: str, end: str) -> Iterator[None]:
    result = host.run(["bash", "-c", begin])
    assert result.returncode == 0, result.stderr
    yield
    host.run(["bash", "-c", end])


def try_fault(hosts: TestHosts, folder: Path, name: str, launcher: str) -> dict:
    """One case: start, fault, wait for the end; returns the row of the table."""
    fault = FAULTS[name]
    before = {pid for host in hosts for pid, _ in host.processes()}
    with changed(hosts[1], *fault.on_node_1(folder)):
        start = time.monotonic()
        numbers = [f"{name}-{launcher}-{number}-{time.time():.0f}" for number in range(fault.jobs)]
        jobs = [Job(hosts, folder / number, launcher, fault.options, list(fault.words)) for number in numbers]
        job = jobs[0]
        if fault.actions:
            job.wait(lambda: all(job.sidecars()) if fault.early else job.trains())
            start = time.monotonic()
        pending = [(start + seconds, action) for seconds, action in fault.actions]
        while any([job.is_running() for job in jobs]) and time.monotonic() < start + PATIENCE_SECONDS:
            while pending and time.monotonic() >= pending[0][0]:
                pending.pop(0)[1](job)
            time.sleep(0.1)
        ended = time.monotonic()
        while (left := left_on(hosts, before)) and time.monotonic() < ended + LEFT_SECONDS:
            time.sleep(0.1)
        left_after_10s = left
        while (left := left_on(hosts, before)) and time.monotonic() < ended + CLEAN_SECONDS:
            time.sleep(0.1)
        clean = time.monotonic() - start
    row = {
        "fault": name,
        "launcher": launcher,
        "read": [decisive(each.screen()) for each in jobs],
        "exit_codes": [[command.poll() for command in each.commands] for each in jobs],
        "seconds": [[round(at - start, 1) for _, at in sorted(each.ended_at.items())] for each in jobs],
        "left_after_10s": left_after_10s,
        "left": left,
        "clean_seconds": round(clean, 1),
        "bits": [each.bits() for each in jobs],
    }
    hosts.clean_up()
    return row


def left_on(hosts: TestHosts, before: set[int]) -> list[str]:
    return [f"{host.name}: {line}" for host in hosts for pid, line in host.processes() if pid not in before]


def decisive(screen: str) -> list[str]:
    """The lines that say what happened."""
    lines = [re.sub(r"^node-\d: ", "", line) for line in screen.splitlines()]
    told = [
        line for line in lines if re.match(r"dsft: (error|done|.*(being ended|terminating)|.*restart)|error: ", line)
    ]
    return list(dict.fromkeys(told))


def table(results: Path) -> str:
    """Markdown: one line for each case, of its last try."""
    rows = {(row["fault"], row["launcher"]): row for row in map(json.loads, results.read_text().splitlines())}
    lines = [
        "| fault | launcher | what is read | exit code | seconds to its end | to the last process's |",
        "|---|---|---|---|---|---|",
    ]
    for name, fault in FAULTS.items():
        for launcher in LAUNCHERS:
            if row := rows.get((name, launcher)):
                codes, seconds = (" and ".join(map(joined, row[key])) for key in ("exit_codes", "seconds"))
                weights = [f"weights {digest}" for digest in row["bits"] if digest]
                told = "<br>".join(dict.fromkeys([*(short(line) for read in row["read"] for line in read), *weights]))
                last = f"{len(row['left'])} left after {row['clean_seconds']:.0f}" if row["left"] else ""
                cells = (fault.title, launcher, told, codes, seconds, last or f"{row['clean_seconds']:.0f}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cases(results: Path) -> dict:
    """Exit codes, seconds until no process is left, and whether the weights are those of an undisturbed run, by fault
    and launcher: the last try of each.
    """
    rows = {(row["fault"], row["launcher"]): row for row in map(json.loads, results.read_text().splitlines())}
    undisturbed = {digest for (name, _), row in rows.items() if name == "none" for digest in row["bits"]}
    names = [name for name in FAULTS if any(fault == name for fault, _ in rows)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "accelerate")}
    return {
        "made with": versions | {"cores": psutil.cpu_count()},
        "cases": [
            {
                "fault": FAULTS[name].title,
                **{
                    launcher: {
                        "exit_codes": " and ".join(sorted(map(joined, row["exit_codes"]))),  # either job may be first
                        "seconds": round(row["clean_seconds"]),
                        "left": len(row["left"]),
                        "bit_identical": undisturbed == set(row["bits"]),
                    }
                    for launcher in LAUNCHERS
                    if (row := rows.get((name, launcher)))
                },
            }
            for name in names
        ],
    }


def joined(values: list) -> str:
    """The commands of one job."""
    return ", ".join("none" if value is None else f"{value:.0f}" for value in values)


def short(line: str) -> str:
    """Without folders, and its first 200 characters."""
    line = re.sub(r"/tmp/[^ ,;:]*/([^/ ,;:]+)", r"\1", line.removeprefix("dsft: "))
    return line if len(line) <= 200 else f"{line[:200]} ..."


def write_inputs(folder: Path) -> None:
    write_model(folder / "model")
    write_texts(folder / "texts.jsonl", 60)
    options = {
        "model": str(folder / "model"),
        "data": str(folder / "texts.jsonl"),
        "seq_len": 64,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    for name, changes in (("configs", {}), ("stale", {"learning_rate": 0.001})):
        (folder / name).mkdir()
        (folder / name / "run.yaml").write_text(yaml.safe_dump(options | changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--keep", type=Path, help="folder for screens and logs")
    parser.add_argument("--table", action="store_true", help="print the results with what users read, and stop")
    parser.add_argument("--out", type=Path, help="JSON file for the codes and seconds of the results; then stop")
    options = parser.parse_args()
    if options.table:
        print(table(options.results))
        return
    if options.out:
        options.out.write_text(json.dumps(cases(options.results), indent=1) + "\n")
        return
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=options.keep))
    write_inputs(folder)
    with TestHosts(2, shared=[folder]) as hosts:
        for launcher in options.launchers:
            for name in options.faults:
                row = try_fault(hosts, folder, name, launcher)
                print(json.dumps(row), flush=True)
                with options.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
