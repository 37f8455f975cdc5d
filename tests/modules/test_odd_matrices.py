"""Methods for matrices by name: what a NaN, zeros, rank one, a row and nothing come to in each."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.core.test_authors import drawn
from torchzero_clip import LR, Hyperball, Modular, WeightDecay, named
from torchzero_clip.source import SourceError

OPTIONS = {
    "adamuon": {}, "dion2": {}, "dion3": {}, "klsoap": {"precondition_frequency": 2},
    "kron": {"every": 2}, "muon": {}, "nordion2": {}, "normuon": {}, "polar": {},
    "scion": {"momentum": 0.1}, "shampoo": {"precondition_frequency": 2},
    "soap": {"precondition_frequency": 2}, "soap_hyperball": {},
}  # fmt: skip
NAMES = pytest.mark.parametrize("name", OPTIONS)
OWNED = {
    "soap": "InBasis/SOAPBasis", "soap_hyperball": "InBasis/SOAPBasis", "klsoap": "InBasis/KLBasis",
    "shampoo": "Graft/direction_of", "kron": "Kron", "dion2": "Rows", "dion3": "Rows",
    "nordion2": "Rows",
}  # fmt: skip
SHAPES = {
    "wide": (3, 5), "beside": (3, 5), "tall": (6, 2), "square": (4, 4), "row": (1, 5),
    "column": (5, 1), "empty": (0, 3),
}  # fmt: skip
Params = dict[str, Parameter]


def begun(name: str, compile: bool = False) -> tuple[Params, Modular]:
    """Parameters, and the direction of a method with a learning rate."""
    params = {n: Parameter(drawn(shape, i)) for i, (n, shape) in enumerate(SHAPES.items())}
    after = WeightDecay, LR, Hyperball
    chain = [x for x in named(name, **OPTIONS[name]) if not isinstance(x, after)]
    return params, Modular(params.items(), *chain, LR(0.01), compile=compile)


def random(step: int) -> dict[str, Tensor]:
    return {n: drawn(shape, 100 * step + i) for i, (n, shape) in enumerate(SHAPES.items(), 50)}


def stepped(params: Params, opt: Modular, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far each parameter went."""
    before = {n: p.detach().clone() for n, p in params.items()}
    for n, p in params.items():
        p.grad = grads[n].clone()
    opt.step()
    return {n: p.detach() - before[n] for n, p in params.items()}


WAYS = pytest.mark.parametrize(  # one rule of each kind compiled
    ("name", "compile"),
    [
        pytest.param(
            name,
            compile,
            marks=pytest.mark.slow if compile and name not in ("muon", "soap", "kron") else (),
        )
        for name in OPTIONS
        for compile in (False, True)
    ],
)


@WAYS
def test_zeros_move_nothing_and_rank_one_goes_against_the_gradient(name, compile):
    params, opt = begun(name, compile)
    for _ in range(4):
        moved = stepped(params, opt, {n: torch.zeros(s) for n, s in SHAPES.items()})
        assert not any(t.any() for t in moved.values())
    params, opt = begun(name, compile)
    one = {
        n: drawn((s[0], 1), i) @ drawn((1, s[1]), 9 + i) for i, (n, s) in enumerate(SHAPES.items())
    }
    for step in range(6):
        moved = stepped(params, opt, {n: t * (step + 1) for n, t in one.items()})
        for n, t in moved.items():
            assert t.isfinite().all()
            if step and t.numel():
                assert (t * one[n]).sum() < 0, n


@WAYS
def test_a_nan_stays_with_its_matrix_and_what_an_owner_keeps_takes_none(name, compile):
    (params, opt), (others, other) = begun(name, compile), begun(name, compile)
    for step in range(6):
        grads = random(step)
        stepped(others, other, grads)
        if step == 3:
            grads["wide"][1, 2] = torch.nan
        stepped(params, opt, grads)
        if name in OWNED:
            assert opt.metrics()[f"{OWNED[name]}/kept"] == (step == 3)
    for n, p in params.items():
        if n != "wide":
            assert torch.equal(p, others[n])
    state = opt.state[params["wide"]].items()
    if name in OWNED:
        owned = [t for k, t in state if k.startswith(OWNED[name]) and isinstance(t, Tensor)]
        assert owned
        assert all(t.isfinite().all() for t in owned)
    assert bool(params["wide"].isfinite().all()) is (name == "kron")


@NAMES
def test_what_is_empty_has_no_matrix_and_a_file_is_written_or_refused_in_a_sentence(name):
    params, opt = begun(name)
    for step in range(3):
        stepped(params, opt, random(step))
    owned = [k for k in opt.state[params["empty"]] if name in OWNED and k.startswith(OWNED[name])]
    assert owned == []
    with pytest.raises(SourceError, match="cannot be exported as plain PyTorch code"):
        opt.to_source()
    refreshed = [line for line in opt.explain().splitlines() if "each matrix is refreshed" in line]
    assert len(refreshed) == (name in ("soap", "soap_hyperball", "klsoap", "shampoo", "kron"))
