"""The cost model: bytes as they are counted, operations as they follow, seconds that behave as they must."""

import pytest
import torch

import megabatch as mb
from helpers import leaves, unit
from megabatch import ring
from megabatch.planning.ring import SCHEDULES, Cluster, Link, clip_passes, predict, predict_step, siglip_passes, traffic
from megabatch.ring.topology import nodes_from

D = 6


def counted(group, rank, schedule, counts, loss, dtype):
    x, y = leaves(unit(counts[rank], D, seed=rank, dtype=dtype), unit(counts[rank], D, seed=rank + 9, dtype=dtype))
    with ring.using(schedule), ring.counted() as sent:
        value = mb.clip_loss(x, y, 2.0, group=group) if loss == "clip" else mb.siglip_loss(x, y, 2.0, -1.0, group=group)
        forward = sent.bytes
        value.backward()
    return forward, sent.bytes - forward, sent.crossing


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("schedule", ["ring", "two_level:2", "gather"])
@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [5, 0, 7, 2]])
def test_bytes_are_those_that_are_sent(pool, counts, schedule, loss, dtype):
    found = pool.run(counted, 4, schedule, counts, loss, dtype)
    name, _, size = schedule.partition(":")
    nodes = nodes_from([rank // int(size or 4) for rank in range(4)])
    wide = 8 if dtype == torch.float64 else 4
    passes = (clip_passes if loss == "clip" else siglip_passes)(D, dtype.itemsize, sums_bytes=wide)
    wanted = [traffic(SCHEDULES[name](nodes), counts, lap) for lap in passes]
    assert [forward for forward, *_ in found] == wanted[0]
    assert [backward for _, backward, _ in found] == (wanted[1] if loss == "clip" else [0] * 4)
    if name == "two_level":
        assert sum(crossing for *_, crossing in found) > 0


FAST, SLOW = Link(100e9, 5e-6), Link(10e9, 20e-6)


def cluster(nodes=4, ranks=8, rate=400e12, **options):
    return Cluster(nodes, ranks, FAST, SLOW, rate, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_work_is_shared_and_sent_bytes_are_the_least(name):
    batch, width = 2**18, 512
    cost = predict_step(name, cluster(), batch, width, clip_passes(width, 2))
    assert sum(cost.operations) == 8 * batch**2 * width
    columns = batch * 31 / 32
    assert cost.sent == [pytest.approx(columns * (2 * 512 + 8 + 2 * 512 + 8 + 4 + 4 * 512))] * 32
    assert cost.seconds == pytest.approx(cost.working + cost.exposed, rel=1e-9)


def test_infinite_links_expose_nothing_and_slow_ones_everything():
    lap = clip_passes(512, 2)[1]
    free = Cluster(2, 4, Link(1e30), Link(1e30), 100e12)
    assert predict("ring", free, 2**16, 512, lap).exposed == pytest.approx(0, abs=1e-9)
    idle = Cluster(1, 8, Link(1e9), Link(1e9), 1e30)
    cost = predict("ring", idle, 2**16, 512, lap)
    # A rank's link carries the block and the sums of every step but the first, one after the other.
    assert cost.exposed == pytest.approx(cost.sent[0] / 1e9, rel=0.02)


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
    costs = {name: predict(name, cluster(), 2**18, 512, clip_passes(512, 2)[0]) for name in SCHEDULES}
    assert costs["two_level"].crossing[0] == pytest.approx(costs["ring"].crossing[0] * 24 / 31, rel=0.01)
    assert costs["gather"].crossing[0] == pytest.approx(costs["two_level"].crossing[0] * 8, rel=0.01)


def test_wrong_names():
    with pytest.raises(ValueError, match="name must be one of 'ring', 'two_level', 'gather', got 'auto'"):
        predict("auto", cluster(), 1024, 64, siglip_passes(64, 4)[0])
