"""Subclasses of built-in rules: every engine runs the methods that they define."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import moved
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    AdaptiveClip,
    Chain,
    ClipNorm,
    Group,
    Identity,
    Masked,
    Modular,
    NormRule,
    Orthogonalize,
    Project,
    Scale,
    Shampoo,
    Sign,
    Standardize,
    State,
    TensorList,
    TensorwiseTransform,
    Trace,
    Transform,
    Units,
    ZStat,
    simulate,
)
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.decision import Decision

ENGINES = [{}, {"fused": False}, {"compile": True}]


def subclass(*bases: type, **methods: Any) -> Any:
    """Return a class of the user with these methods or attributes."""
    return type("Mine", bases, {"__module__": __name__, **methods})


def half(self: Any, u: TensorList, state: State, group: Group) -> TensorList:
    return u.mul_(0.5)


# ------------------------------------------------------------------ methods that no step calls


@pytest.mark.parametrize(
    ("base", "method", "advised"),
    [
        (ClipNorm, "update", "limit"),
        (Identity, "update", "step"),
        (Chain, "update", "step"),
        (Masked, "update", "step"),
        (Standardize, "limit", "step"),
        (Standardize, "decide", "step"),
        (Orthogonalize, "update_tensor", "update"),
        (Project, "update_tensor", "update"),
    ],
)
def test_a_method_that_no_step_would_call_is_an_error(base, method, advised):
    known = set(Transform.registry)
    message = f"Mine: the steps of {base.__name__} do not call {method}: define {advised} instead"
    with pytest.raises(TypeError, match=message):
        subclass(base, **{method: half})
    assert set(Transform.registry) == known


def test_the_order_of_base_classes_does_not_matter():
    class Half(Transform):
        update = half

    for bases in ((Half, ClipNorm), (ClipNorm, Half), (Half, Identity)):
        with pytest.raises(TypeError, match="do not call update"):
            subclass(*bases)


def test_a_step_of_the_user_may_call_any_method():
    class Logged(Transform):
        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            return super().step(buckets)

    class LoggedRule(NormRule):
        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            return super().step(buckets)

    class Applied(Identity):
        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            for bucket in buckets:
                bucket.apply(self)
            return buckets

    expected = moved(Scale(0.5), LR(0.1))
    torch.testing.assert_close(moved(subclass(Logged, update=half)(), LR(0.1)), expected)
    torch.testing.assert_close(moved(subclass(Applied, update=half)(), LR(0.1)), expected)
    limit = subclass(LoggedRule, limit=lambda self, norm, state, group: norm / 2)
    torch.testing.assert_close(moved(limit(), LR(0.1)), expected)


def test_methods_that_need_another_method_say_so():
    method = lambda self, *arguments: {}  # noqa: E731
    with pytest.raises(TypeError, match="Mine must not define observe without init_unit"):
        subclass(ClipNorm, observe=method)(1.0)
    with pytest.raises(TypeError, match="Mine must not define both update and init_matrix"):
        subclass(Shampoo, update=half)()
    for name in ("observe_matrix", "refresh_matrix"):
        with pytest.raises(TypeError, match=f"Mine must not define {name} without init_matrix"):
            subclass(TensorwiseTransform, **{name: method})()


# ------------------------------------------------------------------ declarations about methods


@pytest.mark.parametrize(
    ("base", "declared"),
    [
        (LR, {"affine": lambda self, group: (2.0, 0.0)}),
        (Adam, {"fused": lambda self, group: None}),
        (EMA, {"affine": lambda self, group: (2.0, 0.0)}),
        (Orthogonalize, {"per_entry": True}),
    ],
)
def test_a_class_may_not_declare_what_the_update_of_its_base_class_does(base, declared):
    name = next(iter(declared))
    with pytest.raises(TypeError, match=f"Mine: {name} describes the method update"):
        subclass(base, **declared)


def test_a_class_may_withdraw_what_its_base_class_declares():
    plain = subclass(Adam, fused=Transform.fused, per_entry=False)
    torch.testing.assert_close(moved(plain(), LR(0.1)), moved(Adam(), LR(0.1)))


@pytest.mark.parametrize("options", ENGINES)
def test_every_engine_explains_state_of_the_base_class_that_is_missing(options):
    def init(self: Any, param: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}

    with pytest.raises(KeyError, match=r"'step' is neither in state.* of the base class too"):
        moved(subclass(Adam, init=init)(), LR(0.1), **options)
    ahead = subclass(Adam, init=lambda self, param: {**Adam.init(self, param), "step": 1.0})
    torch.testing.assert_close(moved(ahead(), **options), moved(ahead(), fused=False))


class HalfTensor(TensorwiseTransform):
    """u ← u / 2"""

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return u.mul_(0.5)

    def affine(self, group: Group) -> tuple[float, float]:
        return 0.5, 0.0


class Quarter(HalfTensor):
    """u ← u / 4"""

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return u.mul_(0.25)


@pytest.mark.parametrize("options", ENGINES)
def test_another_update_tensor_drops_the_declarations_of_the_base_class(options):
    torch.testing.assert_close(moved(HalfTensor(), **options), moved(Scale(0.5)))
    torch.testing.assert_close(moved(Quarter(), **options), moved(Scale(0.25)))


def test_a_class_with_another_step_processes_the_whole_model_unless_it_says_otherwise():
    def step(self: Any, buckets: list[Bucket]) -> list[Bucket]:
        return buckets

    assert Identity().reach == "tensor"
    assert subclass(Identity, step=step)().reach == "model"
    assert subclass(Identity, step=step, reach="tensor")().reach == "tensor"
    assert subclass(ClipNorm, step=step)(1.0).reach == "tensor"


@pytest.mark.parametrize("options", ENGINES)
def test_every_engine_follows_the_attributes_of_a_subclass(options):
    refusing = subclass(LR, complex="refuse")
    w = Parameter(torch.ones(2, dtype=torch.complex64))
    w.grad = torch.ones_like(w)
    with pytest.raises(TypeError, match="Mine does not support complex parameters"):
        Modular([w], refusing(0.1), **options).step()
    clipping = subclass(Scale, clips=True)
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "clip": False}]
    opt = Modular(groups, ClipNorm(9.0), clipping(0.5), LR(1.0), **options)
    for p in params:
        p.grad = torch.ones(2)
    opt.step()
    assert [p.tolist() for p in params] == [[0.5, 0.5], [0.0, 0.0]]


# ------------------------------------------------------------------ fields


def test_a_field_that_the_base_class_reads_from_the_group_must_stay_live():
    with pytest.raises(TypeError, match=r'Fixed: update reads group\["beta"\]'):

        class Fixed(EMA):
            beta: float = 0.5

    class Own(EMA):
        beta: float = 0.5

        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            return state["ema"].lerp_(u, 1 - self.beta)

    torch.testing.assert_close(moved(Own(), LR(0.1)), moved(EMA(0.5), LR(0.1)))


def test_two_base_classes_give_their_fields_as_they_have_read_them():
    class Both(Sign, EMA):
        """The module of this class does not import the names in the annotations of EMA."""

        update = EMA.update
        init = EMA.init

    assert Both.live == ("beta",)
    with pytest.raises(ValueError, match="Both: beta must be a number of at least 0 and below 1"):
        Both(beta=1.0)
    torch.testing.assert_close(moved(Both(beta=0.5), LR(0.1)), moved(EMA(0.5), LR(0.1)))


def test_a_field_may_be_computed_from_other_fields():
    rule = HalfLife(half_life=2.0)
    assert rule.beta == 0.5**0.5
    assert Chain.from_config(Chain(rule).to_config()) == Chain(rule)
    torch.testing.assert_close(moved(rule, LR(0.1)), moved(EMA(0.5**0.5), LR(0.1)))


class HalfLife(EMA):
    """EMA, with the number of steps in which a gradient loses half of its weight"""

    half_life: float = 1.0

    def __post_init__(self) -> None:
        self.beta = 0.5 ** (1 / self.half_life)


class BySteps(EMA):
    """EMA, with a constructor of its own"""

    def __init__(self, steps: float) -> None:
        super().__init__(beta=1 - 1 / steps)


class Quick(EMA):
    """EMA, with another default in a constructor of its own"""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"beta": 0.5, **arguments})


def test_a_config_needs_a_constructor_that_accepts_its_arguments():
    with pytest.raises(TypeError, match="the __init__ of BySteps does not accept 'beta'"):
        Chain(BySteps(4.0)).to_config()
    for rule in (Quick(), Quick(beta=0.25)):
        assert Chain.from_config(Chain(rule).to_config()) == Chain(rule)


# ------------------------------------------------------------------ rules inside other code


class SoftClipping(ClipNorm):
    """Divides by the square root of the divisor"""

    def apply(self, units: Units, decision: Decision) -> None:
        units.scale([divisor.sqrt() for divisor in decision.divisors])


def test_code_that_only_calls_limit_refuses_a_rule_with_another_step():
    with pytest.raises(ValueError, match="simulate calls only the methods limit and observe"):
        simulate(Trace(torch.ones(3, 1)), SoftClipping(1.0))
    with pytest.raises(ValueError, match="warmup must be None or a transform that clips"):
        AdaptiveClip(ZStat(), warmup=SoftClipping(1.0))


class SkipsLarge(Transform):
    """A guard of the user that ends the step"""

    place = "first"
    leaves = "gradient"
    drops = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        largest = max(float(t.abs().max()) for bucket in buckets for t in bucket.u)
        return buckets if largest < 10 else []


def test_explain_describes_a_chain_with_a_guard_of_the_user():
    opt = Modular([Parameter(torch.ones(2))], SkipsLarge(), LR(0.1))
    assert "SkipsLarge" in opt.explain()


class Counted(Modular):
    """An optimizer that counts its steps"""

    def __init__(self, params: Any) -> None:
        super().__init__(params, Adam(), LR(0.1))
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "steps": self.steps}


def test_a_copy_keeps_the_attributes_that_getstate_returns():
    w = Parameter(torch.ones(2))
    opt = Counted([w])
    w.grad = torch.ones(2)
    opt.step()
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        other.step()
        assert (opt.steps, other.steps) == (1, 2)
