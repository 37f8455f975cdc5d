"""The lab in Chromium: what a reader sees and does, at a desk, on a phone and without a mouse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.browser import Browser, until
from tests.study.lab.test_session import a_file, norms
from torchzero_clip import Trace, ZClip, simulate
from torchzero_clip.study.lab import session, simulations
from torchzero_clip.study.lab.server import LabServer
from torchzero_clip.study.lab.session import LabSession

pytestmark = pytest.mark.browser
READY = "cards.length >= 1 && cards.every((card) => card.have === run.steps && card.summary)"
CONTRAST = """(() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (a, b) => {
    const [most, least] = [light(a), light(b)].sort((x, y) => y - x);
    return (most + 0.05) / (least + 0.05);
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    const style = getComputedStyle(one);
    const drawn = one.namespaceURI.endsWith("svg");
    if (drawn && one.matches("path.norm, path.limit, path.mark")) {
      const colour = one.matches(".mark") ? style.fill : style.stroke;
      if (ratio(colour, behind(one)) < 3) poor.push(`${one.className.baseVal} ${colour}`);
    } else if ([...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) {
      if (!one.getClientRects().length) continue;
      const colour = drawn ? style.fill : style.color;
      if (ratio(colour, behind(one)) < 4.5)
        poor.push(`${one.tagName} ${colour} ${one.textContent}`);
    }
  }
  return poor;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture
def lab(browser: Browser, tmp_path: Path) -> Iterator[LabServer]:
    """A run of 2,500 steps, and its page."""
    server = LabServer(LabSession(a_file(tmp_path, norms(2500))), grace=60)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    browser.resize(1200, 900)
    browser.events.clear()
    browser.open(server.url)
    browser.wait("typeof cards !== 'undefined'")
    browser.wait(f"cards.length === 3 && {READY}")
    yield server
    refused = "the server responded with a status of 400"  # the page has the sentence
    assert [error for error in browser.errors() if refused not in error] == []
    browser.open("about:blank")
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_drag_is_answered_by_simulate(browser: Browser, lab: LabServer) -> None:
    before = browser.value("cards[0].summary.clipped")
    browser.value("""(() => {
        const { range } = cards[0].controls[0];
        range.value = 10;
        range.dispatchEvent(new Event("input", { bubbles: true }));
    })()""")
    browser.wait(f"!cards[0].busy && {READY}")
    text, share = browser.value("[cards[0].text, cards[0].summary.clipped]")
    trace = lab.session.trace
    assert trace is not None
    limit = float(re.findall(r"max_norm=([\d.]+)", text)[0])
    assert share == pytest.approx((trace.total > limit).double().mean().item())
    assert share > before
    assert browser.value("document.querySelector('#results tbody').textContent").startswith(
        f"1: {text}"
    )


def test_a_rule_with_memory_is_shown_before_all_of_it_is_known(
    browser: Browser, lab: LabServer
) -> None:
    seen = browser.value("""(async () => {
        const seen = [], known = results;
        results = () => { seen.push(cards[1].have); known(); };
        await change(cards[1], { text: "ZClip(alpha=0.9, max_norm=None)" });
        return seen;
    })()""")
    assert seen[0] == 1000
    browser.wait(READY)


def test_a_long_run_has_a_preview_can_be_stopped_and_goes_on(
    browser: Browser, lab: LabServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, go = threading.Event(), simulations.Walk._simulate_part

    def slowly(walk: simulations.Walk, trace: Trace) -> None:
        if len(trace) > 1000 and walk._ends[-1]:
            gate.wait(30)
        go(walk, trace)

    monkeypatch.setattr(session, "LONG_WALK", 1000)
    monkeypatch.setattr(simulations.Walk, "_simulate_part", slowly)
    browser.value("change(cards[1], { text: 'ZClip(alpha=0.9, max_norm=None)' }) && 0")
    browser.wait("cards[1].preview && cards[1].have === 1000")
    shown = browser.value("cards[1].shown.textContent")
    assert re.match(
        r"clips about [\d.]+ % of the steps, estimated from one row in 3, complete in", shown
    )
    assert browser.value("cards[1].left.filter((x) => x >= 0).length") > 1400
    assert browser.value("cards[1].halt.getAttribute('aria-label')") == "Stop with rule 2"
    browser.value("cards[1].halt.click()")
    assert "stopped after 1,000" in browser.value("cards[1].shown.textContent")
    gate.set()
    browser.value("toggle(5)")
    browser.wait("cards[0].summary.missed !== null")
    assert browser.value("[cards[1].have, cards[1].stopped, cards[1].halt.textContent]") == [
        1000, True, "Continue"
    ]  # fmt: skip
    browser.value("cards[1].halt.click()")
    browser.wait(READY)
    done = simulate(lab.session.trace, ZClip(alpha=0.9, max_norm=None))
    assert browser.value("cards[1].summary.clipped") == done.clipped.double().mean().item()
    assert browser.value("Array.from(cards[1].left)") == done.left[:, 0].tolist()
    assert browser.value("[cards[1].preview, cards[1].halt.hidden]") == [None, True]


def test_infinite_and_huge_norms_are_shown_as_they_are(browser: Browser, lab: LabServer) -> None:
    lines = ["step,grad_norm", "1,1", "2,1e300", "3,inf", "4,nan", "5,1.5e-7", "6,123456"]
    lab.session.take("\n".join([*lines, ""]).encode(), "huge.csv")
    browser.wait(f"run.steps === 6 && {READY}")
    cells = browser.value(
        "[...$('largest').tBodies[0].rows].map((row) => row.cells[2].textContent)"
    )
    assert cells == ["infinite", "1e300", "1.23e5", "1", "1.5e-7"]
    assert "the largest is 1e300. 2 are infinite or NaN." in browser.value("$('facts').textContent")
    browser.value("change(cards[0], { text: \"ClipNorm(float('inf'), dim='global')\" }) && 0")
    browser.wait(f"cards[0].text.includes('inf') && !cards[0].busy && {READY}")
    assert browser.value("$('results').tBodies[0].rows[0].cells[2].textContent") == "infinite"


def test_a_step_is_marked_by_a_click_and_by_a_box(browser: Browser, lab: LabServer) -> None:
    browser.value("scrollTo(0, 0)")
    assert browser.value("cards[0].summary.missed") is None
    box = browser.value(
        "(({ left, top, width }) => [left, top, width])($('picture').getBoundingClientRect())"
    )
    browser.click(box[0] + box[2] / 2, box[1] + 80)
    browser.wait(f"run.bad.size === 1 && cards[0].summary.missed !== null && {READY}")
    browser.value("document.querySelector('#largest input:not(:checked)').click()")
    browser.wait("run.bad.size === 2")
    assert len(browser.value("$('bad').value").split(", ")) == 2
    browser.value("$('bad').value = '10-12'; $('bad').dispatchEvent(new Event('change'))")
    browser.wait("run.bad.size === 3")


def test_all_can_be_reached_and_moved_by_the_keyboard(browser: Browser, lab: LabServer) -> None:
    browser.value("document.activeElement.blur(); scrollTo(0, 0)")
    wanted = browser.value(
        "[...document.querySelectorAll('input, select, button')]"
        ".filter((one) => one.getClientRects().length).length"
    )
    seen = set()
    for _ in range(wanted + 5):
        browser.key("Tab")
        told = browser.value("""(() => {
            const one = document.activeElement;
            if (one === document.body) return null;
            window.places = window.places || new Map();
            if (!places.has(one)) places.set(one, places.size);
            const box = one.getBoundingClientRect(), stage = $("stage").getBoundingClientRect();
            const covered = !stage.height || $("stage").contains(one) ? false
              : box.bottom < stage.bottom && box.top > stage.top && scrollY > 0;
            return [places.get(one), covered, getComputedStyle(one).outlineStyle];
        })()""")
        if told is not None:
            seen.add(told[0])
            assert not told[1]
            assert told[2] != "none"
    assert len(seen) == wanted
    before = browser.value("cards[1].controls[1].range.focus(); cards[1].sliders[1].value")
    before = browser.value("cards[1].sliders[1].value")
    browser.key("ArrowRight")
    browser.wait(f"cards[1].sliders[1].value !== {before!r} && !cards[1].busy")
    assert browser.value(
        "cards[1].controls[1].range.getAttribute('aria-valuetext')"
    ) == browser.value("cards[1].sliders[1].value")
    assert browser.value("document.activeElement === cards[1].controls[1].range")


def test_everything_has_a_name_and_the_picture_tells_what_it_shows(
    browser: Browser, lab: LabServer
) -> None:
    tree = browser.ask("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "slider", "textbox", "combobox", "checkbox", "table", "image", "main"}
    nameless = [
        node["role"]["value"]
        for node in tree
        if node.get("role", {}).get("value") in roles - {"main", "table"}
        and not node.get("ignored")
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    there = {node.get("role", {}).get("value") for node in tree}
    assert roles <= there
    browser.wait("$('said').textContent.includes('of the steps')")
    assert browser.value("$('said').textContent").startswith("The norms of 2500 steps")


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_lines_stand_out(browser: Browser, lab: LabServer, dark: bool) -> None:
    browser.dark(dark)
    try:
        browser.value("toggle(5)")
        browser.wait(READY)
        assert browser.value(CONTRAST) == []
    finally:
        browser.dark(False)


def test_a_phone_scrolls_downwards_alone(browser: Browser, lab: LabServer) -> None:
    browser.resize(360, 780)
    browser.wait("$('picture').clientWidth < 360")
    assert browser.value("document.documentElement.scrollWidth <= 360")
    small = browser.value(
        "[...document.querySelectorAll('input, select, button')].filter((one) => {"
        "const { height } = one.getBoundingClientRect();"
        "return height && height < 24 && one.type !== 'range';"
        "}).length"
    )
    assert small == 0


def test_what_is_copied_is_the_chain(browser: Browser, lab: LabServer) -> None:
    browser.ask(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    browser.value("document.querySelector('.card button.main').click()")
    browser.wait("cards[0].copied.textContent !== ''")
    assert (
        browser.value("cards[0].code.textContent")
        .splitlines()[1]
        .startswith("attach(optimizer, ClipNorm(")
    )
    assert browser.value("cards[0].copied.textContent") in (
        "copied",
        "selected: copy it with Ctrl+C",
    )


def test_a_wrong_rule_and_a_wrong_file_get_a_sentence(browser: Browser, lab: LabServer) -> None:
    browser.value(
        "cards[0].input.value = 'ClipNrm(1.0)'; cards[0].input.dispatchEvent(new Event('change'))"
    )
    browser.wait("!cards[0].wrong.hidden")
    assert "ClipNorm" in browser.value("cards[0].wrong.textContent")
    browser.value("send(new File(['epoch,loss\\n1,2\\n'], 'x.csv'))")
    browser.wait("!$('alert').hidden")
    assert "['epoch', 'loss']" in browser.value("$('alert').textContent")
    browser.value("send(new File(['['.repeat(100000)], 'x.json'))")
    browser.wait("$('alert').textContent.includes('brackets are nested too deeply')")
    browser.value("send(new File(['step,grad_norm\\n1,2\\n2,3\\n'], 'y.csv'))")
    browser.wait("$('title').textContent === 'y.csv' && run.steps === 2 && $('alert').hidden")
    browser.wait(READY)


def test_a_run_on_its_way_is_followed_and_closing_the_page_ends_the_program(tmp_path: Path) -> None:
    made = norms(300)
    path = a_file(tmp_path, made[:100])
    command = ["-m", "torchzero_clip", "lab", "--follow", str(path), "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        url = program.stdout.readline().split()[-1]
        with Browser() as browser:
            browser.open(url)
            browser.wait("typeof cards !== 'undefined'")
            browser.wait(f"run.steps === 100 && cards.length === 3 && {READY}")
            browser.value("window.kept = cards[1]")
            a_file(tmp_path, made)
            browser.wait(f"run.steps === 300 && {READY} && cards[1] === kept && view.to === 300")
            browser.close()
            until(lambda: program.poll() is not None, 20, "the program has ended")
        assert program.returncode == 0
        assert program.stdout.read().endswith("The lab has stopped.\n")
