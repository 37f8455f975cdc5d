"""A step knows no recorder, and goes through one loop."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from scripts import package_sizes
from tests.helpers import at_once
from torchzero_clip import LR, Clipper, Modular, Transform, release
from torchzero_clip.core.engine import Engine
from torchzero_clip.core.step import Step

CORE = [*package_sizes.files("core"), *package_sizes.files("modules")]
RECORDERS = {"Play", "Counted", "constants", "separable", "refuse", "asked", "is_recording"}
"""What a step once said to whoever did it again, and how that answered."""


def named(source: str) -> set[str]:
    """The names that code defines, and those of members; prose and texts have none."""
    nodes = list(ast.walk(ast.parse(source)))
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = {node.name for node in nodes if isinstance(node, kinds)}
    fields = [node for cls in nodes if isinstance(cls, ast.ClassDef) for node in cls.body]
    targets = [getattr(node, "targets", [getattr(node, "target", None)]) for node in fields]
    found |= {x.id for row in targets for x in row if isinstance(x, ast.Name)}
    return found | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@at_once("path", CORE)
def test_the_contract_has_no_word_for_whoever_repeats_a_step(path: Path) -> None:
    source = path.read_text()
    if any(word in source for word in RECORDERS):  # or the code cannot name one
        assert named(source).isdisjoint(RECORDERS)


def test_such_a_word_would_be_found() -> None:
    source = 'class Play:\n    separable: bool = True\n    constants = []\n"refuse"\nstep.asked()\n'
    assert named(source) & RECORDERS == {"Play", "separable", "constants", "asked"}


def test_an_engine_and_a_step_are_asked_nothing_about_repeating() -> None:
    assert not RECORDERS & {*dir(Engine), *dir(Step)}
    assert not {"ask", "number", "alone", "count", "take"} & {*dir(Engine), *dir(Step)}


# --- the one loop


def loops(source: str) -> list[str]:
    """The functions with a loop that sends buckets through the links of an optimizer."""
    if ".links" not in source:
        return []
    found = []
    for function in ast.walk(ast.parse(source)):
        for loop in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(loop, ast.For) and ast.unparse(loop.iter).endswith(".links"):
                calls = [x for x in ast.walk(loop) if isinstance(x, ast.Call)]
                found += [function.name for x in calls if ast.unparse(x.func) == "send"]
    return found


def test_the_links_of_an_optimizer_are_gone_through_in_one_place() -> None:
    found = {
        package_sizes.label(p): made
        for p in package_sizes.files()
        if (made := loops(p.read_text()))
    }
    assert found == {"optimizer/chain_runner.py": ["_through"]}


def test_another_loop_would_be_found() -> None:
    source = "def f():\n    for link in twin.links:\n        buckets = send(link, buckets)\n"
    assert loops(source) == ["f"]


class Doors(Transform):
    """Notes the functions of the library that lead to it."""

    reach = "tensor"

    def step(self, buckets: list[Any]) -> list[Any]:
        frames = [frame for frame in inspect.stack() if "torchzero_clip" in frame.filename]
        self.__dict__["seen"] = [frame.function for frame in reversed(frames)]
        return buckets


@pytest.mark.parametrize("compile", [False, True])
def test_the_loop_is_the_third_function(compile: bool) -> None:
    p, doors = Parameter(torch.ones(3)), Doors()
    p.grad = torch.ones(3)
    Modular([p], doors, LR(0.1), compile=compile).step()
    seen: list[str] = doors.__dict__["seen"]
    replays = ["step"] if compile else []  # decides that the step is not replayed
    assert seen == ["step", "step", *replays, "_through", "send", "_run_link"]


def test_clippers_and_released_parameters_pass_the_same_loop() -> None:
    p, doors = Parameter(torch.ones(3)), Doors()
    p.grad = torch.ones(3)
    Clipper([p], doors).step()
    assert doors.__dict__["seen"][-3:] == ["_through", "send", "_run_link"]
    opt = release([p], doors, LR(0.1))
    p.grad = torch.ones(3)
    opt.step()
    assert doors.__dict__["seen"] == ["step", "_release", "_through", "send", "_run_link"]
