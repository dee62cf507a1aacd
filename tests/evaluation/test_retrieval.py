"""Recall and ranks against the dense computation in float64: one caption, several, ties, NaN, many ranks."""

import math

import pytest
import torch

from helpers import aligned_pairs, tile_size, unit
from megabatch import pairwise_rank
from megabatch_train.evaluation import classifier, ranks_of_best, retrieval, zero_shot


def dense_ranks(x, y, rows, columns):
    """The number of columns that are not the row's own and come before the best of its own, by sorting everything."""
    found = []
    for i, similarities in enumerate(x @ y.T):
        own = set(columns[rows == i].tolist())
        order = torch.sort(similarities, descending=True, stable=True).indices.tolist()
        best = min(order.index(j) for j in own)
        found.append(sum(j not in own for j in order[:best]))
    return torch.tensor(found)


def captions(N, D=12, *, seed=0, noise=3.0):
    """N images with 1 to 4 captions each, in no order."""
    generator = torch.Generator().manual_seed(seed)
    owners = torch.cat([torch.arange(N), torch.randint(0, N, (2 * N,), generator=generator)])
    owners = owners[torch.randperm(len(owners), generator=generator)]
    image = unit(N, D, seed=seed)
    text = torch.nn.functional.normalize(image[owners] + noise * unit(len(owners), D, seed=seed + 1), dim=1)
    return image, text, owners


def as_open_clip(image, text):
    """open_clip's own formulas, on the dense matrix."""
    wanted = torch.arange(len(text))[:, None]
    found = {}
    for name, logits in (("image_to_text", image @ text.T), ("text_to_image", text @ image.T)):
        ranks = (torch.argsort(logits, descending=True) == wanted).nonzero()[:, 1].double()
        found[f"{name}_mean_rank"] = ranks.mean().item() + 1
        found[f"{name}_median_rank"] = math.floor(ranks.quantile(0.5).item()) + 1
        found[f"{name}_MRR"] = (1 / (ranks + 1)).mean().item()
        found[f"{name}_nDCG@10"] = torch.where(ranks < 10, 1 / torch.log2(ranks + 2), 0.0).mean().item()
        for k in (1, 5, 10):
            found[f"{name}_R@{k}"] = (ranks < k).double().mean().item()
    return found


def test_ranks_under_autocast_are_those_of_rounded_embeddings():
    """All embeddings nearly alike: similarities rounded to bfloat16 would all be equal, and every match among the best."""
    image, text, owners = captions(200, 32)
    image, text = (torch.nn.functional.normalize(torch.ones(32) + 0.02 * side, dim=1).float() for side in (image, text))
    texts = torch.arange(len(text))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        there, back = ranks_of_best(image, text, owners, texts)
    image, text = (side.bfloat16().float() for side in (image, text))
    assert torch.equal(there, ranks_of_best(image, text, owners, texts).row)
    assert torch.equal(back, ranks_of_best(text, image, texts, owners).row)
    assert back.double().mean() > 10


@pytest.mark.parametrize("N", [1, 2, 37, 100])
def test_one_caption_each_as_open_clip_counts(N):
    image, text = aligned_pairs(N, 10, noise=1.2, seed=N)
    found = retrieval(image, text)
    assert found.pop("num_samples") == N
    expected = as_open_clip(image, text)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    assert retrieval(image, text, torch.arange(N)) == {**found, "num_samples": N}


@pytest.mark.parametrize("tile", [(1024, 1024), (3, 5)])
def test_several_captions_against_sorting(tile):
    image, text, owners = captions(41)
    everyone = torch.arange(len(text))
    with tile_size(*tile):
        there, back = ranks_of_best(image, text, owners, everyone)
        assert torch.equal(back, ranks_of_best(text, image, everyone, owners).row)
        found = retrieval(image, text, owners)
    assert torch.equal(there, dense_ranks(image, text, owners, everyone))
    assert torch.equal(back, dense_ranks(text, image, everyone, owners))
    assert there.max() > 5  # the test would see an error
    assert found["image_to_text_R@1"] == pytest.approx((there < 1).double().mean().item())
    assert found["text_to_image_mean_rank"] == pytest.approx(back.double().mean().item() + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_differs_from_float64_only_where_rounding_cannot_tell(dtype):
    image, text, owners = captions(41)
    image, text = image.to(dtype), text.to(dtype)
    ranks, _ = ranks_of_best(image, text, owners, torch.arange(len(text)))
    s = image.double() @ text.double().T
    near = 2 * 4 * 12**0.5 * torch.finfo(torch.float32).eps  # sums are float32; two roundings of vectors of length 1
    for i, rank in enumerate(ranks.tolist()):
        others, best = s[i, owners != i], s[i, owners == i].max()
        assert (others > best + near).sum() <= rank <= (others >= best - near).sum()


def test_captions_that_are_equal_rank_by_index_not_perfectly():
    image, text = torch.ones(4, 3), torch.ones(8, 3)
    owners = torch.arange(8) // 2
    there, back = ranks_of_best(image, text, owners, torch.arange(8))
    assert there.tolist() == [0, 2, 4, 6]
    assert back.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_same_caption_twice_for_one_image_counts_once():
    image, text = aligned_pairs(20, 8, noise=1.0, seed=3)
    twice = torch.cat([text, text])
    owners = torch.arange(20).repeat(2)
    once, _ = ranks_of_best(image, text, torch.arange(20), torch.arange(20))
    found, _ = ranks_of_best(image, twice, owners, torch.arange(40))
    assert torch.equal(found, 2 * once)  # every rival is there twice, the image's own copy does not stand in the way


def test_captions_of_the_same_image_do_not_count_where_they_are_as_good_up_to_rounding():
    """The rule of ties, written out for every entry of the dense matrix. All sums are whole numbers that float32 holds."""
    generator = torch.Generator().manual_seed(5)
    owners = torch.arange(180) % 60
    image = 512.0 + torch.randint(0, 4, (60, 16), generator=generator)
    text = torch.stack([512.0 + torch.randperm(16, generator=generator) % 4 for _ in owners])  # with equal sums
    there, back = ranks_of_best(image, text, owners, torch.arange(180))
    near = 4 * 16**0.5 * torch.finfo(torch.float32).eps * image.norm(dim=1)[:, None] * text.norm(dim=1)
    s, own = image @ text.T, owners == torch.arange(60)[:, None]
    for found, logits, limit, right in ((there, s, near, own), (back, s.T, near.T, own.T)):
        best = logits.where(right, -torch.inf).argmax(1, keepdim=True)  # the first of equal ones
        match = logits.gather(1, best)
        before = ~((logits < match - limit) | ((logits <= match + limit) & (torch.arange(logits.shape[1]) > best)))
        assert torch.equal(found, (before & ~right).sum(1))
        others = right.clone().scatter_(1, best, False)
        assert not others.any() or (before & others).any()  # the test would see it if they counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_find_the_same_ranks(dtype):
    image, text, owners = captions(41, seed=2)
    others = torch.randint(0, 41, (len(text),), generator=torch.Generator().manual_seed(3))
    rows, columns = torch.cat([owners, others]), torch.arange(len(text)).repeat(2)  # a text has up to two images
    image, text = image.to(dtype), text.to(dtype)
    eager, triton = (ranks_of_best(image, text, rows, columns, backend=name) for name in ("eager", "triton"))
    for found, expected in zip(triton, eager, strict=True):
        assert torch.equal(found, expected)


def test_nan_ranks_last_and_a_nan_caption_does_not_hide_a_good_one():
    image, text = aligned_pairs(6, 4, noise=0.01, seed=0)
    image[2] = torch.nan
    text = torch.cat([text, torch.full((1, 4), torch.nan, dtype=text.dtype)])
    owners = torch.tensor([0, 1, 2, 3, 4, 5, 0])
    ranks, _ = ranks_of_best(image, text, owners, torch.arange(7))
    assert ranks[2] == 6  # all captions but its own
    assert ranks[0] == 0
    found = retrieval(image[:6], text[:6])
    assert math.isfinite(found["image_to_text_mean_rank"])
    assert found["image_to_text_R@1"] < 1


def test_memory_does_not_grow_with_the_product():
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    biggest = max(biggest, tensor.numel())
            return out

    image, text, owners = captions(300, 8)
    with tile_size(64, 64), Watch():
        retrieval(image, text, owners)
    assert biggest <= max(64 * 64, text.numel())


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([0, 1], [0, 1], "rows must contain every row of x at least once, got no pair for row 2 of 3"),
        ([0, 1, 5], [0, 1, 2], "rows must be row numbers of x, from 0 to 2, got 0 to 5"),
        ([0, 1, 2], [0, 1, -1], "columns must be row numbers of y, from 0 to 3, got -1 to 1"),
    ],
)
def test_messages(rows, columns, message):
    with pytest.raises(ValueError, match=message):
        ranks_of_best(torch.eye(3, 4), torch.eye(4), torch.tensor(rows), torch.tensor(columns))


def test_nothing_to_rank():
    with pytest.raises(ValueError, match="at least one row, got 0 and 0"):
        retrieval(torch.zeros(0, 4), torch.zeros(0, 4))


def _on_a_rank(group, rank, several):
    image, text, owners = captions(23)
    cuts = [0, 11, 11, 23]  # the second rank has nothing
    begin, end = cuts[rank], cuts[rank + 1]
    mine = (owners >= begin) & (owners < end)
    if several:
        return retrieval(image[begin:end], text[mine], owners[mine] - begin, group=group)
    return retrieval(image[begin:end], text[:23][begin:end], group=group)


@pytest.mark.parametrize("several", [True, False])
def test_many_ranks_count_as_one(pool, several):
    image, text, owners = captions(23)
    expected = retrieval(image, text, owners) if several else retrieval(image, text[:23])
    for found in pool.run(_on_a_rank, 3, several):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


def _classify_on_a_rank(group, rank, image, labels, classes):
    part = slice(0, 9) if rank == 0 else slice(9, None)
    return zero_shot(image[part], labels[part], classes, name="toy", group=group)


def test_zero_shot_against_the_dense_computation(pool):
    vectors = unit(7 * 2, 6, seed=1).view(7, 2, 6)
    table = {f"{kind} c{c}": vectors[c, t] for c in range(7) for t, kind in enumerate(("a", "the"))}
    classes = classifier(
        lambda texts: torch.stack([table[text] for text in texts]), [f"c{c}" for c in range(7)], ("a {}", "the {}")
    )
    expected = torch.nn.functional.normalize(vectors.mean(1), dim=1)
    torch.testing.assert_close(classes, expected)
    image, labels = unit(30, 6, seed=2), torch.arange(30) % 7
    order = (image @ expected.T).argsort(1, descending=True)
    found = zero_shot(image, labels, classes, name="toy")
    assert found == {
        "toy-zeroshot-val-top1": pytest.approx((order[:, :1] == labels[:, None]).any(1).double().mean().item()),
        "toy-zeroshot-val-top5": pytest.approx((order[:, :5] == labels[:, None]).any(1).double().mean().item()),
    }
    assert pool.run(_classify_on_a_rank, 2, image, labels, classes) == [found, found]


@pytest.mark.parametrize("template", ["a photo", "{0} {1}", "a {name}", "a {} {", "{} {}", "{.x}"])
def test_templates_need_a_place_for_the_name(template):
    with pytest.raises(ValueError, match=r'templates must have a "\{\}" in place of the name, and no other') as caught:
        classifier(lambda texts: torch.zeros(len(texts), 2), ["cat"], [template])
    assert str(caught.value).endswith(repr(template))


def test_reciprocal_ranks_and_gains():
    image, text = torch.eye(12), torch.eye(12).roll(1, 0)
    text[0] = torch.eye(12)[0]
    found = retrieval(image, text)
    ranks = pairwise_rank(image, text).row.double()
    assert found["image_to_text_MRR"] == pytest.approx((1 / (ranks + 1)).mean().item())
    gains = [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks.tolist()]
    assert found["image_to_text_nDCG@10"] == pytest.approx(sum(gains) / 12)
    assert 0 in gains
