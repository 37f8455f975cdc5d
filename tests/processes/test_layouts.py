"""A fused parameter moves as the separate parameters that it stands for, to the bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from tests.processes.launch import on_ranks
from tests.processes.layouts import LAYOUTS, RULES, Pair, away, clipped
from torchzero_clip import (
    LR,
    Modular,
    Orthogonalize,
    ScaleByShape,
    Steepest,
    heads,
    join_matrices,
    logical_matrices,
    named,
)

EACH_ONCE = list(zip(itertools.cycle(LAYOUTS), RULES, strict=False))
"""Every layout and every rule at least once."""
ALL = [pytest.param(*pair, marks=pytest.mark.slow) for pair in itertools.product(LAYOUTS, RULES)]
STATE = ["Kron", "Shampoo", "SOAP", "KL-SOAP", "Dion3", "Muon"]
"""The rules with state."""


@pytest.mark.parametrize(("layout", "rule"), [*EACH_ONCE, *ALL])
def test_a_fused_parameter_moves_as_the_separate_ones(layout: str, rule: str) -> None:
    assert away(layout, rule) == 0
    assert clipped(layout, rule) <= 1e-6


SOME = [("heads", "Muon"), ("transposed experts", "Steepest"), ("several", "SOAP")]


@pytest.mark.parametrize(("layout", "rule"), [*SOME, *ALL])
def test_so_does_it_with_a_compiled_step(layout: str, rule: str) -> None:
    # a kernel adds the products of all experts in another order than the products of one
    tolerance = 1e-6 if rule == "Steepest" else 0
    assert away(layout, rule, compile=True) <= tolerance
    assert clipped(layout, rule, compile=True) <= 1e-6


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("heads", "columns", "Muon")),
        pytest.param(2, ("columns too",), marks=pytest.mark.slow),
        pytest.param(4, ("columns too",), marks=pytest.mark.slow),
        pytest.param(2, ("columns too", "compiled"), marks=pytest.mark.slow),
        pytest.param(4, ("columns too", "compiled"), marks=pytest.mark.slow),
    ],
)
def test_so_does_it_on_ranks_whose_shards_cut_through_heads(
    ranks: int, words: tuple[str, ...]
) -> None:
    out = on_ranks(ranks, "-m", "tests.processes.layouts", *words, limit=1200)[0]
    rows = [line.partition(": ")[2].split(", ") for line in out.splitlines()]
    layouts = [name for name in LAYOUTS if name in words] or list(LAYOUTS)
    rules = [name for name in RULES if name in words] or list(RULES)
    assert len(rows) == len(rules) * (2 if "columns too" in words else 1)
    assert all([row == ["equal"] * len(layouts) for row in rows]), out


@pytest.mark.parametrize(
    "layout", ["columns", *[pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]]
)
def test_a_run_is_resumed_and_a_checkpoint_of_separate_parameters_becomes_one_of_the_fused(
    layout: str,
) -> None:
    for rule in STATE:
        pair = Pair(layout, RULES[rule])
        for number in range(3):
            pair.step(number)
        saved = copy.deepcopy(pair.opt.state_dict())
        converted = copy.deepcopy(pair.fused_state())
        assert _flat(converted) == _flat(saved)
        params = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in pair.fused]
        resumed = Modular(params, *pair.chain({"w": pair.entry}), LR(0.1))
        resumed.load_state_dict(converted)
        pair.step(3)
        for (_, p), (_, q) in zip(params, pair.fused, strict=True):
            p.grad = q.grad
        resumed.step()
        assert torch.equal(params[0][1], pair.fused[0][1]), rule
        assert pair.away() == 0


def _flat(saved: dict[str, Any]) -> dict[str, Any]:
    """Return state as plain lists, which can be compared."""
    flat: dict[str, Any] = {}
    for i, state in saved["state"].items():
        for key, value in state.items():
            flat[f"{i}/{key}"] = value.tolist() if isinstance(value, torch.Tensor) else value
    return flat


# ---------------------------------------------------------------------- bugs of an older form


def moved(rule: Any, **grads: torch.Tensor) -> list[torch.Tensor]:
    """Return how one step with LR(1.0) moves parameters with these gradients."""
    params = [(name, torch.nn.Parameter(torch.zeros_like(grad))) for name, grad in grads.items()]
    for (_, p), grad in zip(params, grads.values(), strict=True):
        p.grad = grad
    Modular(params, *rule, LR(1.0)).step()
    return [-p.detach() for _, p in params]


def test_a_scale_sees_the_shape_of_the_matrices() -> None:
    grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    layout = {"qkv": "(three rows) d -> three rows d, three=3"}
    (fused,) = moved([Orthogonalize(layout=layout), ScaleByShape(layout=layout)], qkv=grad)
    parts = dict(zip("abc", grad.split(4), strict=True))
    separate = moved([Orthogonalize(), ScaleByShape()], **parts)
    assert torch.equal(fused, torch.cat(separate))
    (too_far,) = moved([Orthogonalize(layout=layout)], qkv=grad)
    torch.testing.assert_close(fused, too_far)  # √(4 / 4), not √(12 / 4)


def test_a_product_is_that_of_each_expert() -> None:
    grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    grad *= torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    layout = {"experts": "e rows d -> e rows d"}
    (fused,) = moved([Steepest(Orthogonalize(layout=layout))], experts=grad)
    separate = moved([Steepest(Orthogonalize())], **dict(zip("abc", grad, strict=True)))
    assert torch.equal(fused, torch.stack(separate))


@pytest.mark.parametrize(
    "name", ["muon", "normuon", "muoneq", "dion2", "dion3", "scion", "soap", "shampoo"]
)
def test_named_methods_give_their_layout_to_every_rule(name: str) -> None:
    layout = {"w*": "(gate rows) d -> gate rows d, gate=2"}
    rules = [tfm for tfm in named(name, layout=layout).walk() if hasattr(tfm, "layout")]
    with_layout = [rule for rule in rules if rule.layout is not None]
    assert with_layout
    assert len(rules) - len(with_layout) == (name in ("dion2", "dion3"))  # inside `Rows`


# ---------------------------------------------------------------------- patterns


def test_matrices_are_split_and_joined() -> None:
    for entry, shape in LAYOUTS.values():
        t = torch.arange(torch.Size(shape).numel()).view(shape)
        matrices = logical_matrices(entry, t)
        assert torch.equal(join_matrices(entry, shape, matrices), t)
        assert sum(map(torch.Tensor.numel, matrices)) == t.numel()
    gate, up = logical_matrices("(rows gate) d -> gate rows d, gate=2", torch.arange(8).view(4, 2))
    assert gate.tolist() == [[0, 1], [4, 5]]
    assert up.tolist() == [[2, 3], [6, 7]]
    left, right = logical_matrices("d (head k) -> head d k, head=2", torch.arange(8).view(2, 4))
    assert left.tolist() == [[0, 1], [4, 5]]
    assert right.tolist() == [[2, 3], [6, 7]]
    with pytest.raises(
        ValueError, match=r"of shape \(2, 3\) consists of 1 matrix of 2 × 3, got matr"
    ):
        join_matrices("a b -> a b", (2, 3), [torch.zeros(2, 2)])


def test_heads_of_equal_size_are_joined() -> None:
    assert heads(32, 8, 8, size=128) == [("(head k) d -> head k d, k=128", 48 * 128)]
    assert heads(3, 1, 1, size=(4, 4, 6)) == [
        ("(head k) d -> head k d, k=4", 16),
        ("(head k) d -> head k d, k=6", 6),
    ]


@pytest.mark.parametrize(
    ("counts", "size"), [((), 4), ((2, 0), 4), ((2,), 0), ((2.0,), 4), ((2,), (4, 4)), ((True,), 1)]
)
def test_heads_that_are_none_are_an_error(counts: Any, size: Any) -> None:
    with pytest.raises(ValueError, match=r"heads: .* integers of at least 1, got heads\("):
        heads(*counts, size=size)


WRONG = {
    "(gate rows) d": "the pattern has no '->'",
    "a b c -> a b c": "the pattern has 3 dims on its left side",
    "(a b) d -> a b d": "dim 0 has the axes a, b: give the sizes of all but one, such as 'a=2'",
    "(a b) d -> a b d, a=5": "dim 0 has size 6, which the pattern cannot divide by 5",
    "a b -> a b, a=5": "dim 0 has size 6, which the pattern cannot divide by 5",
    "a (a) -> a d": "the name 'a' appears twice on one side",
    "a d -> d": "the name 'a' must be on both sides",
    "a b -> a b c": "the name 'c' must be on both sides",
    "a b -> a b, c=2": "the name 'c' must be on both sides",
    "a b -> (a b)": "the last two dims on the right side must be the rows",
    "a (b -> a b": r"the pattern has a '\(' without a '\)'",
    "a b) -> a b": r"'\)' is not a dim",
    "a ... -> a ...": r"'\.\.\.' is not a dim",
    "a b -> a b, a=0": "'a=0' is not a size such as 'head=8'",
    "a b -> a b, a": "'a' is not a size such as 'head=8'",
}


@pytest.mark.parametrize("entry", WRONG)
def test_a_pattern_that_does_not_fit_is_an_error_with_the_pattern_and_the_shape(entry: str) -> None:
    shown = r"Orthogonalize: the layout .* does not fit w of shape \(6, 4\): "
    with pytest.raises(ValueError, match=shown + WRONG[entry]):
        moved([Orthogonalize(layout=lambda name, t: entry)], w=torch.ones(6, 4))


@pytest.mark.parametrize(
    "entry", [[3.0, 3.0], [-1, 7], [True, 5], True, 3, [], [4, 4], [("a", 2.0)]]
)
def test_sizes_that_do_not_fit_are_an_error_with_the_sizes_and_the_shape(entry: Any) -> None:
    shown = r"Orthogonalize: the layout .* does not fit w of shape \(6, 4\): "
    with pytest.raises(ValueError, match=shown):
        moved([Orthogonalize(layout=lambda name, t: entry)], w=torch.ones(6, 4))
