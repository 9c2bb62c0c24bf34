"""dsft from a built wheel, outside of a checkout."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import BIN, ROOT
from tiny import write_model, write_texts

WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
REPOSITORY = "https://code.example/dsft"


def test_the_readme_that_a_registry_shows_has_no_link_into_the_repository_without_its_address():
    absolute_links = pytest.importorskip("hatchling") and importlib.import_module("hatch_build").absolute_links
    readme = (ROOT / "README.md").read_text()
    relative = r"\]\((?!https?:|#)"
    assert re.search(relative, readme)
    for repository in ("", REPOSITORY):
        assert not re.search(relative, absolute_links(readme, repository, "v1"))
    assert absolute_links("[a](b/c.md#d) ![e](f.png)", REPOSITORY, "v1") == (
        f"[a]({REPOSITORY}/blob/v1/b/c.md#d) ![e]({REPOSITORY}/raw/v1/f.png)"
    )
    assert absolute_links("[a](b.md) ![e](f.png) [g](https://h)", "", "v1") == "a  [g](https://h)"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder of packages with dsft from its wheel."""
    pytest.importorskip("hatchling", reason="scripts/install has not been run since it is needed")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environment = os.environ | {"DSFT_REPOSITORY": REPOSITORY}
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, env=environment)
    (wheel,) = folder.glob("dsft-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", wheel], check=True)
    return folder / "site"


@pytest.mark.exhaustive
@pytest.mark.launch
def test_the_wheel_brings_all_that_the_commands_read(site, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{BIN}:{os.environ['PATH']}"}
    write_model(tmp_path / "base", max_position_embeddings=2048)
    write_texts(tmp_path / "train.jsonl", 100)

    def run(command: str) -> subprocess.CompletedProcess:
        return subprocess.run(shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True)

    for command, printed in {
        "python -c 'import dsft; print(dsft.__path__)'": str(site),
        "dsft --help": "quickstart",
        "dsft init --model base --data train.jsonl": "run.yaml: written",
        "dsft preview --config run.yaml": "trained fraction",
        "dsft plan --config run.yaml --zero 3-offload --chat_template chatml --gpus 2x4090": "3-offload",
        "dsft train --config run.yaml --dry_run": "deepspeed",
    }.items():
        result = run(command)
        assert result.returncode == 0 and printed in result.stdout, f"{command}\n{result.stdout}{result.stderr}"
    result = run("deepspeed --num_gpus 2 --module dsft.train --config run.yaml --methd lora")
    assert result.returncode != 0 and "did you mean 'method'" in result.stderr + result.stdout
    packed = {str(path.relative_to(site)) for path in (site / "dsft").rglob("*") if path.is_file()}
    kinds = (".py", ".jinja", ".toml", ".yaml", ".json")
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "dsft").rglob("*") if path.suffix in kinds}
    wanted |= {f"dsft/{path.relative_to(ROOT)}" for path in (ROOT / "ds_configs").rglob("*.*")}
    assert wanted <= packed, wanted - packed
    for folder, target in WHEEL["shared-data"].items():
        for path in (path for path in (ROOT / folder).rglob("*") if path.is_file()):
            copy = site / target / path.relative_to(ROOT / folder)
            assert copy.read_bytes() == path.read_bytes(), copy
            assert os.access(copy, os.X_OK) == os.access(path, os.X_OK), copy
    (distribution,) = importlib.metadata.distributions(name="dsft", path=[str(site)])
    assert f"Repository, {REPOSITORY}" in distribution.metadata.get_all("Project-URL")
    assert f"]({REPOSITORY}/blob/v{distribution.version}/docs/" in distribution.metadata.get_payload()
