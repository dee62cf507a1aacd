"""Hard negatives: what a dense search with the same filters chooses; and the command, stopped and called again."""

import argparse
import json
import shutil

import pytest
import torch

from helpers import unit
from megabatch_train import towers
from megabatch_train.commands import mine as mine_command
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import embedding
from megabatch_train.evaluation.embedding import Choice, hard_negatives

SMALL = {"width": 16, "buckets": 512}


def dense(query, document, positive, choice, ids):
    """One query after the other, with a full sort."""
    chosen = []
    for i, x in enumerate(query):
        s, own = document @ x, float(document[positive[i]] @ x)
        places = s.argsort(descending=True, stable=True).tolist()
        allowed = [j for j in places if ids[0][i] != ids[1][j]]
        if choice.max_score is not None:
            allowed = [j for j in allowed if s[j] <= choice.max_score]
        if choice.min_score is not None:
            allowed = [j for j in allowed if s[j] >= choice.min_score]
        if choice.absolute_margin is not None:
            allowed = [j for j in allowed if s[j] < own - choice.absolute_margin]
        if choice.relative_margin is not None:
            allowed = [j for j in allowed if s[j] < own - choice.relative_margin * abs(own)]
        row = allowed[: choice.candidates][choice.range_min :][: choice.negatives]
        chosen.append(row + [-1] * (choice.negatives - len(row)))
    return torch.tensor(chosen)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"range_min": 2, "range_max": 9},
        {"max_score": 0.3, "min_score": 0.1},
        {"absolute_margin": 0.1},
        {"relative_margin": 0.2, "max_score": 0.5},
    ],
)
def test_what_a_full_sort_finds(monkeypatch, filters):
    monkeypatch.setattr(embedding, "QUERIES_AT_ONCE", 5)
    query, document = unit(12, 6, seed=0), unit(30, 6, seed=1)
    positive = torch.arange(12) * 2
    ids = torch.arange(12) % 4, torch.arange(30) % 7
    choice = Choice(3, **filters)
    found = torch.cat(list(hard_negatives(query, document, positive, choice, ids=ids)))
    assert torch.equal(found, dense(query, document, positive, choice, ids))
    rest = torch.cat(list(hard_negatives(query, document, positive, choice, ids=ids, first=7)))
    assert torch.equal(rest, found[7:])


@pytest.mark.parametrize("filters", [{}, {"range_min": 2, "range_max": 9}, {"absolute_margin": 0.1}])
def test_no_document_of_a_query_is_its_negative(monkeypatch, filters):
    monkeypatch.setattr(embedding, "QUERIES_AT_ONCE", 5)
    document, rows = unit(30, 6, seed=1), [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4), (2, 4), (2, 5), (3, 9), (4, 9)]
    queries, positive = (torch.tensor(side) for side in zip(*rows, strict=True))
    query = unit(5, 6, seed=0)[queries]
    choice = Choice(3, **filters)
    found = torch.cat(list(hard_negatives(query, document, positive, choice, queries=queries)))
    for row, (number, _) in enumerate(rows):
        known = {document for other, document in rows if other == number}
        own = torch.tensor([0 if j in known else 1 for j in range(30)])
        alone = dense(query[row : row + 1], document, positive[row : row + 1], choice, (torch.zeros(1), own))
        assert torch.equal(found[row], alone[0])


def test_random_ones_are_of_the_range_and_the_same_every_time():
    query, document = unit(8, 6, seed=0), unit(40, 6, seed=1)
    positive = torch.arange(8)
    random = Choice(4, range_min=2, range_max=12, sampling="random")
    found, again = (torch.cat(list(hard_negatives(query, document, positive, random))) for _ in range(2))
    assert torch.equal(found, again)
    among = torch.cat(list(hard_negatives(query, document, positive, Choice(10, range_min=2, range_max=12))))
    assert all(set(row) < set(every) and len(set(row)) == 4 for row, every in zip(found.tolist(), among.tolist(), strict=True))


def test_a_search_that_begins_later_draws_the_same(monkeypatch):
    query, document, positive = unit(9, 6, seed=0), unit(40, 6, seed=1), torch.arange(9)
    random = Choice(3, range_max=12, sampling="random")
    found = torch.cat(list(hard_negatives(query, document, positive, random)))
    monkeypatch.setattr(embedding, "QUERIES_AT_ONCE", 2)
    rest = torch.cat(list(hard_negatives(query, document, positive, random, first=3)))
    assert torch.equal(rest, found[3:])
    monkeypatch.setattr(embedding, "QUERIES_AT_ONCE", 1)
    same_query = hard_negatives(query[:1].expand(9, 6), document, positive[:1].expand(9), random)
    assert len(torch.cat(list(same_query)).unique(dim=0)) > 1  # rows draw differently


def test_messages():
    for options, message in (
        ({"negatives": 300, "sampling": "random"}, r"range_min \+ 4·negatives, if sampling is random, must be at most 1024"),
        ({"negatives": 1000, "range_min": 100}, r"range_min \+ negatives must be at most 1024, got 1100"),
        ({"negatives": 4, "range_max": 2000}, "range_max must be at most 1024, got 2000"),
        ({"negatives": 4, "max_score": float("nan")}, "max_score must be a number, got nan"),
        ({"negatives": 4, "relative_margin": float("nan")}, "relative_margin must be a number, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Choice(**options)
    with pytest.raises(ValueError, match="range_max must be at least range_min"):
        Choice(4, range_min=3, range_max=6)
    with pytest.raises(ValueError, match="sampling must be"):
        Choice(4, sampling="some")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, and pairs of which some share a text."""
    folder = tmp_path_factory.mktemp("mine")
    torch.manual_seed(0)
    towers.save(towers.load("small", ("text", "text"), **SMALL), folder / "run")
    rows = [f"word {i},meaning of {i % 9} things" for i in range(12)]
    (folder / "pairs.csv").write_text("\n".join(["query,document", *rows]))
    return folder


def mine(place, *arguments):
    parser = argparse.ArgumentParser()
    mine_command.add_arguments(parser)
    words = [place / "run", "--data", place / "pairs.csv", "--device", "cpu", "--chunk-size", "5", *arguments]
    return mine_command.run(parser.parse_args([str(word) for word in words]))


def test_the_table_is_one_of_pairs_with_negatives(place, capsys):
    output = place / "mined.jsonl"
    assert mine(place, "--negatives", "3", "--output", output) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    pairs, ids = Table(place / "pairs.csv"), Table(place / "pairs.csv").ids(range(12))
    id_of = {pairs.read(i, 1): int(ids[i]) for i in range(12)}
    assert len(lines) == 12
    for i, line in enumerate(lines):
        assert list(line) == ["query", "document", "negative_1", "negative_2", "negative_3"]
        assert (line["query"], line["document"]) == (pairs.read(i, 0), pairs.read(i, 1))
        negatives = [line[f"negative_{k}"] for k in (1, 2, 3)]
        assert len(set(negatives)) == 3
        assert all(id_of[text] != int(ids[i]) for text in negatives)
    assert len(Table(output)) == 12  # a table of pairs for `megabatch train`, too
    assert not list(place.glob("*.work"))
    assert "12 pairs with their negatives" in capsys.readouterr().out


def test_a_stopped_command_continues(place, monkeypatch):
    whole, output = place / "whole.jsonl", place / "stopped.jsonl"
    mine(place, "--output", whole)
    monkeypatch.setattr(embedding, "QUERIES_AT_ONCE", 4)
    real, calls = mine_command.json.dumps, []

    def stops(line, **options):
        calls.append(line)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(line, **options)

    monkeypatch.setattr(mine_command.json, "dumps", stops)
    with pytest.raises(KeyboardInterrupt):
        mine(place, "--output", output)
    monkeypatch.setattr(mine_command.json, "dumps", real)
    monkeypatch.setattr("megabatch_train.evaluation.embedding.readable", None)  # is not called again
    with (place / "stopped.jsonl.part").open("a") as file:
        file.write('{"query": "cut o')
    mine(place, "--output", output)
    assert output.read_text() == whole.read_text()


@pytest.mark.parametrize("what", ["the model's weights", "the first side of the pairs", "the texts"])
def test_work_of_another_model_or_other_data_is_not_continued(place, tmp_path, what):
    for name in ("run", "pairs.csv"):
        (shutil.copytree if name == "run" else shutil.copy)(place / name, tmp_path / name)
    output, pairs = tmp_path / "mined.jsonl", tmp_path / "pairs.csv"
    mine(tmp_path, "--output", output, "--keep-embeddings")
    mine(tmp_path, "--output", output, "--keep-embeddings", "--negatives", "2")  # the same model and data
    if what == "the model's weights":
        torch.manual_seed(1)
        towers.save(towers.load("small", ("text", "text"), **SMALL), tmp_path / "run")
    else:
        word = "word 3," if what == "the first side of the pairs" else "of 8 things"
        pairs.write_text(pairs.read_text().replace(word, word.replace("o", "a")))
    with pytest.raises(ValueError, match=f"but these have changed: {what}. Remove the folder to embed everything again"):
        mine(tmp_path, "--output", output)


def test_a_score_is_not_rounded_to_the_type_of_embeddings():
    query, document = torch.tensor([[1.0]]).half(), torch.tensor([[1.0], [0.5]]).half()
    for least, wanted in ((0.5001, -1), (0.5, 1)):  # 0.5001 is 0.5 in half precision
        (found,) = hard_negatives(query, document, torch.tensor([0]), Choice(1, min_score=least))
        assert found.tolist() == [[wanted]]


def test_the_output_is_json_lines_or_parquet(place, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason='pip install "megabatch[train]"')
    lines, table = tmp_path / "mined.jsonl", tmp_path / "mined.parquet"
    mine(place, "--negatives", "9", "--output", lines)  # of 9 texts, so that one is null
    mine(place, "--negatives", "9", "--output", table)
    assert parquet.read_table(table).to_pylist() == [json.loads(line) for line in lines.read_text().splitlines()]
    with pytest.raises(ValueError, match=r"--output must end in \.jsonl or \.parquet"):
        mine(place, "--output", tmp_path / "mined.csv")
