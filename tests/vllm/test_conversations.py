"""Conversations of several turns: prefill fetches from decode what decode has of a conversation."""

import connectors
import pytest
from engines import make_prompts

pytestmark = pytest.mark.timeout(900)

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


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_later_turns_are_fetched_from_decode_and_answered_as_by_one_engine(cluster, mode):
    connector = CHATS.with_(extra={"transfer_mode": mode})
    plain, prefill, decode = engines = [
        cluster.start(name, each, block_size=BLOCK)
        for name, each in (("plain", None), ("prefill", connector), ("decode", connector))
    ]
    prompts = make_prompts([64 + i for i in range(CONVERSATIONS)], SEED)
    news = iter(make_prompts([20] * CONVERSATIONS * TURNS, SEED + 1))
    handed = [{"do_remote_decode": True}] * CONVERSATIONS
    local = [0] * CONVERSATIONS  # tokens in prefill's own cache
    counts = Counts(prefill)
    for _ in range(TURNS):
        plain.start_generating(prompts, ANSWER)
        prefill.start_generating(prompts, 1, handed)
        offers = [answer.params for answer in prefill.answers()]
        decode.start_generating(prompts, ANSWER, offers)
        answers, expected = decode.answers(), plain.answers()
        assert [each.tokens for each in answers] == [each.tokens for each in expected]

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
    for engine in engines:
        engine.close()


def test_a_turn_whose_blocks_decode_gave_away_is_computed_by_prefill(cluster):
    connector = CHATS.with_(extra={"conversation_blocks": 6})
    prefill, decode = (cluster.start(n, connector, block_size=BLOCK) for n in ("prefill", "decode"))
    handed, prompts = [], make_prompts([64, 64], SEED)
    for prompt in prompts:  # the second one takes the place of the first
        answer = decode.generate(prompt, ANSWER, prefill.prefill(prompt))
        handed.append((prompt + answer.tokens, answer.params))
    counts = Counts(prefill)
    answers = [prefill.generate(prompt, 1, params) for prompt, params in handed]
    counted = counts.take()
    assert counted["vllm:prompt_tokens_by_source[external_kv_transfer]"] == 96
    assert [
        decode.generate(prompt, 5, answer.params).tokens
        for (prompt, _), answer in zip(handed, answers, strict=True)
    ] == [prefill.generate(prompt, 5).tokens for prompt, _ in handed]
    for engine in (prefill, decode):
        engine.close()
