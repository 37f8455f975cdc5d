"""What a link may do with a bucket: what flows, its state, other memory, and parts of it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from torchzero_clip import EMA, LR, Adam, Modular, TensorList, Transform, zeros_like_state
from torchzero_clip.core import Bucket, Group, State
from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines import Eager, pieces


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


def _same(u: TensorList, state: State, group: Group) -> TensorList:
    return u.mul(1.0)


def _ahead(u: TensorList, state: State, group: Group) -> TensorList:
    return u.mul_(group["factor"]).add_(group["params"]).sub_(state["m"])


ENGINES = {"default": Eager, "plain": lambda: Eager(fuses=False), "in pieces": Accelerated}


@pytest.mark.parametrize("engine", ENGINES)
def test_state_is_written_and_what_flows_is_as_it_was(engine: str) -> None:
    def body(bucket: Bucket) -> None:
        bucket.state["m"].lerp_(bucket.view(_same), 0.5)

    moved, state = after(body, ENGINES[engine]())
    assert moved == [[-2.0 * i for i in range(20)], [0.0, -2.0, -4.0]]
    assert state == [[0.75 * i for i in range(20)], [0.0, 0.75, 1.5]]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_waits_is_computed_once_though_state_is_written_by_it(engine: str) -> None:
    def body(bucket: Bucket) -> None:
        bucket.state["m"].lerp_(bucket.view(_same), 0.5)

    moved, state = after(body, ENGINES[engine](), before=(EMA(0.5),))
    assert moved == [[-1.25 * i for i in range(20)], [0.0, -1.25, -2.5]]
    assert state == [[0.5 * i for i in range(20)], [0.0, 0.5, 1.0]]


def test_a_compiled_step_writes_it_too() -> None:
    def body(bucket: Bucket) -> None:
        bucket.state["m"].lerp_(bucket.view(_same), 0.5)

    assert after(body, compile=True) == after(body)


def test_small_state_is_written_once_it_was_read() -> None:
    def body(bucket: Bucket) -> None:
        before = bucket.state["m"].add(1.0)  # read in float32
        bucket.state["m"].lerp_(bucket.view(_same), 0.5)
        bucket.settle()
        bucket.u = before

    moved, state = after(body, state_dtype="bfloat16", size=4)
    assert state == [[0.0, 0.75, 1.5, 2.25], [0.0, 0.75, 1.5]]  # all in bfloat16
    assert moved == [[-2.0, -2.5, -3.0, -3.5], [-2.0, -2.5, -3.0]]


@pytest.mark.parametrize("engine", ENGINES)
def test_functions_of_entries_may_stand_on_each_other_and_be_measured_between(engine: str) -> None:
    def body(bucket: Bucket) -> None:
        bucket.u = bucket.view(_ahead, factor=2.0)
        sizes = bucket.u.statistics(NAMED["sum"])[0]
        assert len(sizes) == 2
        bucket.u = bucket.view(_same)
        bucket.u = bucket.view(lambda u, state, group: u.mul_(0.5))

    moved, _ = after(body, ENGINES[engine]())
    assert moved == [[-1.5 * i for i in range(20)], [0.0, -1.5, -3.0]]


def test_a_part_of_a_bucket_has_its_parameters_and_their_state_alone() -> None:
    def body(bucket: Bucket) -> None:
        part = bucket.select([1])
        assert part.names == ["p1"]
        assert len(part.u) == 1
        part.state["m"].add_(part.u)

    assert after(body)[1] == [[0.0] * 20, [0.0, 2.0, 4.0]]


def test_a_view_leaves_what_flows_and_is_computed_once() -> None:
    asked = []

    def seen(u: TensorList, state: State, group: Group) -> TensorList:
        asked.append(len(u))
        return u.mul_(5.0)

    def body(bucket: Bucket) -> None:
        bucket.u = bucket.u.mul_(1.0)  # in memory of its own
        view = bucket.view(seen)
        bucket.state["m"].add_(view)
        view.statistics(NAMED["sum"])

    assert after(body)[0] == [[-2.0 * i for i in range(20)], [0.0, -2.0, -4.0]]
    assert asked == [2, 2]  # on a CPU once a step, for both tensors
    asked.clear()
    after(body, Accelerated())
    assert len(asked) == 2 * 4  # once a step: three pieces of the larger one, and the smaller


def test_a_link_with_state_or_that_widens_sees_float32_and_others_what_there_is() -> None:
    seen: list[torch.dtype] = []

    class Looks(Transform):
        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            seen.extend([bucket.u.dtype for bucket in buckets])
            return buckets

    class Remembers(Looks):
        def init(self, param: Any) -> dict[str, Any]:
            return {"m": zeros_like_state(param)}

    class Widens(Looks):
        widens = True

    p = Parameter(torch.zeros(2, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    for target in ("update", "grad"):
        seen.clear()
        links = [made(target=target) for made in (Looks, Remembers, Widens)]
        Modular([p], *links[:1], LR(1.0)).step()
        Modular([p], *links[1:], LR(1.0)).step()
        assert seen == [torch.bfloat16, torch.float32, torch.float32]


def test_a_rule_is_done_with_values_that_its_step_has_made() -> None:
    class Less(Transform):
        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            return u.sub_(group["less"])

        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            for bucket in buckets:
                bucket.apply(self, less=torch.tensor([1.0, 2.0]))
            return buckets

    p, q = (Parameter(torch.zeros(2)) for _ in range(2))
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    Modular([p, q], Less(), LR(1.0)).step()
    assert (p.tolist(), q.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_state_that_others_read_is_rounded_where_it_is_set() -> None:
    def body(bucket: Bucket) -> None:
        bucket.set_state("m", bucket.state["m"].add(bucket.u))
        key = f"{bucket.bound.path}/m"
        assert [state[key].float().max() > 0 for state in bucket.param_states] == [True, True]

    assert after(body, state_dtype="bfloat16", size=4)[1] == [[0.0, 2.0, 4.0, 6.0], [0.0, 2.0, 4.0]]


def test_what_a_link_has_seen_of_a_gradient_is_told_from_an_update() -> None:
    origins = []
    body = lambda bucket: origins.append(bucket.origin)  # noqa: E731
    p = Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    Modular([p], Does(body), Adam(), Does(body), LR(1.0)).step()
    assert origins == ["gradient", "update"]


def test_a_step_of_a_large_model_is_of_few_pieces() -> None:
    """Of 64 MiB with what a chain makes of them, and no more than a hundred or two."""

    def pieces_of(count: int, size: int) -> list[int]:
        tensors = [torch.empty(size, device="meta") for _ in range(count)]
        return [
            sum([t.numel() for t in piece.of(tensors)]) for piece in pieces.pieces(tensors, True)
        ]

    assert pieces_of(3, 2**20) == [2**21, 2**20]
    assert pieces_of(1, 2**23) == [2**21] * 4
    assert pieces_of(1, 2**33) == [2**26] * 128
    assert len(pieces_of(5000, 2**20)) <= 256
