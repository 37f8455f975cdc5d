"""A chain of rules in plain numpy and float64: what the random chains are compared with.

It shares nothing with the library but names: each class here takes the arguments of the class of
that name there, and is written from the formula. It loops over tensors and units, and is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Live = dict[str, Any]


@dataclass(eq=False)
class Parameter:
    """A parameter of the model. Two that share memory hold views of one array."""

    name: str
    group: int
    value: Array
    grad: Array | None = None


@dataclass(eq=False)
class Flow:
    """The update of one parameter on its way through the chain.

    `of_gradient`: a rule with target="grad" writes the parameter's own gradient; behind Accumulate
    it writes the mean, which is nobody's.
    """

    parameter: Parameter
    u: Array
    of_gradient: bool = True

    @property
    def group(self) -> int:
        return self.parameter.group


class Reference:
    """Parameters and the chain that moves them.

    `noise` is the size of a relative error added behind every rule: how far a run with noise is
    from one without says what rounding may do to this chain. `dtype` names the dtype of the
    library's side: it has a smaller range and larger rounding errors than float64.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        chain: Chain,
        noise: float = 0.0,
        draw: int = 0,
        dtype: str = "float64",
    ) -> None:
        self.parameters, self.chain = list(parameters), chain
        rules = list(chain.walk())
        self.averages = [rule for rule in rules if isinstance(rule, Average)]
        for rule in rules:
            rule.noise, rule.random = noise, np.random.default_rng(draw)
            rule.before = rules[: rules.index(rule)]
            rule.limits = np.finfo(dtype)
        self.rules = rules

    @property
    def overflows(self) -> bool:
        """Whether the square of an update had no place in the dtype."""
        return any(rule.overflows for rule in self.rules)

    def step(self) -> None:
        """w ← w - u, one parameter after the other; u is what the chain makes of the gradient"""
        flows = [Flow(p, p.grad.copy()) for p in self.parameters if p.grad is not None]
        for flow in self.chain.run(sorted(flows, key=lambda flow: flow.group)):
            flow.parameter.value -= flow.u

    def averaged(self, p: Parameter) -> Array:
        """The weights for evaluation: of the last average that knows the parameter."""
        known = [rule for rule in self.averages if p in rule.memory]
        return known[-1].averaged(p) if known else p.value


class Rule:
    """A link: `apply` takes the flows of one step and returns those that go on.

    `live` holds the values of each group, the arguments where the group has none of its own.
    `memory` holds what the rule remembers, for each parameter or unit.
    """

    noise = 0.0
    random: np.random.Generator
    before: Sequence[Rule] = ()
    limits: Any = np.finfo(np.float64)
    overflows = False

    def __init__(self, target: str = "update", name: str | None = None, **arguments: Any) -> None:
        self.target, self.name, self.arguments = target, name, arguments
        self.overrides: dict[int, Live] = {}
        self.memory: dict[Any, dict[str, Any]] = {}

    def live(self, group: int) -> Live:
        return {**self.arguments, **self.overrides.get(group, {})}

    def walk(self) -> Iterator[Rule]:
        yield self

    def run(self, flows: list[Flow]) -> list[Flow]:
        """Apply the rule, if there is anything to apply it to."""
        if not flows:
            return []
        out = self.apply(flows)
        for flow in out:
            self.overflows |= bool((np.abs(flow.u) > math.sqrt(self.limits.max)).any())
            if self.noise:
                flow.u = flow.u * (1 + self.noise * self.random.uniform(-1, 1, flow.u.shape))
            if self.target == "grad" and flow.of_gradient:
                flow.parameter.grad = flow.u.copy()
        return sorted(out, key=lambda flow: flow.group)

    def apply(self, flows: list[Flow]) -> list[Flow]:
        for flow in flows:
            memory = self.memory.setdefault(flow.parameter, {})
            flow.u = self.update(flow.u, flow.parameter.value, memory, self.live(flow.group))
        return flows

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        raise NotImplementedError


# ---------------------------------------------------------------------- norms


def measure(x: Array, ord: Any, axes: tuple[int, ...] | None = None) -> Array:
    """The norm over some axes, or over all, which are kept with length one."""
    axes = tuple(range(x.ndim)) if axes is None else axes
    count = math.prod(x.shape[axis] for axis in axes)
    size = np.abs(x)
    if ord in ("std", "var"):
        if count < 2:
            return np.zeros_like(x.sum(axis=axes, keepdims=True))
        var = ((x - x.mean(axis=axes, keepdims=True)) ** 2).sum(axis=axes, keepdims=True)
        var = var / (count - 1)
        return var if ord == "var" else np.sqrt(var)
    if ord == "mad":
        return size.sum(axis=axes, keepdims=True) / max(count, 1)
    if ord == "sum":
        return np.abs(x.sum(axis=axes, keepdims=True))
    if ord in (math.inf, "linf"):
        return size.max(axis=axes, keepdims=True, initial=0.0)
    return (size**ord).sum(axis=axes, keepdims=True) ** (1 / ord)


def norm_of(arrays: Sequence[Array], ord: Any = 2) -> float:
    """The norm of several arrays as one."""
    return float(measure(np.concatenate([x.ravel() for x in arrays]), ord)[0])


def factor(norm: Any, limit: Any, ord: Any = 2, sets_norm: bool = False) -> Array:
    """What brings a norm to its limit: at most 1, unless the rule sets the norm."""
    norm, limit = np.asarray(norm), np.asarray(limit)
    untouched = (norm == 0) | np.isposinf(limit)
    ratio = np.where(untouched, 1.0, limit) / np.where(untouched, 1.0, norm)
    if ord == "var":
        ratio = np.sqrt(ratio)
    return ratio if sets_norm else np.minimum(ratio, 1.0)


def axes_of(x: Array, dim: Any, inverse: bool) -> tuple[int, ...]:
    """The dims of one tensor that its slices run along."""
    given = [dim] if isinstance(dim, int) else dim
    chosen = {d % x.ndim for d in given if -x.ndim <= d < x.ndim} if x.ndim else set()
    return tuple(d for d in range(x.ndim) if (d in chosen) is not inverse)


def units_of(flows: list[Flow], dim: str | None) -> dict[Any, list[Flow]]:
    """The flows that are measured together, by what they have in common."""
    keys: dict[Any, Callable[[Flow], Any]] = {
        None: lambda flow: flow.parameter,
        "layer": lambda flow: flow.parameter.name.rpartition(".")[0],
        "group": lambda flow: flow.group,
        "global": lambda flow: "all",
    }
    units: dict[Any, list[Flow]] = {}
    for flow in flows:
        units.setdefault(keys[dim](flow), []).append(flow)
    return units


class ScopedRule(Rule):
    """A rule that treats slices, tensors, layers, groups or all at once by what it measures."""

    least = 1

    def __init__(
        self, dim: Any = None, inverse_dims: bool = False, min_size: int | None = None, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.dim, self.inverse_dims = dim, inverse_dims
        self.min_size = self.least if min_size is None else min_size

    def apply(self, flows: list[Flow]) -> list[Flow]:
        if self.dim is None or isinstance(self.dim, str):
            for members in units_of(flows, self.dim).values():
                self.together(members)
            return flows
        for flow in flows:
            axes = axes_of(flow.u, self.dim, self.inverse_dims)
            count = math.prod(flow.u.shape[axis] for axis in axes)
            if axes and count >= self.min_size:
                flow.u = self.changed(flow.u, flow.u, axes, self.live(flow.group))
        return flows

    def together(self, members: list[Flow]) -> None:
        whole = np.concatenate([flow.u.ravel() for flow in members])
        if whole.size >= self.min_size:
            for flow in members:
                flow.u = self.changed(flow.u, whole, None, self.live(flow.group))

    def changed(self, u: Array, whole: Array, axes: Any, live: Live) -> Array:
        """What u becomes, given all that is measured and along which axes (None: all)."""
        raise NotImplementedError


class ClipNorm(ScopedRule):
    """u · min(1, max_norm / n)"""

    sets_norm, limit = False, "max_norm"
    defaults: Live = {}

    def __init__(self, ord: Any = 2, **rest: Any) -> None:
        super().__init__(**{**self.defaults, **rest})
        self.ord = ord

    def changed(self, u: Array, whole: Array, axes: Any, live: Live) -> Array:
        norm = measure(whole, self.ord, axes)
        norm = norm.reshape(()) if axes is None else norm
        return u * factor(norm, live[self.limit], self.ord, self.sets_norm)


class Normalize(ClipNorm):
    """u · norm_value / n"""

    sets_norm, limit = True, "norm_value"
    defaults: Live = {"norm_value": 1.0}


class Centralize(ScopedRule):
    """u - mean"""

    least = 2

    def changed(self, u: Array, whole: Array, axes: Any, live: Live) -> Array:
        return u - whole.mean(axis=axes, keepdims=axes is not None)


class Standardize(ScopedRule):
    """(u - mean) / (std + eps); constants become 0, single elements stay"""

    least = 2

    def changed(self, u: Array, whole: Array, axes: Any, live: Live) -> Array:
        shape = [whole.shape[axis] for axis in range(whole.ndim) if axes is None or axis in axes]
        if math.prod(shape) < 2:
            return u
        mean, std = whole.mean(axis=axes, keepdims=True), measure(whole, "std", axes)
        if axes is None:
            mean, std = mean.reshape(()), std.reshape(())
        constant = std <= 4 * self.limits.eps * np.abs(mean)
        return np.where(constant, 0.0, (u - mean) / (std + live.get("eps", 1e-8)))


# ---------------------------------------------------------------------- norms with memory


class UnitRule(Rule):
    """A rule that remembers something of the norms of every unit.

    What it remembers follows the live values of the first group with a part in the unit; a norm
    that is NaN or infinite leaves it as it was.
    """

    sets_norm = False

    def __init__(self, dim: str | None = None, ord: Any = 2, **rest: Any) -> None:
        super().__init__(**rest)
        self.dim, self.ord = dim, ord

    def apply(self, flows: list[Flow]) -> list[Flow]:
        total = norm_of([flow.u for flow in flows])
        for key, members in units_of(flows, self.dim).items():
            memory = self.memory.setdefault(key, {})
            norm = norm_of([flow.u for flow in members], self.ord)
            self.prepare(members, norm, memory)
            limits = [self.limit(norm, total, memory, self.live(flow.group)) for flow in members]
            for flow, limit in zip(members, limits, strict=True):
                flow.u = flow.u * factor(norm, limit, self.ord, self.sets_norm)
            if math.isfinite(norm):
                clipped = norm_of([flow.u for flow in members], self.ord)
                self.observe(norm, clipped, memory, self.live(members[0].group))
        return flows

    def prepare(self, members: list[Flow], norm: float, memory: dict[str, Any]) -> None:
        """What happens before the limit is asked for."""

    def limit(self, norm: float, total: float, memory: dict[str, Any], live: Live) -> float:
        raise NotImplementedError

    def observe(self, norm: float, clipped: float, memory: dict[str, Any], live: Live) -> None:
        """What is remembered of a norm that was brought to `clipped`."""


GROWTH = {"add": None, "mul": 1.5, "min_value": 1e-4, "max_decay": 2.0}


def growth_bound(p: Any, live: Live) -> Any:
    """L = min(p + add, max(p, min_value) · mul) over those given"""
    bound = np.full_like(p, math.inf)
    if live["add"] is not None:
        bound = np.minimum(bound, p + live["add"])
    if live["mul"] is not None:
        bound = np.minimum(bound, np.maximum(p, live["min_value"] or 0.0) * live["mul"])
    return bound


def growth_memory(p: Any, size: Any, live: Live) -> Any:
    """p ← max(c, p / max_decay); without a bound (p = inf) the first c that is not 0"""
    decayed = p / (math.inf if live["max_decay"] is None else live["max_decay"])
    after = np.maximum(size, np.where(np.isinf(p), 0.0, decayed))
    return np.where(np.isinf(p) & (size == 0), p, after)


class ClipNormGrowth(UnitRule):
    """u · min(1, L / n)"""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**{**GROWTH, **rest})

    def limit(self, norm: float, total: float, memory: dict[str, Any], live: Live) -> float:
        return float(growth_bound(np.asarray(memory.get("p", math.inf)), live))

    def observe(self, norm: float, clipped: float, memory: dict[str, Any], live: Live) -> None:
        memory["p"] = growth_memory(np.asarray(memory.get("p", math.inf)), clipped, live)


class ClipNormByEMA(UnitRule):
    """m ← βm + (1-β)u;   u · min(1, max(e, eps) / n), where e = ‖m‖ grows by so much at most"""

    def __init__(self, ema_init: str = "zeros", **rest: Any) -> None:
        super().__init__(**{"beta": 0.99, "eps": 1e-6, "max_ema_growth": 1.5, **rest})
        self.ema_init = ema_init
        self.averages: dict[Parameter, Array] = {}

    def prepare(self, members: list[Flow], norm: float, memory: dict[str, Any]) -> None:
        for flow in members if math.isfinite(norm) else ():
            u, beta = flow.u, self.live(flow.group)["beta"]
            whole = self.ema_init == "update" and not memory.get("started")
            first = u if whole else np.zeros_like(u)  # the first of the unit, not of the tensor
            self.averages[flow.parameter] = (
                beta * self.averages.get(flow.parameter, first) + (1 - beta) * u
            )
        memory["started"] = memory.get("started") or math.isfinite(norm)
        held = [self.averages.get(flow.parameter, np.zeros_like(flow.u)) for flow in members]
        size, growth = norm_of(held, self.ord), self.live(members[0].group)["max_ema_growth"]
        bound = memory["e"] * growth if "e" in memory and growth is not None else math.inf
        if size > bound:
            for flow, m in zip(members, held, strict=True):
                self.averages[flow.parameter] = m * (bound / size)
            size = bound
        memory["now"] = size
        if size > 0 and math.isfinite(norm):
            memory["e"] = size

    def limit(self, norm: float, total: float, memory: dict[str, Any], live: Live) -> float:
        return max(memory["now"], live["eps"])


class NormalizeByEMA(ClipNormByEMA):
    """u · max(e, eps) / n"""

    sets_norm = True


class AdaGC(UnitRule):
    """u · min(1, rel · γ / n);   γ ← βγ + (1-β)c; at first all within `abs`, γ ← min(γ, c)"""

    def __init__(self, warmup_steps: int = 100, **rest: Any) -> None:
        super().__init__(**{"rel": 1.05, "abs": 1.0, "beta": 0.98, **rest})
        self.warmup_steps = warmup_steps

    def limit(self, norm: float, total: float, memory: dict[str, Any], live: Live) -> float:
        if memory.get("t", 0) + 1 < self.warmup_steps:
            return norm * float(factor(total, live["abs"]))
        return live["rel"] * memory["γ"] if "γ" in memory else math.inf

    def observe(self, norm: float, clipped: float, memory: dict[str, Any], live: Live) -> None:
        memory["t"] = memory.get("t", 0) + 1
        if clipped == 0:
            return
        if "γ" not in memory:
            memory["γ"] = clipped
        elif memory["t"] < self.warmup_steps:
            memory["γ"] = min(memory["γ"], clipped)
        else:
            memory["γ"] = live["beta"] * memory["γ"] + (1 - live["beta"]) * clipped


SHARES: dict[str, Callable[[float, float], float]] = {
    "max": lambda z, t: t,
    "mean": lambda z, t: 0.0,
    "reciprocal": lambda z, t: t * t / z,
}


class AdaptiveRule(UnitRule):
    """Past norms set the limit; it starts from the mean and the variance of the first few."""

    warmup_steps: int

    def limit(self, norm: float, total: float, memory: dict[str, Any], live: Live) -> float:
        if len(memory.setdefault("warm", [])) < self.warmup_steps:
            return self.warm_limit(norm, total)
        return self.criterion_limit(norm, memory, live)

    def observe(self, norm: float, clipped: float, memory: dict[str, Any], live: Live) -> None:
        if len(memory["warm"]) < self.warmup_steps:
            memory["warm"].append(norm)
            if len(memory["warm"]) == self.warmup_steps:
                self.start(memory)
        else:
            self.criterion_observe(norm, memory, live)

    def warm_limit(self, norm: float, total: float) -> float:
        return math.inf

    def start(self, memory: dict[str, Any]) -> None:
        raise NotImplementedError

    def criterion_limit(self, norm: float, memory: dict[str, Any], live: Live) -> float:
        raise NotImplementedError

    def criterion_observe(self, norm: float, memory: dict[str, Any], live: Live) -> None:
        raise NotImplementedError


class EMARatio:
    """The arguments of the criterion."""

    def __init__(self, alpha: float = 0.98, r_thresh: float = 1.05, clipping: str = "max") -> None:
        self.live, self.clipping = {"alpha": alpha, "r_thresh": r_thresh}, clipping


class AdaptiveClip(AdaptiveRule):
    """With EMARatio: q = n / μ; if q > r the limit is μ(1 + f(q-1, r-1));  μ ← αμ + (1-α)n"""

    def __init__(
        self, criterion: EMARatio, dim: Any = "global", warmup_steps: int = 20, **rest: Any
    ) -> None:
        super().__init__(dim=dim, **{**criterion.live, **rest})
        self.clipping, self.warmup_steps = criterion.clipping, warmup_steps

    def warm_limit(self, norm: float, total: float) -> float:
        return norm * float(factor(total, 1.0))

    def start(self, memory: dict[str, Any]) -> None:
        memory["μ"] = float(np.mean(memory["warm"]))

    def criterion_limit(self, norm: float, memory: dict[str, Any], live: Live) -> float:
        mean, r = memory["μ"], live["r_thresh"]
        if mean == 0 or norm <= r * mean:
            return math.inf
        return mean * (1 + SHARES[self.clipping](norm / mean - 1, r - 1))

    def criterion_observe(self, norm: float, memory: dict[str, Any], live: Live) -> None:
        memory["μ"] = live["alpha"] * memory["μ"] + (1 - live["alpha"]) * norm


class ZClip(AdaptiveRule):
    """z = (n - μ) / (s + 1e-6); if z > t the limit is μ + s·t²/z; observed is the norm it left"""

    def __init__(
        self, dim: Any = "global", warmup_steps: int = 25, mode: str = "adaptive", **rest: Any
    ) -> None:
        super().__init__(dim=dim, **{"alpha": 0.97, "z_thresh": 2.5, "max_norm": 1.0, **rest})
        self.mode, self.warmup_steps = mode, warmup_steps

    def start(self, memory: dict[str, Any]) -> None:
        memory["μ"], memory["v"] = float(np.mean(memory["warm"])), float(np.var(memory["warm"]))

    def limit(self, norm: float, total: float, memory: dict[str, Any], live: Live) -> float:
        most = math.inf if live["max_norm"] is None else live["max_norm"]
        return min(super().limit(norm, total, memory, live), most)

    def criterion_limit(self, norm: float, memory: dict[str, Any], live: Live) -> float:
        s, t = math.sqrt(memory["v"]), live["z_thresh"]
        z = (norm - memory["μ"]) / (s + 1e-6)
        if s == 0 or z <= t:
            return math.inf
        share = {"adaptive": "reciprocal", "percentile": "max"}.get(self.mode, self.mode)
        return memory["μ"] + SHARES[share](z, t) * s

    def criterion_observe(self, norm: float, memory: dict[str, Any], live: Live) -> None:
        x, alpha = min(norm, self.criterion_limit(norm, memory, live)), live["alpha"]
        memory["μ"] = alpha * memory["μ"] + (1 - alpha) * x
        memory["v"] = alpha * memory["v"] + (1 - alpha) * (x - memory["μ"]) ** 2


# ---------------------------------------------------------------------- values


def clamp(u: Array, bound: Any) -> Array:
    """u within ±bound; NaN stays NaN."""
    return np.where(np.isnan(u), u, np.clip(u, -bound, bound))


class ClipValue(Rule):
    """u within ±value"""

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        return clamp(u, live["value"])


class ClipValueGrowth(Rule):
    """sign(u) · min(|u|, L) for every entry"""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**{**GROWTH, **rest})

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        p = memory.get("p", np.full(u.shape, math.inf))
        out = clamp(u, growth_bound(p, live))
        memory["p"] = np.where(np.isfinite(u), growth_memory(p, np.abs(out), live), p)
        return out


class ClipValueByEMA(Rule):
    """m ← βm + (1-β)|u|;   u within ±m, or within what another rule makes of m"""

    def __init__(self, ema_init: str = "zeros", ema_tfm: Rule | None = None, **rest: Any) -> None:
        super().__init__(**{"beta": 0.99, **rest})
        self.ema_init, self.ema_tfm = ema_init, ema_tfm

    def walk(self) -> Iterator[Rule]:
        yield self
        yield from self.ema_tfm.walk() if self.ema_tfm else ()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        bounds = []
        for flow in flows:
            memory, beta = self.memory.setdefault(flow.parameter, {}), self.live(flow.group)["beta"]
            nothing = np.full(flow.u.shape, 0.0 if self.ema_init == "zeros" else math.inf)
            m, size = memory.get("m", nothing), np.abs(flow.u)
            with np.errstate(invalid="ignore"):
                after = np.where(np.isinf(m), size, beta * m + (1 - beta) * size)
            memory["m"] = np.where(np.isfinite(flow.u), after, m)
            seen = np.where(np.isinf(memory["m"]), 0.0, memory["m"])
            bounds.append(Flow(flow.parameter, seen, of_gradient=False))
        made = {b.parameter: b.u for b in (self.ema_tfm.run(bounds) if self.ema_tfm else bounds)}
        for flow in flows:
            none_yet = np.isinf(self.memory[flow.parameter]["m"])
            flow.u = clamp(flow.u, np.where(none_yet, math.inf, np.abs(made[flow.parameter])))
        return flows


# ---------------------------------------------------------------------- descent


class LR(Rule):
    """lr · u"""

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        return u * live["lr"]


class Scale(Rule):
    """factor · u"""

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        return u * live["factor"]


class Written(Rule):
    """fn(u)"""

    def __init__(self, fn: Callable[[Array], Array], **rest: Any) -> None:
        super().__init__(**rest)
        self.fn = fn

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        return self.fn(u)


class WeightDecay(Rule):
    """u + weight_decay · w, where w is what the step began with"""

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        return u + live["weight_decay"] * w


class Warmup(Rule):
    """u · min(1, t / steps)"""

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        memory["t"] = memory.get("t", 0) + 1
        return u * min(1.0, memory["t"] / live["steps"])


class EMA(Rule):
    """m ← βm + (1-β)u;   m, or m / (1 - βᵗ), or (1-β)u + βm"""

    def __init__(self, debias: bool = False, nesterov: bool = False, **rest: Any) -> None:
        super().__init__(**{"beta": 0.9, **rest})
        self.debias, self.nesterov = debias, nesterov

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        beta, memory["t"] = live["beta"], memory.get("t", 0) + 1
        memory["m"] = beta * memory.get("m", 0.0) + (1 - beta) * u
        if self.nesterov:
            return (1 - beta) * u + beta * memory["m"]
        return memory["m"] / (1 - beta ** memory["t"]) if self.debias else memory["m"].copy()


class Momentum(Rule):
    """b ← momentum · b + (1 - dampening) u, the first u whole;   b, or u + momentum · b"""

    def __init__(self, nesterov: bool = False, **rest: Any) -> None:
        super().__init__(**{"momentum": 0.9, "dampening": 0.0, **rest})
        self.nesterov = nesterov

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        if "b" in memory:
            memory["b"] = live["momentum"] * memory["b"] + (1 - live["dampening"]) * u
        else:
            memory["b"] = u.copy()
        return u + live["momentum"] * memory["b"] if self.nesterov else memory["b"].copy()


class Adam(Rule):
    """m̂ / (√v̂ + eps)"""

    def __init__(self, amsgrad: bool = False, **rest: Any) -> None:
        super().__init__(**{"betas": (0.9, 0.999), "eps": 1e-8, **rest})
        self.amsgrad = amsgrad

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        (beta1, beta2), memory["t"] = live["betas"], memory.get("t", 0) + 1
        memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * u
        memory["v"] = v = beta2 * memory.get("v", 0.0) + (1 - beta2) * u * u
        if self.amsgrad:
            memory["largest"] = v = np.maximum(memory.get("largest", 0.0), v)
        m = memory["m"] / (1 - beta1 ** memory["t"])
        return m / (np.sqrt(v / (1 - beta2 ** memory["t"])) + live["eps"])


class RMSprop(Rule):
    """v ← αv + (1-α)u²;   u / (√v + eps), centered: v less the square of the average of u"""

    def __init__(self, momentum: float = 0.0, centered: bool = False, **rest: Any) -> None:
        super().__init__(**{"alpha": 0.99, "eps": 1e-8, **rest})
        self.momentum, self.centered = momentum, centered

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        alpha = live["alpha"]
        memory["v"] = v = alpha * memory.get("v", 0.0) + (1 - alpha) * u * u
        if self.centered:
            memory["mean"] = alpha * memory.get("mean", 0.0) + (1 - alpha) * u
            v = v - memory["mean"] ** 2
        out = u / (np.sqrt(v) + live["eps"])
        if self.momentum:
            memory["b"] = out = self.momentum * memory.get("b", 0.0) + out
        return out.copy()


class Adagrad(Rule):
    """s ← s + u²;   u / (√s + eps) / (1 + (t - 1) lr_decay)"""

    def __init__(self, initial_accumulator_value: float = 0.0, **rest: Any) -> None:
        super().__init__(**{"lr_decay": 0.0, "eps": 1e-10, **rest})
        self.initial = initial_accumulator_value

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        memory["t"] = memory.get("t", 0) + 1
        memory["s"] = memory.get("s", self.initial) + u * u
        return u / (np.sqrt(memory["s"]) + live["eps"]) / (1 + (memory["t"] - 1) * live["lr_decay"])


# ---------------------------------------------------------------------- weights for evaluation


class Average(Rule):
    """A rule that makes weights for evaluation, of w - u: what the step will leave."""

    def averaged(self, p: Parameter) -> Array:
        mean: Array = self.memory[p]["mean"]
        return mean


class WeightEMA(Average):
    """e ← decay · e + (1 - decay) (w - u) in every so many steps, at first the weights"""

    def __init__(self, every: int = 1, warmup: bool = False, **rest: Any) -> None:
        super().__init__(**{"decay": 0.999, **rest})
        self.every, self.warmup = every, warmup

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        times, left = divmod(memory.get("t", 0), self.every)
        memory["t"] = memory.get("t", 0) + 1
        decay = min(live["decay"], (1 + times) / (10 + times)) if self.warmup else live["decay"]
        if "mean" not in memory:
            memory["mean"] = w - u
        elif left == 0:
            memory["mean"] = decay * memory["mean"] + (1 - decay) * (w - u)
        return u


class WeightAverage(Average):
    """The mean of the weights after some steps from a start; until then the last"""

    def __init__(self, start: int = 0, every: int = 1, **rest: Any) -> None:
        super().__init__(**rest)
        self.start, self.every = start, every

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        after, taken = memory.setdefault("t", 0) - self.start, memory.setdefault("taken", [])
        memory["t"] += 1
        if after >= 0 and after % self.every == 0:
            taken.append(w - u)
        memory["mean"] = sum(taken) / len(taken) if taken else w - u
        return u


class Lookahead(Average):
    """φ ← φ + alpha (w - u - φ), w ← φ in every k-th step; φ is at first w, or that of the first"""

    def __init__(self, k: int = 6, start: str = "weights", **rest: Any) -> None:
        super().__init__(**{"alpha": 0.5, **rest})
        self.k, self.start = k, start

    def update(self, u: Array, w: Array, memory: dict[str, Any], live: Live) -> Array:
        memory["t"] = memory.get("t", 0) + 1
        if self.start == "sync" and memory["t"] <= self.k:
            memory["mean"] = w - u
            return u
        slow = memory.setdefault("mean", w.copy())
        if memory["t"] % self.k:
            return u
        memory["mean"] = slow + live["alpha"] * (w - u - slow)
        return w - memory["mean"]


class ScheduleFree(Average):
    """y ← (1 - c) y + c z - (1 - beta (1 - c)) u and z ← z - u;   x = (y - (1 - beta) z) / beta

    c is the share of tʳ · (largest lr)ᵖ in its sum.
    """

    def __init__(self, rectified: bool = False, **rest: Any) -> None:
        super().__init__(**{"beta": 0.9, "r": 0.0, "weight_lr_power": 2.0, **rest})
        self.rectified = rectified
        self.groups: dict[int, dict[str, float]] = {}

    def apply(self, flows: list[Flow]) -> list[Flow]:
        shares = {group: self.share(group) for group in {flow.group for flow in flows}}
        for flow in flows:
            c, factor = shares[flow.group]
            memory, beta = self.memory.setdefault(flow.parameter, {}), self.live(flow.group)["beta"]
            y, z, u = flow.parameter.value, memory.get("z", flow.parameter.value), flow.u * factor
            memory["z"] = z - u
            flow.u = y - ((1 - c) * y + c * z - (1 - beta * (1 - c)) * u)
        return flows

    def share(self, group: int) -> tuple[float, float]:
        """The share of this z in the mean, and what the step is multiplied by."""
        (lr,) = [rule.live(group)["lr"] for rule in self.before if isinstance(rule, LR)]
        live = self.live(group)
        held = self.groups.setdefault(group, {"t": 0, "largest": 0.0, "sum": 0.0})
        held["t"] += 1
        factor = self.factor(group, held["t"]) if self.rectified else 1.0
        held["largest"] = max(held["largest"], lr * factor)
        weight = held["t"] ** live["r"] * held["largest"] ** live["weight_lr_power"]
        held["sum"] += weight
        return (weight / held["sum"] if held["sum"] else 0.0), factor

    def factor(self, group: int, t: float) -> float:
        """How much of a step RAdam makes of the t-th."""
        ((_, beta),) = [r.live(group)["betas"] for r in self.before if isinstance(r, Adam)]
        most = 2 / (1 - beta) - 1
        rho = most - 2 * t * beta**t / (1 - beta**t)
        if rho <= 4:
            return 0.0
        above, below = (rho - 4) * (rho - 2) * most, (most - 4) * (most - 2) * rho
        return math.sqrt(above / below)

    def averaged(self, p: Parameter) -> Array:
        z, beta = self.memory[p]["z"], self.live(p.group)["beta"]
        mean: Array = (p.value - (1 - beta) * z) / beta
        return mean


# ---------------------------------------------------------------------- flow


class Identity(Rule):
    """u"""

    def apply(self, flows: list[Flow]) -> list[Flow]:
        return flows


class Chain(Rule):
    """One rule after the other"""

    def __init__(self, *links: Rule, name: str | None = None) -> None:
        super().__init__(name=name)
        self.links = links

    def walk(self) -> Iterator[Rule]:
        yield self
        for link in self.links:
            yield from link.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        for link in self.links:
            flows = link.run(flows)
        return flows


class Freeze(Rule):
    """Nothing where where(name, w)"""

    def __init__(self, where: Callable[[str, Array], bool], **rest: Any) -> None:
        super().__init__(**rest)
        self.where = where

    def apply(self, flows: list[Flow]) -> list[Flow]:
        return [f for f in flows if not self.where(f.parameter.name, f.parameter.value)]


class Masked(Rule):
    """tfm(u) where where(name, w), u elsewhere"""

    def __init__(self, tfm: Rule, where: Callable[[str, Array], bool], **rest: Any) -> None:
        super().__init__(**rest)
        self.tfm, self.where = tfm, where

    def walk(self) -> Iterator[Rule]:
        yield self
        yield from self.tfm.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        inside = [f for f in flows if self.where(f.parameter.name, f.parameter.value)]
        return [f for f in flows if f not in inside] + self.tfm.run(inside)


class Partition(Rule):
    """transforms[labels(name, w)](u)"""

    def __init__(
        self, transforms: dict[str, Rule], labels: Callable[[str, Array], str], **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.transforms, self.labels = transforms, labels

    def walk(self) -> Iterator[Rule]:
        yield self
        for rule in self.transforms.values():
            yield from rule.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        label = {f: self.labels(f.parameter.name, f.parameter.value) for f in flows}
        parts = {name: [f for f in flows if label[f] == name] for name in self.transforms}
        return [f for name, rule in self.transforms.items() for f in rule.run(parts[name])]


def copied(flows: Sequence[Flow]) -> list[Flow]:
    """The same flows, for a branch that may write them."""
    return [Flow(flow.parameter, flow.u.copy(), flow.of_gradient) for flow in flows]


class Parallel(Rule):
    """merge({name: tfm(u) for each of the transforms})"""

    def __init__(
        self,
        transforms: dict[str, Rule],
        merge: Callable[[dict[str, Array]], Array],
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.transforms, self.merge = transforms, merge

    def walk(self) -> Iterator[Rule]:
        yield self
        for rule in self.transforms.values():
            yield from rule.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        made = {
            name: {flow.parameter: flow.u for flow in rule.run(copied(flows))}
            for name, rule in self.transforms.items()
        }
        for flow in flows:
            flow.u = self.merge({name: each[flow.parameter] for name, each in made.items()})
        return flows


class Graft(Rule):
    """d · ‖n‖ / ‖d‖,   n = norm_of(u),   d = direction_of(u)"""

    def __init__(
        self, norm_of: Rule, direction_of: Rule, dim: str | None = None, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.norm_of, self.direction_of, self.dim = norm_of, direction_of, dim

    def walk(self) -> Iterator[Rule]:
        yield self
        yield from self.norm_of.walk()
        yield from self.direction_of.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        sizes = {flow.parameter: flow.u for flow in self.norm_of.run(copied(flows))}
        made = self.direction_of.run(copied(flows))
        for members in units_of(made, self.dim).values():
            size = norm_of([sizes[flow.parameter] for flow in members])
            norm = norm_of([flow.u for flow in members])
            for flow in members:
                flow.u = flow.u * factor(norm, size, sets_norm=True)
        return made


class Steepest(Rule):
    """⟨u, d⟩ · d,   d = tfm(u)"""

    def __init__(self, tfm: Rule, dim: str | None = None, **rest: Any) -> None:
        super().__init__(**rest)
        self.tfm, self.dim = tfm, dim

    def walk(self) -> Iterator[Rule]:
        yield self
        yield from self.tfm.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        before = {flow.parameter: flow.u for flow in flows}
        made = self.tfm.run(copied(flows))
        for members in units_of(made, self.dim).values():
            size = sum((before[flow.parameter] * flow.u).sum() for flow in members)
            for flow in members:
                flow.u = flow.u * size
        return made


class When(Rule):
    """tfm(u) in the steps where condition(step); those in which nothing comes here do not count"""

    def __init__(self, condition: Callable[[int], bool], tfm: Rule, **rest: Any) -> None:
        super().__init__(**rest)
        self.condition, self.tfm, self.count = condition, tfm, 0

    def walk(self) -> Iterator[Rule]:
        yield self
        yield from self.tfm.walk()

    def apply(self, flows: list[Flow]) -> list[Flow]:
        self.count += 1
        return self.tfm.run(flows) if self.condition(self.count) else flows


class Accumulate(Rule):
    """The sum of `steps` steps over `steps`, and nothing in between"""

    def __init__(self, steps: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.steps, self.count = steps, 0
        self.sums: dict[Parameter, Array] = {}

    def apply(self, flows: list[Flow]) -> list[Flow]:
        for flow in flows:
            self.sums[flow.parameter] = self.sums.get(flow.parameter, 0.0) + flow.u
        self.count += 1
        if self.count % self.steps:
            return []
        sums, self.sums = self.sums, {}
        return [Flow(p, total / self.steps, of_gradient=False) for p, total in sums.items()]


class Guard(Rule):
    """A step with NaN or infinity does not happen ("skip"), or these entries are 0 ("zero")"""

    def __init__(self, on_nonfinite: str = "skip", **rest: Any) -> None:
        super().__init__(**rest)
        self.on_nonfinite = on_nonfinite

    def apply(self, flows: list[Flow]) -> list[Flow]:
        if self.on_nonfinite == "zero":
            for flow in flows:
                flow.u = np.where(np.isfinite(flow.u), flow.u, 0.0)
            return flows
        return flows if all(np.isfinite(flow.u).all() for flow in flows) else []
