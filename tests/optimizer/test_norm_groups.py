"""`clip=False` and `norm_group` of a group: what norm rules leave out, and norms of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import (
    AGC,
    LR,
    AdaGC,
    Adam,
    AutoClip,
    ClipNorm,
    ClipNormByEMA,
    Clipper,
    ClipSpectral,
    Guard,
    Modular,
    Normalize,
    Recorder,
    SkipLarge,
    SkipSpike,
    Transform,
    TrustRatio,
    WeightEMA,
    ZClip,
    attach,
    release,
)
from torchzero_clip.source import SourceError

SHAPES = [(6, 5), (5,), (4, 5), (4,)]
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"fused": False},
    "compiled": {"compile": True},
}
OF_ALL: dict[str, Callable[[], Transform]] = {
    "ClipNorm": lambda: ClipNorm(0.5, dim="global"),
    "ZClip": lambda: ZClip(max_norm=1.0),
    "AutoClip": AutoClip,
    "ClipNormByEMA": lambda: ClipNormByEMA(dim="global"),
    "Normalize": lambda: Normalize(dim="global"),
}
OF_EACH: dict[str, Callable[[], Transform]] = {
    "AdaGC": AdaGC,
    "AGC": AGC,
    "each": lambda: ClipNorm(0.1),
}


def params() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in SHAPES]


def fill(ps: list[Parameter], i: int) -> None:
    generator = torch.Generator().manual_seed(i)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator) * (30 if i == 4 else 1)


def apart(ps: list[Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": ps[:2]},
        {"params": ps[2:3], "norm_group": "head"},
        {"params": ps[3:], "clip": False},
    ]


@pytest.mark.parametrize(
    ("rule", "engine"),
    [
        pytest.param(
            rule,
            engine,
            marks=pytest.mark.slow if engine == "compiled" and rule != "ZClip" else (),
        )
        for rule in OF_ALL
        for engine in ENGINES
    ],
)
def test_it_is_an_optimizer_for_each_norm(rule: str, engine: str) -> None:
    ps, qs, make, o = params(), params(), OF_ALL[rule], ENGINES[engine]
    opt = Modular(apart(ps), make(), Adam(), LR(0.1), **o)
    each = [Modular(qs[:2], make(), Adam(), LR(0.1), **o)]
    each += [Modular(qs[2:3], make(), Adam(), LR(0.1), **o), Modular(qs[3:], Adam(), LR(0.1), **o)]
    for i in range(7):
        fill(ps, i)
        fill(qs, i)
        for one in (opt, *each):
            one.step()
        assert all(map(torch.equal, ps, qs))
        norms = [one.metrics()[f"{rule}/norm"] for one in each[:2]]
        assert torch.equal(opt.metrics()[f"{rule}/norm"], torch.stack(norms))
    if engine == "compiled":
        assert opt.engine.replays.count == 5


@at_once("rule", OF_EACH)
def test_rules_about_tensors_leave_out_what_says_so_and_have_no_norms_of_groups(rule: str) -> None:
    ps, qs, make = params(), params(), OF_EACH[rule]
    opt = Modular(apart(ps), make(), LR(0.1))
    each = Modular(qs[:3], make(), LR(0.1)), Modular(qs[3:], LR(0.1))
    for i in range(6):
        fill(ps, i)
        fill(qs, i)
        for one in (opt, *each):
            one.step()
    assert all(map(torch.equal, ps, qs))


def test_the_norm_of_a_direction_is_none_of_a_gradient() -> None:
    ps, qs = params(), params()
    opts = [Modular(apart(ps), Adam(), TrustRatio(), LR(0.1))]
    opts.append(Modular(qs, Adam(), TrustRatio(), LR(0.1)))
    for i in range(3):
        fill(ps, i)
        fill(qs, i)
        for opt in opts:
            opt.step()
    assert all(map(torch.equal, ps, qs))


def test_a_tag_of_a_parameter_is_a_norm_group_in_the_middle_of_a_group() -> None:
    ps, qs = params(), params()
    vars(ps[1])["grad_norm_group"] = "mtp"
    opt = Modular(ps, ZClip(max_norm=1.0), LR(0.1))
    groups = [{"params": [qs[0], *qs[2:]]}, {"params": qs[1:2], "norm_group": "mtp"}]
    other = Modular(groups, ZClip(max_norm=1.0), LR(0.1))
    for i in range(6):
        fill(ps, i)
        fill(qs, i)
        opt.step()
        other.step()
    assert all(map(torch.equal, ps, qs))
    assert {"ZClip/count", "ZClip/count@mtp"} <= opt.param_groups[0]["chain"].keys()


def test_guards_count_what_norm_rules_look_at_and_nan_counts_everywhere() -> None:
    for guard, skips in ((SkipLarge(50.0), False), (SkipSpike(least=2), False), (Guard(), True)):
        ps = params()
        opt = Modular(apart(ps), guard, LR(0.1))
        for i in range(4):
            fill(ps, i)
            opt.step()
        fill(ps, 3)
        assert ps[3].grad is not None
        ps[3].grad.fill_(torch.nan if skips else 1e6)
        opt.step()
        assert opt.skipped() == skips, guard
        fill(ps, 3)
        assert ps[2].grad is not None
        ps[2].grad.fill_(torch.nan if skips else 1e6)  # a norm of its own counts among all
        opt.step()
        assert opt.skipped(), guard


def test_a_key_that_changes_is_noticed_also_by_repeated_steps() -> None:
    for options in ENGINES.values():
        ps = params()
        opt = Modular([{"params": ps}], ClipNorm(0.5, dim="global"), LR(1.0), **options)
        for i in range(5):
            fill(ps, i)
            opt.step()
        for clip in (False, True, False):
            opt.param_groups[0]["clip"] = clip
            before = [p.detach().clone() for p in ps]
            fill(ps, 9)
            opt.step()
            square = sum((a - b).square().sum() for a, b in zip(before, ps, strict=True))
            assert (square.sqrt() > 0.6).item() is not clip


@at_once("rule", [*OF_ALL, *OF_EACH])
def test_a_resumed_run_goes_on_bit_for_bit(rule: str) -> None:
    make = {**OF_ALL, **OF_EACH}[rule]
    ps = params()
    opt = Modular(apart(ps), make(), Adam(), LR(0.1))
    for i in range(4):
        fill(ps, i)
        opt.step()
    qs = [Parameter(p.detach().clone()) for p in ps]
    again = Modular(apart(qs), make(), Adam(), LR(0.1))
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for i in range(4, 8):
        for made, one in ((ps, opt), (qs, again)):
            fill(made, i)
            one.step()
    assert all(map(torch.equal, ps, qs))


def test_a_checkpoint_does_not_say_what_the_program_says() -> None:
    opt, other = Modular(apart(params()), ClipNorm(1.0), LR(1.0)), params()
    plain = Modular([{"params": x["params"]} for x in apart(other)], ClipNorm(1.0), LR(1.0))
    plain.load_state_dict(opt.state_dict())
    assert not any({"clip", "norm_group"} & set(group) for group in plain.param_groups)
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[1]["norm_group"] == "head"
    assert opt.param_groups[2]["clip"] is False


def test_a_checkpoint_that_lacks_a_clip_of_a_group_that_has_one_is_refused() -> None:
    ps = params()
    opt = Modular(apart(ps), AdaGC(), Adam(), LR(0.1))
    fill(ps, 0)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    for key in [key for key in state["state"][0] if key.startswith("AdaGC/")]:
        del state["state"][0][key]
    with pytest.raises(ValueError, match="the checkpoint has no state 'AdaGC/"):
        opt.load_state_dict(state)


def test_clippers_and_attached_rules_read_the_keys_too() -> None:
    ps, qs = params(), params()
    clipper = Clipper(apart(ps), ClipNorm(0.5, dim="global"))
    opt = torch.optim.SGD(apart(qs), lr=1.0)
    attach(opt, ClipNorm(0.5, dim="global"))
    fill(ps, 0)
    fill(qs, 0)
    clipper.step()
    opt.step()
    norms = [sum(p.grad.square().sum() for p in part).sqrt() for part in (ps[:2], ps[2:3])]
    torch.testing.assert_close(torch.stack(norms), torch.full((2,), 0.5))
    assert ps[3].grad is not None
    assert ps[3].grad.norm() > 0.6
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ps, qs, strict=True))


def test_released_gradients_as_well() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 4))
    ps = list(net.parameters())
    opt = release(apart(ps), ClipNorm(0.05, dim="global"), LR(0.1), limit="last step")
    x = torch.randn(7, 5)
    grads = torch.autograd.grad(net(x).square().mean(), ps)
    net(x).square().mean().backward()
    opt.step()
    norms = [sum(g.square().sum() for g in part).sqrt() for part in (grads[:2], grads[2:3])]
    torch.testing.assert_close(opt.metrics()["ClipNorm/norm"], torch.stack(norms))
    divisors = [opt.state[p]["ClipNorm/divisor"] for p in ps[:3]]
    torch.testing.assert_close(torch.stack(divisors) * 0.05, torch.stack([norms[0], *norms]))
    assert not opt.state[ps[3]]


def test_names_of_norms_are_those_of_their_groups() -> None:
    ps = params()
    opt = Modular(apart(ps), ClipNorm(0.5, dim="global"), LR(0.1))
    with Recorder(opt) as recorder:
        for i in range(3):
            fill(ps, i)
            opt.step()
    assert recorder.units("ClipNorm/norm") == ["all others", "head"]
    assert torch.tensor(recorder.history()["ClipNorm/norm"]).shape == (3, 2)


def test_explain_tells_and_a_file_of_plain_torch_has_no_words() -> None:
    ps = params()
    opt = Modular(apart(ps), ClipNorm(0.5, dim="global"), LR(0.1))
    text = opt.explain()
    assert "group 1 has a separate norm, 'head', which replaces the global norm." in text
    assert "group 2 has clip=False, so it is neither clipped nor part of any norm." in text
    with pytest.raises(SourceError, match="group 1 has a separate norm,"):
        opt.to_source()
    vars(ps[0])["grad_norm_group"] = "mtp"
    assert "some parameters of group 0 have a separate norm, 'mtp'" in opt.explain()


@at_once("key, value", [("clip", "no"), ("clip", 0), ("norm_group", 3), ("norm_group", "a/b")])
def test_what_rules_cannot_read_is_refused(key: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"the key '{key}' of a parameter group"):
        Modular([{"params": params(), key: value}], ClipNorm(1.0), LR(1.0))


@at_once("engine", ENGINES)
def test_a_tag_that_is_set_or_removed_in_a_run_counts_from_the_next_step(engine: str) -> None:
    ps, qs = params(), params()
    opt = Modular(ps, ClipNorm(0.5, dim="global"), LR(0.1), **ENGINES[engine])
    other = Modular([{"params": qs[:1]}, {"params": qs[1:]}], ClipNorm(0.5, dim="global"), LR(0.1))
    for i in range(12):
        if i == 4:
            vars(ps[0])["grad_norm_group"] = "mtp"
            other.param_groups[0]["norm_group"] = "mtp"
        if i == 8:
            del vars(ps[0])["grad_norm_group"]
            del other.param_groups[0]["norm_group"]
        fill(ps, i)
        fill(qs, i)
        opt.step()
        other.step()
        assert opt.metrics()["ClipNorm/norm"].numel() == (2 if 4 <= i < 8 else 1)
        torch.testing.assert_close(ps, qs)


@at_once(
    "engine, tag",
    [("default", "a/b"), ("default", "a@b"), ("default", 3), ("plain", 3), ("compiled", "a/b")],
)
def test_a_tag_that_state_could_not_be_saved_under_is_refused(engine: str, tag: Any) -> None:
    ps = params()
    vars(ps[1])["grad_norm_group"] = tag
    with pytest.raises(TypeError, match=r"parameter 1 of group 0: its attribute grad_norm_group"):
        Modular(ps, ZClip(), LR(0.1), **ENGINES[engine])
    ps = params()
    opt = Modular(ps, ZClip(), LR(0.1), **ENGINES[engine])
    for i in range(4):
        fill(ps, i)
        opt.step()
    before = [p.detach().clone() for p in ps]
    vars(ps[1])["grad_norm_group"] = tag
    with pytest.raises(TypeError, match=r"parameter 1 of group 0: its attribute grad_norm_group"):
        opt.step()
    assert all(map(torch.equal, ps, before))


@at_once(
    "engine, key, value",
    [
        ("default", "clip", "no"),
        ("default", "clip", 0),
        ("default", "norm_group", 3),
        ("default", "norm_group", "a/b"),
        ("plain", "clip", 0),
        ("compiled", "clip", 0),
        ("compiled", "norm_group", 3),
    ],
)
def test_a_value_that_replaces_another_in_a_run_is_checked(
    engine: str, key: str, value: Any
) -> None:
    ps = params()
    group = {"params": ps, "clip": True, "norm_group": "head"}
    opt = Modular([group], ClipNorm(0.5, dim="global"), LR(0.1), **ENGINES[engine])
    for i in range(4):
        fill(ps, i)
        opt.step()
    opt.param_groups[0][key] = value
    with pytest.raises(TypeError, match=f"group 0: the key '{key}' of a parameter group"):
        opt.step()
    opt.param_groups[0][key] = group[key]
    opt.step()


def test_a_key_that_is_deleted_in_an_optimizer_is_gone_for_attached_rules() -> None:
    ps = params()
    opt = torch.optim.SGD(
        [{"params": ps[:2], "clip": False}, {"params": ps[2:], "norm_group": "head"}], lr=0.1
    )
    handle = attach(opt, ClipNorm(0.5, dim="global"), after=WeightEMA(0.9))
    fill(ps, 0)
    opt.step()
    assert handle.metrics()["ClipNorm/norm"].shape == ()
    del opt.param_groups[0]["clip"], opt.param_groups[1]["norm_group"]
    fill(ps, 1)
    want = torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None])
    opt.step()
    torch.testing.assert_close(handle.metrics()["ClipNorm/norm"], want)
    assert handle.after is not None
    for group in (*handle.param_groups, *handle.after.param_groups):
        assert not {"clip", "norm_group"} & group.keys()


@at_once("engine", ENGINES)
def test_a_spectral_norm_is_left_out_as_other_norms_are(engine: str) -> None:
    ps, qs = params(), params()
    matrices = [p for p in ps if p.dim() > 1], [q for q in qs if q.dim() > 1]
    groups = [{"params": matrices[0][:1]}, {"params": matrices[0][1:], "clip": False}]
    opt = Modular(groups, ClipSpectral(0.01), LR(0.1), **ENGINES[engine])
    alone = Modular(matrices[1][:1], ClipSpectral(0.01), LR(0.1), **ENGINES[engine])
    each = [alone, Modular(matrices[1][1:], LR(0.1), **ENGINES[engine])]
    for i in range(3):
        fill(ps, i)
        fill(qs, i)
        for one in (opt, *each):
            one.step()
    assert all(map(torch.equal, *matrices))


@at_once("dim", [None, 0, "layer"])
@at_once("engine", ENGINES)
def test_metrics_are_in_the_order_of_the_parameters_whatever_is_tagged(
    engine: str, dim: Any
) -> None:
    """Also if a parameter in the middle has a dtype of its own."""

    def norms(tag: bool, dtype: torch.dtype) -> dict[str, Any]:
        ps = params()
        fill(ps, 0)
        grad = ps[1].grad
        assert grad is not None
        ps[1] = Parameter(ps[1].detach().to(dtype))
        ps[1].grad = grad.to(dtype)
        if tag:
            vars(ps[0])["grad_norm_group"] = "mtp"
            vars(ps[2])["grad_norm_group"] = "mtp"
        named = [(f"{'ba'[i // 2]}.{i}", p) for i, p in enumerate(ps)]
        rule = ClipNorm(0.5, dim=dim)
        opt = Modular(named, rule, LR(0.1), **ENGINES[engine])
        with Recorder(opt) as recorder:
            opt.step()
        units = recorder.units("ClipNorm/norm")
        return {**opt.metrics(), "units": units, "history": recorder.history()["ClipNorm/norm"]}

    want = norms(False, torch.float32)
    for other in (norms(True, torch.float32), norms(False, torch.float64)):
        assert other.pop("units") == want["units"]
        torch.testing.assert_close(other.pop("history"), want["history"])
        for name, value in other.items():
            torch.testing.assert_close(value, want[name])
