"""A model on a dataset with several captions an image and images that cannot be read, on one rank and on several."""

import sys

import pytest
import torch
from torch import nn

from megabatch_train.data.dataset import Dataset, UnreadableSampleError
from megabatch_train.evaluation import embed, embed_chunks, evaluate, retrieval, spearman
from megabatch_train.towers import Pair, Tower

D = 6


class Vectors(Dataset):
    """Images that are their own number, captions "image caption"; image 3 is damaged."""

    def __init__(self, captions=(2, 1, 3, 2, 1, 2, 1), damaged=()):
        super().__init__()
        self.of_image = [image for image, count in enumerate(captions) for _ in range(count)]
        self.damaged = damaged

    def __len__(self):
        return len(self.of_image)

    def read(self, index, side):
        if side == 0 and self.of_image[index] in self.damaged:
            raise UnreadableSampleError(f"image {self.of_image[index]} is damaged")
        if side == 0:
            return torch.full((3, 2, 2), self.of_image[index], dtype=torch.uint8)
        return f"{self.of_image[index]} {index}"

    def name(self, index):
        return str(index)

    def items(self):
        return torch.tensor(self.of_image)


class Table(nn.Module):
    """Rows by number, a fixed random vector for each."""

    def __init__(self, seed):
        super().__init__()
        weight = torch.randn(256, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.weight = nn.Parameter(nn.functional.normalize(weight, dim=1))

    def forward(self, numbers):
        return self.weight[numbers]


def model():
    image = Tower(Table(0), "image", lambda sample, generator: sample[0, 0, 0].long(), torch.stack)
    text = Tower(Table(1), "text", lambda sample, generator: torch.tensor(int((sample or "0 99").split()[1])), torch.stack)
    return Pair(image, text)


def by_hand(data):
    pair = model()
    kept = [i for i in range(len(data)) if data.of_image[i] not in data.damaged]
    images = sorted({data.of_image[i] for i in kept})
    owners = torch.tensor([images.index(data.of_image[i]) for i in kept])
    return retrieval(pair.first.module(torch.tensor(images)), pair.second.module(torch.tensor(kept)), owners)


@pytest.mark.parametrize("damaged", [(), (3,), (2, 6)])
def test_captions_are_grouped_by_image_and_damaged_images_left_out(damaged):
    data = Vectors(damaged=damaged)
    found = evaluate(model(), data, chunk_size=3)
    # One sample of each image is read; the others' captions go with it.
    assert found.pop("num_failed") == len(damaged)
    assert found.pop("clip_val_loss") > 0
    assert found == by_hand(data)
    assert found["num_samples"] == 7 - len(damaged)


def _on_a_rank(group, rank, damaged):
    return evaluate(model(), Vectors(damaged=damaged), chunk_size=2, group=group)


@pytest.mark.quick({"damaged": (3,)})
@pytest.mark.parametrize("damaged", [(), (3,)])
def test_ranks_count_as_one(pool, damaged):
    expected = evaluate(model(), Vectors(damaged=damaged))
    for found in pool.run(_on_a_rank, 3, damaged):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


def _kept_on_a_rank(group, rank, damaged):
    kept = []
    evaluate(model(), Vectors(damaged=damaged), chunk_size=2, group=group, keep=kept.append)
    return kept[0].samples, kept[0].embeddings


@pytest.mark.parametrize("damaged", [(), (3,)])
def test_an_evaluation_keeps_the_embeddings_of_what_it_could_read(pool, damaged):
    data, kept = Vectors(damaged=damaged), []
    evaluate(model(), data, chunk_size=3, keep=kept.append)
    (evaluated,) = kept
    assert evaluated.dataset is data
    indices = [11, 0, 7, 1]  # 0 and 1 are captions of one image, and 7 is a caption of image 3
    for side in (0, 1):
        rows, mask = evaluated.rows(side, indices)
        readable = [index for index in indices if data.of_image[index] not in damaged]
        assert mask.tolist() == [index in readable for index in indices]
        assert torch.equal(rows, embed(model().towers[side], data, side, readable))
    for samples, embeddings in pool.run(_kept_on_a_rank, 3, damaged):  # every rank has the rows of all ranks
        for side in (0, 1):
            assert torch.equal(samples[side], evaluated.samples[side])
            assert torch.equal(embeddings[side], evaluated.embeddings[side])


def test_an_evaluation_keeps_no_embeddings_that_are_too_large(monkeypatch):
    kept, module = [], sys.modules[evaluate.__module__]
    monkeypatch.setattr(module, "KEPT_BYTES", 4 * (7 + 12) * D - 1)
    evaluate(model(), Vectors(), keep=kept.append)
    assert not kept
    monkeypatch.setattr(module, "KEPT_BYTES", 4 * (7 + 12) * D)
    evaluate(model(), Vectors(), keep=kept.append)
    assert len(kept) == 1


def _of_two_images(group, rank):
    return evaluate(model(), Vectors(captions=(2, 1)), group=group)


def test_fewer_images_than_ranks_are_refused_on_all_of_them(pool):
    answers = pool.attempt(_of_two_images, 3)
    assert all("dataset must have at least one item for each of 3 ranks, got 2" in told for _, told in answers), answers


def test_embeddings_are_compared_as_they_are_under_autocast():
    data = Vectors(captions=(2, 1, 3, 2, 1, 2, 1) * 4)
    pair = model()
    for tower in (pair.first, pair.second):  # nearly alike, so that half precision would make them equal
        tower.module.weight = nn.Parameter((1 + 1e-3 * tower.module.weight.detach()).float())
    plain = evaluate(pair, data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluate(pair, data) == plain


def test_one_caption_each_and_side_names():
    data = Vectors(captions=(1,) * 9)
    found = evaluate(model(), data)
    assert found.pop("clip_val_loss") > 0
    assert found == {**by_hand(data), "num_failed": 0}


def test_the_validation_loss_leaves_out_other_captions_of_an_image():
    pair, data = model(), Vectors()
    items = data.items()
    first, second = (embed(pair.towers[side], data, side) for side in (0, 1))
    logits = 7.0 * first @ second.T
    other = (items[:, None] == items) & ~torch.eye(len(items), dtype=torch.bool)
    logits, own = logits.masked_fill(other, -torch.inf), torch.arange(len(items))
    wanted = (nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)) / 2
    assert evaluate(pair, data, scale=7.0)["clip_val_loss"] == pytest.approx(wanted.item(), rel=1e-6)


def test_messages():
    pair, data = model(), Vectors()
    with pytest.raises(ValueError, match=r"tower .* image, got .* text"):
        list(embed_chunks(pair.second, data, 0))
    with pytest.raises(ValueError, match="indices must contain at least one sample, got none"):
        embed(pair.first, data, 0, [])
    with pytest.raises(ValueError, match="side must be 0 or 1, got 2"):
        data.source([0], 2, pair.first)
    with pytest.raises(IndexError, match="index must be from 0 to 11, got -1"):
        data.check(-1)


def test_between_chunks_a_tower_is_as_it_was():
    tower, data = model().second, Vectors()
    tower.module.train()
    for chunk in embed_chunks(tower, data, 1, chunk_size=4):
        assert not chunk.requires_grad
        assert tower.module.training
        assert torch.is_grad_enabled()


def test_spearman_is_what_scipy_says():
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with the developers' packages")
    x, y = torch.randint(0, 9, (40,)).double(), torch.randn(40).double()
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x.numpy(), y.numpy()).statistic, rel=1e-12)
    assert spearman(x, x) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs at least two scored pairs, got 1"):
        spearman(x[:1], y[:1])


class Classes(Vectors):
    """Images with numbers of their own; the caption is the class."""

    def __init__(self, counts=(2, 1, 3, 2), damaged=()):
        super().__init__((1,) * sum(counts), damaged)
        self.of_class = [number for number, count in enumerate(counts) for _ in range(count)]

    def read(self, index, side):
        return f"class {self.of_class[index]}" if side == 1 else super().read(index, side)

    def documents(self):
        return torch.tensor(self.of_class)


class Clicks(Vectors):
    """Queries with several documents, which belong to several queries each."""

    PAIRS = ((0, 0), (0, 1), (1, 1), (2, 3), (3, 3), (3, 0), (4, 5), (4, 5), (5, 6), (6, 4))

    def __init__(self, damaged=()):
        super().__init__((1,) * len(self.PAIRS))
        self.of_image, self.of_text = (list(side) for side in zip(*self.PAIRS, strict=True))
        self.damaged = damaged

    def read(self, index, side):
        return f"document {self.of_text[index]}" if side == 1 else super().read(index, side)

    def documents(self):
        return torch.tensor(self.of_text)


def dense(data):
    """Ranks of the best match in both directions among distinct items and documents, and CLIP's loss."""
    pairs = [pair for pair in data.PAIRS if pair[0] not in data.damaged]
    items, documents = (sorted({pair[side] for pair in pairs}) for side in (0, 1))
    pair = model()
    s = pair.first.module(torch.tensor(items)) @ pair.second.module(torch.tensor(documents)).T
    right = torch.zeros_like(s, dtype=torch.bool)
    for item, document in pairs:
        right[items.index(item), documents.index(document)] = True
    ranks = []
    for scores, matches in ((s, right), (s.T, right.T)):
        best = scores.masked_fill(~matches, -torch.inf).amax(1, keepdim=True)
        ranks.append(((scores > best) & ~matches).sum(1).double())
    ids = torch.tensor(pairs)
    places = [torch.tensor([side.index(pair[i]) for pair in pairs]) for i, side in enumerate((items, documents))]
    logits = pair.logit_scale * s[places[0]][:, places[1]]
    excluded = (ids[:, None] == ids).any(2) & ~torch.eye(len(ids), dtype=torch.bool)
    logits, own = logits.masked_fill(excluded, -torch.inf), torch.arange(len(ids))
    entropy = nn.functional.cross_entropy
    return ranks, (entropy(logits, own) + entropy(logits.T, own)) / 2, len(items), len(documents)


@pytest.mark.parametrize("damaged", [(), (0,), (4, 6)])
def test_distinct_documents_are_ranked_and_every_correct_one_counts(damaged):
    data = Clicks(damaged)
    found = evaluate(model(), data, chunk_size=3)
    (there, back), loss, items, documents = dense(data)
    for name, ranks in (("image_to_text", there), ("text_to_image", back)):
        assert found[f"{name}_mean_rank"] == pytest.approx(ranks.mean().item() + 1)
        for k in (1, 5, 10):
            assert found[f"{name}_R@{k}"] == pytest.approx((ranks < k).double().mean().item())
    assert found["clip_val_loss"] == pytest.approx(loss.item())
    counts = {"num_samples": items, "num_failed": len(damaged)} | ({"num_texts": documents} if documents != items else {})
    different = len({pair for pair in data.PAIRS if pair[0] not in damaged})
    counts |= {"num_pairs": different} if different > max(items, documents) else {}
    assert {name: value for name, value in found.items() if name.startswith("num")} == counts


class Reused(Clicks):
    """A table that is one-to-one once its first image is excluded; documents are numbered by their first pair."""

    PAIRS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 0))


def test_pairs_that_are_one_to_one_only_without_an_unreadable_sample():
    data = Reused((0,))
    found = evaluate(model(), data, chunk_size=3)
    (there, _), loss, *_ = dense(data)
    assert found["image_to_text_mean_rank"] == pytest.approx(there.mean().item() + 1)
    assert found["clip_val_loss"] == pytest.approx(loss.item())


def _of_clicks(group, rank):
    return evaluate(model(), Clicks((0,)), chunk_size=2, group=group)


def test_shared_documents_on_many_ranks_count_as_on_one(pool):
    alone = evaluate(model(), Clicks((0,)), chunk_size=2)
    for found in pool.run(_of_clicks, 3):
        assert found == pytest.approx(alone)


class Answers(Vectors):
    """Three questions for each answer."""

    def read(self, index, side):
        return super().read(index, 0) if side == 0 else f"answer {self.of_image[index] // 3}"

    def documents(self):
        return torch.tensor(self.of_image) // 3


def test_a_perfect_model_has_a_recall_of_one_hundred_percent():
    pair = model()
    with torch.no_grad():
        weight = torch.eye(D, dtype=torch.float64)
        pair.first.module.weight[:18] = weight.repeat_interleave(3, 0)
        pair.second.module.weight[:6] = weight
    found = evaluate(pair, Answers(captions=(1,) * 18))
    assert found["image_to_text_R@1"] == found["text_to_image_R@1"] == 1.0
    assert (found["num_samples"], found["num_texts"]) == (18, 6)


def _of_classes(group, rank, counts):
    return evaluate(model(), Classes(counts, damaged=(0,)), chunk_size=2, group=group)


@pytest.mark.parametrize("damaged", [(), (0,), (2,)])
def test_every_image_of_a_class_is_right(damaged):
    data = Classes(damaged=damaged)
    found = evaluate(model(), data, chunk_size=3)
    kept = [index for index in range(8) if index not in damaged]
    labels = torch.tensor([data.of_class[index] for index in kept])
    names, labels = labels.unique(return_inverse=True)
    pair = model()
    s = pair.first.module(torch.tensor(kept)) @ pair.second.module(names).T  # (images, classes)
    right = labels[:, None] == torch.arange(len(names))
    ranks = (s > s[right][:, None]).sum(1)
    back = [int((s[~right[:, c], c] > s[right[:, c], c].max()).sum()) for c in range(len(names))]
    assert found["image_to_text_R@1"] == pytest.approx((ranks == 0).double().mean().item())
    assert found["image_to_text_mean_rank"] == pytest.approx(ranks.double().mean().item() + 1)
    assert found["text_to_image_mean_rank"] == pytest.approx(sum(back) / len(back) + 1)
    assert (found["num_samples"], found["num_texts"], found["num_failed"]) == (len(kept), len(names), len(damaged))
    logits = pair.logit_scale * s[:, labels]
    wrong = (labels[:, None] == labels) & ~torch.eye(len(kept), dtype=torch.bool)
    logits = logits.masked_fill(wrong, -torch.inf)
    numbers = torch.arange(len(kept))
    entropy = nn.functional.cross_entropy
    assert found["clip_val_loss"] == pytest.approx(((entropy(logits, numbers) + entropy(logits.T, numbers)) / 2).item())


@pytest.mark.parametrize("counts", [(2, 1, 3, 2), (4, 3)])  # more and fewer classes than ranks
def test_classes_on_many_ranks_count_as_on_one(pool, counts):
    alone = evaluate(model(), Classes(counts, damaged=(0,)), chunk_size=2)
    for found in pool.run(_of_classes, 3, counts):
        assert found == pytest.approx(alone)
