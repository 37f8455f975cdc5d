"""examples/write_your_own.py does what its page says."""

import math

import pytest

from examples import write_your_own
from examples.write_your_own import ClipToAverage, SlowBoost
from tests.helpers import one
from torchzero_clip import Modular


def test_slow_boost_adds_a_slow_average_that_begins_with_the_first_update():
    p = one(0.0)
    opt = Modular([p], SlowBoost(beta=0.5, gain=3.0))
    for grad, slow in ((4.0, 4.0), (2.0, 3.0), (0.0, 1.5)):
        p.grad.fill_(grad)
        p.data.zero_()
        opt.step()
        assert opt.state[p]["SlowBoost/slow"].item() == slow
        assert -p.item() == grad + 3 * slow
    assert set(opt.param_groups[0]) == {"params", "chain", "beta", "gain"}


@pytest.mark.parametrize("dim", [None, "global"])
def test_clip_to_average_allows_a_multiple_of_the_norms_so_far(dim):
    p = one(0.0)
    opt = Modular([p], ClipToAverage(2.0, dim))
    updates = []
    for grad in (1.0, 10.0, math.nan, 10.0, 0.1):
        p.grad.fill_(grad)
        p.data.zero_()
        opt.step()
        updates.append(-p.item())
    # the average after each step: 1, 1.5, 1.5, 2.25, 1.175
    assert updates == pytest.approx([1.0, 2.0, math.nan, 3.0, 0.1], nan_ok=True)
    opt.param_groups[0]["factor"] = 1.0
    p.grad.fill_(10.0)
    p.data.zero_()
    opt.step()
    assert -p.item() == pytest.approx(1.175)


def test_the_example_finds_the_line_in_spite_of_wild_labels(capsys):
    slope, offset = write_your_own.main().tolist()
    assert (slope, offset) == pytest.approx((3.0, -1.0), abs=1e-3)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 12
    assert "step 300" in printed[-1]
    losses = [float(line.split()[3]) for line in printed]  # against the true labels
    assert max(losses) < 10
    assert losses[-1] < 1e-3
