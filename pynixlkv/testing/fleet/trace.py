"""Traces of requests: made from a seed, or read from a file in Mooncake's format."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_TOKENS = 512
"""Tokens that one number of `TracedRequest.blocks` stands for, as in Mooncake's traces."""


@dataclass(frozen=True)
class TracedRequest:
    """A request of a trace."""

    at: float
    """Seconds after the begin."""
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]
    """For each block of the prompt, what decides its KV: equal numbers, equal prefixes."""


def synthetic(
    seed: int,
    rate: float,
    *,
    prompt: int = 8192,
    output: int = 200,
    shared: float = 0.5,
    num_prefixes: int = 256,
) -> Iterator[TracedRequest]:
    """Make requests without end, with exponential times between them.

    Prompt and output lengths are log-normal with medians `prompt` and `output`. The part `shared`
    of the requests begin with one of `num_prefixes` prefixes, some far more often than others.
    """
    drawn = random.Random(seed)
    at, last = 0.0, 0
    prefixes: dict[int, tuple[int, ...]] = {}
    while True:
        at += drawn.expovariate(rate)
        tokens = min(max(int(prompt * drawn.lognormvariate(0.0, 0.6)), 1), 16 * prompt)
        answer = min(max(int(output * drawn.lognormvariate(0.0, 0.6)), 1), 16 * output)
        count = -(-tokens // BLOCK_TOKENS)
        begin: tuple[int, ...] = ()
        if drawn.random() < shared:
            number = min(int(drawn.paretovariate(0.7)), num_prefixes)
            if number not in prefixes:
                length = drawn.randint(1, max(prompt // BLOCK_TOKENS // 2, 1))
                prefixes[number] = tuple(range(last + 1, last + 1 + length))
                last += length
            begin = prefixes[number][: count - 1]
        own = count - len(begin)
        yield TracedRequest(at, tokens, answer, (*begin, *range(last + 1, last + 1 + own)))
        last += own


def read_mooncake(path: Path, speed: float = 1.0) -> Iterator[TracedRequest]:
    """Read a trace line by line; `speed` divides its times.

    Each line is a JSON object with ``timestamp`` in ms, ``input_length`` and ``output_length`` in
    tokens, and ``hash_ids``, one for each 512 tokens of the prompt.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                given = json.loads(line)
                made = TracedRequest(
                    given["timestamp"] / 1000 / speed,
                    int(given["input_length"]),
                    int(given["output_length"]),
                    tuple(map(int, given["hash_ids"])),
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{path}, line {number}: {error!r}; expected an object with timestamp, "
                    "input_length, output_length and hash_ids"
                ) from error
            wanted = -(-made.num_prompt_tokens // BLOCK_TOKENS)
            if len(made.blocks) != wanted or wanted == 0:
                raise ConfigError(
                    f"{path}, line {number}: {len(made.blocks)} hash_ids for "
                    f"{made.num_prompt_tokens} tokens; expected {wanted}, at least 1"
                )
            yield made
