"""Tables of pairs in four formats: the same pairs from each, damaged rows named, shared images and captions known."""

import json
import sys

import pytest
import torch

from megabatch import extras
from megabatch_train.data import load
from megabatch_train.data.dataset import UnreadableSampleError, find_components
from megabatch_train.data.tables import Table

ROWS = [("a.png", "one"), ("b.png", "two, with a comma"), ("a.png", 'a "third"'), ("c.png", "one")]


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="images are made with Pillow")
    for value, name in enumerate(("a.png", "b.png")):
        image.new("RGBA", (4, 3), (value, 2, 3, 255)).save(tmp_path / name)
    return tmp_path


def written(folder, ending):
    path = folder / f"pairs{ending}"
    if ending == ".jsonl":
        path.write_text("\n".join(json.dumps({"image": a, "caption": b}) for a, b in ROWS))
    elif ending == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read with pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"image": [a for a, _ in ROWS], "caption": [b for _, b in ROWS]}), path)
    else:
        tab = "\t" if ending == ".tsv" else ","
        quoted = [tab.join('"' + value.replace('"', '""') + '"' for value in row) for row in [("image", "caption"), *ROWS]]
        path.write_text("\n".join(quoted))
    return path


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_the_same_pairs_from_every_format(folder, ending):
    path = written(folder, ending)
    for given in (path, folder):
        table = Table(given)
        assert table.sides == ("image", "text")
        assert [(table.name(i), table.read(i, 1)) for i in range(len(table))] == ROWS
    assert table.read(1, 0)[:, 0, 0].tolist() == [1, 2, 3]
    assert table.read(1, 0).shape == (3, 3, 4)
    assert table.items().tolist() == [0, 1, 0, 2]
    assert table.documents().tolist() == [0, 1, 2, 0]
    assert table.ids(range(4)).tolist() == [[0, 0], [1, 1], [0, 2], [2, 0]]  # 2 and 3 share nothing
    assert table.problems == []


def test_a_missing_image_is_a_failure_with_its_name(folder):
    table = Table(written(folder, ".csv"))

    class Sum:
        def prepare(self, sample, generator):
            return sample.float().sum()

        collate = staticmethod(torch.stack)

    list(table.source(range(4), 0, Sum()).chunks([(0, 4)], None))
    assert table.failures == {3: f"{folder / 'c.png'} cannot be read: No such file or directory"}
    assert table.usable([3, 0]).tolist() == [False, True]


def test_damaged_rows_are_named_and_left_out(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"anchor": "a", "positive": "b"}\n{"anchor": "a"\n[1]\n\n{"anchor": "", "positive": "b"}\n'
        '{"anchor": 3, "positive": "b"}\n'
    )
    table = Table(path)
    assert table.sides == ("text", "text")
    assert len(table) == 1
    assert (table.read(0, 0), table.read(0, 1)) == ("a", "b")
    assert [problem.split(":")[0] for problem in table.problems] == [f"pairs.jsonl, row {n}" for n in (2, 3, 5, 6)]
    assert table.problems[2:] == [
        "pairs.jsonl, row 5: anchor must be a text, got nothing",
        "pairs.jsonl, row 6: anchor must be a text, got 3",
    ]
    (tmp_path / "short.csv").write_text("image,caption\na.png\n,nothing\n")
    with pytest.raises(
        ValueError,
        match=r"short\.csv must have at least one pair, .*, row 1: caption must be a text, .*, row 2: image must be a path",
    ):
        Table(tmp_path / "short.csv")


def test_a_comma_without_quotes_does_not_cut_a_caption(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text('image,caption\na.png,a cat, asleep\nb.png,"a dog, awake"\nc.png,a bird\n')
    table = Table(path)
    assert [table.read(index, 1) for index in range(len(table))] == ["a dog, awake", "a bird"]
    assert table.problems == ["pairs.csv, row 1: must have 2 fields, got 3; a comma in a text needs quotes around the text"]
    path.write_text("image,caption\na.png,a cat, asleep\n")
    with pytest.raises(ValueError, match=r"must have at least one pair, got none: pairs.csv, row 1: must have 2 fields, got 3"):
        Table(path)


def test_a_damaged_beginning_is_left_out_like_any_other_row(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"anchor": \n{"anchor": "a", "positive": "b"}\n')
    table = Table(path)
    assert len(table) == 1
    assert table.problems[0].startswith("pairs.jsonl, row 1: must be a JSON object")
    long = tmp_path / "long.csv"
    long.write_text(f"image,caption\na.png,{'x' * 200_000}\nb.png,a dog\n")  # more than Python's csv takes
    table = Table(long)
    assert (len(table), table.read(0, 1)) == (1, "a dog")
    assert table.problems[0].startswith("long.csv, row 1: cannot be read: field larger")


def test_columns_of_your_own(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("word,meaning\ncat,a pet\n")
    with pytest.raises(ValueError, match=r"has the columns word, meaning. .* --columns image=word text=meaning .* query=word"):
        Table(path)
    with pytest.raises(ValueError, match=r"pairs.csv has no column gloss; it has word, meaning"):
        Table(path, columns=("word", "gloss"))
    table = Table(path, columns=("word", "meaning"), texts=True)
    assert (table.read(0, 0), table.read(0, 1)) == ("cat", "a pet")
    by_role = Table(path, columns={"query": "meaning", "document": "word"})
    assert (by_role.sides, by_role.read(0, 0), by_role.read(0, 1)) == (("text", "text"), "a pet", "cat")
    assert Table(path, columns={"image": "word", "text": "meaning"}).sides == ("image", "text")
    for wrong in (
        {"image": "word"},
        {"image": "word", "caption": "meaning"},
        {"image": "word", "query": "word", "text": "word"},
    ):
        with pytest.raises(
            ValueError, match=r"columns must be image=NAME text=NAME or query=NAME document=NAME, .*, got image=word"
        ):
            Table(path, columns=wrong)
    for wrong in ("word", ["word"], {"query": 3, "document": "word"}):
        with pytest.raises(ValueError, match=r"columns must be two names, or names by role .*, got ['\[{]"):
            Table(path, columns=wrong)


def test_a_table_that_is_not_utf_8_is_refused_with_the_line(tmp_path):
    for name, text in (
        ("a.csv", "image,caption\na.png,one\nb.png,café\n"),
        ("a.jsonl", '\n\n{"query": "é", "document": "b"}\n'),
    ):
        path = tmp_path / name
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"must be utf-8, and the byte 0xe9 in line 3 is not.*encoding=latin-1"):
            Table(path)
        assert "é" in "".join(map(str, (Table(path, encoding="latin-1").name(0), Table(path, encoding="latin-1")._second)))
    with pytest.raises(ValueError, match="encoding must be an encoding of Python"):
        Table(path, encoding="utf-9")


def test_what_is_no_table(tmp_path):
    with pytest.raises(ValueError, match=r"must have one table .*, got none; name the file"):
        Table(tmp_path)
    (tmp_path / "pairs.txt").write_text("")
    with pytest.raises(ValueError, match=r"a table must end in .csv, .tsv, .jsonl, .parquet, got .*pairs.txt"):
        Table(tmp_path / "pairs.txt")
    with pytest.raises(FileNotFoundError, match=r"No such file: .*pairs.csv"):
        Table(tmp_path / "pairs.csv")
    for text in ("", "image,caption\n"):
        (tmp_path / "empty.csv").write_text(text)
        with pytest.raises(ValueError, match=r"empty\.csv must have at least one pair, got none: it has no rows"):
            Table(tmp_path / "empty.csv")


def test_a_column_has_one_meaning(tmp_path):
    (tmp_path / "twice.csv").write_text("image,caption,caption\na.png,one,two\n")
    with pytest.raises(ValueError, match=r"twice\.csv must name each column once, got caption more than once"):
        Table(tmp_path / "twice.csv")
    (tmp_path / "pairs.csv").write_text("file,,\na.png,,\n")
    with pytest.raises(ValueError, match=r"columns must name two columns of pairs, got file twice: image=file text=file"):
        Table(tmp_path / "pairs.csv", columns={"image": "file", "text": "file"})


def test_parquet_that_is_damaged_is_named(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet is read with pyarrow")
    (tmp_path / "pairs.parquet").write_bytes(b"no Parquet at all")
    with pytest.raises(ValueError, match=r"pairs\.parquet must be Parquet and cannot be read"):
        Table(tmp_path / "pairs.parquet")


def test_connected_through_others():
    first, second = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([5, 5, 6, 7, 7])
    assert find_components(first, second).tolist() == [0, 0, 0, 3, 3]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(extras.REQUIREMENTS, "no_such_package", "megabatch[foo]")
    with pytest.raises(ModuleNotFoundError, match=r'Reading Foo needs .*"no_such_package".*"megabatch\[foo\]"'):
        extras.load("no_such_package.inner", purpose="Reading Foo")


def test_a_path_that_is_none_is_unreadable(tmp_path):
    lines = [json.dumps({"image": path, "caption": "x"}) for path in ("a\0b.png", "\ud800.png")]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    table = Table(tmp_path / "t.jsonl")
    for index in range(2):
        with pytest.raises(UnreadableSampleError, match="cannot be read"):
            table.read(index, 0)


def test_half_of_a_surrogate_pair_is_no_text(tmp_path):
    texts = ["plain", "whole \U0001f600", "half \ud83d of one"]
    lines = [json.dumps({"query": f"word {i}", "document": text}) for i, text in enumerate(texts)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    table = Table(tmp_path / "pairs.jsonl")
    assert [table.read(i, 1) for i in range(len(table))] == texts[:2]
    assert "got half of a surrogate pair" in table.problems[0]


def pairs_of(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_json_lines_have_the_columns_of_all_rows(tmp_path):
    plain, more = {"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d", "negative": ["e", None, " "], "label": 1}
    table = Table(pairs_of(tmp_path / "pairs.jsonl", plain, more))
    assert table.negative_columns == ("negative",)
    assert [table.read(index, 1) for index in table.negatives_of([0, 1]).tolist()] == ["e"]
    assert table.label_column == "label"
    columns = {"query": "anchor", "document": "positive", "negative": "negative"}
    assert Table(tmp_path / "pairs.jsonl", columns=columns).negative_count(1) == 1


@pytest.mark.parametrize("given", [[{"text": "c"}], 3, ["c", 4]])
def test_a_negative_that_is_no_text_is_refused_with_its_row(tmp_path, given):
    rows = ({"anchor": "a", "positive": "b", "negative": entry} for entry in (None, given))
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl, row 2: negative must be a text or a list of texts, got (\{'text'|3|4)"
    ):
        Table(pairs_of(tmp_path / "pairs.jsonl", *rows))


def test_rows_without_a_label_are_no_class(tmp_path):
    (tmp_path / "cells.csv").write_text("anchor,positive,label\na,b,x\nc,d,\ne,f, \n")
    keys = pairs_of(tmp_path / "keys.jsonl", {"anchor": "a", "positive": "b", "label": 0}, {"anchor": "c", "positive": "d"})
    for path, count in ((tmp_path / "cells.csv", 2), (keys, 1)):
        table = Table(path)  # other losses need no labels
        with pytest.raises(
            ValueError, match=rf"a label \(label\) in every row, got none in {count} rows, the first of them row 2"
        ):
            table.labels([0])


@pytest.mark.parametrize(
    ("ending", "lines", "texts", "problem"),
    [
        (".tsv", ['\t"5 inch', "\tb", '\tsay "hi"', "\tc"], ['"5 inch', "b", 'say "hi"', "c"], None),
        (".tsv", ['\t"5 inch', "\tb", '\t6"', "\tc"], ['"5 inch', "b", '6"', "c"], None),
        (".tsv", ['\t"two\nlines"', '\t"a ""b"""', "\tc"], ["two\nlines", 'a "b"', "c"], None),
        (".csv", [",a", ',"5 inch', ",b", ",c"], ["a"], "lines 3 to 5: a quoted field does not end where it should"),
        (".csv", [",a", ',"5 inch', ",b", ',say "hi"', ",c"], ["a", "c"], "lines 3 to 5: a quoted field does not end"),
        (".csv", [",a", ',"5 inch', ",b", ',6"', ",c"], ["a", "c"], "lines 3 to 5: a quoted field contains whole rows"),
        (".csv", [",a", ',"5 inch'], ["a"], "line 3: a quoted field does not end where it should"),
        (".csv", [",a", ',"5 inch', *["," + "b" * 1999] * 66, ",c"], ["a", "c"], "field limit (131072), lines 3 to 69"),
        (".csv", [",a", "", ',"two\nlines"', ',5" wide', ',"5" wide'], ["a", "two\nlines", '5" wide', "5 wide"], None),
    ],
)
def test_a_stray_quote_swallows_no_row_silently(tmp_path, ending, lines, texts, problem):
    path = tmp_path / f"pairs{ending}"
    separator = "\t" if ending == ".tsv" else ","
    rows = [f"{i}.png{line}" if line else "" for i, line in enumerate(lines)]
    path.write_text("\n".join([f"image{separator}caption", *rows, ""]))
    table = Table(path)
    assert [table.read(i, 1) for i in range(len(table))] == texts
    assert [problem in told for told in table.problems] == ([True] if problem else [])


def triples(folder):
    rows = [
        {"q": f"q{i}", "d": f"d{i}", "negative_1": f"a{i}", "negative_2": f"b{i}", "worse": f"c{i}", "label": i}
        for i in range(3)
    ]
    (folder / "triples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "triples.jsonl"


@pytest.mark.parametrize(
    ("further", "negatives", "label"),
    [
        ({}, ["a1", "b1"], "label"),  # found by their names
        ({"negative": "worse"}, ["c1"], "label"),
        ({"negative": ["worse", "negative_1"]}, ["c1", "a1"], "label"),
        ({"negative": "", "label": ""}, [], None),
    ],
)
def test_naming_the_pair_keeps_the_other_columns(tmp_path, further, negatives, label):
    table = Table(triples(tmp_path), columns={"query": "q", "document": "d", **further})
    assert [table.read(number, 1) for number in table.negatives_of([1]).tolist()] == negatives
    assert table.label_column == label


def test_columns_of_pairs_are_no_negatives(tmp_path):
    table = Table(triples(tmp_path), columns={"query": "q", "document": "negative_1"})
    assert table.negative_columns == ("negative_2",)
    with pytest.raises(ValueError, match=r"columns must be image=NAME text=NAME or .*, got query=q document=d document=worse"):
        Table(triples(tmp_path), columns={"query": "q", "document": ["d", "worse"]})
    with pytest.raises(ValueError, match=r"triples.jsonl has no column worst; it has q, d, negative_1"):
        Table(triples(tmp_path), columns={"query": "q", "document": "d", "negative": ["worse", "worst"]})


def test_values_need_no_package_for_images(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"curve": [1], "text": "a"}')
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert len(load.load(str(tmp_path / "rows.jsonl"), columns={"value": "curve", "text": "text"})) == 1
    (tmp_path / "images.jsonl").write_text('{"image": "a.png", "text": "a"}')
    with pytest.raises(ImportError, match="Reading images"):
        load.load(str(tmp_path / "images.jsonl"))
