"""Shards that are whole, cut off, missing or damaged: read by position, each time the same, and as webdataset reads them."""

import io
import json
import pickle
import tarfile

import pytest
import torch

import megabatch as mb
from megabatch_train.data import dataset
from megabatch_train.data.loader import Order
from megabatch_train.data.paths import expand_pattern
from megabatch_train.data.shards import Shards

Image = pytest.importorskip("PIL.Image", reason="images are made with Pillow")


def png(value, size=(6, 5)):
    data = io.BytesIO()
    Image.new("RGB", size, (value % 256, 40, 255 - value % 256)).save(data, "PNG")
    return data.getvalue()


def write(path, samples):
    with tarfile.open(path, "w") as archive:
        for name, data in samples:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def whole(path, first, count):
    samples = []
    for i in range(first, first + count):
        samples += [(f"{i:05d}.png", png(i)), (f"{i:05d}.txt", f"caption {i}".encode())]
        samples += [(f"{i:05d}.json", json.dumps({"caption": f"other {i}"}).encode())]
    return write(path, samples)


class Plain:
    """A tower's preparation that shows what it is given."""

    def prepare(self, sample, generator):
        if isinstance(sample, str):
            return torch.tensor([len(sample)])
        noise = 0 if generator is None else torch.randint(0, 9, (1,), generator=generator)
        return torch.stack([sample[:, 0, 0].sum() + noise.sum() if torch.is_tensor(noise) else sample[:, 0, 0].sum()])

    def collate(self, samples):
        return torch.stack(samples).float()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_samples_by_number_in_any_order(folder):
    whole(folder / "00000.tar", 0, 5)
    whole(folder / "00001.tar", 5, 3)
    data = Shards(str(folder / "*.tar"))
    assert (len(data), data.groups, data.problems) == (8, (5, 3), [])
    for i in (7, 0, 5, 4):
        assert data.read(i, 0)[:, 0, 0].tolist() == [i, 40, 255 - i]
        assert data.read(i, 0).shape == (3, 5, 6)
        assert data.read(i, 1) == f"caption {i}"
    assert data.name(5) == "00001.tar:00005"
    with pytest.raises(IndexError, match="index must be from 0 to 7, got 8"):
        data.read(8, 0)
    copy = pickle.loads(pickle.dumps(data))  # as for a worker process
    assert torch.equal(copy.read(6, 0), data.read(6, 0))


def test_a_long_listing_logs_its_progress(folder, monkeypatch, caplog):
    monkeypatch.setattr(dataset, "SECONDS", 0.0)
    for number in range(3):
        whole(folder / f"{number}.tar", 2 * number, 2)
    with caplog.at_level("INFO", "megabatch"):
        assert len(Shards(str(folder / "*.tar"))) == 6
    assert [line.partition(",")[0] for line in caplog.messages] == ["1 of 3 shards listed", "2 of 3 shards listed"]


def test_as_webdataset_writes_and_reads(folder):
    wds = pytest.importorskip("webdataset", reason="compares with the webdataset library")
    with wds.TarWriter(str(folder / "00000.tar")) as writer:
        for i in range(4):
            writer.write({"__key__": f"sub.dir/{i:03d}", "png": png(i), "txt": f"text {i}"})
    data = Shards(str(folder / "{00000..00000}.tar"))
    with (folder / "00000.tar").open("rb") as file:  # WebDataset itself leaves closing it to the collector
        members = wds.tariterators.tar_file_expander([{"url": "00000.tar", "stream": file}])
        samples = list(wds.tariterators.group_by_keys(members))
    theirs = [(sample["__key__"], sample["png"], sample["txt"].decode()) for sample in samples]
    assert [data.name(i) for i in range(4)] == [f"00000.tar:{key}" for key, _, _ in theirs]
    assert [data.read(i, 1) for i in range(4)] == [text for _, _, text in theirs]
    for i, (_, image, _) in enumerate(theirs):
        with Image.open(io.BytesIO(image)) as picture:
            assert data.read(i, 0)[:, 0, 0].tolist() == list(picture.getpixel((0, 0)))


def test_what_is_damaged_is_named_and_the_rest_is_used(folder):
    write(
        folder / "a.tar",
        [
            ("0.png", png(0)),
            ("0.txt", b"good"),
            ("1.png", b"\x89PNG\r\n\x1a\n damaged"),
            ("1.txt", b"bad image"),
            ("2.txt", b"no image"),
            ("3.png", png(3)),
            ("3.txt", b"  \n"),
            ("4.png", png(4)),
            ("4.txt", b"\xff\xfe not utf-8"),
            ("5.jpg", b""),
            ("5.json", json.dumps({"caption": "nothing in it"}).encode()),
            ("6.png", png(6)),
            ("6.json", json.dumps({"caption": None}).encode()),
            ("7.png", png(7)),
            ("7.json", json.dumps({"caption": " from json "}).encode()),
        ],
    )
    data = Shards(folder / "a.tar")
    assert data.problems == [
        "sample a.tar:2 has no image or recording (jpg or jpeg or png or webp or wav or flac or ogg or mp3)"
    ]
    assert len(data) == 7
    for side in (0, 1):
        list(data.source(range(7), side, Plain()).chunks([(0, 4), (4, 7)], None))
    usable = data.usable(range(7))
    assert [data.name(i) for i in range(7) if usable[i]] == ["a.tar:0", "a.tar:7"]
    assert data.read(6, 1) == "from json"
    reasons = {data.name(i): reason for i, reason in data.failures.items()}
    assert reasons["a.tar:1"].startswith("a.tar:1.png is not an image that can be read: ")
    assert reasons["a.tar:3"] == "a.tar:3.txt has an empty caption"
    assert "a.tar:4.txt has no caption that can be read: UnicodeDecodeError" in reasons["a.tar:4"]
    assert reasons["a.tar:5"] == "a.tar:5.jpg is empty"
    assert reasons["a.tar:6"] == "a.tar:6.json has an empty caption"


def test_failures_come_home_from_worker_threads_and_a_loss_leaves_them_out(folder):
    samples = [(f"{i}.{end}", data) for i in range(6) for end, data in (("png", png(40 * i)), ("txt", b"x" * (i + 1)))]
    samples[4] = ("2.png", b"damaged")
    data = Shards(write(folder / "a.tar", samples))
    image, text = torch.nn.Linear(1, 3), torch.nn.Linear(1, 3)
    kept = []

    def loss(x, y):
        usable = data.usable(range(6))
        kept.append(usable.tolist())
        return mb.clip_loss(x[usable], y[usable], 2.0)

    towers = [(module, data.source(range(6), side, Plain(), workers=2)) for side, module in enumerate((image, text))]
    mb.cached_backward(loss, towers, chunk_size=2)
    assert kept == [[True, True, False, True, True, True]]
    whole_batch = [torch.cat(list(data.source([0, 1, 3, 4, 5], side, Plain()).chunks([(0, 5)], None))) for side in (0, 1)]
    expected = torch.autograd.grad(mb.clip_loss(image(whole_batch[0]), text(whole_batch[1]), 2.0), image.weight)[0]
    torch.testing.assert_close(image.weight.grad, expected)


@pytest.mark.parametrize("where", ["data", "header"])
def test_a_shard_that_is_cut_off_gives_what_it_has(folder, where):
    path = whole(folder / "a.tar", 0, 6)
    with tarfile.open(path) as archive:
        member = archive.getmember("00004.png")
        cut = member.offset_data + 3 if where == "data" else member.offset + 100
    path.write_bytes(path.read_bytes()[:cut])
    data = Shards([path, folder / "missing.tar", whole(folder / "b.tar", 10, 2)])
    assert [data.name(i) for i in range(len(data))] == [*(f"a.tar:0000{i}" for i in range(4)), "b.tar:00010", "b.tar:00011"]
    how = "is cut off in 00004.png" if where == "data" else "has no end mark, so it may be cut off"
    assert data.problems[0].startswith(f"shard {path} {how}")
    assert data.problems[-1] == f"shard {folder / 'missing.tar'} cannot be read: No such file or directory"
    assert data.read(3, 1) == "caption 3"


def test_a_shard_that_shrinks_while_it_is_read(folder):
    path = whole(folder / "a.tar", 0, 6)
    data = Shards(path)
    path.write_bytes(path.read_bytes()[:2000])
    list(data.source(range(6), 0, Plain()).chunks([(0, 6)], None))
    assert len(data.failures) == 5
    assert "the shard has become shorter" in data.failures[5]
    assert len(Shards(path)) < 6  # the kept table of contents was of another file


def test_nothing_there(folder):
    with pytest.raises(FileNotFoundError, match="which matches none"):
        expand_pattern(str(folder / "*.tar"))
    with pytest.raises(ValueError, match=r"at least one sample, got none in .*: shard .* cannot be read: No such file"):
        Shards(folder / "missing.tar")
    (folder / "text.tar").write_text("not a tar file")
    with pytest.raises(ValueError, match="is not a complete tar file"):
        Shards(folder / "text.tar")


def test_replay_bit_for_bit_whatever_the_batch_and_the_workers(folder):
    data = Shards(whole(folder / "a.tar", 0, 9))
    alone = {i: next(data.source([i], 0, Plain(), seed=3, epoch=2).chunks([(0, 1)], None)).clone() for i in range(9)}
    for workers in (0, 2):
        source = data.source([8, 0, 4, 2], 0, Plain(), seed=3, epoch=2, workers=workers)
        for _ in range(2):
            together = torch.cat([chunk.clone() for chunk in source.chunks([(0, 3), (3, 4)], None)])
            assert torch.equal(together, torch.cat([alone[i] for i in (8, 0, 4, 2)]))
    others = torch.cat(list(data.source(range(9), 0, Plain(), seed=3, epoch=3).chunks([(0, 9)], None)))
    assert not torch.equal(others, torch.cat([alone[i] for i in range(9)]))


def test_captions_that_occur_twice_share_an_id(folder):
    samples = [(f"{i}.{end}", data) for i in range(4) for end, data in (("png", png(i)), ("txt", b"a" if i % 2 else b"b"))]
    path = write(folder / "a.tar", samples)
    assert Shards(path).ids([0, 1]) is None
    a, b, c, d = Shards(path, caption_ids=True).ids(range(4)).tolist()
    assert (a, b) == (c, d)
    assert a != b


def test_order_covers_an_epoch_over_ranks_and_resumes_in_its_middle():
    groups = (5, 3, 8, 4)
    orders = [Order(groups, 6, seed=1, rank=rank, world_size=4, window=2) for rank in range(4)]
    assert orders[0].batches_per_epoch == 3
    parts = [list(order.batches(0, 6)) for order in orders]
    for number in range(6):
        batch = torch.cat([part[number].indices for part in parts])
        assert torch.equal(batch, next(Order(groups, 6, seed=1, window=2).batches(number)).indices)
    first, second = (torch.cat([torch.cat([p[n].indices for p in parts]) for n in range(e, e + 3)]) for e in (0, 3))
    assert len(first.unique()) == 18
    assert not torch.equal(first, second)
    assert torch.equal(next(orders[2].batches(4)).indices, parts[2][4].indices)
    assert sorted(orders[0].epoch(5).tolist()) == list(range(20))
    ends = torch.tensor(groups).cumsum(0)
    beginning = torch.bucketize(orders[0].epoch(0)[:8], ends, right=True)
    assert len(beginning.unique()) <= 2  # of a window of two shards


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 11}, "batch_size must be at most the number of samples, 10, got 11"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank must be from 0 to 1, got 2"),
    ],
)
def test_order_messages(options, message):
    with pytest.raises(ValueError, match=message):
        Order(10, **options)
