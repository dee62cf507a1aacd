"""Samples that share a side belong together, and not through other samples."""

import json

import pytest
import torch

from megabatch_train.data.dataset import components, count_others, relate
from megabatch_train.data.load import Mix
from megabatch_train.data.tables import Table


def related(ids):
    """(n, n) which rows belong together."""
    return ids[:, None] == ids if ids.dim() == 1 else (ids[:, None] == ids).any(2)


@pytest.mark.parametrize("counts", [(3, 3), (40, 40), (3, 1000), (1, 50), (1000, 1000)])
def test_rows_belong_together_if_they_share_a_number(counts):
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(count, (60,), generator=generator) for count in counts)
    ids = relate(first, second)
    wanted = (first[:, None] == first) | (second[:, None] == second)
    assert torch.equal(related(ids), wanted)
    assert count_others(ids).tolist() == (~wanted).sum(1).tolist()
    reached = wanted
    for _ in range(6):
        reached = (reached.double() @ reached.double()) > 0
    assert torch.equal(related(components(ids)), reached)


def test_one_id_is_enough_for_captions_of_images_and_for_questions_of_answers():
    images, captions = torch.arange(20) // 5, torch.arange(20)
    assert relate(images, captions).dim() == relate(captions, images).dim() == 1
    assert relate(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])).tolist() == [[0, 0], [0, 1], [1, 1]]


@pytest.fixture
def clicks(tmp_path):
    rows = [
        {"query": "q0", "document": "d0", "negative": "d3"},
        {"query": "q0", "document": "d1", "negative": ["d1", "d0", "other"]},
        {"query": "q1", "document": "d1", "negative": "d1"},
        {"query": "q2", "document": "d3", "negative": []},
    ]
    (tmp_path / "clicks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Table(tmp_path / "clicks.jsonl")


def test_a_table_with_a_chain(clicks):
    assert related(clicks.ids(range(4))).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert clicks.part([0, 3]).ids([0, 1]).tolist() == clicks.ids([0, 3]).tolist()
    found = clicks.negative_ids(clicks.negatives_of([0, 1, 2])).tolist()
    q0, q1, q2 = 0, 1, 2
    d0, d1, d3 = 0, 1, 2
    assert found == [[q2, d3], [q0, d1], [q0, d0], [-4, -4], [q1, d1]]


def test_a_mixture_with_a_chain(tmp_path):
    (tmp_path / "plain.csv").write_text("query,document\nq0,d0\na,b")
    rows = "\n".join(["query,document", "q0,d0", "q0,d1", "q1,d1"])
    (tmp_path / "chain.csv").write_text(rows)
    mixed = Mix([Table(tmp_path / "chain.csv"), Table(tmp_path / "plain.csv")])
    wanted = torch.block_diag(torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]), torch.eye(2)).int()
    assert related(mixed.ids(range(5))).int().tolist() == wanted.tolist()
