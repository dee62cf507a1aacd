"""A run's report: `write_report(folder)` writes report.html, one page that needs no other file."""

import base64
import io
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import extras, file_io
from megabatch_train.data import load as data
from megabatch_train.data.dataset import IMAGE, Dataset
from megabatch_train.data.images import to_pillow
from megabatch_train.display import plots, tables
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import embed, encode, search
from megabatch_train.evaluation.embedding import read_or_none
from megabatch_train.evaluation.results import BEST, CONFIG, METRICS, SavedRun, read_run
from megabatch_train.evaluation.sheet import Found, Shown
from megabatch_train.names import format_row, sanitize
from megabatch_train.towers import Pair
from megabatch_train.towers.models import WEIGHTS, image_size, load_saved

LOG = logging.getLogger("megabatch")

__all__ = ["write_report"]


# ----------------------------------------------------------------------------------------------------------------------
# A run's curves: loss, recall, and its other metrics.


SIZE = (5.0, 2.9)  # inches of a plot
DOTS = 30  # a curve of fewer points has a marker at each


def curves(run: SavedRun) -> str:
    """The section with plots of all metrics that the run has; a sentence if matplotlib is missing."""
    title = "Training curves"
    if not run.training and not run.evaluations:
        return ""
    if not plots.available():
        told = f"No curves: matplotlib is not installed; {extras.install_command('matplotlib')} installs it."
        return plots.section(title, plots.faint(told))
    drawn = [
        loss(run),
        recalls(run),
        _metric(run, "Learning rate", "learning_rate"),
        _metric(run, "Scale", "scale", zero=False),
        _metric(run, "Bias", "bias", zero=False),
        _metric(run, "Gradient norm", "gradient_norm", smooth=True),
        _metric(run, "Pairs a second", "pairs_per_second", smooth=True),
        _metric(run, "Model FLOPs utilisation, %", "mfu", smooth=True, unit=0.01),
        _metric(run, "Memory, GiB", "memory_bytes", unit=2.0**30),
        _phases(run),
    ]
    return plots.section(title, plots.figures(one for one in drawn if one is not None))


def loss(run: SavedRun) -> tuple[str, Any] | None:
    """The loss of each step, in words and as a figure; None if there is none."""
    return _metric(run, "Loss", "loss", zero=False, smooth=True)


def read_metric(run: SavedRun, key: str) -> list[float]:
    """A metric of the training steps, without missing values."""
    return [record[key] for record in run.training if isinstance(record.get(key), int | float)]


def smooth_curve(values: Sequence[float], window: int) -> list[float]:
    """The mean over a window around each value, without NaN; NaN stays NaN."""
    found = []
    for i, value in enumerate(values):
        near = [other for other in values[max(0, i - window // 2) : i + window // 2 + 1] if other == other]
        found.append(sum(near) / len(near) if value == value else value)
    return found


def _metric(
    run: SavedRun, title: str, key: str, *, zero: bool = True, smooth: bool = False, unit: float = 1.0
) -> tuple[str, Any] | None:
    """A metric of the training steps against the step; with `smooth`, the values are faint behind their running mean."""
    found = [value / unit for value in read_metric(run, key)]
    if not found:
        return None
    figure, axes = _axes(title)
    steps = [record["step"] for record in run.training]
    values = [record[key] / unit if isinstance(record.get(key), int | float) else float("nan") for record in run.training]
    window = len(values) // 25
    if smooth and window > 2:
        axes.plot(steps, values, color=plots.BLUE, linewidth=1, alpha=0.35)
        values = smooth_curve(values, window)
    _line(axes, steps, values, "", plots.BLUE)
    if zero:
        bottom = min(0.0, *found)
        axes.set_ylim(bottom, bottom + 1.08 * (max(found) - bottom) or 1.0)
    return f"{title}: from {tables.short(found[0])} to {tables.short(found[-1])}", figure


def phase_shares(run: SavedRun) -> list[tuple[str, float]]:
    """The share of each phase of a step of the time, in per cent, largest first."""
    total: dict[str, float] = {}
    for record in run.training:
        for name, seconds in record.get("phases", {}).items():
            total[name] = total.get(name, 0.0) + seconds
    whole = sum(total.values())
    return sorted(((name, 100 * seconds / whole) for name, seconds in total.items() if whole), key=lambda pair: -pair[1])


def _phases(run: SavedRun) -> tuple[str, Any] | None:
    """A bar for each phase of a step."""
    shares = phase_shares(run)
    if not shares:
        return None
    figure, ((axes,),) = plots.figure("Time by phase, %", size=SIZE)
    plots.bars(axes, shares, "%.1f")
    return "Time by phase: " + ", ".join(f"{name} {share:.1f} %" for name, share in shares), figure


def recalls(run: SavedRun) -> tuple[str, Any] | None:
    """One colour for each k; the direction of the headline solid with chance level dotted, the other dashed."""
    last = run.evaluations[-1]["evaluation"] if run.evaluations else {}
    first = tables.headline(last)
    if first is None:
        return None
    way = first[0].split("R@")[0]
    names = sorted((name for name in last if tables.is_share(name)), key=lambda name: not name.startswith(way))
    shares = list(dict.fromkeys(_share(name) for name in names))
    figure, axes = _axes("Recall")
    steps = [record["step"] for record in run.evaluations]
    for name in names:
        colour = plots.PALETTE[shares.index(_share(name)) % len(plots.PALETTE)]
        values = [float("nan") if (value := one["evaluation"].get(name)) is None else value for one in run.evaluations]
        _line(axes, steps, values, tables.words(name), colour, linestyle="-" if name.startswith(way) else "--")
    for name in names:
        if name.startswith(way) and (level := tables.chance(last, name)) is not None:
            colour = plots.PALETTE[shares.index(_share(name)) % len(plots.PALETTE)]
            axes.axhline(level, color=colour, linestyle=":", linewidth=1, label=f"{_share(name)} by chance")
    axes.set_xlim(0, 1.05 * steps[-1])  # also with a single evaluation
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    plots.legend(axes, fontsize=7, handlelength=3)
    return f"Recall: {tables.percent(first[1])} at the end ({tables.describe(last, first[0])})", figure


def _axes(title: str) -> tuple[Any, Any]:
    figure, ((axes,),) = plots.figure(title, size=SIZE)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: tables.count(value))
    return figure, axes


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], name: str, colour: str, **style: Any) -> None:
    dots = "o" if len(values) < DOTS else None
    plots.line(axes, list(zip(steps, values, strict=True)), name, colour, marker=dots, markersize=3, **style)


def _share(name: str) -> str:
    return name.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


# ----------------------------------------------------------------------------------------------------------------------
# Search results of a model: a few queries with their best matches in the test data.


QUERIES = 8  # of the test data, drawn at random
MATCHES = 8
MOST = 2000  # candidates that are searched, to keep a large dataset fast
MOST_READ = 10_000  # samples whose texts are read to find distinct documents
PICTURE = 72  # side length of a drawing, in pixels
_SEED = 20240917


@dataclass(frozen=True)
class Gallery:
    """Queries with their matches, best first. A match is right if the data pairs it with the query."""

    queries: list[Shown]
    found: list[list[Found]]
    ranks: list[int | None]  # of each query's best own match, from 1; None for a query that is not of the data
    searched: int
    of: int


class _Candidates(NamedTuple):
    """What a query can find."""

    samples: list[int]  # in random order; one sample for each candidate, whichever samples have it
    pairs: list[tuple[str, int]]  # a query, and the sample that stands for its match
    of: int  # number of candidates in the data


def gallery(pair: Pair, dataset: Dataset, drawn: Dataset, queries: Sequence[str] = ()) -> Gallery:
    """Searches for the given queries, then for queries of the data: captions find images, and queries find documents.

    Args:
        pair: the model.
        dataset: samples to search, as the model sees them.
        drawn: the same samples as they are shown, which may be larger.
        queries: texts to search for first.
    """
    side = choose_side(dataset)
    candidates = _images(dataset) if side == 0 else _documents(dataset)
    if not candidates.samples:
        raise ValueError("dataset must have a sample that can be read, got none")
    embeddings = embed(pair.towers[side], dataset, side, candidates.samples)
    usable = dataset.usable(candidates.samples)
    samples = [index for index, good in zip(candidates.samples, usable.tolist(), strict=True) if good]
    places = {index: place for place, index in enumerate(samples)}
    right: dict[str, list[int]] = {}  # query → places of its matches
    for query, index in candidates.pairs:
        if index in places:
            right.setdefault(query, []).append(places[index])
    texts = [*queries, *list(right)[:QUERIES]]
    if not texts or not samples:
        raise ValueError("dataset must have a sample that can be read, got none")
    encoded, embeddings = encode(pair.towers[1 - side], texts), embeddings[usable.to(embeddings.device)]
    matches, similarities = search(encoded, embeddings, k=MATCHES), encoded @ embeddings.T
    found, ranks = [], []
    for number, (scores, indices) in enumerate(zip(matches.scores.tolist(), matches.indices.tolist(), strict=True)):
        own = None if number < len(queries) else right[texts[number]]
        row = [
            _match(drawn, side, samples[place], score, None if own is None else place in own)
            for score, place in zip(scores, indices, strict=True)
        ]
        found.append([match for match in row if match is not None])
        ranks.append(None if own is None else _rank(similarities[number], own))
    return Gallery(list(texts), found, ranks, len(samples), candidates.of)


def choose_side(dataset: Dataset) -> int:
    """The side of the data that a text finds: the images of captions, or the documents of queries."""
    return 0 if dataset.sides[0] == IMAGE else 1


def _rank(similarities: Tensor, right: list[int]) -> int:  # (M,)
    """The retrieval rank of the best of the right samples, from 1."""
    return int((similarities > similarities[right].max()).sum()) + 1


def _shuffle(dataset: Dataset) -> list[int]:
    return torch.randperm(len(dataset), generator=torch.Generator().manual_seed(_SEED)).tolist()


def _images(dataset: Dataset) -> _Candidates:
    """An image with five captions is one candidate, with the caption of one sample."""
    order, items = _shuffle(dataset), dataset.items()
    if items is not None:
        order = list(dict(zip(items[order].tolist(), order, strict=True)).values())
    samples = order[:MOST]
    captions = ((read_or_none(dataset, index, 1), index) for index in samples)
    return _Candidates(samples, [(caption, index) for caption, index in captions if caption is not None], len(order))


def _documents(dataset: Dataset) -> _Candidates:
    """A document of several queries is one candidate, and a query may have several documents."""
    order = _shuffle(dataset)
    kept: dict[str, int] = {}  # document → its sample
    pairs: list[tuple[str, int]] = []
    for index in order[:MOST_READ]:
        query, document = (read_or_none(dataset, index, side) for side in (0, 1))
        if query is not None and document is not None:
            pairs.append((query, kept.setdefault(document, index)))
    samples = list(kept.values())[:MOST]
    return _Candidates(samples, pairs, len(kept) if len(order) <= MOST_READ else len(order))


def _match(drawn: Dataset, side: int, index: int, score: float, right: bool | None) -> Found | None:
    shown, query = read_or_none(drawn, index, side), read_or_none(drawn, index, 1 - side)
    if shown is None or query is None:
        return None
    return Found(shown, query if drawn.sides[side] == IMAGE else drawn.name(index), score, right)


# ----------------------------------------------------------------------------------------------------------------------
# The page of a run: key numbers, curves, evaluation, search results, command and configuration.


NAME = "report.html"
PICTURE_LIMIT = 160  # pixels: photographs are scaled down to this side length


def write_report(folder: str | Path, queries: Sequence[str] = (), *, load: Callable[[Path], Pair] | None = load_saved) -> Path:
    """Writes report.html into a run's folder and returns its path.

    Reads the files in the folder and, for the gallery, the test data. A missing file leaves its section out.

    Args:
        folder: the run's folder.
        queries: texts to search for in the gallery, before queries of the test data.
        load: returns the model of the folder (default: `model.safetensors`); "megabatch report" takes a newer checkpoint. None
            leaves the gallery out.

    Example: `write_report("runs/emoji", ["smiling cat"])`
    """
    run = read_run(folder)
    if not any((run.folder / name).is_file() for name in (CONFIG, METRICS, WEIGHTS)):
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no {CONFIG}, no {METRICS} and no {WEIGHTS}")
    sections = [
        _tiles(run),
        _warnings(run),
        curves(run),
        _evaluation(run),
        "" if load is None else _gallery(run, queries, load),
        _setting(run),
        _again(run),
        _credits(run),
    ]
    text = plots.page(run.folder.resolve().name, sections, subtitle=_subtitle(run))
    path = run.folder / NAME
    file_io.write(path, lambda file: file.write(text.encode()))
    return path


def _subtitle(run: SavedRun) -> str:
    parts = [value for key in ("model", "data") if isinstance(value := run.config.get(key), str) and value]
    if "batch_size" in run.config:
        parts.append(f"batches of {tables.count(run.config['batch_size'])} pairs")
    return sanitize(" · ".join(parts))


def _tiles(run: SavedRun) -> str:
    tiles: list[tuple[str, str]] = []
    if run.evaluations:
        last = run.evaluations[-1]["evaluation"]
        first = tables.headline(last)
        if first is not None:
            names = dict.fromkeys((first[0], first[0].replace("R@1", "R@10")))
            tiles += [(tables.percent(last[name]), tables.describe(last, name)) for name in names if name in last]
    if run.training:
        last = run.training[-1]
        tiles.append((tables.short(last.get("loss")), "final loss"))
        if last.get("pairs"):
            took = f" in {tables.duration(last['seconds'])}" if last.get("seconds") else ""
            tiles.append((tables.count(last["pairs"]), f"pairs{took}"))
        if speeds := read_metric(run, "pairs_per_second"):
            tiles.append((tables.count(statistics.median_high(speeds)), "pairs a second"))
        if memory := read_metric(run, "memory_bytes"):
            tiles.append((tables.size(max(memory)), "peak memory"))
    return plots.tiles(tiles)


def _warnings(run: SavedRun) -> str:
    lost = [record["step"] for record in run.training if record.get("loss") is None]
    if not run.training:
        return plots.warning("The folder has no metrics.jsonl with training steps, so there are no curves.")
    told = [f"The loss was not finite at {len(lost)} steps, first at step {lost[0]}; the curve has gaps there."] if lost else []
    return "".join(map(plots.warning, (*told, *run.problems)))


def _evaluation(run: SavedRun) -> str:
    """The last evaluation."""
    if not run.evaluations:
        return ""
    last, best = run.evaluations[-1], run.best
    title, table = f"Evaluation after step {tables.count(last['step'])}", plots.table(tables.table(last["evaluation"]))
    if not best or best["step"] == last["step"]:
        return plots.section(title, table)
    told = f"The best evaluation was after step {tables.count(best['step'])}: {tables.tell(best['metric'], best['value'])}. "
    return plots.section(title, table, plots.paragraph(f"{told}The folder {BEST}/ holds the weights of that step."))


def setting(run: SavedRun) -> TextTable | None:
    """Date, hardware, versions, sizes and time: what a citation of the numbers needs; None if the run has not written them."""
    about, machine = run.environment, run.environment.get("machine", {})
    if not about:
        return None
    resumed = f", last resumed {about['last_start']}" if about["last_start"] != about["started"] else ""
    gpu = f"{about['processes']} × {machine['gpu']}" if about["device"] == "cuda" else ""
    sizes = about["parameters_of"]
    shared = sum(sizes.values()) > about["parameters"]
    separate = ", ".join(f"{side} tower {tables.count(count)}" for side, count in sizes.items())
    towers = "one model for both towers" if shared else separate
    phases = phase_shares(run)
    seconds = run.training[-1].get("seconds") if run.training else None
    versions = [
        f"{name} {machine[name]}"
        for name in ("megabatch", "torch", "triton", "open_clip_torch", "python", "cuda")
        if machine.get(name)
    ]
    rows = [
        ("date", f"{about['started']}{resumed}"),
        ("hardware", gpu or f"{machine.get('cpu')}, {machine.get('threads')} threads"),
        ("processes", str(about["processes"])),
        ("versions", ", ".join(versions)),
        (
            "parameters",
            f"{tables.count(about['parameters'])}, of which {tables.count(about['trained_parameters'])} trained ({towers})",
        ),
        ("precision", about["precision"]),
        ("data", f"{about['samples']:,} pairs"),
        ("steps", f"{about['steps']:,} of {about['pairs_per_step']:,} pairs"),
        ("time", "" if seconds is None else tables.duration(seconds)),
        ("time by phase", ", ".join(f"{name} {share:.1f} %" for name, share in phases)),
    ]
    return TextTable(["", ""], [[name, told] for name, told in rows if told], names=(1,))


def _setting(run: SavedRun) -> str:
    found = setting(run)
    return "" if found is None else plots.section("Setting", plots.table(found))


def _gallery(run: SavedRun, queries: Sequence[str], load: Callable[[Path], Pair]) -> str:
    title = "Search results"
    if run.test_data is None:
        return plots.section(title, plots.faint("Not shown: the run has no data."))
    try:
        pair = load(run.folder)
        small = run.test_set(size=image_size(pair.name, pair.options))
        LOG.info("data of the search results: %s, %s", sanitize(run.test_data[0]), run.test_data_is)
        found = gallery(pair, small, run.test_set(size=PICTURE) if run.test_data[0] == "emoji" else small, queries)
    except (OSError, ValueError, ImportError) as error:
        return plots.section(title, plots.faint(f"Not shown: {sanitize(str(error))}"))
    texts = choose_side(small) == 1
    told = (
        f"The best matches among {found.searched:,}"
        + (f" of {found.of:,}" if found.searched < found.of else "")
        + f" {'documents' if texts else 'images'} of {sanitize(run.test_data[0])}"
        + (f", {run.test_data[1]} split" if run.test_data[1] else ", the training data" if run.tests_on_training_data else "")
        + ", with their similarity. "
        + ("After the given queries, queries are" if queries else "Queries are")
        + f" {'queries of the data' if texts else 'captions'} drawn at random; a green frame marks "
        + f"{'a document that belongs to the query' if texts else 'the image that a caption belongs to'}. By chance its rank "
        + f"would be {(found.searched + 1) // 2:,}."
    )
    return plots.section(title, plots.faint(told), _rows(found))


def _rows(found: Gallery) -> str:
    rows = []
    for query, matches, rank in zip(found.queries, found.found, found.ranks, strict=True):
        told = "" if rank is None else f' <span class="score">own match at rank {rank:,} of {found.searched:,}</span>'
        texts = " texts" if matches and isinstance(matches[0].shown, str) else ""
        cells = "".join(_page_match(match) for match in matches)
        rows.append(
            f'<section class="card query"><h3>{_query(query)}{told}</h3><div class="found{texts}">{cells}</div></section>'
        )
    return "".join(rows)


def _query(query: Shown) -> str:
    return escape(query) if isinstance(query, str) else f'<img alt="" src="{_picture(query)}">'


def _page_match(match: Found) -> str:
    mark = " right" if match.right else ""
    score = f'<span class="score">{match.score:.2f}</span>'
    if isinstance(match.shown, str):
        return f'<figure class="match{mark}"><p><span class="name">{escape(match.shown)}</span> {score}</p></figure>'
    shown = f'<img alt="{escape(match.name)}" src="{_picture(match.shown)}">'
    caption = f'<figcaption><span class="name">{escape(match.name)}</span> {score}</figcaption>'
    return f'<figure class="match{mark}">{shown}{caption}</figure>'


def _picture(image: Any) -> str:
    picture = to_pillow(image)
    picture.thumbnail((PICTURE_LIMIT, PICTURE_LIMIT))
    room = io.BytesIO()
    kind = "png" if max(image.shape[1:]) <= PICTURE else "jpeg"  # PNG keeps drawings sharp, JPEG keeps photographs small
    picture.save(room, format=kind.upper())
    return f"data:image/{kind};base64,{base64.b64encode(room.getvalue()).decode()}"


def _again(run: SavedRun) -> str:
    parts = [plots.code(sanitize(text)) for text in (run.command, run.config_text.strip()) if text]
    missing = plots.faint("The folder has neither command.txt nor config.toml.")
    return plots.section("Command and configuration", *(parts or [missing]))


def _credits(run: SavedRun) -> str:
    named = [run.training_data, *([run.test_data[0]] if run.test_data else [])]
    credits = dict.fromkeys(credit for spec in named for credit in data.credits(spec))
    others = dict.fromkeys(spec for spec in named if spec and not data.credits(spec))
    lines = [*credits, *(f"{sanitize(spec)}: owners and licence unknown." for spec in others)]
    return plots.section("Data", plots.items(lines)) if lines else ""


# ----------------------------------------------------------------------------------------------------------------------
# The report of a run that goes on: an observer that writes the page every few minutes, without search results.

EVERY = 300.0  # seconds between two pages: drawing one takes about a second of the training thread


class LiveReport:
    """An observer that writes report.html after a checkpoint or an evaluation, at most every `EVERY` seconds."""

    def __init__(self) -> None:
        self._folder, self._written, self._works = Path(), 0.0, True

    def start(self, run: Any) -> None:
        """The run begins; its first page comes after `EVERY` seconds."""
        self._folder, self._written = run.folder, time.monotonic()
        LOG.info("%s", format_row("report", f"{self._folder / NAME}, written every {EVERY / 60:.0f} minutes"))

    def step(self, record: dict[str, Any]) -> None:
        """Does nothing."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """There is a new evaluation."""
        self._write()

    def on_save(self, path: Path) -> None:
        """There is a new checkpoint."""
        self._write()

    def finish(self, run: Any) -> None:
        """Does nothing: the last page, with search results, is written after the run."""

    def _write(self) -> None:
        if not self._works or time.monotonic() - self._written < EVERY:
            return
        self._written = time.monotonic()
        try:
            write_report(self._folder, load=None)
        except OSError:
            raise  # a full disk: the run tries again
        except Exception as error:  # a page is not worth a run
            self._works = False
            LOG.warning("the report is not written while the run goes on: %s", error)
