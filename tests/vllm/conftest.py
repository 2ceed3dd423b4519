"""Fixtures for tests with real vLLM engines."""

import pytest
from engines import LENGTHS, Cluster, make_prompts, write_model
from peers import Peer


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a small model."""
    path = tmp_path_factory.mktemp("model")
    writer = Peer(write_model, str(path))
    try:
        writer.finish(120.0)
    finally:
        writer.kill()
    return path


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    """Start engines; closes those that are left after the tests of a file."""
    cluster = Cluster(model, tmp_path_factory.mktemp("engines"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def expected(model, tmp_path_factory):
    """Prompts by length, and the tokens that an engine without a connector makes of them."""
    cluster = Cluster(model, tmp_path_factory.mktemp("plain"))
    try:
        plain = cluster.start("plain")
        prompts = make_prompts(LENGTHS, 1)
        plain.start_generating(prompts)
        answers = plain.answers()
    finally:
        cluster.close()
    return {len(p): (p, a.tokens) for p, a in zip(prompts, answers, strict=True)}
