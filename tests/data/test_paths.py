"""Files behind an address: whole bytes whatever is asked for, one fetch for many readers, a bounded cache, errors that help."""

import io
import os
import pickle
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from megabatch_train.data import load as data
from megabatch_train.data import paths
from megabatch_train.data.dataset import UnreadableSampleError
from megabatch_train.data.loader import ReaderProcesses
from megabatch_train.data.paths import RemoteError, Url
from megabatch_train.data.shards import Shards
from megabatch_train.data.tables import Table
from servers import FileServer

CONTENT = random.Random(0).randbytes(10_000)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "BLOCK", 999)
    monkeypatch.setattr(paths, "PAUSES", (0.01, 0.01))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "x.bin").write_bytes(CONTENT)
    with FileServer(tmp_path / "served") as made:
        yield made


def test_any_part_of_a_file_is_what_the_file_has_there(server):
    url, chosen = Url(f"{server.address}/x.bin?token=secret"), random.Random(1)
    for _ in range(30):
        start, size = chosen.randrange(11_000), chosen.randrange(3000)
        assert url.read(start, size) == CONTENT[start : start + size]
    assert len(server.requests) <= 11  # each block once
    assert pickle.loads(pickle.dumps(url)).about == url.about
    assert url.read_bytes() == CONTENT
    with url.open("rb") as file:
        file.seek(-5, os.SEEK_END)
        assert (file.read(), file.tell()) == (CONTENT[-5:], 10_000)
    assert (str(url), url.name, url.suffix) == (f"{server.address}/x.bin", "x.bin", ".bin")  # no token in messages


def test_only_the_user_can_read_cached_files(server, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = arrow.table({"image": [{"bytes": bytes(20), "path": "a.png"}], "text": ["a"]})
    parquet.write_table(rows, server.folder / "t.parquet")
    address = server.address.replace("://", "://me:secret@")
    assert len(Table(f"{address}/t.parquet")) == 1
    Url(f"{address}/x.bin").read_bytes()
    for folder in (tmp_path / "cache" / "remote", tmp_path / "cache" / "images"):
        assert folder.stat().st_mode & 0o777 == 0o700
        files = [path for path in folder.iterdir() if path.stat().st_size > 10]  # all but locks and the total size
        assert len(files) >= 2
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_file_that_changes_is_not_mixed_with_what_is_cached_of_it(server):
    address = f"{server.address}/x.bin"
    assert Url(address).read(0, 5000) == CONTENT[:5000]
    (server.folder / "x.bin").write_bytes(CONTENT[::-1])
    assert Url(address).read(0, 5000) == CONTENT[::-1][:5000]
    old = Url(address)
    assert old.about.size == 10_000
    (server.folder / "x.bin").write_bytes(CONTENT[:7300])
    with pytest.raises(RemoteError, match=r"x\.bin must have 10000 bytes, got fewer: it has changed"):
        old.read(7000, 1000)
    (server.folder / "x.bin").unlink()
    with pytest.raises(RemoteError, match=r"x\.bin has been removed from the server since the run began"):
        old.read(8000, 1000)


def test_a_file_of_the_same_size_that_changes_during_the_run_ends_it(server):
    url = Url(f"{server.address}/x.bin")
    assert url.read(0, 500) == CONTENT[:500]
    (server.folder / "x.bin").write_bytes(CONTENT[::-1])
    assert url.read(0, 500) == CONTENT[:500]  # from the cache
    with pytest.raises(RemoteError, match=r"x\.bin has changed since the run began.*start the run again"):
        url.read(1000, 500)


def test_without_versions_nothing_is_kept_for_another_run(server, caplog):
    server.versions = False
    for content in (CONTENT, CONTENT[::-1]):
        (server.folder / "x.bin").write_bytes(content)
        url = Url(f"{server.address}/x.bin")
        assert pickle.loads(pickle.dumps(url)).read(0, 500) == url.read(0, 500) == content[:500]
        paths._version_of_this_run.cache_clear()  # as in another process
        assert pickle.loads(pickle.dumps(url)).read(1000, 500) == content[1000:1500]  # of a reader, with what is known
    assert [record.getMessage().partition(" ")[2][:30] for record in caplog.records] == ["sends neither ETag nor Last-Mo"] * 2


def test_failures_that_pass_are_repeated_and_others_are_not(server, caplog):
    url = Url(f"{server.address}/x.bin")
    assert url.about.size == 10_000
    server.broken = [503, 429]
    assert url.read(0, 5) == CONTENT[:5]
    assert [record.getMessage().partition("; ")[2][:17] for record in caplog.records] == [
        "attempt 2 follows",
        "attempt 3 follows",
    ]
    server.broken = [503] * 3
    with pytest.raises(RemoteError, match=r"x\.bin could not be read in 3 attempts: .*503.*--resume continues"):
        url.read(2000, 5)
    server.broken = [403]
    with pytest.raises(RemoteError, match=r"x\.bin cannot be read, because access was denied .*403.*; check the URL"):
        url.read(2000, 5)
    server.broken = [400]
    with pytest.raises(RemoteError, match=r"x\.bin cannot be read, because the server refuses the request: .*400"):
        url.read(2000, 5)
    server.ranges = False
    with pytest.raises(RemoteError, match=r"sends whole files instead of byte ranges.*Copy the file to a disk"):
        url.read(2000, 5)


def test_addresses_that_cannot_be_read_say_what_to_do(server, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"No such file: .*/y\.csv"):
        data.load(f"{server.address}/y.csv")
    with pytest.raises(ValueError, match=r"shard .*/y\.tar cannot be read: No such file on the server"):
        data.load(f"{server.address}/y.tar")
    with pytest.raises(ValueError, match=r"a URL must begin with s3://.* or file://, got ftp://"):
        data.load("ftp://host/0.tar")
    with pytest.raises(ValueError, match=r"must have shards \(.tar\) or one table .*, got none"):
        data.load(server.address)
    monkeypatch.setitem(paths.PACKAGES, "gs", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r'Reading gs:// URLs needs .*; pip install "no_such_package" installs it'):
        data.load("gs://bucket/0.tar")

    class NoCredentialsError(Exception):
        pass

    def refused():
        raise NoCredentialsError("Unable to locate credentials")

    for address, advice in (
        ("s3://b/x.csv", "set AWS_ACCESS_KEY_ID .*FSSPEC_S3_ANON=true"),
        ("s3a://b/x.csv", "set AWS_ACCESS_KEY_ID"),
        ("gcs://b/x.csv", "run `gcloud auth"),
        ("https://b/x.csv", "check the URL and the token"),
    ):
        with pytest.raises(RemoteError, match=rf"{address} cannot be read, .*; {advice}"):
            Url(address)._retry(refused)


def test_a_missing_image_is_skipped_and_a_lost_server_is_not(server, tmp_path):
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{server.address}/x.bin,a\n{server.address}/y.png,b\n")
    table = Table(tmp_path / "pairs.csv")
    assert table.read_stored(0, 0).data == CONTENT
    with pytest.raises(UnreadableSampleError, match=r"/y\.png cannot be read: No such file on the server"):
        table.read_stored(1, 0)
    server.broken = [503] * 3
    with pytest.raises(RemoteError, match=r"/y\.png could not be read in 3 attempts"):
        table.read_stored(1, 0)


def test_names_of_images_are_quoted(server):
    names = ["a b.png", "ü.png", "50%.png", "a%20b.png", "x#1.png", "what?.png", "plus+.png", "sub/c.png"]
    (server.folder / "sub").mkdir()
    for name in names:
        (server.folder / name).write_text(name)
    (server.folder / "pairs.csv").write_text("image,caption\n" + "".join(f"{name},a\n" for name in names))
    table = Table(f"{server.address}/pairs.csv?token=secret")
    assert [table.name(index) for index in range(len(table))] == names
    assert [table.read_stored(index, 0).data.decode() for index in range(len(table))] == names
    (server.folder / "y.csv").write_text("image,caption\ny.png,a\n")
    other = Table(f"{server.address}/y.csv?token=secret")
    server.broken = [403]
    with pytest.raises(RemoteError, match=r"/y\.png .*access was denied.* requested without the table's token"):
        other.read_stored(0, 0)


def stress(number):
    """Reads pieces at random; returns how many it fetched, and the largest size of the cache that it saw."""
    chosen, fetched, largest = random.Random(number), [], 0

    def fetch(piece):
        fetched.append(piece)
        return bytes([piece]) * 1000

    for _ in range(40):
        piece, start = chosen.randrange(30), chosen.randrange(1000)
        found = paths.part(f"piece-{piece}", start, 10, partial(fetch, piece))
        assert found == (bytes([piece]) * 1000)[start : start + 10]
        with suppress(FileNotFoundError):  # one that is deleted while it is counted
            pieces = (paths.folder() / "remote").glob("piece-*")
            largest = max(largest, sum(path.stat().st_size for path in pieces))
    return len(fetched), largest


def test_threads_share_a_cache_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path))
    monkeypatch.setenv("MEGABATCH_CACHE_GIB", str(8000 / 2**30))
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(stress, range(6)))
    assert 5000 < max(largest for _, largest in found) <= 8000 + 6 * 1017  # and a piece that each of them writes
    for path in (tmp_path / "remote").iterdir():
        path.unlink()
    monkeypatch.setenv("MEGABATCH_CACHE_GIB", "1")
    with ThreadPoolExecutor(8) as threads:
        assert sum(fetched for fetched, _ in threads.map(stress, range(8))) == 30  # each piece once, by one thread


@pytest.mark.thorough
def test_reader_processes_fetch_each_block_once(server, monkeypatch):
    monkeypatch.undo()  # processes of their own have blocks of the usual size
    monkeypatch.setenv("MEGABATCH_CACHE", str(server.folder.parent / "cache"))
    with tarfile.open(server.folder / "0.tar", "w") as archive:
        for number in range(40):
            for name, content in ((f"{number}.png", CONTENT * 50), (f"{number}.txt", str(number).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    shards = Shards(f"{server.address}/0.tar")
    count = -(-(server.folder / "0.tar").stat().st_size // paths.BLOCK)
    assert len(server.requests) == count > 2
    for path in (server.folder.parent / "cache" / "remote").iterdir():
        path.unlink()
    with ReaderProcesses(3, [shards]) as readers:
        found = [readers.submit(shards.read, index, 1) for index in range(40)]
        assert [future.result() for future in found] == list(map(str, range(40)))
    assert len(server.requests) == 2 * count


def test_temporary_files_of_killed_processes_are_removed_from_the_cache(tmp_path):
    digits = "0123456789abcdef" * 2
    left, young, other = (tmp_path / name for name in (f".a.bin-{digits}", f".b.pt-{digits}", f".notes.txt-{digits}"))
    for path in (left, young, other):
        path.write_text("left")
    for path in (left, other):
        os.utime(path, (0, 0))
    assert paths.load_or_make(tmp_path / "c.pt", lambda: [3]) == [3]
    assert sorted(tmp_path.iterdir()) == sorted([young, other, tmp_path / "c.pt"])  # the young one may not be locked yet


def test_a_piece_that_is_cut_off_is_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path))
    (tmp_path / "remote").mkdir()
    for left in (0, 3, 10):
        assert paths.part("a", 1, 2, lambda: b"abcd") == b"bc"
        assert paths.part("a", 1, None, lambda: b"") == b"bcd"
        os.truncate(tmp_path / "remote" / "a", left)
        assert paths.part("a", 0, None, lambda: b"new") == b"new"
        (tmp_path / "remote" / "a").unlink()


def test_without_a_cache_everything_is_fetched(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(paths, "_warned", False)
    for _ in range(2):
        assert paths.part("a", 1, 2, lambda: b"abcd") == b"bc"
    assert [record.getMessage()[:29] for record in caplog.records] == ["remote data is not cached, be"]
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path))
    monkeypatch.setenv("MEGABATCH_CACHE_GIB", "much")
    with pytest.raises(ValueError, match="MEGABATCH_CACHE_GIB must be a number of GiB, such as 64, got 'much'"):
        paths.part("a", 0, 1, lambda: b"abcd")
