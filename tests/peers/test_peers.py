"""The other side of `test_coming_from.py`: the libraries themselves, where they are installed.

CONTRIBUTING.md, "Peers", says how; run with `-m peers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.peers.test_coming_from import (
    OURS,
    RECORDED,
    SIZES,
    flat,
    gradients,
    norms,
    numbers,
    parameters,
    steps,
)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]
nan = float("nan")


def need(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: see CONTRIBUTING.md")


class Model(nn.Module):
    """The parameters as a module, for libraries that take one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameters().values()

    def give(self, grads: dict[str, Tensor]) -> None:
        self.weight.grad, self.bias.grad = grads["weight"], grads["bias"]

    def grads(self) -> dict[str, Tensor]:
        return {"weight": self.weight.grad, "bias": self.bias.grad}


# ---------------------------------------------------------------------- drytorch


def drytorch(
    make: Callable[[Any], Any], sizes: list[float] = SIZES, what: Any = norms
) -> list[Any]:
    op, model, out = make(need("drytorch.lib.gradient_ops")), Model(), []
    for grads in steps(sizes):
        model.give(grads)
        op(list(model.parameters()))
        out.append(what(model.grads()))
    return out


def drytorch_once(make: Callable[[Any], Any]) -> list[float]:
    out: list[float] = drytorch(make, [1.0], numbers)[0]
    return out


# ---------------------------------------------------------------------- declearn


def declearn(name: str) -> list[float]:
    modules = need("declearn.optimizer.modules")
    vector = need("declearn.model.torch").TorchVector
    return numbers(getattr(modules, name)(0.5).run(vector(gradients(1.0))).coefs)


# ---------------------------------------------------------------------- smartclip


def smartclip_thresholds(
    make: Callable[[Any], Any], first: int, sizes: list[float] = SIZES
) -> list[float]:
    """The threshold before each step from `first` on: theirs observes before it judges."""
    clipper, out = make(need("smartclip")), []
    for i, grads in enumerate(steps(sizes)):
        if i >= first:
            out.append(round(clipper.threshold(), 5))
        clipper.observe(torch.cat([g.flatten() for g in grads.values()]).norm().item())
    return out


def smartclip_once(make: Callable[[Any], Any]) -> list[float]:
    library, model = need("smartclip"), Model()
    model.give(gradients(1.0))
    library.apply(model, make(library))
    return numbers(model.grads())


# ---------------------------------------------------------------------- torchzero


def torchzero(
    make: Callable[[Any], Any], sizes: list[float] = SIZES, what: Any = norms
) -> list[Any]:
    library, model, out = need("torchzero"), Model(), []
    opt = library.Optimizer(model.parameters(), make(library.m))
    for grads in steps(sizes):
        model.give(grads)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.step()
        out.append(what({n: before[n] - p.detach() for n, p in model.named_parameters()}))
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(before[n])
    return out


def torchzero_once(make: Callable[[Any], Any]) -> list[float]:
    out: list[float] = torchzero(make, [1.0], numbers)[0]
    return out


# ---------------------------------------------------------------------- optax


def to_jax(tensors: dict[str, Tensor]) -> dict[str, Any]:
    jax = need("jax")
    return {n: jax.numpy.asarray(t.detach().numpy()) for n, t in tensors.items()}


def from_jax(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {n: torch.tensor(need("numpy").array(a)) for n, a in arrays.items()}


def optax_once(make: Callable[[Any], Any], turn: bool = False) -> list[float]:
    """For rules about rows, matrices are turned: torch's are (out, in), theirs (in, out)."""

    def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.T if turn and t.dim() == 2 else t for n, t in tensors.items()}

    tfm = make(need("optax"))
    params = to_jax(turned(parameters()))
    updates, _ = tfm.update(to_jax(turned(gradients(1.0))), tfm.init(params), params)
    return numbers(turned(from_jax(updates)))


def optax_examples(kind: str) -> list[Any]:
    """The sums of the clipped gradients of some examples, and how many were clipped."""
    clip, rows = getattr(need("optax"), f"per_example_{kind}_norm_clip"), list(steps())
    batch = to_jax({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    sums, clipped = clip(list(batch.values()), 1.25)
    count = sum(int(n) for n in clipped) if kind == "layer" else int(clipped)
    return [*numbers(from_jax(dict(zip(batch, sums, strict=True)))), count]


def optax_trained(
    make: Callable[[Any], Any],
    bad: tuple[int, ...] = (),
    each: Callable[[int, Any], Any] | None = None,
) -> list[float]:
    library = need("optax")
    tfm, params = make(library), to_jax(parameters())
    state = tfm.init(params)
    for i, grads in enumerate(steps()):
        if each is not None:
            state = each(i, state)
        given = {n: g * nan for n, g in grads.items()} if i in bad else grads
        updates, state = tfm.update(to_jax(given), state, params)
        params = library.apply_updates(params, updates)
    return numbers(from_jax(params))


def clipped_adam(o: Any) -> Any:
    return o.chain(o.clip_by_global_norm(0.5), o.adam(0.1))


def parts(o: Any) -> Any:
    return o.partition({"a": o.adam(0.1), "b": o.sgd(0.01)}, {"weight": "a", "bias": "b"})


def falling(i: int, state: Any) -> Any:
    state.hyperparams["learning_rate"] = 0.1 / (1 + i)
    return state


# ---------------------------------------------------------------------- torch


def by_torch(name: str, *args: Any) -> list[float]:
    model = Model()
    model.give(gradients(1.0))
    getattr(torch.nn.utils, name)(model.parameters(), *args)
    return numbers(model.grads())


def hist(criterion: Callable[[Any], Any], cls: str = "HistClipper") -> list[Any]:
    return drytorch(lambda m: getattr(m, cls)(criterion(m), m.GradNormClipper(1.0), 3))


GATE: dict[str, Any] = {"warmup_steps": 0, "min_history": 0}
THEIRS: dict[str, Callable[[], list[Any]]] = {
    "drytorch GradNormClipper": lambda: drytorch_once(lambda m: m.GradNormClipper(0.5)),
    "drytorch GradValueClipper": lambda: drytorch_once(lambda m: m.GradValueClipper(0.5)),
    "drytorch GradParamNormalizer": lambda: drytorch_once(lambda m: m.GradParamNormalizer()),
    "drytorch GradZScoreNormalizer": lambda: drytorch_once(lambda m: m.GradZScoreNormalizer()),
    "drytorch NoOp": lambda: drytorch_once(lambda m: m.NoOp()),
    "drytorch HistClipper ZStat": lambda: hist(lambda m: m.ZStatCriterion()),
    "drytorch HistClipper ZStat mean": lambda: hist(
        lambda m: m.ZStatCriterion(clipping_function=m.mean_clipping)
    ),
    "drytorch HistClipper ZStat max": lambda: hist(
        lambda m: m.ZStatCriterion(clipping_function=m.max_clipping)
    ),
    "drytorch HistClipper EMA": lambda: hist(lambda m: m.EMACriterion()),
    "drytorch ParamHistClipper ZStat": lambda: hist(
        lambda m: m.ZStatCriterion(), "ParamHistClipper"
    ),
    "drytorch ParamHistClipper EMA": lambda: hist(lambda m: m.EMACriterion(), "ParamHistClipper"),
    "declearn L2GlobalClipping": lambda: declearn("L2GlobalClipping"),
    "declearn L2Clipping": lambda: declearn("L2Clipping"),
    "smartclip AutoClip": lambda: smartclip_thresholds(lambda s: s.AutoClip(**GATE), 5, SIZES[:7]),
    "smartclip AutoClip window": lambda: smartclip_thresholds(
        lambda s: s.AutoClip(
            mode="percentile", percentile=60.0, history="window", window_size=4, **GATE
        ),
        1,
    ),
    "smartclip ZScoreClip": lambda: smartclip_thresholds(
        lambda s: s.ZScoreClip(zmax=1.0, ema_decay=0.9, **GATE), 2
    ),
    "smartclip AGC": lambda: smartclip_once(lambda s: s.AGC(clipping=0.1, scope="per_param")),
    "smartclip AGC with vectors": lambda: smartclip_once(
        lambda s: s.AGC(clipping=0.1, exclude_bias_bn=False, scope="per_param")
    ),
    "torchzero ClipValue": lambda: torchzero_once(lambda m: m.ClipValue(0.5)),
    "torchzero ClipNorm": lambda: torchzero_once(lambda m: m.ClipNorm(0.5)),
    "torchzero ClipNorm global": lambda: torchzero_once(lambda m: m.ClipNorm(0.5, dim="global")),
    "torchzero ClipNorm rows": lambda: torchzero_once(lambda m: m.ClipNorm(0.5, ord=1, dim=-1)),
    "torchzero Normalize": lambda: torchzero_once(lambda m: m.Normalize(2.0)),
    "torchzero Normalize linf": lambda: torchzero_once(lambda m: m.Normalize(2.0, ord="linf")),
    "torchzero Centralize": lambda: torchzero_once(lambda m: m.Centralize()),
    "torchzero ClipNormByEMA": lambda: torchzero(lambda m: m.ClipNormByEMA(0.9)),
    "torchzero NormalizeByEMA": lambda: torchzero(lambda m: m.NormalizeByEMA(0.9)),
    "torchzero ClipValueByEMA": lambda: torchzero(lambda m: m.ClipValueByEMA(0.9)),
    "torchzero ClipNormGrowth": lambda: torchzero(lambda m: m.ClipNormGrowth()),
    "torchzero ClipNormGrowth add": lambda: torchzero(lambda m: m.ClipNormGrowth(0.5, None)),
    "torchzero ClipValueGrowth": lambda: torchzero(lambda m: m.ClipValueGrowth()),
    "optax clip": lambda: optax_once(lambda o: o.clip(0.5)),
    "optax clip_by_global_norm": lambda: optax_once(lambda o: o.clip_by_global_norm(0.5)),
    "optax clip_by_block_rms": lambda: optax_once(lambda o: o.clip_by_block_rms(0.5)),
    "optax adaptive_grad_clip": lambda: optax_once(lambda o: o.adaptive_grad_clip(0.1), turn=True),
    "optax centralize": lambda: optax_once(lambda o: o.centralize()),
    "optax apply_if_finite": lambda: optax_trained(
        lambda o: o.apply_if_finite(o.adam(0.1), 10), bad=(2, 5)
    ),
    "optax chain": lambda: optax_trained(clipped_adam),
    "optax masked": lambda: optax_trained(
        lambda o: o.chain(
            o.masked(o.clip_by_global_norm(0.5), {"weight": True, "bias": False}), o.sgd(0.1)
        )
    ),
    "optax partition": lambda: optax_trained(parts),
    "optax inject_hyperparams": lambda: optax_trained(
        lambda o: o.inject_hyperparams(o.sgd)(learning_rate=1.0), each=falling
    ),
    "optax MultiSteps": lambda: optax_trained(
        lambda o: o.MultiSteps(o.chain(o.clip_by_global_norm(0.5), o.sgd(0.1)), 2)
    ),
    "optax per_example_global_norm_clip": lambda: optax_examples("global"),
    "optax per_example_layer_norm_clip": lambda: optax_examples("layer"),
    "torch clip_grad_norm_": lambda: by_torch("clip_grad_norm_", 0.5),
    "torch clip_grad_norm_ inf": lambda: by_torch("clip_grad_norm_", 0.5, float("inf")),
    "torch clip_grad_value_": lambda: by_torch("clip_grad_value_", 0.5),
}


def test_every_row_has_its_other_side():
    assert THEIRS.keys() == OURS.keys() == RECORDED.keys()


@pytest.mark.parametrize("name", THEIRS)
def test_the_numbers_recorded_are_those_of_the_library(name):
    assert flat(THEIRS[name]()) == pytest.approx(flat(RECORDED[name]), rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("name", THEIRS)
def test_both_sides_give_the_same(name):
    assert flat(THEIRS[name]()) == pytest.approx(flat(OURS[name]()), rel=1e-4, abs=2e-5)


# ---------------------------------------------------------------------- where we differ on purpose


def test_a_spike_raises_its_own_limit_in_smartclip():
    library, model = need("smartclip"), Model()
    clipper = library.AutoClip(warmup_steps=0, min_history=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        clipper.observe(0.9 + 0.2 * torch.rand((), generator=generator).item())
    before = clipper.threshold()
    model.weight.grad, model.bias.grad = torch.zeros(2, 3), torch.tensor([1000.0, 0.0])
    library.apply(model, clipper)
    assert before < 1.3
    assert 200 < model.bias.grad.norm().item() < 230


def test_p2_of_smartclip_leaves_out_a_division():
    """The table of the paper has 4.440634 at its end."""
    stats = need("smartclip.core.stats")
    p2 = stats.P2Quantile(p=0.5)
    for x in (0.02, 0.15, 0.74, 3.39, 0.83, 22.37, 10.15, 15.43, 38.62, 15.92, 34.6, 10.28, 1.47,
              0.4, 0.05, 11.39, 0.27, 0.42, 0.09, 11.37):  # fmt: skip
        p2.update(x)
    assert p2.value == pytest.approx(9.277125)


def test_the_mean_of_an_ema_criterion_of_drytorch_clips_to_zero():
    ops = need("drytorch.lib.gradient_ops")
    criterion = ops.EMACriterion(clipping_function=ops.mean_clipping)
    criterion.set_statistics(2.0)
    assert criterion.get_clip_value(10.0) == 0.0


def test_torchzero_takes_the_dims_of_the_first_tensor_for_all():
    library = need("torchzero")
    bias, weight = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64, 64))
    opt = library.Optimizer([bias, weight], library.m.ClipNorm(1.0))
    bias.grad, weight.grad = torch.ones(64), torch.ones(64, 64)
    opt.step()
    assert weight.norm().item() == pytest.approx(8.0, rel=1e-3)
