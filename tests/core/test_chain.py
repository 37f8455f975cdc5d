"""Chains inside links: what comes back, and what may not be lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import moved
from torchzero_clip import (
    LR,
    Adam,
    Bucket,
    Chain,
    ClipNorm,
    Graft,
    Masked,
    Modular,
    Partition,
    Scale,
    Transform,
)


class Drops(Transform):
    """Ends the step for all."""

    def step(self, buckets: list[Any]) -> list[Any]:
        return []


def test_a_branch_that_drops_a_parameter_is_a_sentence() -> None:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    opt = Modular([("w", p)], Graft(Scale(2.0), Drops()), LR(0.1))
    words = r"Graft: the transforms \['Graft/norm_of', .* at least one parameter has no update"
    with pytest.raises(RuntimeError, match=words):
        opt.step()


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ((ClipNorm,), r"write ClipNorm\(\.\.\.\)"),
        (([ClipNorm(1.0), LR(0.1)],), r"unpack the list with \*"),
        ((0.1,), r"did you mean LR\(0\.1\)\?"),
    ],
)
def test_what_is_no_transform_is_told_what_to_write(links: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Chain(*links)


def halved(buckets: list[Bucket]) -> list[Bucket]:
    for bucket in buckets:
        bucket.u = bucket.u.mul_(0.5)
    return buckets


class HalfChain(Chain):
    """A chain, with half its update"""

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return halved(super().step(buckets))


class HalfMasked(Masked):
    """Masked, with half its update"""

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return halved(super().step(buckets))


class HalfPartition(Partition):
    """Partition, with half its update"""

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return halved(super().step(buckets))


class HalfWithin(Chain):
    """A chain that makes its links itself, with half its update"""

    def __init__(self) -> None:
        super().__init__(Adam())

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return halved(super().step(buckets))


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"compile": True}])
@pytest.mark.parametrize(
    "chain",
    [
        [HalfChain(Adam()), LR(0.1)],
        [HalfChain(Adam(), LR(0.1))],
        [HalfChain(Adam()) + LR(0.1)],
        [HalfChain(Adam(), LR(0.1), name="inner")],
        [HalfMasked(Chain(Adam(), LR(0.1)), lambda name, p: True)],
        [HalfPartition({"all": Chain(Adam(), LR(0.1))}, lambda name, p: "all")],
    ],
)
def test_every_engine_runs_the_step_of_a_subclass(chain: Any, options: Any) -> None:
    expected = moved(Adam(), Scale(0.5), LR(0.1), fused=False)
    torch.testing.assert_close(moved(*chain, **options), expected)


def test_a_chain_with_another_step_shows_its_class() -> None:
    chain = Chain(HalfChain(Adam()), LR(0.1))
    assert repr(chain) == "Chain(HalfChain(Adam()), LR(lr=0.1))"
    assert Chain.from_config(chain.to_config()) == chain
    with pytest.raises(TypeError, match="would lose the step"):
        Chain(HalfWithin(), LR(0.1)).to_config()


def test_a_written_file_does_what_a_chain_with_another_step_does() -> None:
    opt = Modular([Parameter(torch.ones(4))], HalfChain(Adam()), LR(0.1))
    namespace: dict[str, Any] = {}
    exec(opt.to_source(name="Written"), namespace)
    w = Parameter(torch.ones(4))
    written = namespace["Written"]([w])
    for _ in range(3):
        w.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
        written.step()
    torch.testing.assert_close(w.data, moved(Adam(), Scale(0.5), LR(0.1)))


def test_a_mask_with_another_step_cannot_be_written() -> None:
    inner = HalfMasked(Adam(), lambda name, p: True)
    opt = Modular([Parameter(torch.ones(4))], inner, LR(0.1))
    with pytest.raises(ValueError, match="HalfMasked overrides a method of its base class"):
        opt.to_source()
