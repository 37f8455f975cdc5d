"""The memory benchmark counts what it says it counts."""

import torch

from benchmarks.memory import COMBINATIONS, PEERS, measure, peaks, stored


def test_released_gradients_are_those_of_one_tensor_and_lower_the_peak():
    kept, gone = [measure(name, "quick", 0, "cpu") for name in ("AdamW", "AdamW, released")]
    assert kept.gradients == 4 * kept.parameters
    assert gone.gradients == 4 * 500 * 64  # the largest matrix, of the words: its gradient alone
    assert kept.state // kept.parameters == gone.state // gone.parameters == 8
    assert gone.peak < kept.peak - 2 * kept.parameters


def test_the_peak_is_the_highest_sum_and_growth_is_counted_inside_spans():
    changes = [(1, 100), (2, 50), (3, -50), (5, 30), (7, -80)]
    assert peaks(changes, []) == (150, 0)
    assert peaks(changes, [(4, 6)]) == (150, 30)
    assert peaks(changes, [(0, 1), (2, 3), (5, 9)]) == (150, 100)


def test_memory_that_tensors_share_counts_once():
    whole = torch.zeros(10)
    assert stored([whole, whole[2:], None, torch.zeros(3)]) == 40 + 12


def test_every_peer_has_a_combination():
    assert {name.split()[0] for name in COMBINATIONS} >= {*PEERS}
