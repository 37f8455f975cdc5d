"""The clipping functions of torchtitan and verl, replaced by ours, on two ranks.

The lines between the marks are those of the pages.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.frameworks.common import data, leave, need, processes
from torchzero_clip import compat
from torchzero_clip.core.sharding.layout import full

pytestmark = pytest.mark.frameworks
ORDERS = (2.0, 1.0, math.inf)


def network() -> nn.Sequential:
    """Shapes that two ranks divide: of empty shards torch has no infinity norm."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))


def filled(model: nn.Module) -> nn.Module:
    x, y = data(1)[0]
    (100 * nn.functional.mse_loss(model(x), y.expand(-1, 2))).backward()
    return model


def sharded() -> nn.Module:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    return filled(model)


def grads(params: Any) -> list[Tensor]:
    return [full(p.grad) for p in params]


def compare(theirs: Any, ours: Any, make: Any, **kwargs: Any) -> None:
    """Both functions return the same norm and leave the same gradients, for every order."""
    for order in ORDERS:
        one, other = make(), make()
        want, got = theirs(one, 0.5, order, **kwargs), ours(iter(other), 0.5, order, **kwargs)
        want, got = [n.full_tensor() if isinstance(n, DTensor) else n for n in (want, got)]
        assert want > 0.5
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        torch.testing.assert_close(grads(other), grads(one), rtol=1e-4, atol=1e-7)


def titan() -> None:
    from torchtitan.distributed import utils

    theirs = utils.clip_grad_norm_

    # the page begins
    def clip_grad_norm_(parameters, *args, pp_mesh=None, ep_enabled=False, **kwargs):
        stages = pp_mesh.get_group() if pp_mesh else None
        norm = compat.clip_grad_norm_(parameters, *args, process_group=stages, **kwargs)
        return getattr(norm, "full_tensor", lambda: norm)()

    utils.clip_grad_norm_ = clip_grad_norm_
    # the page ends

    def call(function: Any) -> Any:
        def named(params: Any, limit: float, order: float, **kwargs: Any) -> Tensor:
            return function(params, limit, norm_type=order, foreach=True, **kwargs)

        return named

    both = call(theirs), call(utils.clip_grad_norm_)
    compare(*both, lambda: list(sharded().parameters()))
    print("→ shards")
    stages = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stage = 2 * dist.get_rank()
    compare(*both, lambda: list(filled(network())[stage].parameters()), pp_mesh=stages)
    print("→ stages")

    dense = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    sparse = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))

    def experts() -> list[nn.Parameter]:
        """A dense weight, and four experts of which each rank has two."""
        torch.manual_seed(1)
        made = []
        for mesh, shape in ((dense, (8, 4)), (sparse, (4, 3, 5))):
            p = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
            p.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
            made.append(p)
        return made

    compare(*both, experts, ep_enabled=True)
    print("→ experts")


def verl() -> None:
    from verl.utils import fsdp_utils

    fsdp_utils.get_device_id = lambda: "cpu"  # it would ask for an accelerator
    theirs = fsdp_utils.fsdp2_clip_grad_norm_
    # the page begins
    fsdp_utils.fsdp2_clip_grad_norm_ = compat.clip_grad_norm_
    # the page ends
    compare(
        theirs,
        fsdp_utils.fsdp2_clip_grad_norm_,
        lambda: list(sharded().parameters()),
    )
    print("→ shards")


SAID = {"titan": ["→ shards", "→ stages", "→ experts"], "verl": ["→ shards"]}
NEEDS = {"titan": "torchtitan.distributed.utils", "verl": "verl.utils.fsdp_utils"}


@pytest.mark.parametrize("framework", SAID)
def test_the_function_replaced_gives_what_theirs_gives(framework):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        need(NEEDS[framework])
    assert processes(__file__, 2, framework) == [SAID[framework]] * 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"titan": titan, "verl": verl}[sys.argv[1]]()
    leave()
