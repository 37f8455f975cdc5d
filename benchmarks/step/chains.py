"""The chains, and how each contestant spells them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import torchzero_clip as tz
from torchzero_clip import (
    LR,
    AdaGC,
    Adagrad,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Modular,
    Momentum,
    Normalize,
    RMSprop,
    Transform,
    WeightDecay,
    ZClip,
)

Params = list[Parameter]
Step = Callable[[], object]
Build = Callable[[Params], Step]

COMPILES = "compile" in inspect.signature(Modular.__init__).parameters
OURS, COMPILED = "torchzero_clip", "torchzero_clip compiled"
LOOP = "torch loop"
UNDOCUMENTED = ("fused kernel that scales",)
"""Uses of torch that take attributes which it does not document."""
PEERS = ("torchzero", "heavyball", "pytorch_optimizer")
LR_ = 1e-3


@dataclass(frozen=True)
class Race:
    """A chain: how everyone spells it, and what a step must move."""

    contestants: dict[str, Build]
    """The first is ours; those that begin with "torch " are spellings in torch."""
    words: int
    """Numbers read or written for each entry of the parameters, where gradients are clipped."""
    kind: str = "chain"
    """headline, grad, chain or helper: which bar holds."""
    has_adam: bool = False
    in_torch: bool = True
    """Whether torch has a function for it, or it had to be written by hand."""
    links: tuple[Transform, ...] = ()
    loose: bool = False
    """Whether it is measured with gradients within the limit as well."""
    differs: frozenset[str] = field(default_factory=frozenset)
    """Contestants whose rule is a little different, though as much work."""
    dtype: torch.dtype = torch.float32
    bound: float = 1.0
    """The most that our step may take, not compiled, of the time of torch's fastest spelling."""


def grads_of(params: Iterable[Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def ours(*links: Transform, **options: Any) -> Build:
    return lambda params: Modular(params, *links, **options).step


# ---------------------------------------------------------------------- torch by hand

Optimizer = Callable[[Params], torch.optim.Optimizer]
Clip = Callable[[Params], Step]


def adam(**options: Any) -> Optimizer:
    return lambda params: torch.optim.Adam(params, lr=LR_, **options, **graphs(params, options))


def adamw(**options: Any) -> Optimizer:
    return lambda params: torch.optim.AdamW(
        params, lr=LR_, weight_decay=0.01, **options, **graphs(params, options)
    )


def graphs(params: Params, options: dict[str, Any]) -> dict[str, Any]:
    """What lets a CUDA graph hold the step: it costs the fused spelling nothing."""
    return {"capturable": True} if params[0].is_cuda and options.get("fused") else {}


def sgd(**options: Any) -> Optimizer:
    return lambda params: torch.optim.SGD(params, lr=LR_, **options)


def adagrad(**options: Any) -> Optimizer:
    return lambda params: torch.optim.Adagrad(params, lr=LR_, **options)


def rmsprop(**options: Any) -> Optimizer:
    return lambda params: torch.optim.RMSprop(params, lr=LR_, **options)


def then(clip: Clip, make: Optimizer) -> Build:
    """Clipping, then an optimizer."""

    def build(params: Params) -> Step:
        first, opt = clip(params), make(params)

        def step() -> None:
            first()
            opt.step()

        return step

    return build


def clip_norm(params: Params) -> Step:
    return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)


def clip_value(params: Params) -> Step:
    return lambda: torch.nn.utils.clip_grad_value_(params, 0.01)


def clip_norm_in_a_loop(params: Params) -> Step:
    return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False)


def clip_value_in_a_loop(params: Params) -> Step:
    return lambda: torch.nn.utils.clip_grad_value_(params, 0.01, foreach=False)


def clip_each(params: Params) -> Step:
    """Every tensor by itself, in foreach calls."""

    def step() -> None:
        grads = grads_of(params)
        norms = torch.stack(torch._foreach_norm(grads))
        torch._foreach_mul_(grads, list((1.0 / norms).clamp(max=1.0).unbind()))

    return step


def clip_each_alone(params: Params) -> Step:
    """Every tensor by torch's own function."""

    def step() -> None:
        for p in params:
            torch.nn.utils.clip_grad_norm_(p, 1.0)

    return step


def clip_each_if_needed(params: Params) -> Step:
    """On CPU, where a look costs nothing: only what is too long."""

    def step() -> None:
        grads = grads_of(params)
        norms = torch.stack(torch._foreach_norm(grads)).tolist()
        for grad, norm in zip(grads, norms, strict=True):
            if norm > 1.0:
                grad.mul_(1.0 / norm)

    return step


def normalize_all(params: Params) -> Step:
    def step() -> None:
        grads = grads_of(params)
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, 1.0 / total)

    return step


def normalize_each(params: Params) -> Step:
    def step() -> None:
        grads = grads_of(params)
        norms = torch.stack(torch._foreach_norm(grads))
        torch._foreach_mul_(grads, list((1.0 / norms).unbind()))

    return step


def normalize_each_alone(params: Params) -> Step:
    """Every tensor by itself, in place."""

    def step() -> None:
        for grad in grads_of(params):
            grad.div_(torch.linalg.vector_norm(grad))

    return step


def normalized_descent(params: Params) -> Step:
    """One pass: the norm joins the learning rate. `alpha` must be a number, so the host waits."""

    def step() -> None:
        grads = grads_of(params)
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=-LR_ / float(total))

    return step


def centralize_each(params: Params) -> Step:
    def step() -> None:
        for grad in grads_of(params):
            if grad.numel() > 1:
                grad.sub_(grad.mean())

    return step


def percentile_each(params: Params) -> Step:
    def step() -> None:
        for grad in grads_of(params):
            sizes = grad.abs().view(-1)
            bound = sizes.kthvalue(int(0.9 * (sizes.numel() - 1)) + 1).values
            torch.clamp(grad, -bound, bound, out=grad)

    return step


REL, BETA = 0.9, 0.98  # below 1, so that a steady gradient is clipped in every step


def ada_gc(params: Params) -> Step:
    """AdaGC after its warm-up, in foreach calls."""
    kept: list[Tensor] = []

    def step() -> None:
        grads = grads_of(params)
        norms = torch.stack(torch._foreach_norm(grads))
        if not kept:
            kept.append(norms.clone())
            return
        factors = (REL * kept[0] / norms).clamp(max=1.0)
        torch._foreach_mul_(grads, list(factors.unbind()))
        kept[0].lerp_(norms * factors, 1 - BETA)

    return step


class Spiky:
    """ZClip on the gradient, Adam, growth of its update, by hand.

    The optimizer moves zeros in the place of the parameters, so that its update can be measured.
    """

    def __init__(self, params: Params, make: Optimizer) -> None:
        self.params = params
        self.updates = [Parameter(torch.zeros_like(p)) for p in params]
        for u, p in zip(self.updates, params, strict=True):
            u.grad = p.grad
        self.opt = make(self.updates)
        self.first: list[Tensor] = []
        self.mean: Any = None
        self.var: Any = None
        self.previous: Any = None

    @torch.no_grad()
    def step(self) -> None:
        grads = grads_of(self.params)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (self.zclip(norm) / norm).clamp(max=1.0))
        torch._foreach_zero_(self.updates)
        self.opt.step()
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.updates)))
        torch._foreach_mul_(self.updates, self.growth(norm) / norm)
        torch._foreach_add_(self.params, self.updates)

    def zclip(self, norm: Tensor) -> Tensor:
        """The limit, after two norms to begin with."""
        if self.mean is None:
            self.first.append(norm)
            if len(self.first) == 2:
                first = torch.stack(self.first)
                self.mean, self.var = first.mean(), first.var(correction=0)
            return norm.clamp(max=1.0)
        std = self.var.sqrt()
        z = (norm - self.mean) / (std + 1e-6)
        seen = torch.where(z > 2.5, self.mean + std * 2.5**2 / z, norm)
        self.mean.lerp_(seen, 0.03)
        self.var.lerp_((seen - self.mean).square(), 0.03)
        return seen.clamp(max=1.0)

    def growth(self, norm: Tensor) -> Tensor:
        if self.previous is None:
            self.previous = norm.clone()
            return norm
        limit = torch.minimum(norm, self.previous.clamp(min=1e-4 * LR_) * 1.5)
        self.previous = torch.maximum(limit, self.previous / 2)
        return limit


def spiky(make: Optimizer) -> Build:
    return lambda params: Spiky(params, make).step


def scaled_by_kernel(params: Params) -> Step:
    """What GradScaler does to a fused optimizer: the kernel divides, and writes the gradient."""
    opt: Any = torch.optim.Adam(params, lr=LR_, fused=True)
    opt.found_inf = torch.zeros((), device=params[0].device)

    def step() -> None:
        opt.grad_scale = torch.nn.utils.get_total_norm(grads_of(params)).clamp(min=1.0)
        opt.step()

    return step


# ---------------------------------------------------------------------- other libraries


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def library(name: str) -> Any:
    """The library, without what it warns of when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def torchzero(make: Callable[[Any], list[Any]]) -> Build:
    def build(params: Params) -> Step:
        lib = library("torchzero")
        step: Step = lib.Optimizer(params, *make(lib.m)).step
        return step

    return build


def heavyball(params: Params) -> Step:
    lib = library("heavyball")
    clip = library("heavyball.utils").global_l2norm_clip  # at 1
    opt = lib.AdamW(params, lr=LR_, betas=(0.9, 0.999), gradient_clipping=clip)
    step: Step = opt.step
    return step


def pytorch_optimizer(name: str, **options: Any) -> Optimizer:
    return lambda params: getattr(library("pytorch_optimizer"), name)(params, lr=LR_, **options)


def pytorch_steps(name: str, **options: Any) -> Build:
    return lambda params: pytorch_optimizer(name, **options)(params).step


def helper(name: str, *args: Any, **options: Any) -> Build:
    return lambda params: lambda: getattr(tz, name)(params, *args, **options)


def torchzero_helper(name: str, *args: Any, **options: Any) -> Build:
    return lambda params: lambda: getattr(library("torchzero").m, name)(params, *args, **options)


# ---------------------------------------------------------------------- the table


WAYS: dict[str, dict[str, bool]] = {
    "torch fused": {"fused": True},
    "torch foreach": {"foreach": True},
    LOOP: {"foreach": False},
}
"""What selects each implementation of an optimizer in torch: a kernel, lists, or one tensor at a
time, which is the default on CPU."""


def spellings(clip: Clip, make: Callable[..., Optimizer], **options: Any) -> dict[str, Build]:
    """Return a clip before each implementation that torch has of an optimizer."""
    return {way: then(clip, make(**options, **chosen)) for way, chosen in WAYS.items()}


def race(links: list[Transform], others: dict[str, Build], words: int, **facts: Any) -> Race:
    contestants = {OURS: ours(*links)}
    if COMPILES:
        contestants[COMPILED] = ours(*links, compile=True)
    return Race({**contestants, **others}, words, links=tuple(links), **facts)


def helps(mine: Build, others: dict[str, Build], words: int, **facts: Any) -> Race:
    return Race({OURS: mine, **others}, words, kind="helper", **facts)


HEADLINE = "clip + Adam"
RACES: dict[str, Race] = {
    HEADLINE: race(
        [ClipNorm(1.0, dim="global"), Adam(), LR(LR_)],
        {
            **spellings(clip_norm, adam),
            "fused kernel that scales": scaled_by_kernel,
            "torchzero": torchzero(lambda m: [m.ClipNorm(1.0, dim="global"), m.Adam(), m.LR(LR_)]),
            "heavyball": heavyball,
            "pytorch_optimizer": then(clip_norm, pytorch_optimizer("Adam")),
        },
        words=8,
        kind="headline",
        has_adam=True,
        loose=True,
    ),
    'clip + Adam, target="grad"': race(
        [ClipNorm(1.0, dim="global", target="grad"), Adam(), LR(LR_)],
        {**spellings(clip_norm, adam), "fused kernel that scales": scaled_by_kernel},
        words=9,
        kind="grad",
        has_adam=True,
    ),
    "clip each tensor + AdamW": race(
        [ClipNorm(1.0), Adam(), WeightDecay(0.01), LR(LR_)],
        {
            **spellings(clip_each, adamw),
            "torch fused, looks": then(clip_each_if_needed, adamw(fused=True)),
            "torchzero": torchzero(
                lambda m: [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(LR_)]
            ),
        },
        words=8,
        has_adam=True,
        in_torch=False,
    ),
    "ClipValue + Momentum": race(
        [ClipValue(0.01), Momentum(0.9), LR(LR_)],
        {
            **spellings(clip_value, sgd, momentum=0.9),
            "torchzero": torchzero(
                lambda m: [m.ClipValue(0.01), m.HeavyBall(0.9, ema_init="zeros"), m.LR(LR_)]
            ),
        },
        words=5,
    ),
    "ClipValue + RMSprop": race(
        [ClipValue(0.01), RMSprop(), LR(LR_)],
        {  # torch has no fused RMSprop
            "torch foreach": then(clip_value, rmsprop(foreach=True)),
            LOOP: then(clip_value, rmsprop(foreach=False)),
        },
        words=5,
        bound=1.1,
    ),
    "clip + SGD": race(
        [ClipNorm(1.0, dim="global"), LR(LR_)],
        spellings(clip_norm, sgd),
        words=4,
        bound=1.2,
    ),
    "clip + Nesterov": race(
        [ClipNorm(1.0, dim="global"), Momentum(0.9, nesterov=True), LR(LR_)],
        spellings(clip_norm, sgd, momentum=0.9, nesterov=True),
        words=6,
        bound=1.1,
    ),
    "clip + Adagrad": race(
        [ClipNorm(1.0, dim="global"), Adagrad(), LR(LR_)],
        spellings(clip_norm, adagrad),
        words=6,
        bound=1.1,
    ),
    "clip + Adam, amsgrad": race(
        [ClipNorm(1.0, dim="global"), Adam(amsgrad=True), LR(LR_)],
        spellings(clip_norm, adam, amsgrad=True),
        words=10,
        has_adam=True,
        bound=1.1,
    ),
    "clip + Adam, bfloat16": race(
        [ClipNorm(1.0, dim="global"), Adam(), LR(LR_)],
        spellings(clip_norm, adam),
        words=6,  # of float32, which our state is
        has_adam=True,
        dtype=torch.bfloat16,
        bound=1.5,
        differs=frozenset(WAYS),  # their state is bfloat16
    ),
    "AdaGC + AdamW": race(
        [AdaGC(rel=REL, beta=BETA, warmup_steps=0), Adam(), WeightDecay(0.01), LR(LR_)],
        {
            **spellings(ada_gc, adamw),
            "pytorch_optimizer": pytorch_steps(
                "AdaGC", lambda_rel=REL, beta=BETA, warmup_steps=0, weight_decay=0.01
            ),
        },
        words=8,
        has_adam=True,
        in_torch=False,
        differs=frozenset({"pytorch_optimizer"}),
    ),
    "ZClip + Adam + growth": race(
        [ZClip(warmup_steps=2), Adam(), ClipNormGrowth(dim="global"), LR(LR_)],
        {way: spiky(adam(**chosen)) for way, chosen in WAYS.items()},
        words=10,
        has_adam=True,
        in_torch=False,
    ),
    "Normalize + LR": race(
        [Normalize(dim="global"), LR(LR_)],
        {
            **spellings(normalize_all, sgd),
            "torch foreach, one pass": normalized_descent,
            "torchzero": torchzero(lambda m: [m.Normalize(1.0, dim="global"), m.LR(LR_)]),
        },
        words=4,
        in_torch=False,
    ),
    "clip_grad_norm_": helps(
        helper("clip_grad_norm_", 1.0, dim="global"),
        {
            "torch": clip_norm,
            LOOP: clip_norm_in_a_loop,
            "torchzero": torchzero_helper("clip_grad_norm_", 1.0, dim="global"),
        },
        words=3,
        loose=True,
    ),
    "clip_grad_norm_, each tensor": helps(
        helper("clip_grad_norm_", 1.0, dim=None),
        {
            "torch": clip_each_alone,
            "torch foreach": clip_each,
            "torch looks": clip_each_if_needed,
            "torchzero": torchzero_helper("clip_grad_norm_", 1.0),
        },
        words=3,
        in_torch=False,
        loose=True,
    ),
    "clip_grad_value_": helps(
        helper("clip_grad_value_", 0.01),
        {
            "torch": clip_value,
            LOOP: clip_value_in_a_loop,
            "torchzero": torchzero_helper("clip_grad_value_", 0.01),
        },
        words=2,
    ),
    "normalize_grads_": helps(
        helper("normalize_grads_", 1.0),
        {
            "torch foreach": normalize_each,
            LOOP: normalize_each_alone,
            "torchzero": torchzero_helper("normalize_grads_", 1.0),
        },
        words=3,
        in_torch=False,
    ),
    "centralize_grads_": helps(
        helper("centralize_grads_"), {"torch": centralize_each}, words=3, in_torch=False
    ),
    "clip_grad_percentile_": helps(
        helper("clip_grad_percentile_", 90.0),
        {"torch": percentile_each},
        words=3,
        in_torch=False,
    ),
}
