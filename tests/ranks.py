"""Gloo ranks that start in a second: forked from one process that has imported everything and computed nothing."""

import functools
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import failing_writes
import psutil
import torch

from dsft.runtime import distributed

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["imported"])

PROBE = torch.arange(1, 33).view(1, 32)
"""The input whose logits tell whether two models are the same."""
SECONDS = 900
"""No call takes longer, even on a busy machine."""


def on_ranks(
    world: int,
    function: Callable,
    *arguments,
    log: Path | None = None,
    kill_when: Callable[[], bool] | None = None,
    seed: int = 0,
) -> list[Any] | None:
    """What `function(*arguments)` returns on each of `world` new ranks, which print to `log`; None where `kill_when`
    came true first and they were killed, one after the other in an order drawn from `seed`, as suddenly as a machine
    loses power.

    Raises:
        AssertionError: with the end of the log, where a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, results = log or Path(folder, "log"), [Path(folder, str(rank)) for rank in range(world)]
        work = [functools.partial(_as_rank, function, arguments, result) for result in results]
        with _forked(work, out=log, err=log, environment=dict(os.environ)) as ranks:
            until = time.monotonic() + SECONDS
            while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
                assert time.monotonic() < until, f"not done in {SECONDS} s: {log.read_text()[-5000:]}"
                if kill_when is not None and holds(kill_when):
                    random.Random(seed).shuffle(ranks)
                    for rank in ranks:
                        rank.kill()
                        rank.join()
                    return None
                time.sleep(0.001 if kill_when else 0.02)
            assert not any(rank.exitcode for rank in ranks), log.read_text()[-5000:]
        return [pickle.loads(result.read_bytes()) for result in results]


def holds(condition: Callable[[], bool]) -> bool:
    """Whether `condition()` is true: it is not where a file that it looks at is moved or removed meanwhile."""
    try:
        return condition()
    except FileNotFoundError:
        return False


def train_all(world: int, cases: list[dict], log: Path) -> str:
    """Train each case, a dictionary of options, on the same new ranks; returns all that they printed.

    After each training every rank computes the logits of `PROBE` with the trained model in memory; rank 0 writes them
    to `logits.pt` in the run's folder, for the test to compare with the model that it loads from disk.
    """
    on_ranks(world, _trainings, cases, log=log)
    return log.read_text()


def run_entry(
    module: str, words: list, *, world: int = 1, folder: Path = Path(), codes: list | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run `main()` of a module, or a file, with the command line `words` in a folder, as `world` ranks; the exit code
    is the first of a rank that is not 0, and `codes` gets all of them. For what an entry does after its start: tests of
    the start itself take the `run` fixture.
    """
    with started_entry(module, words, world=world, folder=folder, **environment) as wait:
        result, of_ranks = wait()
    if codes is not None:
        codes += of_ranks
    return result


@contextmanager
def started_entry(
    module: str, words: list, *, world: int = 1, folder: Path = Path(), **environment: str
) -> Iterator[Callable[[], tuple[subprocess.CompletedProcess, list[int]]]]:
    """`run_entry` inside a `with`, beside others; gives a function that waits for the result and the exit codes."""
    with tempfile.TemporaryDirectory() as printed:
        out, err = Path(printed, "out"), Path(printed, "err")
        work = [functools.partial(_entry, module, [str(word) for word in words], folder)] * world
        with _forked(work, out=out, err=err, environment=dict(os.environ) | environment) as ranks:

            def wait() -> tuple[subprocess.CompletedProcess, list[int]]:
                for rank in ranks:
                    rank.join(SECONDS)
                    rank.kill()  # one that hangs has no exit code, and would be taken for a success
                    rank.join()
                codes = [rank.exitcode for rank in ranks]
                code = next(filter(None, codes), 0)
                return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text()), codes

            yield wait


@contextmanager
def _forked(work: list[Callable], *, out: Path, err: Path, environment: dict) -> Iterator[list]:
    """One new process for each of `work`, with the variables of a launcher where they are several; killed at the end
    where they still are.
    """
    _start_forkserver()
    port = distributed.free_port()
    out.touch()
    ranks = []
    for rank, task in enumerate(work):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(work)),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(len(work)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        variables = environment | {"OMP_NUM_THREADS": "1"} | (variables if len(work) > 1 else {})
        ranks.append(_forks.Process(target=_begin, args=(task, out, err, variables)))
        ranks[-1].start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _start_forkserver() -> None:
    """Where it does not run yet: with the path of this process, which Python 3.11's forgets (gh-117378, mended in
    3.12.4), so that nothing would be imported beforehand.
    """
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "LD_PRELOAD")}
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    if library := failing_writes.library():
        os.environ["LD_PRELOAD"] = library
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _begin(task: Callable, out: Path, err: Path, environment: dict) -> None:
    assert "imported" in sys.modules, "every rank would import for seconds"
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    task()


def _as_rank(function: Callable, arguments: tuple, result: Path) -> None:
    distributed.start_ranks(timeout_seconds=SECONDS)
    result.write_bytes(pickle.dumps(function(*arguments)))
    distributed.stop_ranks()


def _entry(module: str, words: list[str], folder: Path) -> None:
    os.chdir(folder)
    sys.argv = [module, *words]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        importlib.import_module(module).main()


def trained(options: dict):
    """Train once, on the rank that this is; returns the trainer."""
    from dsft.config.options import TrainConfig
    from dsft.config.reader import make_config
    from dsft.training.run import finetune

    problems: list[str] = []
    return finetune(make_config(TrainConfig, options, problems), problems)


def train(options: dict) -> None:
    """The same for `on_ranks`: a trainer cannot be sent to the process that waits for it."""
    trained(options)


def _trainings(cases: list[dict]) -> None:
    for options in cases:
        try:
            trainer = trained(options)
            with torch.no_grad():
                logits = trainer.model.eval()(input_ids=PROBE.to(trainer.args.device), use_cache=False).logits
            if distributed.rank() == 0:
                torch.save(logits.cpu(), Path(options["output_dir"]) / "logits.pt")
            del trainer, logits
        except Exception:
            # One broken architecture must not hide the others; the test fails for want of logits.pt.
            traceback.print_exc()
        gc.collect()


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks that a `deepspeed` launch started, without the launchers between."""
    ranks = []
    for child in [process.pid for process in psutil.Process(pid).children(recursive=True)]:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"--local_rank" in command and b"launcher" not in command:
            ranks.append(child)
    return sorted(ranks)
