"""A server as its own process, and plain clients for it."""

import http.client
import json
import re
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from forked import Program
from small_run import start_command

START_S = 100


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return self.json["error"]


@dataclass
class Served:
    """A running server.

    Attributes:
        program: its process.
        address: host and port.
        tls: for clients, where it speaks TLS.
    """

    program: Program
    address: tuple[str, int]
    tls: ssl.SSLContext | None = None

    def connect(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        if self.tls is not None:
            return http.client.HTTPSConnection(*self.address, timeout=timeout_s, context=self.tls)
        return http.client.HTTPConnection(*self.address, timeout=timeout_s)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own; dictionaries and lists go as JSON."""
        connection = self.connect()
        try:
            return ask(connection, method, path, body, headers)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """A gauge or counter of ``/metrics``."""
        text = self.ask("GET", "/metrics").body.decode()
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    def complaints(self) -> str:
        """What it has said on standard error so far."""
        return Path(self.program._folder.name, "stderr").read_text()

    def end(self) -> str:
        """Ask it to end, and wait: what it said on standard error."""
        self.program.send_signal(signal.SIGTERM)
        done = self.program.end(60)
        assert done.returncode == 0, done.stderr
        return done.stderr


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    if isinstance(body, dict | list):
        body = json.dumps(body)
        headers = {"content-type": "application/json", **(headers or {})}
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return Answer(
        response.status,
        {name.lower(): value for name, value in response.getheaders()},
        response.read(),
    )


def check_documented(page: dict, method: str, path: str, answer: Answer) -> None:
    """Hold an answer to what ``/openapi.json`` says of it, with no field that it does not name."""
    operation = page["paths"][path][method.lower()]
    responses = operation["responses"]
    status = str(answer.status)
    response = responses.get(status) or responses[f"{status[0]}XX"]
    if "$ref" in response:
        response = page["components"]["responses"][response["$ref"].rpartition("/")[2]]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = response["content"][kind]["schema"]
    if kind == "application/json":
        jsonschema.validate(answer.json, _closed(schema), jsonschema.Draft202012Validator)


def _closed(schema: dict) -> dict:
    """A schema whose objects have no fields but those that it names, where it names some."""
    inner: dict[str, Any] = {
        key: _closed(value) for key, value in schema.items() if isinstance(value, dict)
    }
    if schema.get("properties"):
        inner["properties"] = {name: _closed(of) for name, of in schema["properties"].items()}
        inner["additionalProperties"] = False
    return {**schema, **inner}


def until(what, timeout_s: float = START_S):
    """Ask until there is an answer that is not false."""
    deadline = time.monotonic() + timeout_s
    while not (result := what()):
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)
    return result


class Load:
    """Clients that ask for all rows again and again.

    Each answer must be that of the version that it names.
    """

    def __init__(self, server, versions, num_clients=3):
        self.server = server
        self.versions = versions
        self.seen = []
        self.failures = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self):
        connection = self.server.connect()
        while not self._stop.is_set():
            try:
                answer = ask(connection, "POST", "/score", {"rows": self.versions.rows})
                version = answer.json["model_version"]
                error = np.abs(
                    np.array(answer.json["scores"]) - self.versions.expected[version]
                ).max()
                if answer.status != 200 or error > 1e-6:
                    self.failures.append((answer, error))
                self.seen.append(version)
            except Exception as error:
                self.failures.append(error)
                return
        connection.close()

    def until_seen(self, version):
        """Wait for answers of a version."""
        start = len(self.seen)
        until(lambda: version in self.seen[start:] or self.failures)
        assert not self.failures


@contextmanager
def serving(
    path: Path,
    *options: object,
    env: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    cwd: Path | None = None,
) -> Iterator[Served]:
    """A server of ``path`` at a free port, killed at the end if it still runs."""
    where = [] if path is None else [path]
    with start_command("serve", *where, "--port", 0, *options, env=env, cwd=cwd) as program:
        folder = Path(program._folder.name)

        def address():
            assert program.poll() is None, (folder / "stderr").read_text()
            return re.search(
                r"at https?://(\S+):(\d+)$", (folder / "stdout").read_text(), re.MULTILINE
            )

        url = until(address)
        yield Served(program, (url[1].strip("[]"), int(url[2])), tls)
