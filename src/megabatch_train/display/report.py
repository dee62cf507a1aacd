"""The report of a run. `write_report(folder)` writes report.html, a page that needs no other file."""

import base64
import io
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import extras, file_io
from megabatch_train.data import load as data
from megabatch_train.data.dataset import MIXED, TEXT, Content, Dataset, UnreadableSampleError
from megabatch_train.data.media.images import decode_content, to_pillow
from megabatch_train.display import plots, tables
from megabatch_train.display.observers import REPORT
from megabatch_train.display.plots import Found, Shown
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import Evaluated, embed, encode
from megabatch_train.evaluation.embedding import read_or_none, read_stored_or_none
from megabatch_train.evaluation.late_interaction import score_any, search_any
from megabatch_train.evaluation.results import BEST, CONFIG, METRICS, SavedRun, read_run
from megabatch_train.names import sanitize
from megabatch_train.towers import Pair
from megabatch_train.towers.late_interaction import token_dim
from megabatch_train.towers.models import WEIGHTS, image_size, load_saved

LOG = logging.getLogger("megabatch")

__all__ = ["write_report"]


# ----------------------------------------------------------------------------------------------------------------------
# Curves of a run: loss, recall and other metrics.


SIZE = (5.0, 2.9)  # size of a plot in inches
DOTS = 30  # a curve with fewer points has a marker at each point


def curves(run: SavedRun) -> str:
    """Returns the section with a plot of each metric of the run, or a sentence if matplotlib is not installed."""
    title = "Training curves"
    if not run.training and not run.evaluations:
        return ""
    if not plots.available():
        message = (
            f"There are no curves because matplotlib is not installed; {extras.install_command('matplotlib')} installs it."
        )
        return plots.section(title, plots.faint(message))
    metric_plots = [
        loss(run),
        recalls(run),
        _metric(run, "Learning rate", "learning_rate"),
        _metric(run, "Scale", "scale", zero=False),
        _metric(run, "Bias", "bias", zero=False),
        _metric(run, "Gradient norm", "gradient_norm", smooth=True),
        _metric(run, "Pairs per second", "pairs_per_second", smooth=True),
        _metric(run, "Model FLOPs utilization, %", "mfu", smooth=True, unit=0.01),
        _metric(run, "Memory, GiB", "memory_bytes", unit=2.0**30),
        _phases(run),
    ]
    return plots.section(title, plots.figures(one for one in metric_plots if one is not None))


def loss(run: SavedRun) -> tuple[str, Any] | None:
    """Returns the loss against the step, as a description and a figure, or None if the run has no loss."""
    result = _metric(run, "Loss", "loss", zero=False, smooth=True)
    values = [(one["step"], one["evaluation"].get("clip_val_loss")) for one in run.evaluations]
    points = [(step, value) for step, value in values if isinstance(value, int | float)]
    if result is None or not points:
        return result
    description, figure = result
    (axes,) = figure.axes
    axes.lines[-1].set_label("training data, one batch")
    steps, losses = [step for step, _ in points], [value for _, value in points]
    _line(axes, steps, losses, "evaluation data, all pairs", plots.PALETTE[1])
    plots.legend(axes)
    return f"{description}; evaluation data: {tables.short(points[-1][1])} at the end", figure


def read_metric(run: SavedRun, key: str) -> list[float]:
    """Returns the values of a metric of the training steps, without missing values."""
    return [record[key] for record in run.training if isinstance(record.get(key), int | float)]


def smooth_curve(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean over a window around each value. The mean excludes NaN, and NaN stays NaN."""
    means = []
    for i, value in enumerate(values):
        near = [other for other in values[max(0, i - window // 2) : i + window // 2 + 1] if other == other]
        means.append(sum(near) / len(near) if value == value else value)
    return means


def _metric(
    run: SavedRun, title: str, key: str, *, zero: bool = True, smooth: bool = False, unit: float = 1.0
) -> tuple[str, Any] | None:
    """Returns a metric against the step, as a description and a figure. With `smooth`, a line shows the running mean."""
    finite_values = [value / unit for value in read_metric(run, key)]
    if not finite_values:
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
        bottom = min(0.0, *finite_values)
        axes.set_ylim(bottom, bottom + 1.08 * (max(finite_values) - bottom) or 1.0)
    return f"{title}: from {tables.short(finite_values[0])} to {tables.short(finite_values[-1])}", figure


def phase_shares(run: SavedRun) -> list[tuple[str, float]]:
    """Returns the share of each phase in the time of all steps, in percent, largest first."""
    total: dict[str, float] = {}
    for record in run.training:
        for name, seconds in record.get("phases", {}).items():
            total[name] = total.get(name, 0.0) + seconds
    all_seconds = sum(total.values())
    return sorted(
        ((name, 100 * seconds / all_seconds) for name, seconds in total.items() if all_seconds),
        key=lambda pair: -pair[1],
    )


def _phases(run: SavedRun) -> tuple[str, Any] | None:
    """Returns the shares of the phases as a description and a figure with bars."""
    shares = phase_shares(run)
    if not shares:
        return None
    figure, ((axes,),) = plots.figure("Time by phase, %", size=SIZE)
    plots.bars(axes, shares, "%.1f")
    return "Time by phase: " + ", ".join(f"{name} {share:.1f} %" for name, share in shares), figure


def recalls(run: SavedRun) -> tuple[str, Any] | None:
    """Returns the recalls against the step, as a description and a figure.

    Each k has a color. Lines of the headline direction are solid and have a dotted chance level. Other lines are dashed.
    """
    last = run.evaluations[-1]["evaluation"] if run.evaluations else {}
    first = tables.headline(last)
    if first is None:
        return None
    direction = first[0].split("R@")[0]
    names = sorted((name for name in last if tables.is_share(name)), key=lambda name: not name.startswith(direction))
    shares = list(dict.fromkeys(_share(name) for name in names))
    figure, axes = _axes("Recall")
    steps = [record["step"] for record in run.evaluations]
    for name in names:
        color = plots.PALETTE[shares.index(_share(name)) % len(plots.PALETTE)]
        values = [float("nan") if (value := one["evaluation"].get(name)) is None else value for one in run.evaluations]
        _line(axes, steps, values, tables.words(name), color, linestyle="-" if name.startswith(direction) else "--")
    for name in names:
        if name.startswith(direction) and (level := tables.chance(last, name)) is not None:
            color = plots.PALETTE[shares.index(_share(name)) % len(plots.PALETTE)]
            axes.axhline(level, color=color, linestyle=":", linewidth=1, label=f"{_share(name)} by chance")
    if run.best and run.best["step"] != steps[-1]:
        axes.axvline(run.best["step"], color=plots.PALETTE[3], linewidth=1, label="weights in best/")
    axes.set_xlim(0, 1.05 * steps[-1])  # a single evaluation needs limits, too
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


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], name: str, color: str, **style: Any) -> None:
    dots = "o" if len(values) < DOTS else None
    plots.line(axes, list(zip(steps, values, strict=True)), name, color, marker=dots, markersize=3, **style)


def _share(name: str) -> str:
    return name.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


# ----------------------------------------------------------------------------------------------------------------------
# Search results: a few queries with their best matches in the test data.


QUERIES = 8  # number of random queries of the test data
MATCHES = 8  # matches of each query
MOST = 2000  # most candidates to search, so that a large dataset takes little time
MOST_READ = 10_000  # most samples to read in order to find different documents
PICTURE = 72  # side length of a drawing in pixels
_SEED = 20240917


@dataclass(frozen=True)
class Gallery:
    """Queries with their matches, best first. A match is correct if the data pairs it with the query."""

    queries: list[Shown]
    found: list[list[Found]]
    ranks: list[int | None]  # retrieval rank of the best correct match of each query, from 1; None for a given query
    searched: int  # number of candidates that were searched
    of: int  # number of candidates in the data


class _Candidates(NamedTuple):
    """The candidates of a search."""

    samples: list[int]  # one sample for each candidate, in random order
    pairs: list[tuple[str, int, int]]  # (query, its sample, sample of its match)
    of: int  # number of candidates in the data


def gallery(model: Pair | Evaluated, dataset: Dataset, drawn: Dataset, queries: Sequence[str] = ()) -> Gallery:
    """Searches for the given queries, then for queries of the data. Captions find images, and queries find documents.

    Args:
        model: the model, or its embeddings of the dataset, which cannot be searched for given queries.
        dataset: samples to search, in the image size of the model.
        drawn: the same samples for display, whose images can be larger.
        queries: texts to search for first.
    """
    if dataset.sides[1] != TEXT:
        raise ValueError(f"dataset must have texts on its second side, got {dataset.sides[1]}s")
    side = choose_side(dataset)
    candidates = _images(dataset) if side == 0 else _documents(dataset)
    if not candidates.samples:
        raise ValueError("dataset must have at least one sample that can be read, got none")
    embeddings, usable = _embed_candidates(model, dataset, side, candidates.samples)
    samples = [index for index, is_usable in zip(candidates.samples, usable.tolist(), strict=True) if is_usable]
    position_of = {index: position for position, index in enumerate(samples)}
    matches_of: dict[str, list[int]] = {}  # query → positions of its matches
    sample_of: dict[str, int] = {}  # query → its first sample
    for query, sample, index in candidates.pairs:
        if index in position_of:
            matches_of.setdefault(query, []).append(position_of[index])
            sample_of.setdefault(query, sample)
    texts = [*queries, *list(matches_of)[:QUERIES]]
    if isinstance(model, Evaluated):
        encoded, usable = model.rows(1 - side, [sample_of[query] for query in texts])
        texts = [query for query, is_usable in zip(texts, usable.tolist(), strict=True) if is_usable]
    if not texts or not samples:
        raise ValueError("dataset must have at least one sample that can be read, got none")
    if not isinstance(model, Evaluated):
        encoded = encode(model.towers[1 - side], [_decode(text) for text in texts])
    dim = model.token_dim if isinstance(model, Evaluated) else token_dim(model)
    matches, similarities = search_any(dim, encoded, embeddings, MATCHES), score_any(encoded, embeddings, dim)
    results, ranks = [], []
    for number, (scores, indices) in enumerate(zip(matches.scores.tolist(), matches.indices.tolist(), strict=True)):
        correct = None if number < len(queries) else matches_of[texts[number]]
        row = [
            _match(drawn, side, samples[position], score, None if correct is None else position in correct)
            for score, position in zip(scores, indices, strict=True)
            if position >= 0
        ]
        results.append([match for match in row if match is not None])
        ranks.append(None if correct is None else _rank(similarities[number], correct))
    return Gallery([str(text) for text in texts], results, ranks, len(samples), candidates.of)


def _embed_candidates(
    model: Pair | Evaluated, dataset: Dataset, side: int, samples: Sequence[int]
) -> tuple[Tensor, Tensor]:  # (k, D), (n,) bool
    """Returns the embeddings of the usable samples, and a mask of these samples."""
    if isinstance(model, Evaluated):
        return model.rows(side, samples)
    embeddings = embed(model.towers[side], dataset, side, samples)
    usable = dataset.usable(samples)
    return embeddings[usable.to(embeddings.device)], usable


def _decode(query: Any) -> Any:
    """Returns a query with its image; without it if the image cannot be read."""
    try:
        return decode_content(query)
    except UnreadableSampleError:
        return str(query)


def choose_side(dataset: Dataset) -> int:
    """Returns the side in which a text query searches, which is the images, or the documents if both sides are texts."""
    return 0 if dataset.sides[0] != TEXT else 1


def _rank(similarities: Tensor, correct: list[int]) -> int:  # (M,)
    """Returns the retrieval rank of the best correct sample, from 1."""
    return int((similarities > similarities[correct].max()).sum()) + 1


def _shuffle(dataset: Dataset) -> list[int]:
    return torch.randperm(len(dataset), generator=torch.Generator().manual_seed(_SEED)).tolist()


def _images(dataset: Dataset) -> _Candidates:
    """Returns the images as candidates. An image with several captions is one candidate, with the caption of one sample."""
    order, items = _shuffle(dataset), dataset.items()
    if items is not None:
        order = list(dict(zip(items[order].tolist(), order, strict=True)).values())
    samples = order[:MOST]
    captions = ((read_or_none(dataset, index, 1), index) for index in samples)
    return _Candidates(samples, [(caption, index, index) for caption, index in captions if caption is not None], len(order))


def _documents(dataset: Dataset) -> _Candidates:
    """Returns the documents as candidates. A document of several queries is one candidate. A query can have several."""
    order = _shuffle(dataset)
    sample_of: dict[str, int] = {}  # document → its sample
    pairs: list[tuple[Any, int, int]] = []
    mixed = MIXED in dataset.sides  # images of all documents need not be decoded
    for index in order[:MOST_READ]:
        query, document = ((read_stored_or_none if mixed else read_or_none)(dataset, index, side) for side in (0, 1))
        if query is not None and document is not None:
            key = dataset.key(index, 1) if dataset.sides[1] == MIXED else document
            pairs.append((query, index, sample_of.setdefault(key, index)))
    samples = list(sample_of.values())[:MOST]
    return _Candidates(samples, pairs, len(sample_of) if len(order) <= MOST_READ else len(order))


def _match(drawn: Dataset, side: int, index: int, score: float, is_correct: bool | None) -> Found | None:
    shown, query = read_or_none(drawn, index, side), read_or_none(drawn, index, 1 - side)
    if shown is None or query is None:
        return None
    if isinstance(shown, Content):
        shown = shown.text if shown.image is None else shown.image
    if not isinstance(shown, str | Tensor):  # recordings and values are shown by their names
        shown = drawn.name(index)
    return Found(shown, str(query) if drawn.sides[side] != TEXT else drawn.name(index), score, is_correct)


# ----------------------------------------------------------------------------------------------------------------------
# The page: key numbers, curves, evaluation, search results, command and configuration.


PICTURE_LIMIT = 160  # side length in pixels to which photographs are scaled down


def write_report(
    folder: str | Path,
    queries: Sequence[str] = (),
    *,
    load: Callable[[Path], Pair] | None = load_saved,
    evaluated: Evaluated | None = None,
) -> Path:
    """Writes report.html into the folder of a run and returns its path.

    Reads the files in the folder. For the search results it also reads the test data. If a file is missing, its section is
    missing.

    Args:
        folder: folder of the run.
        queries: texts to search for before the queries of the test data.
        load: function that returns the model of the folder (default: `model.safetensors`). `megabatch report` passes a function
            that prefers a newer checkpoint. None excludes the search results.
        evaluated: embeddings of the evaluation data by this model. Without `queries`, they replace the model, so that nothing
            is encoded again.

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
        "" if load is None else _gallery(run, queries, load, evaluated),
        _setting(run),
        _command_and_config(run),
        _credits(run),
    ]
    text = plots.page(run.folder.resolve().name, sections, subtitle=_subtitle(run))
    path = run.folder / REPORT
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
            duration = f" in {tables.duration(last['seconds'])}" if last.get("seconds") else ""
            tiles.append((tables.count(last["pairs"]), f"pairs{duration}"))
        if speeds := read_metric(run, "pairs_per_second"):
            tiles.append((tables.count(statistics.median_high(speeds)), "pairs per second"))
        if memory := read_metric(run, "memory_bytes"):
            tiles.append((tables.size(max(memory)), "peak memory"))
    return plots.tiles(tiles)


def _warnings(run: SavedRun) -> str:
    bad_steps = [record["step"] for record in run.training if record.get("loss") is None]
    if not run.training:
        return plots.warning("There are no curves because the folder has no metrics.jsonl with training steps.")
    messages = (
        [f"The loss is missing or not finite at {len(bad_steps)} steps, first at step {bad_steps[0]}. The curve has gaps."]
        if bad_steps
        else []
    )
    return "".join(map(plots.warning, (*messages, *run.problems)))


def _evaluation(run: SavedRun) -> str:
    """Returns the section with the last evaluation."""
    if not run.evaluations:
        return ""
    last, best = run.evaluations[-1], run.best
    title, table = f"Evaluation after step {tables.count(last['step'])}", plots.table(tables.table(last["evaluation"]))
    if not best or best["step"] == last["step"]:
        return plots.section(title, table)
    sentence = (
        f"The best evaluation was after step {tables.count(best['step'])}: {tables.tell(best['metric'], best['value'])}. "
    )
    return plots.section(title, table, plots.paragraph(f"{sentence}The folder {BEST}/ contains the weights of that step."))


def setting(run: SavedRun) -> TextTable | None:
    """Returns a table of date, hardware, versions, sizes and time, which readers need to judge the numbers.

    Returns None if the run has not written them.
    """
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
    return TextTable(["", ""], [[name, value] for name, value in rows if value], names=(1,))


def _setting(run: SavedRun) -> str:
    table = setting(run)
    return "" if table is None else plots.section("Setting", plots.table(table))


def _gallery(run: SavedRun, queries: Sequence[str], load: Callable[[Path], Pair], evaluated: Evaluated | None = None) -> str:
    title = "Search results"
    if run.test_data is None:
        return plots.section(title, plots.faint("There are no search results because the run has no data."))
    try:
        model: Pair | Evaluated
        if evaluated is not None and not queries:
            model, test_set = evaluated, evaluated.dataset
        else:
            model = pair = load(run.folder)
            test_set = run.test_set(size=image_size(pair.name, pair.options))
        LOG.info("data of the search results: %s, %s", sanitize(run.test_data[0]), run.test_data_is)
        results = gallery(model, test_set, run.test_set(size=PICTURE) if run.test_data[0] == "emoji" else test_set, queries)
    except (OSError, ValueError, ImportError) as error:
        return plots.section(title, plots.faint(f"There are no search results because of an error: {sanitize(str(error))}"))
    texts = choose_side(test_set) == 1
    description = (
        f"A row shows the best matches among {results.searched:,}"
        + (f" of {results.of:,}" if results.searched < results.of else "")
        + f" {'documents' if texts else 'images'} of {sanitize(run.test_data[0])}"
        + (f", {run.test_data[1]} split" if run.test_data[1] else ", the training data" if run.tests_on_training_data else "")
        + ", with their similarity. "
        + ("After the given queries, queries are" if queries else "Queries are")
        + f" random {'queries of the data' if texts else 'captions'}. A green frame marks "
        + f"{'a document that belongs to the query' if texts else 'the image that a caption belongs to'}. Its rank by chance "
        + f"would be {(results.searched + 1) // 2:,}."
    )
    return plots.section(title, plots.faint(description), _rows(results))


def _rows(results: Gallery) -> str:
    rows = []
    for query, matches, rank in zip(results.queries, results.found, results.ranks, strict=True):
        rank_text = "" if rank is None else f'<p class="verdict">Correct match at rank {rank:,} of {results.searched:,}</p>'
        texts = " texts" if matches and isinstance(matches[0].shown, str) else ""
        cells = "".join(_page_match(match) for match in matches)
        rows.append(
            f'<section class="card query"><h3>{_query(query)}</h3>{rank_text}<div class="found{texts}">{cells}</div></section>'
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
    buffer = io.BytesIO()
    kind = "png" if max(image.shape[1:]) <= PICTURE else "jpeg"  # PNG keeps drawings sharp, JPEG keeps photographs small
    picture.save(buffer, format=kind.upper())
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _command_and_config(run: SavedRun) -> str:
    parts = [plots.code(sanitize(text)) for text in (run.command, run.config_text.strip()) if text]
    missing = plots.faint("The folder has neither command.txt nor config.toml.")
    return plots.section("Command and configuration", *(parts or [missing]))


def _credits(run: SavedRun) -> str:
    named = [run.training_data, *([run.test_data[0]] if run.test_data else [])]
    credits = dict.fromkeys(credit for spec in named for credit in data.credits(spec))
    others = dict.fromkeys(spec for spec in named if spec and not data.credits(spec))
    lines = [*credits, *(f"{sanitize(spec)}: owners and license are unknown." for spec in others)]
    return plots.section("Data", plots.items(lines)) if lines else ""
