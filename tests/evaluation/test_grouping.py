"""Groups of hard negatives: what a dense search finds, balanced groups of neighbors, and no group with two equal ids."""

import pytest
import torch

import megabatch as mb
from helpers import unit
from megabatch_train.evaluation import embedding
from megabatch_train.evaluation.embedding import Choice
from megabatch_train.evaluation.grouping import find_neighbors, group_pairs, share_inside


def clustered(pairs, clusters, dim=16, seed=0):
    """Pairs around some centers: the hard negatives of a pair are the pairs around its center."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(clusters, dim, generator=generator, dtype=torch.float64)
    number = torch.randperm(pairs, generator=generator) % clusters
    both = [centers[number] + 0.1 * torch.randn(pairs, dim, generator=generator, dtype=torch.float64) for _ in range(2)]
    return (*(side / side.norm(dim=1, keepdim=True) for side in both), number)


@pytest.mark.parametrize("ids", [None, torch.arange(24) // 3, torch.stack([torch.arange(24) // 3, torch.arange(24) % 5], 1)])
def test_neighbors_are_the_hardest_negatives(monkeypatch, ids):
    monkeypatch.setattr(embedding, "QUERIES_AT_ONCE", 7)
    first, second = unit(24, 6, seed=0), unit(24, 6, seed=1)
    found = find_neighbors(first, second, Choice(5, absolute_margin=0.1), ids=ids)
    scores = first @ second.T
    same = torch.eye(24, dtype=torch.bool) if ids is None else torch.zeros(24, 24, dtype=torch.bool)
    for column in [] if ids is None else ids.view(24, -1).unbind(1):
        same |= column[:, None] == column
    scores[(scores >= scores.diagonal()[:, None] - 0.1) | same] = -torch.inf
    for row, neighbors in zip(scores, found, strict=True):
        wanted = row.argsort(descending=True)[: int((row > -torch.inf).sum())].tolist()
        given = [number for number in neighbors.tolist() if number >= 0]
        # With two ids, the search finds five texts with other ids in the second column, and then drops equal first ids.
        assert given == (wanted[:5] if ids is None or ids.dim() == 1 else [n for n in wanted if n in given])
        assert ids is None or ids.dim() == 1 or given[:1] == wanted[:1] or len(given) < 5
    assert find_neighbors(first[:0], second[:0], Choice(5)).shape == (0, 5)


@pytest.mark.parametrize(("pairs", "group_size"), [(96, 8), (100, 8), (101, 12), (64, 64), (50, 64), (7, 1), (1, 4), (0, 4)])
def test_groups_are_balanced_and_the_same_every_time(pairs, group_size):
    first, second, _ = clustered(pairs, 5)
    neighbors = find_neighbors(first, second, Choice(9))
    groups = group_pairs(neighbors, group_size)
    sizes = torch.bincount(groups)
    assert sizes.tolist() == [group_size] * (pairs // group_size) + [pairs % group_size] * (pairs % group_size > 0)
    assert torch.equal(groups, group_pairs(neighbors, group_size))


def test_clusters_of_negatives_become_groups():
    """12 centers with 16 pairs each: nearly all groups of 16 are clusters, and smaller groups lie within one."""
    first, second, number = clustered(192, 12)
    neighbors = find_neighbors(first, second, Choice(12))
    for group_size in (16, 8):
        groups = group_pairs(neighbors, group_size)
        pure = sum(len(torch.unique(number[groups == group])) == 1 for group in range(192 // group_size))
        assert pure > 0.8 * 192 / group_size
    assert share_inside(neighbors, group_pairs(neighbors, 16)) > 0.95
    assert share_inside(neighbors, group_pairs(neighbors, 24)) > 0.75  # groups that are larger than a cluster
    assert share_inside(neighbors, torch.arange(192) % 12) < 0.1


def test_hard_batches_have_a_higher_loss():
    first, second, _ = clustered(1024, 32)
    neighbors = find_neighbors(first, second, Choice(16))
    groups = group_pairs(neighbors, 32)
    losses = []
    for order in (groups.argsort(stable=True), torch.randperm(1024, generator=torch.Generator().manual_seed(0))):
        parts = order.view(-1, 64).unbind()
        losses.append(sum(float(mb.clip_loss(first[part], second[part], 20.0)) for part in parts) / len(parts))
    assert losses[0] > 2 * losses[1]


@pytest.mark.parametrize("columns", [1, 2])
def test_pairs_with_one_id_are_in_different_groups(columns):
    """Five captions of each image: their hard negatives are the captions of similar images."""
    first, second, number = clustered(40, 4)
    images = torch.arange(40).repeat_interleave(5)
    ids = images if columns == 1 else torch.stack([torch.arange(200), images], 1)
    neighbors = find_neighbors(first[images], second[images], Choice(20), ids=ids)
    groups, heedless = group_pairs(neighbors, 8, ids=ids), group_pairs(neighbors, 8)
    assert torch.bincount(groups).tolist() == [8] * 25
    distinct, largest = [], []
    for group in range(25):
        members = images[groups == group]
        distinct.append(len(torch.unique(members)))
        largest.append(int(torch.bincount(number[members]).max()))
    assert sum(distinct) >= 0.97 * 200
    assert sum(largest) > 0.8 * 200  # pairs of similar images
    assert sum(len(torch.unique(images[heedless == group])) for group in range(25)) < 0.7 * 200


def test_some_members_are_grouped_among_each_other():
    first, second, number = clustered(192, 12)
    neighbors = find_neighbors(first, second, Choice(15))
    members = torch.arange(192)[number != 3]
    groups = group_pairs(neighbors, 16, members=members, ids=torch.arange(192) + 7)
    assert torch.bincount(groups).tolist() == [16] * 11
    assert sum(len(torch.unique(number[members[groups == group]])) == 1 for group in range(11)) > 8


def test_pairs_without_neighbors_fill_the_groups():
    neighbors = torch.full((20, 3), -1)
    neighbors[4, 0], neighbors[9, 0] = 9, 4
    groups = group_pairs(neighbors, 4)
    assert torch.bincount(groups).tolist() == [4] * 5
    assert groups[4] == groups[9]
    assert share_inside(torch.full((4, 2), -1), torch.zeros(4, dtype=torch.int64)) == 0


def test_unreadable_pairs_have_no_neighbors():
    first, second = unit(12, 4, seed=0), unit(12, 4, seed=1)
    first[3], second[5] = torch.nan, torch.nan
    neighbors = find_neighbors(first, second, Choice(11))
    assert (neighbors[3] == -1).all()
    assert not (neighbors == 5).any()
    assert torch.bincount(group_pairs(neighbors, 4)).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("neighbors", "group_size", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), 2, r"neighbors must be \(N, k\) int64, got \(4,\)"),
        (torch.zeros(4, 2), 2, "int64, got .* torch.float32"),
        (torch.full((4, 2), 4), 2, "neighbors must be from -1 to 3, got 4 to 4"),
        (torch.zeros(4, 2, dtype=torch.int64), 0, "group_size must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(neighbors, group_size, message):
    with pytest.raises(ValueError, match=message):
        group_pairs(neighbors, group_size)
