"""The same pairs in every format, and at every place: a run from each ends with the bits of the run from local files."""

import csv
import hashlib
import io
import json
import pickle
import re
import tarfile
import threading
from pathlib import Path

import pytest
import torch

from megabatch_train import cli
from megabatch_train.data import load as data
from megabatch_train.data import paths
from servers import FileServer

Image = pytest.importorskip("PIL.Image", reason="images are made with Pillow")

SAMPLES = 12
SMALL = """
batch_size = 4
steps = 4
chunk_size = 2
[model_options]
width = 8
image_size = 8
channels = [4, 8]
blocks = 1
buckets = 64
[memory]  # nothing waits in memory: each sample is read twice
inputs = 0.0
graphs = 0.0
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "PAUSES", (0.02,) * 100)


def png(number):
    data = io.BytesIO()
    Image.new("RGB", (9, 7), (number * 20, 40, 255 - number)).save(data, "PNG")
    return data.getvalue()


def pairs():
    return [(f"{i:02d}.png", png(i), f"caption {i}") for i in range(SAMPLES)]


def write_images(folder):
    folder.mkdir(parents=True)
    for name, image, _ in pairs():
        (folder / name).write_bytes(image)
    return folder


def write_table(folder, ending):
    write_images(folder)
    path = folder / f"pairs{ending}"
    if ending == ".jsonl":
        path.write_text("\n".join(json.dumps({"image": name, "caption": text}) for name, _, text in pairs()))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",")
            writer.writerows([("image", "caption"), *((name, text) for name, _, text in pairs())])
    return path


def write_parquet(folder, shape):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is written with pyarrow")
    from pyarrow import parquet

    folder.mkdir(parents=True)
    images = {
        "struct": [{"bytes": image, "path": name} for name, image, _ in pairs()],
        "bytes": [image for _, image, _ in pairs()],
    }[shape]
    for number, part in enumerate((slice(0, 5), slice(5, None))):
        table = pyarrow.table({"image": images[part], "caption": [text for _, _, text in pairs()][part]})
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=2)
    return f"{folder}/part-*.parquet"


def write_captions(folder, ending):
    write_images(folder)
    for name, _, text in pairs():
        (folder / name).with_suffix(ending).write_text(text if ending == ".txt" else json.dumps({"caption": text}))
    return folder


def write_hub(folder, saved):
    datasets = pytest.importorskip("datasets", reason="the library of Hugging Face datasets")
    if not saved:
        write_parquet(folder, "struct")
        return f"datasets:{folder}"
    values = {
        "image": [{"bytes": image, "path": name} for name, image, _ in pairs()],
        "caption": [text for *_, text in pairs()],
    }
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(values, features=features)}).save_to_disk(folder)
    return folder


def write_shards(folder):
    folder.mkdir(parents=True)
    for number, part in enumerate((slice(0, 5), slice(5, None))):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for name, image, text in pairs()[part]:
                for member, content in ((name, image), (f"{Path(name).stem}.txt", text.encode())):
                    about = tarfile.TarInfo(member)
                    about.size = len(content)
                    archive.addfile(about, io.BytesIO(content))
    return folder


def train(spec, output, *options):
    """The documented command. Returns the bits of the trained model."""
    output.parent.mkdir(exist_ok=True)
    (output.parent / "small.toml").write_text(SMALL)
    common = (
        "--output",
        str(output),
        "--config",
        str(output.parent / "small.toml"),
        "--no-report",
        "--set",
        "checkpoint.every=1",
    )
    assert cli.main(["train", "--data", str(spec), *common, *map(str, options)]) == 0
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


LOCAL = {
    ".csv": lambda folder: write_table(folder, ".csv"),
    ".tsv": lambda folder: write_table(folder, ".tsv"),
    ".jsonl": lambda folder: write_table(folder, ".jsonl"),
    "parquet with {bytes, path}": lambda folder: write_parquet(folder, "struct"),
    "parquet with bytes": lambda folder: write_parquet(folder, "bytes"),
    "captions in .txt": lambda folder: write_captions(folder, ".txt"),
    "captions in .json": lambda folder: write_captions(folder, ".json"),
    "datasets, saved": lambda folder: write_hub(folder, True),
    "datasets, by path": lambda folder: write_hub(folder, False),
}


@pytest.mark.thorough
def test_a_run_has_the_same_bits_from_every_format(tmp_path, capsys):
    found = {}
    for number, (name, write) in enumerate(LOCAL.items()):
        found[name] = train(write(tmp_path / str(number) / "photos"), tmp_path / "runs" / str(number))
    assert found == dict.fromkeys(LOCAL, found[".csv"])
    assert len(capsys.readouterr().err) < 20_000  # no image in the terminal


@pytest.mark.parametrize("name", [name for name in LOCAL if "datasets" not in name])
def test_the_same_pairs_from_every_format(tmp_path, name):
    spec = LOCAL[name](tmp_path / "photos")
    for _ in range(2):  # of images in Parquet the second time from the copy
        found = data.load(str(spec))
        assert found.problems == []
        assert [(found.read_stored(i, 0).data, found.read(i, 1)) for i in range(len(found))] == [(b, c) for _, b, c in pairs()]
    copy = pickle.loads(pickle.dumps(found))  # as for a reader process
    assert torch.equal(copy.read(7, 0), found.read(7, 0))
    assert found.ids([0, 1, 2]).unique().numel() == 3
    assert [found.name(i) for i in range(2)] == ["00.png", "01.png"] or name == "parquet with bytes"


def test_captions_that_cannot_be_read_are_named(tmp_path):
    write_captions(tmp_path / "photos", ".json")
    for name, text in (("01", "no JSON"), ("02", '{"label": 3}'), ("03", "[]"), ("04", '{"caption": null}')):
        (tmp_path / "photos" / f"{name}.json").write_text(text)
    (tmp_path / "photos" / "05.json").unlink()
    found = data.load(str(tmp_path / "photos"))
    assert len(found) == SAMPLES - 5
    assert [problem.partition(": ")[2] for problem in found.problems] == [
        "01.json has no caption that can be read: Expecting value: line 1 column 1 (char 0)",
        "02.json must be a JSON object with the key caption or text",
        "03.json must be a JSON object with the key caption or text",
        "caption must be a text, got nothing",
        "05.png has no caption file with its name (.txt or .json)",
    ]


def test_captions_beside_most_images_are_read_whatever_the_case_of_their_endings(tmp_path, caplog):
    for number in range(4):
        path = tmp_path / "rose" / f"IMG_{number}.JPG"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "rose" / "IMG_0.json").write_text("{}")
    (tmp_path / "rose" / "LICENSE.txt").touch()
    assert data.load(str(tmp_path)).read(0, 1) == "rose"
    assert ".txt and .json files of 1 of 4 images are not read, because at least half" in caplog.text
    for number, ending in ((1, ".txt"), (2, ".TXT")):
        (tmp_path / "rose" / f"IMG_{number}{ending}").write_text(f"caption {number}")
    found = data.load(str(tmp_path))
    assert [(found.name(i), found.read(i, 1)) for i in range(len(found))] == [
        ("rose/IMG_1.JPG", "caption 1"),
        ("rose/IMG_2.JPG", "caption 2"),
    ]


def test_names_with_brackets_and_local_addresses_are_paths(tmp_path):
    folder = tmp_path / "br[1] {a}"
    write_shards(folder)
    assert len(data.load(str(folder / "0.tar"))) == len(data.load(f"{tmp_path}/br*/0.tar")) == 5
    image = write_images(tmp_path / "a b") / "03.png"
    (folder / "pairs.csv").write_text(f"image,caption\n{image.as_uri()},a\n")
    found = data.load(str(folder / "pairs.csv"))
    assert (found.read_stored(0, 0).data, found.place(0)) == (png(3), str(image))
    (tmp_path / "more pairs.csv").write_text(f"image,caption\n{image},a\n")
    assert len(data.load(f"file://{tmp_path}/more%20*.csv")) == 1


def test_dictionaries_of_texts_in_parquet_are_paths(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is read with pyarrow")
    from pyarrow import parquet

    names = pyarrow.array(["00.png", "01.png"]).dictionary_encode()
    write_images(tmp_path / "photos")
    parquet.write_table(pyarrow.table({"image": names, "caption": names}), tmp_path / "photos" / "pairs.parquet")
    assert data.load(str(tmp_path / "photos")).read_stored(1, 0).data == png(1)
    assert not (tmp_path / "cache" / "images").exists()


def test_an_image_in_the_wrong_column_is_told_in_a_few_words(tmp_path):
    spec = write_parquet(tmp_path / "photos", "struct")
    with pytest.raises(
        ValueError, match=r"caption must be a text|image must be a text, got \{'bytes': \d+ bytes, 'path'"
    ) as told:
        data.load(spec, columns={"query": "image", "document": "caption"})
    assert len(str(told.value)) < 1000
    assert "(--columns image=image reads images)" in str(told.value)
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "document": {"number": 1}}')
    with pytest.raises(ValueError, match=r"document must be a text, got \{'number': 1\}$"):
        data.load(str(tmp_path / "rows.jsonl"))


def test_datasets_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(ValueError, match="streaming must be false, got true: a stream gives only the next sample"):
        data.load("datasets:photos", streaming=True)
    with pytest.raises(ValueError, match=r"options of HubDataset, which has .*config, streaming, got 'encoding'"):
        data.load("datasets:photos", encoding="utf-8")


def test_code_of_a_dataset_does_not_run(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the library of Hugging Face datasets")
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(ValueError, match=r"the library datasets cannot load .*/evil: "):
        data.load(f"datasets:{tmp_path / 'evil'}")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr(datasets, "__version__", "3.6.0")  # asks in the terminal whether it may run the code
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(
        ImportError, match=r"needs datasets 4 or later, which runs no code of a dataset, got 3\.6\.0; pip install"
    ):
        data.load(f"datasets:{tmp_path / 'evil'}")


@pytest.mark.thorough
def test_a_missing_class_of_a_dataset_is_no_text(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library of Hugging Face datasets")
    features = datasets.Features({"image": datasets.Value("string"), "text": datasets.ClassLabel(names=["fox", "cat"])})
    values = {"image": ["a.png", "b.png", "c.png"], "text": [1, -1, None]}
    datasets.Dataset.from_dict(values, features=features).save_to_disk(tmp_path / "saved")
    found = data.load(str(tmp_path / "saved"))
    assert [found.read(index, 1) for index in range(len(found))] == ["cat"]
    assert [problem.partition(": ")[2] for problem in found.problems] == ["text must be a text, got nothing"] * 2


@pytest.mark.thorough
def test_splits_of_datasets(tmp_path):
    spec = write_hub(tmp_path / "photos", True)
    assert len(data.load(f"{spec}@train")) == SAMPLES
    with pytest.raises(ValueError, match=r"photos has no split other; name one as .*photos@SPLIT: train"):
        data.load(f"{spec}@other")
    with pytest.raises(ValueError, match=r"the library datasets cannot load .*nowhere"):
        data.load(f"datasets:{tmp_path}/nowhere")


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    with FileServer(tmp_path / "served") as made:
        yield made


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """An S3 server of its own. Gives a function from a folder to its address in a bucket."""
    moto = pytest.importorskip("moto.server", reason='S3 is tested with pip install "moto[server]" s3fs')
    pytest.importorskip("s3fs", reason='S3 is tested with pip install "moto[server]" s3fs')
    made = moto.ThreadedMotoServer(port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    for name, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", "mine"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    paths._filesystem.cache_clear()
    files = paths._filesystem("s3")
    files.mkdir("bucket")

    def put(folder):
        files.put(f"{folder}/", f"s3://bucket/{folder.name}/", recursive=True)
        return "s3://bucket"

    yield put
    made.stop()
    paths._filesystem.cache_clear()


KINDS = {"shards": write_shards, **{name: LOCAL[name] for name in (".csv", ".jsonl", "parquet with {bytes, path}")}}


def address_of(base, spec, folder):
    return f"{base}/{Path(spec).relative_to(folder)}"


@pytest.mark.quick({"kind": "shards"})
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_http_has_the_bits_of_local_files_though_the_server_dies_in_the_middle(tmp_path, server, monkeypatch, kind):
    spec = KINDS[kind](tmp_path / "served" / "photos")
    wanted = train(spec, tmp_path / "runs" / "local")
    monkeypatch.setattr(paths, "BLOCK", 4000)  # many requests
    monkeypatch.setenv("MEGABATCH_CACHE_GIB", str(9000 / 2**30))  # and few blocks in the cache
    in_the_middle = tmp_path / "runs" / "http" / "checkpoints" / "step_00000002"
    part, once, back = paths.part, threading.Lock(), threading.Timer(0.2, server.__enter__)

    def part_of_a_dying_server(*args):
        if ("parquet" in kind or in_the_middle.exists()) and once.acquire(blocking=False):  # Parquet is read at the start
            server.__exit__()
            back.start()
        return part(*args)

    monkeypatch.setattr(paths, "part", part_of_a_dying_server)
    assert train(address_of(server.address, spec, server.folder), tmp_path / "runs" / "http") == wanted
    assert once.locked()
    back.join()
    held = [entry.stat().st_size for entry in (tmp_path / "cache" / "remote").iterdir() if not entry.name.startswith("lock-")]
    assert sum(held) <= 9000 + 4017  # and the piece that was written last


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_lost_its_server_says_so_and_continues_with_the_same_bits(tmp_path, server, monkeypatch, capsys, workers):
    spec = write_shards(tmp_path / "served" / "photos")
    wanted = train(spec, tmp_path / "runs" / "local")
    monkeypatch.setattr(paths, "PAUSES", (0.01,))
    monkeypatch.setattr(paths, "BLOCK", 4000)
    monkeypatch.setenv("MEGABATCH_CACHE_GIB", "0")  # nothing is cached
    part, output = paths.part, tmp_path / "runs" / "http"

    def part_of_a_dying_server(*args):
        server.broken = [503] * 1000 if (output / "checkpoints" / "step_00000002").exists() else []
        return part(*args)

    monkeypatch.setattr(paths, "part", part_of_a_dying_server)
    with pytest.raises(AssertionError):
        train(f"{server.address}/photos/*.tar", output, "--workers", workers)
    told = capsys.readouterr().err
    assert re.search(
        r"megabatch train: http://\S+/photos/\d.tar could not be read in 2 attempts: .*503.*--resume continues", told
    )
    monkeypatch.setattr(paths, "part", part)
    server.broken = []
    assert cli.main(["train", "--resume", str(output), "--no-report"]) == 0
    assert hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest() == wanted


@pytest.mark.thorough
def test_a_run_from_s3_has_the_bits_of_local_files(tmp_path, bucket):
    for number, (kind, write) in enumerate(KINDS.items()):
        spec = write(tmp_path / f"photos{number}")
        base = bucket(tmp_path / f"photos{number}")
        wanted = train(spec, tmp_path / "runs" / f"local{number}")
        assert train(address_of(base, spec, tmp_path), tmp_path / "runs" / f"s3-{number}") == wanted, kind
        if kind == "shards":
            assert train(f"{base}/photos{number}/*.tar", tmp_path / "runs" / "pattern", "--workers", 2) == wanted
