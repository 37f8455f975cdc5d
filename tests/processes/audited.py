"""What `test_audited.py` starts on every rank: audits of sharded and of replicated models.

torchrun --nproc-per-node 2 -m tests.processes.audited two
torchrun --nproc-per-node 4 -m tests.processes.audited four
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import LR, Adam, ClipNorm, Modular, Orthogonalize, Partition
from torchzero_clip.audit import UpdateReport, audit_update

WIDTH = 16


def net(width: int = 17) -> nn.Module:
    """Return a model. With a width of 17, ranks have shards of different size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


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


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def hsdp(model: nn.Module) -> nn.Module:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)
    return model


def sharded_like_whole(shard: Callable[[nn.Module], nn.Module], width: int = 17) -> str:
    """Return "right" if sums and kinds of a sharded model are those of the whole model."""
    kinds = {name: "matrices" if p.dim() > 1 else "rest" for name, p in net().named_parameters()}
    muon = Partition({"matrices": Orthogonalize(), "rest": Adam()}, kinds)
    for links, expect in (
        ([Adam(), LR(1e-3)], {"*": "sign"}),
        ([muon, LR(1e-3)], {"*.weight": "orthogonal"}),
        ([LR(1e-3)], {"*": "gradient"}),
    ):
        reports = []
        for model in (net(width), shard(net(width))):
            optimizer = Modular(model.named_parameters(), *links)
            for seed in range(2):
                wanted = expect if seed == 0 or "*.weight" in expect else None
                report = audited(model, optimizer, seed, expect=wanted)
                if report.findings or report.notes:
                    return str(report)
            reports.append(report)
        if wrong := difference(*reports):
            return wrong
    return "right"


def difference(one_report: UpdateReport, other_report: UpdateReport) -> str:
    """Return how two reports differ by more than rounding, or ""."""
    for one, other in zip(one_report.rows, other_report.rows, strict=True):
        if (one.names, one.kind, one.shape) != (other.names, other.kind, other.shape):
            return f"{one} {other}"
        if one.state != other.state:
            return f"state: {one} {other}"
        for name in ("gradient", "moved", "step", "weight", "ratio"):
            mine = torch.tensor(getattr(one, name))
            theirs = torch.tensor(getattr(other, name))
            if not torch.allclose(mine, theirs, rtol=1e-3):
                return f"{name}: {one} {other}"
    return ""


def half_of_a_sharded_model() -> str:
    model = fully_shard(net())
    (finding,) = audited(model, torch.optim.AdamW(model[0].parameters())).findings
    return f"{finding.code}: {', '.join(finding.names)}"


def nan_in_the_state_of_one_rank() -> list[str]:
    """Return the codes of findings about the state. Rank 1 has no element of one bias."""
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    optimizer = Modular(model.named_parameters(), Adam(), LR(1e-3))
    reports = [audited(model, optimizer)]
    if dist.get_rank() == 1:
        optimizer.state[model[0].weight]["Adam/exp_avg"].to_local()[-1] = torch.nan
    reports.append(audited(model, optimizer))
    codes = [
        code for report in reports for code in [x.code for x in report.findings] if "state" in code
    ]
    return [*codes, *[row.state for row in reports[0].rows]]


def gradient_on_one_rank() -> str:
    """Return the error of an audit before a step that would wait for ever."""
    model = fully_shard(net())
    optimizer = Modular(model.named_parameters(), ClipNorm(1.0, dim="global"), LR(0.1))
    model(torch.randn(4, WIDTH)).sum().backward()
    if dist.get_rank() == 1:
        model[2].bias.grad = None
    try:
        with audit_update(model, optimizer):
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def drift(make: Callable[[], tuple[nn.Module, dict[str, Any]]], ranks: int = 1) -> list[str]:
    """Return what an audit says of equal replicas, of a step that breaks them, and of the next.

    So many ranks together have a whole model, and the same learning rate.
    """
    model, options = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [said(audited(model, optimizer, **options))]
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank() // ranks)
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


def two() -> None:
    print("fsdp2:", sharded_like_whole(fsdp2))
    print("half:", half_of_a_sharded_model())
    print("NaN:", *nan_in_the_state_of_one_rank())
    print("missing:", gradient_on_one_rank())
    for make in (in_ddp, by_hand, replicated):
        for text in drift(make):
            print(f"{make.__name__}: {text}")


def four() -> None:
    print("tensor parallel:", sharded_like_whole(tensor_parallel, 16))
    print("hsdp:", sharded_like_whole(hsdp))
    for text in drift(lambda: (hsdp(net()), {}), ranks=2):
        print(f"hsdp: {text}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"two": two, "four": four}[sys.argv[1]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
