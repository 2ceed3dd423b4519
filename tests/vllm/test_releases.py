"""Which releases of vLLM the connector takes, and what it says of others."""

import types

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from pynixlkv.errors import ConfigError, LibraryVersionError
from pynixlkv.vllm import PyNixlKVConnector, releases

pytestmark = pytest.mark.ci


def test_the_installed_release_is_served():
    releases.check(PyNixlKVConnector)


def test_an_older_release_is_refused_and_a_newer_one_is_tried(monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.26.1")
    with pytest.raises(LibraryVersionError, match=r"0\.26\.1 is older .*0\.27 to 0\.33"):
        PyNixlKVConnector(None, None, None)
    monkeypatch.setattr("vllm.__version__", "1.2.0rc1")
    releases._log.addHandler(caplog.handler)
    releases.check(PyNixlKVConnector)
    releases._log.removeHandler(caplog.handler)
    assert "1.2.0rc1 is newer than the releases" in caplog.text


def test_a_changed_interface_is_refused_by_the_names_of_its_methods(monkeypatch):
    monkeypatch.delattr(KVConnectorBase_V1, "handle_preemptions")
    releases.check(PyNixlKVConnector)  # which does not need it
    monkeypatch.delattr(KVConnectorBase_V1, "on_new_request")
    with pytest.raises(LibraryVersionError, match=r"on_new_request\(\) is not in vLLM's"):
        PyNixlKVConnector(None, None, None)


def test_a_new_abstract_method_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(PyNixlKVConnector, "__abstractmethods__", frozenset({"save_kv_page"}))
    with pytest.raises(LibraryVersionError, match=r"save_kv_page\(\) is not in PyNixlKVConnector"):
        PyNixlKVConnector(None, None, None)


def configurations(groups=1, **model):
    return (
        types.SimpleNamespace(model_config=types.SimpleNamespace(**model)),
        types.SimpleNamespace(kv_cache_groups=[None] * groups),
    )


def test_an_engine_that_sleeps_is_refused():
    assert not PyNixlKVConnector.supports_sleep_mode(None)
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        releases.refuse_what_is_missing(*configurations(enable_sleep_mode=True))


def test_a_release_that_takes_failures_by_block_serves_one_block_table(monkeypatch):
    monkeypatch.setattr(releases, "TransferResults", None)
    releases.refuse_what_is_missing(*configurations())
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        releases.refuse_what_is_missing(*configurations(groups=2))


def test_old_forms_of_mla_caches_are_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.28.3")
    with pytest.raises(ConfigError, match=r"use vLLM 0\.29 or newer"):
        releases.refuse_what_is_missing(*configurations(use_mla=True))
