"""Kernels in Triton as machine code for four generations of cards, on a machine without one.

`make test-triton` runs these. ptxas and cuobjdump, which come with Triton, say what a kernel takes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.audit.budgets import COMPILED, REPLAYED, Chain, steps
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
    ZClip,
    named,
)
from torchzero_clip.engines.compiled.again import device_step
from torchzero_clip.engines.compiled.printers import launches, triton
from torchzero_clip.engines.compiled.printers.program import Launch, Program

COMPILES = bool(importlib.util.find_spec("triton")) and not os.environ.get("TRITON_INTERPRET")
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not COMPILES, reason="needs Triton, without TRITON_INTERPRET"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
CARDS = (80, 90, 100, 120)
REGISTERS = 128  # of 65,536: half of a card's threads at once, which is enough to wait for memory
HEADLINE = 72  # of the kernel behind a clip with Adam, which has 28 bytes an entry to wait for

SPILLED = 8
"""Bytes of stack at most, which ptxas takes to keep to 64 or 72 registers: around the slow way of a
division, in Adam behind a clip or a guard. With `maxnreg` none is needed, and the headline takes 72
in the place of 64."""


def programs(
    *chain: Transform, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Program]:
    """The programs of a chain's second step, when all state is there."""
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
    """The programs that this optimizer will launch; they run node by node."""
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
    """Every program of every construction of the contract table, in front of Adam."""
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
    """What a kernel takes of a card."""

    def __init__(self, kernel: launches.TritonKernel, card: int, **constants: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        names = [*kernel.signature, *constants]
        signature = kernel.signature | dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel.function, signature=signature, constexprs=places)
        options = {"num_warps": launches.WARPS}
        made = compile(source, target=GPUTarget("cuda", card, 32), options=options)
        self.accesses = Counter(re.findall(r"(?:ld|st)\.global[.\w:]*", made.asm["ptx"]))
        self.binary = made.asm["cubin"]

    def resources(self) -> dict[str, int]:
        """Registers a thread, and the bytes of its stack and of local memory."""
        import triton

        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary)
            file.flush()
            said = subprocess.run(
                [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


def kernel_of(program: Program) -> launches.TritonKernel:
    call = triton.native(program)
    assert call is not None, "this is not done in Triton"
    return call.kernel


def fits(machine: Machine, registers: int = REGISTERS, stack: int = 0) -> None:
    found = machine.resources()
    assert found["STACK"] <= stack, found
    assert not found["LOCAL"], found
    assert 0 < found["REG"] <= registers, found


def wide(program: Program) -> int:
    """How many accesses of 128 bits the entries of a thread take at least."""
    touched = {operands[0][1] for name, operands in program.nodes if name == "load"}
    ways = [program.buffers[i] for i in touched] + [program.buffers[i] for i, _ in program.stores]
    return sum([max(1, 8 * dtype.itemsize // 16) for dtype in ways if dtype.itemsize > 1])


def access_is_wide(machine: Machine, program: Program) -> None:
    """In the branch of whole blocks; the other has one access an entry."""
    bits = {"b8": 8, "b16": 16, "b32": 32, "b64": 64}
    found = 0
    for access, count in machine.accesses.items():
        many = re.search(r"\.v(\d)\.", access)
        size = bits[access.rpartition(".")[2]]
        found += count if many and int(many[1]) * size == 128 else 0
    assert found >= wide(program), machine.accesses


@pytest.mark.parametrize("part", range(4))
def test_kernels_of_the_contract_fit_every_card(part: int) -> None:
    """No local memory, few registers, and loads of 128 bits where addresses allow it."""
    some = of_the_contract()[part::4]
    assert len(some) > 10
    for program in some:
        kernel = kernel_of(program)
        for card in CARDS:
            machine = Machine(kernel, card, ALIGNED=True)
            fits(machine, stack=SPILLED)
            access_is_wide(machine, program)
        fits(Machine(kernel, CARDS[part], ALIGNED=False))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_headline_has_few_registers_in_every_dtype(dtype: torch.dtype, card: int) -> None:
    for program in programs(*CHAINS["headline"](), dtype=dtype):
        machine = Machine(kernel_of(program), card, ALIGNED=True)
        fits(machine, HEADLINE if dtype == torch.float32 else REGISTERS)
        access_is_wide(machine, program)


@pytest.mark.parametrize("card", CARDS)
def test_small_state_fits(card: int) -> None:
    for program in programs(ClipNorm(1.0), Adam(), LR(0.1), state_dtype="bfloat16"):
        machine = Machine(kernel_of(program), card, ALIGNED=True)
        fits(machine)
        access_is_wide(machine, program)


@pytest.mark.parametrize("card", CARDS)
def test_joining_statistics_fits(card: int) -> None:
    for power in (0, 1, 2):
        fits(Machine(launches.JOINED, card, POWER=power))


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_statistics_of_most_blocks_are_added_in_float32(order: float) -> None:
    """One branch is in float64, where a block is out of range."""
    (norm, *_) = programs(ClipNorm(1.0, ord=order), LR(0.1))
    assert norm.measured is not None
    text = kernel_of(norm).text
    assert text is not None
    assert "power_of" in text or "largest_of" in text
    fits(Machine(kernel_of(norm), 90, ALIGNED=True), 48)


def test_offsets_have_64_bits() -> None:
    """A tensor may have more than 2³¹ entries: where a chunk begins is computed in 64 bits."""
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
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launches.WARPS})
    wide = [line for line in made.asm["ttir"].splitlines() if "arith.muli" in line]
    assert any(["i64" in line for line in wide]), made.asm["ttir"]
    moved = [
        line for line in made.asm["ttir"].splitlines() if "tt.addptr" in line and "f32" in line
    ]
    assert any([re.search(r"!tt.ptr<f32>, i64", line) for line in moved])


def test_the_headline_compiles_in_two_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processor time of this process and of ptxas, in an empty cache."""
    (first, *_) = programs(LR(0.1))
    some = programs(*CHAINS["headline"]())
    Machine(kernel_of(first), 90, ALIGNED=True)  # what is loaded once is there
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = sum(os.times()[:4])
    for program in some:
        Machine(kernel_of(program), 90, ALIGNED=True)
    Machine(launches.JOINED, 90, POWER=2)
    spent = sum(os.times()[:4]) - before
    assert any(tmp_path.iterdir()), "it was cached"
    assert 0.02 < spent <= 2, f"{spent:.2f} s"


def test_a_kernel_is_one_whatever_its_arguments_are() -> None:
    """Nothing is compiled again for another number of tensors or another address."""
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
    """The kernels between the launches of a step of some tensors."""
    monkeypatch.setattr(device_step, "KERNELS", {})
    steps(Chain("vectors", chain), 12, engine=COMPILED, turns=REPLAYED)
    return list(device_step.KERNELS.values())


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_between_launches_fit_every_card(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block does them: registers are there, and a power of float64 takes a little stack."""
    kernels = vector_kernels(VECTORS[name], monkeypatch)
    assert kernels
    for card in CARDS:
        for kernel in kernels:
            found = Machine(kernel, card).resources()
            assert (found["STACK"] <= 256, found["LOCAL"]) == (True, 0), found
            assert 0 < found["REG"] < 255, found  # of 255 some would be kept in memory


def test_the_vectors_of_the_headline_compile_in_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processor time, in an empty cache, once a kernel has been compiled in this process."""
    (kernel,) = vector_kernels(VECTORS["headline"], monkeypatch)
    Machine(kernel, 80)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = sum(os.times()[:4])
    Machine(kernel, 90)
    assert 0.02 < sum(os.times()[:4]) - before <= 1


def test_models_of_other_sizes_share_their_vector_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "KERNELS", {})
    for count in (12, 200):
        steps(Chain("many", VECTORS["headline"]), count, engine=COMPILED, turns=REPLAYED)
    assert len(device_step.KERNELS) == 1
