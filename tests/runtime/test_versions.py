"""Versions: the bounds of pyproject.toml are those that were tested, and others are named."""

import re
import tomllib

from conftest import ROOT

from dsft.runtime import distributed, versions
from dsft.runtime.versions import TESTED_PACKAGES, untested_versions


def pinned(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / file).read_text(), re.MULTILINE))


OLDEST, NEWEST = (
    {name: pinned(file)[name] for name in TESTED_PACKAGES} for file in ("constraints-oldest.txt", "constraints.txt")
)


def test_the_lower_bounds_of_the_package_are_the_oldest_versions_that_are_tested():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(line.split(">=") for line in needed if ">=" in line)
    assert bounds.keys() == {*TESTED_PACKAGES}
    assert all(OLDEST[name].startswith(bound) for name, bound in bounds.items())


def test_a_version_that_was_never_tested_is_named_with_those_that_were():
    assert untested_versions(OLDEST) == untested_versions(NEWEST) == []
    assert untested_versions(NEWEST | {"torch": f"{NEWEST['torch']}+cu130"}) == [], "PyPI's torch"
    newer = untested_versions(NEWEST | {"deepspeed": "9.0", "torch": "2.13"})
    assert newer == [f"deepspeed 9.0 (tested: {OLDEST['deepspeed']} to {NEWEST['deepspeed']})"]
    older = untested_versions(NEWEST | {"peft": "0.18.1", "datasets": "4.7"})
    assert [line.split(" (")[0] for line in older] == ["peft 0.18.1", "datasets 4.7"]


def test_this_environment_is_tested():
    assert untested_versions() == []


def test_a_copy_of_the_package_alone_names_no_version(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "PACKAGE", tmp_path / "dsft")
    assert untested_versions(NEWEST | {"peft": "99.0"}) == []


def test_a_run_says_at_its_start_what_was_never_tested(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "untested_versions", lambda: untested_versions(NEWEST | {"peft": "99.0"}))
    distributed.require_same_start({}, [])
    expected = f"warning: never tested with peft 99.0 (tested: {OLDEST['peft']} to {NEWEST['peft']})"
    assert capsys.readouterr().out.count(expected) == 1
