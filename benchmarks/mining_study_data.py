"""Data and models of `mining_study.py`: tables of WordNet and of Flickr8k, images as files, and a small encoder of texts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megabatch.data.demo.wordnet import WordNet

SPLITS, MEANINGS = ("train", "test"), "meanings.json"


def wordnet_tables(folder: Path) -> None:
    """Writes all pairs in random order, the held-out pairs, and the definitions of words that have several."""
    if (folder / MEANINGS).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    train, test = (
        [(data.read(i, 0).lower(), data.read(i, 1).lower()) for i in range(len(data))] for data in map(WordNet, SPLITS)
    )
    meanings: dict[str, list[str]] = {}
    for word, definition in train:
        meanings.setdefault(word, []).append(definition)
    pairs = [(word, found[0]) for word, found in meanings.items()]
    known, held_out = {definition for _, definition in train}, []
    for word, definition in test:  # each word and each definition once
        if word not in meanings and definition not in known:
            held_out.append((word, definition))
            meanings[word] = []
            known.add(definition)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    write_table(folder / "train.jsonl", ("query", "document"), [pairs[i] for i in order])
    write_table(folder / "test.jsonl", ("query", "document"), held_out)
    several = {word: found for word, found in meanings.items() if len(found) > 1}
    (folder / MEANINGS).write_text(json.dumps(several))


def flickr_tables(source: Path | None, folder: Path, held_out: int, most: int) -> None:
    """Writes images as files, and tables of at most so many captions, for the images to train on and for the held-out ones."""
    if (folder / "test.jsonl").exists():
        return
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    captions = invented_images(images) if source is None else stored_images(source, images)
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(0)).tolist()
    names = sorted(images.iterdir())
    for name, chosen in (("train", order[:-held_out]), ("test", order[-held_out:])):
        lines = [(f"images/{names[i].name}", text) for i in chosen for text in captions[i]]
        write_table(folder / f"{name}.jsonl", ("image", "caption"), lines[:most])


def stored_images(source: Path, folder: Path) -> list[list[str]]:
    """Writes the images of the pair of files that `flickr8k_data.read` reads, and returns the captions of each."""
    (about,) = source.glob("*.json")
    found, data = json.loads(about.read_text()), about.with_suffix(".bin").read_bytes()
    for i, (begin, end) in enumerate(zip(found["offsets"], found["offsets"][1:], strict=False)):
        (folder / f"{i:05}.webp").write_bytes(data[begin:end])
    captions: list[list[str]] = found["captions"]
    return captions


def invented_images(folder: Path) -> list[list[str]]:
    """One colour for each image of a tiny run, which a small tower learns in a few steps, and captions."""
    from megabatch.data.images import to_pillow

    colours = torch.randint(0, 256, (48, 3, 1, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for i, colour in enumerate(colours):
        to_pillow(colour.expand(3, 32, 32)).save(folder / f"{i:05}.png")
    return [[f"picture {i} in words, way {way}" for way in range(5)] for i in range(len(colours))]


def text_model(folder: Path, texts: Sequence[str], layers: int, width: int, vocabulary: int) -> str:
    """Writes the config of a small BERT and a WordPiece vocabulary of the texts, and returns the model's name for `train`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, PreTrainedTokenizerFast

    if not (folder / "config.json").exists():
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        learning = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=list(special.values()), show_progress=False)
        tokenizer.train_from_iterator(texts, learning)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            intermediate_size=2 * width,
            max_position_embeddings=34,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ).save_pretrained(folder)
    return f"hf-config:{folder}"


def write_table(path: Path, columns: tuple[str, str], rows: Sequence[tuple[str, str]]) -> None:
    """Writes pairs as JSON lines, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows), "utf-8")
    os.replace(part, path)


def read_table(path: Path) -> list[list[Any]]:
    """The values of each line."""
    return [list(json.loads(line).values()) for line in path.read_text("utf-8").split("\n") if line]
