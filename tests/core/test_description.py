"""What a transform is before it runs: a dataclass that is checked once, and sealed."""

import dataclasses
import math
import sys
import types
from typing import Annotated, Literal

import pytest

from tests.helpers import one, run_once
from torchzero_clip import (
    Adam,
    AdaptiveClip,
    ClipNorm,
    ClipNormGrowth,
    Live,
    Modular,
    NormRule,
    Scope,
    Share,
    TensorwiseTransform,
    Transform,
    ZStat,
)
from torchzero_clip.core import Ord
from torchzero_clip.core.formula import formula_of


def test_a_description_is_a_dataclass_in_signature_and_repr():
    class Mine(Transform):
        factor: Live[float]
        power: int = 2

    assert repr(Mine(3.0)) == "Mine(factor=3.0)"
    assert repr(Mine(3.0, 4, name="m", target="grad")) == (
        "Mine(target='grad', name='m', factor=3.0, power=4)"
    )
    assert Mine.live == ("factor",)
    with pytest.raises(TypeError, match="factor"):
        Mine()
    with pytest.raises(TypeError, match="positional"):
        Mine(3.0, 4, "grad")


@pytest.mark.parametrize(
    ("base", "name", "value", "line"),
    [
        (Adam, "betas", (0.5, 0.5), r"betas: Live\[tuple\[float, float\]\] = \(0\.5, 0\.5\)"),
        (ClipNorm, "max_norm", 2.0, r"max_norm: Live\[float\] = 2\.0"),
        (ClipNorm, "ord", "l1", "ord: str = 'l1'"),
        (ClipNorm, "target", "grad", "target: str = 'grad'"),
        (ClipNorm, "ord", property(lambda self: 1), "choose a different name for the attribute"),
    ],
)
def test_another_default_without_an_annotation_is_an_error(base, name, value, line):
    words = rf"Mine: the class attribute {name} does not change the default .*: (write )?{line}$"
    with pytest.raises(TypeError, match=words):
        type("Mine", (base,), {name: value})
    mixin = type("Mixin", (), {name: value})
    with pytest.raises(TypeError, match=words):
        type("Mine", (mixin, base), {})


def test_another_default_with_an_annotation_reaches_the_step():
    class Mine(ClipNorm):
        max_norm: Live[float] = 2.0
        ord: str = "l1"

    class Inner(Mine):
        pass

    assert run_once(Inner(), grad=4.0)[2] == [2.0]
    assert (Inner().ord, Inner().max_norm, Inner.live) == ("l1", 2.0, ("max_norm",))


def test_a_description_cannot_be_changed():
    clip = ClipNorm(1.0)
    with pytest.raises(AttributeError, match=r"ClipNorm\.max_norm.*groups\[i\]\['max_norm'\]"):
        clip.max_norm = 2.0
    with pytest.raises(AttributeError, match=r"ClipNorm\.ord.*new transform"):
        clip.ord = 1


def test_an_init_of_ones_own_is_kept_by_subclasses_too():
    class Twice(Transform):
        factor: Live[float]

        def __init__(self, half):
            self.factor = 2 * half

        def update(self, u, state, group):
            return u.mul_(group["factor"])

    class Thrice(Twice):
        extra: float = 1.5

    assert run_once(Twice(1.5))[2] == [12.0]
    thrice = Thrice(1.5)
    assert (thrice.factor, thrice.extra, thrice.target, thrice.name) == (3.0, 1.5, "update", None)
    assert run_once(Thrice(1.5))[2] == [12.0]


def test_a_check_runs_once_after_the_outermost_init_and_for_groups():
    calls = []

    class Checked(Transform):
        factor: Live[float]

        def check(self):
            super().check()
            calls.append(self.factor)
            self.require("factor", above=0)

        def update(self, u, state, group):
            return u.mul_(group["factor"])

    class Sub(Checked):
        other: float = 1.0

        def __init__(self, factor):
            super().__init__(factor)

    Sub(2.0)
    assert calls == [2.0]
    with pytest.raises(ValueError, match=r"Sub: factor must be a number above 0, got -1\.0"):
        Sub(-1.0)
    with pytest.raises(ValueError, match=r"Sub: factor must be a number above 0, got 0\.0"):
        Modular([{"params": [one()], "factor": 0.0}], Sub(1.0))


def test_annotations_that_cannot_be_evaluated_do_not_matter_where_nothing_is_live():
    class Local:
        pass

    class Mine(Transform):
        thing: "Local"
        factor: "Live[float]" = 2.0
        other: "Nowhere | None" = None  # noqa: F821

        def update(self, u, state, group):
            return u.mul_(group["factor"])

    assert Mine.live == ("factor",)
    assert run_once(Mine(Local()))[2] == [8.0]


def test_future_annotations_and_type_checking_imports_do_not_matter(monkeypatch):
    source = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Thing
import torchzero_clip as tz
from torchzero_clip import Live, Transform
class Mine(Transform):
    thing: Thing
    factor: Live[float] = 2.0
    other: tz.Live[float | None] = None
    fixed: list[Thing] | None = None
"""
    module = types.ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    exec(source, vars(module))
    assert module.Mine.live == ("factor", "other")
    assert module.Mine(1).factor == 2.0


@pytest.mark.parametrize(
    "hint",
    [
        Live[float] | None,
        "Live[float] | None",
        list[Live[float]],
        "dict[str, Live[float]]",
        Annotated[list[Live[float]], "more"],
    ],
    ids=str,
)
def test_live_inside_another_type_is_an_error_at_class_creation(hint):
    with pytest.raises(TypeError, match=r"Wrong: .*'beta'.*Live\[float \| None\]"):
        type("Wrong", (Transform,), {"__annotations__": {"beta": hint}, "__module__": __name__})


OPEN = ("ord", "dim", "inverse_dims", "min_size")


@pytest.mark.parametrize("base", [NormRule, TensorwiseTransform, ClipNorm, ZStat])
def test_a_field_may_not_have_the_name_of_anything_that_its_bases_have(base):
    """Methods, properties and what they say about themselves: it would take the place of that."""
    taken = {name for b in base.__mro__ for name in vars(b) if not name.startswith("__")}
    taken -= {*(f.name for f in dataclasses.fields(base)), *OPEN}
    assert {"live", "registry", "require", "open_fields", "_finished"} <= taken
    for name in sorted(taken):
        sentence = f"Wrong: the field '{name}' would replace an attribute of [A-Z].*: choose"
        for hint in (float, Live[float]):
            with pytest.raises(TypeError, match=sentence):
                type("Wrong", (base,), {"__annotations__": {name: hint}, name: 1.0})


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (Transform, ("complex", "inner", "drops", "place", "leaves")),
        (Transform, ("reads", "update", "init", "step", "check", "affine", "fused")),
        (NormRule, ("measure", "units", "scope", "sets_norm", "limit", "observe", "total")),
    ],
)
def test_names_that_a_field_is_likely_to_take_by_mistake(base, names):
    for name in names:
        said = f"Wrong: the field '{name}' would replace an attribute of {base.__name__}: choose"
        with pytest.raises(TypeError, match=said):
            type("Wrong", (base,), {"__annotations__": {name: float}})


@pytest.mark.parametrize(
    ("owner", "name", "hint", "default"),
    [
        (Transform, "target", Live[float], 1.0),
        (Transform, "target", float, 1.0),
        (Transform, "target", str, "other"),
        (Transform, "target", Literal["a", "b"], "a"),
        (Transform, "name", float, 1.0),
        (Transform, "name", Live[str], "x"),
        (Transform, "state_dtype", bool, True),
        (NormRule, "dim", float, 0.5),
        (NormRule, "dim", Live[int], 1),
        (NormRule, "dim", object, 0.5),
        (NormRule, "ord", bool, True),
        (NormRule, "inverse_dims", float, 0.1),
        (NormRule, "min_size", Share, 0.1),
    ],
)
def test_a_field_that_a_base_reads_may_not_get_another_meaning(owner, name, hint, default):
    words = f"Goal: the field '{name}' would replace an argument of {owner.__name__}: choose"
    for base in (NormRule, ClipNormGrowth):
        with pytest.raises(TypeError, match=words):
            type("Goal", (base,), {"__annotations__": {name: hint}, name: default})
    if hint not in (str, object):  # the annotation alone shows the other meaning
        with pytest.raises(TypeError, match=words):
            type("Goal", (NormRule,), {"__annotations__": {name: hint}})


@pytest.mark.parametrize(
    ("name", "hint", "default", "wrong"),
    [
        ("target", Literal["update", "grad"], "grad", "other"),
        ("target", Literal["grad"], "grad", "update"),
        ("target", str, "grad", "other"),
        ("name", str, "free", 1.0),
        ("state_dtype", Literal["bfloat16"] | None, "bfloat16", "float16"),
        ("dim", Scope, "global", "model"),
        ("dim", str | None, "layer", "model"),
        ("dim", object, None, "model"),
        ("ord", Ord, "linf", "l0.5"),
        ("inverse_dims", bool, False, 1),
        ("min_size", int, 2, 1.5),
    ],
)
def test_a_field_that_a_base_reads_may_get_another_default(name, hint, default, wrong):
    limit = ClipNorm.limit
    attributes = {"__annotations__": {name: hint}, name: default, "limit": limit}
    rule = type("Own", (NormRule,), attributes)
    assert getattr(rule(), name) == default
    with pytest.raises((TypeError, ValueError), match=f"Own: {name} "):
        rule(**{name: wrong})


def test_an_argument_that_a_class_may_declare_is_named_as_such():
    class Halves(NormRule):
        def limit(self, norm, state, group):
            return norm / 2

    said = r"no argument 'dim'; the arguments are \['target'.* To add 'dim', declare"
    with pytest.raises(TypeError, match=said):
        Halves(dim="global")


def test_a_base_may_open_an_attribute_and_fields_may_be_declared_again():
    class OpensSize(NormRule):
        size = 3.0
        open_fields = ("size",)

    class SetsSize(OpensSize):
        ord = 1
        size = 4.0

    class DeclaresSize(SetsSize):
        size: Live[float] = 5.0
        ord: float = 2
        name: str | None = dataclasses.field(default="free", kw_only=True)

    class DeclaresSizeAgain(DeclaresSize):
        size: Live[float | None] = None

    assert (
        OpensSize().size,
        SetsSize().size,
        DeclaresSize().size,
        DeclaresSizeAgain(size=1.0).size,
    ) == (3, 4, 5, 1)
    assert (DeclaresSize().name, DeclaresSize().ord, DeclaresSize.live, DeclaresSizeAgain.live) == (
        "free",
        2,
        ("size",),
        ("size",),
    )
    with pytest.raises(TypeError, match="Wrong: the field 'size' would replace an attribute"):
        type("Wrong", (type("M", (), {"size": 1}), Transform), {"__annotations__": {"size": float}})


def test_a_field_whose_default_is_a_function_may_be_declared_again():
    class HoldsFunction(Transform):
        fn: object = math.sin

    class HoldsAnother(HoldsFunction):
        fn: object = math.cos

    assert HoldsAnother().fn is math.cos


def test_a_field_named_like_a_method_of_its_own_class_is_an_error_too():
    said = "Wrong: the field 'scaled' would replace a method of Wrong"
    with pytest.raises(TypeError, match=said):

        class Wrong(Transform):
            scaled: float

            def scaled(self):
                return 1.0

    with pytest.raises(TypeError, match=said):

        class Wrong(Transform):
            scaled: float

            @property
            def scaled(self):
                return 1.0


@pytest.mark.parametrize("name", ["params", "chain", "param_names", "grads"])
def test_a_live_field_may_not_take_a_key_of_the_group(name):
    with pytest.raises(TypeError, match=f"Wrong: '{name}' cannot be a live hyperparameter"):
        type("Wrong", (Transform,), {"__annotations__": {name: Live[float]}})


def test_a_class_of_a_user_does_not_change_what_the_rules_name():
    known = Transform.registry["ClipNorm"]

    class ClipNorm(Transform):
        pass

    assert Transform.registry["ClipNorm"] is known
    assert AdaptiveClip(ZStat()).warmup.max_norm == 1.0


def test_the_formula_of_a_rule_may_come_before_or_after_its_summary():
    class FormulaFirst(Transform):
        """u ← u / 2"""

    class SummaryFirst(Transform):
        """A rule that halves the update. It writes u ← u / 2.

        u ←
        u / 2

        Args:
            name: u ← 3 u
        """

    class NoFormula(Transform):
        """A rule
        without formula.

        More.
        """

    assert formula_of(FormulaFirst) == formula_of(SummaryFirst) == "u ← u / 2"
    assert formula_of(NoFormula) == "A rule without formula."
