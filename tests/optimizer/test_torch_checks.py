"""torch's generic checks of an optimizer, over presets that stand in torch's own table, and names.

A preset is AdamW with a rule in front, with AdamW's arguments. Every name that `named` knows is
checked as well, but for what is AdamW's own: its errors, its decay, its steps beside torch's, which
the identities hold. The table is `optim_db` of
`torch.testing._internal.common_optimizers`; the inputs, errors and schedulers are the ones that
torch keeps there for AdamW. Tests have the names they have in torch's test_optim.py, where the same
is checked of torch.optim. What is not here has no meaning for these presets:

- foreach_matches_forloop, foreach_large_tensor, peak_memory_foreach, defaults_changed_to_foreach,
  differentiable: a chain has no such flags. `fused` it has, and fused_matches_forloop is below.
- fused_large_tensor, fused_cpu_matches_cuda, forloop_goes_right_direction_multigpu,
  cpu_load_state_dict, state_dict_with_cuda_params, fused_error_on_params_on_meta: accelerators.
- fused_does_not_step_if_foundinf: scalers unscale before the step, as no preset sets
  `_step_supports_amp_scaling`; grad_scaler below is the same promise.
- rosenbrock_sparse: sparse gradients are refused, which is checked with the errors; the dense
  function is below.
- complex_2d: the norm of a complex tensor is not the norms of its two parts.
- can_load_older_state_dict: removes flags that were added to torch later; there are none here, and
  a checkpoint without a live value is refused, which test_resume.py checks.
- second_order_optims_return_consistent_types: for LBFGS.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

PROFILE = settings.get_current_profile_name()  # before the next import
from torch.testing._internal.common_optimizers import (  # noqa: E402
    OptimizerErrorEnum,
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
    optim_inputs_func_adam,
)

from tests.helpers import close, equal  # noqa: E402
from tests.peers.suites.chains import MATRICES, VECTORS_TOO, published  # noqa: E402
from tests.peers.suites.presets import RULES, Preset, preset  # noqa: E402
from tests.peers.suites.torch_inputs import errors, inputs_of  # noqa: E402
from torchzero_clip import Scale, attach  # noqa: E402
from torchzero_clip.published import NAMES  # noqa: E402

# That import changes two settings for the whole process.
settings.load_profile(PROFILE)
vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True


ADAM = next(info for info in optim_db if info.optim_cls is torch.optim.Adam)

optim_db.extend(
    OptimizerInfo(
        preset(name),
        optim_inputs_func=optim_inputs_func_adam,
        optim_error_inputs_func=errors,
        scheduler_inputs=ADAM.scheduler_inputs,
        supported_impls=("fused",),
        not_og_supported_flags=(),
        supports_fused_on=("cpu", "cuda"),
        supports_complex=rule().complex != "refuse",
    )
    for name, rule in RULES.items()
)

NAMED = {
    name: OptimizerInfo(
        published(name),
        optim_inputs_func=functools.partial(inputs_of, name),
        scheduler_inputs=ADAM.scheduler_inputs,
        supported_impls=("fused",),
        not_og_supported_flags=(),
        supports_fused_on=("cpu", "cuda"),
        supports_complex=name not in MATRICES | VECTORS_TOO
        and not any(tfm.complex == "refuse" for tfm in NAMES[name]().walk()),
    )
    for name in NAMES
}
PRESETS = [info for info in optim_db if issubclass(info.optim_cls, Preset)]
QUICK = ("ClipNorm", "ZClip")  # without state, and with scalars of the whole model
each_preset = pytest.mark.parametrize(
    "info",
    [
        pytest.param(info, id=info.name, marks=() if info.name in QUICK else pytest.mark.slow)
        for info in PRESETS
    ],
)

STILL = {"schedule_free_radam": 5}  # its first steps, which a scheduler takes for a plateau
QUICK_NAMES = ("rprop", "adopt")  # a link that has lr, and one that torch has not
each = pytest.mark.parametrize(
    "info",
    [
        pytest.param(info, id=info.name, marks=() if info.name in some else pytest.mark.slow)
        for infos, some in ((PRESETS, QUICK), (NAMED.values(), QUICK_NAMES))
        for info in infos
    ],
)

# ---------------------------------------------------------------------- helpers


def inputs(info: OptimizerInfo) -> Iterator[dict[str, Any]]:
    """All arguments that the table has for an optimizer, with and without `fused`."""
    for given in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
        yield copy.deepcopy(given.kwargs)


def linear(dtype: torch.dtype = torch.float32, strided: bool = False) -> tuple[list[Tensor], Any]:
    """A weight, a bias, and a closure that makes gradients of full rank for an optimizer."""
    torch.manual_seed(1)
    shapes = [(10, 5, 2), (10, 2)] if strided else [(10, 5), (10,)]
    held = [torch.randn(shape, dtype=dtype) for shape in shapes]
    weight, bias = [torch.nn.Parameter(t[..., 0] if strided else t) for t in held]
    x = torch.randn(5, 8, dtype=dtype)

    def closure() -> Tensor:
        weight.grad = bias.grad = None
        loss = (weight.mm(x).T + bias).pow(2).mean(0).sum()
        loss.backward()
        return loss

    return [weight, bias], closure


def rounding(info: OptimizerInfo) -> tuple[float, ...]:
    """How far runs may be apart whose sums have another order: matrices multiply in bfloat16."""
    return (1e-3, 1e-5) if info.name in MATRICES | VECTORS_TOO else ()


def train(opt: torch.optim.Optimizer, closure: Any, steps: int = 3) -> None:
    for _ in range(steps):
        opt.step(closure)


def descend(opt: torch.optim.Optimizer, closure: Any, schedulers: Any) -> tuple[float, float]:
    """The loss before and after some steps under schedulers."""
    before = closure().item()
    for _ in range(STILL.get(type(opt).__name__, 0)):
        opt.step(closure)
    made = [scheduler(opt) for scheduler in schedulers]
    for _ in range(10):
        loss = opt.step(closure)
        for scheduler in made:
            scheduler.step(*([loss.detach()] if isinstance(scheduler, ReduceLROnPlateau) else []))
    return before, closure().item()


def by_torch(info: OptimizerInfo, params: list[Tensor], kwargs: dict[str, Any]) -> Any:
    """torch's AdamW, one tensor after another, with the rule attached."""
    kwargs = {"weight_decay": 0.0, **kwargs}
    kwargs.pop("fused", None)
    reference = torch.optim.AdamW(params, **kwargs, foreach=False)
    front = [Scale(-1.0)] if kwargs.get("maximize") else []
    rule = info.optim_cls.rule if hasattr(info.optim_cls, "rule") else RULES[info.name]
    reference.handle = attach(reference, *front, rule(), *front)  # the hook is weak
    return reference


# ---------------------------------------------------------------------- construction


@each
def test_optim_infos_do_not_specify_global_cliquey_kwargs(info):
    for given in info.optim_inputs_func(device="cpu"):
        assert not {"foreach", "fused", "differentiable"} & given.kwargs.keys()
    assert {kwargs.get("fused") for kwargs in inputs(info)} == {True, False}


@each_preset
def test_errors(info):
    for case in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = case.optimizer_error_input
        params = linear()[0] if given.params is None else given.params

        def build(params: Any = params, kwargs: Any = given.kwargs) -> Any:
            return info.optim_cls(params, **kwargs)

        warns = issubclass(case.error_type, Warning)
        expect = pytest.warns if warns else pytest.raises
        act = build if case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR else build().step
        with expect(case.error_type, match=case.error_regex):
            act()


@each
def test_optimizer_can_be_printed(info):
    for kwargs in inputs(info):
        shown = repr(info.optim_cls(linear()[0], **kwargs))
        assert shown.startswith(f"{info.name}(")
        lr = kwargs.get("lr", info.optim_cls(linear()[0]).defaults["lr"])
        assert f"'lr': {lr!r}" in shown


# ---------------------------------------------------------------------- what a step does


@each
@pytest.mark.parametrize("strided", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_forloop_goes_right_direction(info, strided):
    runs = [((), kwargs) for kwargs in inputs(info)]
    plain = info.optim_inputs_func(device="cpu")[0].kwargs
    runs += [(schedulers, plain) for schedulers in info.scheduler_inputs]
    for schedulers, kwargs in runs:
        params, closure = linear(strided=strided)
        opt = info.optim_cls(params, **kwargs)
        before, after = descend(opt, closure, schedulers)
        assert after > before if kwargs.get("maximize") else after < before


@each_preset
def test_param_group_with_lrscheduler_goes_right_direction(info):
    """Each group follows its own lr: as two optimizers whose schedulers do the same."""
    for schedulers in info.scheduler_inputs:
        (weight, bias), closure = linear()
        opt = info.optim_cls([{"params": weight}, {"params": bias, "lr": 0.01}])
        before, after = descend(opt, closure, schedulers)
        assert after < before
        first, second = (group["lr"] for group in opt.param_groups)
        assert second == pytest.approx(10 * first)


@each_preset
def test_rosenbrock(info):
    """100 steps down the valley, as torch's AdamW behind the attached rule goes."""

    def value(w: Tensor) -> float:
        x, y = w.tolist()
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2

    def run(make: Any) -> Tensor:
        w = torch.nn.Parameter(torch.tensor([1.5, 1.5], dtype=torch.float64))
        opt = make([w])
        for _ in range(100):
            x, y = w.detach().unbind()
            w.grad = torch.stack([-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)])
            opt.step()
        return w

    kwargs = {"lr": 0.01, "weight_decay": 0.0}
    ours = run(lambda params: info.optim_cls(params, **kwargs))
    theirs = run(lambda params: by_torch(info, params, kwargs))
    close([ours], [theirs], rtol=1e-9, atol=1e-9)
    assert value(ours) < 0.5 < value(torch.tensor([1.5, 1.5]))


@each_preset
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fused_matches_forloop(info, dtype):
    """Fused, by formula, and by torch one tensor after another."""
    for kwargs in inputs(info):
        params, closure = linear(dtype)
        others, other_closure = linear(dtype)
        train(info.optim_cls(params, **kwargs), closure, 5)
        train(by_torch(info, others, kwargs), other_closure, 5)
        close(params, others)


@each
def test_mixed_device_dtype(info):
    """Several dtypes in one optimizer: fused as by formula, each parameter in its own dtype."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

    def run(fused: bool) -> list[Tensor]:
        torch.manual_seed(2)
        params = [torch.nn.Parameter(torch.randn(3, 4).to(dtype)) for dtype in dtypes]
        opt = info.optim_cls(params, lr=0.01, fused=fused)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(3, 4).to(p.dtype)
            opt.step()
        return params

    fused, plain = run(True), run(False)
    assert [p.dtype for p in fused] == dtypes
    for p, q in zip(fused, plain, strict=True):
        half = p.dtype in (torch.bfloat16, torch.float16)
        close([p], [q], *((5e-3, 5e-3) if half else (1e-6, 1e-6)))


@each
def test_set_default_dtype_works(info):
    """torch.set_default_dtype changes nothing for parameters that have their dtype."""

    def run() -> list[Tensor]:
        params, closure = linear()
        opt = info.optim_cls(params, lr=0.01)
        torch.set_default_dtype(default)
        try:
            train(opt, closure)
        finally:
            torch.set_default_dtype(torch.float32)
        tensors = [v for held in opt.state.values() for v in held.values() if torch.is_tensor(v)]
        assert all(v.dtype == torch.float32 for v in tensors)
        return params

    default = torch.float32
    expected = run()
    default = torch.float64
    assert equal(run(), expected)


@each
def test_tensor_lr(info):
    """A tensor as lr gives the same run, stays a tensor, and schedulers write into it."""
    for kwargs in inputs(info):
        kwargs["lr"] = 0.01
        params, closure = linear()
        others, other_closure = linear()
        lr = torch.tensor(0.01)
        opts = info.optim_cls(params, **kwargs), info.optim_cls(others, **{**kwargs, "lr": lr})
        schedulers = [ExponentialLR(opt, gamma=0.9) for opt in opts]
        for _ in range(5):
            opts[0].step(closure), opts[1].step(other_closure)
            for scheduler in schedulers:
                scheduler.step()
        close(params, others, *rounding(info))
        assert opts[1].param_groups[0]["lr"] is not None
        assert isinstance(opts[1].param_groups[0]["lr"], Tensor)
        assert opts[1].param_groups[0]["lr"].item() == pytest.approx(0.01 * 0.9**5)


@each
def test_complex(info):
    """A complex parameter is a real one with a last dim of two, or is refused with a sentence."""
    for kwargs in inputs(info):
        torch.manual_seed(3)
        whole = torch.nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        pairs = torch.nn.Parameter(torch.view_as_real(whole.detach()).clone())
        opts = info.optim_cls([whole], **kwargs), info.optim_cls([pairs], **kwargs)
        for _ in range(3):
            whole.grad = torch.randn_like(whole)
            pairs.grad = torch.view_as_real(whole.grad).clone()
            if not info.supports_complex:
                refused = (
                    "does not support complex parameters|accepts only matrices of real numbers"
                )
                with pytest.raises((TypeError, ValueError), match=refused):
                    opts[0].step()
                continue
            opts[0].step(), opts[1].step()
            if info.name != "stable_spam":  # whose bound is the largest modulus, not of a part
                close([torch.view_as_real(whole.detach())], [pairs])


@each_preset
def test_param_groups_weight_decay(info):
    """Where the gradient is zero only the group's own decay moves: w ← w (1 - lr · decay)."""
    for fused in (True, False):
        (weight, bias), _ = linear()
        held = weight.detach().clone(), bias.detach().clone()
        groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias]}]
        opt = info.optim_cls(groups, lr=0.1, weight_decay=0.0, fused=fused)
        for p in (weight, bias):
            p.grad = torch.zeros_like(p)
        opt.step()
        close([weight], [held[0] * (1 - 0.1 * 0.5)])
        assert equal(bias.detach(), held[1])


@each_preset
def test_param_groups_lr(info):
    """A group with lr 0 stands still, and an lr of twice the size is a step of twice the size."""

    def moved(**groups: Any) -> Tensor:
        (weight, bias), closure = linear(torch.float64)
        held, still = weight.detach().clone(), bias.detach().clone()
        opt = info.optim_cls([{"params": [weight], **groups}, {"params": [bias]}], lr=0.0)
        opt.step(closure)
        assert equal(bias.detach(), still)
        return weight.detach() - held

    close([moved(lr=0.02)], [2 * moved(lr=0.01)], rtol=1e-9, atol=1e-12)
    assert moved(lr=0.01).abs().max() > 1e-3


@each
def test_step_is_noop_when_params_have_no_grad(info):
    for kwargs in inputs(info):
        params = [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4))]
        held = copy.deepcopy(params)
        opt = info.optim_cls(params, **kwargs)
        assert opt.step(lambda: 1.5) == 1.5
        assert equal(params, held)
        assert not opt.state


AT_REST = {  # what else would move a parameter
    "asgd": {"weight_decay": 0.0, "lambd": 0.0},
    "rprop": {},
    "scion": {"unconstrained": True},
    "soap_hyperball": {},
    "yogi": {"weight_decay": 0.0, "initial_accumulator": 0.0},
}


@each
def test_step_is_noop_for_zero_grads(info):
    none = AT_REST.get(info.name, {"weight_decay": 0.0})
    for kwargs in inputs(info):
        params, _ = linear()
        held = [p.detach().clone() for p in params]
        opt = info.optim_cls(params, **{**kwargs, **none})
        for _ in range(3):
            for p in params:
                p.grad = torch.zeros_like(p)
            opt.step()
        assert equal([p.detach() for p in params], held)


@each
def test_step_is_noop_for_empty_grads(info):
    """A parameter without elements is stepped with the others, and changes nothing for them."""
    for kwargs in inputs(info):
        params, closure = linear()
        others, other_closure = linear()
        empty = torch.nn.Parameter(torch.zeros(0, 3))
        empty.grad = torch.zeros(0, 3)
        train(info.optim_cls([empty, *params], **kwargs), closure)
        train(info.optim_cls(others, **kwargs), other_closure)
        close(params, others, *rounding(info))
        alone = info.optim_cls([empty], **kwargs)
        alone.step()
        assert tuple(empty.shape) == (0, 3)


@each
def test_grads_are_never_inplaced_into(info):
    """But where a chain has been asked for that, as to turn what Cautious compares with."""
    for kwargs in inputs(info):
        params, closure = linear()
        opt = info.optim_cls(params, **kwargs)
        if kwargs.get("maximize") and any(
            tfm.target == "grad" for tfm in getattr(opt, "chain", ())
        ):
            continue
        for _ in range(3):
            closure()
            held = [(p.grad, p.grad._version, p.grad.clone()) for p in params]
            opt.step()
            for p, (grad, version, values) in zip(params, held, strict=True):
                assert p.grad is grad
                assert grad._version == version
                assert equal(grad, values)


@each_preset
def test_step_iteration(info):
    """Each parameter counts the steps in which it had a gradient."""
    params, closure = linear()
    opt = info.optim_cls(params)
    train(opt, closure, 4)
    params[1].grad = None
    opt.step()
    assert [opt.state[p]["Adam/step"].item() for p in params] == [5, 4]


@each
def test_grad_scaler(info):
    """A step with an infinite gradient is skipped by the scaler; the others see unscaled ones."""
    params, closure = linear()
    others, other_closure = linear()
    opt, plain = info.optim_cls(params), info.optim_cls(others)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        closure()
        for p in params:
            p.grad.mul_(scaler.scale(torch.tensor(1.0)))
        if step == 2:
            params[0].grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        if step != 2:
            plain.step(other_closure)
    close(params, others)
    assert equal([p.detach() for p in params], [p.detach() for p in others])


# ---------------------------------------------------------------------- checkpoints


@each
def test_non_empty_state(info):
    for kwargs in inputs(info):
        params, closure = linear()
        opt = info.optim_cls(params, **kwargs)
        train(opt, closure, 1)
        for p in params:
            without = (p.dim() == 1 and info.name in MATRICES) or info.name in ("scion", "sgd")
            assert opt.state[p] or without  # these have no momentum
            held = {k: v for k, v in opt.state[p].items() if k.rpartition("/")[2] != "begun"}
            assert all(isinstance(value, Tensor) for value in held.values())


@each
def test_state_dict_deterministic(info):
    """Equal optimizers have equal state dicts; loading leaves the loaded one as it was."""
    for kwargs in inputs(info):
        params, closure = linear()
        opt = info.optim_cls(params, **kwargs)
        train(opt, closure)
        given = copy.deepcopy(opt.state_dict())
        kept = copy.deepcopy(given)
        others, other_closure = linear()
        for p, q in zip(params, others, strict=True):
            q.data.copy_(p.data)
        other = info.optim_cls(others, **kwargs)
        other.load_state_dict(given)
        for _ in range(3):
            opt.step(closure), other.step(other_closure)
            assert equal([p.detach() for p in params], [p.detach() for p in others])
        assert equal(opt.state_dict(), other.state_dict())
        assert equal(given["param_groups"], kept["param_groups"])


@each
def test_save_load_equality_with_weights_only(info):
    for kwargs in inputs(info):
        params, closure = linear()
        opt = info.optim_cls(params, **kwargs)
        train(opt, closure)
        with io.BytesIO() as file:
            torch.save(opt.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
        assert equal(loaded, opt.state_dict())
        other = info.optim_cls(linear()[0], **kwargs)
        other.load_state_dict(loaded)
        assert equal(other.state_dict(), opt.state_dict())


@each
def test_load_nontensor_step(info):
    """A checkpoint may have the step count as a plain number, but for the counts of matrices."""
    for kwargs in inputs(info):
        params, closure = linear()
        opt = info.optim_cls(params, **kwargs)
        train(opt, closure)
        checkpoint = copy.deepcopy(opt.state_dict())
        for held in checkpoint["state"].values():
            counts = [key for key in held if key.endswith("/step") and not held[key].dim()]
            held |= {key: held[key].item() for key in counts}
        others, other_closure = linear()
        for p, q in zip(params, others, strict=True):
            q.data.copy_(p.data)
        other = info.optim_cls(others, **kwargs)
        other.load_state_dict(checkpoint)
        train(opt, closure), train(other, other_closure)
        assert equal([p.detach() for p in params], [p.detach() for p in others])


@each
def test_can_load_from_to_named_state_dict(info):
    """Names of parameters are saved, and loaded or kept, and never decide what loads where."""
    for named_first in (True, False):
        for named_second in (True, False):
            opts = []
            for named in (named_first, named_second):
                params, closure = linear()
                pairs = list(zip(("weight", "bias"), params, strict=True))
                opts.append(info.optim_cls(pairs if named else params))
                train(opts[-1], closure)
            first, second = opts
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            assert equal(first.state_dict()["state"], second.state_dict()["state"])
            found = second.param_groups[0].get("param_names")
            assert found == (["weight", "bias"] if named_first or named_second else None)
            second.step()


@each
def test_deepcopy_copies_all_public_attrs(info):
    for kwargs in inputs(info):
        opt = info.optim_cls(linear()[0], **kwargs)
        public = {key for key in vars(opt) if not key.startswith("_")}
        assert {key for key in vars(copy.deepcopy(opt)) if not key.startswith("_")} == public


@each
def test_adamw_serialization(info):
    """A copy, and an optimizer from its pickled parts, go on as the original."""
    params, closure = linear()
    opt = info.optim_cls(params)
    train(opt, closure)
    twins, (twin_params, _) = copy.deepcopy((opt, params)), linear()
    fresh = info.optim_cls(twin_params)
    fresh.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    for p, q in zip(twin_params, params, strict=True):
        p.data.copy_(q.data)
    closure()
    for p, a, b in zip(params, twins[1], twin_params, strict=True):
        a.grad, b.grad = p.grad.clone(), p.grad.clone()
    opt.step(), twins[0].step(), fresh.step()
    for some in (twins[1], twin_params):
        assert equal([p.detach() for p in some], [p.detach() for p in params])


# ---------------------------------------------------------------------- hooks


@each
def test_step_hooks(info):
    """Called once a step with its arguments, which the one before may change, until removed."""
    params, closure = linear()
    opt = info.optim_cls(params)
    calls: list[Any] = []

    def before(hooked: Any, args: Any, kwargs: Any) -> Any:
        calls.append(("before", hooked, args, kwargs))
        return args, {"closure": closure}

    def after(hooked: Any, args: Any, kwargs: Any) -> None:
        calls.append(("after", hooked, args, kwargs))

    handles = opt.register_step_pre_hook(before), opt.register_step_post_hook(after)
    loss = opt.step()
    assert isinstance(loss, Tensor)
    assert [call[0] for call in calls] == ["before", "after"]
    assert all(call[1] is opt for call in calls)
    assert calls[1][3] == {"closure": closure}
    for handle in handles:
        handle.remove()
    opt.step()
    assert len(calls) == 2


@each
def test_step_all_hooks(info):
    """Global hooks around the optimizer's own, in this order."""
    params, closure = linear()
    opt = info.optim_cls(params)
    calls: list[int] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(1)),
        opt.register_step_pre_hook(lambda *_: calls.append(2)),
        opt.register_step_post_hook(lambda *_: calls.append(4)),
        register_optimizer_step_post_hook(lambda *_: calls.append(5)),
    ]

    def evaluated() -> Tensor:
        calls.append(3)
        return closure()

    try:
        opt.step(evaluated)
        opt.step(evaluated)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [1, 2, 3, 4, 5] * 2
    opt.step(closure)
    assert calls == [1, 2, 3, 4, 5] * 2


@each
def test_state_dict_hooks(info):
    """One before, which sees the optimizer, and one after, which may exchange the dict."""
    opt = info.optim_cls(linear()[0])
    calls: list[str] = []
    pre = opt.register_state_dict_pre_hook(lambda _: calls.append("pre"))
    post = opt.register_state_dict_post_hook(lambda _, given: {**given, "more": 1})
    assert opt.state_dict()["more"] == 1
    assert calls == ["pre"]
    pre.remove(), post.remove()
    assert "more" not in opt.state_dict()
    assert calls == ["pre"]


@pytest.mark.filterwarnings("ignore:.* from the checkpoint replaces")
@each
def test_load_state_dict_hooks(info):
    """Some before, which may exchange what is loaded, in their order, and one after."""
    params, closure = linear()
    opt = info.optim_cls(params)
    train(opt, closure)
    given = copy.deepcopy(opt.state_dict())
    given["param_groups"][0]["lr"] = 0.25
    calls: list[Any] = []

    def halve(_: Any, given: Any) -> Any:
        calls.append("halve")
        groups = [{**group, "lr": group["lr"] / 2} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    opt.register_load_state_dict_pre_hook(halve)
    opt.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: calls.append(o.param_groups[0]["lr"]))
    opt.load_state_dict(given)
    assert calls == ["first", "halve", 0.125]
    assert given["param_groups"][0]["lr"] == 0.25
    train(opt, closure, 1)
