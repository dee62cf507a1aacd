"""Ranks that disagree, do not come, or die: all others say so, and nothing hangs."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

import megabatch as mb
from helpers import PATIENCE, leaves, unit
from megabatch import ring
from megabatch.ring import lap, ranks
from megabatch.ring.ranks import Ranks, address, agree
from ranks import Pool


def disagree(group, rank, what):
    odd = rank == 1
    x, y = leaves(*(unit(4, 6, seed=s, dtype=torch.float32) for s in (rank, rank + 10)))
    ids, route, backend, loss = None, "ring", "eager", mb.clip_loss
    scale = torch.tensor(3.0, requires_grad=True)
    if odd and what == "width":
        x, y = x[:, :5], y[:, :5]
    if odd and what == "dtype":
        x, y = x.double(), y.double()
    if odd and what == "backend":
        backend = "triton"
    if odd and what == "route":
        route = "gather"
    if odd and what == "ids":
        ids = torch.arange(4)
    if odd and what == "operation":
        loss = lambda *a, **k: mb.siglip_loss(*a, 0.0, **k)  # noqa: E731
    if odd and what == "needs":
        y = y.detach()
    if what == "nobody has rows":
        x, y = x[:0], y[:0]
    try:
        with ring.use_route(route):
            loss(x, y, scale, ids=ids, group=group, backend=backend).backward()
        message = None
    except ValueError as error:
        message = str(error)
    same = [side.detach()[:, :5].float() for side in (x, y)]
    return message, mb.clip_loss(*same, 3.0, group=group).isfinite() if len(x) else True


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("width", "the embedding dimension is 6 on ranks 0 2, 5 on rank 1"),
        (
            "dtype",
            "the dtype of the embeddings is float32 and float32 on ranks 0 2, float64 and float64 on rank 1; the precision",
        ),
        ("backend", "the backend is eager on ranks 0 2, triton on rank 1"),
        ("route", "the route is ring on ranks 0 2, gather on rank 1"),
        ("ids", "the set of excluded pairs is diagonal on ranks 0 2, ids and diagonal on rank 1"),
        (
            "operation",
            (
                "the operation is cross-entropy on ranks 0 2, sigmoid loss on rank 1; "
                "the loss is clip_loss on ranks 0 2, siglip_loss on rank 1"
            ),
        ),
        ("needs", "the set of inputs that need a gradient is x y scale on ranks 0 2, x scale on rank 1"),
        (
            "nobody has rows",
            "the batch must have at least one pair: the mean over no pairs is undefined, got no rows on any rank",
        ),
    ],
)
def test_a_disagreement_is_the_same_error_on_every_rank_and_leaves_the_group_usable(pool, what, message):
    if what == "backend":
        pytest.importorskip("triton")
    answers = pool.run(disagree, 3, what)
    assert len({found for found, _ in answers}) == 1
    assert message in answers[0][0]
    assert all(usable for _, usable in answers)


CONTRAST = ("query-query", "query-key")  # the order has no meaning, and messages have one of their own
CALLS = {
    "info_nce_loss": lambda x, y, g: mb.info_nce_loss(x, y, scale=3.0, contrast=CONTRAST, group=g),
    "info_nce_loss reordered": lambda x, y, g: mb.info_nce_loss(x, y, scale=3.0, contrast=CONTRAST[::-1], group=g),
    "info_nce_loss of keys": lambda x, y, g: mb.info_nce_loss(x, y, scale=3.0, contrast=("query-key", "key-key"), group=g),
    "info_nce_loss symmetric": lambda x, y, g: mb.info_nce_loss(x, y, scale=3.0, symmetric=True, group=g),
    "clip": lambda x, y, g: mb.clip_loss(x, y, 3.0, group=g),
    "smoothed clip": lambda x, y, g: mb.clip_loss(x, y, 3.0, label_smoothing=0.1, group=g),
    "nt_xent_loss": lambda x, y, g: mb.nt_xent_loss(x, y, scale=3.0, group=g),
    "matryoshka": lambda x, y, g: mb.matryoshka_clip_loss(x, y, 3.0, widths=[6], group=g),
}


def call_differently(group, rank, usual, odd):
    x, y = leaves(*(unit(4, 6, seed=s) for s in (rank, rank + 10)))
    try:
        CALLS[odd if rank == 1 else usual](x, y, group).backward()
        message = None
    except ValueError as error:
        message = str(error)
    return message, mb.clip_loss(x, y, 3.0, group=group).isfinite()


@pytest.mark.parametrize(
    ("usual", "odd", "message"),
    [
        (
            "info_nce_loss",
            "info_nce_loss of keys",
            (
                "the operation is logsumexp (contrast query-key query-query) on ranks 0 2, "
                "logsumexp (contrast query-key key-key) on rank 1"
            ),
        ),
        (
            "info_nce_loss",
            "info_nce_loss symmetric",
            (
                "the operation is logsumexp (contrast query-key query-query) on ranks 0 2, "
                "cross-entropy (contrast query-key symmetric) on rank 1"
            ),
        ),
        (
            "clip",
            "nt_xent_loss",
            (
                "the operation is cross-entropy on ranks 0 2, loss of a batch against itself on rank 1; "
                "the loss is clip_loss on ranks 0 2, nt_xent_loss on rank 1"
            ),
        ),
        (
            "nt_xent_loss",
            "matryoshka",
            (
                "the operation is loss of a batch against itself on ranks 0 2, sum over ranks on rank 1; "
                "the loss is nt_xent_loss on ranks 0 2, matryoshka_clip_loss(weights=[1.0]) on rank 1"
            ),
        ),
        (
            "clip",
            "smoothed clip",
            (
                "the operation is cross-entropy on ranks 0 2, logsumexp on rank 1; "
                "the loss is clip_loss on ranks 0 2, clip_loss(label_smoothing=0.1) on rank 1"
            ),
        ),
        (
            "smoothed clip",
            "clip",
            (
                "the operation is logsumexp on ranks 0 2, cross-entropy on rank 1; "
                "the loss is clip_loss(label_smoothing=0.1) on ranks 0 2, clip_loss on rank 1"
            ),
        ),
        ("info_nce_loss", "info_nce_loss reordered", None),
    ],
)
def test_different_calls_are_one_message(pool, usual, odd, message):
    answers = pool.run(call_differently, 3, usual, odd)
    wanted = None if message is None else f"the ranks of the group disagree: {message}"
    assert [message for message, _ in answers] == [wanted] * 3
    assert all(usable for _, usable in answers)


# Losses with a setting of each rank: the same operations on the same shapes, whose results would belong to no loss.
SETTINGS = {
    "label_smoothing of clip_loss": (
        lambda x, y, g, value: mb.clip_loss(x, y, 3.0, label_smoothing=value, group=g),
        (0.1, 0.2),
        "the loss is clip_loss(label_smoothing=0.1) on rank 0, clip_loss(label_smoothing=0.2) on rank 1",
    ),
    "reduction": (
        lambda x, y, g, value: mb.clip_loss(x, y, 3.0, reduction=value, group=g).mean(),
        ("mean", "none"),
        (
            "the operation is cross-entropy on rank 0, logsumexp on rank 1; "
            "the loss is clip_loss on rank 0, clip_loss(reduction=none) on rank 1"
        ),
    ),
    "reduction of sup_con_loss": (
        lambda x, y, g, value: mb.sup_con_loss(x, torch.arange(4) // 2, reduction=value, group=g).mean(),
        ("none", "sum"),
        "the loss is sup_con_loss(form=out, reduction=none) on rank 0, sup_con_loss(form=out, reduction=sum) on rank 1",
    ),
    "reduction of late_interaction_loss": (
        lambda x, y, g, value: mb.late_interaction_loss(x[:, None], y[:, None], scale=3.0, reduction=value, group=g).mean(),
        ("sum", "mean"),
        "the loss is late_interaction_loss(reduction=sum) on rank 0, late_interaction_loss on rank 1",
    ),
    "label_smoothing of info_nce_loss": (
        lambda x, y, g, value: mb.info_nce_loss(x, y, scale=3.0, label_smoothing=value, group=g),
        (0.1, 0.2),
        "the loss is info_nce_loss(label_smoothing=0.1) on rank 0, info_nce_loss(label_smoothing=0.2) on rank 1",
    ),
    "margin": (
        lambda x, y, g, value: mb.info_nce_loss(x, y, scale=3.0, margin=value, group=g),
        (0.1, 0.2),
        "the loss is info_nce_loss(margin=0.1) on rank 0, info_nce_loss(margin=0.2) on rank 1",
    ),
    "beta": (
        lambda x, y, g, value: mb.hcl_loss(x, y, scale=3.0, beta=value, group=g),
        (0.5, 1.0),
        "the loss is hcl_loss(beta=0.5, tau_plus=0.1) on rank 0, hcl_loss(beta=1.0, tau_plus=0.1) on rank 1",
    ),
    "tau_plus": (
        lambda x, y, g, value: mb.hcl_loss(x, y, scale=3.0, tau_plus=value, group=g),
        (0.0, 0.1),
        "the loss is hcl_loss(beta=1.0) on rank 0, hcl_loss(beta=1.0, tau_plus=0.1) on rank 1",
    ),
    "the loss": (
        lambda x, y, g, value: value(x, y, scale=3.0, group=g),
        (mb.dcl_loss, mb.info_nce_loss),
        (
            "the operation is logsumexp (contrast query-key) on rank 0, cross-entropy (contrast query-key) on rank 1; "
            "the loss is dcl_loss on rank 0, info_nce_loss on rank 1"
        ),
    ),
    "weights": (
        lambda x, y, g, value: mb.matryoshka_clip_loss(x, y, 3.0, widths=[3, 6], weights=value, group=g),
        ([1, 1], [1, 2]),
        "the loss is matryoshka_clip_loss(weights=[1.0, 1.0]) on rank 0, matryoshka_clip_loss(weights=[1.0, 2.0]) on rank 1",
    ),
    "symmetric": (
        lambda x, y, g, value: mb.info_nce_loss(x, y, scale=3.0, symmetric=value, group=g),
        (False, True),
        "the operation is cross-entropy (contrast query-key) on rank 0, cross-entropy (contrast query-key symmetric) on rank 1",
    ),
    "ids_are_positives": (
        lambda x, y, g, value: mb.siglip_loss(x, y, 3.0, 0.0, ids=torch.arange(4), ids_are_positives=value, group=g),
        (False, True),
        "the meaning of equal ids is no negatives on rank 0, positives on rank 1",
    ),
}


def with_settings(group, rank, name):
    loss, values, _ = SETTINGS[name]
    x, y = leaves(*(unit(4, 6, seed=s) for s in (rank, rank + 10)))
    try:
        loss(x, y, group, values[rank]).backward()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_with_different_settings_all_say_so(pool, name):
    assert pool.run(with_settings, 2, name) == [f"the ranks of the group disagree: {SETTINGS[name][2]}"] * 2


def long_terms(group, rank, odd):
    ranks = Ranks.at(address(group), "a test", torch.device("cpu"))
    numbers = list(range(100, 301))
    if rank == 1 and odd is not None:
        numbers.remove(odd)
    return agree(ranks, {"the numbers": numbers}, rank, rank).rows


def test_terms_of_any_length_are_compared(pool):
    """A message has a fixed size; two hundred numbers do not fit in it."""
    assert pool.run(long_terms, 2, None) == [(0, 1), (0, 1)]
    for worked, answer in pool.attempt(long_terms, 2, 250):
        assert not worked
        assert re.search(
            r"disagree: the numbers is \[100, 101, [^a-z]*\.\.\. #\w+ on rank 0, \[100, 101, [^a-z]*\.\.\. #\w+ on rank 1",
            answer,
        )


def uneven_nodes(group, rank):
    x = unit(3, 4, seed=rank)
    with ring.use_route("two_level:2"):
        mb.clip_loss(x, x, 1.0, group=group)


def test_nodes_of_different_sizes_have_no_two_levels(pool):
    for worked, answer in pool.attempt(uneven_nodes, 3):
        assert not worked
        assert "the route 'two_level' needs equally many ranks on every node, got 2, 1; use 'ring'" in answer


def gather(group, rank):
    """All ranks have started and imported what they need, also PyTorch's compiler; the default group waits longer than 6 s."""
    x = torch.ones(3, 4, requires_grad=True)
    mb.pairwise_logsumexp(x, x, 1.0).row.sum().backward()
    dist.barrier()


def stay_away(group, rank):
    x = unit(3, 4, seed=rank)
    if rank == 1:
        return time.monotonic()
    return mb.clip_loss(x, x, 1.0, group=group)


def test_ranks_in_messages():
    assert [ranks._ranks(several) for several in ([3], [2, 0], [0, 1, 2, 3, 5, 6, 9, 8, 10])] == [
        "rank 3",
        "ranks 0, 2",
        "ranks 0 to 3, 5, 6, 8 to 10",
    ]


def die(group, rank):
    x, y = leaves(unit(3, 4, seed=rank), unit(3, 4, seed=rank + 5))
    with ring.use_route("ring"):
        loss = mb.clip_loss(x, y, 1.0, reduction="sum", group=group)  # backward runs the second lap
        post = lap.Lap._post_sums

        def fall_over(self, step, *rest):
            if rank == 1 and step == 1:
                os._exit(1)
            return post(self, step, *rest)

        lap.Lap._post_sums = fall_over
        loss.backward()


@pytest.mark.thorough
def test_a_rank_that_does_not_come_and_one_that_dies_on_the_way():
    """The two ranks of the first group have waited 6 s for one another in vain; the group of all three still works."""
    fragile = Pool(3, seconds=6)
    try:
        fragile.run(gather, 3)
        start = time.monotonic()
        (worked, answer), _ = fragile.attempt(stay_away, 2, seconds=PATIENCE)
        answers = fragile.attempt(die, 3, seconds=PATIENCE)
        assert time.monotonic() - start < PATIENCE / 4
    finally:
        fragile.close()
    assert not worked
    assert "RingError: rank 0 of 2 failed before the first step of cross-entropy, waiting for rank 1: " in answer
    assert not any(worked for worked, _ in answers)
    for rank, doing in ((0, "sending to rank 1 and receiving from rank 2"), (2, "sending to rank 0 and receiving from rank 1")):
        said = answers[rank][1]
        # Which of the messages to and from the dead rank is missed first is a matter of time.
        assert re.search(
            rf"RingError: rank {rank} of 3 failed (at|after) step 2 of 3 of logsumexp backward, {doing}: ", said
        ), said
        assert "Another rank has probably died" in said
    assert answers[1][1] == "the process of rank 1 has ended"
