"""The fences of the hooks, which vLLM's own code calls: on which stream, after which work."""

import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.model_executor.layers.attention import attention, kv_transfer_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as model_runner

from pynixlkv.connector.metadata import ConnectorMetadata
from pynixlkv.connector.worker import Finished
from pynixlkv.vllm import PyNixlKVConnector
from pynixlkv.vllm.connector import _StepMetadata
from pynixlkv.vllm.host import processors_of_parent

pytestmark = pytest.mark.ci
CARD = 3


class Accelerator:
    """A stream, which is the list of what was launched, on a card that vLLM may not leave current.

    Stands in for ``torch.accelerator``, and makes what stands in for ``torch.Event``.
    """

    def __init__(self, monkeypatch):
        self.stream, self.current = [], 0
        monkeypatch.setattr(torch, "Event", self.make_event)
        monkeypatch.setattr(torch.accelerator, "device_index", self.device_index)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: self.current)

    @contextlib.contextmanager
    def device_index(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def make_event(self, _):
        work = []

        def record(card):
            assert card == CARD
            work.extend(self.stream)

        def query():
            assert self.current == CARD
            return True

        return SimpleNamespace(record=record, query=query, work=work)


class Worker:
    """Keeps the work that the fences of the hooks are after."""

    def __init__(self):
        self.steps, self.layers = [], []

    def start_load_kv(self, _, event):
        assert event.query()
        self.steps.append(event._event.work)

    def save_kv_layer(self, number, event):
        assert event.query()
        self.layers.append((number, event._event.work))

    def get_finished(self, timeout):
        return Finished()


@pytest.mark.parametrize("loads_first", [False, True])
def test_fences_are_after_all_that_vllm_has_launched(loads_first, monkeypatch):
    accelerator, worker = Accelerator(monkeypatch), Worker()
    connector = PyNixlKVConnector.__new__(PyNixlKVConnector)
    connector._worker, connector._device = worker, torch.device("cuda", CARD)
    connector._layer_numbers = {"layers.0": 0, "layers.1": 1}
    connector._is_replica = False
    connector._failing, connector._not_sent, connector._invalid = {}, set(), set()
    connector._connector_metadata = None
    monkeypatch.setattr(connector, "get_kv_connector_stats", lambda: None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    monkeypatch.setattr(model_runner, "get_forward_context", lambda: None)
    context = object(), None, torch.zeros(1), None
    monkeypatch.setattr(attention, "get_attention_context", lambda _: context)
    attend = kv_transfer_utils.maybe_transfer_kv_layer(
        lambda layer_name: accelerator.stream.append(layer_name)
    )
    accelerator.stream.append("the step before")
    step = SimpleNamespace(
        has_sync_kv_loads=loads_first,
        kv_connector_metadata=_StepMetadata(ConnectorMetadata(reqs_to_save={"r": None})),
        finished_req_ids=set(),
    )
    with model_runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step):
        attend("layers.0")
        attend("layers.1")
    first = ["the step before", "layers.0"]
    assert worker.layers == [(0, first), (1, [*first, "layers.1"])]
    # Younger releases start loads after the step, unless it needs them.
    loads_first |= "has_sync_kv_loads" not in SchedulerOutput.__dataclass_fields__
    assert worker.steps == [first[:1] if loads_first else first]
    assert accelerator.current == 0


def test_threads_of_an_agent_are_not_bound_to_the_processors_that_compute():
    before = os.sched_getaffinity(0)
    found = []
    os.sched_setaffinity(0, {min(before)})
    try:
        with processors_of_parent():
            thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    assert found == [os.sched_getaffinity(os.getppid()) | {min(before)}]
