"""Conversations of several turns: prefill fetches from decode what decode has of a conversation."""

import connectors
import pytest
from engines import PREFILL_PARAMS, make_prompts

pytestmark = pytest.mark.timeout(3600)

CONVERSATIONS, TURNS, BLOCK = 20, 3, 32
ANSWER = 100
SEED = 77
CHATS = connectors.OURS.with_(extra={"bidirectional_kv_xfer": True}, policy="recompute")
SOURCES = ("external_kv_transfer", "local_cache_hit", "local_compute")


def whole(num_tokens):
    return num_tokens // BLOCK * BLOCK


class Counts:
    """What an engine has counted since it was last asked."""

    def __init__(self, engine):
        self._engine = engine
        self._before = engine.metrics()

    def take(self):
        after, before = self._engine.metrics(), self._before
        self._before = after
        return {name: value - before.get(name, 0) for name, value in after.items()}


@pytest.fixture(scope="module", params=["pull", "push"])
def engines(request, cluster):
    """An engine by itself, a prefill and a decode engine."""
    connector = CHATS.with_(extra={"transfer_mode": request.param})
    engines = [
        cluster.start(name, each, block_size=BLOCK)
        for name, each in (("plain", None), ("prefill", connector), ("decode", connector))
    ]
    yield engines
    for engine in engines:
        engine.close()


def test_later_turns_are_fetched_from_decode_and_answered_as_by_one_engine(engines):
    plain, prefill, decode = engines
    prompts = make_prompts([64 + i for i in range(CONVERSATIONS)], SEED)
    news = iter(make_prompts([20] * CONVERSATIONS * TURNS, SEED + 1))
    handed = [PREFILL_PARAMS] * CONVERSATIONS
    local = [0] * CONVERSATIONS  # tokens in prefill's own cache
    counts = Counts(prefill)
    for _ in range(TURNS):
        plain.start_generating(prompts, ANSWER)
        prefill.start_generating(prompts, 1, handed)
        decode.start_generating(prompts, ANSWER, [each.params for each in prefill.answers()])
        answers = decode.answers()
        assert [each.tokens for each in answers] == [each.tokens for each in plain.answers()]

        held = [each.get("remote_num_tokens", 0) for each in handed]
        fetched = [max(there - here, 0) for there, here in zip(held, local, strict=True)]
        total, counted = sum(map(len, prompts)), counts.take()
        by_source = [counted[f"vllm:prompt_tokens_by_source[{source}]"] for source in SOURCES]
        assert by_source == [sum(fetched), sum(local), total - sum(fetched) - sum(local)]
        assert counted.get("vllm:pynixlkv_requests_received", 0) == sum(map(bool, fetched))

        local = [whole(len(prompt)) for prompt in prompts]
        handed = [each.params for each in answers]
        assert [each["remote_num_tokens"] for each in handed] == [
            whole(len(prompt) + ANSWER - 1) for prompt in prompts
        ]
        prompts = [
            [*prompt, *each.tokens, *next(news)]
            for prompt, each in zip(prompts, answers, strict=True)
        ]


def test_a_turn_that_decode_no_longer_holds_is_computed_by_prefill(engines):
    plain, prefill, decode = engines
    (prompt,) = make_prompts([64], SEED + 2)
    answer = decode.generate(prompt, ANSWER, prefill.prefill(prompt))
    slot, token = answer.params["lease"].split("-")
    counts, prompt = Counts(prefill), prompt + answer.tokens
    late = {**answer.params, "lease": f"{slot}-{int(token, 16) - 2:x}"}  # of a turn before
    params = prefill.generate(prompt, 1, late).params
    assert counts.take()["vllm:pynixlkv_requests_expired"] == 1
    assert decode.generate(prompt, ANSWER, params).tokens == plain.generate(prompt, ANSWER).tokens
