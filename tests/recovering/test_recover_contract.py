"""Recover: when it goes back, when it refuses, what it waits for, and what it takes along."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers import at_once, seed
from tests.recovering.runs import Loader, Run, batches, differences, net
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    Guard,
    Modular,
    Recorder,
    Recover,
    SkipLarge,
    WeightEMA,
    attach,
    release,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin
from torchzero_clip.recovering.judging import Look, judged, limit_of

BACK = "ignore:Recover. step:UserWarning"


class Quick:
    """One weight, and a Recover that looks at every second step."""

    def __init__(self, *links: Any, parts: Any = (), **given: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.w = self.model.weight
        self.opt = Modular(self.model.parameters(), *(links or (Guard(), LR(0.1))))
        options = {"every": 4, "check": 2, "window": 4, **given}
        self.recover = Recover(self.opt, self.model, parts=parts, **options)

    def go(self, *losses: float | None, grad: float = 0.01) -> Any:
        """Steps with these losses; what the last one gave back."""
        back = None
        for loss in losses:
            self.w.grad = torch.full_like(self.w, grad)
            self.opt.step()
            back = self.recover.step(loss)
        return back


def test_one_bad_step_is_let_be_and_more_than_half_of_a_look_are_not() -> None:
    quick = Quick(check=4, every=4)
    quick.go(1.0, 1.1, 0.9, 1.0)
    assert quick.go(1.0, 99.0, 1.1, 99.0) is None
    with pytest.warns(UserWarning, match="of the last 4 steps, 3 had a loss above"):
        back = quick.go(99.0, 1.0, 99.0, 99.0)
    assert (back.step, back.to) == (12, 4)  # behind step 8 two of four were bad: no snapshot


def test_skipped_steps_are_bad_steps() -> None:
    quick = Quick(SkipLarge(1.0), LR(0.1))
    quick.go(1.0, 1.0)
    with pytest.warns(UserWarning, match="of the last 2 steps, 2 were skipped"):
        assert quick.go(1.0, 1.0, grad=5.0).to == 2


def test_a_loss_that_is_no_number_in_a_step_that_happened_goes_back_at_once() -> None:
    quick = Quick(LR(0.1), check=4)
    quick.go(1.0, 1.0, 1.0, 1.0)
    with pytest.warns(UserWarning, match="NaN or infinite in a step that no guard skipped"):
        assert quick.go(1.0, math.nan, 1.0, 1.0).to == 4


@pytest.mark.filterwarnings(BACK)
@at_once("loss", [1.0, None])
def test_weights_that_are_no_numbers_go_back_at_the_next_look_or_snapshot(
    loss: float | None,
) -> None:
    quick = Quick(Adam(), LR(0.1))
    quick.go(*[loss] * 3)
    before = quick.w.clone()
    quick.opt.state[quick.w]["Adam/exp_avg"].fill_(math.inf)
    back = quick.go(loss)
    assert (back.to, back.why) == (2, "weights or state contain NaN or infinity")
    assert quick.opt.state[quick.w]["Adam/exp_avg"].isfinite().all()
    assert quick.w.ne(before).all()


@pytest.mark.filterwarnings(BACK)
def test_no_snapshot_is_taken_where_a_guard_has_skipped_a_step_since_the_look_before() -> None:
    quick = Quick(SkipLarge(1.0), LR(0.1))
    quick.go(1.0, 1.0, 1.0)
    quick.go(1.0, grad=5.0)  # a snapshot is due behind step 4
    quick.go(1.0, 1.0)
    back = quick.go(math.nan, math.nan, grad=5.0)
    assert back.to == 6


@pytest.mark.filterwarnings(BACK)
def test_it_refuses_once_it_has_gone_back_so_often_and_goes_back_further_before() -> None:
    quick = Quick(most=4)
    quick.go(*[1.0, 1.1] * 3)
    backs = [quick.go(99.0, 99.0).to for _ in range(4)]
    assert backs == [4, 4, 2, 2]
    with pytest.raises(RuntimeError, match=r"step 4: .* and 4 rollbacks did not help: check"):
        quick.go(99.0, 99.0)


@pytest.mark.filterwarnings(BACK)
def test_a_new_snapshot_ends_the_row() -> None:
    quick = Quick(most=1)
    for _ in range(3):
        quick.go(*[1.0, 1.1] * 4)
        assert quick.go(99.0, 99.0)


def test_a_run_that_begins_badly_is_refused() -> None:
    with pytest.raises(RuntimeError, match="and no snapshot exists yet: check the first batches"):
        Quick(LR(0.1)).go(1.0, math.inf)


@pytest.mark.filterwarnings(BACK)
def test_a_smaller_rate_holds_for_so_many_steps_and_schedules_do_not_see_it() -> None:
    quick = Quick(slower=(0.5, 3))
    rates: list[float] = []
    quick.opt.register_step_post_hook(lambda *_: None)
    quick.go(1.0, 1.0)
    start = quick.w.item()
    quick.go(math.nan, math.nan, grad=math.nan)
    for _ in range(4):
        before = quick.w.item()
        quick.go(1.0, grad=0.01)
        rates.append((before - quick.w.item()) / 0.01)
        assert quick.opt.param_groups[0]["lr"] == 0.1
    assert start != quick.w.item()
    assert rates == pytest.approx([0.05, 0.05, 0.05, 0.1], rel=1e-3)


@at_once("compile", [False, True])
def test_the_host_waits_for_nothing_but_at_a_look(compile: bool) -> None:
    with fake_cuda():
        params = twin(list(nn.Linear(4, 4).parameters()))
        model = nn.ParameterList(params)
        opt = Modular(params, Guard(), ClipNorm(1.0, dim="global"), Adam(), LR(0.1))
        loss = torch.zeros((), device="cuda")
        recover = Recover(opt, model, every=8, check=8)
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        recover.step(loss)
        with Ledger() as ledger:
            for _ in range(6):
                opt.step()
                recover.step(loss)
        assert ledger.of("read", "copy") == []


def test_a_look_is_one_read_of_the_host() -> None:
    quick, reads = Quick(LR(0.1), every=400), list[Tensor]()
    quick.go(1.0, 1.0)
    before = Tensor.tolist

    def tolist(t: Tensor) -> Any:
        reads.append(t)
        return before(t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", tolist)
        patch.setattr(Tensor, "item", None)
        patch.setattr(Tensor, "__bool__", None)
        quick.go(1.0, 1.0, 1.0, 1.0)
    assert len(reads) == 2


# ---------------------------------------------------------------------- what comes along


@pytest.mark.filterwarnings(BACK)
def test_a_recorder_goes_back_and_notes_it_in_the_next_row(tmp_path: Any) -> None:
    run = Run("adamw")
    recorder = Recorder(run.opt)
    recover = run.recover(recorder)
    run.train(recover.batches(iter(batches(80))), recover)
    history = recorder.history()
    assert history["step"] == list(range(1, recover.now.count + 1))
    marked = {
        name: [x for x in history[f"recover/{name}"] if x == x] for name in ("back", "left_out")
    }
    gone = recover.events[-1]
    assert marked == {"back": [gone.step - gone.to], "left_out": [gone.left_out]}
    assert history["recover/back"].index(gone.step - gone.to) == gone.to
    recorder.to_csv(tmp_path / "run.csv")
    assert "recover/back" in (tmp_path / "run.csv").read_text().splitlines()[0]


@pytest.mark.filterwarnings(BACK)
def test_random_numbers_of_python_numpy_and_torch_come_again() -> None:
    quick = Quick()

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    quick.go(1.0, 1.0)
    first = drawn()
    quick.go(math.nan, math.nan, grad=math.nan)
    assert drawn() == first


@pytest.mark.filterwarnings(BACK)
def test_state_that_has_begun_since_is_gone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    opt = Modular(model.parameters(), Adam(), LR(0.1))
    recover = Recover(opt, model, every=2, check=2)
    for step in range(4):
        if step == 2:
            model[1].requires_grad_(True)
        opt.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        opt.step()
        recover.step(math.nan if step == 3 else 1.0)
    assert [p in opt.state for p in model.parameters()] == [True, True, False, False]


@pytest.mark.filterwarnings(BACK)
@at_once("after", [None, WeightEMA(0.9)])
def test_an_optimizer_with_a_chain_attached_goes_back_with_all_of_it(after: Any) -> None:
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = attach(opt, Guard(), ClipNorm(1.0), **({} if after is None else {"after": after}))
    recover = Recover(handle, model, every=2, check=2)

    def state() -> list[Any]:
        return [model.state_dict(), opt.state_dict(), handle.state_dict()]

    def steps(loss: float) -> None:
        for _ in range(2):
            opt.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            opt.step()
            recover.step(loss)

    steps(1.0)
    before = [{k: v.clone() for k, v in state()[0].items()}, repr(state()[1:])]
    steps(math.nan)
    assert differences(before, [state()[0], repr(state()[1:])]) == []


@pytest.mark.filterwarnings(BACK)
def test_released_gradients_go_back_as_others_do() -> None:
    model = net()
    opt = release(model, ClipNorm(1.0, dim="global"), Adam(), LR(0.1), limit="last step")
    recover = Recover(opt, model, every=2, check=2)

    def steps(loss: float) -> Tensor:
        for _ in range(2):
            out = model(torch.randn(4, 6)).square().mean()
            out.backward()
            opt.step()
            recover.step(loss)
        return out.detach()

    steps(1.0)
    steps(math.nan)
    first = steps(2.0)
    recover._ring[:] = recover._ring[:1]
    recover._go_back("again")
    assert steps(2.0).equal(first)


class Extra(nn.Linear):
    """A module that saves more than tensors."""

    scale = 1.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


@pytest.mark.filterwarnings(BACK)
def test_what_modules_save_besides_comes_back() -> None:
    model = Extra(1, 1)
    opt = Modular(model.parameters(), LR(0.1))
    recover = Recover(opt, model, every=1, check=1)
    recover.step(1.0)
    model.scale = 2.0
    recover.step(math.nan)
    assert model.scale == 1.0


class BySum:
    """Steps of four batches each, whose gradients are summed by hand, in `.grad` or elsewhere."""

    def __init__(self, where: str, **options: Any) -> None:
        seed()
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.params = list(self.model.parameters())
        if where != "grad":
            for p in self.params:
                p.main_grad = torch.zeros_like(p)
        self.where = where
        self.opt = Modular(self.params, Adam(), LR(0.01), grad=where, **options)
        self.count = 0

    def train(self, given: Any, recover: Recover | None = None) -> None:
        for x, y in given:
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            for p in self.params if self.where != "grad" else ():
                p.main_grad += p.grad
                p.grad = None
            self.count += 1
            if self.count % 4 == 0:
                self.opt.step()
                self.opt.zero_grad()
            if recover is not None:
                recover.step(loss)
                self.count = recover.now.count


@pytest.mark.filterwarnings(BACK)
@at_once("every", [4, 6, 2])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"compile": True}])
@pytest.mark.parametrize("where", ["grad", "main_grad"])
def test_gradients_of_batches_that_are_undone_are_dropped_and_others_stay(
    where: str, options: dict[str, Any], every: int
) -> None:
    """A snapshot may be of a moment in the middle of a sum."""
    bad = range(27, 31)
    run = BySum(where, **options)
    recover = Recover(run.opt, run.model, every=every, check=2, window=4)
    run.train(recover.batches(iter(batches(48, bad=bad))), recover)
    assert {back.to for back in recover.events} <= {24, 26}
    assert recover.events
    plain = BySum(where, **options)
    given = enumerate(batches(48, bad=bad), 1)
    plain.train([batch for i, batch in given if i not in recover.now.left_out])
    assert differences(plain.model.state_dict(), run.model.state_dict()) == []
    assert [p.grad is None for p in plain.params] == [p.grad is None for p in run.params]


@pytest.mark.filterwarnings(BACK)
def test_gradients_that_the_optimizer_has_used_take_no_memory() -> None:
    quick = Quick(Adam(), LR(0.1))
    quick.go(1.0, 1.0)
    state = sum([t.nbytes for t in quick.opt.state[quick.w].values()])
    chain = [t for t in quick.opt.param_groups[0]["chain"].values() if isinstance(t, Tensor)]
    assert quick.recover.nbytes == quick.w.nbytes + state + sum([t.nbytes for t in chain])


@pytest.mark.filterwarnings(BACK)
def test_a_buffer_that_was_none_is_none_again_and_a_new_one_is_gone() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("extra", None)
    opt = Modular(model.parameters(), LR(0.1))
    recover = Recover(opt, model, every=1, check=1)
    recover.step(1.0)
    mean = model.running_mean
    model.extra = torch.full((3,), math.nan)
    model.register_buffer("later", torch.ones(3))
    model.running_mean = torch.full((3,), math.nan)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert recover.step(math.nan)
    assert model.extra is None
    assert not hasattr(model, "later")
    assert model.running_mean is mean
    assert mean.isfinite().all()


@pytest.mark.filterwarnings(BACK)
@at_once("options", [{}, {"fused": False}, {"compile": True}])
def test_a_loss_that_is_no_number_in_a_step_that_a_scaler_skipped_is_one_bad_step(
    options: dict[str, Any],
) -> None:
    model = nn.Linear(2, 2)
    opt = Modular(model.parameters(), Adam(), LR(0.1), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    recover = Recover(opt, model, every=4, check=4, window=4, parts=[scaler])

    def steps(*factors: float) -> Any:
        for factor in factors:
            opt.zero_grad()
            loss = factor * model(torch.ones(3, 2)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            back = recover.step(loss)
        return back

    steps(1.0, 1.0, 1.0, 1.0)
    assert steps(1.0, math.nan, 1.0, 1.0) is None
    assert all([p.isfinite().all() for p in model.parameters()])
    back = steps(math.nan, math.nan, math.nan, 1.0)
    assert back.why == "of the last 4 steps, 3 had a NaN or infinite loss"


def test_batches_may_be_arrays_and_whatever_equals_everything() -> None:
    class Same:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    quick = Quick()
    given = [np.ones((3, 2)), np.zeros(2), Same(), None, torch.ones(2)]
    assert list(map(id, quick.recover.batches(given))) == list(map(id, given))


@pytest.mark.filterwarnings(BACK)
def test_no_batch_is_counted_twice() -> None:
    quick = Quick(most=4)
    given = quick.recover.batches(iter(range(1, 1000)))
    for loss in [1.0, 1.1] * 3:
        next(given)
        quick.go(loss)
    backs = []
    for _ in range(4):
        next(given)
        quick.go(99.0)
        next(given)
        backs.append(quick.go(99.0))
    assert [back.to for back in backs] == [4, 4, 2, 2]
    assert [back.left_out for back in backs] == [4, 2, 4, 2]
    assert quick.recover.now.left_out == list(range(3, 15))


def test_steps_without_a_loss_are_no_losses_of_zero() -> None:
    quick = Quick(check=4, every=4)
    quick.go(-5.0, None, -5.2, None)
    assert quick.recover.now.losses == [-5.0, -5.2]
    assert quick.go(None, -5.1, None, -5.0) is None


# ---------------------------------------------------------------------- on disk


@pytest.mark.filterwarnings(BACK)
@at_once("compile, at", [(False, 40), (True, 43)])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_one_that_went_on(
    compile: bool, at: int
) -> None:
    """At a step with a snapshot, and in the middle of a look."""
    run, loader = Run("adamw", compile=compile), Loader(batches(72))
    recover = run.recover(loader)
    run.train(limited(recover.batches(loader), at), recover)
    saved = [x.state_dict() for x in (run.model, run.opt, loader, recover)]
    saved = torch.load(written(saved), weights_only=True)
    schedules = [x.state_dict() for x in run.schedules]
    python, torchs = random.getstate(), torch.get_rng_state()
    run.train(recover.batches(loader), recover)

    other, again = Run("adamw", compile=compile), Loader(batches(72))
    found = other.recover(again)
    for x, state in zip((other.model, other.opt, again), saved, strict=False):
        x.load_state_dict(state)
    other.schedules[0].load_state_dict(schedules[0])
    random.setstate(python)
    torch.set_rng_state(torchs)
    found.load_state_dict(saved[-1])
    other.train(found.batches(again), found)
    assert recover.events
    assert found.now.left_out == recover.now.left_out
    assert differences(run.all(), other.all()) == []


def limited(given: Any, count: int) -> Any:
    """So many of them; the next one is not drawn."""
    for _ in range(count):
        yield next(given)


def written(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


# ---------------------------------------------------------------------- sentences

MODEL = nn.Linear(2, 2)
CHAIN = [Adam(), LR(0.1)]
OPT = Modular(MODEL.parameters(), *CHAIN)
SCHEDULE = torch.optim.lr_scheduler.CosineAnnealingLR(OPT, 10)
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Recover(torch.optim.SGD(MODEL.parameters()), MODEL), TypeError, "got SGD"),
    (lambda: Recover(Clipper(MODEL.parameters(), Guard()), MODEL), TypeError, "got Clipper"),
    (lambda: Recover(OPT, MODEL, parts=[3]), TypeError, "state_dict and load_state_dict, got int"),
    (
        lambda: Recover(OPT, MODEL, keep=0),
        ValueError,
        "keep must be an integer of at least 1, got 0",
    ),
    (lambda: Recover(OPT, MODEL, window=1), ValueError, "window must be an integer of at least 2"),
    (lambda: Recover(OPT, MODEL, every=15), ValueError, "every=15 must be a multiple of check=10"),
    (
        lambda: Recover(OPT, MODEL, sigmas=-1),
        ValueError,
        "sigmas must be a number of at least 0, got -1",
    ),
    (lambda: Recover(OPT, MODEL, slower=0.5), ValueError, r"as \(0.5, 100\), got 0.5"),
    (lambda: Recover(OPT, MODEL, slower=(0.5,)), ValueError, r"got \(0.5,\)"),
    (lambda: Recover(OPT, MODEL, slower=(0.5, "x")), ValueError, r"got \(0.5, 'x'\)"),
    (lambda: Recover(OPT, MODEL, slower=("x", 5)), ValueError, r"got \('x', 5\)"),
    (lambda: Recover(OPT, MODEL, slower=(0.5, -1)), ValueError, r"got \(0.5, -1\)"),
    (lambda: Recover(OPT, MODEL, slower=(math.nan, 1)), ValueError, r"got \(nan, 1\)"),
    (lambda: Recover(OPT, MODEL, parts=SCHEDULE), TypeError, r"parts=\[schedule\], got CosineA"),
    (lambda: Recover(OPT, MODEL, parts=None), TypeError, r"parts=\[schedule\], got NoneType"),
    (lambda: Recover(OPT, None), TypeError, "the optimizer trains, got NoneType"),
    (
        lambda: Recover(OPT, nn.Linear(2, 2)),
        ValueError,
        "got a model that has none of the optimizer's parameters",
    ),
    (lambda: Recover(OPT, MODEL).load_state_dict(None), ValueError, "got NoneType"),
    (lambda: Recover(OPT, MODEL).step("x"), TypeError, "loss must be a number, .*, got 'x'"),
    (lambda: Recover(OPT, MODEL).step(torch.ones(2)), TypeError, r"got a tensor of shape \(2,\)"),
    (lambda: Recover(OPT, MODEL).step(1j), TypeError, "loss must be a number, .*, got 1j"),
    (
        lambda: Recover(OPT, MODEL).load_state_dict({}),
        ValueError,
        r"needs the result of Recover\.state_dict\(\), got",
    ),
]


@at_once("make, kind, words", WRONG)
def test_mistakes_are_sentences(make: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_a_rate_that_is_not_there_cannot_be_smaller() -> None:
    with pytest.warns(UserWarning, match="no learning rate"):
        opt = Modular(MODEL.parameters(), Adam())
    with pytest.raises(ValueError, match="slower= requires a learning rate: add LR at the end"):
        Recover(opt, MODEL, slower=(0.5, 10))


def test_a_loader_that_would_go_back_unseen_is_refused() -> None:
    run, loader = Run("adamw"), Loader(batches(20, bad=()))
    with pytest.raises(RuntimeError, match=r"a Loader, which is a data loader: .* with"):
        run.train(loader, run.recover(loader))


# ---------------------------------------------------------------------- the judge


def test_a_limit_is_the_mean_and_sigmas_deviations_of_the_last_good_losses() -> None:
    assert limit_of([1.0], 6.0, 4) == math.inf
    assert limit_of([1.0, 2.0, 3.0], 6.0, 4) == pytest.approx(2 + 6 * 1.0)
    assert limit_of([0.1] * 4, 6.0, 4) == math.inf  # equal losses set none
    rows = [
        Look(8.01),
        Look(7.99),
        Look(0.0, broken=True, skipped=True),
        Look(3.0, skipped=True),
    ]
    bad, why = judged(rows, 8.0)
    assert bad == [True, False, True, True]
    assert why == "of the last 4 steps, 2 were skipped by a guard and 1 had a loss above 8"


def test_half_of_the_steps_are_no_trouble() -> None:
    assert judged([Look(1.0), Look(9.0)], 5.0) == ([False, True], "")
    assert judged([Look(1.0), Look(9.0), Look(9.0)], 5.0)[1]


@pytest.mark.filterwarnings(BACK)
def test_only_the_losses_of_good_steps_are_remembered() -> None:
    quick = Quick(check=4, every=4)
    quick.go(1.0, 1.1, 0.9, 1.0)
    quick.go(0.8, 99.0, 1.1, 99.0)
    assert quick.recover.now.losses == [0.9, 1.0, 0.8, 1.1]


@pytest.mark.slow
def test_a_run_without_trouble_is_let_be_for_ten_thousand_steps() -> None:
    """A loss that falls, then stays, with noise whose tail is heavy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
    opt = Modular(model.parameters(), Guard(), ClipNorm(1.0, dim="global"), Adam(), LR(3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10_000)
    recover = Recover(opt, model, parts=[schedule])
    tail = torch.distributions.StudentT(5.0)
    for _ in range(10_000):
        x = torch.randn(16, 6)
        loss = nn.functional.mse_loss(model(x), x.flip(1).sin() + 0.3 * tail.sample((16, 6)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        recover.step(loss)
    assert recover.events == []
    assert recover.now.count == 10_000
    assert [snapshot.progress.count // 200 for snapshot in recover._ring] == [49, 50]
