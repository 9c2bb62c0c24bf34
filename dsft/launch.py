"""`dsft launch`: checks the nodes, writes the options of the job to one file, starts its ranks on this machine or on
the hosts of a file, and restarts them after a failure. Other launchers start a job with their own commands (scripts/,
docs/multinode.md).

    dsft launch [--hostfile HOSTS] [options] train|eval [options of the run]

A single rank is a child of this process, several are DeepSpeed's launcher's. This process is a client of their store:
it reads the end of the job there, since DeepSpeed's exit code is 0 if its child is killed, and asks ranks to save.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import yaml

from dsft.checkpoints.manifest import checkpoints
from dsft.checkpoints.run_folder import FINAL, known_run
from dsft.config.options import EvalConfig, HostFields, LaunchOptions, TrainConfig
from dsft.config.reader import (
    describe_unknown,
    field_types,
    own_names,
    read_config,
    read_options,
    read_values,
    read_yaml,
    training_types,
)
from dsft.errors import (
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_STOPPED,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    UserError,
    one_line,
    raise_if_any,
)
from dsft.job.beat import CAUSE, LAUNCHER_BEAT, SAVE, Cause
from dsft.perplexity.of_training import read_evaluation
from dsft.runtime.console import show_text
from dsft.runtime.hardware import default_ranks, has_gpu, require_seen_gpus
from dsft.runtime.launcher_env import (
    CHECKS_ALONE,
    ENV_FILE,
    LAUNCH,
    LOOPBACK,
    OPTIONS_FILE,
    SINGLE_PROCESS_ENV,
    SSH,
    address_of,
    free_port,
    launcher_variables,
)
from dsft.setup import check_named_files
from dsft.units import plural

MODULES = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
DEEPSPEED = "deepspeed.launcher.runner"
SSH_OPTIONS = "-o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
"""No prompts, and an exit within a minute if a link is cut; by default ssh would wait for hours."""
SESSION_ENDED = re.compile(rb"pdsh@[^:]*: (\S+): ssh exited with exit code (\d+)")
PLAIN_PATH = re.compile(r"[\w@+=:,./-]+")  # a path that needs no quotes in a shell
END_SECONDS = 4.0  # for the launcher to exit on its own after a failure or a signal; then it is killed
KILL_SECONDS = 5.0
LAST_WORDS_SECONDS = 5.0  # for the store to name the cause after the launcher has exited
SEND_SECONDS = 30.0
PR_SET_PDEATHSIG = 1  # of prctl(2)
FORWARDED = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|NCCL|GLOO|UCX|FI|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|"
    r"OMP|MKL|DS|DSFT|DEEPSPEED|WANDB|MLFLOW|TRACKIO)_\w+|XDG_CACHE_HOME|LD_LIBRARY_PATH|CUDA_HOME"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|(?<!IB_P)KEY|SECRET|PASSW|CREDENTIAL")  # NCCL_IB_PKEY numbers a partition
"""In names of variables that are never forwarded: every user of a node can read others' command lines."""
PASSWORD_IN_URL = re.compile(r"//[^/@\s]*:[^/@\s]+@")


def hosts_of(options: HostFields) -> dict[str, int]:
    """Return the hosts that DeepSpeed starts ranks on, rank 0's first -> their ranks; empty without a host file."""
    hostfile = options.hostfile
    if not hostfile:
        if options.include or options.exclude:
            raise UserError("--include and --exclude choose among the hosts of --hostfile; name one")
        return {}
    if not Path(hostfile).is_file():
        raise UserError(f"--hostfile {hostfile}: no such file; write one line per node, `worker-1 slots=8`")
    if (options.include or options.exclude) and options.num_gpus:
        raise UserError("--num_gpus cannot be combined with --include or --exclude; keep one kind")
    from deepspeed.launcher import runner  # takes seconds

    runner.logger.disabled = True  # it would print the file before the message below
    try:
        hosts = runner.fetch_hostfile(hostfile)
        hosts = runner.parse_inclusion_exclusion(hosts, options.include or "", options.exclude or "")
    except ValueError as error:
        raise UserError(f"--hostfile {hostfile}: {one_line(error)}; a line reads `worker-1 slots=8`") from error
    finally:
        runner.logger.disabled = False
    ranks = {host: options.num_gpus or len(slots) for host, slots in hosts.items() if slots}
    if not ranks:
        raise UserError(f"--hostfile {hostfile}: no host with at least one slot is left")
    return ranks


def read_launch(argv: list[str]) -> tuple[LaunchOptions, str, list[str]]:
    """Parse `[options] train|eval [words]`, with options among the words too. An evaluation begins with its models."""
    problems = []
    values, words = read_options(LaunchOptions, argv, problems)
    options = LaunchOptions(**values)
    if not words or words[0] not in MODULES:
        known = field_types(LaunchOptions)
        word = repr(words[0]) if words else "nothing"
        if words and words[0].startswith("--"):
            word += f" ({describe_unknown(words[0], known)})"
        names = ", ".join(f"--{name}" for name in known)
        problems.append(f"dsft launch: expected train or eval, got {word}; the options before them are {names}")
    for name, value in vars(options).items():
        if value == "":  # "$HOSTS" with an unset variable must not mean this machine
            problems.append(f"--{name}: needs a value")
    raise_if_any(problems)
    name, *words = words
    begins_with_model = name == "eval" and words and not words[0].startswith("--")
    if begins_with_model and not words[0].endswith((".yaml", ".yml")):
        words = ["--model", *words]
    return options, name, words


def launch(argv: list[str]) -> int:
    """Start the job of `[options] train|eval [words]`, again after failures, and return the exit code."""
    options, name, words = read_launch(argv)
    if not options.hostfile and launcher_variables(os.environ):
        # One of several tasks of srun or mpirun: this process becomes that rank.
        os.execv(sys.executable, [sys.executable, "-m", MODULES[name], *words])
    problems = []
    if name == "train":
        config = read_config(TrainConfig, words, problems, also=LaunchOptions)
    else:
        config = read_evaluation(words, problems, also=LaunchOptions)
    output_dir = config.value("output_dir")
    if not options.hostfile and not options.dry_run:  # files may exist on other nodes only
        check_named_files(config, problems)
    raise_if_any(problems)

    hosts = hosts_of(options)
    nodes = list(hosts)
    num_ranks = sum(hosts.values()) or _local_ranks(options)
    if nodes:  # or DeepSpeed uses the first word that a shell there prints, such as a greeting of ~/.bashrc
        options.master_addr = options.master_addr or address_of(nodes[0])
    options.master_port = options.master_port or free_port()  # chosen here, so that the preflight checks the same one
    folder = Path(output_dir) if output_dir else Path(tempfile.gettempdir(), f"dsft-{uuid.uuid4().hex[:8]}")
    # An evaluation may be written to a training's folder, whose options must remain.
    file = folder.absolute() / (OPTIONS_FILE if name == "train" else f"eval_{OPTIONS_FILE}")
    command = _command(options, nodes, num_ranks, name, file)
    if options.dry_run:
        show_text(f"dsft: {shlex.join(command)}")
        return 0
    values = _values(name, words, config)
    if name == "train" and (step := _finished_step(file, values)):
        show_text(f"dsft: {output_dir}: finished at step {step}; --overwrite trains again")
        return 0
    if not nodes:
        require_seen_gpus()
        if not has_gpu():
            os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed warns that there is no GPU
    # Checks that need torch, a tokenizer or headers of weights; a single rank does them itself, as early.
    if not nodes and num_ranks > 1:
        code = _check_as_rank_0(name, words, num_ranks)
        if code:
            return code
    for note in config.notes:
        show_text(f"dsft: note: {note}")
    checkpoint = config.value("resume_from_checkpoint")
    if name == "train" and checkpoint is None:
        os.environ[LAUNCH] = uuid.uuid4().hex  # a restart resumes only this job's run
    before = file.read_bytes() if file.is_file() else None
    try:
        for attempt in range(options.max_restarts + 1):
            # A job that began from a named checkpoint does so again until it has its own.
            has_own = checkpoint in (None, "auto") or checkpoints(output_dir)
            if attempt and name == "train" and has_own:
                values["resume_from_checkpoint"] = "auto"  # evaluations always resume
            is_examined = (nodes or not attempt) and not options.no_preflight
            if is_examined and not _examine(options, output_dir):
                raise UserError(
                    "the preflight found errors (above; docs/doctor.md); --no_preflight starts all the same"
                )
            _write_options(file, values, nodes)
            show_text(f"dsft: {shlex.join(command)}")
            address = options.master_addr or [*nodes, LOOPBACK][0]
            job = _Job(
                command=command,
                nodes=nodes,
                store=_Store(address, options.master_port) if nodes or num_ranks > 1 else None,
                env_file=file.with_name(ENV_FILE),
                saves=name == "train",
                lost_timeout=config.lost_timeout,
            )
            code = job.run()
            if code == EXIT_USER_ERROR and not attempt and before is not None:
                with contextlib.suppress(OSError):
                    file.write_bytes(before)  # these options were refused
            ends = (0, EXIT_USER_ERROR, EXIT_STOPPED, EXIT_UNSAVED, EXIT_REQUEUE)
            if code in ends or job.interrupted:
                return code
            if attempt < options.max_restarts:
                text = f"exit code {code}: restart {attempt + 1} of {options.max_restarts}, from the last checkpoint"
                show_text(f"dsft: {text}", file=sys.stderr)
        return code
    finally:
        os.environ.pop(LAUNCH, None)
        if not output_dir:
            shutil.rmtree(folder, ignore_errors=True)


def _local_ranks(options: LaunchOptions) -> int:
    """Return the number of ranks on this machine: the user's, or one for each GPU of CUDA_VISIBLE_DEVICES."""
    available = default_ranks()
    if has_gpu() and (options.num_gpus or 0) > available:
        raise UserError(f"--num_gpus {options.num_gpus}: this machine has {plural(available, 'GPU')}; lower it")
    return options.num_gpus or available


def _command(options: LaunchOptions, nodes: list[str], num_ranks: int, name: str, file: Path) -> list[str]:
    """Return the command that starts all ranks with the options in `file`. Raises UserError if it cannot work."""
    words = ["--config", str(file)]
    if not nodes and num_ranks == 1:  # DeepSpeed's launcher would need as much CPU time as the rank's own start
        return [sys.executable, "-u", "-m", MODULES[name], *words]
    # "critical" hides the command of each failed rank, which DeepSpeed repeats; the ranks report their errors.
    flags = {
        "master_port": options.master_port,
        "log_level": "critical",
        "bind_cores_to_rank": options.bind_cores_to_rank,
    }
    if nodes:
        if not shutil.which("pdsh"):
            raise UserError(
                "--hostfile: DeepSpeed starts other nodes through pdsh, which is not installed: apt-get install pdsh"
            )
        paths = {"the working folder": os.getcwd(), "Python": sys.executable, "output_dir": str(file.parent)}
        problems = [
            f"{place} {path!r}: DeepSpeed hands it to the nodes' shells unquoted; use a path of letters, digits and"
            " _ + = : , . / - alone"
            for place, path in paths.items()
            if not PLAIN_PATH.fullmatch(path)
        ]
        raise_if_any(problems)
        for key in ("hostfile", "include", "exclude", "num_gpus", "master_addr"):
            flags[key] = getattr(options, key)
        flags["force_multi"] = len(nodes) == 1  # or DeepSpeed starts the ranks of one node here
    elif visible := has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES"):
        # With --num_gpus DeepSpeed uses the first GPUs of the machine.
        flags["include"] = "localhost:" + ",".join(visible.split(",")[:num_ranks])
    else:
        flags["num_gpus"] = num_ranks
    return [sys.executable, "-m", DEEPSPEED, *flag_words(flags), "--module", MODULES[name], *words]


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return the words of a command line; True is a flag without a value, None and False leave a flag out."""
    words = []
    for flag, value in flags.items():
        if value is True:
            words.append(f"--{flag}")
        elif value is not None and value is not False:
            words += [f"--{flag}", str(value)]
    return words


def _values(name: str, words: list[str], config: TrainConfig | EvalConfig) -> dict[str, Any]:
    """Return the options of the job by name, in the form that its ranks read."""
    if name == "train":
        values = own_names(read_values(words, []), training_types(), [])
    else:  # a training's file would have another meaning without the flags
        defaults = EvalConfig()
        values = {name: config.value(name) for name in field_types(EvalConfig)}
        values = {name: value for name, value in values.items() if value != defaults.value(name)}
        values.pop("seq_len", None)
        if config.has_seq_len:
            values["seq_len"] = config.seq_len
    for key, value in values.items():
        if isinstance(value, (list, tuple)):
            values[key] = list(value)  # YAML has no tuples, nor classes of lists
    return values


def _finished_step(file: Path, values: dict[str, Any]) -> int | None:
    """Return the last step of a finished training with the same options, which are in `file`; None if there is none."""
    if values.get("overwrite") or not (file.parent / FINAL).is_dir():
        return None
    run = known_run(file.parent)
    before = read_yaml(str(file), []) or {}
    ignored = {"resume_from_checkpoint": None}
    is_same = before | ignored == values | ignored
    return run["results"]["steps"] if is_same and run.get("status") == "done" else None


def _write_options(file: Path, values: dict[str, Any], nodes: list[str]) -> None:
    """Write the options to the job's folder, here and on every node, since nodes may not share it."""
    text = yaml.safe_dump(values, allow_unicode=True, sort_keys=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    _write_private(file, text)
    _run_on(nodes, f"umask 077; mkdir -p {file.parent} && cat > {file}", text)


def _run_on(nodes: list[str], script: str, text: str = "") -> None:
    """Run a shell script, which reads `text`, on every node. Errors of a node are reported by the start."""

    def run(node):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([*SSH, node, script], input=text.encode(), capture_output=True, timeout=SEND_SECONDS)

    with ThreadPoolExecutor(max_workers=64) as pool:
        list(pool.map(run, nodes))


def _write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read: it may contain a token."""
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def _check_as_rank_0(name: str, words: list[str], num_ranks: int) -> int:
    """Return the exit code of rank 0's own checks, in a process whose memory is freed before ranks start."""
    show_text("dsft: checking options, data and models before ranks start")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks)}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}  # the ranks warn
    result = subprocess.run(
        [sys.executable, "-m", MODULES[name], *words],
        env=os.environ | place | quiet | {CHECKS_ALONE: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Ctrl-C ends it through this process, which prints it once; other signals to the group end both.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    if result.returncode < 0:
        raise UserError(f"the check before the start was killed by signal {-result.returncode} (9: out of memory)")
    return result.returncode


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the nodes get in addition to DeepSpeed's own, without secrets."""
    variables = {}
    for name, value in environment.items():
        is_secret = SECRET.search(name) or PASSWORD_IN_URL.search(value)
        if FORWARDED.fullmatch(name) and value and "\n" not in value and not is_secret:
            variables[name] = value
    paths = [os.getcwd(), environment.get("PYTHONPATH")]
    return variables | {"PYTHONPATH": ":".join(filter(None, paths))}


def remote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the other nodes, between double quotes: forwarded ones, and those of `.deepspeed_env`."""
    variables = {}
    for name, value in forwarded(environment).items():
        variables[name] = re.sub(r"([\\\"$`])", r"\\\1", value)
    for folder in (Path.home(), Path.cwd()):
        file = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            lines = [line.strip() for line in file.read_text().splitlines() if "=" in line]
            variables |= dict(line.split("=", 1) for line in lines)
    return variables


def _examine(options: LaunchOptions, output_dir: str | None) -> bool:
    """Run `dsft doctor --quick` on the nodes; return whether it found no error."""
    flags = {name: getattr(options, name) for name in field_types(HostFields)}
    flags |= {"quick": True, "only_findings": True, "output_dir": output_dir}
    command = [sys.executable, "-m", "dsft.cli.doctor", *flag_words(flags)]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


class _Store(threading.Thread):
    """Follows the job in the store of its ranks, after they have created it."""

    def __init__(self, address: str, port: int):
        super().__init__(daemon=True)
        self.address = address
        self.port = port
        self.cause: Cause | None = None
        self.has_met = False
        self.is_closed = False
        self.last_answer = time.monotonic()
        self.orders: dict[str, str] = {}
        """Keys and values to write as soon as the ranks can read them."""

    def run(self) -> None:
        while not self.is_closed:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=5):
                break
            time.sleep(1)
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the store ends with the job, which is not an error
        from torch.distributed import PrefixStore, TCPStore  # takes seconds

        number = 0
        try:
            client = TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=60))
            store = PrefixStore("dsft/beat/0", client)
            while not self.is_closed:
                self.has_met = self.has_met or store.check(["rank 0"])
                if store.check([CAUSE]):
                    self.cause = Cause.from_json(store.get(CAUSE))
                    return
                if self.has_met:
                    number += 1
                    store.set(LAUNCHER_BEAT, str(number))
                    for key in list(self.orders):
                        store.compare_set(key, "", self.orders.pop(key))
                self.last_answer = time.monotonic()
                time.sleep(1)
        except RuntimeError:  # from torch: the job has ended
            return


@dataclasses.dataclass(kw_only=True)
class _Job:
    command: list[str]
    nodes: list[str]
    store: _Store | None
    """None if the only rank is a child of this process."""
    env_file: Path
    saves: bool
    lost_timeout: float
    interrupted: int = 0
    """The signal that ended it; 0 if none did."""
    failure: str = ""
    end_at: float | None = None
    is_asked: bool = False
    process: subprocess.Popen | None = None

    def run(self) -> int:
        """Run the job and return the exit code. A first signal asks ranks to save and exit; a second one ends them."""
        environment = dict(os.environ)
        if self.store is None:
            environment |= SINGLE_PROCESS_ENV | {"LOCAL_SIZE": "1"}
        if self.nodes:
            variables = remote_environment(os.environ)
            lines = [f"{name}={value}\n" for name, value in variables.items()]
            _write_private(self.env_file, "".join(lines).replace("%", "%%"))  # pdsh replaces %h by the host
            environment["DS_ENV_FILE"] = str(self.env_file)
            append = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{append} {SSH_OPTIONS}".strip()
        libc = ctypes.CDLL(None)
        self.process = process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if self.nodes else None,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # if this process is killed
        )
        shows = threading.Thread(target=self._show_errors, daemon=True)
        shows.start()
        if self.store:
            self.store.start()
        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                handlers[number] = signal.signal(number, self._signalled)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                self._follow()
            if self.store:
                self.store.join(LAST_WORDS_SECONDS)
        finally:
            self._kill()
            if self.nodes and (self.interrupted or (self.failure and not self.store.has_met)):
                self._kill_remote_ranks()
            shows.join(timeout=2)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if self.store:
                self.store.is_closed = True
            with contextlib.suppress(OSError):  # the disk may have become read-only
                self.env_file.unlink()
        return self._exit_code()

    def _exit_code(self) -> int:
        code = self.process.returncode
        cause = self.store and self.store.cause
        if self.interrupted:
            return 128 + self.interrupted
        if cause:
            return cause.exit_code
        if self.failure:
            return 1
        if 0 <= code <= 128:
            return code
        # 247 from DeepSpeed's launcher for a killed child, 255 from pdsh.
        show_text("dsft: error: a rank was killed, or crashed in native code", file=sys.stderr)
        return 128 - code if code < 0 else 1

    def _show_errors(self) -> None:
        """Print pdsh's output. If the ssh of a host ends before the ranks have met, the start has failed."""
        for line in self.process.stderr or ():
            show_text(line.decode(errors="replace").rstrip(), file=sys.stderr)
            match = SESSION_ENDED.match(line)
            if match and int(match[2]) and not self.store.has_met and not self.failure:
                host = match[1].decode()
                code = int(match[2])
                self.failure = f"{host}: ssh exited with code {code} before its ranks had met the others"
                if code != EXIT_USER_ERROR:  # its message is already printed
                    show_text(f"dsft: error: {self.failure}", file=sys.stderr)

    def _follow(self) -> None:
        """End a failed job whose launcher does not exit."""
        store = self.store
        now = time.monotonic()
        if store and store.has_met and store.is_alive() and not self.failure:
            silent_seconds = now - store.last_answer
            if silent_seconds > self.lost_timeout + KILL_SECONDS:
                self.failure = f"rank 0 at {store.address} does not answer for {self.lost_timeout:.0f} s"
                show_text(f"dsft: error: {self.failure}", file=sys.stderr)
        if (self.failure or (store and store.cause)) and self.end_at is None:
            self.end_at = now + END_SECONDS * (not self.failure)
        if self.end_at is not None and now > self.end_at:
            self._kill()

    def _signalled(self, number: int, _: Any) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        asks = self.saves and number != signal.SIGHUP and not self.is_asked
        if number == signal.SIGUSR1 or (asks and (self.store is None or self.store.has_met)):
            self.is_asked = True
            if self.store:
                self.store.orders[SAVE] = "1"
            else:
                self.process.send_signal(signal.SIGUSR1)
            if number != signal.SIGUSR1:
                text = f"dsft: {name}: asked the ranks to save and exit; a second one ends them at once"
                show_text(text, file=sys.stderr)
            return
        show_text(f"dsft: {name}: ending all ranks", file=sys.stderr)
        self.interrupted = number
        if self.store and self.store.has_met:
            cause = Cause(rank=0, host="dsft launch", text=name, exit_code=EXIT_INTERRUPTED, printed_by=-1)
            self.store.orders[CAUSE] = cause.to_json()
            self.end_at = time.monotonic() + END_SECONDS
        else:
            self.end_at = 0.0

    def _kill(self) -> None:
        """Kill the launcher and its remaining processes here, such as an ssh to a node that does not answer."""
        process = self.process
        sessions = []  # of ssh, which pdsh moves out of its process group
        with contextlib.suppress(psutil.Error):
            sessions = psutil.Process(process.pid).children(recursive=True) if self.nodes else []
        if process.poll() is None and not self.nodes:
            # Not for several nodes: on SIGTERM, DeepSpeed's runner kills everything there with the script's name.
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        _signal_group(process.pid, signal.SIGKILL)
        for session in sessions:
            with contextlib.suppress(psutil.Error):
                session.kill()
        process.wait()

    def _kill_remote_ranks(self) -> None:
        """Kill ranks that do not notice the end of ssh, and would wait for start_timeout or lost_timeout."""
        pattern = f"dsft.* --config {re.escape(str(self.env_file.parent))}/[a-z_]*{OPTIONS_FILE}"
        _run_on(self.nodes, f"pkill -KILL -f -- '{pattern}'")


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
