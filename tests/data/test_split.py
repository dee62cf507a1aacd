"""A part of the data is held out: the same in every run, about as large as asked for, no image on both sides."""

import json
import logging

import pytest
import torch

from megabatch_train.data import load as data
from megabatch_train.data.dataset import Dataset, Part
from megabatch_train.data.load import parts
from megabatch_train.data.rows import Folders
from megabatch_train.data.tables import Table


@pytest.fixture
def table(tmp_path):
    rows = [
        {"image": f"{i // 5}.png", "caption": f"text {i}", "negative": [f"n{i}"] * (i % 3), "label": i % 7} for i in range(4000)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "pairs.jsonl"


def test_rows_of_one_image_stay_together(table):
    whole = Table(table)
    train, test = parts([whole], 0.1)[0]
    assert len(train) + len(test) == 4000
    assert 280 < len(test) < 520
    images = [{part.name(index) for index in range(len(part))} for part in (train, test)]
    assert not images[0] & images[1]
    again = parts([Table(table)], 0.1)[0][1]
    assert [again.read(index, 1) for index in range(len(again))] == [test.read(index, 1) for index in range(len(test))]
    number = {whole.read(index, 1): index for index in range(len(whole))}
    for index in (0, 3, len(test) - 1):
        before = number[test.read(index, 1)]
        assert [test.read(i, 1) for i in test.negatives_of([index]).tolist()] == [f"n{before}"] * (before % 3)
        assert test.labels([index]) == whole.labels([before])
        assert test.ids([index]) == whole.ids([before])


class Shelved(Dataset):
    """Forty samples in four groups."""

    groups = (10, 10, 5, 15)

    def __len__(self):
        return 40

    def read(self, index, side):
        return f"{index}.{side}"

    def name(self, index):
        return str(index)


def test_a_part_of_shards_knows_its_groups():
    part = Part(Shelved(), [0, 9, 10, 24, 39])
    assert part.groups == (2, 1, 1, 1)
    assert [part.read(index, 1) for index in range(len(part))] == ["0.1", "9.1", "10.1", "24.1", "39.1"]
    assert part.ids([0, 1]) is None
    with pytest.raises(IndexError):
        part.read(5, 0)
    train, test = parts([Shelved()], 0.2)[0]
    assert sorted([*train.indices.tolist(), *test.indices.tolist()]) == list(range(40))
    with pytest.raises(ValueError, match=r"must leave samples for training and for evaluation, got 1e-09 of 40"):
        parts([Shelved()], 1e-9)[0]


def test_files_are_split_by_name(table):
    train, test = (data.load(str(table), split, holdout=0.1) for split in ("train", "test"))
    assert len(train) + len(test) == len(data.load(str(table), "all", holdout=0.1)) == 4000
    with pytest.raises(ValueError, match="split must not be set for files"):
        data.load(str(table), "test")


def test_a_folder_for_each_class(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason='pip install "megabatch[train]"')
    for name in ("red_fox", "cat"):
        (tmp_path / name).mkdir()
        for number in range(2):
            pillow.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    found = data.load(str(tmp_path))
    assert isinstance(found, Folders)
    assert [found.read(index, 1) for index in range(4)] == ["cat", "cat", "red fox", "red fox"]
    assert found.read(1, 0)[:, 0, 0].tolist() == [1, 0, 0]
    assert torch.equal(found.ids(range(4)), torch.tensor([0, 0, 1, 1]))
    assert found.name(2) == "red_fox/0.png"


def test_images_of_one_class_are_on_both_sides(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        for number in range(40):
            (tmp_path / name / f"{number}.png").touch()
    train, test = parts([Folders(tmp_path)], 0.2)[0]
    assert {test.read(index, 1) for index in range(len(test))} == {train.read(index, 1) for index in range(len(train))}
    assert 12 < len(test) < 36


def test_a_row_in_front_changes_no_other(tmp_path):
    def held(begin):
        path = tmp_path / f"{begin}.csv"
        rows = (f"{number // 2}.png,text {number if number % 5 else 'shared'}" for number in range(begin, 1000))
        path.write_text("\n".join(["image,caption", *rows]))
        test = parts([Table(path)], 0.2)[0][1]
        return {test.read(index, 1) for index in range(len(test))}

    assert held(1) == held(2)  # caption 1 has the image of caption 0, which is shared


def test_the_log_says_how_much_is_held_out(tmp_path, caplog):
    rows = (f"{number}.png,{'a photo' if number % 3 == 0 else number}" for number in range(3000))
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    with caplog.at_level(logging.INFO, "megabatch"):
        test = data.load(str(tmp_path / "pairs.csv"), "test", holdout=0.5)
        data.load(str(tmp_path / "pairs.csv"), "train", holdout=0.5)
    assert f"holdout: {len(test) / 30:.1f} % of" in caplog.text
    assert caplog.text.count("instead of 50.0 %") == 1


@pytest.mark.parametrize("name", data.WITH_SPLITS)
def test_data_with_a_test_split_holds_nothing_else_out(name):
    with pytest.raises(ValueError, match=rf"holdout must be 0 for {name}, which has its own test split, got 0.1"):
        data.load(name, "train", holdout=0.1)


def test_sources_of_a_mixture_are_split_together(tmp_path):
    (tmp_path / "photos").mkdir()
    tables = {"a.csv": "photos/{0}.png,only {0}", "b.csv": "photos/{0}.png,by two {1}", "photos/c.csv": "{0}.png,further {0}"}
    for name, row in tables.items():
        rows = (row.format(number, number // 2) for number in range(100))
        (tmp_path / name).write_text("\n".join(["image,caption", *rows]))
    spec = " + ".join(str(tmp_path / name) for name in tables)
    places = []
    for part in ("train", "test"):
        mixed = data.load(spec, part, holdout=0.2)
        places.append({source.place(index) for source in mixed.sources for index in range(len(source))})
    assert len(places[0] | places[1]) == 100
    assert not places[0] & places[1]


def clicks(pairs):
    """A table of queries and products as numbers."""
    return [f"query {query},product {product}" for query, product in pairs]


@pytest.mark.parametrize("role", ["second_value", "second_file"])
def test_values_and_files_of_a_mixture_are_split_together(tmp_path, role):
    for name in ("a", "b"):  # the second sides are equal in both tables, and no file exists
        rows = [{"first": [name, i], "second": f"{i}.bin" if role == "second_file" else {"number": i}} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec, columns = f"{tmp_path}/a.jsonl + {tmp_path}/b.jsonl", {"value": "first", role: "second"}
    kept, held = (data.load(spec, part, holdout=0.3, columns=columns) for part in ("train", "test"))
    first, second = ({one.key(index, 1) for index in range(len(one))} for one in (kept, held))
    assert held.sides == ("value", role.removeprefix("second_"))
    assert not first & second
    assert (len(first) + len(second), len(kept) + len(held)) == (40, 80)


def test_data_that_is_one_chain_says_why_it_cannot_be_split(tmp_path):
    rows = clicks((number // 2, (number + 1) // 2) for number in range(60))
    (tmp_path / "clicks.csv").write_text("\n".join(["query,document", *rows]))
    for part in ("train", "test"):
        with pytest.raises(ValueError, match=r"got 0.2 of 60 samples; 60 samples share a text with one another, directly or"):
            data.load(str(tmp_path / "clicks.csv"), part, holdout=0.2)


def test_a_large_chain_is_trained_on_and_no_text_is_on_both_sides(tmp_path):
    many = clicks((number // 2, (number + 1) // 2) for number in range(60))
    few = clicks((100 + number // 2, 100 + number // 2) for number in range(20))
    (tmp_path / "clicks.csv").write_text("\n".join(["query,document", *many, *few]))
    train, test = (data.load(str(tmp_path / "clicks.csv"), part, holdout=0.3) for part in ("train", "test"))
    assert len(train) + len(test) == 80
    assert 0 < len(test) <= 20
    for side in (0, 1):
        assert not {train.read(index, side) for index in range(len(train))} & {test.read(i, side) for i in range(len(test))}
