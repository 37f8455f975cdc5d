"""Short tensors in rows: each has the bits that it has alone, those of torch in float64."""

from __future__ import annotations

import torch

from torchzero_clip.core.norms.short_tensors import (
    LINF,
    POWERS,
    ROW,
    SCRATCH_SIZE,
    SHORT,
    SUM,
    reduced,
    rows_of,
)

SHAPES = [(), (0,), (1,), (ROW,), (ROW + 1,), (3, 5, 7), (SHORT,), (SHORT + 1,), (2, 0)]
WAYS = {
    "sum": (SUM, torch.sum),
    "1": (POWERS[1], lambda t: t.abs().sum()),
    "2": (POWERS[2], lambda t: t.square().sum().sqrt()),
    "inf": (LINF, lambda t: t.abs().max() if t.numel() else t.new_tensor(-torch.inf)),
}


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def long(name: str) -> object:
    return lambda some: torch.stack([WAYS[name][1](t.double()) for t in some])


def test_a_number_is_that_of_torch_in_double_precision() -> None:
    for name, (to, torchs) in WAYS.items():
        found = reduced(tensors(), to, long(name))  # type: ignore[arg-type]
        expected = torch.stack([torchs(t.double()) for t in tensors()])
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_number_has_the_same_bits_whatever_stands_beside_it() -> None:
    given = tensors()
    for name, (to, _) in WAYS.items():
        together = reduced(given, to, long(name))  # type: ignore[arg-type]
        alone = [reduced([t], to, long(name)) for t in given]  # type: ignore[arg-type]
        assert together.equal(torch.cat(alone)), name
        backwards = reduced(given[::-1], to, long(name))  # type: ignore[arg-type]
        assert together.equal(backwards.flip(0)), name


def test_more_than_scratch_holds_goes_in_batches() -> None:
    many = [torch.full((SHORT,), float(i)) for i in range(2 * SCRATCH_SIZE // SHORT + 1)]
    found = reduced(many, SUM, long("sum"))  # type: ignore[arg-type]
    assert found.tolist() == [float(i * SHORT) for i in range(len(many))]


def test_a_step_after_a_larger_one_sees_nothing_of_it() -> None:
    reduced([torch.full((ROW,), 9.0)], SUM, long("sum"))  # type: ignore[arg-type]
    assert reduced([torch.ones(3)], SUM, long("sum")).tolist() == [3]  # type: ignore[arg-type]


def test_a_tensor_takes_whole_rows() -> None:
    assert [rows_of(torch.Size(shape)) for shape in SHAPES] == [1, 0, 1, 1, 2, 1, 16, 17, 0]
