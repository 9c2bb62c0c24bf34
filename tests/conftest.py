"""Shared fixtures: small real files, and helpers that start real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# Tests are about CPU ranks, on machines with a GPU too; test_gpu.py takes this away again.
os.environ["DS_ACCELERATOR"] = "cpu"
# No test asks the hub; where it cannot be reached, its client would try for 24 s.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several test processes share the cores: threads of torch that wait for each other there took 30 times as long.
os.environ["OMP_NUM_THREADS"] = "1"
BIN = Path(sys.executable).parent
# Of two versions of ninja in turn, the environment's and the system's, each compiles DeepSpeed's operators again.
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))  # `tiny` and `ranks`

from tiny import write_model, write_pairs, write_texts
from torch.utils import cpp_extension

from dsft.runtime.distributed import free_port

# A shell lets its background jobs ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


class ByFile(LoadScopeScheduling):
    """Workers take a file at a time, so that what a module's fixture trained is trained once; all files of
    tests/cluster go to one worker, for their hosts are one set.

    The first worker takes files from the front, where those are that start ranks, the others from the end: ranks of two
    tests at once would wait for each other's cores. At the end stands tests/cluster, whose worker waits most of the
    time: two cores have enough for a third.
    """

    def _assign_work_unit(self, node) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return "tests/cluster" if nodeid.startswith("tests/cluster/") else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)  # without xdist all tests run in this process
def pytest_xdist_make_scheduler(config, log) -> ByFile:
    config.option.loadscopereorder = False  # by number of tests; pytest_collection_modifyitems knows more of their time
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list) -> None:
    """The longest files, those of the laws, come first, then others that start ranks; those of the test hosts last."""
    starts_ranks = {item.path for item in items if item.get_closest_marker("launch")}
    first_to_last = {"laws": -1, "cluster": 2}
    items.sort(key=lambda item: first_to_last.get(item.path.parent.name, item.path not in starts_ranks))


def pytest_addoption(parser) -> None:
    parser.addoption("--support", metavar="NAME", help="where all tests pass, benchmarks/results/support/NAME.json")


def pytest_sessionfinish(session, exitstatus: int) -> None:
    """Records what trainings and evaluations of this session did, by the files that they wrote (scripts/support.py)."""
    name = session.config.getoption("--support")
    if name and exitstatus == 0 and not hasattr(session.config, "workerinput"):
        sys.path.insert(0, str(ROOT / "scripts"))
        import support

        words = [word for word in session.config.invocation_params.args if not word.startswith("--support")]
        words = [word for word in words if word != name]
        support.record(name, session.config._tmp_path_factory.getbasetemp(), words, session.testscollected)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> None:
    """No test reads what an earlier session, another worker or the user's own runs have left in the cache of dsft, but
    for the planner's traces, which cost seconds: all workers share them, as they share DeepSpeed's compiled operators.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", cpp_extension._get_build_directory("", verbose=False))
    os.environ["XDG_CACHE_HOME"] = str(folder := tmp_path_factory.mktemp("cache"))
    session = tmp_path_factory.getbasetemp()
    traces = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "traces"
    traces.mkdir(exist_ok=True)
    (folder / "dsft").mkdir()
    (folder / "dsft" / "activations").symlink_to(traces)


def run_command(command: list[str], *, timeout: int = 1800, **environment: str) -> subprocess.CompletedProcess:
    """Run from the checkout's root as a user would, in this environment; CPU ranks."""
    words, env = [str(part) for part in command], os.environ | environment
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def run():
    return run_command


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with model/ (Llama), texts.jsonl, held_out.jsonl and pairs.jsonl; read-only by convention."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    write_model(folder / "chat", chat=True)
    write_texts(folder / "texts.jsonl", 60)
    write_texts(folder / "held_out.jsonl", 31, seed=1)
    write_pairs(folder / "pairs.jsonl", 30)
    return folder


@pytest.fixture(scope="session")
def options(tiny):
    """Options of a training that takes seconds; keyword arguments change or add some."""

    def make(folder: Path, **changes) -> dict:
        base = {
            "model": str(tiny / "model"),
            "data": str(tiny / "texts.jsonl"),
            "output_dir": str(folder),
            "seq_len": 64,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return {key: value for key, value in (base | changes).items() if value is not None}

    return make


def grid(values, quick) -> list:
    """`values` for `parametrize`, where all but those in `quick` are exhaustive."""
    values, quick = list(values), list(quick)
    assert all(value in values for value in quick), (
        f"not in the grid: {[value for value in quick if value not in values]}"
    )
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.exhaustive
        )
        for value in values
    ]


def needed_cases(request) -> set[str]:
    """For a module's fixture that makes many cases at once: those that the selected tests look at, as their `cases`
    marks say.

    With every test selected these are all cases.
    """
    names: set[str] = set()
    for item in request.session.items:
        if item.path == request.path and request.fixturename in item.fixturenames:
            marks = list(item.iter_markers("cases"))
            assert marks, (
                f"{item.name} uses {request.fixturename}: it must say with @pytest.mark.cases what it looks at"
            )
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            names |= {name.format(**parameters) for mark in marks for name in mark.args}
    return names


LAUNCHERS = {
    "deepspeed": "deepspeed --num_gpus 2 --master_port PORT dsft/ENTRY.py",
    "module": "deepspeed --num_gpus 2 --master_port PORT --module dsft.ENTRY",
    "torchrun": "torchrun --nproc_per_node 2 --master_port PORT dsft/ENTRY.py",
    "accelerate": "accelerate launch --config_file ds_configs/accelerate/zero3_1x8.yaml --num_processes 2"
    " --main_process_port PORT dsft/ENTRY.py",
    "python": "python dsft/ENTRY.py",
}


def launch_words(launcher: str, entry: str) -> list[str]:
    """The command that starts `dsft/<entry>.py` on 2 ranks (python: on 1), on a port that no other test worker has."""
    return LAUNCHERS[launcher].replace("PORT", str(free_port())).replace("ENTRY", entry).split()


def flags(options: dict) -> list[str]:
    """Options as command-line words."""
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def read_json(path: Path) -> dict:
    return json.loads(Path(path).read_text())
