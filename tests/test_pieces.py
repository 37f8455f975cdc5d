"""On CPU elementwise links see pieces of tensors, and no step makes memory as large as a tensor.

That results are those of whole tensors is for `test_fast_plain.py`, with pieces of a few numbers.
"""

from typing import ClassVar

import pytest
import torch
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from tests.table import every
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    ClipNorm,
    ClipNormByEMA,
    Clipper,
    ClipValue,
    ClipValueGrowth,
    Lambda,
    Lion,
    Modular,
    Momentum,
    Orthogonalize,
    RMSprop,
    Sign,
    Transform,
    WeightDecay,
    zeros_like_state,
)
from torchzero_clip.core import counter
from torchzero_clip.core.norms.scratch import PIECE, SCRATCH
from torchzero_clip.core.pieces import InPieces, pieces
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import MANY, SMALL

ROWS, COLUMNS = 1536, 1024  # more numbers than a piece has


def refill(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.normal_(generator=generator)


def allocations(chain):
    """The sizes of what a step allocates, after the first ones, in bytes."""
    params = [Parameter(torch.full((ROWS, COLUMNS), 0.1)) for _ in range(2)]
    opt = Modular([(f"m{i}.w", p) for i, p in enumerate(params)], *chain)
    for seed in range(5):
        refill(params, seed)
        opt.step()
    refill(params, 5)
    return traced(opt.step)


def traced(step):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    return [event.nbytes() for event in results.events() if event.name() == "[memory]"]


@every(lambda case: not any(isinstance(tfm, Orthogonalize) for tfm in case.make().walk()))
def test_no_step_allocates_what_is_as_large_as_a_parameter(case):
    """But for products of matrices, and what somebody's function returns."""
    chain = [case.make(), *([] if owns_lr(case) else [LR(1e-3)])]
    large = [size for size in allocations(chain) if size >= 4 * ROWS * COLUMNS]
    returned = any(isinstance(tfm, Lambda) for tfm in chain[0].walk())
    assert len(large) == 2 * returned


def owns_lr(case):
    return any("lr" in link.live for link in case.make().walk())


@pytest.mark.parametrize(
    "chain",
    [
        lambda: [Adam(), ClipValue(0.1), RMSprop(), LR(0.1)],
        lambda: [ClipNorm(0.1, target="grad"), EMA(debias=True), Sign(), WeightDecay(0.1), LR(0.1)],
        lambda: [Lion(), ClipNorm(1.0), Momentum(nesterov=True), LR(0.1)],
        lambda: [RMSprop(centered=True, momentum=0.9)],
    ],
)
def test_nor_do_chains(chain):
    assert max(allocations(chain()), default=0) < 4 * ROWS * COLUMNS


def test_nor_does_a_clipper():
    params = [Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2)]
    clipper = Clipper(params, ClipValueGrowth(), ClipNormByEMA())
    for seed in range(4):
        refill(params, seed)
        sizes = traced(clipper.step)
    assert sizes
    assert max(sizes) < 4 * ROWS * COLUMNS


def test_the_measurement_sees_what_is_allocated():
    assert max(allocations([Lambda(torch.tanh), LR(0.1)])) == 4 * ROWS * COLUMNS
    plain = [Lambda(lambda u: u.mul_(2)), LR(0.1)]
    assert max(allocations(plain), default=0) < 4 * ROWS * COLUMNS


# ---------------------------------------------------------------------- what a rule sees


class Watch(Transform):
    """u ← u · t, t the step; notes how many numbers it sees at a time"""

    elementwise = True
    seen: ClassVar[list[int]] = []

    def init(self, param):
        return {"step": counter(param), "sum": zeros_like_state(param)}

    def update(self, u, state, group):
        assert [t.shape for t in u] == [t.shape for t in state["sum"]]
        assert [t.shape for t in u] == [t.shape for t in group["params"]]
        assert [t.shape for t in u] == [t.shape for t in group["grads"]]
        self.seen.append(sum(t.numel() for t in u))
        step = state["step"].add_(1).stack()
        state["sum"].add_(u)
        return u.mul_(step)


SHAPES = [(3 * PIECE // 2,), (5,), (700, 1000), *[(8, 8)] * 2 * MANY, (3, SMALL), (0,), ()]


@pytest.mark.parametrize("after", [[], [LR(0.1)], [ClipNorm(1e9), LR(0.1)]], ids=len)
def test_pieces_cover_every_entry_once_and_counts_move_once(after):
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in SHAPES]
    opt = Modular(params, Watch(), *after)
    start = [p.detach().clone() for p in params]
    expected = [torch.zeros_like(p) for p in params]
    for step in range(1, 4):
        Watch.seen.clear()
        refill(params, step)
        grads = [p.grad.clone() for p in params]
        opt.step()
        assert sum(Watch.seen) == sum(p.numel() for p in params)
        assert max(Watch.seen) <= PIECE
        assert len(Watch.seen) > 3
        rows = zip(params, grads, expected, strict=True)
        for p, grad, total in rows:
            assert opt.state[p]["Watch/step"] == step
            assert torch.equal(p.grad, grad)
            total += grad * step
    rate = 0.1 if after else 1.0
    for p, first, total in zip(params, start, expected, strict=True):
        torch.testing.assert_close(p.detach(), first - rate * total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"fused": False}, {"rounding": "kahan"}], ids=str)
def test_whole_tensors_where_pieces_do_not_do(options):
    """`fused=False` is the formula over whole tensors; a transposed gradient has another order."""
    p = Parameter(torch.ones(PIECE // 1024, 1024))
    opt = Modular([p], Watch(), LR(0.1), **options)
    p.grad = torch.ones(1024, PIECE // 1024).t() if "rounding" in options else torch.ones_like(p)
    Watch.seen.clear()
    opt.step()
    assert Watch.seen == [PIECE]
    assert torch.allclose(p.detach(), torch.tensor(0.9))


def test_an_update_that_nobody_asks_for_moves_its_state_once():
    class Drop(Transform):
        def update(self, u, state, group):
            return TensorList([torch.zeros_like(p) for p in group["params"]], owned=True)

    p = Parameter(torch.ones(2000, 1000))
    opt = Modular([p], RMSprop(), EMA(), Drop(), LR(0.1))
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p.detach(), torch.ones_like(p))
    assert torch.allclose(opt.state[p]["RMSprop/square_avg"], torch.tensor(0.01))
    assert torch.allclose(opt.state[p]["EMA/ema"], torch.tensor(1.0))


def test_a_state_that_flows_is_not_written_by_the_next_link():
    p = Parameter(torch.zeros(1500, 1000))
    for chain in ([EMA(0.5), ClipValue(0.1)], [EMA(0.5), ClipNorm(1e9), ClipValue(0.1), Sign()]):
        opt = Modular([p], *chain, LR(1.0))
        p.grad = torch.ones_like(p)
        opt.step()
        assert opt.state[p]["EMA/ema"].unique().tolist() == [0.5]


# ---------------------------------------------------------------------- the parts


def test_the_pieces_of_a_list():
    tensors = [torch.empty(shape) for shape in SHAPES]
    found = list(pieces(tensors, PIECE))
    assert SCRATCH.piece is None
    rows = sorted(row for piece in found for row in piece.rows)
    ends = dict.fromkeys(range(len(tensors)), 0)
    for i, begin, end in rows:
        assert begin == ends[i]
        ends[i] = end
    assert list(ends.values()) == [t.numel() for t in tensors]
    for piece in found:
        assert sum(end - begin for _, begin, end in piece.rows) <= PIECE
        cut = any(end - begin < tensors[i].numel() for i, begin, end in piece.rows)
        assert piece.whole is not cut
        assert not piece.every
    (every,) = pieces(tensors[2:3], PIECE)
    assert every == ([(0, 0, 700_000)], True, True, False)


def test_rows_of_one_tensor_take_one_operator():
    """With numbers, vectors and other rows; anything else goes row by row."""
    source = [torch.randn(3, 4) for _ in range(MANY)]
    vector = torch.rand(MANY, dtype=torch.float64) + 0.5
    uses = {
        "mul_": [(2.0,), (vector,), ([1.0 + i for i in range(MANY)],), (torch.tensor(3.0),)],
        "div_": [(2.0,), (vector,), (list(vector.float().unbind()),)],
        "maximum_": [(0.1,), (TensorList([torch.zeros(3, 4)] * MANY),)],
        "clamp_": [(-0.1, 0.2)],
        "add_": [(1.0,), (TensorList(source),)],
        "sqrt_": [()],
        "sign_": [()],
    }
    for name, calls in uses.items():
        for args in calls:
            rows = TensorList(source, room=lambda: SCRATCH.rows(source)).mul_(1.0)
            assert rows.whole is not None
            plain = getattr(TensorList(source).clone(), name)(*args)
            out = getattr(rows, name)(*args)
            for a, b in zip(out, plain, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)
            assert out.tensors[0].data_ptr() == SCRATCH.get(torch.float32).data_ptr()


@pytest.mark.parametrize("chain", [[ClipValue(0.1)], [ClipNorm(0.1), Sign()], [Momentum()]])
def test_shards_may_be_empty(chain):
    """Where there are more ranks than rows, some hold nothing of many tensors."""
    params = [Parameter(torch.ones(0, 3)) for _ in range(MANY)] + [Parameter(torch.ones(5))]
    opt = Modular(params, *chain, LR(0.1))
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert (params[-1] < 1).all()


def test_a_list_in_pieces_is_computed_once():
    calls = []

    def double(u, state, group):
        calls.append(len(u))
        return u.mul_(2)

    source = TensorList([torch.ones(10), torch.ones(4, 5)])
    u = InPieces(source, double, {}, {}, None)
    assert u.dtype == torch.float32
    assert len(u) == 2
    assert not calls
    assert u.to(torch.float32) is u
    assert [t.sum().item() for t in u] == [20, 40]
    assert [t.sum().item() for t in source] == [10, 20]
    assert u.owned
    u._settle()
    assert calls == [2]
