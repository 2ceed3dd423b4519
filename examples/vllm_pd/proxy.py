"""A proxy in front of a prefill and a decode server: one OpenAI-compatible endpoint from two.

Each prompt goes to the prefill server first, cut down to one token; what that server answers in
``kv_transfer_params`` is handed to the decode server together with the request, whose answer is
streamed back as it comes. Nothing is computed for a client that has hung up, or while no decode
server answers. A request with several prompts becomes one request for each of them,
because a hand-off holds the KV of one prompt.

Requests with the same ``X-Conversation-Id`` are turns of a conversation. What decode answers in
``kv_transfer_params`` is sent to prefill with the next turn, so that prefill fetches from decode
what decode has computed. vLLM gives it with answers in one piece only, not with streamed ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
CONNECT_S = 5.0
MOST_PROMPTS = 1024
MOST_CONVERSATIONS = 10000
ROUTES = ("/v1/completions", "/v1/chat/completions")


class Unavailable(Exception):
    """No decode server answers."""


class Proxy:
    """Sends requests to prefill servers in turn, and to decode servers in turn."""

    def __init__(self, prefill: list[str], decode: list[str], timeout_s: float) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._num_decode = len(decode)
        self._timeout = ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._session: ClientSession
        self._turns: OrderedDict[str, dict[str, Any]] = OrderedDict()  # the oldest first

    async def run_session(self, _: web.Application) -> Any:
        """Keep one HTTP session for as long as the application runs."""
        async with ClientSession(timeout=self._timeout) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            parts = _split(await request.json())
        except ValueError as error:
            return _refuse(400, str(error))
        try:
            if len(parts) > 1:
                return await self._answer_all(request, parts)
            async with self._ask(request, parts[0]) as answer:
                conversation = request.headers.get("X-Conversation-Id")
                if conversation is not None and not parts[0].get("stream"):
                    return await self._end_turn(conversation, answer)
                return await _pass_on(request, answer)
        except Unavailable as error:
            return _refuse(503, str(error))
        except asyncio.TimeoutError:
            return _refuse(504, "a server did not answer in time")
        except (ClientError, ValueError) as error:
            return _refuse(502, f"a server failed: {error}")

    async def _answer_all(
        self, request: web.Request, parts: list[dict[str, Any]]
    ) -> web.StreamResponse:
        """Answer several prompts as one; the first error stands for all."""

        async def whole(number: int, part: dict[str, Any]) -> tuple[int, str, bytes]:
            async with self._ask(request, part, f"-{number}") as answer:
                return answer.status, answer.content_type, await answer.read()

        answers = await asyncio.gather(*(whole(*item) for item in enumerate(parts)))
        for status, kind, body in answers:
            if status != 200:
                return web.Response(status=status, body=body, content_type=kind)
        merged = [json.loads(body) for _, _, body in answers]
        choices = [choice for each in merged for choice in each["choices"]]
        merged[0]["choices"] = [{**choice, "index": i} for i, choice in enumerate(choices)]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            merged[0]["usage"][key] = sum(each["usage"][key] for each in merged)
        return web.json_response(merged[0])

    @contextlib.asynccontextmanager
    async def _ask(
        self, request: web.Request, body: dict[str, Any], suffix: str = ""
    ) -> AsyncIterator[ClientResponse]:
        """Send one prompt through prefill to decode; gives the answer of the last one asked."""
        name = request.headers.get("X-Request-Id", uuid.uuid4().hex)
        headers = {"X-Request-Id": name + suffix}
        for passed_on in ("Authorization", "traceparent", "tracestate"):
            if passed_on in request.headers:
                headers[passed_on] = request.headers[passed_on]

        decode = await self._find_decode()
        url = next(self._prefill) + request.path
        turn = self._turns.pop(request.headers.get("X-Conversation-Id", ""), {})
        async with self._session.post(url, json=_first(body, turn), headers=headers) as answer:
            if answer.status != 200:
                yield answer
                return
            params = (await answer.json()).get("kv_transfer_params")

        url = decode + request.path
        # Without parameters there was nothing to hand over: decode computes the prompt itself.
        second = {**body, "kv_transfer_params": params} if params else body
        async with self._session.post(url, json=second, headers=headers) as answer:
            yield answer

    async def _end_turn(self, conversation: str, answer: ClientResponse) -> web.Response:
        """Pass an answer on, and keep its hand-off for the next turn."""
        if answer.content_type != "application/json":
            return web.Response(status=answer.status, body=await answer.read())
        body = await answer.json()
        params = body.pop("kv_transfer_params", None)
        if params:
            self._turns[conversation] = params
            while len(self._turns) > MOST_CONVERSATIONS:
                self._turns.popitem(last=False)
        return web.json_response(body, status=answer.status)

    async def _find_decode(self) -> str:
        """Return the next decode server that answers."""
        why, timeout = "", ClientTimeout(total=CONNECT_S)
        for _ in range(self._num_decode):
            server = next(self._decode)
            try:
                async with self._session.get(server + "/health", timeout=timeout) as answer:
                    if answer.status == 200:
                        return server
                    why = f"{server} answers {answer.status}"
            except (ClientError, asyncio.TimeoutError) as error:
                why = str(error) or f"{server} does not answer in time"
        raise Unavailable(f"no decode server is up: {why}")

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self.run_session)
        app.add_routes([web.post(route, self.handle) for route in ROUTES])
        return app


def _split(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one request for each prompt, in the order of vLLM's answers."""
    if not isinstance(body, dict):
        raise ValueError("the request is not a JSON object")
    prompts = []
    for key in ("prompt_embeds", "prompt"):
        given = body.get(key)
        is_one = not isinstance(given, list) or (given and isinstance(given[0], int))
        prompts += [(key, each) for each in ([given] if is_one else given) if each is not None]
    if len(prompts) <= 1:
        return [body]
    if body.get("stream"):
        raise ValueError("several prompts cannot be streamed; send a request for each")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"there are {len(prompts)} prompts; send at most {MOST_PROMPTS}")
    return [{**body, "prompt_embeds": None, "prompt": None, key: each} for key, each in prompts]


def _first(body: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    """Return what prefill is asked: one token of one sample, whose KV all samples read."""
    first = {**body, "stream": False, "max_tokens": 1, "n": 1}
    for name in ("stream_options", "min_tokens", "best_of"):
        first.pop(name, None)
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    first["kv_transfer_params"] = {**PREFILL, **turn, "num_readers": body.get("n") or 1}
    return first


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _pass_on(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Stream a server's answer back, whatever it is."""
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (ClientError, asyncio.TimeoutError):
        # The client sees an answer that is cut off, as it was here.
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def main() -> None:
    """Run the proxy until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode, options.timeout)
    # Without this, a handler goes on for a client that has hung up.
    web.run_app(
        proxy.application(), host=options.host, port=options.port, handler_cancellation=True
    )


if __name__ == "__main__":
    main()
