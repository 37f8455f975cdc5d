"""Every operator of the table agrees with torch, for lists and for vectors, in C++ and in Triton.

A new operator in the table needs only a row here. `make test-triton` runs the tests of Triton in
its interpreter: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engines import test_vectors as vectors
from tests.helpers import at_once
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers import cpp, triton
from torchzero_clip.engines.compiled.printers.operators import OPERATORS
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.replay.device_step import DeviceStep
from torchzero_clip.engines.compiled.replay.native_step import NativeStep

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SINGLES = (torch.float32, torch.float64)
FLAGS = (torch.bool,)


class Row(NamedTuple):
    """The expected result of an operator.

    Attributes:
        function: The function of torch, with as many vectors as the operator has operands; None if
            only lists have the operator.
        dtypes: The dtypes that these vectors may have.
        near: The relative tolerance of lists in C++ compared with torch.
        rounds: Whether torch rounds intermediate results, which may overflow.
        coarse: Whether torch is less accurate in half precision. Then the expected result is the
            result in float32, rounded once.
        apart: Whether Triton differs from C++ by rounding. A function that Triton computes in
            float64 differs in any case.
        numbers: Whether the last operand may be a number, or a vector.
        interpreted: Whether Triton's interpreter computes the same as a GPU for all vectors. If
            not, test_vectors_interpreted.py has a test of its own.
    """

    function: Callable[..., Tensor] | None
    dtypes: Sequence[torch.dtype] = SINGLES
    near: float = 0.0
    rounds: bool = False
    coarse: bool = False
    apart: bool = False
    numbers: bool = True
    interpreted: bool = True


FORMATS = ("round", "wide_of", "upper", "lower", "stayed")
"""The operators of storage formats, which test_formats.py tests."""
ROWS = {
    "mul": Row(torch.mul),
    "div": Row(torch.div, near=1e-6, apart=True),
    "add": Row(torch.add),
    "sub": Row(torch.sub, rounds=True),
    "addcmul": Row(torch.addcmul, rounds=True, apart=True),
    "addcdiv": Row(torch.addcdiv),
    "lerp": Row(torch.lerp, rounds=True, apart=True),
    "clamp_min": Row(torch.clamp_min),
    "clamp_max": Row(torch.clamp_max),
    "clamp": Row(torch.clamp),
    "where": Row(lambda a, b, c: torch.where(b > 0, a, c)),
    "hypot": Row(torch.hypot, near=1e-6, apart=True, numbers=False),
    "atan2": Row(torch.atan2, near=1e-6, apart=True, numbers=False),
    "remainder": Row(torch.remainder, interpreted=False),  # see `interpreted`
    "neg": Row(torch.neg),
    "abs": Row(torch.abs),
    "sign": Row(torch.sign),
    "square": Row(torch.ops.aten.square),
    "sqrt": Row(torch.sqrt, near=1e-6, coarse=True),
    "rsqrt": Row(torch.rsqrt, near=1e-6, coarse=True),
    "pow": Row(torch.pow, near=1e-6, coarse=True, apart=True),
    "reciprocal": Row(torch.reciprocal, near=1e-6),
    "exp": Row(torch.exp, near=1e-6),
    "exp2": Row(torch.exp2),
    "expm1": Row(torch.expm1, near=1e-6),
    "log": Row(torch.log, near=1e-6),
    "log2": Row(torch.log2),
    "log1p": Row(torch.log1p, near=1e-6),
    "sin": Row(torch.sin, near=1e-6),
    "cos": Row(torch.cos, near=1e-6),
    "tanh": Row(torch.tanh, near=1e-6),
    "erf": Row(torch.erf, near=1e-6, coarse=True),
    "sigmoid": Row(torch.sigmoid, near=1e-6),
    "floor": Row(torch.floor),
    "ceil": Row(torch.ceil),
    "trunc": Row(torch.trunc),
    "positive": Row(None),
    "isfinite": Row(torch.isfinite),
    "isinf": Row(torch.isinf),
    "isnan": Row(torch.isnan),
    "eq": Row(torch.eq),
    "ne": Row(torch.ne),
    "lt": Row(torch.lt),
    "le": Row(torch.le),
    "gt": Row(torch.gt),
    "ge": Row(torch.ge),
    "logical_and": Row(torch.logical_and, (*SINGLES, *FLAGS)),
    "logical_or": Row(torch.logical_or, (*SINGLES, *FLAGS)),
    "logical_not": Row(torch.logical_not, (*SINGLES, *FLAGS)),
    "bitwise_and": Row(torch.bitwise_and, FLAGS),
    "bitwise_or": Row(torch.bitwise_or, FLAGS),
    "bitwise_xor": Row(torch.bitwise_xor, FLAGS),
    "bitwise_not": Row(torch.bitwise_not, FLAGS),
    "copy": Row(torch.clone),
    "fill": Row(lambda x: torch.full_like(x, 2.5)),
    "over": Row(None, near=1e-6, apart=True),  # the interpreter has no fused multiply-add
    **{name: Row(None) for name in FORMATS},
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and bool(importlib.util.find_spec("triton"))
MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities and NaN
]
IN_TRITON = pytest.param("triton", marks=MARKS)
LANGUAGES = pytest.mark.parametrize("language", ["C++", IN_TRITON])
LISTED = [name for name, row in OPERATORS.items() if row.torch and name not in FORMATS]
EDGES = [0.0, -0.0, 1.0, -1.5, 0.3, 1e-45, -3e-39, 6e-8, 1e-5, 65504.0, 65519.0, 65520.0, -7e4]
EDGES += [3e38, -2e-20, float("inf"), float("-inf"), float("nan"), 1 + 2**-9, 1 + 3 * 2**-11]


def test_every_operator_of_the_table_has_a_row() -> None:
    assert ROWS.keys() == OPERATORS.keys()
    assert {name for name, row in ROWS.items() if row.function is None} == {
        name for name, row in OPERATORS.items() if not row.aten or name == "over"
    }
    held = {name for name, row in ROWS.items() if OPERATORS[name].torch or row.function}
    assert held == OPERATORS.keys()  # each one is tested as a list, as a vector, or both


# ---------------------------------------------------------------------- lists


def every_operator(
    last: str, dtype: torch.dtype, but: Sequence[str] = ()
) -> tuple[list[str], Program]:
    """Return names of operators, and a program that stores the result of each on two buffers.

    `last` is the kind of the last operand. `over` divides by numbers, so it has no value there.
    """
    several = [name for name in LISTED if OPERATORS[name].arity > 1 and ROWS[name].numbers]
    names = LISTED if last == "value" else several
    names = [name for name in names if name not in but and (name, last) != ("over", "value")]
    lines: list[Any] = [("load", (("buffer", 0),)), ("load", (("buffer", 1),))]
    lines.append(("positive", (("value", 1),)))
    for name in names:
        refs: list[Any] = [("value", i) for i in (0, 2 if name == "where" else 1, 1)]
        refs = refs[: OPERATORS[name].arity]
        refs[-1] = refs[-1] if last == "value" else (last, 0)
        lines.append((name, tuple(refs)))
    kinds = [torch.bool if OPERATORS[name].flag else dtype for name in names]
    program = Program(
        tuple(lines), tuple((2 + i, 3 + i) for i in range(len(names))), None,
        (dtype, dtype, *kinds), (torch.float64,) if last == "vector" else (), (),
        torch.device("cpu"),
    )  # fmt: skip
    return names, program


def edges() -> tuple[Tensor, Tensor]:
    """Return all pairs of numbers at the edges of dtypes."""
    edges = torch.tensor(EDGES)
    return edges.repeat(len(EDGES)), edges.repeat_interleave(len(EDGES))


def operated(program: Program, run: Callable[[Launch], Any]) -> list[Tensor]:
    """Run a program of `every_operator`, and return the stored results."""
    x, y = [t.to(program.buffers[0]) for t in edges()]
    outs = [torch.zeros(len(x), dtype=kind) for kind in program.buffers[2:]]
    given = [torch.tensor([0.7], dtype=dtype) for dtype in program.vectors]
    buffers = [Buffer([t]) for t in (x, y, *outs)]
    run(Launch(program, [len(x)], None, buffers, [0.3], given, []))
    return outs


def natively(launch: Launch) -> Tensor | None:
    run = cpp.native(launch.program)
    assert run is not None, "this is not done in C++"
    return run(launch, launch.sizes)


def interpreted(launch: Launch) -> Tensor | None:
    run = triton.native(launch.program)
    assert run is not None, "this is not done in Triton"
    return run(launch, launch.sizes)


def last_and_dtype() -> Iterator[Any]:
    """Yield the kind of the last operand, and a dtype. Some are slow tests where it is no list."""
    slow = {("number", torch.float64), ("number", torch.float16)}
    slow |= {("vector", torch.float32), ("vector", torch.bfloat16)}
    for last, dtype in itertools.product(("value", "number", "vector"), DTYPES):
        marks = pytest.mark.slow if (last, dtype) in slow else ()
        yield pytest.param(last, dtype, marks=marks, id=f"{last}-{dtype}")


def plainly(launch: Launch) -> None:
    launch.run_by_torch([0])


@pytest.mark.parametrize(("last", "dtype"), [*last_and_dtype()])
def test_operators_of_lists_in_cpp_are_those_of_torch(last: str, dtype: torch.dtype) -> None:
    """Infinities, NaN, denormal numbers and ties of rounding are among the operands."""
    names, program = every_operator(last, dtype)
    x, y = edges()
    found = [operated(program, run) for run in (natively, plainly)]
    for name, ours, right in zip(names, *found, strict=True):
        row, near = ROWS[name], ROWS[name].near
        if row.coarse and dtype.itemsize == 2:
            near, base = torch.finfo(dtype).eps, x.to(dtype).float()
            power = {"value": y.to(dtype).float(), "number": 0.3, "vector": 0.7}[last]
            right = (base.pow(power) if name == "pow" else row.function(base)).to(dtype)
        if row.rounds:
            assert ours[x.isnan()].isnan().all(), name
            fits = ours.isfinite() & right.isfinite()
            ours, right, near = ours[fits], right[fits], 4 * torch.finfo(dtype).eps
        least = torch.finfo(dtype).tiny if name == "log1p" else 0  # torch has none below
        torch.testing.assert_close(
            ours, right, rtol=near, atol=near if row.rounds else least, equal_nan=True,
            msg=lambda said, name=name: f"{name}: {said}",
        )  # fmt: skip


@at_once("dtype", DTYPES)
@pytest.mark.parametrize("last", ["value", "number", "vector"])
@pytest.mark.parametrize("language", [IN_TRITON])
def test_operators_of_lists_in_triton_are_those_of_cpp_to_rounding(
    language: str, last: str, dtype: torch.dtype
) -> None:
    names, program = every_operator(last, dtype, but=("pow",) if dtype == torch.float64 else ())
    found = [operated(program, run) for run in (interpreted, natively)]
    for name, ours, right in zip(names, *found, strict=True):
        eps, least = 4 * torch.finfo(dtype).eps, 0.0
        near = eps if ROWS[name].apart or OPERATORS[name].double else 0.0
        if OPERATORS[name].double:
            least = torch.finfo(dtype).tiny
        elif near and right.dtype != torch.bool:
            # a product may overflow in one language and not in the other
            assert name in ("hypot", "pow") or ours[edges()[0].isnan()].isnan().all(), name
            fits = ours.isfinite() & right.isfinite()
            assert fits.sum() >= 0.9 * right.isfinite().sum()
            ours, right, least = ours[fits], right[fits], eps
        torch.testing.assert_close(
            ours, right, rtol=near, atol=least, equal_nan=True,
            msg=lambda said, name=name: f"{name}: {said}",
        )  # fmt: skip


RATIOS = [1.0, 0.7, -2.5, 3e10, 1e-20, 2.0**99, 2.0**-99, 2.0**101, -(2.0**-101), 1e38, 1e-44]
RATIOS += [1e60, 1e300, -1e-300, float("inf")]


@LANGUAGES
def test_a_quotient_by_a_ratio_of_any_size_is_right_to_a_unit_in_the_last_place(
    language: str,
) -> None:
    """Zeros keep their sign, infinities stay infinite, and a ratio of 1 changes no bit.

    Triton's interpreter rounds a product before a sum, unlike a GPU, so it may be off by two ULP.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-149, 127, (4000,), generator=generator, dtype=torch.float64).exp2()
    x = torch.cat([edges()[0], (torch.randn(4000, generator=generator) * sizes).float()])
    nodes = ("load", (("buffer", 0),)), ("over", (("value", 0), ("number", 0)))
    program = Program(nodes, ((1, 1),), None, (torch.float32,) * 2, (), (), torch.device("cpu"))
    units = 2 if language == "triton" else 1
    for ratio in RATIOS:
        out, right = torch.empty_like(x), x.double() / ratio
        launch = Launch(program, [len(x)], None, [Buffer([x]), Buffer([out])], [ratio], [], [])
        (interpreted if language == "triton" else natively)(launch)
        near = right.float()
        assert torch.equal(out.isnan(), near.isnan()), ratio
        whole = near.isfinite() & out.isfinite()
        assert torch.equal(out[~whole & ~near.isnan()], near[~whole & ~near.isnan()]), ratio
        unit = (near.abs().nextafter(torch.tensor(float("inf"))) - near.abs())[whole].double()
        assert ((out.double() - right)[whole].abs() <= units * unit).all(), ratio
        zero = x == 0
        assert torch.equal(out[zero].signbit(), near[zero].signbit()), ratio
        if ratio == 1:
            assert torch.equal(out.view(torch.int32), x.view(torch.int32))


@LANGUAGES
def test_a_flag_of_a_flag_is_that_of_torch(language: str) -> None:
    """Of the flags false and true, only true is positive, and both are finite."""
    names = [name for name in LISTED if OPERATORS[name].flag]
    lines: list[Any] = [("load", (("buffer", 0),)), *[(name, (("value", 0),)) for name in names]]
    stores = tuple((1 + i, 1 + i) for i in range(len(names)))
    kinds = (torch.bool,) * (1 + len(names))
    program = Program(tuple(lines), stores, None, kinds, (), (), torch.device("cpu"))
    found = []
    for run in (natively if language == "C++" else interpreted, plainly):
        outs = [torch.zeros(2, dtype=torch.bool) for _ in names]
        buffers = [Buffer([t]) for t in (torch.tensor([False, True]), *outs)]
        run(Launch(program, [2], None, buffers, [], [], []))
        found.append([t.tolist() for t in outs])
    assert dict(zip(names, found[0], strict=True)) == dict(zip(names, found[1], strict=True))


@LANGUAGES
@pytest.mark.parametrize("half", [0, 1])
def test_random_bits_round_as_those_of_torch_do(half: int, language: str) -> None:
    generator = torch.Generator().manual_seed(half)
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    operands = (("value", 0), ("vector", 0), ("vector", 1), ("half", half))
    program = Program(
        (("load", (("buffer", 0),)), ("round", operands)), ((1, 1),), None,
        (torch.float32, torch.bfloat16), (torch.int32, torch.int32), (), torch.device("cpu"),
    )  # fmt: skip
    found = []
    for run in (natively if language == "C++" else interpreted, plainly):
        out = torch.zeros(len(x), dtype=torch.bfloat16)
        given = [torch.tensor([n], dtype=torch.int32) for n in (-7, 123_456_789)]
        run(Launch(program, [len(x)], None, [Buffer([x]), Buffer([out])], [], given, []))
        found.append(out)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- vectors


UNARY = [name for name, row in ROWS.items() if row.function and OPERATORS[name].arity == 1]
OTHERS = [name for name, row in ROWS.items() if row.function and OPERATORS[name].arity > 1]
OF_VECTORS = [
    *[
        pytest.param(UNARY[i : i + 5], "C++", id=" ".join(UNARY[i : i + 5]))
        for i in range(0, len(UNARY), 5)
    ],
    *[
        pytest.param(OTHERS[i : i + 2], "C++", id=" ".join(OTHERS[i : i + 2]))
        for i in range(0, len(OTHERS), 2)
    ],
]
OF_VECTORS += [
    pytest.param([name], "triton", marks=MARKS, id=f"{name}-triton")
    for name, row in ROWS.items()
    if row.function and row.interpreted
]


@pytest.mark.parametrize(("names", "language"), OF_VECTORS)
def test_an_operator_of_vectors_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], language: str
) -> None:
    """Each dtype and shape that torch accepts is tested, all in a step of one native call."""
    monkeypatch.setattr(vectors, "NativeStep", NativeStep if language == "C++" else DeviceStep)
    vectors.compare(*[case for name in names for case in vector_cases(name)])


def vector_cases(name: str) -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return calls with operands of the first dtype in each shape, and of others in some shapes.

    Other dtypes are promoted, which depends on whether a tensor has a dim.
    """
    row = ROWS[name]
    assert row.function is not None
    cases = []
    for kinds in itertools.product(row.dtypes, repeat=OPERATORS[name].arity):
        for i, shape in enumerate(vectors.SHAPES):
            if set(kinds) != {row.dtypes[0]} and shape not in ((), (0,), (3, 4)):
                continue
            some = [vectors.numbers(shape, kind, i + 9 * k) for k, kind in enumerate(kinds)]
            try:
                row.function(*some)
            except RuntimeError:  # torch requires equal dtypes
                continue
            cases.append((row.function, some))
    assert cases
    return cases
