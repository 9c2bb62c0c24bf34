"""The shape of the project: names that shadow nothing, configuration files that load, an import that touches
nothing.
"""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from dsft.zero_config import CONFIG_DIR, compose, known_names, read_zero_file

MODULES = sorted(path.stem for path in (ROOT / "dsft").glob("*.py") if path.stem != "__init__")


def test_no_module_is_named_like_a_library_or_standard_module():
    taken = sys.stdlib_module_names | (
        importlib.metadata.packages_distributions().keys() - {"dsft", "tests", "scripts"}
    )
    assert [name for name in MODULES if name in taken] == []


def test_import_dsft_loads_no_library_and_sets_no_variable():
    code = (
        "import os, sys; before = dict(os.environ); import dsft; "
        "assert dict(os.environ) == before; assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", known_names())
def test_every_deepspeed_file_is_accepted_by_deepspeed(name):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    problems: list[str] = []
    content = compose(read_zero_file(name, problems), ranks_per_node=8)
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
        "zero3_nvme",
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
