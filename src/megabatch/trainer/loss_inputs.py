"""Inputs of a loss beside the embeddings of a batch: hard negatives, labels, and the embeddings of a teacher or a guide."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from torch import Tensor

from megabatch import towers
from megabatch.data.dataset import Dataset
from megabatch.data.negatives import WithNegatives
from megabatch.data.tables import Table
from megabatch.towers.tower import SIDES
from megabatch.trainer.locked_side import KeptEmbeddings
from megabatch.trainer.objective import CONTRASTS, LossConfig, LossInputs
from megabatch.trainer.weights import load_newest
from megabatch.world import World


def with_negatives(config: LossConfig, dataset: Dataset, encoded: Sequence[int]) -> WithNegatives | None:
    """The data with its hard negatives, if it has columns of them; checks that loss and data fit together.

    Args:
        config: of the loss.
        dataset: of the pairs.
        encoded: sides that are encoded in each step.
    """
    if config.name == "sup_con" and getattr(dataset, "label_column", None) is None:
        raise ValueError("the loss sup_con needs a table with a column of labels: --columns image=NAME text=NAME label=NAME")
    columns = getattr(dataset, "negative_columns", ())
    if not columns or not isinstance(dataset, Table):
        return None
    if config.name not in CONTRASTS or config.guide:
        why = f"the loss {config.name} uses none" if config.name not in CONTRASTS else "a guide is for pairs alone"
        raise ValueError(
            f"the data has hard negatives in the column {columns[0]}, and {why}. --loss info_nce uses them; --columns without "
            "negative=… leaves them out"
        )
    if 1 not in encoded:
        raise ValueError(
            f"the data has hard negatives in the column {columns[0]}, and the embeddings of a locked second side are kept for "
            "pairs alone. keep_locked=false computes them every time; --columns without negative=… leaves the negatives out"
        )
    return WithNegatives(dataset)


def of_batches(
    config: LossConfig, dataset: Dataset, negatives: WithNegatives | None, taught: list[KeptEmbeddings] | None
) -> Callable[[Tensor], LossInputs]:
    """A function from the indices of a batch on this rank, (n,), to the loss's further inputs.

    Args:
        config: of the loss.
        dataset: of the pairs.
        negatives: from `with_negatives`.
        taught: embeddings of both sides, from `teacher`.
    """
    labelled = dataset if config.name == "sup_con" and isinstance(dataset, Table) else None

    def inputs_of(indices: Tensor) -> LossInputs:
        samples = indices.tolist()
        return LossInputs(
            None if labelled is None else labelled.labels(samples),
            None if taught is None else (taught[0].rows(indices), taught[1].rows(indices)),
            None if negatives is None else negatives.owners(samples),
            None if negatives is None else negatives.negative_ids(samples),
        )

    return inputs_of


def teacher(
    spec: str, dataset: Dataset, folder: Path, world: World, *, chunk_size: int, workers: int | Executor
) -> tuple[list[KeptEmbeddings], float]:
    """The embeddings of both sides of all samples by a teacher or guide, computed once without augmentation, and its scale.

    Args:
        spec: the folder of a run, or a model by name.
        dataset: of the pairs.
        folder: for the embeddings, shared by all ranks.
        world: the ranks.
        chunk_size: samples encoded at once.
        workers: as for `Dataset.source`.
    """
    pair = load_newest(Path(spec), world.device)[0] if Path(spec).is_dir() else towers.load(spec, dataset.sides)
    for module in pair.modules:
        module.to(world.device).requires_grad_(False).eval()
    kept = partial(KeptEmbeddings, chunk_size=chunk_size, workers=workers, world=world)
    return [kept(folder / name, dataset, side, pair) for side, name in enumerate(SIDES)], pair.logit_scale
