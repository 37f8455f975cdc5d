"""A list in float32 with an operand in bfloat16: every engine computes in float32, and rounds no
product on the way, whatever the strides of the operand are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from torchzero_clip import LR, Bucket, Group, Modular, State, TensorList, Transform
from torchzero_clip.core import zeros_like_state

Operation = Callable[[TensorList, TensorList], TensorList]


def number(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(0.1, dtype=dtype)


def vector(u: TensorList) -> Tensor:
    return torch.full((len(u),), 0.1)


OPERATIONS: dict[str, Operation] = {
    "add": lambda u, g: u.add(g, alpha=0.1),
    "add_": lambda u, g: u.add_(g, alpha=0.1),
    "add, a tensor": lambda u, g: u.add(g, alpha=number()),
    "add_, a tensor": lambda u, g: u.add_(g, alpha=number(torch.float32)),
    "add, a vector": lambda u, g: u.add(g, alpha=vector(u)),
    "add_, a vector": lambda u, g: u.add_(g, alpha=vector(u)),
    "addcmul_": lambda u, g: u.addcmul_(g, g, value=0.1),
    "addcmul_, a tensor": lambda u, g: u.addcmul_(g, g, value=number()),
    "addcmul_, a tensor and two lists": lambda u, g: u.addcmul_(g, u, value=number()),
    "addcmul_, a vector": lambda u, g: u.addcmul_(g, g, value=vector(u)),
    "lerp": lambda u, g: u.lerp(g, 0.1),
    "lerp_": lambda u, g: u.lerp_(g, number()),
    "mul": lambda u, g: u.mul(g),
    "div_": lambda u, g: u.div_(g),
    "sub": lambda u, g: u.sub(g),
    "hypot": lambda u, g: u.hypot(g),
    "atan2": lambda u, g: u.atan2(g),
    "where": lambda u, g: u.where(g.positive(), g),
    "clamp": lambda u, g: u.clamp(g.neg(), g),
    "copy_": lambda u, g: u.copy_(g),
}


class WithGradients(Transform):
    """An operation on numbers in float32 and the gradients, which are converted first if `wide`."""

    operation: Operation
    wide: bool = False

    reads = ("grads",)
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"sum": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        grads = group["grads"]
        if self.wide:
            grads = grads.to(torch.float32)
        u = state["sum"].add_(u, alpha=0.37).mul(0.9)
        return self.operation(u, grads)


class Keeps(Transform):
    """u, of which it keeps a copy."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        self.seen.extend([t.clone() for bucket in buckets for t in bucket.u.tensors])
        return buckets


def after(operation: Operation, engine: str, strided: bool, wide: bool = False) -> list[Tensor]:
    """Return the results of an operation in two steps."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.1).bfloat16()

    params = [Parameter(drawn(shape)) for shape in [(6, 4), (5,)]]
    keeps = Keeps()
    chain = WithGradients(operation, wide), keeps, LR(0.1)
    compiles = engine in ("recorded", "native")
    options = {"fused": False} if engine == "plain" else {"compile": compiles}
    opt = Modular(params, *chain, rounding="exact", **options)
    if engine == "recorded":  # torch runs what is recorded, so that nothing is compiled
        opt.engine = opt.engine.twin()
    if engine == "accelerated":
        opt.engine = Accelerated()
    for _ in range(2):
        for p in params:
            p.grad = drawn(p.shape)
            if strided and p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()
        opt.step()
    return keeps.seen


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("engine", ["default", "plain", "recorded", "accelerated"])
def test_no_product_is_rounded_to_half_precision(engine: str, strided: bool) -> None:
    wrong: list[str] = []
    for name, operation in OPERATIONS.items():
        seen = after(operation, engine, strided)
        expected = after(operation, "plain", strided, wide=True)
        pairs = zip(seen, expected, strict=True)
        if not all([torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in pairs]):
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("name", ["add_", "addcmul_, a vector"])
def test_a_compiled_kernel_and_torch_beside_it_round_no_product(name: str) -> None:
    """torch computes the tensors whose strides differ, and a kernel the others."""
    seen = after(OPERATIONS[name], "native", strided=True)
    expected = after(OPERATIONS[name], "plain", strided=True, wide=True)
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-7)
