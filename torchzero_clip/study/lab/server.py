"""The lab's server: one page on this machine for its own browser, and nothing else.

It listens on the loopback alone. A request must have the right path, which begins with a secret,
the right Host, which a foreign name that leads to this machine has not, and come from the page
itself; its size is bounded. There are no files to ask for: what is served is named here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from string import Template
from typing import Any
from urllib.parse import unquote

from torchzero_clip.study.lab.questions import Question
from torchzero_clip.study.lab.session import LabSession

HOST = "127.0.0.1"
QUESTION, FILE = 2**24, 2**28  # the most bytes of a question, and of a file that was dropped
LONGEST, LONGEST_NAME = 1000, 200  # letters of a sentence, and of a file's name
LINGER = 2.0  # seconds for a page to take its answer, if it still sends
WRONG = (ArithmeticError, MemoryError, OSError, RuntimeError, TypeError, ValueError)  # of a page
LOOK = 0.5  # seconds between two looks at a run that is followed
GRACE = 3.0  # seconds without a page before the program ends: it may be loaded again
JSON, BYTES = "application/json", "application/octet-stream"


class LabServer(ThreadingHTTPServer):
    """The server of one session, which ends when its page is closed."""

    daemon_threads = True
    request_queue_size = 1024  # requests that wait until they are taken; others are lost

    def __init__(self, session: LabSession, port: int = 0, grace: float = GRACE) -> None:
        super().__init__((HOST, port), LabHandler)
        self.session, self.grace = session, grace
        self.beginning = Beginning()
        self.port = int(self.server_address[1])
        self.base = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://{HOST}:{self.port}{self.base}"
        self.nonce = secrets.token_urlsafe(16)
        self._pages, self._count = 0, threading.Lock()

    def opened(self) -> None:
        """A page is there."""
        with self._count:
            self._pages += 1

    def closed(self) -> None:
        """A page is gone; without any for a while, all ends."""
        with self._count:
            self._pages -= 1
            if not self._pages:
                timer = threading.Timer(self.grace, self._end)
                timer.daemon = True
                timer.start()

    def _end(self) -> None:
        with self._count:
            if self._pages:
                return
        self.shutdown()

    def shutdown_request(self, request: Any) -> None:
        """Say that the answer is whole, and close when the other side has done so.

        To close while something unread arrives would take the answer back.
        """
        end = time.monotonic() + LINGER
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            while (left := end - time.monotonic()) > 0:
                request.settimeout(left)
                if not request.recv(2**16):
                    break
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no error."""


class Beginning:
    """Answers that begin go before those that go on, which may take minutes."""

    def __init__(self) -> None:
        self._turn, self._inside = threading.Condition(), 0

    def __enter__(self) -> None:
        with self._turn:
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._inside -= 1
            self._turn.notify_all()

    def wait(self) -> None:
        """Until no answer begins."""
        with self._turn:
            self._turn.wait_for(lambda: not self._inside)


class Refusal(Exception):
    """A request that gets a sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class LabHandler(BaseHTTPRequestHandler):
    """Answers what the page asks, and refuses everything else."""

    server: LabServer
    timeout = 20  # seconds for a request to arrive
    default_request_version = "HTTP/1.0"  # of what is no request: its answer has a status too
    _begun = False  # to answer
    server_version, sys_version = "lab", ""

    def do_GET(self) -> None:
        self._answer({"": self._page, "events": self._events})

    def do_POST(self) -> None:
        ask = partial(partial, self._ask)
        names = ("run", "rule", "simulate", "choose")
        self._answer({**{name: ask(name) for name in names}, "file": self._file})

    def _answer(self, routes: Mapping[str, Callable[[], None]]) -> None:
        try:
            self._check()
            base = self.server.base
            if not self.path.startswith(base) or self.path[len(base) :] not in routes:
                raise Refusal(404, "there is no such page")
            routes[self.path[len(base) :]]()
        except Refusal as refusal:
            self.send_error(refusal.code, str(refusal))
        except (ConnectionError, TimeoutError):  # there is nobody to answer
            pass
        except WRONG as error:
            self._fail(400, sentence(error))
        except Exception as error:  # whatever it is, the page waits for a sentence
            self._fail(500, f"the lab failed: {type(error).__name__}: {error}")

    def _fail(self, code: int, sentence: str) -> None:
        """A sentence as the answer, or as its last line."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            if self._begun:
                self.wfile.write(json.dumps({"error": sentence}).encode() + b"\n")
            else:
                self.send_error(code, sentence)

    def _check(self) -> None:
        own = [f"{name}:{self.server.port}" for name in (HOST, "localhost")]
        if self.headers.get_all("Host") not in [[name] for name in own]:
            raise Refusal(403, "this page is for the browser on its own machine")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{name}" for name in own]:
            raise Refusal(403, "another page may not ask here")

    # ------------------------------------------------------------------ answers

    def _page(self) -> None:
        nonce = self.server.nonce
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._send(200, "text/html; charset=utf-8", page(nonce).encode(), policy)

    def _events(self) -> None:
        """Tell of the run as long as the page is there."""
        server, told, said = self.server, None, time.monotonic()
        self._head(200, "text/event-stream")
        server.opened()
        try:
            while True:
                now = server.session.refresh()
                if now != told or time.monotonic() - said > 10:
                    told, said = now, time.monotonic()
                    line = json.dumps({"version": now[0], "steps": now[1]})
                    self.wfile.write(f"data: {line}\n\n".encode())
                readable, _, _ = select.select([self.connection], [], [], LOOK)
                if readable and not self.connection.recv(1024):
                    return
        finally:
            server.closed()

    def _ask(self, name: str) -> None:
        """A question and its answer, or lines of it as they come."""
        question, beginning = Question(self._body(JSON, QUESTION)), self.server.beginning
        with beginning:
            answer = answers(self.server.session, name, question)
            first = answer if isinstance(answer, dict) else next(answer)  # or a sentence
        if isinstance(answer, dict):
            self._json(answer)
            return
        self._head(200, "application/x-ndjson")
        for line in itertools.chain([first], answer):
            self.wfile.write(json.dumps(line).encode() + b"\n")
            beginning.wait()

    def _file(self) -> None:
        """A file that was dropped on the page."""
        name = unquote(self.headers.get("X-Name", "file"))[:LONGEST_NAME]
        self.server.session.take(self._body(BYTES, FILE), name)
        self._json({})

    def _body(self, kind: str, most: int) -> bytes:
        if self.headers.get("Content-Type") != kind:
            raise Refusal(415, f"wanted is {kind}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            raise Refusal(411, "wanted is a Content-Length")
        if len(length) > 12 or int(length) > most:
            raise Refusal(413, f"there may be {most} bytes")
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise Refusal(408, f"{length} bytes did not come in {self.timeout} seconds") from None
        if len(body) < int(length):
            raise Refusal(400, f"Content-Length says {length} bytes, got {len(body)}")
        return body

    # ------------------------------------------------------------------ sending

    def _head(self, code: int, kind: str, length: int | None = None, policy: str = "") -> None:
        self._begun = True
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": policy or "default-src 'none'",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, code: int, kind: str, body: bytes, policy: str = "") -> None:
        self._head(code, kind, len(body), policy)
        self.wfile.write(body)

    def _json(self, told: Mapping[str, Any]) -> None:
        self._send(200, JSON, json.dumps(told).encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A sentence, also to what is no request."""
        words = message or HTTPStatus(code).phrase
        self._send(code, "text/plain; charset=utf-8", f"{words}\n".encode(errors="replace"))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of every request."""


def answers(session: LabSession, name: str, asked: Question) -> Any:
    """What the session says to a question of the page."""
    if name == "run":
        return session.run(asked.whole("from", 0), asked.whole("version", 0))
    if name == "rule":
        return session.rule(asked.text("text"), asked.path("path"), asked.text("value", ""))
    if name == "simulate":
        text, path, start = asked.text("text"), asked.path("path"), asked.whole("from", 0)
        return session.simulate(text, path, start, asked.whole("version"), asked.wholes("bad"))
    if "column" in asked:
        session.column(asked.text("column"))
    else:
        session.choose(asked.text("run"))
    return {}


def sentence(error: Exception) -> str:
    """An error as the page shows it."""
    text = str(error) or type(error).__name__
    text = text.removeprefix("Trace: ").removeprefix("lab: ").removeprefix("simulate: ")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def page(nonce: str) -> str:
    """The page: one file, whose scripts and styles are in it."""
    folder = resources.files(__package__ or "")
    files = {"look": "picture.css", "picture": "picture.js", "script": "page.js"}
    parts = {name: (folder / file).read_text("utf-8") for name, file in files.items()}
    return Template((folder / "page.html").read_text("utf-8")).substitute(parts, nonce=nonce)
