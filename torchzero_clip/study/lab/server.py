"""The server of the lab. It serves one page to a browser on this machine.

The server listens only on the loopback interface, 127.0.0.1. It answers a request only if

- the path begins with a secret;

- the header `Host` names this machine, because another host name may resolve to 127.0.0.1, too;

- the request comes from the page itself;

- the request is not too large.

The server sends only the page and the answers to its requests. It never sends a file from the disk.
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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from string import Template
from typing import Any, TypeAlias
from urllib.parse import unquote

from torchzero_clip.study.lab.questions import Question
from torchzero_clip.study.lab.session import LabSession

HOST = "127.0.0.1"
QUESTION_BYTES = 2**24
"""The largest number of bytes in a request."""
FILE_BYTES = 2**28
"""The largest number of bytes in a file that the user drops on the page."""
ERROR_LENGTH = 1000
"""The largest number of characters in an error message."""
FILE_NAME_LENGTH = 200
"""The largest number of characters in a file name."""
CLOSING_SECONDS = 2.0
"""How many seconds a connection stays open for a client that is still sending."""
FOLLOWING_SECONDS = 0.5
"""The number of seconds between two reads of a growing file."""
SILENCE_SECONDS = 10
"""The number of seconds after which the page gets a message even without a change."""
RELOAD_SECONDS = 3.0
"""The number of seconds without a page after which the program ends.

The program waits because the user may be reloading the page.
"""
REQUEST_ERRORS = (ArithmeticError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""The errors that a bad request can cause, for example a request with an unknown rule."""
JSON = "application/json"
BYTES = "application/octet-stream"

Answer: TypeAlias = "dict[str, Any] | Iterator[dict[str, Any]]"
"""An answer to a request: one JSON object, or lines with one JSON object each."""


class LabServer(ThreadingHTTPServer):
    """The server of one session. It stops when its page is closed.

    Args:
        session: The session.
        port: The port. 0 chooses a free port.
        grace: The seconds without a page after which the server stops.
    """

    daemon_threads = True
    request_queue_size = 1024  # connections that wait until they are accepted; more are refused

    def __init__(self, session: LabSession, port: int = 0, grace: float = RELOAD_SECONDS) -> None:
        super().__init__((HOST, port), LabHandler)
        self.session = session
        self.grace = grace
        self.beginning = Beginning()
        self.port = int(self.server_address[1])
        self.base = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://{HOST}:{self.port}{self.base}"
        self.nonce = secrets.token_urlsafe(16)
        self._pages = 0
        self._lock = threading.Lock()

    def opened(self) -> None:
        """Increase the count of open pages."""
        with self._lock:
            self._pages += 1

    def closed(self) -> None:
        """Decrease the count of open pages. If no page opens after the last, stop the server."""
        with self._lock:
            self._pages -= 1
            if not self._pages:
                timer = threading.Timer(self.grace, self._end)
                timer.daemon = True
                timer.start()

    def _end(self) -> None:
        with self._lock:
            if self._pages:
                return
        self.shutdown()

    def shutdown_request(self, request: Any) -> None:
        """Tell the client that the answer is complete, and wait until the client closes.

        If the server closed the connection earlier, a client that is still sending would lose the
        answer.
        """
        end = time.monotonic() + CLOSING_SECONDS
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            while (left := end - time.monotonic()) > 0:
                request.settimeout(left)
                if not request.recv(2**16):
                    break
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that has closed its connection."""


class Beginning:
    """A lock with which new answers begin before long answers, which take minutes, continue."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._count = 0  # the number of answers that are beginning

    def __enter__(self) -> None:
        with self._turn:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._count -= 1
            self._turn.notify_all()

    def wait(self) -> None:
        """Wait until no answer is beginning."""
        with self._turn:
            self._turn.wait_for(lambda: not self._count)


class Refusal(Exception):
    """An error whose message is the answer to a request, with an HTTP status.

    Args:
        status: The HTTP status.
        message: The message.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LabHandler(BaseHTTPRequestHandler):
    """A handler that answers the requests of the page, and refuses all other requests."""

    server: LabServer
    timeout = 20  # seconds for a request to arrive
    default_request_version = "HTTP/1.0"  # so that text that is not HTTP gets a status, too
    server_version = "lab"
    sys_version = ""
    _has_begun = False  # whether a part of the answer was sent

    def do_GET(self) -> None:
        self._answer({"": self._page, "events": self._events})

    def do_POST(self) -> None:
        routes = {name: partial(self._ask, function) for name, function in ANSWERS.items()}
        self._answer({**routes, "file": self._file})

    def _answer(self, routes: Mapping[str, Callable[[], None]]) -> None:
        """Answer a request with the function for its path, or with an error message."""
        try:
            self._check_origin()
            base = self.server.base
            if not self.path.startswith(base) or self.path[len(base) :] not in routes:
                raise Refusal(404, "the lab has no page at this address")
            routes[self.path[len(base) :]]()
        except Refusal as refusal:
            self.send_error(refusal.status, str(refusal))
        except (ConnectionError, TimeoutError):  # the client is gone
            pass
        except REQUEST_ERRORS as error:
            self._fail(400, message_of(error))
        except Exception as error:  # a defect, which the page must show, too
            self._fail(500, f"an error in the lab: {type(error).__name__}: {error}")

    def _fail(self, status: int, message: str) -> None:
        """Send an error message. If the answer has begun, the message is the last line."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            if self._has_begun:
                self.wfile.write(json.dumps({"error": message}).encode() + b"\n")
            else:
                self.send_error(status, message)

    def _check_origin(self) -> None:
        """Raise an error unless the request comes from the page itself, on this machine."""
        own_hosts = [f"{name}:{self.server.port}" for name in (HOST, "localhost")]
        if self.headers.get_all("Host") not in [[name] for name in own_hosts]:
            raise Refusal(403, "the lab accepts requests from a browser on the same machine only")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{name}" for name in own_hosts]:
            raise Refusal(403, "the lab does not accept requests from other web pages")

    # ------------------------------------------------------------------ answers

    def _page(self) -> None:
        nonce = self.server.nonce
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._send(200, "text/html; charset=utf-8", page(nonce).encode(), policy)

    def _events(self) -> None:
        """Send the version and the length of the run until the page is closed."""
        server = self.server
        sent = None
        sent_at = time.monotonic()
        self._head(200, "text/event-stream")
        server.opened()
        try:
            while True:
                now = server.session.refresh()
                if now != sent or time.monotonic() - sent_at > SILENCE_SECONDS:
                    sent = now
                    sent_at = time.monotonic()
                    line = json.dumps({"version": now[0], "steps": now[1]})
                    self.wfile.write(f"data: {line}\n\n".encode())
                readable, _, _ = select.select([self.connection], [], [], FOLLOWING_SECONDS)
                if readable and not self.connection.recv(1024):
                    return
        finally:
            server.closed()

    def _ask(self, function: Callable[[LabSession, Question], Answer]) -> None:
        """Answer a request with one object, or send each line as soon as the line is known."""
        question = Question(self._body(JSON, QUESTION_BYTES))
        beginning = self.server.beginning
        with beginning:
            answer = function(self.server.session, question)
            # an error before the first line gets an HTTP status
            first = answer if isinstance(answer, dict) else next(answer)
        if isinstance(answer, dict):
            self._json(answer)
            return
        self._head(200, "application/x-ndjson")
        for line in itertools.chain([first], answer):
            self.wfile.write(json.dumps(line).encode() + b"\n")
            beginning.wait()

    def _file(self) -> None:
        """Show a file that the user has dropped on the page."""
        name = unquote(self.headers.get("X-Name", "file"))[:FILE_NAME_LENGTH]
        self.server.session.take(self._body(BYTES, FILE_BYTES), name)
        self._json({})

    def _body(self, kind: str, limit: int) -> bytes:
        """Return the body of the request.

        Args:
            kind: The content type that the body must have.
            limit: The largest number of bytes.
        """
        if self.headers.get("Content-Type") != kind:
            raise Refusal(415, f"Content-Type must be {kind}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            raise Refusal(411, "the request must have a Content-Length")
        if len(length) > 12 or int(length) > limit:
            raise Refusal(413, f"the request must have at most {limit} bytes")
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            why = f"the {length} bytes of the request did not arrive in {self.timeout} seconds"
            raise Refusal(408, why) from None
        if len(body) < int(length):
            raise Refusal(400, f"the request must have {length} bytes, got {len(body)}")
        return body

    # ------------------------------------------------------------------ sending

    def _head(self, status: int, kind: str, length: int | None = None, policy: str = "") -> None:
        self._has_begun = True
        self.send_response(status)
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

    def _send(self, status: int, kind: str, body: bytes, policy: str = "") -> None:
        self._head(status, kind, len(body), policy)
        self.wfile.write(body)

    def _json(self, answer: Mapping[str, Any]) -> None:
        self._send(200, JSON, json.dumps(answer).encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error message as plain text, also to a client that does not speak HTTP."""
        text = message or HTTPStatus(code).phrase
        self._send(code, "text/plain; charset=utf-8", f"{text}\n".encode(errors="replace"))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def answer_run(session: LabSession, question: Question) -> Answer:
    """Return all data about the run that the page shows."""
    return session.run(question.whole("from", 0), question.whole("version", 0))


def answer_rule(session: LabSession, question: Question) -> Answer:
    """Return all data about a rule that the page shows."""
    text = question.text("text")
    return session.rule(text, question.path("path"), question.text("value", ""))


def answer_simulate(session: LabSession, question: Question) -> Answer:
    """Return the effect of a rule on the run, part by part."""
    text = question.text("text")
    path = question.path("path")
    start = question.whole("from", 0)
    return session.simulate(text, path, start, question.whole("version"), question.wholes("bad"))


def answer_choose(session: LabSession, question: Question) -> Answer:
    """Show other norms of the same run or another run, and return an empty answer."""
    if "column" in question:
        session.column(question.text("column"))
    else:
        session.choose(question.text("run"))
    return {}


ANSWERS: dict[str, Callable[[LabSession, Question], Answer]] = {
    "run": answer_run,
    "rule": answer_rule,
    "simulate": answer_simulate,
    "choose": answer_choose,
}
"""For each path, the function that answers the requests."""


def message_of(error: Exception) -> str:
    """Return the message of an error as the page shows it."""
    text = str(error) or type(error).__name__
    text = text.removeprefix("Trace: ").removeprefix("lab: ").removeprefix("simulate: ")
    return text if len(text) <= ERROR_LENGTH else f"{text[:ERROR_LENGTH]}…"


def page(nonce: str) -> str:
    """Return the page as one HTML document that includes its scripts and styles."""
    folder = resources.files(__package__ or "")
    files = {"look": "picture.css", "picture": "picture.js", "script": "page.js"}
    parts = {name: (folder / file).read_text("utf-8") for name, file in files.items()}
    return Template((folder / "page.html").read_text("utf-8")).substitute(parts, nonce=nonce)
