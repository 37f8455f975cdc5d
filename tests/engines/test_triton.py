"""Printed Triton kernels, their tables and their launches, tested without Triton."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.test_compiled import CHAINS, give, params_of, recording
from tests.engines.test_operators import DTYPES, every_operator
from tests.helpers import at_once, some
from torchzero_clip import (
    LR,
    AdaGC,
    Adam,
    AutoClip,
    ClipNorm,
    ClipNormByEMA,
    Guard,
    Modular,
    SkipSpike,
    Transform,
    WeightDecay,
    ZClip,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin
from torchzero_clip.core.norms import NAMED, SliceRows
from torchzero_clip.core.torch_private import fake_tensors
from torchzero_clip.engines import Compiled
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.lists import nodes as nodes_of_lists
from torchzero_clip.engines.compiled.printers import (
    backends,
    launches,
    pointer_tables,
    proof,
    triton,
)
from torchzero_clip.engines.compiled.printers.operators import over
from torchzero_clip.engines.compiled.printers.pointer_tables import (
    CHUNK,
    LONG,
    ROW,
    DeviceTables,
    Ring,
    span,
)
from torchzero_clip.engines.compiled.printers.program import Program

PAGE = Path(triton.__file__).with_name("triton_include.py")
CPU = torch.device("cpu")


# ---------------------------------------------------------------------- what is printed


def names_used(text: str) -> set[str]:
    """Return the names that a source file uses and does not define."""
    tree = ast.parse(text)
    loaded = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    known = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and type(x.ctx) is ast.Store}
    known |= {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)}
    known |= {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    return loaded - known - {"triton", "tl"} - set(dir(builtins))


def page_defines() -> set[str]:
    """Return the names that triton_include.py defines for printed kernels."""
    body = ast.parse(PAGE.read_text()).body
    functions = {x.name for x in body if isinstance(x, ast.FunctionDef)}
    return functions | {x.targets[0].id for x in body if isinstance(x, ast.Assign)}  # type: ignore[attr-defined]


@at_once("dtype", DTYPES)
@pytest.mark.parametrize("last", ["value", "number", "vector"])
def test_every_operator_is_printed_in_every_dtype(last: str, dtype: torch.dtype) -> None:
    _, program = every_operator(last, dtype, but=("pow",) if dtype == torch.float64 else ())
    text = triton.source(program)
    assert text is not None
    assert names_used(text) <= page_defines()
    assert text.count("tl.store(") == len(program.stores)


def test_what_only_torch_computes_is_not_printed() -> None:
    load = ("load", (("buffer", 0),))
    for dtype, nodes in (
        (torch.float8_e4m3fn, (load,)),
        (torch.bool, (load, ("neg", (("value", 0),)))),
        (torch.float32, (load, ("to", (("value", 0), ("dtype", "torch.complex64"))))),
    ):
        program = Program(nodes, ((0, len(nodes) - 1),), None, (dtype,), (), (), CPU)
        assert triton.source(program) is None
        assert triton.native(program) is None


def test_entries_are_read_once_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opt, seen = recording(monkeypatch, params_of([(4, 5)]), *CHAINS["headline"]())
    give(opt.param_groups[0]["params"], 0)
    opt.step()
    norm, rest = map(triton.source, seen)
    assert norm is not None
    assert rest is not None
    assert (norm.count("+ lane, mask"), norm.count("tl.store(buffer")) == (1, 0)
    assert "total += entries(" in norm, "the norm is taken in the pass"
    assert (rest.count("tl.load(buffer"), rest.count("tl.store(buffer")) == (4, 3)


def test_sums_begin_at_nothing_and_the_largest_goes_by_its_bits() -> None:
    load = ("load", (("buffer", 0),))
    for name, said in (("l1", "power_of(entry, False)"), ("l2", "power_of(entry, True)")):
        text = triton.source(Program((load,), (), (NAMED[name], 0), (torch.float16,), (), (), CPU))
        assert text is not None
        assert f"return {said}" in text
    text = triton.source(Program((load,), (), (NAMED["linf"], 0), (torch.float16,), (), (), CPU))
    assert text is not None
    assert "tl.maximum(total, entries(" in text


def test_chunks_are_as_long_on_both_pages() -> None:
    text = PAGE.read_text()
    for name, size in (("CHUNK", CHUNK), ("ROW", ROW), ("LONG", LONG)):
        said = re.findall(rf"^{name} = tl.constexpr\(([\d*]+)\)", text, re.M)[0]
        assert eval(said) == size
    block = int(re.findall(r"^BLOCK = tl.constexpr\((\d+)\)", text, re.M)[0])
    assert CHUNK % block == 0


# ---------------------------------------------------------------------- tables


def at(*addresses: int) -> Buffer:
    """Return a buffer of tensors that pretend to have these addresses."""
    made = Buffer([torch.zeros(1) for _ in addresses])
    made.addresses[:] = type(made.addresses)("Q", addresses)
    return made


def test_a_table_gives_each_chunk_a_tensor_and_aligned_ones_come_first() -> None:
    sizes = [CHUNK + 1, 5, 0, 2 * CHUNK]
    some, others = at(1600, 3204, 6400, 8000), at(16, 32, 48, 64)
    addresses, table = DeviceTables().table([some, others], sizes)
    assert addresses.tolist() == [1600, 3204, 6400, 8000, 16, 32, 48, 64]
    assert table.layout.view(2, 4).tolist() == [sizes, [0, 4, 2, 2]]
    assert table.chunks.view(-1, 2).tolist() == [[0, 0], [0, 1], [3, 0], [3, 1], [1, 0]]
    assert table.launches == [(True, 0, 4), (False, 4, 1)]
    assert table.total == 5


def test_a_table_of_slices_says_whose_they_are_and_where_they_begin() -> None:
    """One tensor has two slices of more than a chunk, the other three that are not all aligned."""
    rows = SliceRows(((2, 1), (3,)), ((1,), ()), (ROW + 1, 6), (2, 3), True)
    table = DeviceTables().table([at(16, 32)], [2 * ROW + 2, 18], rows)[1]
    tensors, places = [0, 0, 1, 1, 1], [0, ROW + 1, 0, 6, 12]
    layout = [[ROW + 1] * 2 + [6] * 3, [0, 2, 4, 5, 6], tensors, places]
    assert table.layout.view(4, 5).tolist() == layout
    chunks = [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [3, 0], [4, 0]]
    assert table.chunks.view(-1, 2).tolist() == chunks
    assert (table.launches, table.alone) == ([(False, 0, 7)], False)
    rows = SliceRows(((2, 1), (3,)), ((1,), ()), (2, 4), (2, 3), True)
    table = DeviceTables().table([at(16, 32)], [4, 12], rows)[1]
    assert table.launches == [(True, 0, 3), (False, 3, 2)], "the second has slices of 16 bytes"
    assert table.layout.view(4, 5)[1].tolist() == [3, 4, 0, 1, 2]
    assert table.alone
    table = DeviceTables().table([at(16, 32)], [0, 12], rows)[1]
    assert table.layout.view(4, 5)[0].tolist() == [0, 0, 4, 4, 4], "one tensor is left out"
    assert table.total == 3


def test_a_table_of_aligned_tensors_is_one_launch() -> None:
    assert DeviceTables().table([at(16, 32)], [3, 4])[1].launches == [(True, 0, 2)]
    assert DeviceTables().table([at(17, 33)], [3, 4])[1].launches == [(False, 0, 2)]
    assert DeviceTables().table([at(16, 32)], [0, 0])[1].launches == []


def test_more_than_2_to_the_31_entries_are_chunks_too() -> None:
    size = 32_100 * span(3 * 2**31, CHUNK) + 1
    table = DeviceTables().table([at(16, 32)], [size, 1])[1]
    assert table.layout.tolist()[:2] == [size, 1]
    tensor, chunk = table.chunks.view(-1, 2)[-2].tolist()
    assert (tensor, chunk * span(size, CHUNK)) == (0, size - 1)
    assert table.chunks.view(-1, 2)[-1].tolist() == [1, 0]


def test_a_program_takes_more_of_a_long_tensor_so_that_its_parts_stay_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor of any size has at most LONG / CHUNK chunks; other tensors are unaffected."""
    size = 10 * LONG + 5
    layout = DeviceTables().table([at(16, 32)], [size, CHUNK + 1])[1]
    assert layout.total == -(-size // (11 * CHUNK)) + 2
    assert layout.total - 2 <= LONG / CHUNK
    assert layout.layout.tolist() == [size, CHUNK + 1, 0, layout.total - 2]
    monkeypatch.setattr(pointer_tables, "LONG", 4 * ROW)
    rows = SliceRows(((2,), (3,)), ((1,), ()), (4 * ROW, 6), (2, 3), True)
    layout = DeviceTables().table([at(16, 32)], [8 * ROW, 18], rows)[1]
    assert layout.layout.view(4, 5)[1].tolist() == [0, 2, 4, 5, 6]
    assert layout.chunks.view(-1, 2)[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_gradients_that_lie_elsewhere_send_their_addresses_alone(sent: list[Any]) -> None:
    """The layout depends on the sizes, and on which tensors have unaligned addresses."""
    known, sizes = DeviceTables(), [3, 5000]
    first = known.table([at(16, 32)], sizes)[1]
    sent.clear()
    for i in range(1, 4):
        addresses, layout = known.table([at(16 + 512 * i, 32 + 512 * i)], sizes)
        assert layout is first
        assert sent.pop() == addresses.tolist() == [16 + 512 * i, 32 + 512 * i]
        assert not sent
    odd = known.table([at(20, 32)], sizes)[1]
    assert odd.launches == [(True, 0, 2), (False, 2, 1)]
    assert known.table([at(24, 4096)], sizes)[1] is odd
    assert known.table([at(32, 24)], sizes)[1].launches == [(True, 0, 1), (False, 1, 2)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of everything that is sent to a device."""
    seen: list[Any] = []
    send = DeviceTables._sent

    def noted(self: DeviceTables, words: Any, like: Tensor) -> Tensor:
        seen.append(words.tolist())
        return send(self, words, like)

    monkeypatch.setattr(DeviceTables, "_sent", noted)
    return seen


def test_tables_and_numbers_are_sent_again_only_when_they_are_others(sent: list[Any]) -> None:
    known = DeviceTables()
    some, others = at(16, 32), at(160, 320)
    for _ in range(3):
        for buffer in (some, others):
            known.table([buffer], [3, 4])
            known.numbers([0.5], buffer.tensors[0])
    assert len(sent) == 4, "the layout, two rows of addresses, and the number"
    some.addresses[0] = 48
    assert known.table([some], [3, 4])[0].tolist() == [48, 32]
    known.table([some], [3, 5])
    assert known.numbers([0.25], some.tensors[0]).tolist() == [0.25]
    assert len(sent) == 8


def test_a_stream_does_not_take_what_another_may_still_be_sent(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, like = DeviceTables(), torch.zeros(1)
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(pointer_tables, "_stream", lambda device, stream=stream: stream)
        known.numbers([0.5], like)
    assert len(sent) == 2


def test_few_tables_are_remembered(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointer_tables, "TABLES_KEPT", 3)
    known, like = DeviceTables(), torch.zeros(1)
    for x in range(5):
        known.numbers([0.0], like)  # a table that is used is kept
        known.numbers([float(x)], like)
    assert len(known._known["numbers"]) == 3
    assert sent.count([0.0]) == 1


def test_in_a_graph_that_is_captured_nothing_is_sent(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, like = DeviceTables(), torch.zeros(1)
    before = known.table([at(16, 32)], [3, 4])
    known.numbers([0.5], like)
    monkeypatch.setattr(pointer_tables, "capturing", lambda device: True)
    monkeypatch.setattr(torch, "frombuffer", None)  # sending needs it
    sent.clear()
    assert known.table([at(16, 32)], [3, 4]) is before
    assert known.numbers([0.5], like).tolist() == [0.5]
    assert not sent
    fresh = known.table([at(2**47 + 16, 32)], [3, 4])
    assert fresh[0].tolist() == [2**47 + 16, 32]
    assert known.numbers([-0.1, 1e300], like).tolist() == [-0.1, 1e300]
    assert len(known.captured) == 5, "a graph reads all of them whenever it runs, and a layout"
    monkeypatch.undo()
    assert known.table([at(2**47 + 16, 32)], [3, 4]) is not fresh, "its graph has not run"


class Place:
    """A stand-in for pinned memory; a test decides when copies end."""

    made: list[Place]
    waited: list[Place]

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory, self.event, self.done = torch.zeros(size, dtype=dtype), self, True
        self.made.append(self)

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        self.done = False

    def synchronize(self) -> None:
        self.done = True
        self.waited.append(self)


@pytest.fixture
def places() -> Iterator[type[Place]]:
    Place.made, Place.waited = [], []
    return Place


def sends(ring: Ring, *numbers: float) -> None:
    words = torch.tensor(numbers, dtype=torch.float64)
    out = torch.zeros_like(words)
    ring.send(words, out)
    assert torch.equal(words, out)


def test_pinned_memory_is_not_written_while_it_is_copied(places: type[Place]) -> None:
    ring = Ring(places)
    for i in range(3):
        sends(ring, i, i)
    assert [place.memory[0] for place in places.made] == [0, 1, 2]
    places.made[1].done = True
    sends(ring, 7, 7, 7)
    assert [place.memory[0] for place in places.made] == [0, 7, 2]
    assert not places.waited


def test_the_oldest_copy_is_waited_for_when_many_are_under_way(places: type[Place]) -> None:
    ring = Ring(places)
    for i in range(pointer_tables.PINNED_PIECES + 1):
        sends(ring, i)
    assert places.waited == places.made[:1]


def test_more_words_than_pinned_memory_has_get_more_of_it(places: type[Place]) -> None:
    ring = Ring(places)
    sends(ring, 1.0)
    places.made[0].done = True
    sends(ring, *range(1000))
    assert len(places.made) == 2


# ---------------------------------------------------------------------- launches


def imagined(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    _, mode = fake_tensors()
    with mode:
        return [torch.empty(n, dtype=dtype) for n in sizes]


SEVEN: dict[str, Callable[[], Sequence[Transform]]] = {
    "ClipNorm": lambda: [ClipNorm(1.0, dim="global")],
    "Guard": lambda: [Guard()],
    "SkipSpike": lambda: [SkipSpike()],
    "ZClip": lambda: [ZClip()],
    "AutoClip": lambda: [AutoClip()],
    "AdaGC": lambda: [AdaGC()],
    "ClipNormByEMA": lambda: [ClipNormByEMA()],
}


@pytest.mark.parametrize("name", some(list(SEVEN), one_in=3))
def test_gradients_elsewhere_in_each_step_take_a_copy_a_table_and_no_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zero_grad()` frees gradients. A step is 3 to 10 calls for any number of tensors."""
    monkeypatch.setattr(backends.triton, "here", lambda: True)
    monkeypatch.setattr(triton, "TABLES", DeviceTables())
    chain = *SEVEN[name](), Adam(), WeightDecay(0.1), LR(0.1)
    for count, rows in ((40, 40), (3, 300)):
        with fake_cuda():
            params = twin([torch.empty(rows, 50)] * count)
            with Ledger():
                opt = Modular(params, *chain, compile=True)
            stay, moves, kept = list[Ledger](), list[Ledger](), list[Any]()
            for found in (stay, moves):
                for _ in range(5):
                    if found is moves:
                        kept.append([p.grad for p in params])  # the new ones get other addresses
                        for p in params:
                            p.grad = torch.empty_like(p)
                    with Ledger() as ledger:
                        opt.step()
                    found.append(ledger)
        (*_, before), (*_, after) = stay, moves
        programs = [request.name for request in after.requests].count("triton.program")
        assert (before.calls, before.copies, before.reads) == (after.calls, [], after.reads)
        assert 3 <= after.calls <= 10
        assert (len(after.copies), after.reads) == (programs, [])


def test_launches_on_tensors_without_values_are_counted_and_looked_at() -> None:
    parts, out = imagined(7, 3)
    (layout,) = imagined(6, dtype=torch.int64)
    layout = parts.new_empty(6, dtype=torch.int64)
    before = launches.LAUNCHES["joined"]
    launches.launch(launches.JOINED, 3, parts, layout, 3, out, CHUNK, POWER=2)
    assert launches.LAUNCHES["joined"] == before + 1
    for wrong, said in (
        ((parts, parts, 3, out, CHUNK), "layout must be a contiguous .*, got torch.float64"),
        ((parts, layout, 3.0, out, CHUNK), "count must be a contiguous i32, got 3.0"),
        ((parts, layout, 2**31, out, CHUNK), "count must be a contiguous i32, got 2147483648"),
        ((parts[::2], layout, 3, out, CHUNK), r"parts must be a contiguous \*fp64, got"),
    ):
        with pytest.raises(TypeError, match=said):
            launches.launch(launches.JOINED, 3, *wrong, POWER=2)
    with pytest.raises(ValueError, match="shorter"):
        launches.launch(launches.JOINED, 3, parts, layout, POWER=2)


@pytest.mark.parametrize("there", [True, False])
def test_what_triton_has_compiled_is_launched_at_once(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton inspects arguments once per device and constant; if `run` is missing, each time."""
    looked, started = list[Any](), list[Any]()

    class Function:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: looked.append((grid, given, options))

    def launcher(kernel: Any) -> Any:
        return (lambda *given: started.append(given)) if there else None

    kernel = launches.TritonKernel("joined", None, launches.JOINED.signature)
    vars(kernel)["function"] = Function()  # instead of the function that Triton makes
    monkeypatch.setattr(launches, "launcher", launcher)
    given = torch.zeros(1), 7
    for power in (2, 2, 0, 2):
        launches.launch(kernel, 5, *given, POWER=power)
    assert looked[0] == ((5,), given, {"POWER": 2, **launches.OPTIONS})
    assert [options["POWER"] for _, _, options in looked] == ([2, 0] if there else [2, 2, 0, 2])
    assert started == ([(5, *given, 2), (5, *given, 2)] if there else [])


def test_a_compiled_step_on_imagined_cuda_is_four_launches_and_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launches are the norm, the join of its chunks, the factor, and the rest of the step.

    Their number does not depend on the number of tensors. If each tensor is a single chunk, nothing
    is joined.
    """
    monkeypatch.setattr(backends.triton, "here", lambda: True)
    monkeypatch.setattr(triton, "TABLES", DeviceTables())
    for count, rows in ((3, 300), (3, 3000), (50, 3000)):
        with fake_cuda():
            params = [Parameter(torch.randn(rows, 5, device="cuda:0")) for _ in range(count)]
            for p in params:
                p.grad = torch.randn_like(p)
            chain = ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(0.1)
            opt = Modular(params, *chain, compile=True)
            opt.step()
            before = launches.LAUNCHES.copy()
            opt.step()
        joined = {"joined": 1} if rows * 5 > CHUNK else {}
        assert launches.LAUNCHES - before == {"program": 2, **joined, "vectors": 1}
        assert not opt.engine.lasting()


# ---------------------------------------------------------------------- devices


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that pretends which compilers this machine has."""

    def have(triton_is_here: bool = False, windows: bool = False, cpp: bool = True) -> None:
        monkeypatch.setattr(backends.triton, "here", lambda: triton_is_here)
        monkeypatch.setattr(backends, "WINDOWS", windows)
        monkeypatch.setattr(backends, "compiler", lambda: ["g++"] if cpp else None)

    return have


def test_without_triton_a_sentence_says_what_to_install(elsewhere: Callable[..., None]) -> None:
    elsewhere()
    with pytest.raises(
        RuntimeError,
        match=r"compile=True needs Triton for parameters on cuda: pip install triton. Alter",
    ):
        Compiled([]).check(torch.device("cuda"))
    elsewhere(triton_is_here=True)
    Compiled([]).check(torch.device("cuda"))


@pytest.mark.parametrize("device", ["xpu", "mps", "cuda", "cpu"])
def test_where_there_are_no_kernels_one_warning_says_so(
    elsewhere: Callable[..., None], device: str
) -> None:
    elsewhere(windows=True, cpp=False)
    engine = Compiled([])
    with pytest.warns(
        UserWarning, match=f"cannot compile kernels for parameters on {device}"
    ) as said:
        engine.check(torch.device(device))
    assert len(said) == 1
    engine.check(torch.device(device))  # a second warning would be an error


def test_programs_run_there_node_by_node() -> None:
    load = ("load", (("buffer", 0),))
    for device in ("xpu", "mps"):
        program = Program((load,), ((0, 0),), None, (torch.float32,), (), (), torch.device(device))
        launch: Any = SimpleNamespace(program=program)
        assert backends.call_of(launch, "native") is None


def test_a_device_without_float64_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are sent in the widest dtype of the device; the CPU pretends to lack float64."""
    from torchzero_clip.core.norms import numeric
    from torchzero_clip.engines.compiled.printers import operators
    from torchzero_clip.engines.compiled.replay import step_recorder

    for page in (nodes_of_lists, operators, numeric, step_recorder):
        monkeypatch.setattr(page, "wide", lambda device: torch.float32)
    ratio = torch.tensor([2.0, 1e-38, 1e38], dtype=torch.float32)
    assert over(torch.full((3,), 8.0), ratio).tolist() == pytest.approx([4.0, torch.inf, 8e-38])
    assert over(torch.full((3,), 1e-30), ratio).tolist() == pytest.approx([5e-31, 1e8, 0.0])
    params = params_of([(4, 5), (6,)])
    chain = ClipNorm(1.0), Adam(), WeightDecay(0.1), LR(0.1)
    opt, _ = recording(monkeypatch, params, *chain)
    made = []
    engine: Any = opt.engine
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda launch: made.append(launch) or run(launch))
    give(params, 0)
    opt.step()
    sent = [numeric.numbers([1.0], launch.program.device).dtype for launch in made]
    sent += [t.dtype for launch in made for t in launch.vectors]
    assert sent
    assert set(sent) == {torch.float32}


def test_what_cannot_be_compiled_is_a_sentence_that_names_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise SyntaxError("in a kernel\n\n  no such word: stroe\n")

    monkeypatch.setattr(launches.TritonKernel, "function", Broken())
    monkeypatch.setattr(launches.TritonKernel, "works", False)
    monkeypatch.setattr(backends.triton, "here", lambda: True)
    monkeypatch.setattr(Compiled, "backend", "triton")
    # otherwise the proof would report the kernel first
    monkeypatch.setattr(proof, "known", lambda launch: True)
    params = params_of([(3, 2)])
    opt = Modular(params, ClipNorm(0.25, dim="global"), Adam(), LR(0.5), compile=True)
    give(params, 0)
    start = params[0].detach().clone()
    with pytest.raises(RuntimeError) as said:
        opt.step()
    assert re.search(r"of the chain ClipNorm.*0\.25.*Adam.*LR", str(said.value))
    assert "(SyntaxError: no such word: stroe); install the version of Triton" in str(said.value)
    assert torch.equal(params[0], start)
