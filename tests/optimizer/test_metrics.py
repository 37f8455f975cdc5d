"""What the links measured: names, values, and what it costs to have them."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import gradients, parameters, set_grads
from tests.table import GOOD, Case, over
from torchzero_clip import (
    AGC,
    CAME,
    LR,
    AdaClip,
    AdaGC,
    Adam,
    AdaptiveClip,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Graft,
    Guard,
    Hyperball,
    Masked,
    MaxNorm,
    Modular,
    Normalize,
    NormRule,
    Partition,
    Recorder,
    SoftClip,
    StableAdam,
    Standardize,
    Steepest,
    TrustRatio,
    Watch,
    When,
    ZClip,
    ZStat,
    attach,
    to_floats,
)

inf = math.inf
KINDS = ("norm", "limit", "factor", "clipped")


def four(path: str) -> set[str]:
    return {f"{path}/{kind}" for kind in KINDS}


def two_groups(*links: Any, **second: Any) -> tuple[list[Parameter], Modular]:
    """Parameters of norm 5 and 13 in the first group, 10 in the second."""
    values = [[3.0, 4.0], [5.0, 12.0], [6.0, 8.0]]
    params = [Parameter(torch.zeros(2)) for _ in values]
    for p, value in zip(params, values, strict=True):
        p.grad = torch.tensor(value)
    named = [(f"{'ab'[i // 2]}.p{i}", p) for i, p in enumerate(params)]
    return params, Modular([{"params": named[:2]}, {"params": named[2:], **second}], *links)


# ---------------------------------------------------------------------- names


def test_every_norm_rule_reports_four_things_under_its_name():
    _, opt = two_groups(ClipNorm(1.0), ClipNorm(2.0), ClipNorm(3.0, name="last"), Adam(), LR(0.1))
    opt.step()
    assert opt.metrics().keys() == four("ClipNorm") | four("ClipNorm_2") | four("last")


GUARD = {"Guard/skipped", "Guard/consecutive", "Guard/why"}


def test_links_inside_others_report_under_their_path():
    inner = Chain(ClipNorm(1.0), ZClip(name="z"))
    links = [
        Guard(),
        Masked(inner, lambda n, p: n == "a.p0"),
        Partition({"a": Normalize(), "b": SoftClip(1.0)}, lambda n, p: n[0]),
        When(lambda step: True, TrustRatio()),
    ]
    _, opt = two_groups(*links)
    opt.step()
    paths = ["Masked/ClipNorm", "Masked/z", "Partition/a", "Partition/b", "When/TrustRatio"]
    assert opt.metrics().keys() == set().union(GUARD, *map(four, paths))


def test_links_that_are_no_norm_rules_report_nothing():
    _, opt = two_groups(ClipValue(1.0), Adam(), LR(0.1))
    opt.step()
    assert opt.metrics() == {}


@pytest.mark.parametrize("dim", [None, "global"])
def test_there_are_no_metrics_before_the_first_step_and_after_a_step_without_gradients(dim):
    _, opt = two_groups(ClipNorm(1.0, dim=dim))
    assert opt.metrics() == {}
    opt.step()
    assert opt.metrics().keys() == four("ClipNorm")
    opt.zero_grad()
    opt.step()
    assert opt.metrics() == {}


def test_a_link_that_did_not_run_in_the_last_step_reports_nothing():
    _, opt = two_groups(When(lambda step: step == 1, ClipNorm(1.0)))
    opt.step()
    assert opt.metrics().keys() == four("When/ClipNorm")
    opt.step()
    assert opt.metrics() == {}


# ---------------------------------------------------------------------- values

SCOPES = {
    None: ([5, 13, 10], [0, 0, 1]),
    "layer": ([math.hypot(5, 13), 10], [0, 1]),
    "group": ([math.hypot(5, 13), 10], [0, 1]),
    "global": ([math.hypot(5, 13, 10)], [0]),
}


@pytest.mark.parametrize("dim", SCOPES)
def test_values_are_those_of_the_units(dim):
    norms, _ = SCOPES[dim]
    _, opt = two_groups(ClipNorm(8.0, dim=dim))
    opt.step()
    got = to_floats(opt.metrics())
    got = {name: value if isinstance(value, list) else [value] for name, value in got.items()}
    count = 2 if dim == "global" else len(norms)  # a limit and a factor for each group
    assert got["ClipNorm/norm"] == pytest.approx(norms)
    assert got["ClipNorm/limit"] == [8.0] * count
    factors = [min(1, 8 / n) for n in norms]
    assert got["ClipNorm/factor"] == pytest.approx(factors * (count // len(norms)))
    assert got["ClipNorm/clipped"] == [f < 1 for f in factors] * (count // len(norms))


@pytest.mark.parametrize("dim", [None, "group", "global"])
def test_each_group_reports_its_own_limit(dim):
    _, opt = two_groups(ClipNorm(8.0, dim=dim), max_norm=inf)
    opt.step()
    got = to_floats(opt.metrics())
    assert got["ClipNorm/limit"] == ([8, 8, inf] if dim is None else [8, inf])
    assert got["ClipNorm/clipped"][-1] == 0.0
    assert got["ClipNorm/factor"][-1] == 1.0


def test_values_are_those_of_the_last_step():
    p = Parameter(torch.zeros(1))
    opt = Modular([p], ClipNormGrowth())
    rows = []
    for norm in (1.0, 10.0, 0.0, 10.0):
        p.grad = torch.tensor([norm])
        opt.step()
        got = to_floats(opt.metrics())
        rows.append(tuple(round(got[f"ClipNormGrowth/{kind}"], 6) for kind in KINDS))
    assert rows == [
        (1, inf, 1, 0),
        (10, 1.5, 0.15, 1),
        (0, 2.25, 1, 0),
        (10, 1.125, 0.1125, 1),
    ]


SHAPING = (
    CAME,
    AdaClip,
    Centralize,
    Graft,
    Hyperball,
    MaxNorm,
    StableAdam,
    Standardize,
    Steepest,
    Watch,
)  # they do more than a factor says
NORM_RULES = [
    case
    for case in GOOD
    if isinstance(case.make(), NormRule) and not isinstance(case.make(), SHAPING)
]


@over(NORM_RULES)
def test_the_factor_is_what_every_tensor_was_scaled_by(case: Case):
    params = parameters(case.shapes)
    opt = Modular(params.items(), case.make())
    for i in range(4):
        grads = gradients(case.shapes, i, scale=i + 1)
        before = {n: p.detach().double() for n, p in params.items()}
        set_grads(params, grads)
        opt.step()
        (norm, factor, clipped) = (
            opt.metrics()[f"{case.cls.__name__}/{kind}"] for kind in ("norm", "factor", "clipped")
        )
        assert norm.shape == factor.shape == clipped.shape
        assert clipped.equal(factor < 1)
        if not (case.make().scope is None or isinstance(case.make().scope, str)):
            continue  # slices have a factor each
        moved = {n: before[n] - p.detach().double() for n, p in params.items()}
        seen = {round((moved[n].norm() / g.double().norm()).item(), 3) for n, g in grads.items()}
        known = {round(f, 3) for f in factor.reshape(-1).tolist()}
        assert all(min(abs(s - k) for k in known) <= 2e-3 * max(1, s) for s in seen)


def test_agc_reports_every_unit():
    p = Parameter(torch.ones(3, 4))
    p.grad = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))[:3]
    opt = Modular([p], AGC(0.5))
    opt.step()
    got = to_floats(opt.metrics())
    assert got["AGC/norm"] == [1, 2, 3]
    assert got["AGC/limit"] == [1, 1, 1]
    assert got["AGC/clipped"] == [0, 1, 1]


def test_a_norm_is_measured_before_the_link_and_after_those_before_it():
    p = Parameter(torch.zeros(1))
    p.grad = torch.tensor([10.0])
    opt = Modular([p], ClipNorm(4.0), ClipNorm(2.0))
    opt.step()
    got = to_floats(opt.metrics())
    assert (got["ClipNorm/norm"], got["ClipNorm_2/norm"]) == (10, 4)


# ---------------------------------------------------------------------- tensors and host reads


class Operators(TorchDispatchMode):
    """Counts operators, and how often a value was read by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.reads = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dim", SCOPES)
def test_metrics_are_tensors_of_one_entry_a_unit_or_without_dims_for_one(dim):
    _, opt = two_groups(ClipNorm(8.0, dim=dim))
    opt.step()
    for name, value in opt.metrics().items():
        assert isinstance(value, Tensor)
        assert value.dim() <= 1
        assert value.dtype == (torch.bool if name.endswith("clipped") else torch.float32)
    count = len(SCOPES[dim][0])
    assert opt.metrics()["ClipNorm/norm"].shape == (() if count == 1 else (count,))


def test_metrics_stay_on_the_device_without_a_read():
    p = Parameter(torch.empty(3, device="meta"))
    opt = Modular([p], ClipNorm(1.0), ZClip(), AdaGC(), LR(0.1))
    p.grad = torch.empty_like(p)
    opt.step()
    metrics = opt.metrics()
    assert len(metrics) == 12
    assert {value.device.type for value in metrics.values()} == {"meta"}


def test_metrics_carry_no_graph():
    _, opt = two_groups(ClipNorm(1.0))
    opt.step()
    assert not any(value.requires_grad for value in opt.metrics().values())


@pytest.mark.parametrize("dim", SCOPES)
def test_all_metrics_come_to_the_host_in_one_transfer(dim):
    _, opt = two_groups(ClipNorm(8.0, dim=dim), AdaptiveClip(ZStat(), dim=dim, warmup=None))
    opt.step()
    metrics = opt.metrics()
    seen: list[int] = []
    original = Tensor.tolist

    def tolist(self: Tensor) -> Any:
        seen.append(self.numel())
        return original(self)

    with pytest.MonkeyPatch.context() as patch, Operators() as count:
        patch.setattr(Tensor, "tolist", tolist)
        for name in ("item", "__float__", "__bool__", "__int__", "numpy", "cpu"):
            patch.setattr(Tensor, name, None)
        floats = to_floats(metrics)
    assert seen == [sum(value.numel() for value in metrics.values())]
    assert count.reads <= seen[0]  # on CPU torch reads a list entry by entry
    for name, value in metrics.items():
        assert floats[name] == value.tolist()


def test_numbers_and_tensors_of_every_dtype_become_floats():
    given = {
        "a": 3,
        "b": torch.tensor(True),
        "c": torch.tensor([1.5, inf]),
        "d": torch.tensor(0.1, dtype=torch.float64),
        "e": torch.zeros(0),
        "f": torch.tensor([2]),
    }
    got = to_floats(given)
    assert got == {"a": 3.0, "b": 1.0, "c": [1.5, inf], "d": 0.1, "e": [], "f": [2.0]}
    assert list(got) == list(given)
    assert type(got["a"]) is type(got["b"]) is float
    assert to_floats({}) == {}


def test_one_number_for_each_list_is_what_a_recorder_reports():
    """The largest norm, the smallest limit, and the mean of all else, of NaN a NaN."""
    rows = []
    _, opt = two_groups(
        Guard(), ClipNorm(8.0), ClipNorm(1.0, dim="global"), **{"ClipNorm/max_norm": 4.0}
    )
    recorder = Recorder(opt, callback=rows.append, every=1)
    opt.step()
    recorder.remove()
    single = to_floats(opt.metrics(), single=True)
    assert {"step": 1.0, **single} == pytest.approx(rows[0], rel=1e-6)
    assert all(type(value) is float for value in single.values())
    given = {"a/norm": torch.tensor([1.0, math.nan]), "a/limit": torch.zeros(0), "b": 3}
    assert math.isnan(to_floats(given, single=True).pop("a/norm"))
    assert [*to_floats(given, single=True)] == ["a/norm", "b"]


def test_what_is_no_dict_is_an_error():
    _, opt = two_groups(ClipNorm(8.0))
    with pytest.raises(TypeError, match=r"to_floats: metrics must be a dict, such as .*, got <"):
        to_floats(opt.metrics)


# ---------------------------------------------------------------------- cost


def test_nothing_is_computed_until_somebody_asks():
    _, opt = two_groups(ClipNorm(1.0), ZClip(), AdaGC())
    opt.step()
    counts = []
    for read in (False, True):
        with Operators() as count:
            opt.step()
            if read:
                opt.metrics()
        counts.append(count.calls)
    quiet = Operators()
    with pytest.MonkeyPatch.context() as patch, quiet:
        patch.setattr("torchzero_clip.core.norm_rule.Units.record", lambda *args: None)
        opt.step()
    assert quiet.calls == counts[0] < counts[1]


def test_asking_changes_nothing():
    runs = []
    for read in (False, True):
        params, opt = two_groups(ClipNorm(1.0), ZClip(), AdaGC(), LR(0.1))
        for _ in range(5):
            opt.step()
            if read:
                to_floats(opt.metrics())
        runs.append(params)
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


def test_memory_does_not_grow_with_the_steps():
    _, opt = two_groups(ClipNorm(1.0), ClipNormGrowth(), ZClip(), AdaGC(), Adam())

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    for _ in range(3):
        opt.step()
        opt.metrics()
    before = tensors()
    for _ in range(20):
        opt.step()
        opt.metrics()
    assert tensors() <= before  # others' garbage may go meanwhile


def test_what_a_step_measured_is_let_go_by_the_next():
    _, opt = two_groups(ClipNorm(1.0))
    opt.step()
    first = weakref.ref(opt._records["ClipNorm"][0])
    assert first() is not None
    opt.step()
    gc.collect()
    assert first() is None


def test_the_metrics_of_a_step_stay_what_they_were():
    p = Parameter(torch.zeros(1))
    opt = Modular([p], ZClip(warmup_steps=2), ClipNormGrowth())
    kept, then = [], []
    for norm in (1.0, 2.0, 3.0, 100.0):
        p.grad = torch.tensor([norm])
        opt.step()
        kept.append(opt.metrics())
        then.append(to_floats(kept[-1]))
    assert [to_floats(metrics) for metrics in kept] == then


def test_a_handle_has_the_metrics_of_its_rules():
    p = Parameter(torch.zeros(2))
    opt = torch.optim.AdamW([p])
    handle = attach(opt, Guard(), ClipNorm(1.0))
    p.grad = torch.tensor([3.0, 4.0])
    opt.step()
    got = to_floats(handle.metrics())
    assert got == {
        **dict.fromkeys(GUARD, 0),
        "ClipNorm/norm": 5,
        "ClipNorm/limit": 1,
        "ClipNorm/factor": pytest.approx(0.2),
        "ClipNorm/clipped": 1,
    }


def test_a_compiled_step_leaves_its_metrics():
    """Those of the last step, not of the one that was traced."""
    found = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        torch._dynamo.reset()
        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        opt = Modular(params, ClipNorm(1.0), ClipNormGrowth(dim="global"), LR(torch.tensor(0.1)))
        step = wrap(opt.step)
        for size in (1.0, 5.0, 2.0):
            for p in params:
                p.grad = torch.full_like(p, size)
            step()
        found.append(opt.metrics())
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_a_limit_is_what_it_was_before_the_step() -> None:
    class Follow(NormRule):
        def init_unit(self) -> dict[str, Any]:
            return {"ema": 1.0}

        def limit(self, norm: Tensor, state: Any, group: Any) -> Tensor:
            return state["ema"]

        def observe(self, norm: Tensor, clipped: Tensor, state: Any, group: Any) -> Any:
            return {"ema": state["ema"] * 0.5 + norm}

    for dtype in (torch.float32, torch.float64):
        params = [Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
        opt = Modular(params, Follow(), LR(0.1))
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        assert opt.metrics()["Follow/limit"].tolist() == [1.0, 1.0]
