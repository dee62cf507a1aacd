"""Tables whose sides have texts, images or both, for vision-language models."""

import json

import pytest
import torch

import vision_language
from megabatch_train.data import load
from megabatch_train.data.dataset import MIXED, TEXT, Content
from megabatch_train.data.load import WithNegatives
from megabatch_train.data.media.images import EncodedImage, to_pillow
from megabatch_train.data.tables import Table, split_mixed
from megabatch_train.evaluation import embed

IMAGES = {f"{number}.png": vision_language.image(12 + number, 20, number) for number in range(4)}


@pytest.fixture
def folder(tmp_path):
    for name, image in IMAGES.items():
        to_pillow(image).save(tmp_path / name)
    return tmp_path


def write(folder, *rows):
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / "pairs.jsonl"


def test_a_side_has_a_text_an_image_or_both(folder):
    table = Table(
        write(
            folder,
            {"query": "a", "document_image": "0.png"},
            {"query": "b", "document": "two", "document_image": "1.png", "query_image": "2.png"},
            {"query_image": "3.png", "document": "three", "document_image": ""},
        )
    )
    assert table.sides == (MIXED, MIXED)
    assert table.columns.all == ["query", "document", "query_image", "document_image"]
    assert [table.read_stored(i, 0).text for i in range(3)] == ["a", "b", ""]
    assert [getattr(table.read_stored(i, 1).image, "name", None) for i in range(3)] == [
        *(str(folder / name) for name in ("0.png", "1.png")),
        None,
    ]
    torch.testing.assert_close(table.read(1, 1).image, IMAGES["1.png"])
    assert table.read(2, 1) == Content("three", None)
    assert [table.name(i) for i in range(3)] == ["a", "b", "3.png"]
    assert [table.place(i) for i in range(3)] == [None, str(folder / "2.png"), str(folder / "3.png")]
    assert split_mixed(table.key(1, 1)) == (str(folder / "1.png"), "two")
    assert str(table.read_stored(2, 0)) == str(folder / "3.png")


def test_only_the_sides_with_images_are_mixed(folder):
    pairs = (("a", "0.png"), ("a", "1.png"), ("b", "1.png"))
    path = write(folder, *({"question": question, "page": page} for question, page in pairs))
    table = Table(path, columns={"query": "question", "document_image": "page"})
    assert table.sides == (TEXT, MIXED)
    assert table.read(0, 0) == "a"
    assert table.items().tolist() == [0, 0, 1]
    assert table.documents().tolist() == [0, 1, 1]
    assert len(table.part([0, 2])) == 2
    options = {"holdout": 0.5, "columns": {"query": "question", "document_image": "page"}}
    more = write(folder, *({"question": f"q{i}", "page": f"{i}.png"} for i in range(4)))
    parts = [load.load(str(more), split, **options) for split in ("train", "test")]
    assert sorted(one.read(i, 0) for one in parts for i in range(len(one))) == ["q0", "q1", "q2", "q3"]


def test_negatives_have_texts_and_images(folder):
    table = Table(
        write(
            folder,
            {"query": "a", "document": "one", "negative_image": ["1.png", "2.png"], "negative": ["x"]},
            {"query": "b", "document": "two", "negative": "y", "negative_image": None},
            {"query": "c", "document_image": "0.png", "document": None},
        ),
        columns={"query": "query", "document": "document", "document_image": "document_image"},
    )
    assert table.negative_columns == ("negative", "negative_image")
    assert [table.negative_count(i) for i in range(3)] == [2, 1, 0]
    read = [table.read_stored(i, 1) for i in table.negatives_of([0, 1, 2]).tolist()]
    assert [(one.text, None if one.image is None else one.image.name) for one in read] == [
        ("x", str(folder / "1.png")),
        ("", str(folder / "2.png")),
        ("y", None),
    ]
    assert len(WithNegatives(table).owners([0, 1, 2])) == 3


def test_negatives_of_several_columns_keep_their_partners(folder):
    row = {"query": "a", "document_image": "0.png", "negative_1": None, "negative_image_1": "1.png"}
    table = Table(write(folder, row | {"negative_2": "x", "negative_image_2": None}))
    read = [table.read_stored(i, 1) for i in table.negatives_of([0]).tolist()]
    assert [(one.text, one.image is None) for one in read] == [("", False), ("x", True)]


def test_images_inside_a_table(folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pages = [{"bytes": (folder / f"{i}.png").read_bytes(), "path": f"{i}.png"} for i in (0, 1)]
    rows = {"query": ["a", "b", "c"], "document_image": [*pages, None], "negative_image": [pages[1], None, pages[0]]}
    rows["document"] = ["one", None, "three"]
    parquet.write_table(arrow.table(rows), folder / "pairs.parquet")
    table = Table(folder / "pairs.parquet")
    torch.testing.assert_close(table.read(1, 1).image, IMAGES["1.png"])
    assert table.read(2, 1) == Content("three", None)
    negatives = [table.read(i, 1) for i in table.negatives_of([0, 2]).tolist()]
    torch.testing.assert_close(negatives[0].image, IMAGES["1.png"])
    torch.testing.assert_close(negatives[1].image, IMAGES["0.png"])
    assert table.is_inside(split_mixed(table.key(0, 1))[0])


def test_rows_without_text_and_image_are_listed(folder):
    table = Table(
        write(
            folder,
            {"query": "a", "document": "one", "document_image": "0.png"},
            {"query": "b", "document": " ", "document_image": None},
            {"query": "c", "document": 7, "document_image": "0.png"},
        )
    )
    assert len(table) == 1
    assert table.problems[0].endswith("row 2: document or document_image must be a text or an image, got neither")
    assert table.problems[1].endswith("row 3: document must be a text, got 7")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query": "a"}, r"columns must be image=NAME"),
        ({"query_image": "a"}, r"and document=NAME or document_image=NAME or both, got query_image=a"),
        ({"query_image": "a", "document": "a"}, r"must name each column of pairs once, got query_image=a document=a"),
        ({"query_image": "x", "document": "b"}, r"has no column x; it has a, b"),
        ({"query_image": "a", "text": "b"}, r"columns must be query=NAME or query_image=NAME or both"),
    ],
)
def test_wrong_columns(folder, columns, message):
    path = write(folder, {"a": "1", "b": "2"})
    with pytest.raises(ValueError, match=message):
        Table(path, columns=columns)


def test_images_that_cannot_be_encoded_are_skipped(folder):
    """A missing file, a damaged file, and an image with an extreme aspect ratio; the others have their own embeddings."""
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    from megabatch_train import towers

    (folder / "damaged.png").write_bytes(b"no image")
    to_pillow(vision_language.image(1, 300)).save(folder / "long.png")
    names = ("0.png", "missing.png", "damaged.png", "long.png", "1.png")
    table = Table(write(folder, *({"query": f"a {name}", "document_image": name} for name in names)))
    pair = towers.load(f"hf:{vision_language.save(folder / 'model')}", table.sides)
    embeddings = embed(pair.second, table, 1, chunk_size=2)
    assert embeddings.isfinite().all()
    assert sorted(table.failures) == [1, 2, 3]
    assert "missing.png cannot be read: No such file" in table.failures[1]
    assert "damaged.png is not an image" in table.failures[2]
    assert "an image of 300 × 1 pixels cannot be encoded" in table.failures[3]
    assert table.usable(range(5)).tolist() == [True, False, False, False, True]
    source = table.source(range(5), 1, pair.second)
    assert source.lengths.tolist()[0] == len(pair.second.prepare(table.read(0, 1), None)[0])
    assert isinstance(table.read_stored(0, 1).image, EncodedImage)
