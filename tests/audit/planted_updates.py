"""Thirteen trainings in which the optimizer silently does something else, one for each report.

Each class has the bug of one public report, as small as possible. A note says where the thread of
the report could not be read. `expect` is what its author had configured, and `codes` are the codes
that the audit must find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchzero_clip.audit import Expected

WIDTH = 16
ROWS = 64


class Layers(nn.Module):
    """Two layers whose weights are matrices, with gradients of full rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class MuonAndAdam(Optimizer):
    """Muon for matrices and Adam for the rest, in one optimizer, as frameworks have it."""

    def __init__(self, params: Any, lr: float = 0.02, adam_lr: float = 1e-3) -> None:
        named = [(name, p) for name, p in params]
        self.names = {p: name for name, p in named}
        matrices = [p for name, p in named if self.uses_muon(name, p)]
        others = [p for name, p in named if not self.uses_muon(name, p)]
        groups = [{"params": matrices, "lr": lr, "muon": True}]
        groups += [{"params": others, "lr": adam_lr, "muon": False}]
        super().__init__([group for group in groups if group["params"]], {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.begin(p, group)

    def uses_muon(self, name: str, p: Tensor) -> bool:
        return p.dim() >= 2

    def begin(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Make the state of a parameter."""
        state = self.state[p]
        state["momentum"] = torch.zeros_like(p)
        if not group["muon"]:
            state["square"] = torch.zeros_like(p)
            state["count"] = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        updates = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self.muon(p) if group["muon"] else self.adam(p)
                    updates[p] = group["lr"] * update
        self.apply(updates)

    def muon(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        momentum = self.state[p]["momentum"]
        momentum.mul_(0.95).add_(p.grad)
        return self.orthogonal(momentum)

    def orthogonal(self, momentum: Tensor) -> Tensor:
        left, _, right = torch.linalg.svd(momentum, full_matrices=False)
        return left @ right

    def adam(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        state["count"] += 1
        state["momentum"].lerp_(p.grad, 0.1)
        state["square"].lerp_(p.grad.square(), 0.001)
        mean = state["momentum"] / (1 - 0.9 ** state["count"])
        square = state["square"] / (1 - 0.999 ** state["count"])
        return mean / square.sqrt().add(1e-8)

    def apply(self, updates: Mapping[Tensor, Tensor]) -> None:
        for p, update in updates.items():
            p.sub_(update)


class Planted:
    """A training with the bug of a report.

    Attributes:
        report: The report.
        codes: The codes of all findings.
        expect: What was configured.
        micro_batches: The number of backward passes before the step.
    """

    report: ClassVar[str]
    codes: ClassVar[set[str]]
    expect: ClassVar[dict[str, str | Expected]] = {"*.weight": "orthogonal", "*.bias": "sign"}
    micro_batches: ClassVar[int] = 1

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(self.model.named_parameters())

    def make_model(self) -> nn.Module:
        return Layers()

    def make_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return MuonAndAdam(named)

    def train(self) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            self.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        self.optimizer.step()


class Nothing(Planted):
    """The training without a bug."""

    report = ""
    codes = set()


class DecidesByPlaceholders(Planted):
    """zero.Init has replaced each parameter by an empty vector, so no parameter is a matrix."""

    report = "DeepSpeed#8438"
    codes = {"unexpected-kind"}

    class Buggy(MuonAndAdam):
        def uses_muon(self, name: str, p: Tensor) -> bool:
            placeholder = torch.empty(0)
            return placeholder.dim() >= 2

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class SkipsNewtonSchulz(Planted):
    """At ZeRO stage 0 nobody orthogonalizes, so the step is plain SGD."""

    report = "DeepSpeed#8442"
    codes = {"unexpected-kind"}

    class Buggy(MuonAndAdam):
        def orthogonal(self, momentum: Tensor) -> Tensor:
            return momentum

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class RunsInEachMicroBatch(Planted):
    """ZeRO-3 runs Muon inside the reduction of gradients, once for each micro-batch."""

    report = "DeepSpeed#8600"
    codes = {"state-outside-step"}
    micro_batches = 4

    class Buggy(MuonAndAdam):
        def begin(self, p: Tensor, group: Mapping[str, Any]) -> None:
            super().begin(p, group)
            if group["muon"]:
                p.register_post_accumulate_grad_hook(self.reduce)

        @torch.no_grad()
        def reduce(self, p: Tensor) -> None:
            assert p.grad is not None
            self.state[p]["momentum"].mul_(0.95).add_(p.grad)
            p.grad.zero_()

        def muon(self, p: Tensor) -> Tensor:
            return self.orthogonal(self.state[p]["momentum"])

    expect = {"*.bias": "sign"}

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class DropsTheGroups(Planted):
    """The groups of the caller are flattened, so all learning rates are the one of the config."""

    report = "DeepSpeed#8440"
    codes = {"unexpected-size"}
    expect = {"*.weight": Expected("sign", rms=1e-3), "*.bias": Expected("sign", rms=1e-4)}

    def make_optimizer(self, named: Any) -> Optimizer:
        params = dict(named)
        groups = [
            {"params": [p for p in params.values() if p.dim() > 1], "lr": 1e-3},
            {"params": [p for p in params.values() if p.dim() == 1], "lr": 1e-4},
        ]
        flattened = [p for group in groups for p in group["params"]]
        return torch.optim.Adam(flattened, lr=5e-4)


class ClipsTheUpdate(Planted):
    """The clipping that is meant for gradients divides the orthogonal update by its own norm."""

    report = "DeepSpeed#8439"
    codes = {"unexpected-size"}
    expect = {
        "*.weight": Expected("orthogonal", rms=0.02 / WIDTH**0.5),
        "*.bias": Expected("sign", rms=1e-3),
    }

    class Buggy(MuonAndAdam):
        def apply(self, updates: Mapping[Tensor, Tensor]) -> None:
            matrices = [update / 0.02 for p, update in updates.items() if p.dim() > 1]
            norm = float(torch.stack([m.norm() for m in matrices]).norm())
            clipped = {p: u / max(norm, 1.0) if p.dim() > 1 else u for p, u in updates.items()}
            super().apply(clipped)

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class OffloadsFlatPieces(Planted):
    """Offloading flattens the matrices: no orthogonalization, and no momentum."""

    report = "DeepSpeed#8463"
    codes = {"unexpected-kind", "state-unchanged"}

    class Buggy(MuonAndAdam):
        def muon(self, p: Tensor) -> Tensor:
            assert p.grad is not None
            flat = p.grad.flatten().cpu()
            return (flat / flat.norm()).view_as(p)

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class PoisonsTheMomentum(Planted):
    """An overflow reaches the momentum before the step is skipped, and stays there.

    The thread of DeepSpeed#8609 could not be read. This is the bug of #8432, of the same family.
    """

    report = "DeepSpeed#8609"
    codes = {"nonfinite-state", "unmoved"}

    class Buggy(MuonAndAdam):
        def begin(self, p: Tensor, group: Mapping[str, Any]) -> None:
            super().begin(p, group)
            self.state[p]["momentum"].fill_(torch.nan)  # an earlier step overflowed

        def apply(self, updates: Mapping[Tensor, Tensor]) -> None:
            finite = {p: u for p, u in updates.items() if bool(torch.isfinite(u).all())}
            super().apply(finite)

        def orthogonal(self, momentum: Tensor) -> Tensor:
            return momentum  # an SVD of NaN raises an error

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class MissesAName(Planted):
    """The pattern w[123] does not match the fused weight w13, which falls to AdamW."""

    report = "torchtitan#4812"
    codes = {"unexpected-kind"}
    expect = {"w13 | w2": "orthogonal"}

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13 = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)
            self.w2 = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.w13
            return (torch.sigmoid(x @ gate) * (x @ up)) @ self.w2

    class Buggy(MuonAndAdam):
        def uses_muon(self, name: str, p: Tensor) -> bool:
            return re.fullmatch("w[123]", name) is not None

    def make_model(self) -> nn.Module:
        return self.FeedForward()

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class FlattensTheModel(Planted):
    """FSDP1 flattens all parameters to one vector, so no parameter is a matrix for Muon."""

    report = "verl-SpeCo#91"
    codes = {"unexpected-kind"}
    expect = {"flat": "orthogonal"}

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(2 * WIDTH * WIDTH) / WIDTH**0.5)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.flat.view(2, WIDTH, WIDTH)
            return torch.tanh(x @ first) @ second

    def make_model(self) -> nn.Module:
        return self.Flat()


class SkipsTheMatrices(Planted):
    """Matrices are passed to Muon, and Muon does not update them."""

    report = "LlamaFactory#8041"
    codes = {"unmoved", "state-unchanged"}

    class Buggy(MuonAndAdam):
        def muon(self, p: Tensor) -> Tensor:
            return torch.zeros_like(p)

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class KeepsTheExperts(Planted):
    """The float32 copies of the experts are updated, and never copied back to the model.

    The thread could not be read: after training, the experts were identical to their
    initialization. The cause is ours.
    """

    report = "Megatron-LM#6228"
    codes = {"unmoved"}
    expect = {"experts.*.weight": "orthogonal"}

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(WIDTH, WIDTH)
            self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.dense(x))
            return sum([expert(x) for expert in self.experts], torch.zeros_like(x))

    class Buggy(MuonAndAdam):
        def apply(self, updates: Mapping[Tensor, Tensor]) -> None:
            for p, update in updates.items():
                master = self.state[p].setdefault("master", p.detach().clone())
                master.sub_(update)
                if "experts" not in self.names[p]:
                    p.copy_(master)

    def make_model(self) -> nn.Module:
        return self.Experts()

    def make_optimizer(self, named: Any) -> Optimizer:
        return self.Buggy(named)


class CountsASyntheticStep(Planted):
    """A step with zero gradients makes the state, and counts: the first real step is too small."""

    report = "Megatron-LM#5974"
    codes = {"unexpected-size"}
    expect = {"*": Expected("sign", rms=1e-3)}

    def make_optimizer(self, named: Any) -> Optimizer:
        params = [p for _, p in named]
        optimizer = torch.optim.Adam(params, lr=0.0)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        return optimizer


class NeverUsesABranch(Planted):
    """A branch starts at zero and is switched off by the config, so its weight cannot move."""

    report = "auto_e2e#199"
    codes = {"zero-gradient"}
    expect = {"history.weight | main.weight": "sign"}

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Linear(WIDTH, WIDTH)
            self.history = nn.Linear(WIDTH, WIDTH, bias=False)
            nn.init.zeros_(self.history.weight)

        def forward(self, x: Tensor) -> Tensor:
            no_history = torch.zeros_like(x)
            return self.main(x) + self.history(no_history)

    def make_model(self) -> nn.Module:
        return self.Branches()

    def make_optimizer(self, named: Any) -> Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=1e-3)


PLANTED: list[type[Planted]] = [
    DecidesByPlaceholders,
    SkipsNewtonSchulz,
    RunsInEachMicroBatch,
    DropsTheGroups,
    ClipsTheUpdate,
    OffloadsFlatPieces,
    PoisonsTheMomentum,
    MissesAName,
    FlattensTheModel,
    SkipsTheMatrices,
    KeepsTheExperts,
    CountsASyntheticStep,
    NeverUsesABranch,
]
