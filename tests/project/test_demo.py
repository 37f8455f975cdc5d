"""The demo: a race that comes out the same again, a table, a report, and sentences for mistakes."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torchzero_clip import Chain, ClipNorm

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAM = "Adam(), LR(5e-3)"
ONE = "ClipNorm(1.0, dim='global'), Adam(), LR(5e-3)"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """examples/demo.py as the script sees it, with its folder in front of the path."""
    threads = torch.get_num_threads()
    sys.path.insert(0, str(EXAMPLES))
    try:
        import demo

        yield demo
    finally:
        sys.path.remove(str(EXAMPLES))
        torch.set_num_threads(threads)


@pytest.fixture
def run(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    """The race alone, without the report."""
    monkeypatch.setattr(demo, "save", lambda *_: [])
    return lambda *given: demo.main(["--out", str(tmp_path), *given])


@pytest.fixture
def early(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble comes after twenty steps, and more often, so that a short race has some."""
    monkeypatch.setattr("race.data.CLEAN", 20)
    monkeypatch.setattr("race.training.CLEAN", 20)
    monkeypatch.setattr("race.data.CORRUPTED", 0.1)


def outcome(result: Any) -> Any:
    """All of a result but its times, as text that tells every bit."""
    return repr({k: v for k, v in vars(result).items() if k not in ("ms", "ms_in_step")})


# ------------------------------------------------------------------ the race


@pytest.mark.slow
def test_two_races_of_a_seed_are_the_same_bit_for_bit_and_another_seed_is_not(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("race.data.CLEAN", 2)  # trouble in a short race, too
    monkeypatch.setattr("race.data.CORRUPTED", 0.3)
    first, again, other = (run("--steps", "12", "--seed", seed) for seed in "001")
    assert len(first) == 6
    assert first[0].corrupted
    assert [*map(outcome, first)] == [*map(outcome, again)]
    assert all(one.norm != two.norm for one, two in zip(first, other, strict=True))


@pytest.mark.slow
def test_all_chains_begin_with_the_same_weights_and_see_the_same_batches(
    run: Callable[..., list[Any]],
) -> None:
    chains = [f"one = {ONE}", f"other = {ADAM}", f"two = {ONE}"]
    one, other, two = run("--steps", "8", "--chains", *chains)
    assert one.test_losses == two.test_losses
    assert one.norm == two.norm
    assert one.test_losses[0] == other.test_losses[0] != other.final_loss
    assert one.norm[0] == pytest.approx(other.norm[0], rel=1e-6)  # of the rule, and of torch


@pytest.mark.slow
@pytest.mark.usefixtures("early")
def test_clipping_saves_the_run_from_corrupted_batches(run: Callable[..., list[Any]]) -> None:
    """With the trouble of the default seed; the margin is wide."""
    plain, clipped = run("--steps", "50", "--chains", f"none = {ADAM}", f"clipped = {ONE}")
    assert plain.corrupted == clipped.corrupted != []
    assert not plain.survived
    assert clipped.survived
    assert clipped.worst_spike < plain.worst_spike / 2
    assert plain.steps_clipped == 0
    assert all(clipped.share[step - 1] == 1 for step in clipped.corrupted)


def test_corrupted_batches_are_noise_with_a_loss_too_large_and_never_at_the_start(
    demo: ModuleType,
) -> None:
    from race.data import CLEAN, CORRUPTED, Data

    data = Data(torch.device("cpu"), seed=0)
    text = data.decode(data.train[:, 0]) + data.decode(data.train[-1, 1:])
    batches = {step: data.batch(step) for step in range(1, 3001)}
    bad = [step for step, batch in batches.items() if batch.corrupted]
    assert min(bad) > CLEAN
    assert abs(len(bad) / (3000 - CLEAN) - CORRUPTED) < 0.015  # four standard deviations
    for step, batch in batches.items():
        assert batch.scale == 1 if step not in bad else 10 <= batch.scale <= 1000
        assert (data.decode(batch.windows[0]) in text) == (step not in bad)


def test_a_skipped_step_counts_as_clipped(run: Callable[..., list[Any]]) -> None:
    (result,) = run("--steps", "5", "--chains", "SkipLarge(0.0), LR(0.1)")
    assert result.steps_clipped == 5
    assert set(result.test_losses.values()) == {result.test_losses[0]}


@pytest.mark.slow
@pytest.mark.usefixtures("early")
def test_a_run_that_dies_says_so(
    run: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = run("--steps", "25", "--chains", "LR(1e9)")
    assert math.isnan(result.final_loss)
    assert not result.survived
    assert result.worst_spike == math.inf
    assert "diverged" in capsys.readouterr().out


# ------------------------------------------------------------------ what is made of a curve


@pytest.fixture
def curve(demo: ModuleType) -> Any:
    """A result with these losses at steps 0, 50, 60, 70, …"""
    from race.training import Result

    def make(start: float, *losses: float) -> Result:
        tested = {0: start, **{50 + 10 * i: loss for i, loss in enumerate(losses)}}
        blank = {"norm": [], "limit": [], "share": [], "corrupted": [], "clips": False}
        return Result("", Chain(ClipNorm(1.0)), tested, **blank, ms=0, ms_in_step=0, writes="")

    return make


def test_the_worst_spike_is_the_largest_rise_above_the_best_before(curve: Any) -> None:
    assert curve(3.0, 2.0, 1.0, 1.5, 0.5, 0.9).worst_spike == pytest.approx(0.5)
    assert curve(3.0, 2.0, 1.0, 0.5).worst_spike == 0
    assert curve(1.0, 9.0, 1.0).worst_spike == 0  # before the trouble began


def test_recovery_is_the_longest_time_above_the_best(curve: Any) -> None:
    assert curve(3.0, 2.0, 1.0, 1.5, 1.2, 1.05, 1.3, 1.0).recovery == (20, True)
    assert curve(3.0, 2.0, 1.0, 1.05, 1.0).recovery == (0, True)
    assert curve(3.0, 2.0, 1.0, 1.5, 1.0, 1.4, 1.4, 1.4).recovery == (20, False)
    assert curve(3.0, 2.0, 1.0, 1.5, 1.5, 1.5, 1.0, 1.4).recovery == (30, True)


def test_a_chain_is_lost_if_it_ends_above_the_loss_at_the_start_of_the_trouble(curve: Any) -> None:
    assert curve(3.0, 2.0, 5.0, 1.9).survived
    assert not curve(3.0, 2.0, 1.0, 2.1).survived
    assert not curve(3.0, 2.0, 1.0, math.nan).survived


# ------------------------------------------------------------------ the chains as text


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("ClipNorm(1.0, dim='global'), Adam(), LR(3e-3)",
         "Chain(ClipNorm(max_norm=1.0, dim='global'), Adam(), LR(lr=0.003))"),
        ("[Adam(betas=(0.9, 0.95)), LR(lr=1e-3)]", "Chain(Adam(betas=(0.9, 0.95)), LR(lr=0.001))"),
        ("Guard, Lion, LR(1e-3)", "Chain(Guard(), Lion(), LR(lr=0.001))"),
        ("AdaptiveClip(ZStat(z_thresh=3.0), warmup=None), LR(1)",
         "Chain(AdaptiveClip(criterion=ZStat(z_thresh=3.0), warmup=None), LR(lr=1))"),
        ("Chain(ClipNorm(1.0), Adam()), Scale(-1), Scale(-1.0), LR(1e-3)",
         "Chain(Chain(ClipNorm(max_norm=1.0), Adam()), Scale(factor=-1), Scale(factor=-1.0), "
         "LR(lr=0.001))"),
        ('["ZClip", {"type": "LR", "lr": 0.003}]', "Chain(ZClip(), LR(lr=0.003))"),
    ],
)  # fmt: skip
def test_a_chain_is_read_from_python_or_json(demo: ModuleType, text: str, chain: str) -> None:
    from race.chains import read_chains, spell

    (read,) = read_chains([text]).values()
    assert repr(read) == chain
    (again,) = read_chains([spell(read)]).values()
    assert repr(again) == chain


def test_chains_have_the_names_that_they_are_given(demo: ModuleType, tmp_path: Path) -> None:
    from race.chains import read_chains

    file = tmp_path / "chains.json"
    file.write_text(json.dumps({"from a file": ["Adam", {"type": "LR", "lr": 0.1}]}))
    chains = read_chains([f"gentle = {ONE}", ADAM, ADAM, str(file)])
    assert list(chains) == ["gentle", "Adam → LR", "Adam → LR'", "from a file"]
    file.write_text(json.dumps(chains["gentle"].to_config()))
    (alone,) = read_chains([str(file)]).values()
    assert repr(alone) == repr(chains["gentle"])


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "Lambda(print)",
        "Lambda({'function': 'os:getcwd'})",
        "LR(1 + 1)",
        "LR(*[1])",
        "LR(not 'a')",
        "LR(**{'lr': 1})",
        "LR([x for x in (1,)])",
        "a = b = LR(1)",
        "LR(1); LR(2)",
        "import os",
    ],
)
def test_text_is_never_run(demo: ModuleType, text: str) -> None:
    from race.chains import read_chains

    with pytest.raises(ValueError):
        read_chains([text])


# ------------------------------------------------------------------ what is shown and kept


@pytest.mark.slow
def test_it_ends_in_a_table(
    run: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    results = run("--steps", "3")
    intro, *_, end = capsys.readouterr().out.split("\n\n", 1)
    assert intro.startswith("3.3% of the batches after step 50 are corrupted")
    assert "ZClip(max_norm=None), Adam(), LR(lr=0.005)" in intro
    head, rule, *lines = end[end.index("chain ") :].splitlines()[:8]
    titles = ["chain", "final loss", "worst spike", "steps clipped", "steps to recover"]
    assert re.split(r" {3,}", head) == [*titles, "ms per step", "ms in opt.step()"]
    assert set(rule) == {"─"}
    for line, result in zip(lines, results, strict=True):
        assert line.startswith(result.name)
        assert f" {result.final_loss:.3f} " in line
        assert f" {result.steps_clipped} " in line


class Links(HTMLParser):
    """Everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.found.append(str(value))


@pytest.mark.slow
def test_the_report_is_one_file_that_tells_it_all(demo: ModuleType, tmp_path: Path) -> None:
    chains = [f"mine = {ONE}", "AdaGC(), Adam(), LR(5e-3)"]
    results = demo.main(
        ["--steps", "4", "--seed", "7", "--out", str(tmp_path), "--chains", *chains]
    )
    page = (tmp_path / "race.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "$" not in page
    assert "url(http" not in page
    for result in results:
        assert f"<td>{result.final_loss:.3f}</td>" in page
    for word in (torch.__version__, "batches is 7", "--steps 4", "prefers-color-scheme: dark"):
        assert word in page
    assert "ClipNorm(max_norm=1.0, dim=&#x27;global&#x27;), Adam(), LR(lr=0.005)" in page


@pytest.mark.slow
def test_names_from_a_file_cannot_break_the_page(demo: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "chains.json"
    file.write_text(json.dumps({"<script>$x_$</script>": ["Adam", {"type": "LR", "lr": 0.1}]}))
    demo.main(["--steps", "2", "--out", str(tmp_path), "--chains", str(file)])
    assert "<script" not in (tmp_path / "race.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_picture_is_the_same_for_the_same_race(demo: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    given = ["--steps", "4", "--chains", ONE, ADAM, "--out"]
    for name in ("one", "two"):
        demo.main([*given, str(tmp_path / name)])
    one, two = ((tmp_path / name / "race.png").read_bytes() for name in ("one", "two"))
    assert one[:8] == base64.b64decode("iVBORw0KGgo=")
    width, height = struct.unpack(">II", one[16:24])
    assert width > 1000
    assert height > 400
    assert one == two
    assert (tmp_path / "one" / "race.html").read_text(encoding="utf-8").count("<svg") == 2


def test_without_matplotlib_there_is_a_report_without_pictures(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "race.picture", raising=False)
    monkeypatch.delattr("race.picture", raising=False)
    demo.main(["--steps", "2", "--out", str(tmp_path), "--chains", ADAM])
    assert "No picture: install matplotlib with pip install" in capsys.readouterr().out
    assert not (tmp_path / "race.png").exists()
    page = (tmp_path / "race.html").read_text(encoding="utf-8")
    assert "<svg" not in page
    assert "because matplotlib is not installed" in page


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_the_bar_moves_in_place_in_a_terminal_and_is_lines_elsewhere(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stdout", out)
        run("--steps", "3", "--chains", ADAM, ONE)
        shown = out.getvalue()
        assert ("\x1b[3A" in shown) == out.isatty()
        assert "step 3 of 3, 0:00 left" in shown
        assert re.search(
            r"ClipNorm → Adam → LR +loss +\d\.\d+ +norm +\d\.\d+ +limit +1\.00$",
            shown,
            re.MULTILINE,
        )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--chains", "[Adam"], "a chain must be like ClipNorm(1.0, dim='global')"),
        (["--chains", "Adem()"], "unknown transform 'Adem': did you mean 'Adam'?"),
        (["--chains", "ClipNorm(max_nrom=1.0)"], "has no argument 'max_nrom': did you mean"),
        (["--chains", "ClipNorm(1.0, max_norm=1.0)"], "ClipNorm: pass each argument once"),
        (["--chains", "LR(1, 2, 3, 4, 5, 6, 7)"], "LR: too many positional arguments"),
        (["--chains", "LR(open('x'))"], "unknown transform 'open'"),
        (["--chains", "LR(1 + 1)"], "numbers and strings are allowed, got 1 + 1"),
        (
            ["--chains", '[{"type": "LR", "lr": -1.0}]'],
            "LR: lr must be a finite number of at least 0",
        ),
        (["--chains", "[]"], "a chain must have at least one rule, such as"),
        (["--chains", "Adam(), Guard()"], "Guard must be the first transform"),
        (["--chains", "nowhere.json"], "cannot read nowhere.json: No such file"),
        (["--chains", "nowhere/\0.json"], "--chains: "),
        (["--device", "abacus"], "--device: 'abacus' cannot be used here"),
        (["--out", __file__], "--out: cannot make the folder"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
)
def test_a_wrong_argument_gets_a_sentence(
    demo: ModuleType, given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(given)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_data_ship_with_the_project(demo: ModuleType) -> None:
    from race.data import TEXT

    assert 4_000 < TEXT.stat().st_size < 20_000


@pytest.mark.slow
def test_the_pages_show_the_race_of_all_chains_in_the_theme_of_the_reader(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    import demo_picture
    from race.chains import CHAINS
    from race.picture import COLOURS

    short = run("--steps", "4")
    page = demo_picture.page(short)
    assert "ms per step" not in page  # the times of another machine
    assert all(f"<h3>{name} <" in page for name in CHAINS)
    (tmp_path / "race.json").write_text(demo_picture.kept(short))
    for again, was in zip(demo_picture.read(tmp_path / "race.json"), short, strict=True):
        assert (again.name, again.chain, again.corrupted) == (was.name, was.chain, was.corrupted)
        assert again.norm == pytest.approx(was.norm, rel=1e-4, nan_ok=True)
    cards = dict(zip(CHAINS, page.split("<h3>")[1:], strict=True))
    of_tensors = {
        name for name, card in cards.items() if "all tensors' limits as one</text>" in card
    }
    assert of_tensors == {"ClipNorm, each tensor", "AdaGC"}  # 5.1 beside max_norm=1.0
    full = demo_picture.read()
    assert [result.name for result in full] == list(CHAINS)
    shown = (EXAMPLES.parent / "docs" / "assets" / "demo.svg").read_text()
    for drawn in (demo_picture.drawn(short), shown):
        body = drawn.partition("</style>")[2]
        for name, (light, dark) in COLOURS.items():
            for theme in ("prefers-color-scheme: dark", "slate"):
                assert f"--{name}: {dark};" in drawn.partition(theme)[2]
            assert light not in body
            assert dark not in body
        assert ">loss</text>" in drawn
        assert ">norm</text>" in drawn
    home = (EXAMPLES.parent / "docs" / "index.md").read_text()
    assert "](assets/demo.svg)" in home
    assert "`assets/race.html`" in home
    losses = re.findall(r"ends at ([\d.]+), with\s+ZClip at ([\d.]+)\.", shown)
    told = re.findall(r"ends at ([\d.]+), with\s+ZClip at ([\d.]+)\.", demo_picture.drawn(full))
    assert told == losses
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert losses != []
    assert "](docs/assets/demo.svg)" in readme
