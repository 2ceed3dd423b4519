"""The prefill engine dies: a request ends as the policy says, and never with wrong tokens."""

import connectors
import pytest
from engines import make_prompts, wait_for

pytestmark = pytest.mark.timeout(900)

# Over TCP a transfer from a process that stands still stays open, so that it can be killed in one.
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture(scope="module", params=["fail", "recompute"])
def policy(request):
    return request.param


@pytest.fixture(scope="module", params=["OURS", "NIXL_API"])
def connector(request, policy):
    return getattr(connectors, request.param).with_(policy=policy, env=TCP)


@pytest.fixture(scope="module")
def decode(cluster, connector):
    return cluster.decode(connector)


@pytest.fixture
def prefill(cluster, connector):
    return cluster.prefill(connector)


@pytest.fixture
def check(decode, policy, expected):
    """Check how a request has ended, and that the engine goes on."""

    def check_answer(answer, length):
        prompt, tokens = expected[length]
        if policy == "fail":
            assert answer.finish == "error"
        else:
            assert (answer.finish, answer.tokens) == ("length", tokens)
        assert decode.generate(prompt).tokens == tokens

    return check_answer


def test_killed_before_first_contact(prefill, decode, expected, check):
    prompt, _ = expected[40]
    params = prefill.prefill(prompt)
    prefill.kill()
    check(decode.generate(prompt, params=params), 40)


def test_killed_after_a_good_transfer(prefill, decode, expected, check):
    (other,) = make_prompts([33], 3)
    assert decode.generate(other, params=prefill.prefill(other)).finish == "length"
    prompt, _ = expected[300]
    params = prefill.prefill(prompt)
    prefill.kill()
    check(decode.generate(prompt, params=params), 300)


def test_killed_during_a_transfer(prefill, decode, expected, check):
    (other,) = make_prompts([34], 4)
    assert decode.generate(other, params=prefill.prefill(other)).finish == "length"
    prompt, _ = expected[300]
    params = prefill.prefill(prompt)
    prefill.freeze()
    decode.start_generating([prompt], params=params)
    wait_for(prefill.unread_bytes, "the request for blocks")
    prefill.kill()
    (answer,) = decode.answers()
    check(answer, 300)
