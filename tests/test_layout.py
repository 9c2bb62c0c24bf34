"""The shape of the project: names that shadow nothing, configuration files that load, an import that touches
nothing.
"""

import ast
import graphlib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from dsft.checkpoints import manifest, run_folder
from dsft.config.deepspeed import CONFIG_DIR, compose, known_names, read_zero_file
from dsft.runtime import PATCHES

PACKAGE = ROOT / "dsft"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_no_module_or_folder_is_named_like_a_library_or_standard_module():
    """A script of dsft/ has that folder first on sys.path until it takes it off."""
    taken = sys.stdlib_module_names | (
        importlib.metadata.packages_distributions().keys() - {"dsft", "tests", "scripts"}
    )
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES} - {"__init__"}
    assert names & taken == set()


def test_import_dsft_loads_no_library_and_sets_no_variable():
    code = (
        "import os, sys; before = dict(os.environ); import dsft; "
        "assert {'train', 'evaluate', 'plan', 'chat', 'report', 'preview', 'merge'} < {*dir(dsft)}; "
        "assert dict(os.environ) == before; assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_gpu_extra_pins_the_versions_of_constraints():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert {*extra} <= {*(ROOT / "constraints.txt").read_text().split()} and all("==" in pin for pin in extra)


@pytest.mark.parametrize("name", known_names())
def test_every_deepspeed_file_is_accepted_by_deepspeed(name):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    problems: list[str] = []
    content = compose(read_zero_file(name, problems), hpz_ranks=8)
    assert problems == []
    section = {key: value for key, value in content["zero_optimization"].items() if value != "auto"}
    assert int(DeepSpeedZeroConfig(**section).stage) == int(name[0])
    assert ("optimizer" in content) == ("offload_optimizer" in content["zero_optimization"])  # DeepSpeed's CPU Adam


def test_all_configurations_of_the_issue_are_there():
    assert {
        "zero1",
        "zero2",
        "zero2_offload",
        "zero3",
        "zero3_offload_optimizer",
        "zero3_offload",
        "zero3_hpz",
    } <= {path.stem for path in CONFIG_DIR.glob("*.json")}


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_accelerate_file_loads_and_names_an_existing_deepspeed_file(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    shape, _, form = path.stem.partition("_")[2].partition("_")
    nodes, per_node = shape.split("x")
    assert config.num_machines == int(nodes)
    assert config.num_processes == int(nodes) * int(per_node)
    if int(nodes) > 1:
        assert config.deepspeed_config["deepspeed_multinode_launcher"] == (form or "standard")
        assert config.deepspeed_config.get("deepspeed_hostfile") == (f"hostfiles/{shape}" if form else None)
    file = ROOT / config.deepspeed_config["deepspeed_config_file"]
    stage = json.loads(file.read_text())["zero_optimization"]["stage"]
    assert yaml.safe_load(path.read_text())["deepspeed_config"]["zero3_init_flag"] is (stage == 3)


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_every_hostfile_is_read_by_deepspeed_as_its_name_says(path):
    from deepspeed.launcher.runner import fetch_hostfile

    nodes, slots = path.name.removeprefix("local-").split("x")
    assert list(fetch_hostfile(str(path)).values()) == [int(slots)] * int(nodes)


FLOORS = {
    "units": -1, "job": 0,
    "errors": 1,
    "config": 2, "runtime": 2,
    "models": 3,
    "data": 4, "planner": 4, "checkpoints": 4,
    "perplexity": 5, "setup": 5,
    "training": 6, "launch": 6, "doctor": 6, "api": 6, "run_page": 6,
    "train": 7, "eval_ppl": 7, "evaluate_perplexity": 7, "cli": 7, "__init__": 7,
}  # fmt: skip
"""Room (a folder or a module of dsft/) -> its floor. A module imports from its own room and from lower floors."""
UPWARD_IMPORTS: set[tuple[str, str]] = set()
"""(module, the room on its own or a higher floor that it imports). This list may only shrink."""


def imported_rooms(tree: ast.Module) -> set[str]:
    """Rooms of dsft that a module imports, also inside its functions."""
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "dsft":
            rooms |= {alias.name if alias.name in FLOORS else "__init__" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsft."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names if alias.name.split(".")[0] == "dsft"]
            rooms |= {parts[1] if len(parts) > 1 else "__init__" for parts in names}
    return rooms


def test_rooms_import_only_from_lower_floors():
    upward = set()
    for path in SOURCES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        rooms = imported_rooms(ast.parse(path.read_text())) - {room}
        name = str(path.relative_to(PACKAGE))
        upward |= {(name, other) for other in rooms if FLOORS[other] >= FLOORS[room]}
    assert upward == UPWARD_IMPORTS
    assert max(FLOORS.values()) <= 7


def imported_modules(path: Path) -> set[Path]:
    """Modules of dsft that a module imports when it is imported itself (not those inside its functions)."""
    modules = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dsft":
            place = ROOT.joinpath(*node.module.split("."))
            modules |= {place.with_suffix(".py"), *(place / f"{alias.name}.py" for alias in node.names)}
    return {module for module in modules if module.is_file()}


def test_no_module_imports_itself_through_others():
    imports = {path: imported_modules(path) for path in SOURCES}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


RUN_FILES = {
    *(manifest.MANIFEST, manifest.TRAINER_STATE, manifest.STAGING, manifest.REMOVED),
    *(run_folder.RUN, run_folder.METRICS, run_folder.FINAL),
}


def test_names_of_a_runs_files_stand_in_one_room():
    """checkpoints/ owns them; model_folder.py, on a lower floor, those of folders that hold a model."""
    literal = set()
    for path in SOURCES:
        name = str(path.relative_to(PACKAGE))
        # A channel of OpenAI's Harmony has the name of a run's folder.
        if name.startswith("checkpoints/") or name in ("models/model_folder.py", "data/formats.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and (value in RUN_FILES or value.startswith(f"{manifest.CHECKPOINT}-")):
                literal.add(f"{name}:{node.lineno} {value}")
    assert literal == set()


PATCHED_LIBRARIES = {"torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "trl", "liger_kernel"}
OWN_OR_PUBLIC = {
    ("models/adapters.py", "adapted.save_pretrained"),  # its public argument save_embedding_layers
    ("launch.py", "runner.logger.disabled"),  # a switch of Python's loggers
    ("models/chunked_head.py", "inner.forward"),  # of the model itself, as Liger replaces it
    ("models/chunked_head.py", "head.forward"),
    ("models/chunked_head.py", "module.forward"),
    ("planner/activations.py", "layer.forward"),  # of a model that only exists to be measured
    ("planner/activations.py", "module.forward"),
    ("job/beat.py", "sys.excepthook"),  # Python's own
    ("runtime/distributed.py", "sys.exit"),
    ("training/callbacks.py", "config.suppress_errors"),  # a setting of Dynamo's
    ("training/loss.py", "inner.loss_function"),  # transformers has a setter for it
}
"""(module, what it assigns): no replacement in a library."""


def replacements(tree: ast.Module) -> set[str]:
    """What a module assigns into a library's module or class, and functions that it assigns to attributes of objects
    other than its own.
    """
    imported, functions, targets = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PATCHED_LIBRARIES:
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
            imported |= {name for name, library in names.items() if library in PATCHED_LIBRARIES}
        elif isinstance(node, ast.FunctionDef):
            functions.add(node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "mock.patch.object", "patch.object"):
            targets |= {(ast.unparse(node.args[0]), node.args[2] if len(node.args) > 2 else None)}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = (
                    zip(target.elts, getattr(node.value, "elts", [node.value] * 9), strict=False)
                    if isinstance(target, ast.Tuple)
                    else [(target, node.value)]
                )
                targets |= {(ast.unparse(place), value) for place, value in pairs if isinstance(place, ast.Attribute)}
    return {
        place
        for place, value in targets
        if place.split(".")[0] in imported
        or (
            place.split(".")[0] != "self"
            and (
                isinstance(value, ast.Lambda)
                or (isinstance(value, ast.Name) and value.id in functions)
                or (isinstance(value, ast.Call) and ast.unparse(value.func) in ("functools.partial", "partial"))
            )
        )
    }


def test_every_patch_of_a_library_is_in_the_registry():
    registry, places = PACKAGE / "runtime" / "__init__.py", set()
    for path in SOURCES:
        if path != registry:
            name = str(path.relative_to(PACKAGE))
            places |= {(name, place) for place in replacements(ast.parse(path.read_text()))}
    assert places - OWN_OR_PUBLIC == set()
    used = {
        node.value
        for path in SOURCES
        if path != registry
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert PATCHES.keys() <= used


VAGUE = {"found", "one", "own", "what", "psi", "w", "wt"}
"""Names of variables that do not say what these hold."""


def test_variables_say_what_they_hold():
    vague = set()
    for path in (*SOURCES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", None)
            if name in VAGUE:
                vague.add(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert vague == set()
