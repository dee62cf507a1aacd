"""All commands with a vision-language model: train, resume, eval, embed, search, mine, export."""

import json
from pathlib import Path

import pytest
import torch

import vision_language
from megabatch_train import cli
from megabatch_train.data.media.images import to_pillow
from megabatch_train.data.tables import Table

pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
pytest.importorskip("torchvision")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with pages and a checkpoint, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for i in range(12):
        to_pillow(vision_language.image(*((16, 40), (40, 24), (64, 64))[i % 3], i)).save(f"{i}.png")
        row = {"query": f"{vision_language.WORDS[i % 8]} {vision_language.WORDS[i % 5]}"}
        row |= {"document_image": f"{i}.png"} if i % 4 else {}
        row |= {"document": f"page {vision_language.WORDS[i % 7]}"} if i % 4 < 2 else {}
        row |= {"query_image": f"{i - 1}.png"} if i % 5 == 4 else {}
        rows.append(row | ({"negative_image": f"{(i + 5) % 12}.png"} if i % 2 else {}))
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    vision_language.save(tmp_path / "base")
    return "hf:base"


def test_every_command(model, capsys):
    data = ["--data", "pages.jsonl"]
    train = ["train", *data, "--model", model, "--lora", "2", "--loss", "info_nce", "--output", "run", "--no-report"]
    chunks = [] if torch.cuda.is_available() else ["--chunk-size", "2"]  # a GPU measures its chunk size
    assert cli.main([*train, "--batch-size", "6", *chunks, "--steps", "3", "--workers", "1"]) == 0
    assert cli.main(["train", "--resume", "run", "--steps", "4", "--no-report"]) == 0
    assert cli.main(["report", "run"]) == 0
    assert cli.main(["eval", "run", *data]) == 0
    capsys.readouterr()
    assert cli.main(["embed", "run", *data, "--output", "pages.parquet"]) == 0
    assert cli.main(["export", "run", "--to", "hf", "exported"]) == 0
    capsys.readouterr()
    found = []
    for place in ("run", "hf:exported"):
        assert cli.main(["search", place, "one cat", "5.png", *data, "--json", "-k", "3"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert cli.main(["search", "run", "one cat", "5.png", "--embeddings", "pages.parquet", "--json", "-k", "3"]) == 0
    found.append(json.loads(capsys.readouterr().out))
    best = [[[match["index"] for match in query["matches"]] for query in one] for one in found]
    assert best[0] == best[1] == best[2]
    assert all((match["path"] or match["text"]) for query in found[0] for match in query["matches"])
    assert cli.main(["mine", "run", *data, "--negatives", "2", "--output", "mined.jsonl"]) == 0
    mined, pages = Table("mined.jsonl"), Table(Path("pages.jsonl").absolute())
    assert mined.sides == pages.sides
    assert [str(mined.read(i, 1)) for i in range(12)] == [str(pages.read(i, 1)) for i in range(12)]
    assert sum(map(mined.negative_count, range(12))) == 24
    documents = {pages.key(i, 1) for i in range(12)}
    lines = [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]
    chosen = [(line[f"negative_image_{k}"] or "", line[f"negative_{k}"] or "") for line in lines for k in (1, 2)]
    assert {f"{image}\0{text}" for image, text in chosen} <= documents
    assert cli.main(["mine", "run", *data, "--output", "mined.parquet"]) == 1
    assert cli.main(["search", "run", "one", *data, "--among", "images"]) == 1
    errors = capsys.readouterr().err
    assert "--output must end in .jsonl for data with query_image or document_image, got mined.parquet" in errors
    assert "--among must not be set for data with query_image or document_image, got images" in errors
