"""A third engine, written from the interface alone: the contract's float32 rows hold with it.

It imports nothing of the package's own engines. What it lacks, something outside of them asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import close, gradients, parameters, same, set_grads
from tests.modules.contract import (
    test_layouts,
    test_non_finite,
    test_precision,
    test_who_takes_part,
    test_zeros,
)
from tests.modules.rows.row import with_lr
from tests.table import GOOD, Case, by_class, every
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, WeightDecay, release
from torchzero_clip.core import Group, State, TensorList, norms
from torchzero_clip.core.engine import (
    Cover,
    Ending,
    Engine,
    Formula,
    Records,
    Rule,
    Session,
    Through,
    updated,
)
from torchzero_clip.core.formats import Nearest, Stochastic
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.tensorlist import Operand
from torchzero_clip.engines import Compiled, Eager
from torchzero_clip.optimizer import chain_runner

Check = Callable[..., None]
Wide = tuple[TensorList, Sequence[Tensor], Stochastic]


class AtOnce:
    """An engine of plain lists: what is asked for is computed at once, in fresh memory."""

    fuses = False

    def __init__(self, **_: Any) -> None:
        """An engine without options."""

    def __repr__(self) -> str:
        return "AtOnce()"

    def check(self, device: torch.device) -> None:
        """Every device will do."""

    def twin(self, watch: Cover | None = None) -> AtOnce:
        return AtOnce()

    def lasting(self) -> list[Tensor]:
        return []

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Lists:
        return Lists(params, grads)

    def in_turn(self) -> AtOnce:
        return self

    def step(self, step: Any, through: Through) -> Records:
        return through(step)

    def forget(self) -> None:
        """There is nothing to forget."""

    def phase(self) -> Callable[[], None]:
        return self.forget

    def capture(self, devices: set[torch.device]) -> None:
        raise ValueError("nothing is captured")

    def says(self, besides: Sequence[str]) -> list[str]:
        return []


class Lists:
    """The session of such an engine."""

    skip = Skip()  # the step brings its own

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self.params, self.grads = TensorList(params), TensorList(grads)
        self._wide: dict[str, Wide] = {}  # until it is settled
        self._stored, self._form = self.params, None  # as they are kept

    def keep(self, form: Nearest) -> None:
        self._form = form
        if form.wide:
            wide = [form.widen(i, t, None) for i, t in enumerate(self._stored)]
            self.params = TensorList(wide)

    def adopt(self, u: TensorList) -> TensorList:
        return u

    def state(
        self, name: str, tensors: Sequence[Tensor], form: Stochastic | None = None
    ) -> TensorList:
        if name not in self._wide:
            self.skip.hold(tensors)
            if form is None:
                return TensorList(tensors, owned=True)
            wide = TensorList([form.widen(i, t, None) for i, t in enumerate(tensors)], owned=True)
            self._wide[name] = wide, tensors, form
        return self._wide[name][0]

    def settle(self, path: str) -> None:
        for name in [name for name in self._wide if name.rpartition("/")[0] == path]:
            wide, tensors, form = self._wide.pop(name)
            for i, (t, values) in enumerate(zip(tensors, wide, strict=True)):
                form.store(i, t, None, values)

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        return updated(rule, u, state, group)

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        return formula(u.borrow(), state, group)

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        factor, divisor = norms.in_two(ratio, u.dtype)
        return u.mul_(operand(factor)).div_(operand(divisor))

    def writable_grads(self) -> TensorList:
        self.skip.hold(self.grads.tensors)
        return TensorList(self.grads.tensors, owned=True)

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        if any([new is not old for new, old in zip(u, self.grads, strict=True)]):
            self.writable_grads().copy_(u)
        return flowing

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> Lists:
        lists = self._stored.tensors, self.grads.tensors
        return Lists(*[[some[i] for i in where] for some in lists])

    def branch(self) -> Lists:
        return Lists(self._stored.tensors, self.grads.tensors)

    def finish(self, u: TensorList, ending: Ending) -> bool:
        return False

    def subtract(self, u: TensorList) -> None:
        self.skip.hold(self._stored.tensors)
        if self._form is None:
            torch._foreach_sub_(self._stored.tensors, u.tensors)
            return
        if self._form.beside:
            self.skip.hold(self._form.beside)
        for i, (w, x) in enumerate(zip(self._stored, u, strict=True)):
            self._form.move(i, w, None, x, 1.0, 0.0)

    def close(self) -> None:
        for path in {name.rpartition("/")[0] for name in self._wide}:
            self.settle(path)


@pytest.fixture(autouse=True)
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers that are made meanwhile have this engine."""
    monkeypatch.setattr(chain_runner, "Eager", AtOnce)


def members(protocol: type) -> set[str]:
    """What an interface names: its methods and its attributes."""
    own = {name for name, value in vars(protocol).items() if callable(value)}
    shown = {name for name in own if not name.startswith("_")} | ({"__repr__"} & own)
    return shown | protocol.__annotations__.keys()


def test_it_has_the_members_of_the_interface_and_no_other() -> None:
    engine: Engine = AtOnce()
    session: Session = engine.open("key", [0], [torch.ones(1)], [torch.ones(1)])
    for made, protocol in ((engine, Engine), (session, Session)):
        found = {name for name in dir(made) if not name.startswith("_")}
        assert found | ({"__repr__"} & members(protocol)) == members(protocol)
    opt = Modular([torch.nn.Parameter(torch.ones(1))], LR(0.1))
    assert repr(opt.engine) == "AtOnce()"


def test_engines_say_what_they_are() -> None:
    assert [repr(Eager()), repr(Eager(fuses=False))] == ["Eager()", "Eager(fuses=False)"]
    assert repr(Compiled([])) == "Compiled()"


QUICK_CONSTRUCTIONS = {
    "ClipValue-0.5",  # elements alone
    "ClipNorm-tensor",  # norms of tensors, of slices, and of the whole model
    "ClipNorm-rows",
    "ClipNorm-global",
    "ClipNormGrowth-tensor",  # state for each norm
    "ClipNormGrowth-global",
    "Adam-default",  # averages in the shape of the parameters
    "EMA-default",
    "Prodigy-default",  # a scalar for the whole model
    "WeightDecay-0.1",  # a rule that reads the parameters
    "Masked-norm",  # some parameters, and several lists of all parameters
    "Partition-two",
    "Accumulate-2",  # steps without an update
    "Guard-zero",  # steps that are skipped
    "SkipSpike-new",
    "Orthogonalize-default",  # matrices, alone and in a basis
    "InBasis-soap",
    "ScheduleFree-default",  # averaged weights
}
"""Constructions that ask for everything that a session has. The others are slow."""


def some_quick(contract: Check) -> Check:
    """Return the contract with one quick construction for each mechanism."""

    @functools.wraps(contract)
    def test(**given: Any) -> None:
        contract(**given)

    marks = vars(contract)["pytestmark"]
    (table,) = [mark for mark in marks if mark.args[0] == "cases"]
    other_parameters = [mark for mark in marks if mark is not table]
    cases = [case for row in table.args[1] for case in row.values[0]]
    quick = [case for case in cases if str(case) in QUICK_CONSTRUCTIONS] or cases[:1]
    names = {str(case) for case in quick}
    slow = by_class([case for case in cases if str(case) not in names])
    rows = [pytest.param([case], id=str(case)) for case in quick]
    for cls, others in slow.items():
        rows.append(pytest.param(others, id=f"other {cls.__name__}", marks=pytest.mark.slow))
    new_table = pytest.mark.parametrize("cases", rows).mark
    vars(test)["pytestmark"] = [new_table, *other_parameters]
    return test


def test_every_mechanism_is_a_construction_of_the_table() -> None:
    assert {str(case) for case in GOOD} >= QUICK_CONSTRUCTIONS


test_an_empty_tensor_changes_nothing_for_the_others = some_quick(
    test_layouts.test_an_empty_tensor_changes_nothing_for_the_others
)
test_the_memory_layout_changes_nothing = some_quick(
    test_layouts.test_the_memory_layout_changes_nothing
)
test_a_guarded_rule_loses_only_the_unit_that_was_not_finite = some_quick(
    test_non_finite.test_a_guarded_rule_loses_only_the_unit_that_was_not_finite
)
test_a_non_finite_entry_stays_inside_its_unit = some_quick(
    test_non_finite.test_a_non_finite_entry_stays_inside_its_unit
)
test_a_norm_that_is_nan_gives_nan_and_an_infinite_one_zeros_and_nan = some_quick(
    test_non_finite.test_a_norm_that_is_nan_gives_nan_and_an_infinite_one_zeros_and_nan
)
test_a_rule_that_hides_what_is_not_finite_lets_nothing_of_it_through = some_quick(
    test_non_finite.test_a_rule_that_hides_what_is_not_finite_lets_nothing_of_it_through
)
test_a_rule_that_raises_names_the_parameter_and_changes_nothing = some_quick(
    test_non_finite.test_a_rule_that_raises_names_the_parameter_and_changes_nothing
)
test_after_a_non_finite_step_a_guarded_rule_is_as_if_it_had_not_been = some_quick(
    test_non_finite.test_after_a_non_finite_step_a_guarded_rule_is_as_if_it_had_not_been
)
test_extreme_values_come_out_as_in_double_precision = some_quick(
    test_precision.test_extreme_values_come_out_as_in_double_precision
)
test_a_parameter_without_a_gradient_counts_for_nobody = some_quick(
    test_who_takes_part.test_a_parameter_without_a_gradient_counts_for_nobody
)
test_no_gradients_at_all_is_a_step_that_does_nothing = some_quick(
    test_who_takes_part.test_no_gradients_at_all_is_a_step_that_does_nothing
)
test_parameters_without_a_gradient_are_untouched_and_have_no_state = some_quick(
    test_who_takes_part.test_parameters_without_a_gradient_are_untouched_and_have_no_state
)
test_a_step_with_zero_gradients_and_lr_0_changes_no_parameter = some_quick(
    test_zeros.test_a_step_with_zero_gradients_and_lr_0_changes_no_parameter
)
test_one_tensor_of_zeros_among_others_stays_zero = some_quick(
    test_zeros.test_one_tensor_of_zeros_among_others_stays_zero
)
test_zero_gradients_give_zero_or_what_the_parameters_add = some_quick(
    test_zeros.test_zero_gradients_give_zero_or_what_the_parameters_add
)


def trained(case: Case, engine: Engine, **options: Any) -> tuple[Any, Modular]:
    params = parameters(case.shapes)
    opt = Modular(params.items(), *with_lr(case.make(), 0.1), **options)
    opt.engine = engine
    for i in range(4):
        set_grads(params, gradients(case.shapes, i, scale=float(i + 1)))
        opt.step()
    return params, opt


@some_quick
@every()
def test_a_third_engine_gives_what_the_eager_one_gives(case: Case) -> None:
    (ours, opt), (theirs, other) = [
        trained(case, engine) for engine in (AtOnce(), Eager(fuses=False))
    ]
    close(ours, theirs, rtol=1e-5, atol=1e-6)
    for p, q in zip(ours.values(), theirs.values(), strict=True):
        close(dict(opt.state[p]), dict(other.state[q]), rtol=1e-5, atol=1e-6)
    close(opt.metrics(), other.metrics(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_step_that_a_guard_skips_leaves_all_as_it_was(state_dtype: str) -> None:
    params = parameters()
    opt = Modular(params.items(), Guard(), Adam(), LR(0.1), state_dtype=state_dtype)
    kept: list[Any] = []
    for spoil in (1.0, 1.0, torch.nan):
        set_grads(params, gradients(scale=spoil))
        opt.step()
        held = [t for p in params.values() for t in (p, *opt.state[p].values())]
        kept.append([t.detach().clone() for t in held])
    same(kept[1], kept[2])


def test_its_plan_and_a_released_model_need_no_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    params = list(parameters().values())
    opt = Modular(params, ClipNorm(1.0), Adam(), WeightDecay(0.1), LR(0.1))
    assert isinstance(opt.engine, AtOnce)
    assert "in addition to the state: none." in opt.explain()
    monkeypatch.setattr("torchzero_clip.releasing.released.Eager", AtOnce)
    model = torch.nn.Linear(3, 2)
    released = release(model, ClipNorm(1.0), Adam(), LR(0.1))
    model(torch.ones(1, 3)).sum().backward()
    released.step()
    assert "in addition to the state: none." in released.explain()
