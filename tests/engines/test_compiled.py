"""compile=True gives the results of eager steps, and compiles each kernel once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import torchzero_clip as tz
from tests.engines.test_operators import DTYPES, natively
from tests.helpers import gradients, parameters, set_grads
from tests.table import Case, sampled
from torchzero_clip import (
    AGC,
    LR,
    Accumulate,
    AdaGC,
    Adam,
    Cautious,
    Centralize,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Lambda,
    Lion,
    Masked,
    Modular,
    Momentum,
    Normalize,
    Orthogonalize,
    Scale,
    Transform,
    WeightDecay,
    ZClip,
)
from torchzero_clip.engines import Compiled, buffers
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.lists import runner, tape
from torchzero_clip.engines.compiled.printers import backends, build, cpp
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.replay import native_forms, native_step

Chain = Sequence[Transform]
SHAPES = [(50, 40), (7,), (1,), (), (3, 4, 5), (0,), (64,), *[(8, 8)] * 8]
CHAINS: dict[str, Callable[[], Chain]] = {
    "headline": lambda: [ClipNorm(1.0, dim="global"), Adam(), LR(1e-2)],
    "on gradients": lambda: [ClipNorm(1.0, dim="global", target="grad"), Adam(), LR(1e-2)],
    "each tensor": lambda: [ClipNorm(0.5), Adam(), WeightDecay(0.01), LR(1e-2)],
    "values": lambda: [ClipValue(0.01), Momentum(0.9), LR(1e-2)],
    "nesterov": lambda: [Momentum(0.9, nesterov=True), LR(1e-2)],
    "between": lambda: [ZClip(warmup_steps=2), Adam(), ClipNormGrowth(dim="global"), LR(1e-2)],
    "normalize": lambda: [Normalize(dim="global"), LR(1e-2)],
    "memory": lambda: [AdaGC(warmup_steps=1), Adam(amsgrad=True), LR(1e-2)],
    "signs": lambda: [Lion(), Cautious(), LR(1e-3)],
}


def params_of(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype)


def close(a: Any, b: Any, dtype: torch.dtype = torch.float32) -> None:
    exact = dtype in (torch.float32, torch.float64)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6 if exact else 1e-2, atol=1e-6, equal_nan=True)


def state_of(opt: Modular) -> list[Tensor]:
    held = [opt.state[p] for group in opt.param_groups for p in group["params"]]
    return [value for one in held for value in one.values() if isinstance(value, Tensor)]


def race(
    fast: Modular, slow: torch.optim.Optimizer, steps: int = 4, dtype: torch.dtype = torch.float32
) -> None:
    """Check that two optimizers have the same parameters, gradients and state after each step."""
    ours, theirs = ([p for g in opt.param_groups for p in g["params"]] for opt in (fast, slow))
    for i in range(steps):
        for params in (ours, theirs):
            give(params, i, scale=0.01 if i == 3 else 1.0)
        fast.step()
        slow.step()
        close([p.grad for p in ours], [p.grad for p in theirs], dtype)
        close(ours, theirs, dtype)
    if isinstance(slow, Modular):
        close(state_of(fast), state_of(slow), dtype)


def races() -> Iterator[Any]:
    """Yield chains and dtypes. All but one chain in other dtypes than float32 are slow tests."""
    for name, dtype in itertools.product(CHAINS, DTYPES):
        quick = (
            dtype == torch.float32 and name not in ("nesterov", "normalize", "signs")
        ) or name == "headline"
        yield pytest.param(
            name, dtype, marks=() if quick else pytest.mark.slow, id=f"{name}-{dtype}"
        )


@pytest.mark.parametrize(("name", "dtype"), [*races()])
def test_compiled_chains_give_the_results_of_eager_chains(name: str, dtype: torch.dtype) -> None:
    ours, theirs = params_of(SHAPES), params_of(SHAPES)
    for p in [*ours, *theirs]:
        p.data = p.data.to(dtype)
    fast, slow = Modular(ours, *CHAINS[name](), compile=True), Modular(theirs, *CHAINS[name]())
    race(fast, slow, dtype=dtype)
    assert list(fast.metrics()) == list(slow.metrics())


def never(*_: Any) -> None:
    raise AssertionError("this should have been done in C++")


def done_in_cpp(launch: Launch, backend: str) -> cpp.Call:
    call = backends.call_of(launch, backend)
    assert call is not None, "this should have been done in C++"
    return call


# as many matrices as a row has entries, and fewer: a step has equal shapes side by side
STACKS = {
    f"{n}x{m}.{i}.weight": (n, m) for n, m, count in [(8, 5, 3), (5, 5, 5)] for i in range(count)
}


@sampled(one_in=8)
def test_every_rule_compiles(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Each rule runs before Adam, or after it, with compile=True and with fused=False; the last two
    of four steps are replays."""
    monkeypatch.setattr(runner, "call_of", done_in_cpp)
    tail = [Adam()] if any("lr" in link.live for link in case.make().walk()) else [Adam(), LR(0.01)]
    shapes = {**case.shapes, **STACKS}
    made = []
    for options in ({"compile": True}, {"fused": False}):
        params = parameters(shapes, torch.float64)
        chain = [*tail, case.make()] if case.last else [case.make(), *tail]
        made.append((params, Modular(list(params.items()), *chain, **options)))
    for i in range(4):
        for params, opt in made:
            set_grads(params, gradients(shapes, i, torch.float64))
            opt.step()
    for name, p in made[0][0].items():
        other = made[1][0][name]
        torch.testing.assert_close(p, other, rtol=1e-9, atol=1e-9, equal_nan=True)


# ---------------------------------------------------------------------- C++


def halves(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield numbers in half precision and in float32, each with PyTorch's conversion to the other.

    The numbers are all numbers of half precision, the means of neighbors, and random float32 bits.
    """
    known = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ends = known[known.isfinite()].sort().values
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (2**20,), generator=generator)
    singles = torch.cat(
        [ends, (ends[1:] + ends[:-1]) / 2, any_bits.to(torch.int32).view(torch.float32)]
    )
    for source, target in ((known.to(dtype), torch.float32), (singles, dtype)):
        yield source, source.to(target)


def copied(source: Tensor, dtype: torch.dtype, run: Callable[[Launch], Any]) -> Tensor:
    """Convert a tensor by a program that copies it to another dtype; `run` runs its launch."""
    out = torch.zeros(len(source), dtype=dtype)
    program = Program(
        (("load", (("buffer", 0),)),), ((1, 0),), None, (source.dtype, dtype), (), (),
        torch.device("cpu"),
    )  # fmt: skip
    run(Launch(program, [len(source)], None, [Buffer([source]), Buffer([out])], [], [], []))
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_converted_as_in_pytorch(dtype: torch.dtype) -> None:
    for source, right in halves(dtype):
        ours = copied(source, right.dtype, natively)
        torch.testing.assert_close(ours, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_kernels_measure_norms_to_1e_6(
    monkeypatch: pytest.MonkeyPatch, order: float, threads: int
) -> None:
    """For all sizes, dtypes and ranges, and any number of threads."""
    monkeypatch.setattr(tape, "statistics", never)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measures_right(order, [*SHAPES, (1000, 701)])
    finally:
        torch.set_num_threads(before)


def measures_right(order: float, shapes: Sequence[tuple[int, ...]]) -> None:
    """Check that norms by kernels are accurate to 1e-6 in every range."""
    for dtype, scales in (
        (torch.float32, [1.0, 1e20, 1e-30, 1e-40]),
        (torch.bfloat16, [1.0, 1e20, 1e-39]),
        (torch.float16, [1.0, 1e4, 1e-6]),
    ):
        for scale in scales:
            ours = [p.detach().mul(scale).to(dtype) for p in params_of(shapes)]
            right = [
                torch.linalg.vector_norm(t.double().view(-1), order) for t in ours if t.numel()
            ]
            norm = norms_of(ours, order).double()[[t.numel() > 0 for t in ours]]
            torch.testing.assert_close(norm, torch.stack(right), rtol=1e-6, atol=1e-45)


def norms_of(grads: Sequence[Tensor], order: float) -> Tensor:
    """Return the norms of gradients as a compiled step measures them."""
    params = [Parameter(torch.zeros_like(t)) for t in grads]
    opt = Modular(params, ClipNorm(1.0, ord=order), LR(0.0), compile=True)
    for p, t in zip(params, grads, strict=True):
        p.grad = t.clone()
    opt.step()
    (norm,) = [v for k, v in opt.metrics().items() if k.endswith("norm")]
    return norm


@pytest.mark.parametrize("order", [1, 2, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_kernels_measure_norms_of_nan_and_inf(
    monkeypatch: pytest.MonkeyPatch, bad: float, order: float
) -> None:
    monkeypatch.setattr(tape, "statistics", never)
    norm = norms_of(with_one_that_is(bad), order)
    torch.testing.assert_close(norm[0], torch.tensor(bad).to(norm), equal_nan=True)
    assert norm[1].isfinite()


def with_one_that_is(bad: float) -> list[Tensor]:
    """Return two gradients. One element of the first is NaN or infinite."""
    grads = [p.detach() for p in params_of([(300, 5), (7,)])]
    grads[0][200, 3] = bad
    return grads


# ---------------------------------------------------------------------- slices

SLICED: dict[str, Callable[[], Chain]] = {
    "AGC": lambda: [AGC(0.1), Adam(), LR(0.1)],
    "a mean": lambda: [Centralize(dim=0, inverse_dims=True), Momentum(), LR(0.1)],
    "two": lambda: [ClipNorm(0.5, dim=1), Normalize(dim=0, inverse_dims=True, ord=1), LR(0.1)],
    "then all": lambda: [Normalize(dim=1, ord="inf"), ClipNorm(1.0, dim="global"), LR(0.1)],
}
"""Chains that measure slices which are contiguous in memory."""


def like_eager(
    chain: Callable[[], Chain], shapes: Sequence[tuple[int, ...]], turned: bool = False
) -> Modular:
    """Check that both engines give the same steps; return the compiled optimizer."""
    ways = [params_of(shapes), params_of(shapes)]
    made = [Modular(ways[0], *chain()), Modular(ways[1], *chain(), compile=True)]
    for i in range(5):
        for params, opt in zip(ways, made, strict=True):
            give(params, i)
            for p in params if turned else ():
                if p.grad is not None and p.dim() == 2:
                    p.grad = p.grad.t().contiguous().t()
            opt.step()
            for path, value in opt.metrics().items():
                assert torch.is_tensor(value), path
        close(*ways)
    told = [opt.metrics() for opt in made]
    for path, value in told[0].items():
        torch.testing.assert_close(told[1][path], value, rtol=1e-5, atol=1e-7)
    return made[1]


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        pytest.param(name, threads, marks=() if (i + threads) % 2 else pytest.mark.slow)
        for i, name in enumerate(SLICED)
        for threads in (1, 2)
    ],
)
def test_slices_need_no_more_passes_than_whole_tensors(name: str, threads: int) -> None:
    """A step is one native call for all shapes; a vector without the dim is one slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        opt = like_eager(SLICED[name], [(300, 701), (33,), (4, 3, 1, 1), (1, 5), (7, 1), ()])
    finally:
        torch.set_num_threads(before)
    assert isinstance(opt.engine, Compiled)
    assert opt.engine.replays is not None
    assert opt.engine.says([])[1:] == ["A replayed step is 1 call of compiled code."]


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_transposed_gradients_equal_the_eager_ones(name: str) -> None:
    like_eager(SLICED[name], [(30, 7), (5,), (8, 4)], turned=True)


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_norms_of_slices_are_accurate_to_1e_6(order: float) -> None:
    """In every range. A NaN makes only the norm of its own slice NaN."""
    for scale in (1.0, 1e20, 1e-30):
        grad = torch.randn(5, 300) * scale
        grad[3, 7] = float("nan")
        p = Parameter(torch.zeros(5, 300))
        opt = Modular([p], ClipNorm(1.0, dim=1, ord=order), LR(0.0), compile=True)
        p.grad = grad.clone()
        opt.step()
        (norm,) = [v for k, v in opt.metrics().items() if k.endswith("norm")]
        right = torch.linalg.vector_norm(grad.double(), order, dim=1)
        torch.testing.assert_close(norm.double(), right, rtol=1e-6, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- compiled once


def built() -> int:
    """Return how many kernels this process has compiled."""
    return cpp.native.cache_info().misses


def test_nothing_is_recompiled_for_hyperparameters_schedulers_or_missing_gradients() -> None:
    params, more = params_of(SHAPES), params_of([(9, 2), (33,), (5,)])
    chain = [ClipNorm(1.0), Momentum(0.9, nesterov=True), Adam(), WeightDecay(0.01), LR(1e-2)]
    opt = Modular([{"params": params}, {"params": more, "lr": 0.5}], *chain, compile=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    give([*params, *more], 0)
    opt.step()
    before = built()
    changes: dict[str, list[Any]] = {
        "max_norm": [0.0, 1e-3, float("inf"), 7],
        "momentum": [0.0, 0.5],
        "dampening": [0.25, 0.0, 1],
        "betas": [(0.0, 0.5), (0.5, 0.0)],
        "eps": [0.0, 1e-3],
        "weight_decay": [0.0, 1, 0.3],
        "lr": [0.0, 1, 3e-4, torch.tensor(0.1)],
    }
    assert set(changes) == {key for link in opt.links for key in link.keys.values()}
    for key, values in changes.items():
        for value in values:
            opt.param_groups[0][key] = value
            give([*params, *more], 1)
            opt.step()
    for group in opt.param_groups:
        group["lr"] = 0.1
    for i in range(5):
        give([*params, *more], i)
        for p in params[i :: 2 + i]:
            p.grad = None
        if i == 3:
            opt.add_param_group({"params": params_of([(5, 5), (2,)])})
        opt.step()
        scheduler.step()
    give(params[:1], 0)
    opt.zero_grad()
    give(params[4:5], 0)
    opt.step()
    assert built() == before


def test_another_optimizer_with_the_same_chain_uses_the_same_kernels() -> None:
    counts = []
    for shapes in (SHAPES, [(100, 3), *SHAPES, (11,)]):
        params = params_of(shapes)
        opt = Modular(params, ClipNorm(1.0), Adam(), LR(1e-2), compile=True)
        give(params, 0)
        opt.step()
        counts.append(built())
    assert counts[0] == counts[1]


def test_compiled_clipping_and_adam_equal_torch() -> None:
    shapes = [(300, 700), *[(i + 2, 3) for i in range(37)]]
    ours, theirs = params_of(shapes), params_of(shapes)
    fast = Modular(ours, ClipNorm(1.0, dim="global"), Adam(), LR(1e-2), compile=True)
    slow = torch.optim.Adam(theirs, lr=1e-2)
    for i in range(3):
        give(ours, i)
        give(theirs, i)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        fast.step()
        slow.step()
    close(ours, theirs)


# ---------------------------------------------------------------------- what is recorded


def recording(
    monkeypatch: pytest.MonkeyPatch, params: Sequence[Parameter], *chain: Transform, **options: Any
) -> tuple[Modular, list[Program]]:
    """Return an optimizer whose programs run node by node, and the list of programs that ran."""
    opt = Modular(params, *chain, compile=True, **options)
    assert isinstance(opt.engine, Compiled)
    opt.engine.backend = "plain"
    seen: list[Program] = []
    run = opt.engine.run

    def watched(launch: Launch) -> Tensor | None:
        seen.append(launch.program)
        return run(launch)

    monkeypatch.setattr(opt.engine, "run", watched)
    return opt, seen


def test_a_chain_with_one_norm_has_one_kernel_that_writes_only_state_and_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = params_of([(4, 5), (6,)])
    chain = [ClipNorm(1.0), Adam(), WeightDecay(0.1), LR(0.1)]
    opt, seen = recording(monkeypatch, params, *chain)
    give(params, 0)
    opt.step()
    norm, kernel = seen
    assert not norm.stores
    assert len(kernel.stores) == 3
    assert len(kernel.buffers) == 4  # with the gradients
    assert not opt.engine.lasting(), "no buffer is kept for an update that nobody reads"


def test_an_update_that_is_not_used_later_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum returns its buffer, so the clamped gradient is not used again."""
    params = params_of([(4, 5), (6,)])
    opt, seen = recording(monkeypatch, params, ClipValue(0.1), Momentum(0.9), LR(0.1))
    give(params, 0)
    opt.step()
    (kernel,) = seen
    assert len(kernel.stores) == 2
    assert not opt.engine.lasting()


def test_a_norm_of_the_update_leads_to_two_kernels_and_one_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = params_of([(4, 5), (6,)])
    opt, seen = recording(monkeypatch, params, Adam(), ClipNorm(1.0), LR(0.1))
    for i in range(3):
        give(params, i)
        opt.step()
    assert len(seen) == 2 * (3 + 1)  # three steps, the second of which is also recorded
    assert len(set(seen)) == 2
    assert seen[0].measured, "the kernel that makes the update measures it"
    assert len(opt.engine.lasting()) == len(params)


def test_kernels_are_the_same_whether_or_not_the_norm_exceeds_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = params_of([(4, 5), (6,)])
    opt, seen = recording(monkeypatch, params, ClipNorm(1.0, dim="global"), LR(0.1))
    for scale in (100.0, 1e-3, 100.0):
        give(params, 0, scale)
        opt.step()
    assert len(seen) == 2 * (3 + 1)
    assert len(set(seen)) == 2  # one measures the norm


def test_a_link_that_reads_values_receives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def look(t: Tensor) -> Tensor:
        seen.append(t.clone())
        return t * 2

    params = params_of([(4, 5)])
    opt, _ = recording(monkeypatch, params, ClipValue(0.5), Lambda(look), LR(1.0))
    give(params, 0)
    start, grad = params[0].detach().clone(), params[0].grad
    opt.step()
    assert grad is not None
    torch.testing.assert_close(seen[0], grad.clamp(-0.5, 0.5))
    torch.testing.assert_close(params[0].detach(), start - 2 * grad.clamp(-0.5, 0.5))


def test_custom_transforms_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Soften(Transform):
        def init(self, param: Tensor) -> dict[str, Tensor]:
            return {"seen": torch.zeros_like(param), "count": torch.zeros(())}

        def update(self, u: Any, state: Any, group: Any) -> Any:
            share = 1 / state["count"].add_(1).stack()
            state["seen"].maximum_(u.abs())
            return u.div_(state["seen"].add(1.0)).mul_(share)

    ours, theirs = params_of(SHAPES), params_of(SHAPES)
    fast, seen = recording(monkeypatch, ours, Soften(), LR(0.1))
    slow = Modular(theirs, Soften(), LR(0.1))
    race(fast, slow, steps=3)
    assert len(seen) == 3


def test_channels_last_and_strided_tensors_keep_their_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (
        params_of([(4, 3, 5, 5), (6, 4), (8, 8)]),
        params_of([(4, 3, 5, 5), (6, 4), (8, 8)]),
    )
    for params in (ours, theirs):
        params[0].data = params[0].data.to(memory_format=torch.channels_last)
        params[1].data = params[1].data.t().contiguous().t()
        params[2].data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))[:, ::2]
    fast, _ = recording(monkeypatch, ours, ClipNorm(1.0), Adam(), LR(0.1))
    slow = Modular(theirs, ClipNorm(1.0), Adam(), LR(0.1), fused=False)
    for i in range(3):
        for params in (ours, theirs):
            give(params, i)
        ours[0].grad = ours[0].grad.contiguous() if i == 1 else ours[0].grad  # type: ignore[union-attr]
        fast.step()
        slow.step()
    close(ours, theirs)
    assert ours[0].is_contiguous(memory_format=torch.channels_last)


def test_a_mask_gives_parts_of_a_model_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(4, 5), (6,), (7, 2), (3,)]
    matrices: Callable[[str, Tensor], bool] = lambda name, p: p.dim() == 2  # noqa: E731
    chain = [Masked(tz.Chain(Momentum(0.9), Orthogonalize()), matrices), Adam(), LR(0.1)]
    ours, theirs = params_of(shapes), params_of(shapes)
    fast, _ = recording(monkeypatch, ours, *chain)
    race(fast, Modular(theirs, *chain, fused=False), steps=3)


def test_links_before_a_write_to_gradients_see_the_old_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link keeps its input as state; a later link writes the gradients of a part of the model."""

    class Keep(Transform):
        leaves = "gradient"

        def init(self, param: Tensor) -> dict[str, Tensor]:
            return {"seen": torch.zeros_like(param)}

        def update(self, u: Any, state: Any, group: Any) -> Any:
            state["seen"].add_(u)
            return u

    vectors: Callable[[str, Tensor], bool] = lambda name, p: p.dim() == 1  # noqa: E731
    params = params_of([(4, 5), (6,)])
    chain = [Keep(), Masked(ClipNorm(0.1, target="grad"), vectors), LR(0.1)]
    opt, _ = recording(monkeypatch, params, *chain)
    give(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    opt.step()
    for p, grad in zip(params, before, strict=True):
        torch.testing.assert_close(opt.state[p]["Keep/seen"], grad)
    assert params[1].grad is not None
    torch.testing.assert_close(params[1].grad.norm(), torch.tensor(0.1))


class AddGrads(Transform):
    reads = ("grads",)

    def update(self, u: Any, state: Any, group: Any) -> Any:
        return u.add_(group["grads"])


class Delay(Transform):
    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"before": torch.zeros_like(param)}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        old = state["before"].clone()
        state["before"].copy_(u)
        return old


class Overwrite(Transform):
    """A rule that writes tensors one by one, after recording an operator on them."""

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(param)}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        old = state["m"].mul(0.9)
        for t, g in zip(state["m"], u, strict=True):
            t.copy_(g)
        return old


class Halving(Transform):
    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"s": torch.ones(())}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        u = u.mul_(state["s"])
        state["s"].mul_(0.5)
        return u.mul_([2.0] * len(u))


class KeepParameters(Transform):
    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"old": torch.zeros_like(param)}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        state["old"].copy_(group["params"])
        return u


class Plain(Transform):
    def update(self, u: Any, state: Any, group: Any) -> Any:
        return tz.TensorList([t * 0.1 for t in u])


class Mixed(Transform):
    """A rule whose state has two dtypes."""

    def init(self, param: Tensor) -> dict[str, Tensor]:
        dtype = torch.bfloat16 if param.dim() >= 2 else torch.float32
        return {"m": torch.zeros_like(param, dtype=dtype)}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        m = state["m"].mul_(0.5)
        return u.mul_(2.0).add_(m)


class Difference(Transform):
    """A rule that keeps a list from one step to the next."""

    def update(self, u: Any, state: Any, group: Any) -> Any:
        kept, now = getattr(self, "_kept", None), u.clone()
        object.__setattr__(self, "_kept", now)
        return u if kept is None else u.sub_(kept)


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() == 2


ORDERS: dict[str, Callable[[], Chain]] = {
    "scale, then read": lambda: [ClipNorm(0.1, target="grad"), Scale(-2.0), Cautious(), LR(0.1)],
    "accumulate": lambda: [
        Accumulate(2), ClipNorm(0.5, target="grad"), Adam(), Cautious(), LR(0.1),
    ],
    "rows": lambda: [Adam(), ClipNorm(0.1, dim=0, target="grad"), Cautious(), LR(0.1)],
    "function": lambda: [Momentum(0.9), Lambda(torch.tanh, target="grad"), AddGrads(), LR(0.1)],
    "a part": lambda: [
        Adam(), Masked(Cautious(target="grad"), is_matrix), AddGrads(), LR(0.1),
    ],
    "not reached": lambda: [ClipNorm(1e6), Scale(0.5, target="grad"), AddGrads(), LR(0.1)],
    "delay": lambda: [Delay(), ClipNorm(1.0), LR(0.1)],
    "overwrite": lambda: [Overwrite(), LR(0.1)],
    "halving": lambda: [Halving(), LR(0.1)],
    "keep parameters": lambda: [KeepParameters(), Plain()],
    "mixed": lambda: [Mixed(), LR(0.1)],
    "kept": lambda: [Adam(), Difference(), ClipNorm(0.3), LR(0.1)],
}  # fmt: skip


@pytest.mark.parametrize("way", ["fused", "recorded"])
@pytest.mark.parametrize("name", ORDERS)
def test_reads_and_writes_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    shapes = [*SHAPES, (30, 4), (9,)]
    ours, theirs = params_of(shapes), params_of(shapes)
    slow = Modular(theirs, *ORDERS[name](), fused=False)
    fast = Modular(ours, *ORDERS[name]())
    if way == "recorded":
        fast, _ = recording(monkeypatch, ours, *ORDERS[name]())
    race(fast, slow)


def test_many_small_tensors_in_other_memory_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowd() -> list[Parameter]:
        return params_of([(8, 3, 3, 3)] * 20 + [(8, 8)] * 20)

    ours, theirs = crowd(), crowd()
    for params in (ours, theirs):
        for p in params[:20]:
            p.data = p.data.to(memory_format=torch.channels_last)
    fast, _ = recording(monkeypatch, ours, ClipNorm(1.0), Adam(), LR(0.1))
    slow = Modular(theirs, ClipNorm(1.0), Adam(), LR(0.1), fused=False)
    for i in range(3):
        give(ours, i)
        for j, whole in enumerate(torch.randn(20, 8, 8).unbind()):
            ours[20 + j].grad = whole.t()
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone() if p.grad is not None else None
        fast.step()
        slow.step()
    close(ours, theirs)


def test_a_parameter_may_become_another_view_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Parameter(torch.arange(9.0).view(3, 3))
    opt, _ = recording(monkeypatch, [p], LR(0.1))
    p.grad = torch.zeros(3, 3)
    opt.step()
    p.grad = None
    p.data = p.data.t()
    p.grad = torch.arange(9.0).view(3, 3)
    before = p.detach().clone()
    opt.step()
    torch.testing.assert_close(p.detach(), before - 0.1 * p.grad)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_lazily_negated_gradient_keeps_its_sign(shape: Any) -> None:
    """Autograd returns such gradients for real parameters in complex arithmetic."""
    a, b = [Parameter(torch.ones(shape)) for _ in range(2)]
    opt = Modular([a, b], LR(0.1), compile=True)
    for _ in range(4):
        opt.zero_grad()
        (torch.complex(a, b).conj() * torch.tensor(1 + 1j)).real.backward()
        assert b.grad is not None
        assert b.grad.is_neg()
        before, grad = b.detach().clone(), b.grad.item()
        opt.step()
        torch.testing.assert_close(b.detach(), before - 0.1 * grad)


def test_autograd_notices_that_parameters_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = Parameter(torch.randn(4, 4)), torch.randn(4, requires_grad=True)
    opt, _ = recording(monkeypatch, [w], LR(0.1))
    y, z = (w @ x).sum(), (torch.tanh(x) @ w).pow(2).sum()
    y.backward()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_a_gradient_of_another_size_raises_an_error_before_memory_is_read(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """A parameter may get more memory while its gradient stays the same."""
    monkeypatch.setattr(Compiled, "backend", backend)
    params = params_of([(3, 4), (5,)])
    opt = Modular(params, Momentum(0.9), LR(0.1), compile=True)
    give(params, 0)
    opt.step()
    params[0].data = torch.ones(300, 400)
    with pytest.raises(
        ValueError, match=r"has shape \(300, 400\), but its gradient has shape \(3, 4\)"
    ):
        opt.step()
    params[0].grad = torch.ones(300, 400)
    with pytest.raises((RuntimeError, ValueError), match=r"size|shape"):  # its state is too small
        opt.step()


def test_a_refused_group_is_not_added() -> None:
    opt = Modular(params_of([(3, 2)]), Adam(), LR(0.1), compile=True)
    with pytest.raises(RuntimeError, match="on cpu, cuda, xpu and mps"):
        opt.add_param_group({"params": [Parameter(torch.ones(2, device="meta"))]})
    assert len(opt.param_groups) == 1


def test_complex_parameters_step_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [Parameter(torch.ones(3, dtype=torch.complex64)), Parameter(torch.ones(4))]
    opt, seen = recording(monkeypatch, ours, ClipNorm(1.0, dim="global"), Adam(), LR(0.1))
    for p in ours:
        p.grad = torch.ones_like(p)
    opt.step()
    assert len(seen) == 2
    torch.testing.assert_close(ours[0].real.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "exact"])
def test_every_rounding_rounds_updates_of_kernels(rounding: str) -> None:
    def run(**options: Any) -> list[Parameter]:
        params = [Parameter(torch.ones(40, 3, dtype=torch.bfloat16))]
        opt = Modular(params, Adam(), LR(1e-3), rounding=rounding, **options)
        if isinstance(opt.engine, Compiled):
            opt.engine.backend = "plain"
        for i in range(5):
            give(params, i)
            opt.step()
        return params

    torch.testing.assert_close(run(compile=True), run(), rtol=0, atol=0)


# ---------------------------------------------------------------------- state, and failures


def test_state_can_be_loaded_with_and_without_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = params_of(SHAPES), params_of(SHAPES)
    chain = CHAINS["memory"]()
    fast, _ = recording(monkeypatch, ours, *chain)
    slow = Modular(theirs, *chain)
    for i in range(4):
        give(ours, i)
        give(theirs, i)
        fast.step()
        slow.step()
        held = copy.deepcopy(fast.state_dict())
        assert held["state"][0].keys() == slow.state_dict()["state"][0].keys()
        fast.load_state_dict(copy.deepcopy(slow.state_dict()))
        slow.load_state_dict(held)
    close(ours, theirs)


def test_a_copy_of_a_compiled_optimizer_is_compiled() -> None:
    params = params_of([(3, 2)])
    opt = Modular(params, Adam(), LR(0.1), compile=True)
    assert isinstance(copy.deepcopy(opt).engine, Compiled)
    assert not isinstance(copy.deepcopy(Modular(params, Adam(), LR(0.1))).engine, Compiled)


def test_without_a_compiler_construction_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    with pytest.raises(RuntimeError, match="compile=True needs a C\\+\\+ compiler: install"):
        Modular(params_of([(3, 2)]), Adam(), LR(0.1), compile=True)
    params = [Parameter(torch.ones(3, device="meta"))]
    with pytest.raises(RuntimeError, match="on cpu, cuda, xpu and mps, got a parameter on meta"):
        Modular(params, Adam(), LR(0.1), compile=True)


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[], None]:
    """Return a function that forgets built libraries; keep libraries in a folder of the test."""
    monkeypatch.setenv("TORCHZERO_CLIP_CACHE", str(tmp_path / "kept"))

    def forget() -> None:
        for room, name in ((cpp, "native"), (build, "function"), (build, "_folder")):
            monkeypatch.setattr(room, name, cache(getattr(room, name).__wrapped__))
        monkeypatch.setattr(cpp, "function", build.function)
        monkeypatch.setattr(native_step, "function", build.function)

    forget()
    return forget


def test_after_a_failure_of_the_compiler_programs_run_by_operators(
    monkeypatch: pytest.MonkeyPatch, forgets: Callable[[], None], tmp_path: Any
) -> None:
    monkeypatch.setattr(build, "FLAGS", "--there-is-no-such-flag")
    monkeypatch.setattr(native_step, "FLAGS", "--there-is-no-such-flag")
    monkeypatch.setattr(native_forms, "FLAGS", "--there-is-no-such-flag")
    ours, theirs = params_of(SHAPES), params_of(SHAPES)
    fast = Modular(ours, *CHAINS["between"](), compile=True)
    with pytest.warns(UserWarning, match=r"the C\+\+ compiler failed, so steps are slower"):
        race(fast, Modular(theirs, *CHAINS["between"]()))
    assert not list((tmp_path / "kept").iterdir())


def test_libraries_are_kept_for_the_next_process(
    monkeypatch: pytest.MonkeyPatch, forgets: Callable[[], None], tmp_path: Any
) -> None:
    for _ in range(2):
        ours, theirs = params_of(SHAPES), params_of(SHAPES)
        race(
            Modular(ours, *CHAINS["headline"](), compile=True),
            Modular(theirs, *CHAINS["headline"]()),
        )
        kinds = sorted([path.suffix for path in (tmp_path / "kept").iterdir()])
        assert kinds == [".proven"] + [".so"] * 3  # the norm, the rest, and the step
        monkeypatch.setattr("subprocess.run", None)  # nothing is built again
        forgets()
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_programs_run_by_operators_if_a_library_does_not_load(
    monkeypatch: pytest.MonkeyPatch, forgets: Callable[[], None]
) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: built for another machine")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    ours, theirs = params_of(SHAPES), params_of(SHAPES)
    links = CHAINS["normalize"]
    with pytest.warns(UserWarning, match="built for another machine"):
        race(Modular(ours, *links(), compile=True), Modular(theirs, *links()), steps=2)


def test_without_a_cache_folder_libraries_last_as_long_as_the_process(
    monkeypatch: pytest.MonkeyPatch, forgets: Callable[[], None], tmp_path: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHZERO_CLIP_CACHE", str(tmp_path / "file" / "kept"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="kernels are not cached on disk: .*file"):
        assert build._folder().parent == tmp_path
    assert build._folder() == build._folder()


def test_buffers_of_changing_parameters_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "BUFFERS_KEPT", 8)
    params = params_of([(3, 2)] * 12)
    opt, _ = recording(monkeypatch, params, Adam(), LR(0.1))
    for p in params:
        opt.zero_grad()
        give([p], 0)
        opt.step()
    assert isinstance(opt.engine, Compiled)
    assert len(opt.engine.buffers.known) <= 8


def test_explain_counts_the_bytes_that_kernels_move() -> None:
    params = params_of([(100, 30)])
    text = Modular(params, ClipNorm(1.0), Adam(), LR(0.1), compile=True).explain()
    assert "one compiled kernel" in text
    assert "total        20      12" in text, text
