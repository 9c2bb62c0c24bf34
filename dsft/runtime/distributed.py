"""The process group, the few collectives that dsft itself needs, and the signals that ask a training to save.

All of it also runs as a single process without a launcher. DeepSpeed creates the process group (NCCL, gloo, shared
memory on CPUs). torch, which takes seconds to import, is imported inside functions.
"""

import atexit
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.errors import NotStarted, UserError, one_line, raise_if_any
from dsft.job import beat as watchdog
from dsft.runtime.console import say, show_text
from dsft.runtime.disk import hold_folder
from dsft.runtime.hardware import (
    Machine,
    cpu_count,
    has_gpu,
    require_seen_gpus,
    this_machine,
)
from dsft.runtime.launcher_env import (
    SINGLE_PROCESS_ENV,
    choose_interface,
    free_port,
    launchers_of,
    map_launcher_variables,
    rank,
    ranks_per_node,
    world_size,
)
from dsft.runtime.software import TESTED_PACKAGES, code_hash, numeric_versions, untested_versions

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_timeout_seconds = 1800.0


def start_ranks(*, timeouts: Any = None, timeout_seconds: float = 1800, output_dir: str | None = None) -> None:
    """Join the process group of all ranks; without a launcher, a group of one.

    Args:
        timeouts: an object with the fields of `config.TimeoutFields`, for a job under the watchdog.
        timeout_seconds: of a collective.
        output_dir: of the run, which distinguishes its ranks from those of another job at the same port.

    Raises UserError if a launcher set only some of its variables, the port is busy, or another job uses it; NotStarted
    if other ranks do not join.
    """
    global _timeout_seconds
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is reported in one line, without C++ frames
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    map_launcher_variables()
    if timeouts:
        watchdog.start(timeouts)
    missing = [name for name in (*SINGLE_PROCESS_ENV, "MASTER_PORT") if name not in os.environ]
    if world_size() > 1 and missing:
        raise UserError(
            f"WORLD_SIZE={world_size()} is set but {', '.join(missing)} is not: start dsft through a launcher"
        )
    for name, value in SINGLE_PROCESS_ENV.items():
        os.environ.setdefault(name, value)
    if world_size() == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_PORT"] = str(free_port())  # torchrun's agent itself listens on its port
    choose_interface()
    set_library_variables()
    import deepspeed  # here, so that `import dsft` is fast and DS_ACCELERATOR is read after it is set

    if has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    meet_seconds = timeouts.start_timeout if timeouts else 300
    timeout = timedelta(seconds=meet_seconds)
    address = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    try:
        store, number, _ = next(dist.rendezvous("env://", timeout=timeout))
        check_job(store, output_dir, number)
        with contextlib.redirect_stdout(io.StringIO()):  # each CPU rank reports its built operator
            deepspeed.init_distributed(verbose=False, timeout=timeout)
        del store  # must exist until the process group is created, which uses the same one
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={port}: is in use on {socket.gethostname()} (ss -ltnp names the process); pass another"
                " to the launcher (--master_port N, the same on every node)"
            ) from error
        reason = one_line(error).partition(". ")[0].rstrip(".")
        raise NotStarted(
            f"rank {rank()} of {world_size()} on {socket.gethostname()}: the rendezvous at {address} port {port} timed"
            f" out (start_timeout={meet_seconds:g} s): {reason}. Did all nodes start, and do they reach that address?"
            " dsft doctor, started like this run, names what is in the way"
        ) from error
    # From here on the watchdog's limits are shorter, so that the watchdog reports failures.
    _timeout_seconds = timeout_seconds
    extend_timeouts()
    if not has_gpu() and world_size() > 1:
        # After every rank has mapped the buffer of DeepSpeed's collectives its name is not needed, but DeepSpeed never
        # removes it: each launch would leak 66 MiB of memory per rank (deepspeed/ops/csrc/cpu/comm/shm.cpp).
        dist.barrier()
        buffer = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank()}"
        Path("/dev/shm", buffer).unlink(missing_ok=True)
    if timeouts:
        watchdog.connect()


def extend_timeouts() -> None:
    """Set the timeout of every existing process group: DeepSpeed's have torch's default, 600 s with NCCL."""
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_rank(group) >= 0:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_timeout_seconds), group)


def _several_ranks() -> Any:
    import torch.distributed as dist

    return dist if dist.is_initialized() and dist.get_world_size() > 1 else None


def stop_ranks() -> None:
    """Leave the process group; a launcher's rank exits here, since threads of the group may abort its shutdown."""
    import torch.distributed as dist

    wait_for_all()
    watchdog.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if world_size() > 1:
        atexit._run_exitfuncs()  # for loggers and workers, as at any exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@functools.cache
def stop_at_exit() -> None:
    """Leave the process group at the end of this program: threads that DeepSpeed keeps alive may abort it."""
    import torch.distributed as dist

    def leave():
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(leave)


def raise_together(problems: list[str]) -> None:
    """Raise the union of all ranks' problems on every rank; one that not all have names a host and rank. Collective."""
    ranks = from_all([(f"{socket.gethostname()}, rank {rank()}", problems)])
    places = defaultdict(list)
    for place, problems_there in ranks:
        for problem in dict.fromkeys(problems_there):
            places[problem].append(place)
    named = []
    for problem, places_there in places.items():
        is_everywhere = len(places_there) == len(ranks)
        named.append(problem if is_everywhere else f"{problem} (on {places_there[0]})")
    raise_if_any(named)


def from_all(values: list[Any]) -> list[Any]:
    """Return all ranks' lists, concatenated in the order of ranks; the same on every rank. Collective."""
    lists = [values]
    if dist := _several_ranks():
        lists *= dist.get_world_size()
        dist.all_gather_object(lists, values)
    return list(itertools.chain.from_iterable(lists))


def wait_for_all() -> None:
    """Wait until every rank is here. Collective."""
    if dist := _several_ranks():
        dist.barrier()


def wait_long(name: str) -> None:
    """Wait for all ranks without a time limit, as often on each with the same `name`: a collective would time out."""
    if (dist := _several_ranks()) is None:
        return
    store = dist.distributed_c10d._get_default_store()
    count = store.add(f"dsft/{name}", 1)
    everyone = -(-count // dist.get_world_size()) * dist.get_world_size()  # including all earlier calls
    while store.add(f"dsft/{name}", 0) < everyone:
        watchdog.heartbeat()
        time.sleep(0.1)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Return rank 0's result of `function()`, or raise its UserError, on every rank. Collective."""
    outcome = [None]
    if rank() == 0:
        try:
            outcome = [function()]
        except UserError as error:
            outcome = [error]
    if dist := _several_ranks():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    return outcome[0]


def first_on_rank_0(function: Callable[[], None]) -> None:
    """Call `function` on rank 0, then on all others: for files that nodes may share or not. Collective."""
    if rank() == 0:
        function()
    wait_long("rank 0 was first")
    if rank() != 0:
        function()
    wait_long("the others followed")


@contextlib.contextmanager
def only_run_in(output_dir: str | None) -> Iterator[None]:
    """Hold the lock of `output_dir` on rank 0. Raises UserError on all ranks if another run has it. Collective."""
    with contextlib.ExitStack() as held:
        on_rank_0(lambda: held.enter_context(hold_folder(Path(output_dir))) if output_dir else None)
        yield


def this_node() -> tuple[str, str]:
    """Return values that identify this node among the job's others, which may have the same host name."""
    return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def smallest_machine() -> Machine:
    """Return the machine of this job, with the most ranks of any node and the least memory of any rank. Collective."""
    of_ranks = from_all([(this_node(), this_machine(ranks_per_node=ranks_per_node()))])
    numbers = Counter(node for node, _ in of_ranks)
    is_even = len(set(numbers.values())) == 1
    return dataclasses.replace(
        of_ranks[0][1],
        nodes=len(numbers),
        ranks_per_node=max(numbers.values()),
        num_ranks=0 if is_even else len(of_ranks),
        device_bytes=min(machine.device_bytes for _, machine in of_ranks),
        host_bytes=min(machine.host_bytes for _, machine in of_ranks),
    )


def device() -> "torch.device":
    import torch

    if has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def add_over_ranks(values: "torch.Tensor") -> None:
    """Sum element by element over all ranks, in place, without waiting for a GPU. Collective."""
    if dist := _several_ranks():
        dist.all_reduce(values)


def sum_over_ranks(values: "torch.Tensor") -> "torch.Tensor":
    """Sum element by element over all ranks; the result is on the CPU. Collective."""
    if _several_ranks():
        values = values.to(device())
        add_over_ranks(values)
    return values.cpu()


def copy_from_rank_0(values: "torch.Tensor") -> None:
    """Overwrite `values` with those of rank 0. Collective."""
    if dist := _several_ranks():
        on_device = values.to(device())
        dist.broadcast(on_device, src=0)
        values.copy_(on_device)


def max_over_ranks(value: float) -> float:
    """Return the largest of all ranks' values. Collective."""
    return max(from_all([value]))


def check_job(store: "Store", output_dir: str | None, rank: int) -> None:
    """Raise UserError if rank 0's job, by torchrun's id or the folder, is another, or this rank is already there."""
    job = f"output_dir={output_dir}"
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        job = f"rdzv_id={os.environ['TORCHELASTIC_RUN_ID']}"
    key = f"dsft/job/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun's store outlives a restart
    place = f"rank {rank} on {socket.gethostname()}: MASTER_ADDR={os.environ.get('MASTER_ADDR')}"
    place += f" MASTER_PORT={os.environ.get('MASTER_PORT')}"
    remedy = "start one of them with another --master_port"
    other = store.compare_set(key, "", job) if rank == 0 else store.get(key)
    other = other.decode()
    if other != job:
        raise UserError(f"{place} is used by another job, {other}, and this is {job}; {remedy}")
    if store.add(f"{key}/{rank}", 1) > 1:
        raise UserError(f"{place} is used by another process of this rank: was the command started twice? {remedy}")


_is_asked = False
"""SIGUSR1, SIGTERM or a first Ctrl-C asks a training to save and end, so that it can resume later: SLURM and Kubernetes
send the signals before they take a node away. In a notebook Ctrl-C is unchanged."""


def _note_signal(number: int, frame: object) -> None:
    global _is_asked
    if number == signal.SIGINT:
        if _is_asked:
            raise KeyboardInterrupt
        show_text("dsft: Ctrl-C: saves and exits after the next step; a second one exits at once", file=sys.stderr)
    _is_asked = True


def listen_for_signals() -> None:
    """Record SIGUSR1 from now on: SLURM may send it while the model loads, and to a single rank."""
    global _is_asked
    _is_asked = False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _note_signal)


@contextlib.contextmanager
def signals_save() -> Iterator[None]:
    """Also record SIGTERM and Ctrl-C inside a `with`, in the main thread, unless they are ignored."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM]
    if "ipykernel" not in sys.modules:
        numbers.append(signal.SIGINT)
    handlers = {}
    for number in numbers:
        if is_main_thread and signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, _note_signal)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def is_asked_to_save() -> bool:
    return _is_asked


ONE_THREAD_BY_DEFAULT = {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_DEEPSPEED"}
"""Variables of launchers that set OMP_NUM_THREADS to 1 if it is not set."""


def set_library_variables() -> None:
    """Set variables that torch and DeepSpeed read at their start."""
    import torch

    if has_gpu():
        # Read at the first allocation. Without it the gaps between gathered layers and activations cannot be used
        # together. The older name would override the user's newer one.
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # DeepSpeed accepts only numbers when it compiles an operator (op_builder/builder.py): 9.0, not 9.0a or 10.0f.
        if architectures := os.environ.get("TORCH_CUDA_ARCH_LIST"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[af]\b", "", architectures)
    else:
        require_seen_gpus()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if world_size() > 1:
        # By default each rank would use all cores of its node. torchrun sets one thread if OMP_NUM_THREADS is not set
        # (torch/distributed/run.py), and so does accelerate, over pdsh too (accelerate/utils/launch.py).
        if os.environ.get("OMP_NUM_THREADS") == "1" and not ONE_THREAD_BY_DEFAULT.isdisjoint(os.environ):
            del os.environ["OMP_NUM_THREADS"]
        if "OMP_NUM_THREADS" not in os.environ:
            threads = cpu_count() // ranks_per_node()
            launchers = set(launchers_of(os.environ))
            if launchers and launchers <= {"srun", "mpirun"}:  # which may have bound the rank to its share of the cores
                of_node = int(os.environ.get("SLURM_CPUS_ON_NODE", os.cpu_count()))
                threads = min(cpu_count(), of_node // ranks_per_node())
            os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    elif "OMP_NUM_THREADS" not in os.environ and cpu_count() < torch.get_num_threads():
        torch.set_num_threads(cpu_count())  # torch counts a container's cores, but not its CPU time limit
    # A shell of ssh has no Python environment active; DeepSpeed looks for the environment's ninja.
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = f"{programs}{os.pathsep}{path}"


SAME_OPTIONS = (
    "use the same options and files on every node; `dsft launch --hostfile` sends those from where it is started"
)
SAME_FILES = "copy the same files to every node, or mount one folder"
SAME_CODE = "copy one checkout to every node, or mount it there"
SAME_LIBRARIES = "on every node: pip install -c constraints.txt -e ."
LONGEST_VALUE = 80  # characters of a value in a message, around the first difference
NOT_SET = "not set"


def require_same_start(options: Mapping[str, Any], problems: list[str]) -> None:
    """Compare options as ranks have read them, code and libraries, right after the ranks have met. Collective."""
    if any(from_all([bool(problems)])):  # from reading the options: they are the cause, and are raised later
        return
    versions = numeric_versions()
    libraries = {f"version of {name}": version for name, version in versions.items()}
    if untested := untested_versions({name: versions[name] for name in TESTED_PACKAGES}):
        say(f"warning: never tested with {', '.join(untested)}; constraints.txt has versions that were")
    require_agreement({SAME_OPTIONS: options, SAME_CODE: {"code of dsft": code_hash()}, SAME_LIBRARIES: libraries})


def require_agreement(facts_by_remedy: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare facts with those of rank 0: remedy for a difference -> name -> value on this rank. Collective. Raises
    UserError, on every rank, with a line for each fact that differs: both values, and a host.
    """
    texts = {}  # name -> (text of its value, which a rank with other code can read too; remedy)
    for remedy, facts in facts_by_remedy.items():
        for name, value in facts.items():
            texts[name] = (NOT_SET if value is None else str(value), remedy)
    of_rank_0 = on_rank_0(lambda: texts)
    problems = []
    for name, (_, remedy) in (of_rank_0 | texts).items():
        value, _ = texts.get(name, (NOT_SET, remedy))
        other, _ = of_rank_0.get(name, (NOT_SET, remedy))
        if value != other:
            num_equal = len(os.path.commonprefix([value, other]))  # noqa: RUF071  of characters
            start = max(0, num_equal - LONGEST_VALUE // 2)
            part = slice(start, start + LONGEST_VALUE)
            dots = "..." if start else ""
            both = f"{dots}{other[part]} on rank 0, and {dots}{value[part]}"
            problems.append(f"{name} differs between the ranks: {both}; {remedy}")
    raise_together(problems)
