"""What tests of every kind share: small models, their gradients, and comparisons."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from torchzero_clip import Modular, Transform
from torchzero_clip.core import Bucket, Step, in_buckets, send
from torchzero_clip.engines import AT_ONCE

ROOT = Path(__file__).parents[1]
# imported only if Triton is installed
KERNELS = "torchzero_clip.engines.compiled.printers.triton_include"
SHAPES = {
    "embed.weight": (4, 3),
    "embed.bias": (4,),
    "conv.weight": (2, 3, 2, 2),
    "head.weight": (3, 4),
    "head.scale": (),
    "head.one": (1,),
}

since_2_12 = pytest.mark.skipif(
    not hasattr(torch, "_foreach_clone"), reason="torch traces a step since 2.12"
)

Named = dict[str, Parameter]


Tensors = dict[str, Tensor]


class Probe(Transform):
    """Ends the step and keeps what flowed so far, so that a test sees it and no parameter moves."""

    seen: dict[int, Tensor] = field(default_factory=dict)

    leaves = "gradient"

    def step(self, buckets: list[Any]) -> list[Any]:
        buckets[0].step.skip.read("a skipped step has nothing to show")
        for bucket in buckets:
            for p, u in zip(bucket.params.tensors, bucket.update.tensors, strict=True):
                self.seen[id(p)] = u.clone()
        return []


def stacks(name: str, t: torch.Tensor) -> str | None:
    """The layout of a stack of matrices, for every tensor of three dims."""
    return "e rows columns -> e rows columns" if t.dim() == 3 else None


def flat(name: str, t: torch.Tensor) -> str | None:
    """The layout of one matrix of shape (first, rest), for every tensor of three dims."""
    return "rows a b -> rows (a b)" if t.dim() == 3 else None


def seed(number: int = 0) -> None:
    """Draw the same numbers from here on: `torch.manual_seed`, which takes a millisecond to note
    where it was called from for accelerators that are not there."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> Named:
    """Named parameters, the same at every call."""
    return {name: Parameter(t) for name, t in gradients(shapes, seed=99, dtype=dtype).items()}


def gradients(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Tensors:
    """Named gradients; one name, seed and shape always gives the same values."""
    out = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        out[name] = (torch.randn(shape, generator=generator, dtype=drawn) * scale).to(dtype)
    return out


def set_grads(params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None]) -> None:
    """Give every parameter its gradient."""
    for name, p in params.items():
        p.grad = grads.get(name)


def flow(
    tfm: Transform,
    params: Named,
    steps: Sequence[Mapping[str, Tensor | None]],
    groups: Sequence[dict[str, Any]] | None = None,
    fused: bool = True,
) -> list[Tensors]:
    """What comes out of the transform at each step, by the names of the parameters."""
    probe = Probe()
    opt = Modular(groups or list(params.items()), tfm, probe, fused=fused)
    out = []
    for grads in steps:
        probe.seen.clear()
        set_grads(params, grads)
        opt.step()
        out.append({n: probe.seen[id(p)] for n, p in params.items() if id(p) in probe.seen})
    return out


def network(inputs: int = 4, hidden: int = 8, outputs: int = 1) -> nn.Sequential:
    """A small network, the same at every call."""
    with torch.random.fork_rng():
        seed()
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def train(params: Named, opt: torch.optim.Optimizer, steps: Iterable[int] = range(6)) -> Named:
    """Steps of an optimizer, each with the gradients of its number; returns the parameters."""
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    for i in steps:
        set_grads(params, gradients(shapes, i))
        opt.step()
    return params


def close(a: Any, b: Any, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    """Assert that tensors, or dicts or lists of them, agree; NaN equals NaN."""
    if agree(a, b, rtol, atol):  # a tenth of the time; what it cannot say is left to torch
        return
    torch.testing.assert_close(
        a, b, rtol=rtol, atol=atol, equal_nan=True, check_dtype=False, check_stride=False
    )


def agree(a: Any, b: Any, rtol: float, atol: float) -> bool:
    """Whether tensors of one kind, or dicts of them, agree; False also where that is not plain."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(agree(a[key], b[key], rtol, atol) for key in a)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    alike = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return alike and torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def same(a: Any, b: Any) -> None:
    """Assert that tensors, or dicts or lists of them, agree to the last bit."""
    close(a, b, rtol=0, atol=0)


def at_once(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Check all values in one test, which takes a fraction of the time that
    `pytest.mark.parametrize` takes with a test for each; a failure says which value it was."""
    values = list(values)
    assert values, "without values nothing is checked"
    assert not any(hasattr(value, "marks") for value in values), "marks need a test for each value"

    def together(check: Callable[..., None]) -> Any:
        @functools.wraps(check)
        def test(**others: Any) -> None:
            run_each(functools.partial(check, **others), names, values)

        return asking(
            test, [n for n in inspect.signature(check).parameters if n not in split(names)]
        )

    return together


def some(values: Sequence[Any], one_in: int) -> list[Any]:
    """Values as parameters of a test: one in so many is quick, and the others are slow."""
    return [
        x
        if i % one_in == 0
        else pytest.param(*x if type(x) is tuple else [x], marks=pytest.mark.slow)
        for i, x in enumerate(values)
    ]


def split(names: str) -> list[str]:
    """The names of "a, b"."""
    return [name.strip() for name in names.split(",")]


def run_each(check: Callable[..., None], names: str, values: Iterable[Any]) -> None:
    """Call a check with each of the values, under these names; where it fails, say with which."""
    keys, skipped = split(names), []
    for value in values:
        seed()
        given = dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
        try:
            check(**given)
        except pytest.skip.Exception as reason:
            skipped.append(reason)
        except Exception as error:
            said = ", ".join(f"{name}={x!s:.200}" for name, x in given.items())
            raise AssertionError(f"with {said}: {error}") from error
        else:
            skipped.append(None)
    if skipped and None not in skipped:
        raise skipped[0]


def asking(test: Any, names: Iterable[str]) -> Any:
    """The test with these parameters, for which pytest looks for values."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return test


def about(expected: Any, rel: float = 1e-6, abs: float = 0) -> Any:
    """What numbers are compared with that may differ by rounding."""
    return pytest.approx(expected, rel=rel, abs=abs, nan_ok=True)


def equal(a: Any, b: Any) -> bool:
    """Whether two trees are equal, tensors to the last bit and with their dtype."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def saved(state_dict):
    """A trip through a file, as a fresh process with weights_only=True sees it."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def one(value=1.0, dtype=torch.float32, grad=1.0):
    """A parameter of one number, and its gradient."""
    p = torch.tensor([value], dtype=dtype, requires_grad=True)
    p.grad = torch.tensor([grad], dtype=dtype)
    return p


def state_of(opt):
    """Everything that the optimizer remembers, as one comparable tree."""
    return copy.deepcopy(opt.state_dict())


def run_once(*links, grad=4.0, steps=1, value=0.0):
    """One parameter through the links; the optimizer, the parameter and the updates."""
    p = one(value, grad=grad)
    opt = Modular([p], *links)
    updates = []
    for _ in range(steps):
        p.data.fill_(value)
        opt.step()
        updates.append(value - p.item())
    return opt, p, updates


def moved(*chain: Transform, **options: Any) -> Tensor:
    """Return a parameter after three steps."""
    w = Parameter(torch.ones(4))
    opt = Modular([w], *chain, **options)
    for _ in range(3):
        w.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
        opt.step()
    return w.data


def param(*values, dtype=torch.float32, grad=None):
    """A parameter of these numbers, and its gradient."""
    p = Parameter(torch.tensor(values, dtype=dtype))
    if grad is not None:
        p.grad = torch.tensor(grad, dtype=dtype)
    return p


def prepared(opt: Modular) -> list[Bucket]:
    """The buckets of a step, as torch compiles it, with all state there."""
    opt.init_state()
    found: list[Bucket] = []
    with Step(opt.param_groups, opt.state, {}, AT_ONCE) as step:
        found += in_buckets(step)
    return found


def chain_of(opt: Modular) -> Any:
    """What happens to buckets in a step, with nothing of groups and keys around it."""

    def run(buckets: list[Bucket]) -> None:
        step = buckets[0].step
        for link in opt.links:
            buckets = send(link, buckets)
        for bucket in buckets:
            bucket.subtract()
        step.close()

    return run


@contextmanager
def recursion_limit(limit: int) -> Iterator[None]:
    """How deep calls may be while it lasts: others in a process change it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
