"""target="grad": links that rewrite the gradient."""

import dataclasses

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import one, param
from tests.optimizer.chains import parameters, train
from torchzero_clip import (
    EMA,
    LR,
    Accumulate,
    Adam,
    AdaptiveClip,
    Cautious,
    Chain,
    ClipNorm,
    ClipValue,
    ClipValueByEMA,
    Freeze,
    Guard,
    Identity,
    Lambda,
    Modular,
    Momentum,
    Partition,
    Scale,
    Sign,
    Transform,
    ZStat,
)


def test_target_grad_writes_the_memory_of_the_gradient():
    p = torch.zeros(2, requires_grad=True)
    p.grad = grad = torch.tensor([3.0, 4.0])
    where = grad.data_ptr()
    Modular([p], ClipNorm(1.0, target="grad"), LR(0.1)).step()
    assert p.grad is grad
    assert grad.data_ptr() == where
    torch.testing.assert_close(grad, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(p.detach(), torch.tensor([-0.06, -0.08]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_target_grad_works_in_every_dtype(dtype):
    p = torch.zeros(2, dtype=dtype, requires_grad=True)
    p.grad = grad = torch.tensor([3.0, 4.0], dtype=dtype)
    Modular([p], ClipNorm(1.0, target="grad"), Momentum(0.5), LR(1.0)).step()
    assert p.grad is grad
    assert grad.dtype == dtype
    expected = torch.tensor([0.6, 0.8]).to(dtype)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(p.detach(), -expected)


@pytest.mark.parametrize(
    "link",
    [EMA(0.5, target="grad"), Adam(target="grad"), Scale(2.0, target="grad"), Sign(target="grad")],
    ids=repr,
)
def test_every_link_may_work_on_the_gradient(link):
    a, b = parameters(), parameters()
    on_grad = Modular(a, link, LR(0.1))
    on_update = Modular(b, type(link)(**{**fields(link), "target": "update"}), LR(0.1))
    for step in range(3):
        train(on_grad, a, 1, step), train(on_update, b, 1, step)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)
        assert not torch.equal(p.grad, q.grad)


def fields(link):
    return {field.name: getattr(link, field.name) for field in dataclasses.fields(link)}


def test_state_returned_as_a_gradient_is_copied_not_shared():
    p = one(grad=4.0)
    opt = Modular([p], EMA(0.5, target="grad"), Scale(10.0, target="grad"))
    opt.step()
    assert p.grad.item() == 20.0
    assert opt.state[p]["EMA/ema"].item() == 2.0


@pytest.mark.parametrize("producer", [Scale(1.0), ClipNorm(1.0), Adam()], ids=repr)
def test_target_grad_after_an_update_is_an_error(producer):
    with pytest.raises(ValueError, match=r'ClipValue with target="grad" has no effect'):
        Modular([one()], producer, ClipValue(1.0, target="grad"), LR(0.1))


def test_target_grad_after_an_update_is_allowed_before_a_reader_of_gradients():
    class Agree(Transform):
        reads = ("grads",)

        def update(self, u, state, group):
            return u.mul_(group["grads"])

    p = one(0.0, grad=10.0)
    Modular([p], Scale(2.0), ClipValue(3.0, target="grad"), Agree()).step()
    assert -p.item() == 20.0 * 3.0
    assert p.grad.item() == 3.0
    with pytest.raises(ValueError, match='ClipValue with target="grad" has no effect'):
        Modular([p], Scale(2.0), Agree(), ClipValue(3.0, target="grad"))
    Modular([p], Adam(), ClipNorm(1.0, target="grad"), Cautious(), LR(0.1))  # reads them too


def test_what_reads_the_gradient_later_sees_it_rewritten():
    p, seen = one(grad=10.0), []
    opt = Modular([p], ClipValue(2.0, target="grad"), LR(0.1))
    opt.register_step_post_hook(lambda *_: seen.append(p.grad.item()))
    opt.step()
    assert seen == [2.0]


def test_a_grad_link_writes_every_tensor_that_came_back_new():
    vector, matrix = param(1.0, grad=[1.0]), Parameter(torch.ones(2, 2))
    matrix.grad = torch.ones(2, 2)
    zero = Lambda(lambda u: u if u.dim() < 2 else u * 0, target="grad")
    Modular([vector, matrix], zero, LR(1.0)).step()
    assert matrix.grad.eq(0).all()
    assert matrix.eq(1).all()
    assert vector.item() == 0


GRAD = ClipNorm(1.0, target="grad")


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (AdaptiveClip(ZStat(), target="grad"), GRAD),
        lambda: (ClipValueByEMA(ema_tfm=Scale(2.0), target="grad"), GRAD),
        lambda: (Guard(), GRAD),
        lambda: (Identity(), Freeze(lambda n, p: False), Accumulate(2), GRAD),
        lambda: (Partition({"a": ClipNorm(1.0), "b": GRAD}, lambda n, p: "a"),),
        lambda: (Adam(), GRAD, Cautious()),
    ],
)
def test_grad_links_that_do_something_are_accepted(chain):
    assert Modular([param(0.0)], *chain())


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (Adam(), AdaptiveClip(ZStat(), target="grad")),
        lambda: (Adam(), ClipValueByEMA(ema_tfm=Scale(2.0), target="grad")),
        lambda: (Partition({"a": ClipNorm(1.0)}, lambda n, p: "a"), GRAD),
        lambda: (Chain(Chain(Adam(), name="inner"), GRAD),),
    ],
)
def test_grad_links_that_nothing_sees_are_refused(chain):
    with pytest.raises(ValueError, match="has no effect, because"):
        Modular([param(0.0)], *chain())
