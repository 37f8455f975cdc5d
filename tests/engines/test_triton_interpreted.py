"""Kernels in Triton's interpreter, on CPU tensors: they agree with C++ and with eager steps.

`make test-triton` runs these tests; TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from torch import Tensor
from torch.nn import Parameter

from tests.engines import test_compiled as compiled
from tests.engines.test_compiled import (
    CHAINS,
    SHAPES,
    SLICED,
    Chain,
    copied,
    give,
    halves,
    like_eager,
    measures_right,
    norms_of,
    params_of,
    race,
    races,
    with_one_that_is,
)
from tests.engines.test_fast_plain import chains, compare, is_plain, with_adam
from tests.engines.test_operators import INTERPRETED, edges, interpreted, natively
from tests.engines.test_replays import Twins, headline
from tests.helpers import at_once
from tests.table import Case, sampled
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular
from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines import Compiled
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.lists import tape
from torchzero_clip.engines.compiled.printers import launches, pointer_tables, triton
from torchzero_clip.engines.compiled.printers.pointer_tables import CHUNK, ROW, TABLES, Chunks, span
from torchzero_clip.engines.compiled.printers.program import Launch, Program

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities and NaN
]
CPU = torch.device("cpu")
TWO = {"a.weight": (4, 3), "b.weight": (2, 3, 2, 2)}  # few, because the interpreter is slow


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile chains on the CPU as for CUDA."""
    monkeypatch.setattr(Compiled, "backend", "triton")


# ---------------------------------------------------------------------- entries


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    for source, right in halves(dtype):
        torch.testing.assert_close(
            copied(source, right.dtype, interpreted), right, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("half", [0, 1])
def test_the_random_bits_are_those_of_cpp(half: int) -> None:
    """Results are bitwise identical, over several chunks, from any start, for NaN too."""
    generator = torch.Generator().manual_seed(half)
    bits = torch.randint(-(2**31), 2**31 - 1, (2 * CHUNK + 77,), generator=generator)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), edges()[0]])
    load = ("load", (("buffer", 0),))
    operands = (("value", 0), ("vector", 0), ("vector", 1), ("half", half))
    program = Program(
        (load, ("round", operands)), ((1, 1),), None, (torch.float32, torch.bfloat16),
        (torch.int32, torch.int32), (), CPU,
    )  # fmt: skip
    for key, start in itertools.product((0, -7, 2**31 - 1), (0, -(2**31), 123_456_789)):
        found = []
        for run in (interpreted, natively):
            out = torch.zeros(len(x), dtype=torch.bfloat16)
            vectors = [torch.tensor([n], dtype=torch.int32) for n in (key, start)]
            run(Launch(program, [len(x)], None, [Buffer([x]), Buffer([out])], [], vectors, []))
            found.append(out.view(torch.int16))
        assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16, torch.bool], ids=str)
def test_numbers_on_the_device_of_any_dtype_are_operands(dtype: torch.dtype) -> None:
    nodes = (("load", (("buffer", 0),)), ("mul", (("value", 0), ("scalar", 0))))
    program = Program(nodes, ((0, 1),), None, (torch.float32,), (), (dtype,), CPU)
    x = torch.arange(7.0)
    scalar = torch.tensor(1).to(dtype)
    interpreted(Launch(program, [7], None, [Buffer([x])], [], [], [scalar]))
    assert torch.equal(x, torch.arange(7.0))


# ---------------------------------------------------------------------- slices


@at_once("name", list(SLICED))
def test_slices_are_a_launch_as_whole_tensors_are(name: str) -> None:
    """A 1-d tensor is one slice of more than a chunk; some tensors are not contiguous."""
    opt = like_eager(SLICED[name], [(3, 21), (ROW + 5,), (4, 3, 1, 1)])
    assert isinstance(opt.engine, Compiled)
    assert opt.engine.replays is not None
    assert "torch" not in opt.engine.says([])[1]
    like_eager(SLICED[name], [(3, 2), (4,)], turned=True)


# ---------------------------------------------------------------------- tensors


def add_one(tensors: Sequence[Tensor], sizes: Sequence[int] | None = None) -> None:
    """Add 1 to every element."""
    nodes = (("load", (("buffer", 0),)), ("add", (("value", 0), ("number", 0))))
    program = Program(nodes, ((0, 1),), None, (tensors[0].dtype,), (), (), CPU)
    sizes = [t.numel() for t in tensors] if sizes is None else sizes
    interpreted(Launch(program, list(sizes), None, [Buffer(tensors)], [1.0], [], []))


def test_tensors_of_all_sizes_are_one_launch() -> None:
    tensors = [torch.zeros(n) for n in (0, 1, 3, 1023, 1024, 1025, CHUNK, 2 * CHUNK + 5, 0)]
    before = launches.LAUNCHES["program"]
    add_one(tensors)
    assert launches.LAUNCHES["program"] == before + 1
    assert all([(t == 1).all() for t in tensors])


def test_views_at_odd_addresses_are_a_launch_of_their_own() -> None:
    """The memory around the views is not written."""
    wholes = [torch.zeros(CHUNK + 100) for _ in range(4)]
    tensors = [whole[i : i + CHUNK + 9] for i, whole in enumerate(wholes)]
    before = launches.LAUNCHES["program"]
    add_one(tensors)
    assert launches.LAUNCHES["program"] == before + 2
    for i, whole in enumerate(wholes):
        assert (whole.nonzero().view(-1) == torch.arange(i, i + CHUNK + 9)).all()


def test_none_of_the_entries_is_no_launch() -> None:
    before = launches.LAUNCHES["program"]
    add_one([torch.zeros(0), torch.zeros(0)])
    assert launches.LAUNCHES["program"] == before


def test_entries_beyond_2_to_the_31_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test has memory for the last chunks of a tensor that would need 9 GB."""
    wide = span(2**31, CHUNK)
    size, memory = 31_000 * wide + 17, torch.zeros(wide + 17)
    assert size > 2**31
    assert span(size, CHUNK) == wide
    addresses, _ = TABLES.table([Buffer([memory])], [len(memory)])
    moved = addresses - 4 * (size - len(memory))
    chunks = torch.tensor([0, 30_999, 0, 31_000], dtype=torch.int32)
    table = moved, Chunks(torch.tensor([size, 0]), chunks, [(True, 0, 2)], 2)
    monkeypatch.setattr(TABLES, "table", lambda *given: table)
    add_one([memory], [size])
    assert (memory == 1).all()


def test_elements_beyond_2_to_the_32_have_the_bits_of_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash uses 32 bits of an element's place, so a start replaces a large place."""
    memory, out = torch.rand(CHUNK), torch.zeros(2, CHUNK, dtype=torch.bfloat16)
    operands = (("value", 0), ("vector", 0), ("vector", 1), ("half", 0))
    nodes = (("load", (("buffer", 0),)), ("round", operands))
    dtypes = (torch.float32, torch.bfloat16)
    program = Program(nodes, ((1, 1),), None, dtypes, (torch.int32,) * 2, (), CPU)
    wide = span(2**33, CHUNK)
    far = 32_300 * wide
    assert span(far + CHUNK, CHUNK) == wide
    vectors = [torch.tensor([n], dtype=torch.int32) for n in (5, far - 2**33)]
    natively(Launch(program, [CHUNK], None, [Buffer([memory]), Buffer([out[0]])], [], vectors, []))
    near = [Buffer([memory]), Buffer([out[1]])]
    addresses, _ = TABLES.table(near, [CHUNK])
    moved = addresses - far * torch.tensor([4, 2])
    chunks = torch.tensor([0, 32_300], dtype=torch.int32)
    table = moved, Chunks(torch.tensor([far + CHUNK, 0]), chunks, [(True, 0, 1)], 1)
    monkeypatch.setattr(TABLES, "table", lambda *given: table)
    vectors[1] = torch.tensor([0], dtype=torch.int32)
    interpreted(Launch(program, [far + CHUNK], None, near, [], vectors, []))
    assert torch.equal(*out.view(torch.int16))


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_a_kernel_measures_right_to_a_millionth(
    monkeypatch: pytest.MonkeyPatch, order: float
) -> None:
    monkeypatch.setattr(tape, "statistics", compiled.never)
    measures_right(order, [(50, 40), (7,), (1,), (), (0,), (3, 4, 5), (1000, 71)])


@pytest.mark.parametrize("order", [1, 2, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_kernel_measures_what_is_no_number(
    monkeypatch: pytest.MonkeyPatch, bad: float, order: float
) -> None:
    monkeypatch.setattr(tape, "statistics", compiled.never)
    norm = norms_of(with_one_that_is(bad), order)
    torch.testing.assert_close(norm[0], torch.tensor(abs(bad)).to(norm), equal_nan=True)
    assert norm[1].isfinite()


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_a_block_of_large_and_small_numbers_is_measured(order: float) -> None:
    """The sums overflow or underflow float32, in all blocks or only in some."""
    grads = [torch.full((5000,), 1e-3), torch.full((5000,), 3e38), torch.full((5000,), 1e-44)]
    grads[0][4500] = 1e35
    right = [torch.linalg.vector_norm(g.double(), order) for g in grads]
    norm = statistics_of(grads, NAMED[{1: "l1", 2: "l2"}.get(int(min(order, 9)), "linf")])
    torch.testing.assert_close(norm[0], torch.stack(right), rtol=1e-6, atol=0)


def statistics_of(tensors: Sequence[Tensor], measure: Any) -> Tensor:
    nodes = (("load", (("buffer", 0),)),)
    program = Program(nodes, (), (measure, 0), (tensors[0].dtype,), (), (), CPU)
    sizes = [t.numel() for t in tensors]
    out = interpreted(Launch(program, sizes, None, [Buffer(tensors)], [], [], []))
    assert out is not None
    return out


def test_the_parts_of_a_long_tensor_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long tensor has larger chunks; the statistics of other tensors keep their bits."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in (9 * CHUNK + 5, CHUNK + 7, 100)]
    plain = [statistics_of([t], NAMED["l2"])[0, 0] for t in tensors]
    from torchzero_clip.engines.compiled.printers import triton_include

    monkeypatch.setattr(pointer_tables, "LONG", 2 * CHUNK)
    monkeypatch.setattr(triton_include, "LONG", triton_include.tl.constexpr(2 * CHUNK))
    monkeypatch.setattr(TABLES, "_known", defaultdict(dict))
    found = statistics_of(tensors, NAMED["l2"])[0]
    assert found[1:].tolist() == [x.item() for x in plain[1:]]
    torch.testing.assert_close(found[0], plain[0], rtol=1e-12, atol=0)
    assert TABLES.table([Buffer(tensors)], [len(t) for t in tensors])[1].total == 2 + 2 + 1


def test_a_statistic_has_the_same_bits_beside_whatever_it_is_measured() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in (3 * CHUNK + 7, 100, 5, 0, 2 * CHUNK)]
    for m in (NAMED["l1"], NAMED["l2"]):
        together = statistics_of(tensors, m)
        for i, t in enumerate(tensors):
            assert torch.equal(statistics_of([t], m)[:, 0], together[:, i])


# ---------------------------------------------------------------------- chains


@pytest.mark.parametrize(("name", "dtype"), [*races()])
def test_a_chain_does_what_the_plain_one_does(name: str, dtype: torch.dtype) -> None:
    ours, theirs = params_of(SHAPES[:-4]), params_of(SHAPES[:-4])
    for p in [*ours, *theirs]:
        p.data = p.data.to(dtype)
    fast, slow = Modular(ours, *CHAINS[name](), compile=True), Modular(theirs, *CHAINS[name]())
    race(fast, slow, dtype=dtype)
    assert list(fast.metrics()) == list(slow.metrics())


@sampled()
def test_a_step_of_every_rule_is_the_plain_step(case: Case) -> None:
    compare(with_adam(case), case.shapes, way="triton")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore:Momentum. momentum should be below 1")
def test_a_step_of_random_chains_is_the_plain_step(part: int) -> None:
    """More than a hundred chains are tried, in four parts for several processes."""

    @seed(part)  # otherwise every part would draw the same chains
    @settings(max_examples=30, derandomize=False, database=None)
    @given(chain=chains())
    def check(chain: Chain) -> None:
        is_plain(chain, "triton", TWO)

    check()


def test_steps_are_repeated() -> None:
    twins = Twins(headline)
    for opt in twins.both:
        opt.engine.backend = "triton"  # type: ignore[attr-defined]
    assert [twins.step(scale=scale) for scale in (1.0, 1.0, 1e-3, 100.0, 1e32)][2:] == [True] * 3


@pytest.mark.parametrize("chain", [[], [Guard()]], ids=["plain", "guarded"])
def test_small_state_has_the_bits_that_it_has_in_cpp(
    monkeypatch: pytest.MonkeyPatch, chain: Chain
) -> None:
    held = []
    for backend in ("triton", "native"):
        monkeypatch.setattr(Compiled, "backend", backend)
        params = params_of([(70, 80), (5,), (0,), ()])
        links = [*chain, ClipNorm(1.0), Adam(), LR(1e-2)]
        opt = Modular(params, *links, compile=True, state_dtype="bfloat16")
        for i in range(4):
            give(params, i, scale=float("nan") if chain and i == 2 else 1.0)
            opt.step()
        held.append([opt.state[p][f"Adam/{k}"] for p in params for k in ("exp_avg", "exp_avg_sq")])
    differ = sum([int((a != b).sum()) for a, b in zip(*held, strict=True)])
    assert differ <= 2  # of 11,212: float32 is rounded in other places


def test_tensors_with_gaps_and_in_another_order_are_taken() -> None:
    ours, theirs = [params_of([(4, 3, 5, 5), (6, 4), (8, 8)]) for _ in range(2)]
    for params in (ours, theirs):
        params[0].data = params[0].data.to(memory_format=torch.channels_last)
        params[1].data = params[1].data.t().contiguous().t()
        params[2].data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))[:, ::2]
    chain = CHAINS["between"]
    race(Modular(ours, *chain(), compile=True), Modular(theirs, *chain(), fused=False))


def test_parameters_that_share_one_flat_vector_are_taken() -> None:
    """Some frameworks store parameters in this way; most begin at an unaligned address."""
    ours, theirs = params_of([(7, 3), (5,), (1,), (33,)]), params_of([(7, 3), (5,), (1,), (33,)])
    flat = torch.cat([p.detach().view(-1) for p in ours])
    for p, part in zip(ours, flat.split([p.numel() for p in ours]), strict=True):
        p.data = part.view(p.shape)
    assert sum([p.data_ptr() % 16 > 0 for p in ours]) >= 2
    race(Modular(ours, *CHAINS["headline"](), compile=True), Modular(theirs, *CHAINS["headline"]()))


def test_what_triton_cannot_compile_is_a_sentence_that_names_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = triton.BODY.replace("tl.program_id(", "tl.no_such(")
    assert wrong != triton.BODY
    monkeypatch.setattr(triton, "BODY", wrong)
    triton.native.cache_clear()
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = Modular([p], ClipNorm(0.25, dim="global"), Adam(), LR(0.5), compile=True)
    try:
        with pytest.raises(
            RuntimeError, match=r"of the chain ClipNorm.*0\.25.*Adam.*compile=False"
        ):
            opt.step()
    finally:
        triton.native.cache_clear()
