"""Child processes: calls, deadlines, failures, signals, and their end."""

import os
import sys
import time

import psutil
import pytest

from pynixlkv.errors import ConfigError
from pynixlkv.testing import process
from pynixlkv.testing.process import ChildProcess, ProcessGroup, RunError, parent


class Counter:
    """An object for a child to keep."""

    def __init__(self, start):
        self.value = start
        self.num_idle = 0

    def add(self, number, factor=1):
        self.value += number * factor
        return self.value

    def idle(self):
        self.num_idle += 1
        return 0.001

    def wait_until_idle(self):
        return self.num_idle

    def close(self):
        sys.stdout.write(f"closed at {self.value}\n")


def fail(error, text):
    raise error(text)


def double():
    parent().send(2 * parent().receive())
    return "end"


def report(total):
    for done in range(1, total + 1):
        parent().send((done, total))
    return os.getpid()


def test_functions_and_methods_are_called_with_arguments():
    with ChildProcess() as child:
        assert child.call(os.getpid) == child.process.pid != os.getpid()
        child.call(Counter, 40, keep=True)
        assert child.call("add", 1, factor=2) == 42
        while child.call("wait_until_idle") < 10:
            pass
    assert child.process.returncode == 0


def test_a_running_function_talks_to_its_parent():
    with ChildProcess() as child:
        child.post(double)
        child.send(21)
        assert child.receive() == 42
        assert child.receive() == "end"


def test_a_failure_has_the_traceback_and_the_exception_of_the_child():
    with ChildProcess("worker") as child:
        with pytest.raises(
            RunError, match=r"(?s)worker failed: ConfigError: no.*in fail"
        ) as caught:
            child.call(fail, ConfigError, "no")
        assert isinstance(caught.value.__cause__, ConfigError)
        with pytest.raises(RunError, match="KeyError") as caught:
            child.call(fail, KeyError, "x")
        assert caught.value.__cause__ is None
        assert child.call(os.getpid) == child.process.pid


def test_a_child_that_ends_early_is_named_with_its_status():
    child = ChildProcess("worker")
    with pytest.raises(RunError, match="worker exited with 3 in the middle"):
        child.call(os._exit, 3)
    child.kill()
    with ChildProcess("worker") as child:
        child.post(time.sleep, 60)
        child.process.kill()
        with pytest.raises(RunError, match="worker was killed by signal 9 in the middle"):
            child.receive()


def test_a_call_has_a_deadline():
    with ChildProcess("worker") as child:
        child.post(time.sleep, 60)
        with pytest.raises(RunError, match=r"no answer from worker within 0.1 s"):
            child.receive(0.1)
        child.kill()


def test_a_call_that_outlasts_its_deadline_ends_the_child_with_its_stacks(tmp_path):
    child = ChildProcess("worker", output=tmp_path / "output")
    child.post(time.sleep, 60, timeout=0.1 - process._GRACE_S)
    with pytest.raises(RunError, match=r"(?s)worker exited with 1 in the middle.*Timeout.*serve"):
        child.receive()
    child.kill()


def test_a_child_does_not_outlive_its_parent():
    with ChildProcess() as child:
        child.call(ChildProcess, keep=True)
        grandchild = psutil.Process(child.call("call", os.getpid))
        child.kill()
    psutil.wait_procs([grandchild], timeout=30)
    assert not grandchild.is_running()


def test_a_stopped_child_goes_on_where_it_was():
    with ChildProcess() as child:
        child.stop()
        child.post(os.getpid)
        assert not child.connection.poll(0.2)
        child.resume()
        assert child.receive() == child.process.pid


def test_a_group_reports_progress_and_returns_the_output_of_its_children():
    seen = []
    with ProcessGroup(
        {"a": {"X": "1"}, "b": {"X": "2"}}, 60, lambda *args: seen.append(args)
    ) as group:
        pids = group.call("report", ["a", "b"], report, 3)
        assert pids.keys() == {"a", "b"}
        assert max(seen) == ("report", 6, 6)
        assert group.call("look", ["a", "b"], os.getenv, "X") == {"a": "1", "b": "2"}
        group.call("keep", ["b"], print, "here")
        group.call("make", ["a"], Counter, 5, keep=True)
        assert group.join() == {"a": ["closed at 5"], "b": ["here"]}


def test_a_group_leaves_no_process_when_one_fails_or_is_late():
    with ProcessGroup({"late": {}, "quick": {}}, 0.5) as group:
        group.post(["late"], time.sleep, 60)
        with pytest.raises(RunError, match=r"sleep: no answer from late within 0.5 s"):
            group.gather("sleep", ["late"])
    assert not any(child.is_running for child in group._processes.values())
