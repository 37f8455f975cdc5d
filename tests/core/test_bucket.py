"""What a link may do with a bucket: what flows, its state, other memory, and parts of it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from torchzero_clip import EMA, LR, Adam, Modular, TensorList, Transform, zeros_like_state
from torchzero_clip.core import Bucket
from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines import Eager


class Does(Transform):
    """Does what a function says to each bucket."""

    body: Callable[[Bucket], None]

    def init(self, param: Any) -> dict[str, Any]:
        return {"m": zeros_like_state(param)}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            self.body(bucket)
        return buckets


def after(
    body: Callable[[Bucket], None],
    engine: Any = None,
    size: int = 20,
    before: Sequence[Transform] = (),
    **options: Any,
) -> tuple[list[list[float]], list[list[float]]]:
    """How far two parameters went, and their state, after two steps with gradients 0, 1, 2, …"""
    params = [Parameter(torch.zeros(size)), Parameter(torch.zeros(3))]
    rows = [(f"p{i}", p) for i, p in enumerate(params)]
    opt = Modular(rows, *before, Does(body), LR(1.0), **options)
    opt.engine = engine or opt.engine
    for _ in range(2):
        for p in params:
            p.grad = torch.arange(float(p.numel()))
        opt.step()
    state = [opt.state[p]["Does/m"].tolist() for p in params]
    return [p.tolist() for p in params], state


def _take(u: TensorList, m: TensorList, share: float) -> None:
    m.lerp_(u, share)


ENGINES = {"default": Eager, "plain": lambda: Eager(defers=False), "in parts": Accelerated}


@pytest.mark.parametrize("engine", ENGINES)
def test_state_is_written_and_what_flows_is_as_it_was(engine: str) -> None:
    def body(bucket: Bucket) -> None:
        bucket.write(_take, bucket.u, {"m": bucket.state["m"]}, share=0.5)

    moved, state = after(body, ENGINES[engine]())
    assert moved == [[-2.0 * i for i in range(20)], [0.0, -2.0, -4.0]]
    assert state == [[0.75 * i for i in range(20)], [0.0, 0.75, 1.5]]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_waits_is_computed_once_though_state_is_written_by_it(engine: str) -> None:
    def body(bucket: Bucket) -> None:
        bucket.write(_take, bucket.u, {"m": bucket.state["m"]}, share=0.5)

    moved, state = after(body, ENGINES[engine](), before=(EMA(0.5),))
    assert moved == [[-1.25 * i for i in range(20)], [0.0, -1.25, -2.5]]
    assert state == [[0.5 * i for i in range(20)], [0.0, 0.5, 1.0]]


def test_a_compiled_step_writes_it_too() -> None:
    def body(bucket: Bucket) -> None:
        bucket.write(_take, bucket.u, {"m": bucket.state["m"]}, share=0.5)

    assert after(body, compile=True) == after(body)


def test_small_state_is_written_once_it_was_read() -> None:
    def body(bucket: Bucket) -> None:
        before = bucket.state["m"].add(1.0)  # read in float32
        bucket.write(_take, bucket.u, {"m": bucket.state["m"]}, share=0.5)
        bucket.settle()
        bucket.u = before

    moved, state = after(body, state_dtype="bfloat16", size=4)
    assert state == [[0.0, 0.75, 1.5, 2.25], [0.0, 0.75, 1.5]]  # all in bfloat16
    assert moved == [[-2.0, -2.5, -3.0, -3.5], [-2.0, -2.5, -3.0]]


@pytest.mark.parametrize("engine", ENGINES)
def test_functions_of_entries_may_stand_on_each_other_and_be_measured_between(engine: str) -> None:
    def body(bucket: Bucket) -> None:
        twice = bucket.entrywise(TensorList.mul_, bucket.u, x=2.0)
        away = bucket.entrywise(TensorList.add_, twice, x=bucket.params)
        sizes = away.statistics(NAMED["sum"])[0]
        assert len(sizes) == 2
        bucket.u = bucket.entrywise(TensorList.mul_, away, x=0.5)

    moved, _ = after(body, ENGINES[engine]())
    assert moved == [[-1.5 * i for i in range(20)], [0.0, -1.5, -3.0]]


def test_a_part_of_a_bucket_has_its_parameters_and_their_state_alone() -> None:
    def body(bucket: Bucket) -> None:
        part = bucket.select([1])
        assert part.names == ["p1"]
        assert len(part.u) == 1
        part.state["m"].add_(part.u)

    assert after(body)[1] == [[0.0] * 20, [0.0, 2.0, 4.0]]


def test_other_memory_leaves_what_flows() -> None:
    def body(bucket: Bucket) -> None:
        bucket.u = bucket.u.mul_(1.0)  # in memory of its own
        other = bucket.beside(bucket.u).mul_(5.0)
        assert other.tensors[0].data_ptr() != bucket.u.tensors[0].data_ptr()

    assert after(body)[0] == [[-2.0 * i for i in range(20)], [0.0, -2.0, -4.0]]


def test_what_a_link_has_seen_of_a_gradient_is_told_from_an_update() -> None:
    origins = []
    body = lambda bucket: origins.append(bucket.origin)  # noqa: E731
    p = Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    Modular([p], Does(body), Adam(), Does(body), LR(1.0)).step()
    assert origins == ["gradient", "update"]
