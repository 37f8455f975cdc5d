"""Rules that clip, as their authors or other libraries wrote them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.identities.follow import need, official_file
from tests.identities.identity import (
    gradient_transformation,
    judge,
    optimizer,
    rewriter,
    transformation,
)
from tests.identities.inputs import Inputs
from torchzero_clip import (
    AGC,
    EMA,
    LR,
    AutoClip,
    Centralize,
    Chain,
    ClipNorm,
    ClipRMS,
    ClipValue,
    Modular,
    RMSprop,
    SpikeClip,
    ZClip,
    named,
)

ADDS_EPS: Any = {torch.float32: 1e-6, torch.float64: 1e-6}
"""Where the official code adds 1e-6 to the norm that it divides by, and ours does not."""


@rewriter(
    "clip_grad_norm",
    '`ClipNorm(max_norm, dim="global")` is `torch.nn.utils.clip_grad_norm_`',
    source="torch.nn.utils.clip_grad_norm_",
    ours=lambda max_norm: ClipNorm(max_norm, dim="global"),
    groups=({"max_norm": 3.0}, {}),
    rtol=ADDS_EPS,
)
def clip_grad_norm(groups: Any) -> Any:
    params = [p for group in groups for p in group["params"]]
    return lambda: torch.nn.utils.clip_grad_norm_(params, groups[0]["max_norm"])


@rewriter(
    "clip_grad_value",
    "`ClipValue(value)` is `torch.nn.utils.clip_grad_value_`",
    source="torch.nn.utils.clip_grad_value_",
    ours=ClipValue,
    groups=({"value": 0.7}, {"value": 0.4}),
)
def clip_grad_value(groups: Any) -> Any:
    def rewrite() -> None:
        for group in groups:
            torch.nn.utils.clip_grad_value_(group["params"], group["value"])

    return rewrite


AGC_GROUPS: Any = ({"clipping": 0.3, "eps": 1e-3}, {"clipping": 0.5, "eps": 1.0})


@rewriter(
    "agc_timm",
    "`AGC` is timm's",
    source="timm 1.0.31, `timm.utils.adaptive_clip_grad`",
    ours=AGC,
    groups=AGC_GROUPS,
)
def agc_timm(groups: Any) -> Any:
    agc = need("timm.utils.agc").adaptive_clip_grad

    def rewrite() -> None:
        for group in groups:
            agc(group["params"], group["clipping"], group["eps"])

    return rewrite


@rewriter(
    "agc_tiny",
    "`AGC` is timm's where gradients are smaller than the 1e-6 that it divides by at least",
    source="timm 1.0.31, `timm.utils.adaptive_clip_grad`",
    ours=AGC,
    groups=({"clipping": 1e-4, "eps": 1e-3}, {"clipping": 1e-4, "eps": 1e-3}),
    inputs=Inputs(size=3e-7),
)
def agc_tiny(groups: Any) -> Any:
    return agc_timm(groups)


@gradient_transformation(
    "agc_optax",
    "`AGC` is optax's, whose layouts have the output last",
    source="optax 0.2.8, `optax.adaptive_grad_clip`",
    ours=AGC,
    groups=AGC_GROUPS,
)
def agc_optax(**options: Any) -> Any:
    optax, jax = need("optax"), need("jax")
    agc = optax.adaptive_grad_clip(**options)

    def turned(tree: Any, source: int, to: int) -> Any:
        return jax.tree.map(lambda x: jax.numpy.moveaxis(x, source, to), tree)

    def update(updates: Any, state: Any, params: Any) -> Any:
        out, state = agc.update(turned(updates, 0, -1), state, turned(params, 0, -1))
        return turned(out, -1, 0), state

    return optax.GradientTransformation(agc.init, update)


@rewriter(
    "centralize",
    "`Centralize(dim=0, inverse_dims=True)` is gradient centralization",
    source="Yonghongwei/Gradient-Centralization at ed2a608, `centralized_gradient`",
    ours=lambda: Centralize(dim=0, inverse_dims=True),
)
def centralize(groups: Any) -> Any:
    path = "algorithm-GC/algorithm/Centralization.py"
    official = official_file("Yonghongwei/Gradient-Centralization", path)
    params = [p for group in groups for p in group["params"]]
    return lambda: [official.centralized_gradient(p.grad) for p in params if p.grad is not None]


EXACT = "that scales by exactly its limit over the norm"
AS_IT_IS = "with its `max_norm`, up to the 1e-6 that it adds to a norm"


def zclip_identity(
    name: str, ours: str, but: str, max_norm: float | None = None, **options: Any
) -> Any:
    """An identity of one of the modes of ZClip."""
    values = {"alpha": 0.9, "z_thresh": 0.8, "max_norm": max_norm, "warmup_steps": 4}
    return rewriter(
        name,
        f'`ZClip(mode="{ours}")` is ZClip {but}',
        source="bluorion-com/ZClip at 584ce4f, `ZClip`",
        ours=lambda **options: ZClip(mode=ours, **options),
        groups=(values, {}),
        **options,
    )


def zclip_step(groups: Any, exact: bool = True, **options: Any) -> Any:
    """A step of the official rule; `exact` divides by the norm, where it divides by norm + 1e-6."""
    library = official_file("bluorion-com/ZClip", "zclip/zclip.py")
    rule = library.ZClip(warmup_steps=groups[0]["warmup_steps"], **options)
    params = [p for group in groups for p in group["params"]]

    def scale(module: Any, norm: float, most: float) -> None:
        for p in params if norm > most else ():
            if p.grad is not None:
                p.grad.mul_(most / norm)

    if exact:
        rule.apply_in_place_clipping = scale
    module = SimpleNamespace(parameters=lambda: iter(params), modules=lambda: iter(()))

    def step() -> None:
        names = {"alpha": "alpha", "z_thresh": "z_thresh", "max_norm": "max_grad_norm"}
        vars(rule).update({theirs: groups[0][ours] for ours, theirs in names.items()})
        rule.step(module)

    return step


@zclip_identity("zclip", "adaptive", EXACT)
def zclip(groups: Any) -> Any:
    return zclip_step(groups, mode="zscore", clip_option="adaptive_scaling")


@zclip_identity("zclip_max_norm", "adaptive", AS_IT_IS, max_norm=6.0, rtol=ADDS_EPS)
def zclip_max_norm(groups: Any) -> Any:
    return zclip_step(groups, exact=False, mode="zscore", clip_option="adaptive_scaling")


@zclip_identity("zclip_mean", "mean", EXACT)
def zclip_mean(groups: Any) -> Any:
    return zclip_step(groups, mode="zscore", clip_option="mean")


@zclip_identity("zclip_percentile", "percentile", EXACT)
def zclip_percentile(groups: Any) -> Any:
    return zclip_step(groups, mode="percentile")


@judge(
    "autoclip",
    '`AutoClip("percentile")` clips each step to the limit that the authors\' code computes in the '
    "previous step, until the window is full",
    source="pseeth/autoclip at dfb622c, `add_autoclip_gradient_handler`",
    ours=lambda **options: AutoClip("percentile", warmup_steps=1, **options),
    groups=({"percentile": 60.0}, {}),
    constant={
        "percentile": "the reference accepts it only once",
        "ema_decay": "a window has no such option",
        "window_size": "the history of the reference has no limit",
    },
    rtol={torch.float32: 1e-6, torch.float64: 1e-7},  # the window is kept in float32
)
def autoclip(groups: Any) -> Any:
    need("ignite")
    official = official_file("pseeth/autoclip", "autoclip.py")
    params = [p for group in groups for p in group["params"]]
    handlers: list[Any] = []
    engine = SimpleNamespace(on=lambda event: handlers.append)
    model = SimpleNamespace(parameters=lambda: params)
    official.add_autoclip_gradient_handler(engine, model, groups[0]["percentile"])

    def observe() -> float:
        with mock.patch.object(torch.nn.utils, "clip_grad_norm_") as clip:
            handlers[0](engine)
        return float(clip.call_args.args[1])

    return observe


@rewriter(
    "spike_clip",
    "`SpikeClip` is the clipping of SPAM",
    source="TianjinYellow/SPAM-Optimizer at e8185fb, `galore_torch/SPAM.py`",
    ours=SpikeClip,
    groups=({"threshold": 20.0, "beta": 0.9}, {"beta": 0.8}),
    # it makes an entry zero for ever that is zero when it begins to clip, in the second step
    inputs=Inputs(zero_start=False, gaps=False),
)
def spike_clip(groups: Any) -> Any:
    """Its optimizer clips the gradients in place on the way."""
    path = "galore_torch/SPAM.py"
    official = official_file("TianjinYellow/SPAM-Optimizer", path)
    own = [{"params": g["params"]} for g in groups]
    opt = official.AdamW(own, 0.0, grad_accu_steps=2)

    def step() -> None:
        opt.thres = groups[0]["threshold"]
        for theirs, group in zip(opt.param_groups, groups, strict=True):
            theirs["betas"] = (0.9, group["beta"])
        opt.step()

    return step


@optimizer(
    "adagc",
    "`AdaGC`, `Adam`, `WeightDecay`, `LR` is AdamW with AdaGC",
    source="pytorch_optimizer 4.1.0, `AdaGC`",
    ours=lambda lambda_rel, lambda_abs, **options: named(
        "adagc", rel=lambda_rel, abs=lambda_abs, **options
    ),
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-12, "weight_decay": 0.1, "beta": 0.9,
         "lambda_rel": 1.2, "lambda_abs": 7.0, "warmup_steps": 5},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.0, "beta": 0.8,
         "lambda_rel": 1.05, "lambda_abs": 6.5},
    ),
    keys={"rel": "lambda_rel", "abs": "lambda_abs"},
    # it takes the norm of a zero gradient for a norm, and is stuck at it; and it counts the steps
    # of a group, ours those of a parameter
    inputs=Inputs(zero_start=False, zero_step=False, gaps=False),
    rtol={torch.float32: 1e-6, torch.float64: 1e-7},  # it adds up its global norm in float32
)  # fmt: skip
def adagc(groups: Any) -> Any:
    return need("pytorch_optimizer").AdaGC(groups, warmup_steps=5, foreach=False)


def slower(opt: Modular, step: int) -> None:
    """The average of the squares grows longer with the steps."""
    for group in opt.param_groups:
        group["alpha"] = 1 - step**-0.8


@transformation(
    "adafactor_unfactored",
    "`RMSprop` with a growing `alpha`, `ClipRMS(1)`, `LR`, `EMA` is Adafactor without factors",
    source="optax 0.2.8, `optax.adafactor`",
    ours=lambda lr, momentum, clipping_threshold: Chain(
        RMSprop(0.0, 1e-30), ClipRMS(clipping_threshold), LR(lr), EMA(momentum)
    ),
    groups=(
        {"lr": 0.05, "momentum": 0.9, "clipping_threshold": 1.0},
        {"lr": 0.02, "momentum": 0.8, "clipping_threshold": 0.8},
    ),
    keys={"beta": "momentum", "max_rms": "clipping_threshold"},
    constant={
        "alpha": "it has its own schedule over the steps",
        "eps": "the reference adds it to the square of the gradient",
    },
    each_step=slower,
    inputs=Inputs(gaps=False),  # it counts the steps of a row, and ours are scheduled for a group
    rtol={torch.float32: 1e-6, torch.float64: 1e-7},  # it computes its decay in float32
)
def adafactor(lr: Any, **options: Any) -> Any:
    return need("optax").adafactor(
        lr, factored=False, dtype_momentum=None, multiply_by_parameter_scale=False, **options
    )
