"""State in bfloat16: what every rule that keeps tensors like its parameters promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Named, parameters, same, saved, train
from tests.modules.rows.row import with_lr
from tests.table import ROWS, Case, mechanisms, sampled
from torchzero_clip import Modular

KEEPS = {row.cls: row.keeps for row in ROWS}
WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "plain": {"fused": False},
    "compiled": {"compile": True},
}


def keeps(case: Case) -> bool:
    """Whether it has state in the shape of the parameters."""
    return any(KEEPS.get(type(tfm)) for tfm in case.make().walk())


NARROW = sampled(keeps, one_in=2)
FEW = sampled(keeps, one_in=4)


def optimizer(
    case: Case, way: str = "plain", state_dtype: str = "bfloat16"
) -> tuple[Named, Modular]:
    params = parameters(case.shapes)
    chain = with_lr(case.make(), 1e-2)
    opt = Modular(params.items(), *chain, state_dtype=state_dtype, **WAYS[way])
    if way == "compiled":
        opt.engine = opt.engine.twin()
    return params, opt


def held(opt: Modular) -> dict[tuple[int, str], Tensor]:
    """The state of all parameters."""
    rows = enumerate([p for group in opt.param_groups for p in group["params"]])
    return {
        (i, key): value
        for i, p in rows
        for key, value in opt.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


@NARROW
def test_the_state_that_a_row_names_is_in_bfloat16_and_no_other(case):
    params, opt = optimizer(case)
    train(params, opt, range(3))
    kinds = {link.path: KEEPS.get(type(link.transform), ()) for link in opt.keys.links}
    found = set()
    for (_, key), value in held(opt).items():
        path, _, name = key.rpartition("/")
        assert value.dtype == (torch.bfloat16 if name in kinds[path] else torch.float32), key
        found |= {name} & {*kinds[path]}
    assert found
    for group in opt.param_groups:
        numbers = [x for x in group["chain"].values() if isinstance(x, Tensor)]
        assert not any(x.dtype == torch.bfloat16 for x in numbers)


@NARROW
def test_the_first_step_leaves_a_neighbour_of_what_float32_has(case):
    """Rules compute in float32; what is kept is off by less than a unit in the last place."""
    wide_params, wide = optimizer(case, state_dtype="float32")
    params, opt = optimizer(case)
    for some in ((wide_params, wide), (params, opt)):
        train(*some, range(1))
    ours = held(opt)
    for key, value in held(wide).items():
        assert ((ours[key] - value).abs() <= value.abs() * 2.0**-7).logical_or(value.isinf()).all()


@FEW
def test_every_engine_rounds_alike(case):
    """But where rounding in float32 differs, and decides which neighbour it is."""
    params, opt = optimizer(case)
    train(params, opt, range(3))
    expected = held(opt)
    for way in ("fused", "compiled"):
        params, opt = optimizer(case, way)
        train(params, opt, range(3))
        for key, value in held(opt).items():
            wanted = expected[key]
            assert value.dtype == wanted.dtype
            near = torch.isclose(value.float(), wanted.float(), rtol=2e-2, atol=1e-6)
            assert (near | value.isinf()).all(), (way, key)
            if value.dtype == torch.bfloat16:
                assert (value != wanted).sum() <= 1, (way, key)


@pytest.mark.parametrize("way", [pytest.param("fused", marks=pytest.mark.slow), "compiled"])
@mechanisms(keeps)
def test_a_resumed_run_is_to_the_bit_the_run_that_went_on(case, way):
    params, opt = optimizer(case, way)
    train(params, opt, range(3))
    others, resumed = optimizer(case, way)
    for p, q in zip(others.values(), params.values(), strict=True):
        p.data.copy_(q)
    resumed.load_state_dict(saved(opt.state_dict()))
    train(params, opt, range(3, 6))
    train(others, resumed, range(3, 6))
    same(others, params)
    same(held(resumed), held(opt))


@FEW
def test_float32_checkpoints_load_into_bfloat16_and_back(case):
    for before, after in (("float32", "bfloat16"), ("bfloat16", "float32")):
        params, opt = optimizer(case, state_dtype=before)
        train(params, opt, range(3))
        others, other = optimizer(case, state_dtype=after)
        other.load_state_dict(saved(opt.state_dict()))
        found = held(other)
        for key, value in held(opt).items():
            wide = value.dtype == found[key].dtype or after == "float32"
            assert found[key].equal(value.to(found[key].dtype)), key
            assert wide or found[key].dtype == torch.bfloat16
        train(others, other, range(3, 5))
        assert {x.dtype for x in held(other).values()} == {x.dtype for x in found.values()}
