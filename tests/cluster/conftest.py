"""One Ray for all tests of the session."""

import importlib.util

import pytest


@pytest.fixture(scope="session")
def ray_node():
    """A local Ray with four logical CPUs; tests reserve places on it with `start(None, needs)`."""
    if importlib.util.find_spec("ray") is None:  # it must not be imported before it is configured
        pytest.skip("Ray is not installed (the extra `cluster`)")
    from logra_lab.cluster.node import Needs, start

    with start(None, Needs(), cpus=4, store_bytes=256 << 20) as node:
        yield node
