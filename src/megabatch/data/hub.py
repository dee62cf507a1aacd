"""Datasets of the Hugging Face library `datasets`: a folder that `save_to_disk` wrote, or a dataset by path or name.

A saved dataset is recognised as a folder. `datasets:PATH` loads a folder or a name with `datasets.load_dataset`, and
`datasets:PATH@SPLIT` another split than "train".
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megabatch import extras
from megabatch.data.places import Place
from megabatch.data.rows import Row, numbered_rows
from megabatch.data.tables import Table

PREFIX = "datasets:"
ROWS_AT_ONCE = 256
TEXTS = ("string", "large_string")  # features
MISSING = -1  # the class of a sample without one, in test splits
SAVED = ("dataset_dict.json", "state.json")  # in the folder of save_to_disk, with and without splits


class HubDataset(Table):
    """Pairs of a dataset.

    Args:
        spec: a folder of `save_to_disk`, or what `load_dataset` takes; both with "@SPLIT" for another split than "train".
        columns: as of `Table`.
        texts: as of `Table`.
        root: as of `Table`.
        config: the configuration of a dataset that has several.
        streaming: must be False.
    """

    def __init__(
        self,
        spec: str,
        *,
        columns: Mapping[str, str] | tuple[str, str] | None = None,
        texts: bool | None = None,
        root: str | Path | None = None,
        config: str | None = None,
        streaming: bool = False,
    ) -> None:
        if streaming:
            raise ValueError(
                "streaming must be false, got true: a stream gives only the next sample, and a run reads samples by number, in "
                "an order that follows from its seed, and again for a second pass or after --resume. Without streaming the "
                'dataset is on the disk; shards ("hf://datasets/NAME/*.tar") are read from the hub by byte ranges'
            )
        super().__init__([HubRows(spec, config)], columns=columns, texts=texts, root=root)


class HubRows:
    """The rows of a dataset.

    Args:
        spec: see `HubDataset`.
        config: see `HubDataset`.
    """

    def __init__(self, spec: str, config: str | None) -> None:
        self._library = extras.load("datasets", extra="datasets", purpose="Reading a Hugging Face dataset")
        self.name, _, split = spec.partition("@")
        self.folder: Place = Path(self.name)
        self._data = self._loaded(split, config)

    def _loaded(self, split: str, config: str | None) -> Any:
        try:
            if is_saved(self.name):
                found = self._library.load_from_disk(self.name)
            else:
                found = self._library.load_dataset(self.name, config)
        except (OSError, ValueError) as error:
            raise ValueError(f"the library datasets cannot load {self.name}: {error}") from error
        if not isinstance(found, Mapping):
            if split:
                raise ValueError(f"{self.name} must have splits for @{split}, got a dataset without")
            return found
        chosen = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else "")
        if chosen not in found:
            raise ValueError(f"{self.name} has no split {chosen or 'train'}; name one as {self.name}@SPLIT: {', '.join(found)}")
        return found[chosen]

    def columns(self) -> list[str]:
        """The names of the features."""
        return list(self._data.column_names) if len(self._data) else []

    def rows(self, columns: Sequence[str] | None = None, image: str | None = None) -> Iterator[Row]:
        """Classes are given by their names."""
        if image is not None and getattr(self._data.features[image], "dtype", None) in TEXTS:
            image = None  # paths
        return numbered_rows(self._read, list(columns or self._data.column_names), image, self._data._fingerprint, self.name)

    def _read(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        data = self._data.select_columns(columns).with_format(None)
        for name, feature in data.features.items():
            if isinstance(feature, self._library.Image):
                data = data.cast_column(name, self._library.Image(decode=False))
        named = {name: found.int2str for name, found in data.features.items() if isinstance(found, self._library.ClassLabel)}
        for batch in data.iter(ROWS_AT_ONCE):
            for entries in zip(*batch.values(), strict=True):
                values = dict(zip(batch, entries, strict=True))
                yield values | {
                    name: None if values[name] in (None, MISSING) else told(values[name]) for name, told in named.items()
                }


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in SAVED)
