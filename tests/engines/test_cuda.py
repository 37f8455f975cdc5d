"""On a GPU: nothing waits, every chain is a CUDA graph, and the numbers are those of the CPU.

`modules/contract` has what every module promises there by itself, `test_capturable.py` what a CUDA
graph needs and a machine without a GPU can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.core.test_norms import EVERY, reference
from tests.engines.test_capturable import GRAPHS, ended, model
from tests.engines.test_fast_plain import PLACES, compare
from tests.helpers import close, gradients, parameters, set_grads
from tests.table import every, over
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Momentum,
    WeightDecay,
    ZClip,
    clip_grad_norm_,
    clip_grad_percentile_,
    clip_grad_value_,
    normalize_grads_,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CHAINS = {
    "clip, adam": lambda: [ClipNorm(1.0, dim="global"), Adam(), LR(0.1)],
    "clip the gradient": lambda: [ClipNorm(1.0, dim="global", target="grad"), Adam(), LR(0.1)],
    "adamw": lambda: [ClipNorm(1.0), Adam(), WeightDecay(0.01), LR(0.1)],
    "momentum": lambda: [ClipNorm(1.0, dim=-1), Momentum(0.9), LR(0.1)],
    "growth of the update": lambda: [ZClip(), Adam(), ClipNormGrowth(dim="global"), LR(0.1)],
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------- nothing waits


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("live", [False, True], ids=["numbers", "lr tensor"])
@pytest.mark.parametrize("chain", CHAINS)
def test_no_chain_waits_for_the_device(chain, live, compiled):
    shapes = {"a.weight": (40, 30), "a.bias": (40,)}
    params, opt = model(CHAINS[chain](), shapes, "cuda", compile=compiled)
    if not live:
        opt.param_groups[0]["lr"] = 0.1
    for i in range(4):
        grads = gradients({n: p.shape for n, p in params.items()}, i, scale=i + 1)
        set_grads(params, {name: g.cuda() for name, g in grads.items()})
        if i < 2:  # state is made
            opt.step()
            continue
        with no_waiting():
            opt.step()


@pytest.mark.parametrize(
    "helper",
    [
        lambda params: clip_grad_norm_(params, 1.0, dim=None),
        lambda params: clip_grad_norm_(params, 1.0, dim="global"),
        lambda params: clip_grad_value_(params, 0.1),
        lambda params: normalize_grads_(params, 1.0),
        lambda params: clip_grad_percentile_(params, 90.0),
    ],
    ids=["norm", "norm of all", "value", "normalize", "percentile"],
)
def test_no_helper_waits_for_the_device(helper):
    params = {name: Parameter(p.detach().cuda()) for name, p in parameters().items()}
    set_grads(params, {name: g.cuda() for name, g in gradients().items()})
    with no_waiting():
        helper(list(params.values()))


# ---------------------------------------------------------------------- CUDA graphs


def replayed(
    chain: list[Any], other: list[Any], shapes: Any, tolerance: float, **options: Any
) -> None:
    """Eager steps and the replays of one captured step agree, with a new `lr` for each."""
    eager_params, eager = model(chain, shapes, "cuda")
    params, opt = model(other, shapes, "cuda", **options)
    held = {name: torch.zeros_like(p) for name, p in params.items()}
    set_grads(params, held)

    def give(i: int) -> None:
        scale = (1.0, 3.0, 0.5)[i % 3]
        given = {name: g.cuda() for name, g in gradients(shapes, i, scale=scale).items()}
        set_grads(eager_params, {name: g.clone() for name, g in given.items()})
        for name, g in given.items():
            held[name].copy_(g)
        for group in [*eager.param_groups, *opt.param_groups]:
            if "lr" in group:
                group["lr"].fill_(0.1 / (1 + i))

    side = torch.cuda.Stream()
    for i in range(3):  # state and memory are made
        give(i)
        eager.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            opt.step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        opt.step()
    for i in range(3, 6):
        give(i)
        eager.step()
        graph.replay()
        torch.cuda.synchronize()
        close(
            {name: p.detach() for name, p in params.items()},
            {name: p.detach() for name, p in eager_params.items()},
            rtol=tolerance,
            atol=tolerance,
        )


@over(GRAPHS)
def test_every_rule_is_captured_and_replayed(case):
    replayed(ended(case), ended(case), case.shapes, 1e-6 if case.exact else 2e-2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_is_captured_and_replayed(chain, compiled):
    shapes = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (3, 2, 2, 2)}
    replayed(CHAINS[chain](), CHAINS[chain](), shapes, 1e-6, compile=compiled)


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("place", PLACES)
@every(lambda case: case.exact)
def test_a_fast_step_on_the_device_is_the_plain_step(case, place):
    if place.endswith("after Adam") and case.make().place == "first":
        return  # refused: test_fast_plain.py
    compare(PLACES[place](case.make()), case.shapes, "cuda")


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("order", EVERY)
def test_the_norm_of_all_is_exact_in_every_order_and_dtype(order, dtype):
    for scale in (1.0, 1e3, 1e-3) if dtype == torch.float16 else (1.0, 1e18, 1e-18, 1e-36):
        check_norm(order, dtype, scale)


def check_norm(order: Any, dtype: torch.dtype, scale: float) -> None:
    """The norm that is returned, and the one after clipping to half of it."""
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(0)
    grads = []
    for size in (1, 257, 5000, 70_001):
        x = torch.randn(size, dtype=drawn, generator=generator) + (order == "sum")
        grads.append((x * scale).to(dtype))
    params = [Parameter(torch.zeros_like(g, device="cuda")) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.cuda()
    total = clip_grad_norm_(params, torch.inf, order, dim="global", min_size=1)
    expected = reference(grads, order)
    assert total.device.type == "cuda"
    assert total.item() == pytest.approx(expected, rel=1e-6, abs=1e-37)  # var leaves the range
    if order not in (0, "l0") and 1e-30 < expected < 1e30:
        clip_grad_norm_(params, expected / 2, order, dim="global", min_size=1)
        half = reference([p.grad.cpu() for p in params], order)
        rounding = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 2e-6)  # of the entries
        assert half == pytest.approx(expected / 2, rel=rounding)
