"""compile=True: a kernel that differs from torch is detected before a step uses it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.audit.budgets import COMPILED, Chain, steps
from tests.engines.test_operators import INTERPRETED
from torchzero_clip import (
    LR,
    Adam,
    AutoClip,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    Guard,
    Modular,
    Standardize,
    TensorwiseTransform,
    Transform,
    WeightDecay,
    ZClip,
)
from torchzero_clip.engines import Compiled
from torchzero_clip.engines.compiled.printers import backends, cpp, proof, triton
from torchzero_clip.engines.compiled.printers.program import Program
from torchzero_clip.engines.compiled.replay import compiled_step, native_step

CHAINS: dict[str, Callable[[], Sequence[Transform]]] = {
    "headline": lambda: [ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.01), LR(0.1)],
    "slices": lambda: [ClipNorm(1.0, dim=-1), LR(0.1)],
    "largest": lambda: [ClipNorm(0.1, ord="linf"), LR(0.1)],
    "sums": lambda: [Centralize(), LR(0.1)],
    "guarded": lambda: [Guard(), Adam(), LR(0.1)],
    "in bfloat16": lambda: [Adam(state_dtype="bfloat16"), LR(0.1)],
    "adaptive": lambda: [ZClip(warmup_steps=2), Adam(), LR(0.1)],
    "tensor by tensor": lambda: [ClipNormByEMA(0.9), LR(0.1)],
    "between calls of torch": lambda: [AutoClip(), LR(0.1)],
    "slices, in bfloat16": lambda: [
        Standardize(dim=-1),
        Adam(state_dtype="bfloat16"),
        LR(0.1),
    ],
}
MORE = ("in bfloat16", "tensor by tensor", "slices", "largest")
"""Chains that slow tests repeat. Others have the same kinds of kernels."""
Edit = Callable[[str], str]


@pytest.fixture(autouse=True)
def nothing_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep notes of proofs in a folder of the test, and forget all proofs."""
    place, known = proof.place, (set(proof.PROVEN), set(proof.WRONG))
    monkeypatch.setattr(proof, "place", lambda *words: tmp_path / place(*words).name)
    for one in (proof.PROVEN, proof.WRONG, cpp.native, triton.native):
        getattr(one, "cache_clear", getattr(one, "clear", None))()
    yield
    for one, before in zip((proof.PROVEN, proof.WRONG), known, strict=True):
        one.clear()
        one.update(before)
    cpp.native.cache_clear()
    triton.native.cache_clear()


def model(chain: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape, dtype=dtype)) for shape in ((5, 3), (4,), (70, 20))]
    return params, Modular(params, *CHAINS[chain](), **options)


def step(params: Sequence[Parameter], opt: Modular, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device="cpu").to(p.dtype)
    opt.step()


def plant(monkeypatch: pytest.MonkeyPatch, language: Any, edit: Edit) -> None:
    """Edit the texts of all kernels that a language prints."""
    source = language.source

    def edited(program: Program) -> str | None:
        text = source(program)
        return None if text is None else edit(text)

    monkeypatch.setattr(language, "source", edited)


def found(chain: str, tmp_path: Path) -> None:
    """Check that a step warns, and that all steps have the results of eager steps."""
    ours, fast = model(chain, compile=True)
    theirs, slow = model(chain, fused=False)

    def race() -> None:
        for i in range(6):
            step(ours, fast, i)
            step(theirs, slow, i)
            for p, q in zip(ours, theirs, strict=True):
                torch.testing.assert_close(p.data, q.data, rtol=1e-5, atol=1e-6)

    with pytest.warns(
        UserWarning, match="the results of a compiled kernel differ from the results of PyTorch's"
    ) as told:
        race()
    said = [str(x.message) for x in told if "Please report this as a bug" in str(x.message)]
    assert len(said) == 1
    page = re.search(r"attach the file (\S+\.txt)", said[0])
    assert page is not None
    assert "kernel(" in Path(page[1]).read_text()
    assert f"torch {torch.__version__}" in said[0]
    assert "compiled code" not in fast.explain()
    assert not list(tmp_path.glob(Path(page[1]).stem + ".proven"))


def replaced(old: str, new: str) -> Edit:
    return lambda text: text.replace(old, new)


IN_CPP = {
    "the last entry is left out": ("headline", replaced("j < end", "j < end - 1")),
    "another number": ("headline", replaced("numbers[1]", "numbers[0]")),
    "an operator that is another": ("headline", replaced("root(", "square(")),
    "a norm of twice the size": ("headline", replaced("*out = total", "*out = 4 * total")),
    "a norm of slices": ("slices", replaced("*out = total", "*out = 4 * total")),
    "not the largest": ("largest", replaced("larger(largest, entry(j))", "entry(j)")),
    "a sum of magnitudes": ("sums", replaced("return double(", "return magnitude(")),
    "what a guard keeps": ("guarded", replaced("chosen(vector2, v1, v2)", "v1")),
    "what is rounded": ("in bfloat16", replaced("rounded(v5", "rounded(v8")),
}
SOME = ["the last entry is left out", "a norm of slices"]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in SOME else pytest.mark.slow) for x in IN_CPP]
)
def test_a_wrong_kernel_in_cpp_is_told_and_takes_part_in_no_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, edit = IN_CPP[name]
    plant(monkeypatch, cpp, edit)
    found(chain, tmp_path)
    assert {"cpu"} == proof.WRONG


IN_TRITON = {
    "the last entries are left out": ("headline", replaced("lane < left", "lane < left - 1")),
    "odd addresses": (
        "headline",
        replaced("if ALIGNED else buffer0", "if ALIGNED else buffer0 + 1"),
    ),
    "another number": ("headline", replaced("load(scalars1)", "load(scalars0)")),
    "the statistic of a chunk": ("headline", replaced("total += ", "total += 2 * ")),
    "a norm of slices": ("slices", replaced("total += ", "total += 2 * ")),
    "no kernel": ("headline", replaced("def kernel(", "def kernel(1, ")),
    "a kernel that ends": ("headline", replaced("tl.program_id(0)", "tl.program_id(no_axis)")),
}


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities and NaN
@pytest.mark.parametrize("name", list(IN_TRITON))
def test_a_wrong_kernel_in_triton_is_told_and_takes_part_in_no_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "backend", "triton")
    chain, edit = IN_TRITON[name]
    plant(monkeypatch, triton, edit)
    found(chain, tmp_path)


VECTORS_IN_CPP: dict[str, tuple[str, Edit]] = {
    "another number": ("headline", replaced("double(1) - ", "double(2) - ")),
    "the larger one": ("adaptive", replaced("smaller(", "larger(")),
    "not written": ("adaptive", lambda text: re.sub(r"(.+\[13\]\)\[0\] = .+;)", r"// \1", text)),
    "another row": ("tensor by tensor", replaced("p[37])[j68]", "p[37])[0]")),
    "entries in another order": ("between calls of torch", replaced("[1 + j", "[j")),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow if x in ("another number", "not written") else ())
        for x in VECTORS_IN_CPP
    ],
)
def test_wrong_vectors_in_cpp_are_told_of_and_the_step_has_torchs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, edit = VECTORS_IN_CPP[name]
    changes, text = list[bool](), cpp.CppPrinter.text

    def edited(printer: cpp.CppPrinter) -> str:
        made = text(printer)
        changes.append(edit(made) != made)
        return edit(made)

    monkeypatch.setattr(cpp.CppPrinter, "text", edited)
    found(chain, tmp_path)
    assert changes[0]
    assert {"cpu"} == proof.WRONG


VECTORS_IN_TRITON: dict[str, tuple[str, Edit]] = {
    "another number": ("adaptive", replaced("0.5", "0.25")),
    "the larger one": ("adaptive", replaced("smaller(", "larger(")),
    "lanes left out": ("tensor by tensor", replaced("mask = i", "mask = 1 + i")),
    "no kernel": ("headline", replaced("def kernel(", "def kernel(1, ")),
}


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities and NaN
@pytest.mark.parametrize("name", list(VECTORS_IN_TRITON))
def test_wrong_vectors_in_triton_are_told_of_and_the_step_has_torchs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "backend", "triton")
    chain, edit = VECTORS_IN_TRITON[name]
    changes, kernel = list[bool](), triton.TritonPrinter.kernel

    def edited(printer: triton.TritonPrinter, loops: Any) -> triton.VectorKernel:
        made = kernel(printer, loops)
        changes.append(edit(made.text) != made.text)
        return made._replace(text=edit(made.text))

    monkeypatch.setattr(triton.TritonPrinter, "kernel", edited)
    found(chain, tmp_path)
    assert any(changes)
    assert {"cpu"} == proof.WRONG


@pytest.mark.parametrize("chain", ["headline", "largest"])
def test_a_wrong_kernel_is_found_where_the_first_gradients_are_no_numbers(
    chain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has a global norm, which is a number, or a norm per tensor."""
    plant(monkeypatch, cpp, replaced("= stored<float>(", "= 2 * stored<float>("))
    params, opt = model(chain, compile=True)
    for p in params:
        p.grad = torch.full_like(p, torch.nan)
    with pytest.warns(
        UserWarning, match="the results of a compiled kernel differ from the results of PyTorch's"
    ):
        opt.step()


def test_while_a_graph_is_captured_nothing_is_compared_and_later_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host must not synchronize during a capture."""
    params, opt = model("adaptive", compile=True)
    step(params, opt, 0)
    before = noted(tmp_path)
    for page in (proof, compiled_step):
        monkeypatch.setattr(page, "capturing", lambda device: True)
    monkeypatch.setattr(torch.testing, "assert_close", None)
    for i in range(1, 4):
        step(params, opt, i)
    assert "A replayed step is 1 call of compiled code" in opt.explain()
    assert noted(tmp_path) == before
    monkeypatch.undo()
    monkeypatch.setattr(proof, "place", lambda *words: tmp_path / "later")
    step(params, opt, 4)
    assert noted(tmp_path) == before + 1


def noted(tmp_path: Path) -> int:
    return len(list(tmp_path.glob("*.proven")))


@pytest.mark.parametrize("chain", ["headline"])
def test_a_right_kernel_is_proven_once_and_that_is_noted(
    chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process only looks for the note; another text has no note."""
    tried, compare = [], proof._compare
    monkeypatch.setattr(proof, "_compare", lambda *given: tried.append(compare(*given)))
    counts = []
    for edit in (None, None, replaced("v0", "w0")):
        if edit is not None:
            plant(monkeypatch, cpp, edit)
            cpp.native.cache_clear()
        params, opt = model(chain, compile=True)
        for i in range(4):
            step(params, opt, i)
        counts.append((len(tried), noted(tmp_path)))
        assert "A replayed step is 1 call of compiled code" in opt.explain()
        proof.PROVEN.clear()
    assert counts == [(2, 3), (2, 3), (4, 5)]  # and a kernel of vectors
    assert set() == proof.WRONG


@pytest.mark.parametrize(
    "chain",
    [pytest.param(x, marks=pytest.mark.slow if x in MORE else ()) for x in CHAINS],
)
def test_a_step_that_is_repeated_runs_no_kernel_that_was_not_proven(chain: str) -> None:
    params, opt = model(chain, compile=True)
    for i in range(4):
        step(params, opt, i)
    assert isinstance(opt.engine, Compiled)
    assert opt.engine.replays is not None
    assert opt.engine.replays.count == 2
    assert "a launch" not in opt.explain()
    programs = {launch.program for launch in opt.engine.replays._recorded.compiled._launches}
    assert programs
    assert programs <= proof.PROVEN


def test_a_kernel_that_was_held_against_nothing_is_in_no_native_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is launched separately, so that its first launch proves it."""
    monkeypatch.setattr(backends, "proven", lambda launch, call, *told: call)
    params, opt = model("headline", compile=True)
    for i in range(4):
        step(params, opt, i)
    assert "a launch (2 times)" in opt.explain()


def test_what_is_drawn_is_drawn_on_the_cpu_whatever_the_default_is() -> None:
    params, opt = model("headline", compile=True)
    with torch.device("meta"):
        step(params, opt, 0)
    assert len(proof.PROVEN) == 2


def test_a_kernel_is_tried_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof does not change a step, and it draws none of torch's random numbers."""
    params, opt = model("headline", compile=True)
    monkeypatch.setattr(backends, "proven", lambda launch, call, *told: call)
    step(params, opt, 0)
    ours = [p.detach().clone() for p in params]
    monkeypatch.undo()
    params, opt = model("headline", compile=True)
    torch.manual_seed(3)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    step(params, opt, 0)
    assert torch.equal(torch.rand(3), drawn)
    assert all([torch.equal(p, q) for p, q in zip(params, ours, strict=True)])


def test_imagined_kernels_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.triton, "here", lambda: True)
    *_, last = steps(Chain("headline", CHAINS["headline"]), engine=COMPILED, turns=4)
    assert last.calls == 3
    assert set() == proof.PROVEN


class Rule(TensorwiseTransform):
    """A custom rule that applies a function to each tensor."""

    function: Callable[[torch.Tensor], torch.Tensor]

    pure = True

    def update_tensor(self, u: Any, *given: Any) -> Any:
        return self.function(u)


def shifted(u: torch.Tensor) -> torch.Tensor:
    u[1:].copy_(u[:-1].clone())
    return u


def halved(u: torch.Tensor) -> torch.Tensor:
    return u * 0.5


halved.pure = True  # type: ignore[attr-defined]
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a number that float32 has not": lambda u: torch.where(u.abs() < 1e300, u, u * 0.5),
    "a difference of large numbers": lambda u: u.abs().sqrt() * u.abs().sqrt() - u.abs() * u.tanh(),
    "a product and a sum": lambda u: torch.addcmul(u * u, u, -u),
    "an update that moves": shifted,
}


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_right_is_found_right_and_repeated(name: str, size: float) -> None:
    """Functions overflow, cancel, or copy values that are then overwritten."""
    FUNCTIONS[name].pure = True  # type: ignore[attr-defined]
    made = []
    for options in ({"compile": True}, {"fused": False}):
        params = [Parameter(torch.zeros(1400)), Parameter(torch.zeros(7))]
        opt = Modular(params, Rule(FUNCTIONS[name]), LR(1.0), **options)
        for i in range(5):
            generator = torch.Generator().manual_seed(i)
            for p in params:
                p.grad = size * torch.randn(p.shape, generator=generator)
            opt.step()
        made.append((params, opt.explain()))
    for p, q in zip(made[0][0], made[1][0], strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-4, atol=1e-5 * size**2)
    assert "Steps are replayed" in made[0][1]
    assert set() == proof.WRONG


def test_a_folder_that_goes_away_costs_a_note_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params, opt = model("adaptive", compile=True)
    monkeypatch.setattr(proof, "place", lambda *words: Path("/there/is/none"))
    for i in range(4):
        step(params, opt, i)
    assert "A replayed step is 1 call of compiled code" in opt.explain()


def test_what_torch_cannot_do_tells_nothing_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*given: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(proof, "_by_torch", cannot)
    params, opt = model("adaptive", compile=True)
    for i in range(4):
        step(params, opt, i)
    assert "A replayed step is 1 call of compiled code" in opt.explain()
    assert noted(tmp_path) == 2  # the kernels of lists
    params, opt = model("adaptive", compile=True)
    step(params, opt, 0)
    monkeypatch.setattr(native_step.NativeStep, "run", cannot)
    with pytest.raises(RuntimeError, match="no such operator"):
        step(params, opt, 1)
    assert set() == proof.WRONG


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_numbers_that_tell_nothing_leave_no_note(value: float, tmp_path: Path) -> None:
    """Without a note, the next process compares again."""
    p = Parameter(torch.zeros(9))
    opt = Modular([p], Rule(halved), LR(1.0), compile=True)
    for _ in range(4):
        p.grad = torch.full((9,), value)
        opt.step()
    assert noted(tmp_path) == 1  # the kernel of lists


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_drawn_entries_lie_at_odd_addresses_too_and_none_is_near_zero(dtype: torch.dtype) -> None:
    launches = []
    compare = proof._compare

    def seen(launch: Any, call: Any) -> None:
        launches.append(proof._drawn(launch))
        compare(launch, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_compare", seen)
        params, opt = model("headline", dtype, compile=True)
        step(params, opt, 0)
    for launch in launches:
        for buffer in launch.buffers:
            odd = [t.data_ptr() % 16 != 0 for t in buffer.tensors]
            assert odd == [False, True, False, True]
            assert min([t.abs().amin() for t in buffer.tensors]) > 0.0077
            assert {bool((t < 0).any()) for t in buffer.tensors[:3]} == {True}
