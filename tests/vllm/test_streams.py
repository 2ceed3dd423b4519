"""The fences of the worker's hooks, which vLLM's own code calls: of which stream, after which work.

An accelerator that is only recorded: its stream is the list of what was launched.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.model_executor.layers.attention import attention, kv_transfer_utils
from vllm.v1.worker import kv_connector_model_runner_mixin as model_runner

from pynixlkv.connector.metadata import ConnectorMetadata
from pynixlkv.connector.worker import Finished
from pynixlkv.vllm import PyNixlKVConnector
from pynixlkv.vllm.connector import _StepMetadata

pytestmark = pytest.mark.ci

CARD = 3


class Accelerator:
    """Stands in for ``torch.accelerator`` and ``torch.Event``."""

    def __init__(self):
        self.index = 0  # of the thread, as vLLM's workers may leave it
        self.streams = {0: [], CARD: []}

    @contextlib.contextmanager
    def device_index(self, index):
        before, self.index = self.index, index
        yield
        self.index = before

    def current_stream(self):
        return self.streams[self.index]

    def make_event(self, device_type):
        assert device_type == "cuda"
        return Event(self)


class Event:
    def __init__(self, accelerator):
        self.accelerator = accelerator

    def record(self, stream):
        assert stream is self.accelerator.streams[CARD]
        self.after = list(stream)

    def query(self):
        assert self.accelerator.index == CARD
        return self.after


class Worker:
    """Keeps the fences that the hooks hand over."""

    def __init__(self):
        self.steps, self.layers = [], []

    def start_load_kv(self, _, event):
        self.steps.append(event._event)

    def save_kv_layer(self, number, event):
        assert event.query()
        self.layers.append((number, event._event))

    def get_finished(self):
        return Finished()


@pytest.fixture
def accelerator(monkeypatch):
    made = Accelerator()
    monkeypatch.setattr(torch, "Event", made.make_event)
    monkeypatch.setattr(torch.accelerator, "device_index", made.device_index)
    monkeypatch.setattr(torch.accelerator, "current_stream", made.current_stream)
    return made


@pytest.fixture
def connector(monkeypatch):
    connector = PyNixlKVConnector.__new__(PyNixlKVConnector)
    connector._worker, connector._device = Worker(), torch.device("cuda", CARD)
    connector._layer_numbers = {"layers.0": 0, "layers.1": 1}
    connector._failing, connector._not_sent, connector._connector_metadata = {}, set(), None
    monkeypatch.setattr(connector, "get_kv_connector_stats", lambda: None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    monkeypatch.setattr(model_runner, "get_forward_context", lambda: None)
    context = object(), None, torch.zeros(1), None
    monkeypatch.setattr(attention, "get_attention_context", lambda _: context)
    return connector


@pytest.mark.parametrize("reads_before", [False, True], ids=["loads after", "loads before"])
def test_fences_are_after_all_that_vllm_has_launched(accelerator, connector, reads_before):
    stream = accelerator.streams[CARD]

    @kv_transfer_utils.maybe_transfer_kv_layer
    def attend(layer_name):
        stream.append(layer_name)

    stream.append("the step before")
    step = SimpleNamespace(
        has_sync_kv_loads=reads_before,
        kv_connector_metadata=_StepMetadata(ConnectorMetadata(reqs_to_save={"r": None})),
        finished_req_ids=set(),
    )
    with model_runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step):
        attend("layers.0")
        attend("layers.1")
    assert accelerator.index == 0
    worker = connector._worker
    assert worker.layers[0][0] == 0
    assert worker.layers[0][1].after == ["the step before", "layers.0"]
    assert worker.layers[1][0] == 1
    assert worker.layers[1][1].after == ["the step before", "layers.0", "layers.1"]
    # Whatever was launched before the step is done when its requests move.
    (event,) = worker.steps
    assert event.after[0] == "the step before"
