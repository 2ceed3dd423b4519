"""Fixtures for tests with real vLLM engines."""

import pytest
from engines import Cluster, answer_plainly, make_model


def pytest_configure(config):
    """What vLLM and torch warn about when they are imported is not for us to mend."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a small model."""
    return make_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    """Start engines; closes those that are left after the tests of a file."""
    cluster = Cluster(model, tmp_path_factory.mktemp("engines"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def expected(model, tmp_path_factory):
    """Prompts by length, and the tokens that an engine without a connector makes of them."""
    return answer_plainly(model, tmp_path_factory.mktemp("plain"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the end of the engines' logs with a failure."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        for engine in cluster.engines:
            lines = engine.log.read_text(errors="replace").splitlines()[-30:]
            report.sections.append((f"log of {engine.name}", "\n".join(lines)))
    return report
