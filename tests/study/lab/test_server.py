"""The lab's server: it has its page, on the loopback, for that page; all else is refused."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import some
from tests.study.lab.test_session import a_file, norms
from torchzero_clip.__main__ import main
from torchzero_clip.study.lab import server as serving
from torchzero_clip.study.lab import simulations
from torchzero_clip.study.lab.server import Beginning, LabServer
from torchzero_clip.study.lab.session import LabSession

RULE = {"text": "ClipNorm(2.0, dim='global')"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LabServer]:
    made = LabServer(LabSession(a_file(tmp_path, norms(30))), grace=0.1)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(10)


def ask(server: LabServer, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """The status of an answer, its headers and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if isinstance(body, dict):
        body, given = json.dumps(body), {"Content-Type": "application/json", **given}
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def refused(server: LabServer, name: str, body: Any, **headers: str) -> str:
    """The sentence of an answer that says that the request was wrong."""
    status, given, told = ask(server, "POST", f"{server.base}{name}", body, **headers)
    assert (status, given["Content-Type"]) == (400, "text/plain; charset=utf-8")
    return str(told.decode())


def raw(server: LabServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(4096)


def test_it_listens_on_the_loopback_alone(server: LabServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert len(server.base) > 20


def test_the_page_is_one_file_that_asks_nobody_else(server: LabServer) -> None:
    status, headers, page = ask(server, "GET", server.base)
    text = page.decode()
    assert status == 200
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "src=" not in text
    assert "@import" not in text
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'" in policy
    assert text.count(f'nonce="{server.nonce}"') == 2
    assert headers["Cache-Control"] == "no-store"


def test_questions_are_answered(server: LabServer) -> None:
    status, _, told = ask(server, "POST", f"{server.base}run", {"from": 0, "version": 0})
    run = json.loads(told)
    assert (status, run["title"], run["steps"]) == (200, "run.csv", 30)
    _, _, told = ask(server, "POST", f"{server.base}rule", {"text": run["catalogue"][1]})
    assert json.loads(told)["text"] == run["catalogue"][1]
    question = {**RULE, "version": run["version"], "from": 0, "bad": [0]}
    _, _, told = ask(server, "POST", f"{server.base}simulate", question)
    lines = [json.loads(line) for line in told.splitlines()]
    assert [[*line] for line in lines] == [
        ["from", "limit", "left", "clipped"], ["summary", "steps", "seconds"], ["end"]
    ]  # fmt: skip
    assert json.loads(ask(server, "POST", f"{server.base}choose", {"run": "ppo"})[2]) == {}
    assert server.session.run(0, 0)["title"] == "ppo"


def test_a_dropped_file_is_the_run(server: LabServer) -> None:
    kind = {"Content_Type": "application/octet-stream", "X_Name": "m%C3%A4rz.csv"}
    body = b"step,grad_norm\n5,1.0\n6,2.0\n"
    assert json.loads(ask(server, "POST", f"{server.base}file", body, **kind)[2]) == {}
    told = server.session.run(0, 0)
    assert (told["title"], told["steps"], told["column"]) == ("märz.csv", 2, "grad_norm")
    wrong = refused(server, "file", b"epoch,loss\n1,2\n", **kind)
    assert "such as grad_norm, and preferably a column such as step" in wrong
    assert "its columns are ['epoch', 'loss']" in wrong
    assert "brackets are nested too deeply" in refused(server, "file", b"[" * 100_000, **kind)
    assert server.session.run(0, 0)["steps"] == 2


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (
            {"text": "Adam()"},
            "simulate supports only rules that clip norms, such as ZClip(), got Adam()",
        ),
        ({"text": "__import__('os').system('true')"}, "as in ZClip(max_norm=None), got"),
        ({"text": "ClipNorm(max_norm=2 * 3)"}, "ZClip(max_norm=None), got 2 * 3\n"),
        ({"text": "ClipNorm([-x, 1])"}, "ZClip(max_norm=None), got -x\n"),
        ({"text": "ClipNorm(-1.0)"}, "max_norm must be a number of at least 0, got -1.0"),
        ({"text": "TrustRatio()"}, ""),
        ({}, "'text' must be a string of at most 10000 characters, got nothing"),
        ({**RULE, "path": ["max_norm"], "value": "x"}, "the value must be a number, got 'x'"),
        (
            {**RULE, "path": ["nothing"], "value": "1"},
            "got ['nothing']",
        ),
        ({**RULE, "path": ["__class__"], "value": "1"}, "got ['__class__']"),
        ({**RULE, "path": [["max_norm"]], "value": "1"}, "names and integers, got a list"),
    ],
)
def test_a_wrong_question_gets_a_sentence(server: LabServer, question, sentence: str) -> None:
    if sentence:
        assert sentence in refused(server, "rule", question)


def test_what_a_rule_asks_in_vain_is_said_instead_of_an_answer(server: LabServer) -> None:
    question = {"text": "TrustRatio()", "version": 1}
    sentence = "rules that read group['params'] are not supported"
    assert sentence in refused(server, "simulate", question)


@pytest.mark.parametrize(
    "path",
    [
        "/", "/index.html", "/../../etc/passwd", "BASE../../etc/passwd", "BASE..%2f..%2fetc/passwd",
        "BASE/", "BASE?x", "BASE#x", "BASErun.csv", "BASEpage.js", "BASE%2e%2e/", "/run", "BASErun",
        "http://127.0.0.1BASE",
    ],
)  # fmt: skip
def test_no_other_path_is_served(server: LabServer, path: str) -> None:
    given = path.replace("BASE", server.base)
    assert raw(server, f"GET {given} HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())[
        9:12
    ] == (b"404")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE", "X"])
def test_no_other_method_is_served(server: LabServer, method: str) -> None:
    assert ask(server, method, server.base)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1", "[::1]:PORT", ""]
)
def test_no_other_host_is_served(server: LabServer, host: str) -> None:
    """A page elsewhere may have its name lead to this machine."""
    given = host.replace("PORT", str(server.port))
    assert ask(server, "GET", server.base, Host=given)[0] == 403
    assert raw(server, f"GET {server.base} HTTP/1.0\r\n\r\n".encode())[9:12] == b"403"


def test_two_hosts_are_none(server: LabServer) -> None:
    own = f"Host: 127.0.0.1:{server.port}\r\n"
    request = f"GET {server.base} HTTP/1.0\r\n{own}Host: evil.example\r\n\r\n"
    assert raw(server, request.encode())[9:12] == b"403"


def test_no_other_page_may_ask(server: LabServer) -> None:
    path = f"{server.base}run"
    assert ask(server, "POST", path, {}, Origin="http://evil.example")[0] == 403
    assert ask(server, "POST", path, {}, Origin="null")[0] == 403
    assert ask(server, "POST", path, {}, Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    assert ask(server, "POST", path, "{}", Content_Type="text/plain")[0] == 415


@pytest.mark.parametrize(
    ("length", "code"),
    [(str(2**24 + 1), 413), ("9" * 5000, 413), ("-1", 411), ("x", 411), ("", 411), ("１", 411)],
)
def test_a_body_has_a_bounded_length(server: LabServer, length: str, code: int) -> None:
    head = (
        f"POST {server.base}run HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    assert int(raw(server, head.encode())[9:12]) == code


def test_a_body_in_chunks_is_refused(server: LabServer) -> None:
    head = {"Transfer_Encoding": "chunked", "Content_Length": "2"}
    status, _, _ = ask(server, "POST", f"{server.base}run", {}, **head)
    assert status == 411


@pytest.mark.parametrize(
    "body",
    ["[1]", "{", "3", "", "\0", "null", "NaN", "9" * 5000, "[" * 60_000, '{"a":' * 60_000,
     '{"from": ' + "9" * 5000 + "}", '{"from": ' + "[" * 500 + "]" * 500 + "}", b"\xff"],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_question_gets_a_sentence(server: LabServer, body: str | bytes) -> None:
    told = refused(server, "run", body, Content_Type="application/json")
    assert "the body of a request must be a JSON object" in told or told.startswith(
        "'from' must be an integer from 0"
    )


ANYTHING = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "5e-324", "1.5", "-1", "0", "7",
    "-1000000000000", str(2**53 + 1), str(-(2**70)), "9" * 4000, "null", "true", '"x"', '""',
    '"1e999"', '"nan"', '"\\ud800"', '"\\u0000"', f'"{"x" * 20_000}"', "{}", '{"x": [1]}', "[]",
    "[[]]", "[{}]", "[null]", "[true]", '["x"]', "[0, 7]", "[-1000000000000]", "[1e999]",
    "[9007199254740993]", '["max_norm", 7]',
]  # fmt: skip
FIELDS = {
    "run": {"from": "0", "version": "1"},
    "rule": {"text": '"ClipNorm(2.0)"', "path": '["max_norm"]', "value": '"3.0"'},
    "simulate": {
        "text": '"ZClip()"', "path": '["z_thresh"]', "from": "0", "version": "1", "bad": "[3]"
    },
    "choose": {"run": '"language_trouble"', "column": '"norm/0"'},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "field"), [(n, f) for n, fields in FIELDS.items() for f in fields]
)
@pytest.mark.parametrize(
    "values", some([[None, *ANYTHING[::2]], ANYTHING[1::2]], one_in=2), ids=["half", "others"]
)
def test_whatever_a_field_says_there_is_an_answer(
    server: LabServer, name: str, field: str, values: list[Any]
) -> None:
    """All that it says is there, or a sentence: never a connection that ends without either."""
    for given in values:
        fields = {**FIELDS[name], field: given}
        said = [f'"{key}": {value}' for key, value in fields.items() if value is not None]
        body = f"{{{', '.join(said)}}}"
        status, _, told = ask(
            server, "POST", f"{server.base}{name}", body, Content_Type="application/json"
        )
        lines = told.decode().splitlines()
        assert status in (200, 400), (given, told)
        if status == 400:
            assert len(lines[0]) > 10, given
            assert "<" not in lines[0], (given, lines)
        elif name == "simulate":
            assert json.loads(lines[-1]) == {"end": True}, given
        else:
            assert isinstance(json.loads(told), dict), given


@pytest.mark.parametrize(
    ("name", "question", "sentence"),
    [
        (
            "run",
            '{"from": 1e999}',
            "'from' must be an integer from 0 to 9007199254740992, got Inf",
        ),
        (
            "simulate",
            '{"text": "ZClip()", "version": 1, "bad": [-1000000000000]}',
            "'bad' must be a list",
        ),
    ],
)
def test_numbers_that_count_nothing_are_refused(server, name, question, sentence) -> None:
    assert sentence in refused(server, name, question, Content_Type="application/json")


def test_what_fails_on_the_way_ends_in_a_sentence(server: LabServer, monkeypatch) -> None:
    """Also where nobody foresaw it, before the first line and after it."""
    question = {**RULE, "version": server.session.version}

    def lost(*_: object) -> Iterator[dict[str, Any]]:
        yield {"steps": 1}
        raise KeyError("lost")

    monkeypatch.setattr(server.session, "simulate", lost)
    _, _, told = ask(server, "POST", f"{server.base}simulate", question)
    assert json.loads(told.splitlines()[-1]) == {"error": "an error in the lab: KeyError: 'lost'"}
    monkeypatch.setattr(server.session, "rule", lambda *_: {}["lost"])
    status, _, told = ask(server, "POST", f"{server.base}rule", RULE)
    assert (status, told) == (500, b"an error in the lab: KeyError: 'lost'\n")


def test_who_still_sends_gets_the_answer(server: LabServer) -> None:
    """A file that is too large is refused before it has arrived."""
    head = (
        f"POST {server.base}file HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {2**29}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode())
        for _ in range(100):
            connection.sendall(b"1" * 2**16)
        told = connection.makefile("rb").read()
    assert told[9:12] == b"413"
    assert b"at most 268435456 bytes" in told


def test_what_is_no_request_gets_a_status(server: LabServer) -> None:
    for request in (b"\x16\x03\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/x\r\n\r\n"):
        assert raw(server, request)[9:12] == b"400"


def test_two_hundred_requests_at_once_are_all_answered(tmp_path: Path) -> None:
    server = LabServer(LabSession(a_file(tmp_path, norms(30))))
    with contextlib.ExitStack() as stack:
        stack.callback(server.server_close)
        waiting = []
        for _ in range(200):  # before the first of them is taken
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=3)
            stack.enter_context(connection)
            connection.settimeout(60)
            page = f"GET {server.base} HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
            connection.sendall(page.encode())
            waiting.append(connection)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(server.shutdown)
        answers = [connection.makefile("rb").read() for connection in waiting]
    assert {answer[9:12] for answer in answers} == {b"200"}


def test_a_client_that_goes_away_ends_nothing(server: LabServer) -> None:
    head = f"POST {server.base}run HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
    assert ask(server, "GET", server.base)[0] == 200


@pytest.mark.parametrize("window", [2**24 + 1, 10**12, 10**30])
def test_a_rule_that_remembers_too_much_gets_a_sentence(
    server: LabServer, window: int, monkeypatch
) -> None:
    question = {"text": f"AutoClip('percentile', window_size={window})", "version": 1}
    told = refused(server, "simulate", question)
    most = f"window_size of AutoClip must be at most 16777216, got {window}\n"
    assert told == most if window < 2**63 else "which is too large" in told
    question["text"] = f"AdaptiveClip(Quantile(0.9, window={window}))"
    told = refused(server, "rule", question)
    assert ("window of Quantile must be" if window < 2**63 else "which is too large") in told
    monkeypatch.setattr(simulations, "NUMBERS_REMEMBERED", 1000)
    question["text"] = "AutoClip('percentile', window_size=998)"
    assert "store 1,001 numbers for this run, but the limit of the lab is 1,000" in refused(
        server, "simulate", question
    )


def test_a_page_that_asks_no_more_ends_the_walk(tmp_path: Path, monkeypatch) -> None:
    """It goes on where it was when it is asked for again."""
    monkeypatch.setattr(simulations, "PART_STEPS", 10)
    session = LabSession(a_file(tmp_path, norms(3_000)))
    server = LabServer(session)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    question = json.dumps({"text": "ZClip(max_norm=None)", "version": session.version})
    head = (
        f"POST {server.base}simulate HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(question)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall((head + question).encode())
        connection.recv(100)
    (walk,) = session._walks.values()
    trace, before = session._trace(), -1
    while before != (before := walk.ahead(trace)):
        time.sleep(0.2)
    assert before > 0
    server.shutdown()
    server.server_close()
    thread.join(10)
    again = [*session.simulate("ZClip(max_norm=None)", (), 0, session.version, ())]
    assert (walk.ahead(trace), again[-2]["steps"]) == (0, 3_000)


def test_what_begins_goes_before_what_goes_on() -> None:
    beginning, waited = Beginning(), threading.Event()
    beginning.wait()
    with beginning, beginning:
        thread = threading.Thread(target=lambda: (beginning.wait(), waited.set()))
        thread.start()
        assert not waited.wait(0.1)
    assert waited.wait(10)
    thread.join(10)


# ------------------------------------------------------------------ the end


def events(server: LabServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"GET {server.base}events HTTP/1.0\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    connection.sendall(head.encode())
    told = b""
    while b"data: " not in told:
        told += connection.recv(4096)
    assert b'"steps": 30' in told
    return connection


def test_closing_the_last_page_ends_the_program(server: LabServer, monkeypatch) -> None:
    monkeypatch.setattr(serving, "FOLLOWING_SECONDS", 0.01)
    ended = threading.Event()
    monkeypatch.setattr(server, "shutdown", ended.set)
    first, second = events(server), events(server)
    first.close()
    assert not ended.wait(0.4)
    second.close()
    assert ended.wait(10)


def test_loading_the_page_again_does_not(server: LabServer, monkeypatch) -> None:
    monkeypatch.setattr(serving, "FOLLOWING_SECONDS", 0.01)
    server.grace = 0.5
    ended = threading.Event()
    monkeypatch.setattr(server, "shutdown", ended.set)
    events(server).close()
    again = events(server)
    assert not ended.wait(0.7)
    server.grace = 0.1
    again.close()
    assert ended.wait(10)


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["nowhere.csv"], "No such file"),
        (
            ["other.csv"],
            "preferably a column such as step, but its columns are ['epoch', 'loss']",
        ),
        (["run.csv", "--norms", "x"], "has no column 'x'; its columns are ['step', 'norm/0']"),
        (["--follow"], "--follow requires a file"),
        (["run.csv", "--port", "99999"], "port must be 0-65535"),
    ],
)
def test_the_command_says_what_it_wants(given, sentence, tmp_path, capsys, monkeypatch) -> None:
    a_file(tmp_path, norms(5))
    (tmp_path / "other.csv").write_text("epoch,loss\n1,2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["lab", *given])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_command_prints_an_address_and_ends_with_the_page(
    tmp_path, capsys, monkeypatch
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    monkeypatch.setattr(LabServer, "serve_forever", lambda *_, **__: None)
    main(["lab", str(a_file(tmp_path, norms(5)))])
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("The lab is running at http://127.0.0.1:")
    assert last == "The lab has stopped."
    assert opened == [first.removeprefix("The lab is running at ")]


def test_where_there_are_no_windows_no_browser_takes_the_terminal(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("it was opened"))
    monkeypatch.setattr(LabServer, "serve_forever", lambda *_, **__: None)
    main(["lab", str(a_file(tmp_path, norms(5)))])
    assert "Open this address in a browser on this machine." in capsys.readouterr().out
