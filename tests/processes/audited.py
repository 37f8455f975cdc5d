"""What `test_audited.py` starts on every rank: audits of sharded and of replicated models.

torchrun --nproc-per-node 2 -m tests.processes.audited
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import LR, Adam, Modular, Orthogonalize, Partition
from torchzero_clip.audit import UpdateReport, audit_update

WIDTH = 16


def net() -> nn.Module:
    """Return a model whose bias of 17 elements has shards of different size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, WIDTH))


def audited(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, **options: Any
) -> UpdateReport:
    with audit_update(model, optimizer, **options) as report:
        optimizer.zero_grad()
        torch.manual_seed(seed)
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
    return report


def said(report: UpdateReport) -> list[str]:
    return [str(finding) for finding in report.findings]


def sharded_like_whole() -> str:
    """Sums and kinds of a sharded model are those of the whole model."""
    kinds = {name: "matrices" if p.dim() > 1 else "rest" for name, p in net().named_parameters()}
    muon = Partition({"matrices": Orthogonalize(), "rest": Adam()}, kinds)
    for links, expect in (
        ([Adam(), LR(1e-3)], {"*": "sign"}),
        ([muon, LR(1e-3)], {"*.weight": "orthogonal"}),
        ([LR(1e-3)], {"*": "gradient"}),
    ):
        whole = net()
        sharded = fully_shard(net())
        reports = []
        for model in (whole, sharded):
            optimizer = Modular(model.named_parameters(), *links)
            for seed in range(2):
                wanted = expect if seed == 0 or "*.weight" in expect else None
                report = audited(model, optimizer, seed, expect=wanted)
                if report.findings:
                    return str(report)
            reports.append(report)
        for one, other in zip(reports[0].rows, reports[1].rows, strict=True):
            if (one.names, one.kind, one.shape) != (other.names, other.kind, other.shape):
                return f"{one} {other}"
            for name in ("gradient", "moved", "step", "weight", "ratio"):
                mine = torch.tensor(getattr(one, name))
                theirs = torch.tensor(getattr(other, name))
                if not torch.allclose(mine, theirs, rtol=1e-3):
                    return f"{name}: {one} {other}"
    return "right"


def half_of_a_sharded_model() -> str:
    model = fully_shard(net())
    (finding,) = audited(model, torch.optim.AdamW(model[0].parameters())).findings
    return f"{finding.code}: {', '.join(finding.names)}"


def drift(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> list[str]:
    """Return what an audit says of equal replicas, of a step that breaks them, and of the next."""
    model, options = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [said(audited(model, optimizer, **options))]
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    found.append(said(audited(model, optimizer, **options)))
    optimizer.param_groups[0]["lr"] = 0.1
    found.append(said(audited(model, optimizer, **options)))
    return [", ".join(texts) or "nothing" for texts in found]


def in_ddp() -> tuple[nn.Module, dict[str, Any]]:
    return DistributedDataParallel(net()), {}


def by_hand() -> tuple[nn.Module, dict[str, Any]]:
    return net(), {"replicas": True}


class Replicated(nn.Module):
    """A model whose weight is a DTensor with equal copies on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        whole = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        self.w = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.w
        return x @ weight.to_local()


def replicated() -> tuple[nn.Module, dict[str, Any]]:
    return Replicated(), {}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print("sharded:", sharded_like_whole())
    print("half:", half_of_a_sharded_model())
    for make in (in_ddp, by_hand, replicated):
        for text in drift(make):
            print(f"{make.__name__}: {text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
