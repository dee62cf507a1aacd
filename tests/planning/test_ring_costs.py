"""The cost model: bytes as they are counted, seconds that behave as they must, and waiting in large clusters."""

from dataclasses import replace

import pytest
import torch

import megabatch as mb
from helpers import leaves, unit
from megabatch import ring
from megabatch.ring.ranks import nodes_from
from megabatch_train.planning.costs import (
    SCHEDULES,
    Cluster,
    Link,
    all_reduce_seconds,
    clip_passes,
    estimate_wait,
    predict,
    traffic,
)

D = 6


def counted(group, rank, schedule, counts, dtype):
    x, y = leaves(unit(counts[rank], D, seed=rank, dtype=dtype), unit(counts[rank], D, seed=rank + 9, dtype=dtype))
    with ring.use_route(schedule), ring.count_traffic() as sent:
        value = mb.clip_loss(x, y, 2.0, group=group)
        forward = sent.bytes
        value.backward()
    return forward, sent.bytes - forward, sent.crossing


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["ring", "two_level:2", "gather"])
@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [5, 0, 7, 2]])
def test_bytes_are_those_that_are_sent(pool, counts, schedule, dtype):
    found = pool.run(counted, 4, schedule, counts, dtype)
    name, _, size = schedule.partition(":")
    nodes = nodes_from([rank // int(size or 4) for rank in range(4)])
    wide = 8 if dtype == torch.float64 else 4
    forward, backward = clip_passes(D, dtype.itemsize, sums_bytes=wide)
    of_both = [traffic(SCHEDULES[name](nodes), counts, lap) for lap in (forward, backward)]
    assert [sent for sent, *_ in found] == [sum(both) for both in zip(*of_both, strict=True)]
    assert not any(sent for _, sent, _ in found)  # the forward pass computes the gradients
    if name == "two_level":
        assert sum(crossing for *_, crossing in found) > 0


FAST, SLOW = Link(100e9, 5e-6), Link(10e9, 20e-6)


def cluster(nodes=4, ranks=8, rate=400e12, **options):
    return Cluster(nodes, ranks, FAST, SLOW, rate, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_sent_bytes_are_the_least(name):
    schedule, columns = SCHEDULES[name](cluster().layout), [2**13] * 32
    sent = [sum(both) for both in zip(*(traffic(schedule, columns, lap) for lap in clip_passes(512, 2)), strict=True)]
    assert sent == [31 * 2**13 * (2 * 512 + 8 + 2 * 512 + 8 + 4 + 4 * 512)] * 32


def test_infinite_links_expose_nothing_and_slow_ones_everything():
    lap = clip_passes(512, 2)[1]
    free = Cluster(2, 4, Link(1e30), Link(1e30), 100e12)
    assert predict("ring", free, 2**16, 512, lap).exposed == pytest.approx(0, abs=1e-9)
    idle = Cluster(1, 8, Link(1e9), Link(1e9), 1e30)
    cost = predict("ring", idle, 2**16, 512, lap)
    sent = traffic(SCHEDULES["ring"](idle.layout), [2**13] * 8, lap)
    assert cost.exposed == pytest.approx(cost.seconds)
    # A rank's link carries the block and the sums of every step but the first, one after the other.
    assert cost.exposed == pytest.approx(sent[0] / 1e9, rel=0.02)


@pytest.mark.parametrize("rails", [1, 8])
def test_a_link_for_each_rank_is_what_two_levels_use_and_a_flat_ring_cannot(rails):
    lap = clip_passes(512, 2)[1]
    slow = cluster(rate=1e16, rails=rails)
    flat, deep = (predict(name, slow, 2**18, 512, lap) for name in ("ring", "two_level"))
    if rails == 8:
        assert deep.seconds < flat.seconds / 4
    else:
        # One link has nearly the same to carry either way: the blocks of the other 24 ranks, or those of 31.
        assert deep.seconds == pytest.approx(flat.seconds * 24 / 31, rel=0.03)


def test_a_ring_crosses_between_nodes_as_often_as_two_levels_do_and_gather_far_more():
    crossing = {}
    for name in SCHEDULES:
        schedule = SCHEDULES[name](cluster().layout)
        crossing[name] = sum(hop.length(2**13) for hop in schedule.blocks if schedule.crosses(hop))
    assert crossing["two_level"] == pytest.approx(crossing["ring"] * 24 / 31, rel=0.01)
    assert crossing["gather"] == crossing["two_level"] * 8


def test_wrong_names():
    with pytest.raises(ValueError, match=r"name .* got 'auto'"):
        predict("auto", cluster(), 1024, 64, clip_passes(64, 4)[0])


WIDE, NARROW = Link(300e9, 10e-6), Link(40e9, 25e-6)


@pytest.mark.parametrize("rate", [200e12, 5e15])  # messages hidden behind the work, and work hidden behind messages
@pytest.mark.parametrize(("nodes", "each", "rails"), [(1, 24, 1), (12, 4, 4), (12, 4, 1), (30, 1, 1)])
def test_the_line_is_the_simulation(nodes, each, rails, rate):
    cluster = Cluster(nodes, each, WIDE, NARROW, rate, rails=rails)
    rows, width = 4096, 512
    name = "two_level" if nodes > 1 and each > 1 else "ring"
    passes = clip_passes(width, 2, statistics_bytes=8)
    whole = [predict(name, cluster, rows * cluster.ranks, width, lap) for lap in passes]
    exposed, seconds = sum(cost.exposed for cost in whole), sum(cost.seconds for cost in whole)
    assert estimate_wait(cluster, rows, width, 2) == pytest.approx(exposed, rel=0.03, abs=0.002 * seconds)


def test_alone_nobody_waits():
    cluster = Cluster(1, 1, WIDE, NARROW, 1e12)
    assert estimate_wait(cluster, 1000, 64, 2) == 0
    assert all_reduce_seconds(cluster, 1e9) == 0


def test_averaging_goes_over_the_slowest_link():
    inside = Cluster(1, 8, WIDE, NARROW, 1e12)
    assert all_reduce_seconds(inside, 8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 300e9)
    across = replace(inside, nodes=4)
    assert all_reduce_seconds(across, 8e9) == pytest.approx(2 * 31 / 32 * 8e9 / 40e9)
    assert all_reduce_seconds(replace(across, rails=8), 8e9) == pytest.approx(2 * 31 / 32 * 8e9 / 300e9)
