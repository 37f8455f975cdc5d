"""Recorder: one row a step, the right numbers in it, bounded memory, and nobody waits."""

from __future__ import annotations

import copy
import csv
import gc
import io
import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import some
from torchzero_clip import (
    LR,
    Accumulate,
    AdaGC,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    ClipValue,
    Guard,
    Modular,
    Recorder,
    Transform,
    When,
    ZClip,
    attach,
    to_floats,
)
from torchzero_clip.study import recorder

inf, nan = math.inf, math.nan
NORMS = (1.0, 2.0, 0.5, 30.0, 1.0, 4.0, 0.0, 2.5)


def problem(*links: Transform, count: int = 1) -> tuple[list[Parameter], Modular]:
    params = [Parameter(torch.zeros(1)) for _ in range(count)]
    return params, Modular(params, *links)


def walk(params: list[Parameter], step: Callable[[], Any], norms: Iterable[float]) -> None:
    """A step with each of these norms; the norm of parameter i is i + 1 times that of the first."""
    for norm in norms:
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, (i + 1) * norm)
        step()


def same(a: Any, b: Any) -> bool:
    """Equal, and NaN where the other is NaN."""
    one, other = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return torch.allclose(one, other, rtol=1e-12, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("count", some([3, 1], one_in=2))
def test_a_row_is_what_metrics_gave_after_the_step(count):
    """Over more steps than wait on the device at once."""
    params, opt = problem(ClipNorm(1.5, dim="global"), ClipNormGrowth(), ZClip(), count=count)
    rec, rows = Recorder(opt), []
    for i in range(300):
        walk(params, opt.step, [NORMS[i % len(NORMS)]])
        rows.append(to_floats(opt.metrics()))
    history = rec.history()
    assert history.pop("step") == list(range(1, 301))
    assert history.keys() == rows[0].keys()
    for name, values in history.items():
        assert values == [row[name] for row in rows]


def test_before_the_first_step_there_are_no_rows():
    _, opt = problem(ClipNorm(1.0))
    assert Recorder(opt).history() == {"step": []}


def test_what_a_guard_skipped_is_a_row_without_norms():
    params, opt = problem(Guard(), ClipNorm(1.0), Adam(), LR(0.1))
    rec = Recorder(opt)
    walk(params, opt.step, [2.0, nan, inf, 4.0])
    history = rec.history()
    assert history["step"] == [1, 2, 3, 4]
    assert history["Guard/skipped"] == [0, 1, 2, 2]
    assert same(history["ClipNorm/norm"], [2, nan, nan, 4])
    assert same(history["ClipNorm/clipped"], [1, nan, nan, 1])


@pytest.mark.parametrize(
    ("link", "name"),
    [
        ([When(lambda step: step % 2 == 0, ClipNorm(1.0))], "When/ClipNorm"),
        ([Accumulate(2), ClipNorm(1.0)], "ClipNorm"),
    ],
)
def test_a_link_that_did_not_run_has_no_numbers(link, name):
    params, opt = problem(*link)
    rec = Recorder(opt)
    walk(params, opt.step, [2.0] * 5)
    assert same(rec.history()[f"{name}/norm"], [nan, 2, nan, 2, nan])


def test_a_link_that_first_runs_late_has_no_numbers_before():
    params, opt = problem(When(lambda step: step > 300, ClipNorm(1.0)))
    rec = Recorder(opt)
    walk(params, opt.step, [2.0] * 302)
    assert same(rec.history()["When/ClipNorm/norm"], [nan] * 300 + [2, 2])


def test_a_step_without_gradients_is_a_row():
    _, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    opt.step()
    assert rec.history() == {"step": [1]}


def test_units_that_come_later_are_unknown_before():
    params, opt = problem(AdaGC(), count=3)
    rec = Recorder(opt)
    walk(params[:2], opt.step, [1.0])
    walk(params, opt.step, [1.0])
    norms = rec.history()["AdaGC/norm"]
    assert same(norms, [[1, 2, nan], [1, 2, 3]])


def test_rows_are_steps_of_the_optimizer_that_a_handle_is_attached_to():
    p = Parameter(torch.ones(2))
    opt = torch.optim.LBFGS([p], max_iter=5)
    handle = attach(opt, ClipNorm(1.0, dim="global"))
    rec, calls = Recorder(handle), []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (p - torch.tensor([1.0, 3.0])).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    rows = []
    for _ in range(3):
        opt.step(closure)
        rows.append(handle.metrics()["ClipNorm/norm"].item())
    assert len(calls) > 3
    assert rec.history()["step"] == [1, 2, 3]
    assert rec.history()["ClipNorm/norm"] == rows


def test_a_handle_that_was_removed_leaves_rows_without_its_last_numbers():
    p = Parameter(torch.ones(1))
    opt = torch.optim.SGD([p], lr=0.1)
    handle = attach(opt, Guard(), ClipNorm(1.0))
    rec = Recorder(handle)
    walk([p], opt.step, [2.0, nan])
    handle.remove()
    walk([p], opt.step, [3.0])
    assert same(rec.history()["ClipNorm/norm"], [2, nan, nan])
    assert same(rec.history()["Guard/skipped"], [0, 1, nan])


def test_a_clipper_has_a_row_for_each_step():
    p = Parameter(torch.ones(1))
    clipper = Clipper([p], ClipNorm(1.0))
    with Recorder(clipper) as rec:
        walk([p], clipper.step, [3.0, 0.5])
    assert rec.history()["ClipNorm/clipped"] == [1, 0]


def test_a_step_that_a_scaler_skips_is_no_row():
    p = Parameter(torch.ones(1))
    opt = Modular([p], ClipNorm(1.0), LR(0.1))
    rec, scaler = Recorder(opt), torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, inf, 1.0):
        opt.zero_grad()
        scaler.scale(p.sum() * factor).backward()
        scaler.step(opt)
        scaler.update()
    assert rec.history()["ClipNorm/norm"] == [1, 1]


def test_a_scheduler_adds_no_rows():
    params, opt = problem(ClipNorm(1.0), LR(0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    rec = Recorder(opt)
    walk(params, lambda: (opt.step(), scheduler.step()), NORMS)
    assert len(rec.history()["step"]) == len(NORMS)


def test_a_compiled_step_leaves_its_numbers_or_none_but_no_old_ones():
    params, opt = problem(ClipNorm(1.0), LR(0.1))
    rec = Recorder(opt)
    walk(params, torch.compile(opt.step, backend="eager"), [2.0, 3.0, 4.0])
    history = rec.history()
    assert history["step"] == [1, 2, 3]
    norms = history.get("ClipNorm/norm", [nan] * 3)
    assert all(n == true or math.isnan(n) for n, true in zip(norms, (2.0, 3.0, 4.0), strict=True))


def test_recording_changes_nothing():
    runs = []
    for record in (False, True):
        params, opt = problem(Guard(), ZClip(), AdaGC(), Adam(), LR(0.1), count=3)
        rec = Recorder(opt) if record else None
        walk(params, opt.step, NORMS * 3)
        if rec is not None:
            rec.history()
        walk(params, opt.step, NORMS)
        runs.append(params)
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


# ---------------------------------------------------------------------- log


def test_what_is_logged_belongs_to_the_next_step():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    for i in range(4):
        if i != 1:
            rec.log(loss=torch.tensor(float(i), requires_grad=True), epoch=i)
        walk(params, opt.step, [1.0])
    rec.log(loss=99.0)  # of a step that has not come
    history = rec.history()
    assert same(history["loss"], [0, nan, 2, 3])
    assert same(history["epoch"], [0, nan, 2, 3])


def test_what_is_logged_twice_for_a_step_is_averaged():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    for value in (1.0, torch.tensor(2.0), torch.tensor([6.0], dtype=torch.float64)):
        rec.log(loss=value)
    walk(params, opt.step, [1.0])
    assert rec.history()["loss"] == [3.0]


def test_a_logged_tensor_is_taken_as_it_is_now_and_without_its_graph():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    loss, saved = (x * y).sum() * 1, weakref.ref(y)
    rec.log(loss=loss)
    with torch.no_grad():
        loss.mul_(0)
    assert saved() is not None
    del loss, y
    gc.collect()
    assert saved() is None
    walk(params, opt.step, [1.0])
    assert rec.history()["loss"] == [2.0]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.float64]
)
def test_every_dtype_is_logged_exactly(dtype):
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    value = torch.tensor(2**40 + 1 if dtype in (torch.int64, torch.float64) else 1, dtype=dtype)
    rec.log(value=value)
    walk(params, opt.step, [1.0])
    assert rec.history()["value"] == [value.item()]


def test_a_number_of_numpy_can_be_logged():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    rec.log(loss=np.float32(0.5), count=np.int64(3))
    walk(params, opt.step, [1.0])
    assert rec.history()["loss"] == [0.5]
    assert rec.history()["count"] == [3.0]


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        ({"step": 3}, ValueError, "log does not accept the name 'step', because Recorder itself"),
        (
            {"loss": torch.zeros(2)},
            ValueError,
            r"got loss of shape \(2,\): log one number, such as loss\.mean",
        ),
        ({"loss": "low"}, TypeError, "numbers and tensors with one element, got loss='low'"),
    ],
)
def test_what_cannot_be_logged_is_an_error_that_says_so(values, error, sentence):
    _, opt = problem(ClipNorm(1.0))
    with pytest.raises(error, match=f"Recorder: .*{sentence}"):
        Recorder(opt).log(**values)


# ---------------------------------------------------------------------- waiting for the device


class Reads(TorchDispatchMode):
    """Counts the values that the host read, and copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        where = (kwargs or {}).get("device")
        self.count += where is not None and torch.device(where).type == "cpu"
        return func(*args, **(kwargs or {}))


def test_the_steps_before_a_transfer_read_nothing(monkeypatch):
    """Tensors on the meta device have no values that could be read."""
    monkeypatch.setattr(recorder, "BLOCK", 8)
    p = Parameter(torch.empty(3, device="meta"))
    p.grad = torch.empty_like(p)
    opt = Modular([p], ClipNorm(1.0), ZClip(), AdaGC(), LR(0.1))
    rec = Recorder(opt)
    with Reads() as reads:
        for _ in range(recorder.BLOCK - 1):
            rec.log(loss=p.grad.sum())
            opt.step()
    assert reads.count == 0
    with pytest.raises(NotImplementedError, match="meta"):
        opt.step()


def test_a_block_comes_in_one_transfer(monkeypatch):
    params, opt = problem(ClipNorm(1.0), AdaGC(), count=3)
    rec, transfers, original, fetch = Recorder(opt), [], Tensor.cpu, recorder.fetch

    def cpu(self: Tensor) -> Tensor:
        transfers.append(self.numel())
        return original(self)

    def watched(waiting: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "cpu", cpu)
            for name in ("item", "tolist", "numpy", "__float__", "__bool__", "__int__"):
                patch.setattr(Tensor, name, None)
            return fetch(waiting)

    monkeypatch.setattr(recorder, "fetch", watched)

    def step() -> None:
        rec.log(loss=torch.ones(()))
        opt.step()

    walk(params, step, [1.0] * recorder.BLOCK)
    assert transfers == [recorder.BLOCK * (2 * 4 * 3 + 1)]


def test_many_units_come_before_there_are_many_steps(monkeypatch):
    monkeypatch.setattr(recorder, "BLOCK_NUMBERS", 100)
    params, opt = problem(AdaGC(), count=3)
    rec = Recorder(opt)
    for _ in range(50):
        walk(params, opt.step, [1.0])
        assert sum(value.numel() for _, _, value in rec._waiting) < 100
    assert len(rec.history()["AdaGC/norm"]) == 50


# ---------------------------------------------------------------------- bounded memory


@given(
    norms=st.lists(st.sampled_from([0.5, 2.0, 30.0, inf]), min_size=1, max_size=90),
    capacity=st.integers(2, 12),
    block=st.integers(1, 20),
)
def test_a_merged_row_has_the_largest_norm_the_smallest_limit_and_the_mean_of_the_rest(
    norms, capacity, block
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "BLOCK", block)
        params, opt = problem(When(lambda step: step % 3 > 0, ClipNormGrowth(2.0)), count=2)
        rec, rows = Recorder(opt, capacity=capacity), []
        for i, norm in enumerate(norms):
            rec.log(loss=i)
            walk(params, opt.step, [norm])
            rows.append({**to_floats(opt.metrics()), "loss": i})
        history = rec.history()
    stride = 1
    while math.ceil(len(norms) / stride) > capacity:
        stride *= 2
    parts = [rows[i : i + stride] for i in range(0, len(rows), stride)]
    assert history["step"] == [*range(stride, len(norms), stride), len(norms)]
    ways = {"norm": max, "limit": min}
    for name, values in history.items():
        if name == "step":
            continue
        way = ways.get(name.split("/")[-1], lambda known: sum(known) / len(known))
        for value, part in zip(values, parts, strict=True):
            known = [row[name] for row in part if name in row]
            if name == "loss":
                assert value == pytest.approx(way(known))
            else:
                for unit in range(2):
                    expected = way([entry[unit] for entry in known]) if known else nan
                    assert value[unit] == pytest.approx(expected, nan_ok=True)


def test_a_norm_that_is_no_number_survives():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt, capacity=2)
    walk(params, opt.step, [1.0, 1.0, nan, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert same(rec.history()["ClipNorm/norm"], [nan, 1])


def test_a_long_run_keeps_to_its_capacity():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt, capacity=50)
    walk(params, opt.step, [2.0] * 400)
    history = rec.history()
    assert 25 < len(history["step"]) <= 50
    assert history["step"][-1] == 400
    assert history["ClipNorm/clipped"] == [1.0] * len(history["step"])


def test_many_units_make_for_fewer_rows(monkeypatch):
    monkeypatch.setattr(recorder, "MOST_NUMBERS", 400)
    params, opt = problem(AdaGC(), count=10)
    rec = Recorder(opt)
    walk(params, opt.step, [2.0] * 200)
    assert 5 <= len(rec.history()["step"]) <= 10


# ---------------------------------------------------------------------- callback and files


@pytest.mark.parametrize("every", some([4, 1, 60], one_in=3))
def test_the_callback_gets_a_float_for_each_name_as_of_a_row_of_so_many_steps(every, monkeypatch):
    monkeypatch.setattr(recorder, "BLOCK", 16)
    params, opt = problem(Guard(), ClipNorm(5.0), count=2)
    got: list[dict[str, float]] = []
    rec = Recorder(opt, callback=got.append, every=every)
    norms = [1.0, 2.0, 3.0, nan] * 30

    def step() -> None:
        rec.log(loss=len(got))
        opt.step()

    walk(params, step, norms)
    assert [row["step"] for row in got] == list(range(every, 121, every))
    for i, row in enumerate(got):
        part = norms[i * every : (i + 1) * every]
        known = [unit * n for n in part for unit in (1, 2) if not math.isnan(n)]
        assert all(type(value) is float for value in row.values())
        assert row["loss"] == i
        assert ("ClipNorm/norm" in row) == bool(known)
        if known:
            assert row["ClipNorm/norm"] == max(known)
            assert row["ClipNorm/limit"] == 5.0
            share = sum(n > 5 for n in known) / len(known)
            assert row["ClipNorm/clipped"] == pytest.approx(share)


def test_csv_has_a_column_for_every_unit_and_nothing_where_nothing_was(tmp_path):
    params, opt = problem(Guard(), ClipNorm(5.0, dim="global"), AdaGC(), count=2)
    rec = Recorder(opt)
    walk(params, opt.step, [1.0, nan, 0.1])
    rec.log(loss=nan)
    walk(params, opt.step, [4.0])
    rec.to_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    history = rec.history()
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["loss"] for row in rows] == ["", "", "", "nan"]
    assert rows[1]["ClipNorm/norm"] == rows[1]["AdaGC/norm/1"] == ""
    for i in (0, 2, 3):
        assert float(rows[i]["ClipNorm/norm"]) == history["ClipNorm/norm"][i]
        for unit in range(2):
            assert float(rows[i][f"AdaGC/limit/{unit}"]) == history["AdaGC/limit"][i][unit]


def test_tensorboard_gets_scalars_at_their_steps():
    class Writer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            self.seen.append((tag, value, global_step))

    params, opt = problem(Guard(), ClipNorm(3.0), count=2)
    rec, writer = Recorder(opt), Writer()
    walk(params, opt.step, [1.0, nan, 2.0])
    rec.to_tensorboard(writer)
    norms = [(value, step) for tag, value, step in writer.seen if tag == "ClipNorm/norm"]
    shares = [(value, step) for tag, value, step in writer.seen if tag == "ClipNorm/clipped"]
    assert norms == [(2.0, 1), (4.0, 3)]
    assert shares == [(0.0, 1), (0.5, 3)]


# ---------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("first", some([37, 1, 64], one_in=3))
def test_a_resumed_run_continues_its_history(first):
    norms = list(NORMS) * 12
    histories, calls = [], []
    for stop in (len(norms), first):
        params, opt = problem(ClipNorm(1.0), ClipNormGrowth(), LR(0.1), count=2)
        got: list[dict[str, float]] = []
        rec = Recorder(opt, capacity=20, callback=got.append, every=10)
        walk(params, opt.step, norms[:stop])
        if stop < len(norms):
            buffer = io.BytesIO()
            torch.save({"opt": opt.state_dict(), "recorder": rec.state_dict()}, buffer)
            buffer.seek(0)
            saved = torch.load(buffer, weights_only=True)
            params, opt = problem(ClipNorm(1.0), ClipNormGrowth(), LR(0.1), count=2)
            opt.load_state_dict(saved["opt"])
            rec = Recorder(opt, capacity=20, callback=got.append, every=10)
            rec.load_state_dict(saved["recorder"])
            walk(params, opt.step, norms[stop:])
        histories.append(rec.history())
        calls.append(got)
    assert histories[0] == histories[1]
    assert calls[0] == calls[1]


def test_a_history_is_loaded_into_less_room():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    walk(params, opt.step, range(1, 11))
    other = Recorder(opt, capacity=3)
    other.load_state_dict(rec.state_dict())
    assert other.history()["step"] == [4, 8, 10]
    assert other.history()["ClipNorm/norm"] == [4, 8, 10]


def test_a_saved_state_stays_what_it_was():
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt, capacity=4)
    walk(params, opt.step, [1.0] * 5)
    state = rec.state_dict()
    before = pickle.dumps(state)
    walk(params, opt.step, [2.0] * 5)
    rec.history()
    assert pickle.dumps(state) == before
    rec.load_state_dict(state)
    walk(params, opt.step, [2.0] * 5)
    rec.history()
    assert pickle.dumps(state) == before


def test_another_dict_is_not_loaded():
    _, opt = problem(ClipNorm(1.0))
    with pytest.raises(
        ValueError,
        match=r"needs the result of Recorder.state_dict\(\), got a dict with the keys \['a",
    ):
        Recorder(opt).load_state_dict({"a": 1})


# ---------------------------------------------------------------------- lifetime


def test_the_history_ends_with_remove_and_with_the_block():
    params, opt = problem(ClipNorm(1.0))
    with Recorder(opt) as rec:
        walk(params, opt.step, [1.0])
    walk(params, opt.step, [2.0])
    rec.remove()
    assert rec.history()["ClipNorm/norm"] == [1.0]


@pytest.mark.parametrize("attached", [False, True])
def test_a_recorder_keeps_no_optimizer_alive(attached):
    p = Parameter(torch.zeros(1))
    opt: Any = torch.optim.SGD([p], lr=0.1) if attached else Modular([p], ClipNorm(1.0))
    rules = attach(opt, ClipNorm(1.0)) if attached else opt
    rec, gone = Recorder(rules), weakref.ref(opt)
    walk([p], opt.step, [2.0])
    gc.collect()
    gc.disable()
    try:
        del opt, rules
        assert gone() is None
    finally:
        gc.enable()
    assert rec.history()["ClipNorm/norm"] == [2.0]


def test_a_recorder_is_kept_by_its_optimizer_and_goes_with_it():
    params, opt = problem(ClipNorm(1.0))
    got: list[dict[str, float]] = []
    gone = weakref.ref(Recorder(opt, callback=got.append, every=1))
    walk(params, opt.step, [1.0])
    assert len(got) == 1
    gc.collect()
    gc.disable()
    try:
        del opt
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_optimizer_is_not_recorded(duplicate):
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    walk(params, opt.step, [1.0])
    other = duplicate(opt)
    walk(other.param_groups[0]["params"], other.step, [2.0])
    walk(params, opt.step, [3.0])
    assert rec.history()["ClipNorm/norm"] == [1.0, 3.0]
    again = Recorder(other)
    walk(other.param_groups[0]["params"], other.step, [4.0])
    assert again.history()["ClipNorm/norm"] == [4.0]


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"capacity": 1}, ValueError, "capacity must be an integer of at least 2, got 1"),
        ({"every": 0}, ValueError, "every must be an integer of at least 1, got 0"),
        ({"every": 1.5}, ValueError, "every must be an integer of at least 1, got 1.5"),
        ({"callback": 3}, TypeError, "callback must be a function or None, got 3"),
    ],
)
def test_wrong_arguments_are_sentences(given, error, sentence):
    _, opt = problem(ClipNorm(1.0))
    with pytest.raises(error, match=f"Recorder: {sentence}"):
        Recorder(opt, **given)


def test_an_optimizer_without_rules_is_not_recorded():
    opt: Any = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(TypeError, match="or the handle that attach returned, got SGD"):
        Recorder(opt)


# ---------------------------------------------------------------------- pictures


def test_without_matplotlib_plot_says_what_to_install(monkeypatch, tmp_path):
    params, opt = problem(ClipNorm(1.0))
    rec = Recorder(opt)
    walk(params, opt.step, [1.0])
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "torchzero-clip\[plot\]"'):
        rec.plot(tmp_path / "run.png")


def panels(figure: Any) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


@pytest.mark.parametrize(
    ("suffix", "start"), some([("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")], one_in=3)
)
def test_a_plot_is_a_file_of_the_kind_that_its_name_says(figure, tmp_path, suffix, start):
    params, opt = problem(ClipNorm(1.0), AdaGC(), count=2)
    rec = Recorder(opt)
    walk(params, opt.step, NORMS)
    rec.plot(tmp_path / f"run.{suffix}", title="A run")
    assert (tmp_path / f"run.{suffix}").read_bytes().startswith(start)
    assert figure[0].get_suptitle() == "A run"


def test_a_rule_with_one_norm_has_lines_on_a_log_scale_and_marks_where_it_clipped(figure, tmp_path):
    params, opt = problem(Guard(), ClipNorm(2.0, dim="global"))
    rec = Recorder(opt)
    for i, norm in enumerate([1.0, 3.0, nan, 2.0, 5.0]):
        rec.log(loss=i)
        walk(params, opt.step, [norm])
    rec.plot(tmp_path / "run.png")
    drawn = panels(figure[0])
    assert list(drawn) == ["loss", "ClipNorm", "clipped"]
    assert drawn["ClipNorm"].get_yscale() == "log"
    assert lines(drawn["loss"])["skipped"] == [(3, 1.0)]
    assert lines(drawn["ClipNorm"]) == {
        "norm": [(1, 1), (2, 3), (4, 2), (5, 5)],
        "limit": [(1, 2), (2, 2), (4, 2), (5, 2)],
        "clipped": [(2, 3), (5, 5)],
        "skipped": [(3, 1.0)],
    }
    (share, _) = drawn["clipped"].patches
    assert share.get_data().values.tolist() == [50]  # of the steps that happened


def test_a_rule_with_many_norms_has_a_map_of_norm_over_limit(figure, tmp_path):
    params, opt = problem(ClipNorm(2.0), count=3)
    rec = Recorder(opt)
    walk(params, opt.step, [1.0, 2.0])
    rec.plot(tmp_path / "run.png")
    (mesh,) = panels(figure[0])["ClipNorm"].collections
    low, high = mesh.norm.vmin, mesh.norm.vmax
    assert low == pytest.approx(1 / high)
    shown = mesh.get_array().reshape(3, 2).tolist()
    assert shown == [pytest.approx(row) for row in [[0.5, 1], [1, 2], [1.5, high]]]
    assert 2 <= high <= 3


def test_numbers_that_cannot_be_drawn_are_marked(figure, tmp_path):
    params, opt = problem(ClipNorm(inf, dim="global"), AdaGC(), count=2)
    rec = Recorder(opt)
    for norm in (1.0, nan, 0.0):
        rec.log(loss=norm)
        walk(params, opt.step, [norm])
    rec.plot(tmp_path / "run.png")
    drawn = panels(figure[0])
    for name in ("loss", "ClipNorm", "AdaGC"):
        assert lines(drawn[name])["NaN or infinite"] == [(2, 1.0)]


def test_a_plot_of_many_rows_names_its_stride(figure, tmp_path):
    params, opt = problem(ClipNorm(1.0, dim="global"), AdaGC(), count=2)
    rec = Recorder(opt, capacity=10)
    walk(params, opt.step, NORMS * 4)
    rec.plot(tmp_path / "run.png")
    assert panels(figure[0])["clipped"].get_xlabel() == "step, 4 a point"


def test_a_chain_without_norms_is_drawn_if_something_was_logged(figure, tmp_path):
    params, opt = problem(ClipValue(1.0))
    rec = Recorder(opt)
    with pytest.raises(ValueError, match="plot must be called after the first step"):
        rec.plot(tmp_path / "run.png")
    walk(params, opt.step, [1.0])
    with pytest.raises(
        ValueError, match="plot has no data, because no norm was recorded: add a transform"
    ):
        rec.plot(tmp_path / "run.png")
    rec.log(loss=1.0)
    walk(params, opt.step, [1.0])
    rec.plot(tmp_path / "run.png")
    assert list(panels(figure[0])) == ["loss"]
