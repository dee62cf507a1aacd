"""Chance level against random orders of the candidates, counted one by one."""

from itertools import permutations

import pytest

from megabatch_train.evaluation.evaluate import expect_rank, expect_recall


@pytest.mark.parametrize("correct", [1, 2, 4])
def test_chance_level_is_the_mean_over_all_orders(correct):
    orders = [[order.index(i) for i in range(correct)] for order in permutations(range(6))]  # positions of the correct ones
    for k in (1, 3, 6, 9):
        assert expect_recall(k, 6, correct) == pytest.approx(sum(min(found) < k for found in orders) / len(orders))
    assert expect_rank(6, correct) == pytest.approx(sum(min(found) + 1 for found in orders) / len(orders))


def test_one_correct_candidate():
    assert expect_recall(5, 1000) == 0.005
    assert expect_recall(10, 20, 2) == pytest.approx(1 - 43758 / 184756)  # 1 - C(18, 10) / C(20, 10)
    assert expect_rank(9) == 5.0
