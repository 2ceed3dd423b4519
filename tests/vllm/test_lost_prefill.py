"""The prefill engine dies: a request ends as the policy says, and never with wrong tokens."""

import math

import connectors
import pytest
from engines import make_prompts, wait_for

pytestmark = pytest.mark.timeout(1200)

POLICIES = ("fail", "recompute")

# Over TCP a transfer from a process that stands still stays open, so that it can be killed in one.
TCP = {"UCX_TLS": "tcp"}

TRANSFER_TIMEOUT_S = 20.0
MARGIN_S = 15.0
"""What the engines of a busy machine need beside the transfer."""


@pytest.fixture(scope="module", params=["OURS", "NIXL_API"])
def connector(request):
    connector = getattr(connectors, request.param).with_(env=TCP)
    if request.param == "OURS":
        connector = connector.with_(extra={"transfer_timeout": TRANSFER_TIMEOUT_S})
    return connector


@pytest.fixture(scope="module")
def decodes(cluster, connector):
    """A decode engine for each policy, which must fetch every prompt anew."""
    engines = {
        policy: cluster.decode(connector.with_(policy=policy), enable_prefix_caching=False)
        for policy in POLICIES
    }
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def prefill(cluster, connector):
    return cluster.prefill(connector)


@pytest.fixture
def check(connector, decodes):
    """Check how a request has ended, and that the engine goes on."""
    # vLLM's own connector has no deadline.
    limit = connector.extra.get("transfer_timeout", math.inf) + MARGIN_S

    def check_answer(policy, answer, prompt, tokens):
        if policy == "fail":
            assert answer.finish == "error"
        else:
            assert (answer.finish, answer.tokens) == ("length", tokens)
        assert answer.seconds < limit
        assert decodes[policy].generate(prompt).tokens == tokens

    return check_answer


def transfer_once(prefill, decodes, seed):
    (other,) = make_prompts([30 + seed], seed)
    for decode in decodes.values():
        assert decode.generate(other, params=prefill.prefill(other)).finish == "length"


@pytest.mark.parametrize(("is_known", "length"), [(False, 40), (True, 300)])
def test_killed_before_a_transfer(prefill, decodes, expected, check, is_known, length):
    if is_known:
        transfer_once(prefill, decodes, 3)
    prompt, tokens = expected[length]
    params = [prefill.prefill(prompt) for _ in POLICIES]
    prefill.kill()
    for (policy, decode), each in zip(decodes.items(), params, strict=True):
        check(policy, decode.generate(prompt, params=each), prompt, tokens)


def test_killed_during_a_transfer(prefill, decodes, expected, check):
    transfer_once(prefill, decodes, 4)
    prompt, tokens = expected[300]
    params = [prefill.prefill(prompt) for _ in POLICIES]
    prefill.freeze()
    for decode, each in zip(decodes.values(), params, strict=True):
        decode.start_generating([prompt], params=each)
        wait_for(lambda decode=decode: prefill.unread_bytes(decode), "the request for blocks")
    prefill.kill()
    for policy, decode in decodes.items():
        (answer,) = decode.answers()
        check(policy, answer, prompt, tokens)
