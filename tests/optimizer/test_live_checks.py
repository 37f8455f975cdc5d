"""Live values that change after the first step are checked as the constructor checks them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import LR, Adam, ClipNorm, Clipper, Modular, Momentum, ZClip, attach


def params_of(n: int = 2, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.ones(3, dtype=dtype)) for _ in range(n)]


def give(params: list[Parameter]) -> None:
    for p in params:
        p.grad = torch.full_like(p, 0.5)


def stepped(*links: Any, **settings: Any) -> tuple[list[Parameter], Modular]:
    """An optimizer of two groups after a step."""
    params = params_of()
    opt = Modular([{"params": [p]} for p in params], *links, **settings)
    give(params)
    opt.step()
    return params, opt


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("lr", -1.0, "group 1: LR: lr must be a finite number of at least 0, got -1.0"),
        ("lr", math.nan, "group 1: LR: lr must be a finite number of at least 0, got nan"),
        ("lr", "0.1", "group 1: LR: lr must be a finite number of at least 0, got '0.1'"),
        ("lr", None, "group 1: LR: lr must be a finite number"),
        ("lr", math.inf, "group 1: LR: lr must be a finite number of at least 0, got inf"),
        ("lr", torch.tensor(math.inf), "group 1: LR: lr must be a finite number of at least 0"),
        ("momentum", math.inf, "group 1: Momentum: momentum must be a finite number of at least 0"),
        ("max_norm", math.nan, "group 1: ClipNorm: max_norm must be a number of at least 0, got"),
        ("lr", torch.tensor(-1.0), "group 1: LR: lr must be a finite number of at least 0"),
        ("max_norm", -1.0, "group 1: ClipNorm: max_norm must be a number of at least 0, got -1.0"),
        ("momentum", -2.0, "group 1: Momentum: momentum must be"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_and_nothing_moves(
    key: str, value: Any, sentence: str, compile: bool
) -> None:
    params, opt = stepped(ClipNorm(1.0), Momentum(), LR(0.1), compile=compile)
    before = [p.detach().clone() for p in params]
    good, opt.param_groups[1][key] = opt.param_groups[1][key], value
    for _ in range(2):  # until it is mended
        with pytest.raises((TypeError, ValueError)) as caught:
            opt.step()
        assert sentence in str(caught.value)
        assert all(map(torch.equal, params, before))
    opt.param_groups[1][key] = good
    opt.step()
    assert not torch.equal(params[1], before[1])


@pytest.mark.parametrize("settings", [{"fused": False}, {}, {"compile": True}], ids=str)
@pytest.mark.parametrize("way", ["constructor", "group", "assigned", "loaded"])
def test_a_list_becomes_a_tuple_so_that_nothing_changes_it_in_place(
    way: str, settings: dict[str, Any]
) -> None:
    betas = [0.9, 0.99]
    params = params_of()
    groups: list[dict[str, Any]] = [{"params": [p]} for p in params]
    if way == "group":
        groups[1]["betas"] = betas
    opt = Modular(groups, Adam(betas if way == "constructor" else (0.9, 0.99)), LR(0.1), **settings)
    if way == "assigned":
        give(params)
        opt.step()
        opt.param_groups[1]["betas"] = betas
    if way == "loaded":
        state = opt.state_dict()
        state["param_groups"][1]["betas"] = betas
        opt.load_state_dict(state)
    give(params)
    opt.step()
    assert opt.param_groups[1]["betas"] == (0.9, 0.99)
    betas[0] = 5.0
    give(params)
    opt.step()
    assert opt.param_groups[1]["betas"] == (0.9, 0.99)
    with pytest.raises(TypeError, match="does not support item assignment"):
        opt.param_groups[1]["betas"][0] = 5.0


def test_a_list_that_changes_before_the_step_reads_it_is_checked() -> None:
    params, opt = stepped(Adam(), LR(0.1))
    before = [p.detach().clone() for p in params]
    opt.param_groups[1]["betas"] = [0.9, 0.99]
    opt.param_groups[1]["betas"][0] = 5.0
    give(params)
    with pytest.raises(
        ValueError, match="group 1: Adam: betas must be 2 numbers, each of at least 0"
    ):
        opt.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("kind", ["clipper", "handle"])
def test_clippers_and_handles_check_too(kind: str) -> None:
    params = params_of()
    opt = torch.optim.SGD(params, lr=0.1)
    clipper = Clipper(params, ClipNorm(1.0)) if kind == "clipper" else attach(opt, ClipNorm(1.0))
    for value in (1.0, -1.0):
        give(params)
        clipper.param_groups[0]["max_norm"] = value
        if value < 0:
            with pytest.raises(ValueError, match="group 0: ClipNorm: max_norm must be"):
                clipper.step()
        else:
            clipper.step()


def test_only_links_whose_values_changed_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, opt = stepped(ZClip(), Adam(), LR(0.1))
    seen: list[str] = []
    for cls in (ZClip, Adam, LR):
        check = cls.check
        monkeypatch.setattr(
            cls, "check", lambda self, check=check: (seen.append(type(self).__name__), check(self))
        )
    opt.step()
    assert seen == []
    opt.param_groups[1]["lr"] = 0.2
    opt.step()
    opt.step()
    assert seen == ["LR"]


class Unread(Tensor):
    """Stands for a tensor on a device: to read it is to wait."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    def item(self) -> Any:
        raise AssertionError("read")

    __float__ = __bool__ = tolist = item


def test_a_tensor_on_a_device_is_not_read() -> None:
    _, opt = stepped(ClipNorm(1.0), LR(0.1))
    for _ in range(2):
        opt.param_groups[0]["lr"] = torch.tensor(-1.0).as_subclass(Unread)
        opt._begin()
        opt._begin()


def numpy_numbers() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    return [numpy.float32(0.5), numpy.float64(0.5), numpy.float16(0.5)]


def test_numpy_numbers_are_numbers_everywhere() -> None:
    numpy = pytest.importorskip("numpy")
    for half in numpy_numbers():
        chain = ClipNorm(half, ord=numpy.int64(1), dim=numpy.int64(0)), Adam((half, half)), LR(half)
        params, opt = stepped(*chain)
        theirs, plain = stepped(ClipNorm(0.5, ord=1, dim=0), Adam((0.5, 0.5)), LR(0.5))
        for value in (half, numpy.int32(1)):
            for some, one, x in ((params, opt, value), (theirs, plain, value.item())):
                one.param_groups[0]["lr"] = x
                one.param_groups[1]["betas"] = (x * 0, x * 0)
                give(some)
                one.step()
        assert all(map(torch.equal, params, theirs))
        assert repr(opt) == repr(plain)
        held = [opt.param_groups[0]["lr"], *opt.param_groups[1]["betas"]]
        assert {type(x) for x in held} <= {int, float}


def test_a_group_given_with_numpy_numbers_is_saved_with_pythons(tmp_path: Any) -> None:
    (half, *_) = numpy_numbers()
    opt = Modular([{"params": params_of(), "lr": half}], Adam(), LR(half))
    torch.save(opt.state_dict(), tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert loaded["param_groups"][0]["lr"] == 0.5


def test_what_is_no_number_is_still_refused() -> None:
    numpy = pytest.importorskip("numpy")
    for bad in (numpy.bool_(True), numpy.ones(2), "1", None, 1j, numpy.float32("nan")):
        with pytest.raises((TypeError, ValueError), match="ClipNorm: max_norm must be"):
            ClipNorm(bad)


def test_a_model_that_becomes_double_half_way_is_a_sentence_and_nothing_moves() -> None:
    params, opt = stepped(Adam(), LR(0.1))
    for p in params:
        p.data, p.grad = p.data.double(), None
    give(params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        TypeError, match=r"parameter 0 of group 0 has dtype torch.float64, .*clear\(\)"
    ):
        opt.step()
    assert all(map(torch.equal, params, before))
    opt.state.clear()
    opt.step()
    assert opt.state[params[0]]["Adam/exp_avg"].dtype == torch.float64


@pytest.mark.parametrize(("first", "compile"), [(torch.float64, False), (torch.float32, True)])
def test_a_part_of_a_model_that_gets_another_state_dtype_raises_and_nothing_changes(
    first: torch.dtype, compile: bool
) -> None:
    params = [(f"p{i}", p) for i, p in enumerate(params_of(3, first))]
    opt = Modular(params, ZClip(), Adam(), LR(0.1), compile=compile)
    for _ in range(3):
        give(opt.param_groups[0]["params"])
        opt.step()
    p = opt.param_groups[0]["params"][2]
    p.data = p.data.to(torch.float32 if first == torch.float64 else torch.float64)
    give([p])
    before = copy.deepcopy(opt.state_dict())
    for _ in range(2):
        with pytest.raises(TypeError, match=r"parameter 2 of group 0 \(p2\) has dtype torch.float"):
            opt.step()
    after = opt.state_dict()
    assert str(before) == str(after)
    opt.state[p].clear()
    opt.step()
    assert opt.state[p]["Adam/exp_avg"].dtype == p.dtype


def test_a_model_that_becomes_bfloat16_half_way_steps_on() -> None:
    params, opt = stepped(Adam(), LR(0.1))
    for p in params:
        p.data, p.grad = p.data.bfloat16(), None
    give(params)
    opt.step()
    assert opt.state[params[0]]["Adam/exp_avg"].dtype == torch.float32
