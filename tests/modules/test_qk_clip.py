"""QKClip: the numbers of its paper, its layouts, and a transformer whose logits explode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.studies.qk_clip import train
from tests.helpers import about, close
from torchzero_clip import LR, Heads, Modular, QKClip, largest_logits

inf, nan = math.inf, math.nan


def clipped(
    shape: tuple[int, ...],
    heads: Callable[[str, Tensor], Any],
    name: str = "q.weight",
    **arguments: Any,
) -> list[float]:
    """What each row of a weight of ones is multiplied by."""
    p = Parameter(torch.ones(shape, dtype=torch.float64))
    opt = Modular([(name, p)], LR(1.0), QKClip(heads, **arguments))
    p.grad = torch.zeros_like(p)
    opt.step()
    assert p.flatten(1).eq(p.flatten(1)[:, :1]).all() if p.dim() > 1 else True
    return p.view(len(p), -1)[:, 0].tolist()


def queries(*maxima: float, **kinds: Any) -> Callable[[str, Tensor], Heads]:
    return lambda name, p: Heads("query", torch.tensor(maxima, dtype=torch.float64), **kinds)


def keys(*maxima: float, **kinds: Any) -> Callable[[str, Tensor], Heads]:
    return lambda name, p: Heads("key", torch.tensor(maxima, dtype=torch.float64), **kinds)


def test_queries_and_keys_share_what_is_taken_off_so_that_the_product_is_at_tau() -> None:
    assert clipped((4, 3), queries(400.0, 50.0)) == about([0.5, 0.5, 1.0, 1.0])
    assert clipped((4, 3), keys(400.0, 50.0)) == about([0.5, 0.5, 1.0, 1.0])
    q = clipped((1, 1), queries(300.0), alpha=0.2)[0]
    k = clipped((1, 1), keys(300.0), alpha=0.2)[0]
    assert q == about((1 / 3) ** 0.2)
    assert 300.0 * q * k == about(100.0)


def test_biases_shrink_as_the_rows_of_their_weights_do() -> None:
    assert clipped((4,), queries(400.0, 50.0)) == about([0.5, 0.5, 1.0, 1.0])


def test_latent_queries_shrink_their_positions_by_all_of_it_and_keys_leave_their_values() -> None:
    assert clipped((6, 2), queries(400.0, 50.0, last=1)) == about([0.5, 0.5, 0.25, 1, 1, 1])
    assert clipped((6, 2), keys(400.0, 900.0, last=2)) == about([0.5, 1, 1, 1 / 3, 1, 1])


def test_a_parameter_may_hold_queries_keys_and_values() -> None:
    def fused(name: str, p: Tensor) -> list[Heads]:
        maxima = torch.tensor([400.0])
        return [Heads("query", maxima, rows=(0, 2)), Heads("key", maxima, rows=(2, 3))]

    assert clipped((5, 2), fused, alpha=0.25) == about([0.25**0.25] * 2 + [0.25**0.75, 1.0, 1.0])


@pytest.mark.parametrize("largest", [99.0, 100.0, 0.0, -5.0, nan, inf, -inf])
def test_a_head_is_left_alone_whose_largest_logit_is_small_or_unknown(largest: float) -> None:
    torch.manual_seed(0)
    start, step = torch.randn(2, 5), torch.randn(2, 5)
    ends = []
    for links in ([LR(0.1)], [LR(0.1), QKClip(queries(largest))]):
        p = Parameter(start.clone())
        p.grad = step.clone()
        Modular([("q.weight", p)], *links).step()
        ends.append(p)
    assert ends[0].equal(ends[1])


def test_what_shrinks_is_the_weight_after_its_step() -> None:
    p = Parameter(torch.tensor([[2.0]]))
    p.grad = torch.tensor([[-1.0]])
    Modular([("q.weight", p)], LR(1.0), QKClip(queries(400.0))).step()
    assert p.item() == about(1.5)


def test_other_parameters_take_their_steps() -> None:
    p, q = Parameter(torch.ones(2, 2)), Parameter(torch.ones(3, 2))
    named = [("q.weight", p), ("mlp.weight", q)]
    only = lambda name, p: queries(400.0)(name, p) if name == "q.weight" else None  # noqa: E731
    opt = Modular(named, LR(1.0), QKClip(only))
    p.grad, q.grad = torch.zeros(2, 2), torch.full((3, 2), 0.25)
    opt.step()
    assert (p.unique().tolist(), q.unique().tolist()) == ([0.5], [0.75])


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (queries(1.0, 2.0, 3.0), "for 'q.weight' .* must divide the 4 rows"),
        (
            queries(1.0, last=5),
            "shape \\(1,\\) and last=5",
        ),
        (lambda name, p: Heads("query", torch.ones(2, 2)), "of shape \\(2, 2\\)"),
        (
            lambda name, p: Heads("value", torch.ones(2)),
            "role= must be 'query' or 'key', got 'valu",
        ),
    ],
)
def test_heads_that_fit_no_rows_are_refused_in_a_sentence(heads: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"QKClip: .*{words}"):
        clipped((4, 2), heads)


# ---------------------------------------------------------------------- largest_logits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 3, 4, 100])
@pytest.mark.parametrize("lengths", [(7, 7), (7, 10), (10, 7)])
def test_the_largest_logits_are_those_of_the_whole_matrix(
    causal: bool, block: int, lengths: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, lengths[0], 4) - 3, torch.randn(2, 3, lengths[1], 4) + 3
    logits = q.unflatten(1, (3, 2)) @ k.unsqueeze(2).transpose(-1, -2) / 2
    if causal:
        after = torch.ones(lengths, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(after, -inf)
    close(largest_logits(q, k, causal=causal, block=block), logits.amax((0, 2, 3, 4)))


def test_the_largest_logits_take_a_scale_and_no_batch() -> None:
    q, k = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
    assert largest_logits(q, k, scale=1.0).tolist() == [17.0]
    assert largest_logits(q, k, scale=1.0, causal=True).tolist() == [11.0]


def test_heads_that_do_not_divide_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"largest_logits: .* got \(6, 3, 4\) and \(4, 3, 4\)"):
        largest_logits(torch.ones(6, 3, 4), torch.ones(4, 3, 4))


# ---------------------------------------------------------------------- in training


@pytest.mark.parametrize(
    ("tau", "steps"), [(3.5, 76), pytest.param(4.0, 170, marks=pytest.mark.slow)]
)
def test_logits_that_explode_without_it_stay_near_tau_with_grouped_queries(
    tau: float, steps: int
) -> None:
    plain, held = ([row[2] for row in train(clip, steps, tau)] for clip in (False, True))
    first = next(i for i, logit in enumerate(plain) if logit > tau)
    assert held[: first + 1] == plain[: first + 1]
    assert max(plain) > 2 * tau
    assert max(held) < 1.5 * tau
