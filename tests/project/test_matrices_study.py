"""What methods for matrices cost, by hand and on ranks, and what a clip does to each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import rows
from benchmarks.studies import matrices, matrix_clipping
from benchmarks.studies.matrices import DECOMPOSITIONS, METHODS, Line, costs, counted, table

DOCS = Path(__file__).parents[2] / "docs"
SHAPES = [(5, 2), (5, 2), (4, 6), (6,)]  # two embeddings, a matrix, a bias
PRODUCTS = 2 * (4 * 4 * 6 + 4 * 6 * 6)  # with both sides of the matrix
CUBES = 4**3 + 6**3
fake = pytest.mark.skipif(torch.__version__ < "2.9", reason="fake CUDA tensors need torch 2.9")


@fake
def test_soap_costs_what_its_formula_says() -> None:
    """L and R, into the bases and back; a power iteration, its QR, the average turned along."""
    found = costs("soap", SHAPES, stagger=False)
    between, renewed = 3 * PRODUCTS, 2 * CUBES + 8 / 3 * CUBES + 2 * PRODUCTS
    assert found.operations[0] == PRODUCTS + 9 * CUBES
    assert found.operations[1:10] == [between] * 9
    assert found.operations[10] == pytest.approx(between + renewed)
    assert found.sent == [0.0] * 11
    bases, averages, steps = 2 * (4 * 4 + 6 * 6), 2 * (24 + 2 * 10 + 6), 1
    assert 4 * (bases + averages) <= found.state <= 4 * (bases + averages + 4 * steps)


@pytest.mark.slow
@fake
def test_kron_and_soap_hyperball_cost_what_their_formulas_say() -> None:
    """Qᵀ Q from both sides; in a lesson A, B, their squares, the change of Q, and its length."""
    found = costs("kron", SHAPES, stagger=False).operations
    acts = 2 * PRODUCTS + 2 * 4**3 - 2 * 4 * 4 * 6  # Qᵀ Q is cheaper than Q u where Q is short
    lesson = PRODUCTS + PRODUCTS / 2 + 2 * PRODUCTS + 2 * CUBES + 2 * 2 * (4 * 4 + 6 * 6)
    assert found == [acts + lesson, *[acts] * 9, acts + lesson]
    found, acts = costs("soap_hyperball", SHAPES, stagger=False).operations, 3 * PRODUCTS
    renewed = 2 * CUBES + 8 / 3 * CUBES + 2 * PRODUCTS
    assert found == pytest.approx([acts + 9 * CUBES + renewed, *[acts + renewed] * 2])


@pytest.mark.slow
@fake
def test_matrices_take_turns() -> None:
    found = costs("soap", [*SHAPES, *[(4, 6)] * 3], stagger=True).operations
    between = 4 * 3 * PRODUCTS
    assert sum(x > between for x in found[1:]) == 4
    assert sum(found) == pytest.approx(
        sum(costs("soap", [*SHAPES, *[(4, 6)] * 3], False).operations)
    )


def test_decompositions_have_the_counts_of_the_book() -> None:
    a = torch.empty(3, 3, device="meta")
    assert DECOMPOSITIONS[torch.ops.aten._linalg_eigh](a) == 9 * 27
    assert DECOMPOSITIONS[torch.ops.aten.linalg_qr](a) == pytest.approx(2 * 4 / 3 * 27)
    assert DECOMPOSITIONS[torch.ops.aten.linalg_solve_triangular](a, a, upper=True) == 27


def test_what_nobody_can_count_is_refused() -> None:
    with matrices.Counted(), pytest.raises(NotImplementedError, match="say in DECOMPOSITIONS"):
        torch.linalg.svd(torch.ones(2, 2))


@fake
@pytest.mark.slow
def test_ranks_share_operations_and_state() -> None:
    """An owner each; both send half of the matrix that is not theirs, and half of what was made."""
    shapes = [*SHAPES, (4, 6)]
    muon, soap = counted(["muon", "soap"], shapes, 2)
    for line in (muon, soap):
        assert line.between_rank == line.between_whole / 2
        assert line.refresh_rank == pytest.approx(line.refresh_whole / 2)
        assert line.state_rank < 0.6 * line.state_whole
    half = 4 * 12
    assert (muon.sent_between, muon.sent_refresh) == (2 * half, 2 * half)
    assert (soap.sent_between, soap.sent_refresh) == (4 * half, 8 * half)
    assert (soap.every, muon.every) == (10, 1)
    assert "| `soap` |" in table([muon, soap])


# ---------------------------------------------------------------------- the results


def test_no_rank_does_much_more_than_its_share() -> None:
    lines = rows.read(matrices.RESULTS, Line)
    assert [x.method for x in lines] == list(METHODS)
    for x in lines:
        for rank, whole in (
            (x.between_rank, x.between_whole),
            (x.refresh_rank, x.refresh_whole),
            (x.first_rank, x.first_whole),
        ):
            assert rank <= 1.1 / matrices.RANKS * whole, x.method


def test_no_step_is_ten_times_as_long_and_turns_even_them_out() -> None:
    renewed = [x for x in rows.read(matrices.RESULTS, Line) if x.every > 1]
    for x in renewed:
        mean = x.refresh_rank / x.longest
        assert max(x.first_rank, x.refresh_rank) < 10 * min(mean, x.between_rank), x.method
        assert x.turns < 0.6 * x.longest, x.method
    assert "soap" in [x.method for x in renewed]


# ---------------------------------------------------------------------- the page


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_clip() -> None:
    page = (DOCS / "matrices.md").read_text()
    for name, text in matrix_clipping.tables().items():
        assert text in page, name
