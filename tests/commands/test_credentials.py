"""Users, passwords and tokens in URLs: they reach the server, and nothing that is printed or stored but a private config."""

import json
import stat
import sys

import pytest

import word_pairs
from megabatch_train import cli, settings
from megabatch_train.commands.search import sample
from megabatch_train.data import paths
from megabatch_train.data.paths import Url
from megabatch_train.data.tables import Table
from megabatch_train.display import plots
from servers import FileServer
from word_pairs import call

SECRET = "S3CRET"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The URL of a table behind a user, a password and a token."""
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "PAUSES", (0.01, 0.01))
    (tmp_path / "served").mkdir()
    (tmp_path / "work").mkdir()
    folder = word_pairs.enter(tmp_path / "work", monkeypatch)
    (folder / "pairs.jsonl").rename(tmp_path / "served" / "pairs.jsonl")
    with FileServer(tmp_path / "served", login=f"me:{SECRET}") as server:
        yield server


def credentials(server, path):
    return f"{server.address.replace('://', f'://me:{SECRET}@')}/{path}?X-Amz-Signature={SECRET}"


def test_a_run_on_a_private_url_can_be_resumed_and_used_and_keeps_its_credentials(served, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "available", lambda: False)
    url = credentials(served, "pairs.jsonl")
    train = ["--data", url, "--output", "run", "--set", "checkpoint.every=2"]
    monkeypatch.setattr(sys, "argv", ["megabatch", "train", *train])
    assert call(*train, "--steps", "2") == 0
    config = tmp_path / "work" / "run" / "config.toml"
    assert settings.read(config)["data"] == url
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert cli.main(["train", "--resume", "run", "--steps", "4", "--no-report"]) == 0
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert cli.main(["train", "--resume", "run", "--data", f"{url}&renewed=1", "--steps", "5", "--no-report"]) == 0
    for command in (
        ["eval", "run"],
        ["search", "run", "number one", "--json"],
        ["embed", "run", "--output", "rows.npy"],
        ["mine", "run", "--output", "mined.jsonl", "--negatives", "1"],
        ["report", "run"],
        ["config", "data", "--of", "run"],
    ):
        assert cli.main(command) == 0, command
    assert cli.main(["eval", "run", "--data", credentials(served, "missing.csv")]) == 1
    assert cli.main(["eval", "run", "--data", credentials(served, "*.csv")]) == 1
    printed = "".join(capsys.readouterr())
    assert f"{served.address}/pairs.jsonl" in printed
    assert SECRET not in printed
    with_secret = [path for path in (tmp_path / "work").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert with_secret == [config]
    text = (tmp_path / "work" / "run" / "command.txt").read_text()
    assert text.count(f"--data '{served.address}/pairs.jsonl'") == 3


def test_a_config_without_credentials_is_readable_for_others(served, tmp_path):
    (tmp_path / "served" / "pairs.jsonl").rename(tmp_path / "work" / "pairs.jsonl")
    assert call("--output", "run", "--steps", "1") == 0
    assert (tmp_path / "work" / "run" / "config.toml").stat().st_mode & 0o044


def test_samples_and_errors_name_images_without_credentials(served, tmp_path):
    private = credentials(served, "a.png")
    rows = [{"image": image, "caption": "x"} for image in (private, "b.png")]
    (tmp_path / "served" / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = Table(credentials(served, "images.jsonl"))
    assert [sample(table, index, 0) for index in (0, 1)] == [
        {"name": f"{served.address}/a.png", "path": f"{served.address}/a.png", "text": "x"},
        {"name": "b.png", "path": f"{served.address}/b.png", "text": "x"},
    ]
    (tmp_path / "served" / "b.png").write_bytes(b"image")
    assert table.read_stored(1, 0).data == b"image"  # a relative name is requested with the user of the table
    served.broken = [500] * 3
    with pytest.raises(paths.RemoteError) as failed:
        Url(credentials(served, "pairs.jsonl")).read_bytes()
    assert SECRET not in str(failed.value)
