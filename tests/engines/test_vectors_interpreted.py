"""Vector programs in Triton's interpreter: the tests of C++ pass there too, on the CPU.

`make test-triton` runs these tests; TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial

import pytest
import torch

from tests.engines import test_vectors as vectors
from tests.engines.test_vectors import (  # noqa: F401
    compare,
    numbers,
    test_a_conversion_is_that_of_torch,
    test_a_norm_in_any_range_is_that_of_the_plain_way,
    test_a_number_and_a_vector_of_other_dtypes_are_promoted_as_torch_does,
    test_a_reduction_is_that_of_torch,
    test_an_operator_on_lists_is_that_of_torch,
    test_counters_that_share_a_vector_are_counted,
    test_more_entries_than_are_worth_a_program_stay_torchs,
    test_sums_of_flags_and_of_nothing_are_those_of_torch,
    test_views_are_those_of_torch,
    test_what_the_table_lacks_stays_a_call_of_torch_between_two_programs,
    test_what_torch_says_otherwise_is_known,
    test_what_torch_says_otherwise_of_two_is_known,
)
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Region,
    VectorMemory,
    VectorNode,
)
from torchzero_clip.engines.compiled.replay.device_step import DeviceStep
from torchzero_clip.engines.compiled.replay.step_recorder import Relaunch
from torchzero_clip.engines.compiled.replay.vector_kernels import stages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and bool(importlib.util.find_spec("triton"))
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities and NaN
]


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps of the kind for CUDA."""
    monkeypatch.setattr(vectors, "NativeStep", DeviceStep)


def test_a_remainder_is_that_of_torch() -> None:
    """The quotients are small, because the interpreter has no fused multiply-add."""
    x = torch.tensor([0.0, -0.0, 5.5, -5.5, 7.0, torch.inf, -torch.inf, torch.nan, -2.0, 3.0])
    for y in (x, -x):
        pairs = torch.cartesian_prod(x, y).double()
        compare((torch.remainder, [pairs[:, 0].clone(), pairs[:, 1].clone()]))
    every = torch.arange(-2000.0, 2000.0)
    for k in (1.0, 3.0, 7.0, 10.0):
        compare((partial(torch.remainder, other=k), [every.clone()]))


def test_many_entries_go_by_some_at_a_time() -> None:
    for shape in [(4000,), (3, 1000), (1000, 3), (2, 3, 600), (600, 2, 3)]:
        for dim in range(len(shape)):
            compare((partial(torch.sum, dim=dim), [numbers(shape, torch.float64)]))
        compare((lambda x: x.transpose(0, -1) * 2, [numbers(shape, torch.float32)]))


# ---------------------------------------------------------------------- few kernels


def copies(*pairs: tuple[int, int]) -> list[VectorNode | Launched]:
    """Return nodes that copy a number to another, one node per pair."""
    places = [[Region(m, torch.float64, (), ()) for m in pair] for pair in pairs]
    return [VectorNode("copy", to, (of,), torch.float64) for of, to in places]


def launch(reads: int, makes: int | None) -> Launched:
    """Return a launch of a list program that reads a number and writes another."""
    places = [Region(m, torch.float64, (), ()) for m in (reads, makes or 0)]
    nothing = Relaunch(Launch(PROGRAM, [], None, [], [], [], []), print, [], {})
    return Launched(nothing, (), (), (places[0],), None if makes is None else places[1])


PROGRAM = Program((), (), None, (), (), (), torch.device("cpu"))


@pytest.mark.parametrize(
    ("nodes", "right"),
    [
        ([*copies((0, 1)), launch(2, 3), *copies((1, 4))], ["launch", 2]),
        ([*copies((0, 1)), launch(1, 3), *copies((3, 4))], [1, "launch", 1]),
        ([launch(2, 3), *copies((3, 4), (0, 5)), launch(4, 6), *copies((6, 0))],
         ["launch", 2, "launch", 1]),
        ([launch(2, 3), *copies((0, 2)), launch(4, 6), *copies((5, 7))],
         ["launch", "launch", 2]),
        ([*copies((0, 2), (1, 0)), launch(2, None), *copies((0, 4))], [3, "launch"]),
        ([*copies((0, 1), (1, 2), (2, 3))], [3]),
    ],
)  # fmt: skip
def test_vectors_wait_for_others_as_long_as_they_may(
    nodes: list[VectorNode | Launched], right: list[int | str]
) -> None:
    memories = [VectorMemory(torch.float64, size=1) for _ in range(9)]
    found = ["launch" if isinstance(x[0], Launched) else len(x) for x in stages(nodes, memories)]
    assert found == right
