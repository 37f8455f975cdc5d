"""What `test_authors.py` starts on every rank: rules of a user's own, over models that are sharded.

torchrun --nproc-per-node 2 -m tests.processes.authors fsdp tp
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.processes.averaged import fsdp, near, net, tp, whole
from torchzero_clip import LR, Adam, Modular, Transform, WeightDecay, zeros_like_state


class Whitened(Transform):
    """u ← u / s, half of it in odd steps; s the size of the first gradient, which moves nothing"""

    starts_with_state = True
    counts_steps = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"size": zeros_like_state(param).fill_(torch.inf)}

    def update(self, u: Any, state: Any, group: Any) -> Any:
        size = state["size"]
        size.copy_(u.abs().add(1.0).where(size.isinf(), size))
        return u.div_(size).mul_(1 - 0.5 * (group["step"] % 2))


def begun(make: Callable[[], Any]) -> list[str]:
    """Parameters begin, one of them late, as those of one process do."""
    wrong = []
    model, plain = make(), net()
    chain = Whitened(), Adam(eps=1e-4), WeightDecay(0.1), LR(0.05)  # rounding is not a direction
    opts = [Modular(one.named_parameters(), *chain) for one in (model, plain)]
    for step in range(5):
        for one, opt in zip((model, plain), opts, strict=True):
            torch.manual_seed(step)
            nn.functional.mse_loss(one(torch.randn(8, 5)), torch.ones(8, 4)).backward()
            late = dict(one.named_parameters())["2.weight"]
            late.grad = None if step < 2 else late.grad
            opt.step()
            opt.zero_grad()
        if not near(whole(dict(model.named_parameters())), dict(plain.named_parameters())):
            wrong.append(f"other weights after step {step}")
    counts = [
        {name: int(opt.state[p]["Adam/step"]) for name, p in one.named_parameters()}
        for one, opt in zip((model, plain), opts, strict=True)
    ]
    if not counts[0] == counts[1] == {name: 2 if name == "2.weight" else 4 for name in counts[1]}:
        wrong.append(f"other counts of steps: {counts}")
    return wrong


def main(settings: list[str]) -> None:
    dist.init_process_group("gloo")
    for setting in settings:
        wrong = begun({"fsdp": fsdp, "tp": tp}[setting])
        print(f"{setting}: {len(wrong)} wrong", *wrong, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
