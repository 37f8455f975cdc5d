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

from tests.helpers import ROOT
from tests.identities.methods.matrices import same_null_spaces
from tests.processes.averaged import fsdp, near, net, tp, whole
from tests.project.test_docs import blocks, interpreter, run
from torchzero_clip import LR, Adam, Modular, Transform, WeightDecay, zeros_like_state

ARGUMENTS = {
    "MyProdigy": {"d0": 0.1},  # or six steps move nothing
    "MySOAP": {"eps": 1e-2},  # or Adam makes 1 of what is rounding in its first bases
}


class Whitened(Transform):
    """u ← u / s, half of it in odd steps; s the size of the first gradient, which moves nothing"""

    drops = "first"
    reads = ("step",)

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
    chain = Whitened(), Adam(), WeightDecay(0.1), LR(0.05)
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


def written(make: Callable[[], Any]) -> list[str]:
    """The classes of docs/methods_of_your_own.md do what those of one process do."""
    page, wrong = ROOT / "docs" / "methods_of_your_own.md", []
    with interpreter("methods_of_your_own") as names:
        for block in blocks(page):
            run(block.code, str(page), names)
        for name, made in [(name, x) for name, x in names.items() if name.startswith("My")]:
            rule, model, plain = made(**ARGUMENTS.get(name, {})), make(), net()
            chain = (LR(0.05), rule) if name == "MyScheduleFree" else (rule, LR(0.05))
            for one in (model, plain):
                opt = Modular(one.named_parameters(), *chain)
                for step in range(6):
                    torch.manual_seed(step)
                    nn.functional.mse_loss(one(torch.randn(8, 5)), torch.ones(8, 4)).backward()
                    with same_null_spaces():
                        opt.step()
                    opt.zero_grad()
            if not near(whole(dict(model.named_parameters())), dict(plain.named_parameters())):
                wrong.append(f"other weights with {name}")
    return wrong


def main(settings: list[str]) -> None:
    dist.init_process_group("gloo")
    # Adam and bases of matrices make much of rounding, and processors do not round alike.
    torch.set_default_dtype(torch.float64)
    for setting in settings:
        make = {"fsdp": fsdp, "tp": tp}[setting]
        wrong = begun(make) + written(make)
        print(f"{setting}: {len(wrong)} wrong", *wrong, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
