"""target="grad" before a fused optimizer: torch's kernel divides, and gradients and weights are
those of the plain formulas, whoever reads the gradients in between.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from tests.helpers import at_once, run_each
from torchzero_clip import (
    LR,
    AdaClip,
    Adagrad,
    Adam,
    Chain,
    ClipNorm,
    ClipValue,
    Freeze,
    Group,
    Guard,
    Masked,
    Modular,
    Momentum,
    Parallel,
    Scale,
    State,
    TensorList,
    Transform,
    WeightDecay,
    ZClip,
)
from torchzero_clip.engines import Eager

OTHERS = [(name, x) for x in (torch.float64, torch.bfloat16) for name in ("adam", "twice")]
SHAPES = [(3, 4), (4,), (2, 3, 2), ()]


def clip(limit: float = 0.1, **options: Any) -> Transform:
    return ClipNorm(limit, dim="global", target="grad", **options)


class AddsGradients(Transform):
    """u ← u + p.grad"""

    reads = ("grads",)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.add_(group["grads"])


class Keeps(Transform):
    """u, of which it keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        self.seen.extend([t.clone() for t in u])
        return u


def total(lists: Mapping[str, TensorList]) -> TensorList:
    return lists["a"].add(lists["b"])


END = lambda: [Adam(), WeightDecay(0.1), LR(0.01)]  # noqa: E731
CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "adam": lambda: [clip(), *END()],
    "amsgrad": lambda: [clip(), Adam(amsgrad=True), LR(0.01)],
    "within the limit": lambda: [clip(1e6), *END()],
    "a norm of 0": lambda: [clip(0.0), *END()],
    "a group": lambda: [ClipNorm(0.1, dim="group", target="grad"), *END()],
    "a tensor": lambda: [ClipNorm(0.1, target="grad"), *END()],
    "with memory": lambda: [ZClip(target="grad", warmup_steps=2), *END()],
    "momentum": lambda: [clip(), Momentum(0.9), LR(0.01)],
    "nesterov": lambda: [clip(), Momentum(0.9, nesterov=True), LR(0.01)],
    "momentum, decay": lambda: [clip(), Momentum(0.9), WeightDecay(0.1), LR(0.01)],
    "decay behind the rate": lambda: [clip(), Momentum(0.9), LR(0.01), WeightDecay(0.1)],
    "adagrad": lambda: [clip(), Adagrad(), LR(0.01)],
    "no optimizer": lambda: [clip(), LR(0.01)],
    "twice": lambda: [clip(0.5), clip(0.1, name="again"), *END()],
    "values": lambda: [clip(), ClipValue(0.01, target="grad"), *END()],
    "values of the update": lambda: [clip(), ClipValue(0.01), *END()],
    "scaled": lambda: [clip(), Scale(0.5), *END()],
    "scaled before": lambda: [Scale(0.5, target="grad"), clip(), *END()],
    "read by a rule": lambda: [clip(), AddsGradients(), *END()],
    "read behind": lambda: [clip(), Adam(), AddsGradients(), LR(0.01)],
    "measured again": lambda: [clip(0.5), ClipNorm(0.1), *END()],
    "seen by a link with state": lambda: [clip(), AdaClip(), *END()],
    "inside": lambda: [Chain(clip(), name="first"), *END()],
    "of some": lambda: [Masked(clip(), lambda n, p: p.dim() > 1), *END()],
    "in branches": lambda: [clip(), Parallel({"a": Scale(2.0), "b": Scale(0.5)}, total), *END()],
    "behind a guard": lambda: [Guard(), clip(), *END()],
    "taken by nobody": lambda: [clip(), Freeze(lambda n, p: True), *END()],
    "beside an update": lambda: [ClipValue(0.01), clip(), AddsGradients(), *END()],
    "dropped": lambda: [clip(), Masked(Adam(), lambda n, p: p.dim() > 1), LR(0.01)],
}


def model(chain: Sequence[Transform], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    rows = [("w" + str(i), p) for i, p in enumerate(params)]
    return params, Modular([{"params": rows[:2]}, {"params": rows[2:]}], *chain, **options)


def give(params: Sequence[Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = scale * torch.randn(p.shape, dtype=p.dtype, generator=generator)


CASES = [*[(name, torch.float32) for name in CHAINS], *OTHERS]


@pytest.mark.parametrize(
    ("engine", "cases"),
    [
        (Eager, CASES),
        (Accelerated, CASES[::2]),
        pytest.param(Accelerated, CASES[1::2], marks=pytest.mark.slow),
    ],
)
def test_gradients_and_weights_are_those_of_the_plain_step(
    engine: type[Eager], cases: list[tuple[str, torch.dtype]]
) -> None:
    run_each(functools.partial(are_plain, engine=engine), "name, dtype", cases)


def are_plain(name: str, dtype: torch.dtype, engine: type[Eager]) -> None:
    """Compare three steps of an engine with plain steps, each from the same state."""
    fast_params, fast = model(CHAINS[name](), dtype)
    fast.engine = engine()
    plain_params, plain = model(CHAINS[name](), dtype, fused=False)
    near = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2e-2)
    for i, scale in enumerate((1.0, 3.0, 0.01)):
        for params, opt in ((fast_params, fast), (plain_params, plain)):
            give(params, i, scale)
            opt.step()
        for p, q in zip(fast_params, plain_params, strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=near, atol=near / 100)
            torch.testing.assert_close(p.data, q.data, rtol=near, atol=near)
            p.data.copy_(q.data)
        fast.load_state_dict(copy.deepcopy(plain.state_dict()))


@at_once("chain", ["adam", "momentum", "adagrad", "twice"])
def test_no_gradient_waits_beyond_the_step(chain: str) -> None:
    """What divides them lets go of the step, and of them."""
    params, opt = model(CHAINS[chain]())
    for i in range(2):
        give(params, i)
        before = torch.cat([p.grad.flatten() for p in params])
        opt.step()
        after = torch.cat([p.grad.flatten() for p in params])
        limit = 0.1 / before.norm()
        torch.testing.assert_close(after, before * limit)


def seen(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What torch's fused optimizer is told to divide by, call by call."""
    found, kernel = [], getattr(torch, f"_fused_{name}_")

    def noted(*args: Any, **options: Any) -> None:
        found.append(options.get("grad_scale"))
        kernel(*args, **options)

    monkeypatch.setattr(torch, f"_fused_{name}_", noted)
    return found


@at_once("chain", {"adam": "adamw", "momentum": "sgd", "a group": "adamw"}.items())
def test_torchs_kernel_divides_in_its_own_pass(chain: tuple[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = seen(patch, chain[1])
        params, opt = model(CHAINS[chain[0]]())
        give(params, 0)
        grads = [p.grad.clone() for p in params]
        opt.step()
    assert len(found) == 2
    assert all([x.dtype == torch.float32 for x in found])
    for p, grad, ratio in zip(params, grads, [*found[:1] * 2, *found[1:] * 2], strict=True):
        assert torch.equal(p.grad, grad / ratio)


@at_once("name", ["float64", "read", "shared", "update", "of some", "too small"])
def test_it_is_told_to_divide_by_nothing_where_that_would_not_be_the_same(name: str) -> None:
    """Kernels divide in float32, and each gradient once; what is read before is divided before."""
    dtype = torch.float64 if name == "float64" else torch.float32
    chains = {
        "read": CHAINS["read by a rule"],
        "of some": CHAINS["of some"],
        "update": lambda: [ClipNorm(0.1, dim="global"), *END()],
    }
    with pytest.MonkeyPatch.context() as patch:
        found = seen(patch, "adamw")
        params, opt = model(chains.get(name, CHAINS["adam"])(), dtype)
        give(params, 0, 1e33 if name == "too small" else 1.0)
        if name == "shared":
            params[0].grad = params[1].grad.expand(3, 4).contiguous()
            params[1].grad = params[0].grad[0]
        opt.step()
    assert found or name in ("float64", "shared")  # of which no kernel of torch takes any
    assert all([x is None for x in found])


def test_a_function_of_a_user_gets_gradients_that_are_divided() -> None:
    from tests.engines.test_fused import Damped

    w = Parameter(torch.zeros(4))
    w.grad = torch.full((4,), 10.0)
    Modular([w], clip(1.0), Damped(), LR(1.0)).step()
    torch.testing.assert_close(w.data, torch.full((4,), -0.5))
    torch.testing.assert_close(w.grad, torch.full((4,), 0.5))


def test_gradients_in_the_memory_of_parameters_are_divided_too() -> None:
    """The weights are to shrink first, and what lies in their memory is taken from a copy."""
    memory = torch.arange(1.0, 9.0)
    w = Parameter(memory[:4])
    w.grad = memory[4:]
    Modular([w], *CHAINS["momentum, decay"]()).step()
    torch.testing.assert_close(w.grad, 0.1 * torch.arange(5.0, 9.0) / 174**0.5)


def test_a_skipped_step_leaves_gradients_as_they_were() -> None:
    params, opt = model(CHAINS["behind a guard"]())
    give(params, 0)
    params[1].grad[0] = torch.inf
    before = [p.grad.clone() for p in params]
    opt.step()
    assert all([torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True)])


def test_what_a_link_keeps_of_the_gradients_is_divided() -> None:
    keeps = Keeps()
    params, opt = model([clip(), keeps, *END()])
    give(params, 0)
    opt.step()
    assert all([torch.equal(t, p.grad) for t, p in zip(keeps.seen, params, strict=True)])
