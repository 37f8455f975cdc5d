"""python -m torchzero_clip: what it prints, and what it says of a name it does not know."""

from __future__ import annotations

import inspect
import io
import os
import runpy
import sys

import pytest
import torch

import torchzero_clip
from tests.helpers import at_once
from torchzero_clip.__main__ import COMMANDS, main
from torchzero_clip.core import Description
from torchzero_clip.core.formula import formula_of
from torchzero_clip.published import NAMES, links_of

BASES = {"AdaptiveRule", "Chain", "Criterion", "NormRule", "TensorwiseTransform", "Transform"}
RULES = {
    name
    for name in torchzero_clip.__all__
    if inspect.isclass(value := getattr(torchzero_clip, name)) and issubclass(value, Description)
} - BASES


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code, *capsys.readouterr()


def blocks(text: str) -> dict[str, list[str]]:
    """The lines under each heading."""
    parts = [part.splitlines() for part in text.split("\n\n")]
    return {lines[0]: lines[1:] for lines in parts[1:-1]}


def test_it_begins_with_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = dict(line.split(maxsplit=1) for line in printed(capsys).split("\n\n")[0].splitlines())
    assert rows["torchzero_clip"] == torchzero_clip.__version__
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["torch"] == torch.__version__
    assert rows["cpu"] == f"{torch.get_num_threads()} threads"
    extra = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert len(rows) == 4 + extra


def test_every_rule_stands_under_its_folder_with_its_formula(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    for heading, lines in blocks(printed(capsys)).items():
        text = "\n".join(lines)
        for name in RULES:
            if f"\n  {name} " in f"\n{text}":
                found[name] = heading
                formula = formula_of(getattr(torchzero_clip, name))
                rest = f"\n{text}".split(f"\n  {name} ")[1]
                assert "".join(rest.split()).startswith("".join(formula.split()))
    assert set(found) == RULES
    for name, heading in found.items():
        kind = getattr(torchzero_clip, name)
        criterion = issubclass(kind, torchzero_clip.Criterion)
        folder = kind.__module__.split(".")[2].capitalize()
        assert heading == ("Criteria, for AdaptiveClip" if criterion else folder)


def test_columns_are_aligned_and_lines_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert max(map(len, text.splitlines())) <= 100
    for lines in blocks(text).values():
        names = [line.split()[0] for line in lines if not line.startswith("   ")]
        column = 2 + max(map(len, names)) + 2
        for line in lines:
            assert line[column - 2 : column] == "  "
            assert line[column] != " "


@pytest.mark.parametrize("name", ["ClipNorm", "ZClip", "Quantile", "clip_grad_norm_", "schedule"])
def test_a_name_gets_its_signature_arguments_and_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, name)
    value = getattr(torchzero_clip, name)
    assert text.startswith(f"{name}(")
    head = text.split("\n\n")[0]
    for parameter in inspect.signature(value).parameters.values():
        assert parameter.name in head
    assert (inspect.getdoc(value) or "") in text
    assert "Args:" in text
    assert ">>> " in text
    for live in getattr(value, "live", ()):
        assert live in head.split("live hyperparameters, stored in param_groups: ")[1]


@at_once("name", torchzero_clip.__all__)
def test_every_public_class_and_function_can_be_asked_for(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = getattr(torchzero_clip, name)
    if name not in COMMANDS and (inspect.isclass(value) or inspect.isfunction(value)):
        head = printed(capsys, name).split("\n\n")[0]
        assert max(map(len, head.splitlines())) <= 100
    else:  # an alias or a module: nothing to call; and a command asks for its file
        assert ended(capsys, name)[0] == 2


@pytest.mark.parametrize(
    ("given", "meant"), [("clipnrm", "ClipNorm"), ("Adamm", "Adam"), ("clip_grad", "clip_grad")]
)
def test_an_unknown_name_gets_the_nearest(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended(capsys, given)
    assert (code, out) == (2, "")
    assert f"unknown name {given!r}: did you mean '{meant}" in err


@pytest.mark.parametrize(
    ("given", "meant"), [("zclip", "ZClip"), ("CLIPNORM", "ClipNorm"), ("AdamW", "adamw")]
)
def test_a_name_is_known_in_any_case(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, given) == printed(capsys, meant)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, "--version")[:2] == (0, f"{torchzero_clip.__version__}\n")
    code, out, _ = ended(capsys, "--help")
    assert code == 0
    assert "python -m torchzero_clip" in out


def test_it_runs_as_a_module_where_the_terminal_knows_ascii_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["torchzero_clip", "Scale"])
    monkeypatch.delitem(sys.modules, "torchzero_clip.__main__")  # or runpy warns
    runpy.run_module("torchzero_clip", run_name="__main__")
    sys.stdout.flush()
    text = printed.getvalue().decode("ascii")
    assert text.startswith("Scale(factor")
    assert "u ? factor ? u" in text


def test_it_ends_without_a_traceback_if_the_reader_of_a_pipe_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["torchzero_clip", "ZClip"])
        monkeypatch.delitem(sys.modules, "torchzero_clip.__main__")  # or runpy warns
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("torchzero_clip", run_name="__main__")
    assert ended.value.code == 1


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_published_name_gets_its_chain_link_by_link_and_its_reference(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, name)
    assert text.startswith(f"{name}(lr=")
    for link, formula in links_of(NAMES[name]()):
        (below,) = text.split(f"\n  {link!r}")[
            1:
        ]  # beside it, or where it is long on the next line
        assert formula.split()[0] in "".join(below.splitlines()[:2])
    reference = (inspect.getdoc(NAMES[name]) or "").split("Reference:\n")[1]
    assert reference.strip() in text
    assert f'named("{name}")' in text


def test_names_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).split("Published optimizers, for named(...)\n")[1].splitlines()
    assert {line.split()[0] for line in lines[: lines.index("")] if line[2] != " "} == set(NAMES)


def test_a_misspelt_published_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'lars'" in ended(capsys, "larz")[2]
