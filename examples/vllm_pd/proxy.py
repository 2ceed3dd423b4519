"""A proxy in front of a prefill and a decode server: one OpenAI-compatible endpoint from two.

Each request goes to the prefill server first, cut down to one token; what that server answers in
``kv_transfer_params`` is handed to the decode server together with the request, whose answer is
streamed back as it comes.
"""

from __future__ import annotations

import argparse
import itertools
import uuid
from typing import Any

from aiohttp import ClientResponse, ClientSession, ClientTimeout, web

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
CONNECT_S = 5.0
ROUTES = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    """Sends requests to prefill servers in turn, and to decode servers in turn."""

    def __init__(self, prefill: list[str], decode: list[str], timeout_s: float) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._timeout = ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._session: ClientSession

    async def run_session(self, _: web.Application) -> Any:
        """Keep one HTTP session for as long as the application runs."""
        async with ClientSession(timeout=self._timeout) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        body = await request.json()
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]

        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL}
        first.pop("stream_options", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        url = next(self._prefill) + request.path
        async with self._session.post(url, json=first, headers=headers) as answer:
            if answer.status != 200:
                return await _pass_on(request, answer)
            params = (await answer.json()).get("kv_transfer_params")

        url = next(self._decode) + request.path
        # Without parameters there was nothing to hand over: decode computes the prompt itself.
        second = {**body, "kv_transfer_params": params} if params else body
        async with self._session.post(url, json=second, headers=headers) as answer:
            return await _pass_on(request, answer)

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self.run_session)
        app.add_routes([web.post(route, self.handle) for route in ROUTES])
        return app


async def _pass_on(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Stream a server's answer back, whatever it is."""
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
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
    web.run_app(proxy.application(), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
