"""Storage formats of fewer bits: kernels are bitwise identical to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import as_on_an_accelerator
from tests.engines.test_operators import FORMATS, LANGUAGES, interpreted, natively
from torchzero_clip.core.formats import Nearest, Stochastic, lower, upper, wide_of
from torchzero_clip.core.formats.stochastic import Elements
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.operators import OPERATORS
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.kept import Kept, Wide

BITS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000]
BITS += [0x3F818000, 0x477FE000, 0x477FF000, 0x33000000, 0x38800000, 0x7F7F7FFF, 0x7F7F8000]
BITS += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def numbers(count: int = 20000) -> Tensor:
    """Return edge cases of both signs, and numbers of random bits."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    edges = torch.tensor(BITS, dtype=torch.int64)
    every = torch.cat([edges, edges - 2**31, any_bits])
    return every.to(torch.int32).view(torch.float32)


def bits(x: Tensor) -> Tensor:
    """Return the bits of numbers; all NaN have the same."""
    kind = {2: torch.int16, 4: torch.int32}[x.itemsize]
    other = torch.zeros_like(x, dtype=kind)
    return x.view(kind).where(x == x, other)


def run(language: str, nodes: Any, stores: Any, given: list[Tensor], **more: Any) -> list[Tensor]:
    """Run a program on tensors, and return the tensors that it stores."""
    ways: dict[str, Callable[[Launch], Any]] = {
        "C++": natively, "triton": interpreted, "torch": lambda launch: launch.run_by_torch([0]),
    }  # fmt: skip
    outs = [torch.zeros(given[0].shape, dtype=kind) for kind in stores.values()]
    every, vectors = [*given, *outs], more.get("vectors", [])
    loads = [("load", (("buffer", i),)) for i in range(len(given))]
    program = Program(
        (*loads, *nodes),
        tuple([(len(given) + k, value) for k, value in enumerate(stores)]),
        None,
        tuple([t.dtype for t in every]),
        tuple([v.dtype for v in vectors]),
        (),
        torch.device("cpu"),
    )
    sizes, elements = [given[0].numel()], more.get("elements")
    ways[language](
        Launch(program, sizes, elements, list(map(Buffer, [[t] for t in every])), [], vectors, [])
    )
    return outs


@LANGUAGES
def test_both_halves_of_float32(language: str) -> None:
    x = numbers()
    nodes = ("upper", (("value", 0),)), ("lower", (("value", 0),))
    high, low = run(language, nodes, {1: torch.bfloat16, 2: torch.int16}, [x])
    assert bits(high).equal(bits(upper(x)))
    assert low.equal(lower(x))


@LANGUAGES
def test_float32_of_any_two_halves(language: str) -> None:
    """A lower half may be any number, because other code may have written the weight."""
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    w = every.view(torch.bfloat16).repeat(5)
    rest = torch.randint(-(2**15), 2**15, w.shape, generator=generator).to(torch.int16)
    rest[: 2**16] = 0
    rest[2**16 : 2**17] = torch.where(torch.rand(2**16, generator=generator) < 0.5, -1, 1)
    (wide,) = run(
        language, [("wide_of", (("value", 0), ("value", 1)))], {2: torch.float32}, [w, rest]
    )
    assert bits(wide).equal(bits(wide_of(w, rest)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("half", [0, 1])
@LANGUAGES
def test_numbers_that_are_rounded_by_the_same_bits(language: str, half: int, dtype: str) -> None:
    x = numbers()
    elements = Elements([Parameter(torch.empty(x.shape))], [None])
    keys = torch.tensor([0x1234567], dtype=torch.int32)
    drawn = half + 2 * (dtype == "fp16")
    operands = ("value", 0), ("vector", 0), ("vector", 1), ("half", drawn)
    more = {"vectors": [keys, elements.starts], "elements": elements}
    ways = [("round", operands)], {1: TYPES[dtype]}, [x]
    (ours,), (right,) = run(language, *ways, **more), run("torch", *ways, **more)
    assert bits(ours).equal(bits(right))
    near = x.to(TYPES[dtype])
    assert (bits(ours) != bits(near)).double().mean() > 0.02  # rounding is not to the nearest


@LANGUAGES
def test_what_a_meter_counts(language: str) -> None:
    """The meter counts 0 for no update, 1 for an update, and 2^26 for one lost to rounding."""
    w = torch.tensor([1.0, 1.0, 1.0, -3.0])
    x = torch.tensor([1.0, 1 - 2.0**-12, 1 - 2.0**-7, -3.0 - 2.0**-8])
    nodes = (
        ("to", (("value", 0), ("dtype", "torch.bfloat16"))),
        ("stayed", (("value", 0), ("value", 1), ("value", 2))),
    )
    (counted,) = run(language, nodes, {3: torch.float32}, [x, w])
    assert counted.tolist() == [0, 2**26, 1, 2**26]


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_parameters_are_widened_anew_and_state_is_kept_until_it_is_settled(device: str) -> None:
    """A borrowed list of parameters is computed in pieces; writes to state must not be lost."""
    with as_on_an_accelerator() if device == "accelerator" else nullcontext():
        stored = [torch.ones(4, 3).bfloat16(), torch.ones(20).bfloat16()]
        params = Wide(stored, Nearest())
        assert isinstance(params.borrow(), Wide)
        assert params.pending
        keys = torch.zeros(2, dtype=torch.int32)
        state = Kept(stored, Stochastic(keys, Elements(stored, [None, None])))
        seen = state.borrow()
        state.add_(1.0)
        assert all([t.eq(1).all() for t in seen.tensors])  # the values at the time of borrowing
        state.settle()
        assert all([t.eq(2).all() for t in stored])


def test_these_are_all_operators_of_formats() -> None:
    assert {name for name, row in OPERATORS.items() if not row.aten} == {*FORMATS, "positive"}
