"""Four real hosts for the tests of this folder, started once; skipped with the reason where they cannot stand, but in
CI that fails.
"""

import os

import pytest

from cluster.hosts import TestHosts, why_not


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "cluster" in item.path.parts:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def four_hosts(tmp_path_factory):
    reason = why_not()
    if reason and os.environ.get("CI"):
        pytest.fail(f"{reason}; in CI these tests have to run")
    if reason:
        pytest.skip(reason)
    with TestHosts(4, shared=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture
def hosts(four_hosts):
    """node-0 to node-3. What a test leaves running on them ends with it."""
    yield four_hosts
    four_hosts.clean_up()
