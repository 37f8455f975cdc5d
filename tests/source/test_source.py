"""A chain as a file of plain torch: it does what the plain engine does, step by step."""

from __future__ import annotations

import copy
import functools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.write_your_own import SlowBoost
from tests.helpers import (
    ROOT,
    SHAPES,
    at_once,
    close,
    equal,
    gradients,
    network,
    parameters,
    saved,
    set_grads,
    some,
)
from tests.modules.rows.descent import heads
from tests.modules.rows.row import with_lr
from tests.source.files import written
from tests.table import GOOD, Case, other_values
from torchzero_clip import (
    ADOPT,
    CAME,
    EMA,
    LR,
    Accumulate,
    Adadelta,
    Adafactor,
    Adam,
    AutoClip,
    Cautious,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueGrowth,
    DAdaptAdam,
    Group,
    Guard,
    Live,
    Lookahead,
    Masked,
    Modular,
    Momentum,
    NanToNum,
    NormRule,
    Orthogonalize,
    OrthoGrad,
    Partition,
    Prodigy,
    QKClip,
    RMSprop,
    Scale,
    ScheduleFree,
    Scope,
    SkipLarge,
    SkipSpike,
    StableAdam,
    State,
    TensorList,
    Transform,
    Watch,
    WeightAverage,
    WeightDecay,
    WeightEMA,
    ZClip,
    named,
)
from torchzero_clip.core import Bucket
from torchzero_clip.published import NAMES
from torchzero_clip.source import SourceError

HEADLINE = ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)
FOLDERS = ("clipping", "descent", "adaptive")
AVERAGES = ("WeightEMA", "WeightAverage", "Lookahead", "ScheduleFree")
OTHERS = ("Chain", "Identity", "Masked", "Partition", *AVERAGES)
REFUSED = (OrthoGrad, Adafactor, CAME, Prodigy, DAdaptAdam, Watch)
TAKEN = [
    case
    for case in GOOD
    if case.cls.__module__.split(".")[2] in FOLDERS or case.cls.__name__ in OTHERS
    if case.cls not in REFUSED
]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
STEPS = 12
# in float32 other quick tests compare files of the headline chain and of averages
both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=str
)


def sampled(cases: list[Any], every: int) -> list[Any]:
    """One of so many; the others behind `slow`."""
    marks = [() if i % every == 0 else (pytest.mark.slow,) for i in range(len(cases))]
    pairs = zip(cases, marks, strict=True)
    return [pytest.param(case, marks=mark, id=str(case)) for case, mark in pairs]


def groups(params: dict[str, Any], own: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The parameters in two groups, which share a layer; the second has live values of its own."""
    rows = list(params.items())
    cut = min(4, len(rows) - 1)
    return [{"params": rows[:cut]}, {"params": rows[cut:], **(own or {})}]


def compare(
    chain: list[Transform],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    own: dict[str, Any] | None = None,
) -> None:
    """Steps of the plain engine and of the file; half-way each takes the other's state dict."""
    ours, theirs = parameters(shapes, dtype=dtype), parameters(shapes, dtype=dtype)
    matrices = [name for name, p in ours.items() if p.dim() > 1]
    vectors = [name for name in ours if name not in matrices]

    def library() -> Modular:
        return Modular(groups(ours, own), *chain, fused=False)

    a = library()
    inner = [link.transform for top in a.links for link in top.walk()]
    asked = [rule.max_logits for rule in inner if isinstance(rule, QKClip)]
    given = {"max_logits": asked[0]} if asked else {}
    cls = written(a.to_source())
    b = cls(groups(theirs, own), **given)
    for step in range(STEPS):
        if step == STEPS // 2:
            states = saved(a.state_dict()), saved(b.state_dict())
            a, b = library(), cls(groups(theirs, own), **given)
            a.load_state_dict(states[1]), b.load_state_dict(states[0])
        grads: dict[str, Tensor | None] = {**gradients(shapes, step, dtype, (1, 0.1, 10)[step % 3])}
        without = {3: ["embed.bias"], 4: ["embed.bias"], 6: vectors, 7: matrices}.get(step, [])
        grads |= {name: None for name in without if name in grads}
        set_grads(ours, {name: None if g is None else g.clone() for name, g in grads.items()})
        set_grads(theirs, {name: None if g is None else g.clone() for name, g in grads.items()})
        a.step(), b.step()
        for name, p in ours.items():
            largest = max(p.abs().max().item(), 1.0)
            away = (p - theirs[name]).abs().max().item() / largest
            assert away <= TOLERANCE[dtype], f"step {step}, {name}: {away}"


# ---------------------------------------------------------------------- the same steps


def test_a_rule_that_reads_the_numbers_of_elements() -> None:
    compare([Momentum(), Cautious(), LR(0.05)], SHAPES, torch.float64)


def test_a_rule_that_reads_names_in_a_step_is_refused() -> None:
    class Named(Transform):
        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            for bucket in buckets:
                assert all(bucket.names)
            return buckets

    with pytest.raises(SourceError, match="uses the names of parameters in each step"):
        Modular(list(parameters(SHAPES).items()), Named(), LR(0.1)).to_source()


@pytest.mark.parametrize("case", sampled(TAKEN, 8))
@both_dtypes
def test_steps_and_state_dicts_both_ways(case: Case, dtype: torch.dtype) -> None:
    compare(with_lr(case.make(), 0.05), case.shapes, dtype)


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() >= 2


def label(name: str, p: Tensor) -> str:
    return "matrix" if is_matrix(name, p) else "other"


def random_chain(seed: int) -> list[Transform]:
    """A few rules of the table, some for a part of the parameters, then descent."""
    rng = random.Random(seed)
    plain = [
        case for case in TAKEN if case.cls.__module__.split(".")[2] not in ("flow", "averages")
    ]
    clips = [case for case in plain if case.cls.__module__.split(".")[2] != "descent"]
    links: list[Transform] = [rng.choice(clips).make() for _ in range(rng.randint(0, 2))]
    links += [rng.choice(plain).make()]
    learns = [link for link in links if type(link).__module__.split(".")[2] == "adaptive"]
    links = learns[:1] or links  # norms that another rule made equal deviate by rounding alone
    kind = rng.randrange(4)
    if kind == 0:
        links[0] = Masked(links[0], is_matrix)
    if kind == 1:
        links[-1] = Partition({"matrix": links[-1], "other": Scale(0.5)}, label)
    if kind == 2:
        links = [Masked(Chain(*links), is_matrix)]
    links += [rng.choice([Adam, Momentum, EMA])()]
    links += [WeightDecay(0.1)] * rng.randint(0, 1)
    has_lr = any("lr" in inner.live for link in links for inner in link.walk())
    return links if has_lr else [*links, LR(0.02)]


@pytest.mark.parametrize("seed", sampled(list(range(100)), 10))
@both_dtypes
def test_random_chains(seed: int, dtype: torch.dtype) -> None:
    compare(random_chain(seed), SHAPES, dtype)


INSIDE = [
    case
    for case in TAKEN
    if case.cls.__module__.split(".")[2] != "flow" and case.scope in ("layer", "group", "global")
]


@pytest.mark.parametrize("case", sampled(INSIDE, 16))
def test_what_is_measured_together_lies_inside_the_mask(case: Case) -> None:
    """Also where some groups, or all, have no parameter there in a step."""
    compare([Masked(case.make(), is_matrix), LR(0.05)], case.shapes, torch.float64)


@pytest.mark.parametrize("case", sampled(INSIDE, 40))
def test_what_is_measured_together_lies_inside_the_branch(case: Case) -> None:
    parts = Partition({"other": case.make(), "matrix": Scale(0.5)}, label)
    compare([parts, LR(0.05)], case.shapes, torch.float64)


def is_first(name: str, p: Tensor) -> bool:
    return name.startswith("embed")


@pytest.mark.parametrize(
    "rule",
    [
        ClipNorm(0.3, dim="layer"),
        pytest.param(ZClip(warmup_steps=2), marks=pytest.mark.slow),
        Momentum(),
        QKClip(heads),
    ],
    ids=repr,
)
def test_a_mask_inside_a_mask(rule: Transform) -> None:
    inner = Chain(Scale(0.5), Masked(rule, is_first), EMA())
    compare([Masked(inner, is_matrix), LR(0.05)], SHAPES, torch.float64)


@pytest.mark.parametrize("name", some(["adagc", "adamw", "lamb", "mars_adamw", "lars"], one_in=3))
def test_groups_have_live_values_of_their_own(name: str) -> None:
    """As they stand in the group in every step."""
    chain = named(name)
    own = {
        key: value
        for link in Modular([torch.zeros(1)], chain).links
        for key, value in other_values(link.transform).items()
    }
    compare([chain], SHAPES, torch.float64, own)


@pytest.mark.parametrize("name", some(["adamw", "lamb", "mars_adamw", "adagc"], one_in=3))
def test_a_file_does_the_same_steps_where_torch_copies_tensors_one_by_one(name, monkeypatch):
    """As versions before 2.12 do, which have no `_foreach_clone`."""
    monkeypatch.delattr(torch, "_foreach_clone")
    compare([named(name)], SHAPES, torch.float64)


def test_a_live_value_that_changes_is_read_in_the_next_step() -> None:
    ours, theirs = parameters(), parameters()
    a = Modular(list(ours.items()), *HEADLINE)
    b = written(a.to_source())(list(theirs.items()))
    for step in range(6):
        for opt in (a, b):
            opt.param_groups[0].update(lr=0.1 / (1 + step), max_norm=0.5 + step, betas=(0.8, 0.9))
        set_grads(ours, gradients(seed=step)), set_grads(theirs, gradients(seed=step))
        a.step(), b.step()
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


def test_half_precision_keeps_its_state_in_float32() -> None:
    """Also through a checkpoint, which torch would cast to the parameter's dtype."""
    ours, theirs = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    a = Modular(list(ours.items()), *HEADLINE, fused=False)
    b = written(a.to_source())(list(theirs.items()))
    for step in range(8):
        if step == 4:
            b.load_state_dict(copy.deepcopy(b.state_dict()))
        set_grads(ours, gradients(seed=step, dtype=torch.bfloat16))
        set_grads(theirs, gradients(seed=step, dtype=torch.bfloat16))
        a.step(), b.step()
    state = b.state[theirs["embed.weight"]]
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert equal([p.detach() for p in ours.values()], [p.detach() for p in theirs.values()])


class Anchored(Transform):
    """u ← u + pull · (w - w₀), w₀ the parameter as it began"""

    pull: Live[float] = 0.1

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"anchor": param.detach().clone()}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.add_(group["params"], alpha=group["pull"]).add_(
            state["anchor"], alpha=-group["pull"]
        )


def test_state_that_begins_at_the_parameter_does_so_in_the_file() -> None:
    compare([Adam(), Anchored(), LR(1e-2)], SHAPES, torch.float64)


AVERAGED = [
    WeightEMA(0.5),
    WeightAverage(),
    Lookahead(2),
    ScheduleFree(),
    Masked(WeightEMA(), is_matrix),
    Masked(ScheduleFree(0.5, rectified=True), is_matrix),
    Chain(Lookahead(2), WeightAverage(), Masked(WeightEMA(), is_matrix)),
]
ROUNDED = [pytest.param(link, torch.bfloat16, marks=pytest.mark.slow) for link in AVERAGED[:-1]]


@pytest.mark.parametrize(
    ("link", "dtype"),
    [
        *[(link, torch.float32) for link in AVERAGED],
        *ROUNDED,
        (AVERAGED[-1], torch.bfloat16),
    ],
    ids=str,
)
def test_the_file_has_the_weights_for_evaluation(link: Transform, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    chain = Adam((0.0, 0.999)), LR(1e-2), link
    a = Modular(list(ours.items()), *chain, fused=False)
    b = written(a.to_source())(list(theirs.items()))
    for step in range(5):
        set_grads(ours, gradients(seed=step, dtype=dtype))
        set_grads(theirs, gradients(seed=step, dtype=dtype))
        a.step(), b.step()
    before = {name: p.detach().clone() for name, p in theirs.items()}
    with a.averaged():
        for name, p in ours.items():
            found = b.averaged_weights(theirs[name])
            torch.testing.assert_close(found.to(dtype), p.detach(), rtol=2e-6, atol=1e-7)
            assert not found.requires_grad
    torch.testing.assert_close({n: p.detach() for n, p in theirs.items()}, before, rtol=0, atol=0)


class Between(WeightEMA):
    """Weights for evaluation half-way between the average and a share of the weights."""

    share: Live[float] = 0.5

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        ema = state["ema"]
        return ema - (ema - param.to(ema.dtype) * group["share"]) / 2


def test_a_formula_of_weights_is_written_as_it_is() -> None:
    ours, theirs = parameters(), parameters()
    a = Modular(list(ours.items()), LR(0.1), Between(0.5), fused=False)
    source = a.to_source()
    assert 'weights = ema - (ema - p.to(ema.dtype) * group["share"]) / 2' in source
    b = written(source)(list(theirs.items()))
    for step in range(3):
        set_grads(ours, gradients(seed=step)), set_grads(theirs, gradients(seed=step))
        a.step(), b.step()
    with a.averaged():
        for name, p in ours.items():
            torch.testing.assert_close(b.averaged_weights(theirs[name]), p.detach())


@pytest.mark.parametrize("name", some(["schedule_free_radam", "schedule_free_adamw"], one_in=2))
def test_numbers_that_a_group_keeps_are_kept_by_the_file(name: str) -> None:
    own = {"r": 1.0, "lr": 0.02}
    compare([named(name)], SHAPES, torch.float64, own | {"betas": (0.8, 0.99)})
    masked = Adam(), LR(0.1), Masked(ScheduleFree(), is_matrix)
    compare(masked, SHAPES, torch.float64, own | {"beta": 0.8})


class Rising(NormRule):
    """u ← u · min(1, d / ‖u‖), d grows by the rate in every step"""

    dim: Scope = None

    def init_group(self) -> dict[str, float]:
        return {"d": 0.5}

    def advance_group(self, numbers: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
        return {"d": numbers["d"] + group["lr"]}

    @property
    def reads(self) -> tuple[str, ...]:
        return ("lr",)

    def limit(self, norm: Tensor, state: Any, group: Group) -> Tensor:
        return group["d"]


@pytest.mark.parametrize("dim", some([None, "layer", "group", "global"], one_in=2))
def test_a_limit_may_be_a_number_that_the_group_keeps(dim: Scope) -> None:
    compare([Rising(dim=dim), LR(0.1)], SHAPES, torch.float64, {"lr": 0.02})


class Halved(Transform):
    """u ← u / 2ᵗ, t the steps of the model"""

    def init_model(self) -> dict[str, float]:
        return {"t": 0.0}

    def advance_model(self, numbers: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
        return {"t": numbers["t"] + 1}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.div_(2 ** group["t"])


def test_numbers_that_the_model_keeps_are_a_source_error() -> None:
    with pytest.raises(SourceError, match=r"Halved cannot .* a scalar for the whole model"):
        Modular([torch.zeros(2)], Halved(), LR(0.1)).to_source()


class Doubtful(WeightEMA):
    """Weights for evaluation that are more than sums and products."""

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return torch.where(state["ema"] > 0, state["ema"], param)


def test_weights_that_are_more_than_a_sum_are_a_source_error() -> None:
    with pytest.raises(SourceError, match=r"Doubtful cannot .* method averaged\(\) may use only"):
        Modular([torch.zeros(2)], LR(0.1), Doubtful()).to_source()


def test_a_rule_of_ones_own_is_written_from_its_update() -> None:
    compare([SlowBoost(gain=1.5), Adam(), LR(1e-2)], SHAPES, torch.float64)
    text = Modular([torch.zeros(1)], SlowBoost()).to_source()
    assert "# SlowBoost: m ← β m + (1 - β) u, at first u; u ← u + gain · m" in text
    assert 'torch._foreach_lerp_(slow, grads, 1 - group["beta"])' in text


class OfWindow(NormRule):
    """u ← u · min(1, 2 · m / ‖u‖), m the largest of the last three norms"""

    dim: Scope = None

    def init_unit(self) -> dict[str, Tensor]:
        return {"norms": torch.full((3,), torch.inf)}

    def limit(self, norm: Tensor, state: Any, group: Group) -> Tensor:
        return 2 * state["norms"].amax(dim=-1)

    def observe(self, norm: Tensor, clipped: Tensor, state: Any, group: Group) -> Any:
        return {"norms": torch.cat([state["norms"][..., 1:], norm.unsqueeze(-1)], dim=-1)}


@pytest.mark.parametrize("dim", some(["global", None], one_in=2))
def test_a_window_of_norms_is_written_whatever_its_slice_is_called(dim: Scope) -> None:
    compare([OfWindow(dim=dim), LR(0.1)], SHAPES, torch.float64)


@pytest.mark.parametrize("rule", [ClipNorm(0.3, target="grad"), ClipNormGrowth(target="grad")])
def test_a_link_that_rewrites_the_gradients_does_so_here_too(rule: Transform) -> None:
    ours, theirs = parameters(), parameters()
    a = Modular(list(ours.items()), rule, LR(0.1), fused=False)
    b = written(a.to_source())(list(theirs.items()))
    for step in range(4):
        set_grads(ours, gradients(seed=step)), set_grads(theirs, gradients(seed=step))
        a.step(), b.step()
        for name, p in ours.items():
            torch.testing.assert_close(p.grad, theirs[name].grad)
    torch.testing.assert_close(ours, theirs)


def compiled(chain: Any, backend: str) -> None:
    """Some compiled steps, beside those of the same file as they are."""
    ours, theirs = parameters(), parameters()
    cls = written(Modular(list(ours.items()), *chain).to_source())
    a, b = cls(list(ours.items())), cls(list(theirs.items()))
    step = torch.compile(b.step, backend=backend)
    for i in range(4):
        set_grads(ours, gradients(seed=i)), set_grads(theirs, gradients(seed=i))
        a.step(), step()
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


def test_a_name_that_is_no_identifier_becomes_an_argument_too() -> None:
    names = ("a-b", "a b", "2nd", "class")
    chain = [ClipNorm(1.0 + i, name=name) for i, name in enumerate(names)]
    a = Modular([torch.zeros(1)], *chain, LR(0.1))
    (group,) = written(a.to_source())([torch.zeros(1)], a_b_max_norm_2=9.0).param_groups
    values = [group[f"{name}/max_norm"] for name in names]
    assert values == [1.0, 9.0, 3.0, 4.0]


@pytest.mark.parametrize("guard", [Guard(), SkipLarge(1.0), SkipSpike()], ids=repr)
def test_a_guard_is_refused_because_it_skips_steps(guard: Transform) -> None:
    with pytest.raises(SourceError, match=r"cannot be exported .*: the transform can skip a step"):
        Modular([torch.zeros(2)], guard, LR(0.1)).to_source()


def test_it_works_under_torch_compile() -> None:
    compiled(HEADLINE, "eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "chain",
    [
        HEADLINE,
        (ZClip(), Adam(), LR(1e-3)),
        (ClipNormGrowth(), Adam()),
        (Masked(ClipNorm(0.5, dim="layer"), is_matrix), Adam(), LR(1e-3)),
        (Partition({"matrix": Momentum(), "other": Adam()}, label), LR(1e-3)),
    ],
    ids=["headline", "spikes", "growth", "layers inside", "parts"],
)
def test_it_works_under_every_backend_of_torch_compile(chain: Any, backend: str) -> None:
    compiled(chain, backend)


# ---------------------------------------------------------------------- the file


def test_the_headline_chain_is_eighty_lines_without_an_import_of_ours() -> None:
    text = Modular([torch.zeros(1)], *HEADLINE).to_source("ClippedAdam")
    assert len(text.splitlines()) <= 80
    assert "import torchzero_clip" not in text
    assert "from torchzero_clip" not in text
    assert "class ClippedAdam(torch.optim.Optimizer):" in text
    assert "ClipNorm(max_norm=1.0, dim='global'), Adam(), LR(lr=0.001)" in text
    assert "MIT License" in text
    assert "# ClipNorm: u ← u · min(1, max_norm / ‖u‖)" in text


def test_the_docs_show_the_headline_file_whole() -> None:
    text = Modular([torch.zeros(1)], *HEADLINE).to_source("ClippedAdam")
    assert text in (ROOT / "docs" / "source.md").read_text()


def write_all(folder: Path, chains: dict[str, Any]) -> None:
    for name, chain in chains.items():
        opt = Modular(list(parameters().items()), *chain)
        (folder / f"{name}.py").write_text(opt.to_source(), encoding="utf-8")


def formatted(folder: Path) -> None:
    """As ruff formats, for lines of 88 and of 100."""
    said(folder, ["ruff", "format", "--isolated", "--diff"])
    said(folder, ["ruff", "format", "--isolated", "--diff", "--line-length=100"])


def accepted(folder: Path) -> None:
    """By ruff, as formatted and by our own rules, and by mypy."""
    formatted(folder)
    for arguments in (
        ["ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "D,E501"],
        ["mypy", "--strict", "--config-file=", "--no-error-summary"],
    ):
        said(folder, arguments)


def said(folder: Path, arguments: list[str]) -> None:
    """What a tool says of a folder, which is nothing."""
    found = subprocess.run(
        [sys.executable, "-m", *arguments, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
def test_ruff_and_mypy_accept_files(tmp_path: Path) -> None:
    masked = Masked(ScheduleFree(0.5, rectified=True), is_matrix)
    chains: dict[str, Any] = {
        "headline": HEADLINE,
        "averages": [LR(0.1), ScheduleFree(), WeightEMA(), Masked(WeightAverage(), is_matrix)],
        "masked": [Adam(), LR(0.1), masked],
    }
    for name in ("lamb", "adagc", "stable_adamw"):
        chains[name] = [named(name)]
    for i in range(0, 100, 20):
        chains[f"random{i}"] = random_chain(i)
    write_all(tmp_path, chains)
    accepted(tmp_path)


@pytest.mark.slow
def test_ruff_and_mypy_accept_all_files(tmp_path: Path) -> None:
    chains: dict[str, Any] = {}
    for i, case in enumerate(TAKEN):
        chains[f"case{i}"] = with_lr(case.make(), 0.05)
    for i in range(100):
        chains[f"random{i}"] = random_chain(i)
    write_all(tmp_path, chains)
    accepted(tmp_path)


# ---------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    "rule", [Guard(), Accumulate(2), Orthogonalize(), *[cls() for cls in REFUSED]], ids=repr
)
def test_links_that_end_steps_or_ask_for_more_are_refused(rule: Transform) -> None:
    with pytest.raises(SourceError, match="cannot be exported as plain PyTorch code"):
        Modular(list(parameters({"a.weight": (3, 4)}).items()), *with_lr(rule, 0.1)).to_source()


def test_two_links_that_ask_a_function_of_the_model_are_refused() -> None:
    chain = [QKClip(lambda name, p: None), QKClip(lambda name, p: None)]
    with pytest.raises(
        SourceError, match="two transforms have a function as their argument max_logits"
    ):
        Modular(list(parameters().items()), LR(0.1), *chain).to_source()


def test_a_mask_that_captures_more_than_plain_values_is_refused() -> None:
    model = network()
    with pytest.raises(SourceError, match="uses 'model', which must be a number"):
        Modular(model.parameters(), Masked(Scale(2.0), lambda name, p: p is model)).to_source()


def test_the_name_must_be_one_of_a_class() -> None:
    with pytest.raises(ValueError, match="name must be the name of a class, got 'my class'"):
        Modular([torch.zeros(1)], LR(0.1)).to_source("my class")


@pytest.mark.parametrize("name", ["torch", "Tensor", "list"])
def test_the_name_must_not_be_used_in_the_file(name: str) -> None:
    with pytest.raises(ValueError, match=f"the file uses '{name}' for something else"):
        Modular([torch.zeros(1)], *HEADLINE).to_source(name)


def test_a_value_that_the_chain_decides_by_must_stay_of_its_kind() -> None:
    """A branch that was not taken is not in the file; the file says so."""
    opt = written(Modular([torch.zeros(1)], Momentum()).to_source())([torch.zeros(1)])
    opt.param_groups[0]["dampening"] = 0.5
    with pytest.raises(ValueError, match="write a new file for another dampening"):
        opt.step()
    opt = written(Modular([torch.zeros(1)], ClipNormGrowth()).to_source())([torch.zeros(1)])
    opt.param_groups[0]["add"] = 0.5
    with pytest.raises(ValueError, match="write a new file for another add"):
        opt.step()


@at_once(
    "rule, key",
    [
        (ADOPT(), "clip_power"),
        (ZClip(), "max_norm"),
        (ClipNormByEMA(), "max_ema_growth"),
        *[(ClipNormGrowth(), key) for key in ("mul", "min_value", "max_decay")],
        *[(ClipValueGrowth(), key) for key in ("mul", "min_value", "max_decay")],
    ],
)
def test_a_value_that_may_be_none_is_not_given_up_in_a_file(rule: Transform, key: str) -> None:
    opt = written(Modular([torch.zeros(1)], rule, LR(0.1)).to_source())([torch.zeros(1)])
    opt.param_groups[0][key] = None
    with pytest.raises(ValueError, match=f"write a new file for another {key}"):
        opt.step()


@at_once(
    "rule",
    [Adadelta, Adam, RMSprop, StableAdam, NanToNum, ADOPT, lambda: AutoClip("percentile")],
)
def test_a_tensor_is_as_good_as_a_number_in_a_file(rule: Any) -> None:
    make = written(Modular([torch.zeros(3)], *with_lr(rule(), 0.05)).to_source())
    ends = []
    for kind in (lambda x: x, torch.tensor):
        p = torch.nn.Parameter(torch.ones(3))
        opt = make([p])
        for key, x in [*opt.param_groups[0].items()]:
            if isinstance(x, (float, tuple)):
                opt.param_groups[0][key] = tuple(map(kind, x)) if isinstance(x, tuple) else kind(x)
        for step in range(3):
            p.grad = gradients({"p": (3,)}, step)["p"]
            opt.step()
        ends.append(p.detach())
    close(ends[:1], ends[1:], 1e-5)


def test_lines_with_long_keys_are_formatted(tmp_path: Path) -> None:
    long = "all_matrices_of_the_model_but_its_embeddings"
    chains = {
        "shared": [ClipNormByEMA(dim="layer"), LR(0.1)],
        "optional": [Chain(ClipNormGrowth(), name=long), LR(0.1)],
        "state": [Masked(ClipNormGrowth(add=1.0), is_matrix, name=long), LR(0.1)],
        "value": [Masked(ClipNorm(1.0), is_matrix, name=f"{long}_or_none"), ClipNorm(1.0), LR(0.1)],
        "power": [ADOPT(), LR(0.1)],
    }
    write_all(tmp_path, chains)
    formatted(tmp_path)


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", some(["lamb", "adamw", "lars", "lion", "adagc"], one_in=4))
def test_the_command_line_writes_named_chains(name: str, capsys: Any) -> None:
    from torchzero_clip.__main__ import main

    main(["--source", name])
    text = capsys.readouterr().out
    assert text == Modular([torch.zeros(1)], NAMES[name]()).to_source()


def test_the_command_line_says_what_it_takes(capsys: Any) -> None:
    from torchzero_clip.__main__ import main

    for arguments, words in (
        (["--source"], "--source needs the name of an optimizer"),
        (["--source", "ClipNorm"], "--source needs the name of an optimizer"),
        (["--source", "muon"], "cannot be exported as plain PyTorch code"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert words in capsys.readouterr().err


# ---------------------------------------------------------------------- what torch asks


CHECKED = {
    "headline": HEADLINE,
    "momentum": (ClipNormGrowth(), Momentum(), LR(1e-2)),
    "spikes": (ZClip(warmup_steps=3), Adam(), WeightDecay(0.01), LR(1e-3)),
}
each = pytest.mark.parametrize("chain", CHECKED)


@functools.cache
def checked(chain: str) -> Any:
    """The class of a chain that several tests check."""
    return written(Modular(list(parameters().items()), *CHECKED[chain]).to_source())


def trained(chain: str, steps: int = 4) -> tuple[Any, Any, dict[str, Any]]:
    """The class of a chain, an optimizer after some steps, and its parameters."""
    params = parameters()
    cls = checked(chain)
    opt = cls(params.values())
    for step in range(steps):
        set_grads(params, gradients(seed=step))
        opt.step()
    return cls, opt, params


@each
def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(chain: str) -> None:
    _, opt, params = trained(chain)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = torch.stack([p.square().sum() for p in params.values()]).sum()
        loss.backward()
        return loss

    first = opt.step(closure)
    assert first.requires_grad
    for _ in range(20):
        last = opt.step(closure)
    assert last < first


@each
def test_copies_and_pickles_go_on_as_the_original(chain: str) -> None:
    _, opt, params = trained(chain)
    twin, others = copy.deepcopy((opt, params))
    for step in range(4, 8):
        set_grads(params, gradients(seed=step)), set_grads(others, gradients(seed=step))
        opt.step(), twin.step()
    assert equal([p.detach() for p in params.values()], [p.detach() for p in others.values()])
    assert equal(opt.state_dict(), twin.state_dict())


@each
def test_a_saved_state_dict_loads_with_weights_only_and_leaves_the_loaded_one_alone(
    chain: str,
) -> None:
    cls, opt, params = trained(chain)
    given = saved(opt.state_dict())
    kept = copy.deepcopy(given)
    others = copy.deepcopy(params)
    other = cls(others.values())
    other.load_state_dict(given)
    assert equal(other.state_dict(), opt.state_dict())
    for step in range(4, 8):
        set_grads(params, gradients(seed=step)), set_grads(others, gradients(seed=step))
        opt.step(), other.step()
    assert equal([p.detach() for p in params.values()], [p.detach() for p in others.values()])
    assert equal(given, kept)


@each
def test_schedulers_hooks_later_groups_and_steps_without_gradients(chain: str) -> None:
    _, opt, params = trained(chain)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    lr, late = opt.param_groups[0]["lr"], torch.nn.Parameter(torch.ones(3))
    opt.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(3)
    opt.step(), scheduler.step()
    assert opt.param_groups[0]["lr"] == lr * 0.5
    assert (late < 1).all()
    assert calls == ["before", "after"]
    before = [p.detach().clone() for p in params.values()]
    opt.zero_grad(), opt.step()
    assert equal(before, [p.detach() for p in params.values()])


def test_a_rule_that_returns_masks_is_refused() -> None:
    class Finite(Transform):
        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            return u.isfinite()

    opt = Modular([torch.nn.Parameter(torch.ones(2))], Finite(), LR(0.1))
    with pytest.raises(SourceError, match=r"Finite cannot .* returns masks or integers"):
        opt.to_source()
