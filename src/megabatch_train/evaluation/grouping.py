"""Groups of pairs that are hard negatives of each other: the neighbors of each pair, and a balanced partition."""

from collections.abc import Callable

import torch
from torch import Tensor

from megabatch_train.evaluation.embedding import Choice, hard_negatives

# ----------------------------------------------------------------------------------------------------------------------
# The graph. The neighbors of pair i are the pairs j whose second side is most similar to the first side of pair i, and which
# are not false negatives.


@torch.no_grad()
def find_neighbors(
    first: Tensor,  # (N, D)
    second: Tensor,  # (N, D)
    choice: Choice,
    *,
    ids: Tensor | None = None,  # (N,) or (N, 2) int64
    device: torch.device | None = None,
    tell: Callable[[int], None] | None = None,
) -> Tensor:  # (N, k) int64
    """Returns the hardest negatives of each pair among the other pairs, hardest first. Missing neighbors are −1.

    Args:
        first: (N, D) embeddings of the first side. NaN marks an unreadable sample, which is no neighbor and has none.
        second: (N, D) embeddings of the second side. Row i belongs to row i of `first`.
        choice: the pairs that can be neighbors. `choice.negatives` is the largest number of neighbors.
        ids: ids of the pairs. Pairs that agree in an id are not each other's neighbors.
        device: device of the computation (default: device of the embeddings).
        tell: a function that is called with the number of completed pairs.
    """
    own = torch.arange(len(first))
    last_column = None if ids is None else ids if ids.dim() == 1 else ids[:, 1]
    excluded = None if last_column is None else (last_column, last_column)
    rows, done = [], 0
    for part in hard_negatives(first, second, own, choice, ids=excluded, device=device):
        if ids is not None and ids.dim() == 2:  # the search has compared only the second column
            same = ids[part.clamp(min=0), 0] == ids[done : done + len(part), :1]
            part = part.masked_fill(same, -1)
        rows.append(part)
        done += len(part)
        if tell is not None:
            tell(done)
    return torch.cat(rows) if rows else torch.empty(0, choice.negatives, dtype=torch.int64)


def share_inside(neighbors: Tensor, groups: Tensor) -> float:  # (N, k), (N,)
    """Returns the share of all neighbors that are in the group of their pair."""
    is_inside = (groups[neighbors.clamp(min=0)] == groups[:, None]) & (neighbors >= 0)
    return float(is_inside.sum() / (neighbors >= 0).sum().clamp(min=1))


# ----------------------------------------------------------------------------------------------------------------------
# The partition. As in METIS, clusters that are connected most strongly are merged in pairs, level by level. All clusters of a
# level have the same size, so groups are balanced. An edge is heavier if the negative is harder.
#
# Only edges that are the heaviest of both of their clusters are merged at once, so all merges of a round are independent, and
# the result does not depend on the order of operations. Weights are integers, so that sums on a GPU are exact.
#
# Pairs that share an id are not each other's negatives, so a group should have only one of them. Therefore pairs are divided
# into layers: layer r has the r-th pair of each id. Edges connect pairs of one layer. If the neighbor of a pair is in another
# layer, the pair with the same id in its own layer takes its place.

ROUNDS = 64  # rounds of merging on a level. Clusters that are left are paired by their heaviest neighbor
FURTHER_LEVELS = 3  # levels after the group size is reached, if it is not a power of two
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D)  # odd constants that order edges of the same weight
_TIE_BITS = 24


@torch.no_grad()
def group_pairs(
    neighbors: Tensor,  # (N, k) int64
    group_size: int,
    *,
    ids: Tensor | None = None,  # (N,) or (N, 2) int64
    members: Tensor | None = None,  # (n,) int64
    device: torch.device | None = None,
) -> Tensor:  # (N,) or (n,) int64
    """Divides pairs into groups of equal size, such that the neighbors of a pair are in its group where possible.

    Every group has `group_size` pairs, except one if `group_size` does not divide the number of pairs. The result is the same
    on every device.

    Args:
        neighbors: (N, k) the neighbors of each pair, hardest first, −1 for none.
        group_size: number of pairs in a group.
        ids: ids of the pairs, as for `find_neighbors`. Pairs that share an id are put into different groups where possible.
        members: (n,) the pairs to divide, in ascending order (default: all).
        device: device of the computation (default: device of the neighbors).

    Returns:
        The number of the group of each member, counted from 0.
    """
    if neighbors.dim() != 2 or neighbors.dtype != torch.int64:
        raise ValueError(f"neighbors must be (N, k) int64, got {tuple(neighbors.shape)} {neighbors.dtype}")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if len(neighbors) and neighbors.numel() and not -1 <= int(neighbors.min()) <= int(neighbors.max()) < len(neighbors):
        raise ValueError(
            f"neighbors must be from -1 to {len(neighbors) - 1}, got {int(neighbors.min())} to {int(neighbors.max())}"
        )
    target = neighbors.device if device is None else device
    places = None
    if members is not None:
        places = torch.full((len(neighbors),), -1, dtype=torch.int64)
        places[members] = torch.arange(len(members))
        neighbors = neighbors[members]
        neighbors = torch.where(neighbors < 0, -1, places[neighbors.clamp(min=0)])
        ids = None if ids is None else ids[members]
    neighbors = neighbors.to(target)
    layers, sorted_by_layer = _Layers(_choose_ids(ids, len(neighbors)).to(target)), None
    sorted_by_layer = layers.layer.argsort(stable=True)
    numbers = torch.empty_like(sorted_by_layer)
    numbers[sorted_by_layer] = torch.arange(len(numbers), device=target)
    edges = _Edges.between(neighbors, layers, numbers)
    order = sorted_by_layer[_order_clusters(edges, len(neighbors), group_size)]
    groups = torch.empty_like(order)
    groups[order] = torch.arange(len(order), device=target) // group_size
    return groups.cpu()


def _choose_ids(ids: Tensor | None, count: int) -> Tensor:  # (N,) int64
    """Returns one id per pair. Of two columns, it is the column in which more pairs share an id."""
    if ids is None:
        return torch.arange(count)
    if ids.dim() == 1:
        return ids
    return min(ids.unbind(1), key=lambda column: len(torch.unique(column)))


class _Layers:
    """The layers of pairs. Layer r has the r-th pair of each id."""

    def __init__(self, ids: Tensor) -> None:  # (N,)
        _, self.component, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        self._by_component, self._counts = self.component.argsort(stable=True), counts
        self._starts = counts.cumsum(0) - counts
        self.layer = torch.empty_like(self.component)  # (N,)
        places = torch.arange(len(ids), device=ids.device)
        self.layer[self._by_component] = places - self._starts[self.component[self._by_component]]

    def move(self, pairs: Tensor, layer: Tensor) -> Tensor:  # (n,), (n,) → (n,)
        """Returns the pairs with the same ids in these layers, or −1 where a layer has none."""
        if len(self._counts) == len(self.component):  # there is only one layer
            return pairs
        component = self.component[pairs]
        exists = layer < self._counts[component]
        return torch.where(exists, self._by_component[torch.where(exists, self._starts[component] + layer, 0)], -1)


class _Edges:
    """The edges of an undirected graph of clusters, each once, with its weight."""

    def __init__(self, low: Tensor, high: Tensor, weight: Tensor) -> None:
        self.low, self.high, self.weight = low, high, weight  # (E,) int64 each, low < high

    @staticmethod
    def between(neighbors: Tensor, layers: _Layers, numbers: Tensor) -> "_Edges":
        """Returns the edges between pairs and their neighbors. `numbers` are the numbers of the pairs as clusters."""
        count, k = neighbors.shape
        low, high, weight = [], [], []
        pairs = torch.arange(count, device=neighbors.device)
        for place in range(k):
            other = neighbors[:, place]
            moved = torch.where(other < 0, -1, layers.move(other.clamp(min=0), layers.layer))
            valid = (moved >= 0) & (moved != pairs)
            a, b = numbers[pairs[valid]], numbers[moved[valid]]
            low.append(torch.minimum(a, b))
            high.append(torch.maximum(a, b))
            weight.append(torch.full_like(a, k - place))
        empty = pairs[:0]
        return _Edges(torch.cat([empty, *low]), torch.cat([empty, *high]), torch.cat([empty, *weight]))._add_parallel(count)

    def contract(self, cluster: Tensor, count: int) -> "_Edges":
        """Returns the edges between merged clusters. `cluster` has the new number of each cluster, or −1 to drop it."""
        a, b = cluster[self.low], cluster[self.high]
        kept = (a != b) & (a >= 0) & (b >= 0)
        a, b = a[kept], b[kept]
        return _Edges(torch.minimum(a, b), torch.maximum(a, b), self.weight[kept])._add_parallel(count)

    def _add_parallel(self, count: int) -> "_Edges":
        """Replaces edges between the same clusters by one edge with the sum of their weights."""
        keys, order = (self.low * count + self.high).sort()
        keys, lengths = torch.unique_consecutive(keys, return_counts=True)
        sums = torch.nn.functional.pad(self.weight[order].cumsum(0), (1, 0))
        ends = lengths.cumsum(0)
        return _Edges(keys // max(1, count), keys % max(1, count), sums[ends] - sums[ends - lengths])

    def scores(self) -> Tensor:  # (E,) int64
        """Returns the weights, such that edges of the same weight nearly always have different scores."""
        mixed = (self.low * _MIX[0] + self.high * _MIX[1]) * _MIX[1]
        return (self.weight.clamp(max=(1 << 38) - 1) << _TIE_BITS) | ((mixed >> 32) & ((1 << _TIE_BITS) - 1))


def _order_clusters(edges: _Edges, count: int, group_size: int) -> Tensor:  # (N,) int64
    """Returns all pairs in an order whose parts of `group_size` are the groups."""
    children: list[Tensor] = []  # (C, 2) the clusters of the level below, for each level
    rest: list[tuple[int, Tensor]] = []  # level and number of the cluster that had no partner
    size, limit = 1, group_size if group_size & (group_size - 1) == 0 else group_size << FURTHER_LEVELS
    while size < limit and count > 1:
        merged, alone = _pair_clusters(edges, count)
        if len(alone):
            rest.append((len(children), alone))
        cluster = torch.full((count,), -1, dtype=torch.int64, device=merged.device)
        numbers = torch.arange(len(merged), device=merged.device)
        cluster[merged[:, 0]] = numbers
        cluster[merged[:, 1]] = numbers
        edges, count, size = edges.contract(cluster, len(merged)), len(merged), 2 * size
        children.append(merged)
    tops = [(len(children), torch.arange(count, device=edges.low.device)), *reversed(rest)]
    orders = []
    for level, order in tops:
        for pairs in reversed(children[:level]):
            order = pairs[order].flatten()
        orders.append(order)
    return torch.cat(orders)


def _pair_clusters(edges: _Edges, count: int) -> tuple[Tensor, Tensor]:  # (C // 2, 2), (C % 2,)
    """Returns pairs of clusters that are connected strongly, and the cluster that has no partner if their number is odd."""
    device = edges.low.device
    low, high, score = edges.low, edges.high, edges.scores()
    heaviest = _maximum(count, low, high, score)
    favorite = torch.full((count,), -1, dtype=torch.int64, device=device)  # the cluster at the other end of the heaviest edge
    for own, other in ((low, high), (high, low)):
        is_heaviest = score == heaviest[own]
        favorite = favorite.scatter_reduce(0, own[is_heaviest], other[is_heaviest], "amax")
    is_free = torch.ones(count, dtype=torch.bool, device=device)
    merged: list[Tensor] = []
    for _ in range(ROUNDS):
        if not len(low):
            break
        heaviest = _maximum(count, low, high, score)
        chosen = ((score == heaviest[low]) & (score == heaviest[high])).nonzero().flatten()
        last = _maximum(count, low[chosen], high[chosen], chosen)  # of edges with equal scores, one is taken
        chosen = chosen[(last[low[chosen]] == chosen) & (last[high[chosen]] == chosen)]
        merged.append(torch.stack([low[chosen], high[chosen]], dim=1))
        is_free[low[chosen]] = False
        is_free[high[chosen]] = False
        kept = is_free[low] & is_free[high]
        low, high, score = low[kept], high[kept], score[kept]
    left = is_free.nonzero().flatten()
    # Clusters with the same favorite are near each other. Clusters without edges keep their order, which is by layer.
    group = torch.arange(count, device=device)
    for pairs in merged:
        group[pairs[:, 1]] = pairs[:, 0]
    key = torch.where(favorite[left] < 0, count, group[favorite[left].clamp(min=0)])
    left = left[key.argsort(stable=True)]
    even = len(left) - len(left) % 2
    return torch.cat([*merged, left[:even].view(-1, 2)]), left[even:]


def _maximum(count: int, low: Tensor, high: Tensor, values: Tensor) -> Tensor:  # (C,) int64
    """Returns the largest value of the edges of each cluster, −1 for a cluster without edges."""
    largest = torch.full((count,), -1, dtype=torch.int64, device=values.device)
    return largest.scatter_reduce(0, low, values, "amax").scatter_reduce(0, high, values, "amax")
