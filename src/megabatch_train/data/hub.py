"""Pairs of datasets of the Hugging Face library `datasets`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megabatch import extras
from megabatch_train.data.paths import Place
from megabatch_train.data.rows import Images, Row, names_of, number_rows
from megabatch_train.data.tables import Named, Table

# ----------------------------------------------------------------------------------------------------------------------
# Datasets of the Hugging Face library `datasets`: a folder that `save_to_disk` wrote, or a dataset by path or name.
#
# A saved dataset is recognized by its files. `datasets:PATH` loads a folder or a name with `datasets.load_dataset`.
# `datasets:PATH@SPLIT` loads a split other than "train".


PREFIX = "datasets:"
ROWS_AT_ONCE = 256
TEXTS = ("string", "large_string")  # dtypes of text features
OLDEST_LIBRARY = 4  # major version of `datasets`
MISSING = -1  # class of a sample without a class, in test splits
SAVED = ("dataset_dict.json", "state.json")  # files in a folder of save_to_disk, with and without splits


class HubDataset(Table):
    """Pairs of a Hugging Face dataset.

    Args:
        spec: a folder of `save_to_disk`, or an argument of `load_dataset`. "@SPLIT" selects a split other than "train".
        columns: as for `Table`.
        texts: as for `Table`.
        root: as for `Table`.
        config: name of the configuration, for a dataset with several configurations.
        streaming: must be False.
    """

    def __init__(
        self,
        spec: str,
        *,
        columns: Named | tuple[str, str] | None = None,
        texts: bool | None = None,
        root: str | Path | None = None,
        config: str | None = None,
        streaming: bool = False,
    ) -> None:
        if streaming:
            raise ValueError(
                "streaming must be false, got true: a stream gives only the next sample, but a run reads samples by index, in "
                "an order that depends on its seed, and again for a second pass or after --resume. Without streaming, the "
                'dataset is on the disk. Shards ("hf://datasets/NAME/*.tar") are read from the hub by byte ranges'
            )
        super().__init__([HubRows(spec, config)], columns=columns, texts=texts, root=root)


class HubRows:
    """The rows of a Hugging Face dataset. The arguments are described at `HubDataset`."""

    def __init__(self, spec: str, config: str | None) -> None:
        self._library = _load_library()
        self.name, _, split = spec.partition("@")
        self.folder: Place = Path(self.name)
        self._data = self._load(split, config)

    def _load(self, split: str, config: str | None) -> Any:
        try:
            if is_saved(self.name):
                data = self._library.load_from_disk(self.name)
            else:
                data = self._library.load_dataset(self.name, config)
        except (OSError, ValueError, RuntimeError, self._library.exceptions.DatasetsError) as error:
            raise ValueError(f"the library datasets cannot load {self.name}: {error}") from error
        if not isinstance(data, Mapping):
            if split:
                raise ValueError(f"{self.name} must have splits for @{split}, got a dataset without")
            return data
        chosen = split or ("train" if "train" in data else next(iter(data)) if len(data) == 1 else "")
        if chosen not in data:
            raise ValueError(f"{self.name} has no split {chosen or 'train'}; name one as {self.name}@SPLIT: {', '.join(data)}")
        return data[chosen]

    def columns(self) -> list[str]:
        """Returns the names of the features."""
        return list(self._data.column_names) if len(self._data) else []

    def rows(self, columns: Sequence[str] | None = None, image: Images = None) -> Iterator[Row]:
        """Yields rows. Classes are replaced by their names."""
        features = self._data.features
        embedded = [  # the other columns contain paths
            name for name in names_of(image) if name in features and getattr(features[name], "dtype", None) not in TEXTS
        ]
        return number_rows(self._read, list(columns or self._data.column_names), embedded, self._data._fingerprint, self.name)

    def _read(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        data = self._data.select_columns(columns).with_format(None)
        for name, feature in data.features.items():
            if isinstance(feature, self._library.Image | self._library.Audio):
                data = data.cast_column(name, type(feature)(decode=False))
        named = {
            name: feature.int2str for name, feature in data.features.items() if isinstance(feature, self._library.ClassLabel)
        }
        for batch in data.iter(ROWS_AT_ONCE):
            for entries in zip(*batch.values(), strict=True):
                values = dict(zip(batch, entries, strict=True))
                yield values | {
                    name: None if values[name] in (None, MISSING) else to_name(values[name]) for name, to_name in named.items()
                }


def _load_library() -> Any:
    """Returns the library `datasets`. Versions before 4 ask in the terminal whether they may run the code of a dataset."""
    library = extras.load("datasets", purpose="Reading a Hugging Face dataset")
    if int(library.__version__.partition(".")[0]) < OLDEST_LIBRARY:
        raise ImportError(
            f"Reading a Hugging Face dataset needs datasets {OLDEST_LIBRARY} or later, which runs no code of a dataset, got "
            f"{library.__version__}; {extras.install_command('datasets')} installs it"
        )
    return library


def is_saved(folder: str) -> bool:
    """Returns whether `save_to_disk` wrote the folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in SAVED)
