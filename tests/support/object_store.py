"""An S3 server in a child process, and a relay in front of it that can refuse, hang or hang up."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time

from ports import free_port

DEADLINE_S = 120.0
BUCKET = "blocks"


class ObjectStore:
    """moto's S3, and a relay before it: can hang, hang up, and answer what is put by itself."""

    def __init__(self):
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **quiet)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.call("PUT", "")
                break
            except OSError:
                assert time.monotonic() < deadline
                assert self.process.poll() is None
                threading.Event().wait(0.1)
        self.answer = None
        self.is_gone = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def params(self, **others):
        """Return parameters of NIXL's backend."""
        return {
            "endpoint_override": f"http://127.0.0.1:{self.listener.getsockname()[1]}",
            "scheme": "http",
            "bucket": BUCKET,
            "access_key": "some",
            "secret_key": "thing",
            **others,
        }

    def close(self):
        self.listener.close()
        self.process.kill()
        self.process.wait()

    def call(self, method, key, body=b"", path=f"/{BUCKET}/"):
        """Ask the store itself."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            # Nobody in particular may do nothing; somebody is not looked at more closely.
            headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=some/us-east-1/s3"}
            connection.request(method, path + str(key).lstrip("/"), body, headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status < 300, (response.status, content)
            return content

    def check_credentials(self, checked):
        """Let the store look at who asks, or not."""
        self.call("POST", "", b"0" if checked else b"1000000", "/moto-api/reset-auth")

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client):
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", self.port)) as store,
        ):
            threading.Thread(target=_copy, args=(store, client), daemon=True).start()
            while data := client.recv(1 << 16):
                self.goes_on.wait(DEADLINE_S)
                if self.is_gone:
                    return
                if self.answer is not None and data.startswith(b"PUT "):
                    client.sendall(self.answer)
                    return
                store.sendall(data)


def _copy(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)
