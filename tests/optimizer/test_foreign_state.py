"""State dicts: what wrappers keep, what later releases add, what is damaged; and empty groups."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    Guard,
    Live,
    Modular,
    Momentum,
    TensorList,
    Transform,
    ZClip,
    attach,
)


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.ones(shape, dtype=dtype)) for shape in ((3, 2), (4,))]


def run(opt: Any, steps: int = 2) -> None:
    for i in range(steps):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.5 + i)
        opt.step()


def trained(*links: Transform, dtype: torch.dtype = torch.float32, **settings: Any) -> Modular:
    opt = Modular(params_of(dtype), *links, **settings)
    run(opt)
    return opt


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return type(value), repr(value)


def everything(opt: Modular) -> Any:
    return plain([opt.state_dict(), [p.detach() for g in opt.param_groups for p in g["params"]]])


# ---------------------------------------------------------------------- what wrappers keep


def through_a_file(state: Any, folder: Any) -> Any:
    torch.save(state, folder / "saved.pt")
    return torch.load(folder / "saved.pt", weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["file", "copy"])
def test_what_a_wrapper_keeps_is_saved_and_loaded_as_it_is(
    way: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    opt = trained(ClipNorm(1.0), Adam(), LR(0.1), dtype=dtype)
    for p in opt.param_groups[0]["params"]:
        opt.state[p]["lookahead_slow_buff"] = p.detach().double()
        opt.state[p]["step"] = torch.tensor(7.0)
        opt.state[p]["note"] = {"text": "abc", "rows": [torch.ones(2, dtype=torch.float64), 3]}
        opt.state[p]["bad"] = float("nan")
    opt.state["trac"] = {"s": torch.tensor([1.0, 2.0]), "iter": 3}
    opt.param_groups[0]["chain"]["mine"] = 5
    saved = opt.state_dict()
    saved = through_a_file(saved, tmp_path) if way == "file" else copy.deepcopy(saved)
    other = Modular(params_of(dtype), ClipNorm(1.0), Adam(), LR(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    assert plain(other.state_dict()) == plain(opt.state_dict())
    for one in (opt, other):
        run(one, 1)
    assert plain(other.state_dict()) == plain(opt.state_dict())


def test_a_copy_has_what_a_wrapper_keeps() -> None:
    opt = trained(Adam(), LR(0.1))
    for p in opt.param_groups[0]["params"]:
        opt.state[p]["slow_buffer"] = p.detach().clone()
    opt.state["trac"] = {"s": torch.tensor(1.0)}
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert plain(other.state_dict()) == plain(opt.state_dict())
        run(other, 1)


def test_a_wrapper_may_be_first() -> None:
    opt = Modular(params_of(), Adam(), LR(0.1))
    for p in opt.param_groups[0]["params"]:
        opt.state[p]["slow_buffer"] = p.detach().clone()
    other = Modular(params_of(), Adam(), LR(0.1))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(other)
    assert {"slow_buffer", "Adam/step"} <= other.state[other.param_groups[0]["params"][0]].keys()


@pytest.mark.parametrize("key", ["Adam/exp_max", "LR/x", "Lion/exp_avg"])
@pytest.mark.parametrize("where", ["parameter", "group"])
def test_a_key_with_a_path_that_no_link_makes_is_refused(key: str, where: str) -> None:
    opt = trained(Adam(), LR(0.1))
    saved = copy.deepcopy(opt.state_dict())
    place = saved["state"][0] if where == "parameter" else saved["param_groups"][0]["chain"]
    place[key] = torch.ones(1)
    refused(opt, saved, key)


def refused(opt: Modular, saved: Any, *words: str) -> None:
    """Loading raises a sentence, and nothing has changed."""
    before = everything(opt)
    with pytest.raises(ValueError) as caught:
        opt.load_state_dict(saved)
    assert all([word in str(caught.value) for word in words]), str(caught.value)
    assert everything(opt) == before


# ---------------------------------------------------------------------- arguments that are added


class Turn(Transform):
    """A rule as it was."""

    angle: Live[float] = 1.0
    kind: str = "left"

    def update(self, u: TensorList, state: Any, group: Any) -> TensorList:
        return u.mul(group["angle"])


class Later(Turn):
    """The same with arguments that a later release gave it."""

    speed: Live[float] = 2.0
    smooth: bool = False


Later.__name__ = "Turn"


def test_a_checkpoint_outlives_new_arguments_at_their_defaults() -> None:
    old = trained(Turn(kind="right"), LR(0.1))
    groups = [{"params": params_of(), "speed": 3.0}]
    for opt, speed in (
        (Modular(params_of(), Later(kind="right"), LR(0.1)), 2.0),
        (Modular(groups, Later(kind="right"), LR(0.1)), 3.0),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.load_state_dict(copy.deepcopy(old.state_dict()))
        assert (opt.param_groups[0]["lr"], opt.param_groups[0]["speed"]) == (0.1, speed)
        run(opt, 1)


@pytest.mark.parametrize("changed", [{"kind": "left"}, {"kind": "right", "smooth": True}])
def test_other_fixed_arguments_still_warn(changed: dict[str, Any]) -> None:
    opt = Modular(params_of(), Later(**changed), LR(0.1))
    with pytest.warns(UserWarning, match="with different arguments of the transforms"):
        opt.load_state_dict(trained(Turn(kind="right"), LR(0.1)).state_dict())


def test_a_live_value_that_a_checkpoint_lacks_is_the_chains_own() -> None:
    saved = copy.deepcopy(trained(Adam((0.5, 0.6)), LR(0.1)).state_dict())
    del saved["param_groups"][0]["betas"]
    opt = Modular(params_of(), Adam((0.7, 0.8)), LR(0.1))
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["betas"] == (0.7, 0.8)
    run(opt, 1)


# ---------------------------------------------------------------------- damage

COUNTERS: dict[str, tuple[Callable[[], Modular], Callable[[Any], Any], str]] = {
    "Adam": (lambda: trained(Adam(), LR(0.1)), lambda s: s["state"][1], "Adam/step"),
    "ZClip": (lambda: trained(ZClip(dim=None), LR(0.1)), lambda s: s["state"][1], "ZClip/count"),
    "Accumulate": (
        lambda: trained(Accumulate(4), Momentum(), LR(0.1)),
        lambda s: s["param_groups"][0]["chain"],
        "Accumulate/step",
    ),
    "begun": (
        lambda: trained(Accumulate(4), Momentum(), LR(0.1)),
        lambda s: s["state"][0],
        "Accumulate/begun",
    ),
    "Guard": (
        lambda: trained(Guard(), Momentum(), LR(0.1)),
        lambda s: s["param_groups"][0]["chain"],
        "Guard/skipped",
    ),
    "global": (
        lambda: trained(ZClip(dim="global"), LR(0.1)),
        lambda s: s["param_groups"][0]["chain"],
        "ZClip/count",
    ),
    "rounding": (
        lambda: trained(LR(0.1), dtype=torch.bfloat16, rounding="stochastic"),
        lambda s: s["param_groups"][0]["chain"],
        "rounding/step",
    ),
}


@at_once("bad", [-1, 1.5, float("nan"), float("inf"), "3", None, [1], 10**400, torch.tensor(-1.0)])
@pytest.mark.parametrize("which", COUNTERS)
def test_a_damaged_counter_is_a_sentence_and_changes_nothing(which: str, bad: Any) -> None:
    make, place, key = COUNTERS[which]
    opt = make()
    saved = copy.deepcopy(opt.state_dict())
    assert key in place(saved)
    place(saved)[key] = bad
    refused(opt, saved, key)


FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "state is a list": (lambda s: s.update(state=[1]), "'state' of the checkpoint must be a dict"),
    "state is None": (lambda s: s.update(state=None), "'state' of the checkpoint must be a dict"),
    "groups are a dict": (lambda s: s.update(param_groups={}), "'param_groups' of the checkpoint"),
    "groups are a number": (lambda s: s.update(param_groups=3), "'param_groups' of the checkpoint"),
    "a group is a list": (lambda s: s.update(param_groups=[[0, 1]]), "group 0 of the checkpoint"),
    "params are a number": (lambda s: s["param_groups"][0].update(params=2), "'params' of group 0"),
    "params are lists": (lambda s: s["param_groups"][0].update(params=[[0], [1]]), "integers"),
    "a parameter twice": (lambda s: s["param_groups"][0].update(params=[0, 0]), "twice"),
    "no params": (lambda s: s["param_groups"][0].pop("params"), "groups of sizes [0]"),
    "a key is a number": (lambda s: s["param_groups"][0].update({3: 1}), "must be strings"),
    "the chain is a list": (lambda s: s["param_groups"][0].update(chain=[1]), "has no key 'chain'"),
    "the mark is a text": (
        lambda s: s["param_groups"][0]["chain"].update(fingerprint="x"),
        "different transforms",
    ),
    "a parameter's state is a list": (
        lambda s: s["state"].update({1: [1]}),
        "the state of parameter 1 must be a dict, got list",
    ),
    "state of no parameter": (lambda s: s["state"].update({7: {}}), "in none of its groups"),
    "a live value is a text": (lambda s: s["param_groups"][0].update(lr="x"), "LR: lr must be"),
    "state is a text": (lambda s: s["state"][0].update({"Momentum/momentum_buffer": "x"}), "'x'"),
    "a number that no tensor holds": (
        lambda s: s["state"][0].update({"ClipNormGrowth/previous": 10**400}),
        "ClipNormGrowth/previous",
    ),
}


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("rounding", ["nearest", "kahan"])
def test_a_state_dict_out_of_form_is_a_sentence_and_changes_nothing(
    how: str, rounding: str
) -> None:
    damage, sentence = FORMS[how]
    opt = trained(ClipNormGrowth(), Momentum(), LR(0.1), dtype=torch.bfloat16, rounding=rounding)
    saved = copy.deepcopy(opt.state_dict())
    damage(saved)
    refused(opt, saved, sentence)


# ---------------------------------------------------------------------- empty groups


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "links",
    [
        (ClipNorm(1.0, dim="global"), Adam(), LR(0.1)),
        (ZClip(dim="global"), ClipNormGrowth(dim="group"), LR(0.1)),
        (Guard(), Accumulate(2), Momentum(), LR(0.1)),
    ],
    ids=repr,
)
def test_an_empty_group_changes_nothing(links: tuple[Transform, ...], first: bool) -> None:
    full, more = params_of(), params_of()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": full}]
    opt, other = Modular(groups[:: 1 if first else -1], *links), Modular(more, *links)
    opt.init_state()
    for one in (opt, other):
        run(one, 3)
    again = Modular([{"params": g["params"]} for g in opt.param_groups], *links)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one in (again, other):
        run(one, 2)
    assert all(map(torch.equal, full, more))
    assert opt.metrics().keys() == other.metrics().keys()
    assert "group" in repr(opt)


def test_an_empty_group_may_be_added_and_filled_in_an_attached_optimizer() -> None:
    params = params_of()
    opt = torch.optim.SGD([{"params": []}, {"params": params[:1]}], lr=0.1)
    handle = attach(opt, ClipNorm(1.0))
    opt.add_param_group({"params": []})
    run(opt)
    opt.param_groups[0]["params"].append(params[1])
    run(opt)
    handle.load_state_dict(copy.deepcopy(handle.state_dict()))
    run(opt)
    assert not params[1].equal(torch.ones(4))


def test_an_empty_group_in_a_clipper_and_added_later() -> None:
    clipper = Clipper([{"params": []}], ZClip())
    assert clipper.step() == 0
    clipper.add_param_group({"params": params_of()})
    clipper.add_param_group({"params": []})
    run(clipper)
    assert len(copy.deepcopy(clipper.state_dict())["param_groups"]) == 3


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "error"), [("Adam/exp_avg_sq", None, KeyError), ("Adam/step", 5.0, TypeError)]
)
def test_state_that_is_missing_or_no_tensor_is_named_and_can_restart(
    key: str, value: Any, error: type[Exception], compile: bool
) -> None:
    """`del opt.state[p]` is what the message advises."""
    w = Parameter(torch.ones(3))
    opt = Modular([("weight", w)], Adam(), LR(0.1), compile=compile)
    for _ in range(3):
        w.grad = torch.ones(3)
        opt.step()
    if value is None:
        del opt.state[w][key]
    else:
        opt.state[w][key] = value
    before = w.detach().clone()
    found = rf"{key}' of parameter 0 of group 0 \(weight\) must be a tensor, got {value}"
    with pytest.raises(error, match=found):
        opt.step()
    assert torch.equal(w, before)
    del opt.state[w]
    opt.step()
    assert opt.state[w]["Adam/step"] == 1
    assert torch.allclose(w, before - 0.1)
