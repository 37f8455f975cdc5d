"""An audit of an update finds each planted bug by its code, and nothing in sound optimizers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.audit.planted_updates import PLANTED, ROWS, WIDTH, Layers, Nothing, Planted
from tests.helpers import at_once
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Chain,
    ClipNorm,
    Guard,
    Modular,
    Orthogonalize,
    Partition,
    attach,
    named,
    release,
)
from torchzero_clip.__main__ import main
from torchzero_clip.audit import CODES, Expected, UpdateReport, assert_update, audit_update
from torchzero_clip.audit.update import fingerprints, step_sums, update_audit
from torchzero_clip.audit.update.fingerprints import fingerprint
from torchzero_clip.audit.update.kinds import KINDS
from torchzero_clip.audit.update.step_watch import StepWatch
from torchzero_clip.audit.update.update_report import HEADER, pattern_of


def codes(report: UpdateReport) -> set[str]:
    return {finding.code for finding in report.findings}


def said(report: UpdateReport) -> str:
    return "\n".join(map(str, report.findings))


def backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    x = torch.randn(ROWS, WIDTH, generator=generator).to(p.dtype)
    model(x).float().square().mean().backward()


def audited(model: nn.Module, optimizer: Any, **options: Any) -> UpdateReport:
    """Audit one training step."""
    with audit_update(model, optimizer, **options) as report:
        backward(model)
        optimizer.step()
    return report


def layers(dtype: torch.dtype = torch.float32) -> Layers:
    torch.manual_seed(0)
    return Layers().to(dtype)


# ---------------------------------------------------------------------- thirteen bugs


def test_there_are_thirteen() -> None:
    assert len({kind.report for kind in PLANTED}) == 13


@at_once("kind", [*PLANTED, Nothing])
def test_a_planted_bug_is_found_by_its_code(kind: type[Planted]) -> None:
    training = kind()
    with audit_update(training.model, training.optimizer, expect=kind.expect) as report:
        training.train()
    assert codes(report) == kind.codes, f"{kind.report}\n{report}"


# ---------------------------------------------------------------------- sound optimizers


def muon_of_torch(params: Any, lr: float) -> Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon since 2.9")
    optimizer: Optimizer = torch.optim.Muon(params, lr=lr)
    return optimizer


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [muon_of_torch(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]


def ours(*links: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: Modular(model.named_parameters(), *links)


def matrices_and_rest_of(model: nn.Module) -> Optimizer:
    kinds = {name: "matrices" if p.dim() > 1 else "rest" for name, p in model.named_parameters()}
    muon = Chain(EMA(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
    parts = Partition({"matrices": muon, "rest": Adam()}, kinds)
    return Modular(model.named_parameters(), ClipNorm(1.0, dim="global"), parts, LR(1e-2))


def clipped(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    attach(optimizer, ClipNorm(1.0, dim="global"))
    return optimizer


SOUND: dict[str, Callable[[nn.Module], Any]] = {
    "torch AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "torch AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "torch SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    "torch Muon": muon,
    "torch RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "torch Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "ours Adam": ours(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)),
    "ours Lion": ours(named("lion", lr=1e-3)),
    "ours Muon": matrices_and_rest_of,
    "ours attached": clipped,
}


class Several:
    """Several optimizers that step together."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@at_once(
    "name, dtype", [(name, dtype) for name in SOUND for dtype in (torch.float32, torch.bfloat16)]
)
def test_a_sound_optimizer_has_no_finding(name: str, dtype: torch.dtype) -> None:
    model = layers(dtype)
    made = SOUND[name](model)
    optimizers = made if isinstance(made, list) else [made]
    together = Several(optimizers)
    for seed in range(3):
        with audit_update(model, optimizers) as report:
            backward(model, seed)
            together.step()
        assert report.findings == [], f"{name}, {dtype}, step {seed}\n{report}"


KINDS_OF: dict[str, dict[str, str]] = {
    "torch AdamW": {"*": "sign"},
    "torch AdamW fused": {"*": "sign"},
    "torch SGD": {"*": "gradient"},
    "torch Muon": {"*.weight": "orthogonal", "*.bias": "sign"},
    "ours Lion": {"*": "sign"},
    "ours Muon": {"*.weight": "orthogonal", "*.bias": "sign"},
}


@at_once("name", KINDS_OF)
def test_the_kind_of_a_step_is_known(name: str) -> None:
    model = layers()
    made = SOUND[name](model)
    optimizers = made if isinstance(made, list) else [made]
    with audit_update(model, optimizers, expect=KINDS_OF[name]) as report:
        backward(model)
        Several(optimizers).step()
    assert report.findings == [], str(report)
    assert "not judged" not in str(report)


def test_muon_is_orthogonal_in_each_step_and_adam_is_a_sign_in_the_first_alone() -> None:
    model = layers()
    optimizers = muon(model)
    for seed in range(4):
        with audit_update(model, optimizers, expect={"*.weight": "orthogonal"}) as report:
            backward(model, seed)
            Several(optimizers).step()
        assert report.findings == [], str(report)
        kinds = {row.kind for row in report.rows if row.pattern.endswith("bias")}
        assert kinds == ({"sign"} if seed == 0 else {"other"})


def test_weight_decay_is_taken_out_before_a_step_is_judged() -> None:
    for optimizer, kind in (
        (torch.optim.AdamW, "sign"),
        (torch.optim.SGD, "gradient"),
        (torch.optim.Adagrad, "sign"),
    ):
        model = layers()
        made = optimizer(model.parameters(), lr=1e-3, weight_decay=3.0)
        (weights, *_) = audited(model, made).rows
        assert weights.kind == kind


def test_bfloat16_weights_whose_step_is_rounded_are_not_judged() -> None:
    model = layers(torch.bfloat16)
    report = audited(model, torch.optim.AdamW(model.parameters(), lr=1e-4), expect={"*": "sign"})
    assert codes(report) <= {"rounding"}
    (note,) = report.notes
    assert note.endswith("expected the kind 'sign', not judged: rounding")
    assert "Not checked:" in str(report)
    assert {row.kind for row in report.rows} == {"not judged: rounding", "still"}
    model = layers(torch.bfloat16)
    report = audited(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert {row.kind for row in report.rows} == {"gradient"}


# ---------------------------------------------------------------------- each code


def found(model: nn.Module, optimizer: Any, **options: Any) -> set[str]:
    return codes(audited(model, optimizer, **options))


def test_every_code_has_a_test() -> None:
    """`replicas-differ` is tested in tests/processes/test_audited.py."""
    here = Path(__file__).read_text() + Path(__file__).with_name("planted_updates.py").read_text()
    missing = [code for code in CODES if f'"{code}"' not in here and code != "replicas-differ"]
    assert missing == []


def test_half_of_the_parameters_were_never_passed() -> None:
    model = layers()
    report = audited(model, torch.optim.AdamW(model.first.parameters()))
    (finding,) = report.findings
    assert finding.code == "not-in-optimizer"
    assert finding.names == ("second.weight", "second.bias")
    assert str(finding) == (
        "not-in-optimizer: second.weight, second.bias: no group of the optimizer has this parameter"
    )
    half = torch.optim.SGD(model.first.parameters())
    assert found(model, half, expect={"second.*": "still"}) == set()


def test_parameters_in_two_optimizers() -> None:
    model = layers()
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.first.parameters())]
    with audit_update(model, twice) as report:
        backward(model)
        Several(twice).step()
    assert codes(report) == {"in-two-groups"}
    assert report.findings[0].names == ("first.weight", "first.bias")


def test_an_optimizer_of_replaced_parameters() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.second = nn.Linear(WIDTH, WIDTH)
    report = audited(model, optimizer)
    assert codes(report) == {"not-in-model", "not-in-optimizer"}
    assert "parameter 2 (16 x 16) of group 0" in said(report)


def test_steps_are_counted() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with audit_update(model, optimizer) as report:
        for seed in range(2):
            backward(model, seed)
            optimizer.step()
    assert codes(report) == {"several-steps"}
    with audit_update(model, optimizer, steps=2, expect={"*": "sign"}) as report:
        for seed in range(2):
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
    assert codes(report) == {"unexpected-kind"}, str(report)
    assert {row.kind for row in report.rows} == {"gradient"}
    with audit_update(model, optimizer) as report:
        backward(model)
    assert codes(report) == {"no-step"}
    assert "call optimizer.step() inside the block" in said(report)


@at_once("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_says_so(fused: bool) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for overflows in (True, False):
        optimizer.zero_grad()
        with audit_update(model, optimizer, expect={"*": "sign"}) as report:
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert codes(report) == ({"no-step"} if overflows else set()), str(report)
        assert ("so a GradScaler skips the step" in said(report)) == overflows
    (weights, *_) = report.rows
    assert weights.gradient is not None
    assert weights.gradient[1] < 1, "the gradient is shown without the scale"


def test_accumulation_is_one_step() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit_update(model, optimizer, expect={"*": "gradient"}) as report:
        for seed in range(4):
            backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    assert report.findings == [], str(report)


def test_a_parameter_without_a_gradient() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit_update(model, optimizer) as report:
        backward(model)
        model.first.bias.grad = None
        optimizer.step()
    assert codes(report) == {"no-gradient"}


class Moves(Optimizer):
    """Moves each parameter as a function of the parameter says."""

    def __init__(self, params: Any, move: Callable[[Tensor], None]) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0})
        self.move = move

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.move(p)


def shrink(p: Tensor) -> None:
    p.mul_(0.99)


def test_a_parameter_that_moves_without_a_gradient() -> None:
    model = layers()
    optimizer = Moves(model.parameters(), shrink)
    with audit_update(model, optimizer) as report:
        optimizer.step()
    assert codes(report) == {"moved-without-gradient"}
    assert "as weight decay is" in said(report)
    model = layers()
    model.first.requires_grad_(False)
    with audit_update(model, torch.optim.SGD(model.second.parameters(), lr=0.1)) as report:
        backward(model)
        with torch.no_grad():
            model.first.weight.add_(1)
        model.second.weight.grad = None
        model.second.bias.grad = None
    assert codes(report) == {"moved-without-gradient", "no-step"}


def test_only_weight_decay() -> None:
    model = layers()
    optimizer = Moves(model.parameters(), shrink)
    assert found(model, optimizer) == {"decay-only"}
    assert found(model, optimizer, expect={"*": "decay"}) == set()


def test_updates_that_are_lost_in_rounding() -> None:
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        model = layers(torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        report = audited(model, optimizer(model.parameters(), lr=1e-6))
        assert codes(report) == {"rounding"}, str(report)
        assert "at lr=1e-06 is below half a ULP of all weights in bfloat16" in said(report)


def test_a_learning_rate_of_zero() -> None:
    model = layers()
    report = audited(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    assert codes(report) == {"unmoved"}
    assert "because the learning rate of its group is 0" in said(report)


def test_an_optimizer_that_only_fills_its_state_in_the_first_step() -> None:
    model = layers()
    optimizer = Modular(model.named_parameters(), named("adopt"))
    report = audited(model, optimizer)
    assert codes(report) == {"unmoved"}
    assert "only fill their state in the first step" in said(report)
    assert found(model, optimizer) == set()


def test_gradients_of_a_closure() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 0.0

    with audit_update(model, optimizer, expect={"*": "gradient"}) as report:
        optimizer.step(closure)
    assert report.findings == [], str(report)


@at_once("sparse", [False, True])
def test_an_embedding_of_which_few_rows_have_a_gradient(sparse: bool) -> None:
    model = nn.Embedding(50, 8, sparse=sparse)
    optimizer = torch.optim.SparseAdam([*model.parameters()], lr=1e-3)
    if not sparse:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # type: ignore[assignment]
    expect = {"*": Expected("sign", rms=1e-3)}
    with audit_update(model, optimizer, expect=expect) as report:
        model(torch.tensor([1, 2, 3, 3])).square().sum().backward()
        optimizer.step()
    assert report.findings == [], str(report)
    (row,) = report.rows
    assert row.moved == (3 / 50, 3 / 50)


def test_elements_whose_gradient_is_as_small_as_eps_do_not_change_the_kind() -> None:
    """The bias of the keys of attention has no gradient but rounding errors."""
    torch.manual_seed(0)
    model = nn.Module()
    model.bias = nn.Parameter(torch.randn(3 * WIDTH))
    for optimizer in (torch.optim.Adam(model.parameters()), ours(Adam(), LR(1e-3))(model)):
        with audit_update(model, optimizer, expect={"bias": "sign"}) as report:
            model.bias.grad = torch.randn(3 * WIDTH)
            model.bias.grad[:WIDTH] *= 1e-9
            optimizer.step()
        assert report.findings == [], str(report)


class Odd(nn.Module):
    """Parameters of unusual shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.complex = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))
        self.number = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.tied = self.scalar


def test_parameters_of_unusual_shapes_and_dtypes() -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    with audit_update(model, optimizer) as report:
        (model.scalar * model.complex.abs().square().sum() + model.empty.sum()).backward()
        optimizer.step()
    assert report.findings == [], str(report)
    assert {row.pattern: row.kind for row in report.rows} == {
        "scalar": "not judged: fewer than 8 elements",
        "complex": "sign",
    }


def test_a_wrapped_optimizer_and_a_compiled_model() -> None:
    model = layers()

    class Wrapper:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    assert found(model, wrapper) == set()
    compiled = torch.compile(layers(), backend="eager")
    optimizer = Modular(compiled.named_parameters(), ClipNorm(1.0), Adam(), LR(1e-3), compile=True)
    for _ in range(3):
        optimizer.zero_grad()
        assert found(compiled, optimizer) == set()
    handle = attach(torch.optim.SGD(model.parameters()), ClipNorm(1.0))
    with pytest.raises(TypeError, match="pass the optimizer that the handle was attached to"):
        audited(model, handle)


def test_gradients_that_are_released_in_the_backward_pass() -> None:
    model = layers()
    optimizer = release(model, Adam(), LR(1e-3))
    assert found(model, optimizer) == {"moved-outside-step"}


def test_values_that_are_not_finite() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with audit_update(model, optimizer) as report:
        backward(model)
        assert model.first.weight.grad is not None
        model.first.weight.grad[0, 0] = torch.nan
        optimizer.step()
    assert codes(report) == {"nonfinite-weight", "nonfinite-state"}
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["rows"][0]["ratio"] == [None, None]
    model = layers()
    guarded = Modular(model.named_parameters(), Guard(), Adam(), LR(1e-3))
    with audit_update(model, guarded) as report:
        backward(model)
        assert model.first.weight.grad is not None
        model.first.weight.grad[0, 0] = torch.nan
        guarded.step()
    assert "nonfinite-gradient" in codes(report)


def test_a_step_that_is_larger_than_the_weight() -> None:
    model = layers()
    assert found(model, torch.optim.SGD(model.parameters(), lr=1e3)) == {"large-step"}
    model = layers()
    fine = torch.optim.SGD(model.parameters(), lr=1e3)
    assert found(model, fine, max_ratio=1e9) == set()


def test_the_ratio_of_a_step_to_a_weight_of_zero_is_a_dash() -> None:
    """The bias moves, so a ratio of 0 would be misleading. `large-step` skips it."""
    model = layers()
    nn.init.zeros_(model.first.bias)
    report = audited(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert codes(report) == set()
    by_name = {name: row for row in report.rows for name in row.names}
    zero = by_name["first.bias"]
    assert zero.names == ("first.bias",)
    assert zero.moved == (1, 1)
    assert zero.ratio is None
    ratio_column = HEADER.index("ratio")
    assert zero.cells()[ratio_column] == "-"
    ratio = by_name["first.weight"].ratio
    assert ratio is not None
    assert ratio[0] > 0
    assert report.as_dict()["rows"][report.rows.index(zero)]["ratio"] is None
    alike = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    nn.init.zeros_(alike[0].bias)
    rows = audited(alike, torch.optim.Adam(alike.parameters(), lr=1e-2)).rows
    assert [row.names for row in rows] == [
        ("0.weight", "1.weight"),
        ("0.bias",),
        ("1.bias",),
    ]


def test_parameters_that_are_expected_to_be_still_and_move() -> None:
    """A move is certain, even if the kind of the step cannot be judged."""
    model = nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = audited(model, optimizer, expect={"bias": "still"})
    assert codes(report) == {"unexpected-kind"}
    assert report.findings[0].names == ("bias",)
    assert report.notes == []
    model = nn.Linear(WIDTH, WIDTH)
    with audit_update(
        model, torch.optim.SGD([model.weight], lr=0.1), expect={"bias": "still"}
    ) as report:
        backward(model)
        with torch.no_grad():
            model.bias.add_(1)
    assert codes(report) == {"moved-outside-step", "no-step"}
    assert report.of("moved-outside-step")[0].names == ("bias",)


def test_weights_that_change_outside_the_step() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit_update(model, optimizer) as report:
        backward(model)
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        optimizer.step()
    assert codes(report) == {"moved-outside-step"}
    assert report.findings[0].names == ("first.weight",)


def test_expectations_that_are_wrong_or_match_nothing() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = audited(model, optimizer, expect={"*.weight": Expected("orthogonal", rms=1.0)})
    assert codes(report) == {"unexpected-kind", "unexpected-size"}
    assert (
        "unexpected-kind: first.weight, second.weight: expected the kind 'orthogonal', found "
        "'gradient': along the negative gradient" in [*map(str, report.findings)]
    )
    with pytest.raises(ValueError, match=r"'\*.wieght' in expect matches no parameter"):
        audited(model, optimizer, expect={"*.wieght": "sign"})
    with pytest.raises(ValueError, match=r"got 'signs': did you mean 'sign'\?"):
        audited(model, optimizer, expect={"*": "signs"})
    model.first.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'first.\*' in expect matches only parameters that req"):
        audited(model, optimizer, expect={"first.*": "sign"})
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, or a list"):
        audited(model, model)


def test_the_first_pattern_wins() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert (
        found(model, optimizer, expect={"*.bias | first.*": "gradient", "*": "gradient"}) == set()
    )
    expect = {"first.*": "gradient", "*": "sign"}
    report = audited(model, optimizer, expect=expect)
    assert {name for finding in report.findings for name in finding.names} == {
        "second.weight",
        "second.bias",
    }


# ---------------------------------------------------------------------- what it leaves behind


@at_once(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool],
)
def test_a_fingerprint_changes_with_every_element_and_with_their_order(dtype: torch.dtype) -> None:
    values = torch.arange(10).remainder(2 if dtype == torch.bool else 10).to(dtype)
    changed = [values.flip(0), values.roll(1)]
    for i in range(len(values)):
        changed.append(values.clone())
        changed[-1][i] = not values[i] if dtype == torch.bool else values[i] + 1
    prints = [fingerprint(t) for t in (values, *changed)]
    assert len(set(prints[:1] + prints[3:])) == len(prints) - 2
    assert fingerprint(values.clone()) == prints[0]
    assert prints[0] not in prints[1:]
    assert fingerprint(values[:0]) == 0


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for piece in (2**22, 7):
        monkeypatch.setattr(step_sums, "PIECE", piece)
        monkeypatch.setattr(fingerprints, "PIECE", piece)
        model = layers()
        texts.append(str(audited(model, torch.optim.AdamW(model.parameters()))))
        texts.append(str(fingerprint(model.first.weight)))
    assert texts[:2] == texts[2:]


def state_of(model: nn.Module, optimizer: Optimizer) -> list[int]:
    """Fingerprints of everything that a step may change."""
    tensors: list[Tensor] = [*model.parameters()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        tensors += [t for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return [fingerprint(t) for t in tensors]


@at_once("name", [name for name in SOUND if name != "torch Muon"])
def test_a_run_with_audits_is_bitwise_a_run_without(name: str) -> None:
    runs = []
    for audits in (False, True):
        model = layers()
        optimizer = SOUND[name](model)
        for seed in range(3):
            if audits:
                with audit_update(model, optimizer):
                    backward(model, seed)
                    optimizer.step()
            else:
                backward(model, seed)
                optimizer.step()
        runs.append((state_of(model, optimizer), torch.get_rng_state().tolist()))
    assert runs[0] == runs[1]


def hooks(optimizer: Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    model = layers()

    def fail(p: Tensor) -> None:
        raise FloatingPointError("as planted")

    optimizer = Moves(model.parameters(), fail)
    before = copy.deepcopy(model.state_dict())
    reports = []

    def train() -> None:
        with audit_update(model, optimizer) as report:
            reports.append(report)
            backward(model)
            optimizer.step()

    with pytest.raises(FloatingPointError):
        train()
    (report,) = reports
    assert hooks(optimizer) == 0
    assert not report.ended
    assert report.rows == []
    assert "raised an error" in str(report)
    assert optimizer.state == {}
    assert all([torch.equal(before[key], value) for key, value in model.state_dict().items()])


def test_an_audit_that_cannot_begin_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(watch: StepWatch) -> None:
        assert len(watch.weights) == 4
        raise MemoryError("as planted")

    monkeypatch.setattr(StepWatch, "state_prints", fail)
    with pytest.raises(MemoryError):
        audited(model, optimizer)
    assert hooks(optimizer) == 0
    assert "copies 4.35 kB" in capsys.readouterr().err


def test_no_copy_outlives_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watches = []

    class Kept(StepWatch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watches.append(self)

    monkeypatch.setattr(update_audit, "StepWatch", Kept)
    with audit_update(model, optimizer):
        backward(model)
        optimizer.step()
        (watch,) = watches
        assert len(watch.weights) == len(watch.gradients) == 4
    assert watch.weights == {}
    assert watch.gradients == {}
    assert hooks(optimizer) == 0


def test_the_bytes_are_printed_before_they_are_spent(capsys: pytest.CaptureFixture[str]) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = 4 * sum([p.numel() for p in model.parameters()])
    with audit_update(model, optimizer) as report:
        line = capsys.readouterr().err
        optimizer.step()
    assert line == (
        "audit_update: copies 4.35 kB: 2.18 kB of weights now, and 2.18 kB of gradients in the "
        "step\n"
    )
    assert report.copied == 2 * size
    with audit_update(model, optimizer, quiet=True):
        optimizer.step()
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------- matrices


class Fused(nn.Module):
    """One parameter for queries, keys and values, one for a convolution, one for experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.conv = nn.Parameter(torch.randn(8, 4, 2, 2))
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH))


def orthogonalized(p: Tensor, stack: Callable[[Tensor], Tensor]) -> None:
    assert p.grad is not None
    left, _, right = torch.linalg.svd(stack(p.grad), full_matrices=False)
    step = left @ right
    if len(step) == 8 and step.dim() == 3:
        step[-1] *= 2  # each head is orthogonal, but the whole parameter is not
    p.sub_(step.reshape(p.shape), alpha=1e-2)


def test_a_stack_a_convolution_and_a_fused_parameter() -> None:
    torch.manual_seed(0)
    model = Fused()

    def heads(t: Tensor) -> Tensor:
        return t.unflatten(0, (8, -1))

    stacks = {
        id(model.qkv): heads,
        id(model.conv): lambda t: t.flatten(1),
        id(model.experts): lambda t: t,
    }
    optimizer = Moves(model.parameters(), lambda p: orthogonalized(p, stacks[id(p)]))
    for matrices, kind in ((None, "other"), ({"qkv": heads}, "orthogonal")):
        with audit_update(model, optimizer, matrices=matrices) as report:
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        kinds = {row.pattern: row.kind for row in report.rows}
        assert kinds == {"qkv": kind, "conv": "orthogonal", "experts": "orthogonal"}
    with pytest.raises(ValueError, match="'q' in matrices matches no parameter"):
        audited(model, optimizer, matrices={"q": heads})


def spectrum(shape: tuple[int, int], smallest: float, rank: int) -> Tensor:
    """Return a matrix of this rank whose singular values decay from 1 to the smallest."""
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.logspace(0, math.log10(smallest), len(values))
    values[rank:] = 0
    return left @ torch.diag(values) @ right


@at_once("shape", [(64, 64), (128, 64), (64, 256)])
def test_the_iteration_of_muon_is_orthogonal_and_random_matrices_are_not(
    shape: tuple[int, int],
) -> None:
    gradients = {"random": torch.randn(shape), "half": spectrum(shape, 0.5, 32)}
    gradients |= {f"{x:g}": spectrum(shape, x, 64) for x in (0.1, 1e-2, 1e-4)}
    for name, gradient in gradients.items():
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(shape))
        model.weight.grad = gradient.clone()
        muon = muon_of_torch(model.parameters(), lr=1e-2)
        with audit_update(model, muon, expect={"*": "orthogonal"}) as report:
            muon.step()
        assert report.findings == [], f"{name}\n{report}"
        noise = torch.randn(shape)
        moves = Moves(model.parameters(), lambda p, noise=noise: p.sub_(1e-2 * noise))
        with audit_update(model, moves) as report:
            moves.step()
        (row,) = report.rows
        assert row.kind == "other", name


def test_a_step_of_muon_with_a_steep_spectrum_is_no_finding() -> None:
    """Five iterations do not make its singular values equal."""
    for rank, finds in ((256, False), (8, False), (1, True)):
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(256, 256))
        left, values, right = torch.linalg.svd(torch.randn(256, 256))
        values = torch.arange(1, 257) ** -1.5
        values[rank:] = 0
        model.weight.grad = left @ torch.diag(values) @ right
        muon = muon_of_torch(model.parameters(), lr=1e-2)
        with audit_update(model, muon, expect={"*": "orthogonal"}) as report:
            muon.step()
        assert bool(report.findings) == finds, f"{rank}\n{report}"
        if not finds:
            words = "weight: expected the kind 'orthogonal', but the singular values are unclear"
            assert report.notes == [words]


def test_a_block_inside_autocast_is_judged_in_float32() -> None:
    model = layers()
    optimizers = muon(model)
    expect = {"*.weight": "orthogonal"}
    with torch.autocast("cpu", torch.bfloat16), audit_update(model, optimizers, expect=expect) as r:
        backward(model)
        Several(optimizers).step()
    assert r.findings == [], str(r)


def test_steps_whose_singular_values_say_nothing_are_not_judged() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.narrow = nn.Parameter(torch.randn(4, 64))
    model.large = nn.Parameter(torch.randn(16, 16))
    model.line = nn.Parameter(torch.randn(16, 16))

    def move(p: Tensor) -> None:
        step = torch.randn_like(p)
        if p is model.line:
            step = torch.outer(step[0], step[1])
        p.sub_(step, alpha=1e-3)

    optimizer = Moves(model.parameters(), move)
    with audit_update(model, optimizer, largest_matrix=8, expect={"*": "orthogonal"}) as report:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert report.findings == []
    assert report.notes == [
        f"{name}: expected the kind 'orthogonal', not judged: {reason}"
        for name, reason in (
            ("narrow", "one side of the matrix is more than 4 times longer than the other"),
            ("large, line", "a matrix with sides above largest_matrix=8"),
        )
    ]
    with audit_update(model, optimizer) as report:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    kinds = {row.pattern: row.kind for row in report.rows}
    assert kinds["large"] == "other"
    assert kinds["line"] == "not judged: a step of low rank"


# ---------------------------------------------------------------------- report and command


def test_a_report_is_text_and_plain_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    report = audited(model, torch.optim.AdamW(model.parameters()))
    lines = str(report).splitlines()
    assert lines[0] == "1 step of AdamW, 6 parameters:"
    assert lines[1].split()[:3] == ["parameter", "shape", "group"]
    assert lines[2].split()[:6] == ["[0-2].weight", "(3)", "16", "x", "16", "0"]
    assert lines[2].split()[-2:] == ["sign", "changed"]
    assert lines[-1] == "No findings."
    data = json.loads(json.dumps(report.as_dict()))
    assert data["rows"][0]["names"] == ["0.weight", "1.weight", "2.weight"]
    assert data["findings"] == []
    assert report.of("unmoved") == []


@at_once(
    "names, pattern",
    [
        (["a.0.b"], "a.0.b"),
        (["a.0.b", "a.1.b"], "a.[0-1].b"),
        (["a.2.b.0", "a.2.b.3", "a.4.b.0"], "a.[2,4].b.[0,3]"),
        ([f"{i * i}.w13" for i in range(9)], "*.w13"),
        (["weight"], "weight"),
    ],
)
def test_names_that_differ_in_numbers_share_a_pattern(names: list[str], pattern: str) -> None:
    assert pattern_of(names) == pattern


def test_a_finding_about_many_parameters_counts_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    report = audited(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    assert said(report) == (
        "not-in-optimizer: 10 parameters: [1-5].weight (5), [1-5].bias (5): no group of the "
        "optimizer has this parameter"
    )


def test_the_helper_for_tests_raises_with_the_report() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with assert_update(model, optimizer, expect={"*": "gradient"}):
        backward(model)
        optimizer.step()

    def train() -> None:
        with assert_update(model, optimizer, expect={"*": "orthogonal"}):
            backward(model)
            optimizer.step()

    with pytest.raises(AssertionError, match=r"(?s)1 step of SGD.*unexpected-kind: first"):
        train()


TRAINING = """
import torch

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model[0].parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step

def wrong():
    return 1
"""


def test_the_command_prints_the_report_and_ends_with_what_was_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(TRAINING)
    with pytest.raises(SystemExit) as ended:
        main(["audit-update", f"{file}:make"])
    assert ended.value.code == 1
    assert "not-in-optimizer: 1.weight, 1.bias" in capsys.readouterr().out
    main(["audit-update", f"{file}:make", "--expect", "1.*=still", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["findings"] == []
    assert [row["kind"] for row in data["rows"]] == ["sign", "sign", "still", "still"]
    main(["audit-update", f"{file}:make", "--expect", "1.*=still", "--after", "3"])
    assert "other" in capsys.readouterr().out
    for arguments, words in (
        ([f"{file}:make", "--expect", "2.*=sign"], "'2.*' in expect matches no parameter"),
        ([f"{file}:make", "--expect", "sign"], "--expect must have the form PATTERN=KIND"),
        ([f"{file}:wrong"], "must return three things"),
        ([f"{file}:none"], "has no attribute 'none'"),
        ([f"{tmp_path}/none.py:make"], "No such file"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["audit-update", *arguments])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_the_page_lists_every_code_and_every_kind() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "audit_update.md").read_text()
    assert [code for code in CODES if f"| `{code}` |" not in page] == []
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "audit_update.md").read_text()
    (script,) = [block for block in page.split("```python\n") if block.startswith("# train.py")]
    file = tmp_path / "train.py"
    file.write_text(script.partition("```")[0])
    command = '$ python -m torchzero_clip audit-update train.py:make --expect "*=sign"\n'
    shown = page.partition(command)[2].partition("```")[0]
    main(["audit-update", f"{file}:make", "--expect", "*=sign"])
    assert capsys.readouterr().out == shown
