"""Triton kernels as machine code for four generations of GPUs, on a machine without a GPU.

`make test-triton` runs these tests. ptxas, cuobjdump and nvdisasm are part of Triton. They report
the resources of a kernel, and the order of its instructions.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.audit.budgets import COMPILED, REPEATED, Chain, steps
from tests.engines.test_compiled import CHAINS, DTYPES, give, params_of
from tests.engines.test_fast_plain import with_adam
from tests.helpers import gradients, parameters, set_grads
from tests.table import GOOD
from torchzero_clip import (
    AGC,
    LR,
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
    named,
)
from torchzero_clip.engines.compiled.printers import launches, triton
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.replay import device_step

COMPILES = bool(importlib.util.find_spec("triton")) and not os.environ.get("TRITON_INTERPRET")
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not COMPILES, reason="needs Triton, without TRITON_INTERPRET"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
CARDS = (80, 90, 100, 120)
REGISTERS = 128  # of 65,536: a quarter of a GPU's threads run, enough to hide the latency of memory
HEADLINE = 96  # of the kernel after clipping, with Adam, which moves 28 bytes per element
ENTRIES = 8  # of each list, per thread at a time


def programs(
    *chain: Transform, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Program]:
    """Return the programs of a chain's second step, after its state has been made."""
    params = params_of([(4, 5), (6,)])
    for p in params:
        p.data = p.data.to(dtype)
    opt = Modular(params, *chain, compile=True, **options)
    seen = watched(opt)
    for i in range(2):
        give(params, i)
        opt.step()
    return list(dict.fromkeys(seen))


def watched(opt: Modular) -> list[Program]:
    """Return a list that will collect the launched programs; they run node by node."""
    engine: Any = opt.engine
    engine.backend = "plain"
    run, seen = engine.run, list[Program]()

    def noted(launch: Launch) -> Any:
        seen.append(launch.program)
        return run(launch)

    engine.run = noted
    return seen


@cache
def of_the_contract() -> list[Program]:
    """Return every program of every construction of the contract table, before Adam."""
    seen: dict[Program, None] = {}
    for case in GOOD:
        params = parameters(case.shapes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = Modular(list(params.items()), *with_adam(case), compile=True)
            launched = watched(opt)
            for i in range(2):
                set_grads(params, gradients(case.shapes, i))
                opt.step()
        seen |= dict.fromkeys(launched)
    return list(seen)


class Machine:
    """A kernel compiled for a GPU."""

    def __init__(self, kernel: launches.TritonKernel, card: int, **constants: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        names = [*kernel.signature, *constants]
        signature = kernel.signature | dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel.function, signature=signature, constexprs=places)
        options = launches.OPTIONS | (launches.REGISTERS if kernel.name == "program" else {})
        made = compile(source, target=GPUTarget("cuda", card, 32), options=options)
        self.name, self.shared, self.ptx = made.metadata.name, made.metadata.shared, made.asm["ptx"]
        self.accesses = Counter(re.findall(r"(?:ld|st)\.global[.\w:]*", self.ptx))
        self.binary = made.asm["cubin"]

    def _told(self, tool: str, *options: str) -> str:
        import triton

        path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary)
            file.flush()
            command = [str(path), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def resources(self) -> dict[str, int]:
        """Return the registers per thread, and the bytes of stack and local memory."""
        said = self._told("cuobjdump", "-res-usage")
        return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}

    def blocks(self) -> list[list[str]]:
        """Return the instructions in order, in blocks without a jump in or out."""
        found: list[list[str]] = [[]]
        for line in self._told("nvdisasm").splitlines():
            said = re.search(r"/\*[0-9a-f]{4}\*/\s+(.*?)\s*;", line)
            if said is not None:
                found[-1].append(said[1])
            if line.startswith(".L") or (said and LEAVES.search(said[1])):
                found.append([])
        return found


LEAVES = re.compile(r"\b(BRA|CALL|RET|EXIT|BSSY|BSYNC|BAR|BREAK|WARPSYNC)\b")
LABEL, JUMP = re.compile(r"^(\$\w+):"), re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")


def in_loops(ptx: str) -> list[str]:
    """Return the lines of a kernel that may run more than once."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    places = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    after: list[list[int]] = []
    for i, line in enumerate(lines):
        jump = JUMP.search(line)
        ends = line.startswith(("bra", "ret", "}"))
        after.append(
            [i + 1] * (not ends and i + 1 < len(lines)) + ([places[jump[1]]] if jump else [])
        )

    def leads_back(i: int) -> bool:
        seen, left = set[int](), list(after[i])
        while left:
            now = left.pop()
            if now == i:
                return True
            if now not in seen:
                seen.add(now)
                left += after[now]
        return False

    starts = [0, *sorted({*places.values()})]
    looped = {i for i in starts if leads_back(i)}
    ends = [*starts[1:], len(lines)]
    return [x for i, end in zip(starts, ends, strict=True) if i in looped for x in lines[i:end]]


def divides(lines: Sequence[str]) -> list[str]:
    """Return the lines that divide in float64."""
    return [line for line in lines if re.search(r"\b(div|rcp)\.\w+\.f64\b", line)]


def kernel_of(program: Program) -> launches.TritonKernel:
    call = triton.native(program)
    assert call is not None, "this is not done in Triton"
    return call.kernel


def fits(machine: Machine, registers: int = REGISTERS, stack: int = 0) -> None:
    found = machine.resources()
    assert found["STACK"] <= stack, found
    assert not found["LOCAL"], found
    assert 0 < found["REG"] <= registers, found


def accesses(program: Program, dtypes: Sequence[torch.dtype]) -> Counter[int]:
    """Return the number of memory accesses of a thread, by their bits.

    The widest dtype is accessed 128 bits at a time, and other dtypes the same number of elements.
    """
    widest = max([dtype.itemsize for dtype in program.buffers])
    found = Counter[int]()
    for dtype in dtypes:
        found[128 * dtype.itemsize // widest] += ENTRIES * widest // 16
    return found


def loaded(program: Program) -> list[torch.dtype]:
    touched = {operands[0][1] for name, operands in program.nodes if name == "load"}
    return [program.buffers[i] for i in touched]


def access_is_wide(machine: Machine, program: Program) -> None:
    """Check the accesses of whole blocks; other blocks have one access per element."""
    bits = {"b8": 8, "b16": 16, "b32": 32, "b64": 64}
    found = Counter[int]()
    for access, count in machine.accesses.items():
        many = re.search(r"\.v(\d)\.", access)
        found[bits[access.rpartition(".")[2]] * int(many[1] if many else 1)] += count
    stored = [program.buffers[i] for i, _ in program.stores]
    least = accesses(program, [*loaded(program), *stored])
    assert all([found[size] >= n for size, n in least.items()]), (machine.accesses, least)


def loads_at_once(machine: Machine, program: Program) -> None:
    """Check that loads of whole blocks follow each other without a branch: they are one wait."""
    least = accesses(program, loaded(program))
    for block in machine.blocks():
        found = Counter[int]()
        for line in block:
            said = re.search(r"\bLDG\.E(?:\.U?(\d+))?", line)
            if said is not None:
                found[int(said[1] or 32)] += 1
        if all([found[size] >= n for size, n in least.items()]):
            return
    raise AssertionError(f"no block loads {dict(least)}")


def is_lean(machine: Machine, program: Program) -> None:
    """Check that only norms need shared memory, and that no loop divides in float64."""
    if program.measured is None:
        assert machine.shared == 0, program
        assert "bar.sync" not in machine.ptx
    if torch.float64 not in program.buffers:
        assert in_loops(machine.ptx), "each kernel has a loop over blocks"
        assert not divides(in_loops(machine.ptx))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    "cards",
    [
        pytest.param(CARDS[:: len(CARDS) - 1], id="oldest and newest"),
        pytest.param(CARDS, id="every", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_the_contract_fit_the_cards(cards: Sequence[int], part: int) -> None:
    """Kernels have few registers, wide loads, and shared memory only for sums.

    They have no stack for aligned tensors, and a small stack for others.
    """
    some = of_the_contract()[part::4]
    assert len(some) > 10
    for program in some:
        kernel = kernel_of(program)
        for card in cards:
            machine = Machine(kernel, card, ALIGNED=True)
            fits(machine)
            is_lean(machine, program)
            access_is_wide(machine, program)
        unaligned = Machine(kernel, CARDS[part], ALIGNED=False)
        fits(unaligned, stack=16)  # one of them spills 16 bytes


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_headline_waits_once_for_memory_and_has_few_registers_in_every_dtype(
    dtype: torch.dtype, card: int
) -> None:
    chain = ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(0.1)
    found = programs(*chain, dtype=dtype)
    for program in found:
        machine = Machine(kernel_of(program), card, ALIGNED=True)
        fits(machine, REGISTERS if dtype == torch.float64 else HEADLINE)
        is_lean(machine, program)
        access_is_wide(machine, program)
        loads_at_once(machine, program)
    assert found[-1].measured is None


@pytest.mark.parametrize("card", CARDS)
def test_small_state_fits(card: int) -> None:
    for program in programs(ClipNorm(1.0), Adam(), LR(0.1), state_dtype="bfloat16"):
        machine = Machine(kernel_of(program), card, ALIGNED=True)
        fits(machine)
        is_lean(machine, program)
        access_is_wide(machine, program)


def test_a_kernel_has_a_name_that_says_what_it_does() -> None:
    """Profilers show the name; otherwise all kernels would be called `kernel`."""
    norm, rest = [Machine(kernel_of(x), 90, ALIGNED=True) for x in programs(*CHAINS["headline"]())]
    assert norm.name == "torchzero_clip_measure"
    assert rest.name == "torchzero_clip_over_lerp_mul_addcmul_sqrt_add_div_sub"
    assert Machine(launches.JOINED, 90, POWER=2).name == "torchzero_clip_joined"


LOOP = """.visible .entry kernel()
{{
  {before}
$L__BB0_1:
  {inside}
  @%p1 bra $L__BB0_1;
  ret;
}}"""


def test_a_division_in_a_loop_is_seen() -> None:
    divided = "div.rn.f64 %fd1, %fd2, %fd3;"
    for before, inside, found in ((divided, "", []), ("", divided, [divided])):
        assert divides(in_loops(LOOP.format(before=before, inside=inside))) == found


@pytest.mark.parametrize("card", CARDS)
def test_joining_statistics_fits(card: int) -> None:
    for power in (0, 1, 2):
        fits(Machine(launches.JOINED, card, POWER=power))


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_statistics_of_most_blocks_are_added_in_float32(order: float) -> None:
    """A branch in float64 is for blocks that are out of the range of float32."""
    (norm, *_) = programs(ClipNorm(1.0, ord=order), LR(0.1))
    assert norm.measured is not None
    text = kernel_of(norm).text
    assert text is not None
    assert "power_of" in text or "largest_of" in text
    fits(Machine(kernel_of(norm), 90, ALIGNED=True), 48)


def test_offsets_have_64_bits() -> None:
    """A tensor may have more than 2³¹ elements, so the begin of a chunk has 64 bits."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    (program,) = programs(LR(0.1))
    kernel = kernel_of(program)
    names = [*kernel.signature, "ALIGNED"]
    source = ASTSource(
        kernel.function,
        signature=kernel.signature | {"ALIGNED": "constexpr"},
        constexprs={(names.index("ALIGNED"),): True},
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=launches.OPTIONS)
    wide = [line for line in made.asm["ttir"].splitlines() if "arith.muli" in line]
    assert any(["i64" in line for line in wide]), made.asm["ttir"]
    moved = [
        line for line in made.asm["ttir"].splitlines() if "tt.addptr" in line and "f32" in line
    ]
    assert any([re.search(r"!tt.ptr<f32>, i64", line) for line in moved])


def test_the_headline_compiles_in_two_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time is processor time of this process and of ptxas, with an empty cache."""
    (first, *_) = programs(LR(0.1))
    some = programs(*CHAINS["headline"]())
    Machine(kernel_of(first), 90, ALIGNED=True)  # to load modules before the measurement
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = sum(os.times()[:4])
    for program in some:
        Machine(kernel_of(program), 90, ALIGNED=True)
    Machine(launches.JOINED, 90, POWER=2)
    spent = sum(os.times()[:4]) - before
    assert any(tmp_path.iterdir()), "it was cached"
    assert 0.02 < spent <= 2, f"{spent:.2f} s"


def test_a_kernel_is_one_whatever_its_arguments_are() -> None:
    """Another number of tensors, or another address, compiles no new kernel."""
    (program,) = programs(LR(0.1))
    function = kernel_of(program).function
    free = [p.name for p in function.params if not p.is_constexpr and p.do_not_specialize]
    assert free == list(kernel_of(program).signature)
    assert [p.annotation_type for p in function.params if not p.is_constexpr] == [
        *kernel_of(program).signature.values()
    ]


# ---------------------------------------------------------------------- vectors

VECTORS: dict[str, Any] = {
    "headline": lambda: [ClipNorm(1.0, dim="global"), Adam(), LR(0.1)],
    "guards": lambda: [Guard(), SkipSpike(), ClipNorm(1.0), Adam(), LR(0.1)],
    "ZClip": lambda: [ZClip(), Adam(), LR(0.1)],
    "AutoClip": lambda: [AutoClip(), Adam(), LR(0.1)],
    "ClipNormByEMA": lambda: [ClipNormByEMA(), Adam(), LR(0.1)],
    "AGC": lambda: [AGC(), Adam(), LR(0.1)],
    "lamb": lambda: [named("lamb")],
}


def vector_kernels(chain: Any, monkeypatch: pytest.MonkeyPatch) -> list[launches.TritonKernel]:
    """Return the vector kernels of a step of twelve tensors."""
    monkeypatch.setattr(device_step, "KERNELS", {})
    steps(Chain("vectors", chain), 12, engine=COMPILED, turns=REPEATED)
    return list(device_step.KERNELS.values())


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_between_launches_fit_every_card(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single block runs, so registers are plenty; a float64 power needs a small stack."""
    kernels = vector_kernels(VECTORS[name], monkeypatch)
    assert kernels
    for card in CARDS:
        for kernel in kernels:
            found = Machine(kernel, card).resources()
            assert (found["STACK"] <= 256, found["LOCAL"]) == (True, 0), found
            assert 0 < found["REG"] < 255, found  # with 255, some values would be in memory


def test_the_vectors_of_the_headline_compile_in_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time is processor time with an empty cache, after another compilation."""
    (kernel,) = vector_kernels(VECTORS["headline"], monkeypatch)
    Machine(kernel, 80)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = sum(os.times()[:4])
    Machine(kernel, 90)
    assert 0.02 < sum(os.times()[:4]) - before <= 1


def test_models_of_other_sizes_share_their_vector_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "KERNELS", {})
    for count in (12, 200):
        steps(Chain("many", VECTORS["headline"]), count, engine=COMPILED, turns=REPEATED)
    assert len(device_step.KERNELS) == 1
