"""Waiting in large clusters: a line through small ones, against the whole simulation."""

from dataclasses import replace

import pytest

from megabatch.planning.exchange import averaging_seconds, waiting_for_columns
from megabatch.planning.ring import Cluster, Link, clip_passes, predict_step

FAST, SLOW = Link(300e9, 10e-6), Link(40e9, 25e-6)


@pytest.mark.parametrize("rate", [200e12, 5e15])  # messages hidden behind the work, and work hidden behind messages
@pytest.mark.parametrize(("nodes", "each", "rails"), [(1, 24, 1), (12, 4, 4), (12, 4, 1), (30, 1, 1)])
def test_the_line_is_the_simulation(nodes, each, rails, rate):
    cluster = Cluster(nodes, each, FAST, SLOW, rate, rails=rails)
    rows, width = 4096, 512
    name = "two_level" if nodes > 1 and each > 1 else "ring"
    whole = predict_step(name, cluster, rows * cluster.ranks, width, clip_passes(width, 2, statistics_bytes=8))
    found = waiting_for_columns(cluster, rows, width, 2)
    assert found.sent == pytest.approx(max(whole.sent), rel=1e-6)
    assert found.seconds == pytest.approx(whole.exposed, rel=0.03, abs=0.002 * whole.seconds)


def test_alone_nobody_waits():
    cluster = Cluster(1, 1, FAST, SLOW, 1e12)
    assert waiting_for_columns(cluster, 1000, 64, 2).seconds == 0
    assert averaging_seconds(cluster, 1e9) == 0


def test_averaging_goes_over_the_slowest_link():
    inside = Cluster(1, 8, FAST, SLOW, 1e12)
    assert averaging_seconds(inside, 8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 300e9)
    across = replace(inside, nodes=4)
    assert averaging_seconds(across, 8e9) == pytest.approx(2 * 31 / 32 * 8e9 / 40e9)
    assert averaging_seconds(replace(across, rails=8), 8e9) == pytest.approx(2 * 31 / 32 * 8e9 / 300e9)
