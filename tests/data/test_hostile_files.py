"""Deeply nested JSON, pipes and devices are samples that cannot be read. They neither block nor end a command."""

import json
import os
import tarfile
from io import BytesIO

import pytest

from megabatch_train.data import paths
from megabatch_train.data.dataset import UnreadableSampleError
from megabatch_train.data.paths import read_file
from megabatch_train.data.rows import Folders
from megabatch_train.data.shards import Shards
from megabatch_train.data.tables import Table

DEEP = "[" * 200_000
NESTED = '{"a":' * 900 + "1" + "}" * 900  # can be read, but not written in one go


def test_deep_json_in_json_lines(tmp_path):
    good = json.dumps({"query": "a", "document": "b"})
    rows = [good, DEEP, f'{{"query": {DEEP}, "document": "c"}}', f'{{"query": {NESTED}, "document": "c"}}']
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    table = Table(tmp_path / "pairs.jsonl")
    assert len(table) == 1
    assert [problem.partition(": ")[0] for problem in table.problems] == [f"pairs.jsonl, row {row}" for row in (2, 3, 4)]
    assert table.problems[0].endswith("must be a JSON object: it is nested too deeply")


def test_deep_json_beside_an_image(tmp_path):
    for name, caption in (("a", '{"caption": "fine"}'), ("b", DEEP)):
        (tmp_path / f"{name}.png").touch()
        (tmp_path / f"{name}.json").write_text(caption)
    table = Table(tmp_path)
    assert len(table) == 1
    assert "b.json has no caption that can be read: it is nested too deeply" in table.problems[0]


def test_deep_json_in_a_shard(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (("0.png", b"x"), ("0.json", DEEP.encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    shards = Shards(tmp_path / "a.tar", cache_folder=tmp_path, caption_ids=True)
    with pytest.raises(UnreadableSampleError, match=r"a.tar:0.json has no caption .* it is nested too deeply"):
        shards.read(0, 1)
    assert shards.ids([0]) is not None


def test_a_pipe_and_a_device_in_a_table(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to("/dev/zero")
    names = ["pipe.png", "/dev/zero", "/dev/stdin", "folder.png", "link.png"]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *(f"{name},text" for name in names)]))
    table = Table(tmp_path / "pairs.csv")
    for index in range(len(names)):
        with pytest.raises(UnreadableSampleError, match=r"cannot be read: (it is not a regular file|No such)"):
            table.read(index, 0)


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl", "pairs.parquet"])
def test_a_table_that_is_a_pipe_or_a_device(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="it is not a regular file"):
        Table(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is not a regular file"):
        Table(tmp_path / name)


def test_a_shard_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(ValueError, match="it is not a regular file"):
        Shards(tmp_path / "pipe.tar")


def test_a_pipe_in_a_folder_of_classes(tmp_path):
    (tmp_path / "cats").mkdir()
    os.mkfifo(tmp_path / "cats" / "a.png")
    with pytest.raises(UnreadableSampleError, match=r"a.png cannot be read: it is not a regular file"):
        Folders(tmp_path).read(0, 0)


def test_a_pipe_as_a_caption(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").touch()
    (tmp_path / "a.txt").write_text("fine")
    os.mkfifo(tmp_path / "b.txt")
    table = Table(tmp_path)
    assert len(table) == 1
    assert "b.txt has no caption that can be read" in table.problems[0]


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MOST_BYTES", 10)
    (tmp_path / "a.png").write_bytes(bytes(10))
    assert read_file(tmp_path / "a.png") == bytes(10)
    (tmp_path / "a.png").write_bytes(bytes(11))
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_file(tmp_path / "a.png")
