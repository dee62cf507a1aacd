"""Routes are data: every block meets every rank once, nothing is sent before it is there, and all sums come home."""

from unittest import mock

import pytest
import torch

from megabatch.ring import routes
from megabatch.ring.ranks import Ranks, check_route, choose_route, nodes_from, use_route


def even_nodes(k, size):
    return tuple(tuple(range(n * size, (n + 1) * size)) for n in range(k))


ALL = {
    **{f"ring of {n}": routes.ring(even_nodes(1, n)) for n in (1, 2, 3, 4, 8)},
    **{f"{k} nodes of {n}": routes.two_level(even_nodes(k, n)) for k in (1, 2, 3, 4) for n in (1, 2, 3, 4)},
    **{f"gather of {n}": routes.gather(even_nodes(1, n)) for n in (1, 2, 3, 8)},
    "ring over nodes that are mixed up": routes.ring(((0, 2), (3, 1))),
    "two levels over nodes that are mixed up": routes.two_level(((0, 2, 5), (3, 1, 4))),
}
every_route = pytest.mark.parametrize("route", ALL.values(), ids=ALL)


def ranks_of(route):
    return range(len(route.node_of))


@every_route
def test_every_block_meets_every_rank_once_and_its_own_first(route):
    for rank in ranks_of(route):
        met = [block for step in range(route.steps) for block in route.work(step, rank)]
        assert sorted(met) == list(ranks_of(route))
        assert route.work(0, rank) == (rank,)


@every_route
def test_blocks_arrive_whole_and_in_time_from_ranks_that_have_them(route):
    arrives = {(rank, rank): 0 for rank in ranks_of(route)}  # (block, rank) → step from which on it is there
    pieces = {}
    for hop in sorted(route.blocks, key=lambda hop: hop.needed):
        arrives[hop.block, hop.target] = hop.needed
        pieces.setdefault((hop.block, hop.target), []).append((hop.piece, hop.pieces, hop.source))
    for hop in route.blocks:
        assert arrives[hop.block, hop.source] <= hop.leaves < hop.needed
    for step in range(route.steps):
        for rank in ranks_of(route):
            assert all(arrives[block, rank] == step for block in route.work(step, rank))
    for found in pieces.values():
        assert [piece for piece, *_ in sorted(found)] == list(range(found[0][1]))
        assert len({source for *_, source in found}) == 1


@every_route
def test_sums_of_all_ranks_come_home_once(route):
    """Follows what each rank has found, piece by piece."""
    ranks = ranks_of(route)
    parts = 12  # of the columns of a block; divisible by every number of pieces here
    found = {(block, rank, part): {rank} for block in ranks for rank in ranks for part in range(parts)}
    events = [(hop.leaves, 0.5, "send", hop) for hop in route.sums]
    events += [(hop.needed, 0.4 if hop.needed > hop.leaves else 0.6, "merge", hop) for hop in route.sums]
    under_way = {}
    for *_, kind, hop in sorted(events, key=lambda event: event[:2]):
        columns = hop.part(parts)
        for part in range(columns.start, columns.stop):
            key = (hop.block, hop.source, hop.target, part)
            if kind == "send":
                under_way[key] = found.pop((hop.block, hop.source, part))  # gone: it cannot be sent twice
            else:
                merged = found[hop.block, hop.target, part]
                assert not merged & under_way[key]
                merged |= under_way.pop(key)
    assert not under_way
    assert found == {(block, block, part): set(ranks) for block in ranks for part in range(parts)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("k", [2, 3])
def test_two_levels_cross_between_nodes_once_for_each_node_and_in_pieces(k, size):
    route = routes.two_level(even_nodes(k, size))
    crossing = [hop for hop in route.blocks if route.crosses(hop)]
    into = {}
    for hop in crossing:
        into.setdefault((hop.block, route.node_of[hop.target]), []).append(1 / hop.pieces)
    assert len(into) == k * size * (k - 1)
    assert all(sum(parts) == pytest.approx(1) for parts in into.values())
    # No rank has more than one piece of a block on a slow link at a time; in a flat ring the last of a node has whole blocks.
    for step in range(route.steps):
        for rank in ranks_of(route):
            sent = [1 / hop.pieces for hop in crossing if (hop.leaves, hop.source) == (step, rank)]
            assert sum(sent) <= 1 / size
    flat = routes.ring(even_nodes(k, size))
    assert max(1 / hop.pieces for hop in flat.blocks if flat.crosses(hop)) == 1


@every_route
def test_both_parts_make_one_hop_less_than_there_are_ranks(route):
    ranks = len(route.node_of)
    for hops in (route.blocks, route.sums):
        for block in range(ranks):
            assert sum(1 / hop.pieces for hop in hops if hop.block == block) == pytest.approx(ranks - 1)


@every_route
def test_a_rank_knows_all_of_its_hops(route):
    for rank in ranks_of(route):
        for hops, by_step in zip((route.blocks, route.sums), route.hops_of(rank), strict=True):
            wanted = {}
            for hop in hops:
                if rank in (hop.source, hop.target):
                    wanted.setdefault(hop.leaves, []).append(hop)
            assert by_step == wanted


def test_nodes():
    assert nodes_from([0, 0, 1, 1]) == ((0, 1), (2, 3))
    assert nodes_from([5, 2, 5]) == ((1,), (0, 2))


@pytest.mark.parametrize("name", ["rings", "two_level:", "two_level:0", "two_level:x", "ring:2", "", None, 3])
def test_wrong_routes_are_refused(name):
    with pytest.raises(ValueError, match="route must be one of 'auto', 'ring', 'two_level', 'gather', or 'two_level:4'"):
        check_route(name)
    with pytest.raises(ValueError, match="route must be one of"), use_route(name):
        pass


@pytest.mark.parametrize(
    ("device", "pairs", "ranks", "steps"),
    [
        ("cuda", 128, 64, 2),  # 64 small blocks would take the host too long
        ("cuda", 8192, 4, 4),  # blocks that keep a GPU busy
        ("cuda", 4096, 64, 64),  # small blocks, but too many columns
        ("cpu", 128, 64, 64),
        ("cpu", 8, 64, 2),
    ],
)
def test_the_usual_route_gathers_small_blocks(device, pairs, ranks, steps):
    counts = (pairs,) * ranks
    found = Ranks(torch.device(device), None, rows=counts, columns=counts, nodes=even_nodes(1, ranks))
    with mock.patch.object(Ranks, "size", ranks):
        assert choose_route(found, column_bytes=512 * (2 + 4)).steps == steps
