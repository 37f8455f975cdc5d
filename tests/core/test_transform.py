"""What the author of a transform may rely on in a step."""

import pytest
import torch

from tests.helpers import run_once
from torchzero_clip import (
    EMA,
    LR,
    Live,
    Modular,
    Scale,
    TensorwiseTransform,
    Transform,
    zeros_like_state,
)


def test_one_description_serves_several_places_and_optimizers():
    ema = EMA(0.5)
    opt, p, updates = run_once(ema, ema, steps=2)
    assert updates == [1.0, 2.0]
    assert set(opt.state[p]) == {"EMA/ema", "EMA_2/ema"}
    _, _, updates = run_once(ema, steps=1)
    assert updates == [2.0]


def test_a_transform_without_update_says_what_to_write():
    class Nothing(Transform):
        pass

    with pytest.raises(NotImplementedError, match="Nothing must define update or step"):
        run_once(Nothing())


def test_a_tensorwise_transform_sees_one_tensor_at_a_time():
    class Flip(TensorwiseTransform):
        shift: Live[float] = 1.0

        def init(self, param):
            return {"last": zeros_like_state(param)}

        def update_tensor(self, u, state, group):
            out = u.flip(0) + group["shift"] + state["last"]
            state["last"].copy_(u)
            u.zero_()
            return out

    p = torch.zeros(2, requires_grad=True)
    q = torch.zeros(1, requires_grad=True)
    p.grad, q.grad = torch.tensor([1.0, 2.0]), torch.tensor([5.0])
    opt = Modular([{"params": [p]}, {"params": [q], "shift": 10.0}], Flip())
    opt.step()
    assert (-p).tolist() == [3.0, 2.0]
    assert (-q).tolist() == [15.0]
    assert p.grad.tolist() == [1.0, 2.0]
    opt.step()
    assert (-p).tolist() == [3.0 + 4.0, 2.0 + 4.0]


def test_a_tensorwise_transform_may_return_its_state():
    class Last(TensorwiseTransform):
        def init(self, param):
            return {"m": zeros_like_state(param)}

        def update_tensor(self, u, state, group):
            return state["m"].add_(u)

    opt, p, updates = run_once(Last(), Scale(10.0), steps=2)
    assert updates == [40.0, 80.0]
    assert opt.state[p]["Last/m"].item() == 8.0


def test_a_link_may_end_the_step():
    class Every(Transform):
        """Level 3: every second step goes through."""

        def step(self, buckets):
            count = buckets[0].group_state
            count["steps"] = count.get("steps", 0) + 1
            return buckets if count["steps"] % 2 == 0 else []

    _, _, updates = run_once(Every(), EMA(0.5), steps=4)
    assert updates == [0.0, 2.0, 0.0, 3.0]


def test_complex_updates_arrive_as_pairs_or_whole():
    seen = []

    class Pairs(Transform):
        def init(self, param):
            return {"m": zeros_like_state(param)}

        def update(self, u, state, group):
            seen.append([t.shape for t in (*u, *state["m"], *group["params"], *group["grads"])])
            return u.mul_(2)

    class Whole(Pairs):
        complex = "whole"

    for link in (Pairs(), Whole()):
        p = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
        p.grad = torch.tensor([1j, 2, 3 + 1j])
        Modular([p], link).step()
        torch.testing.assert_close(-p.detach(), 2 * p.grad)
    assert seen == [[(3, 2)] * 4, [(3,)] * 4]


def counting(**said):
    """A rule with state in the shape of the parameters that notes how many tensors it sees."""

    class Counting(Transform):
        def init(self, param):
            return {"sum": torch.zeros_like(param)}

        def update(self, u, state, group):
            self.seen.append(len(u))
            state["sum"].add_(u)
            return u

    return type("Said", (Counting,), {"seen": [], "__module__": __name__, **said})


@pytest.mark.parametrize(("reach", "seen"), [("tensor", [1, 1, 1]), ("model", [3])])
def test_state_in_half_the_memory_is_wide_for_one_tensor_at_a_time_unless_a_rule_reaches_further(
    reach, seen
):
    rule = counting(reach=reach)
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones(4)
    Modular(params, rule(), LR(0.1), state_dtype="bfloat16").step()
    assert rule.seen == seen


def test_a_class_that_stands_behind_the_learning_rate_takes_no_target():
    at_the_end = type("AtTheEnd", (Transform,), {"__module__": __name__, "place": "end"})
    assert at_the_end().target == "update"
    with pytest.raises(ValueError, match="AtTheEnd: target must be 'update', got 'grad'"):
        at_the_end(target="grad")
