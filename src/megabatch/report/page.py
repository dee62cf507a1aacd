"""The page of a run: key numbers, curves, evaluation, search results, command and configuration."""

import base64
import io
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megabatch.data import cache
from megabatch.data import load as data
from megabatch.data.images import to_pillow
from megabatch.display import metrics, numbers, pages
from megabatch.display.tables import Table
from megabatch.evaluation.sheet import Found, Shown
from megabatch.names import shown
from megabatch.report.curves import curves, known, phase_shares
from megabatch.report.gallery import PICTURE, Gallery, gallery
from megabatch.report.saved_run import CONFIG, METRICS, SavedRun, read
from megabatch.towers import Pair
from megabatch.towers.load import image_size
from megabatch.towers.saved import WEIGHTS, load_saved

NAME = "report.html"
PICTURE_LIMIT = 160  # pixels: photographs are scaled down to this side length


def write_report(folder: str | Path, queries: Sequence[str] = (), *, load: Callable[[Path], Pair] | None = load_saved) -> Path:
    """Writes report.html into a run's folder and returns its path.

    Reads the files in the folder and, for the gallery, the test data. A missing file leaves its section out.

    Args:
        folder: the run's folder.
        queries: texts to search for in the gallery, before captions of the test data.
        load: returns the model of the folder (default: `model.safetensors`); "megabatch report" takes a newer checkpoint. None
            leaves the gallery out.

    Example: `write_report("runs/emoji", ["smiling cat"])`
    """
    run = read(folder)
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
    text = pages.page(run.folder.resolve().name, sections, subtitle=_subtitle(run))
    path = run.folder / NAME
    cache.write(path, lambda file: file.write(text.encode()))
    return path


def _subtitle(run: SavedRun) -> str:
    parts = [value for key in ("model", "data") if isinstance(value := run.config.get(key), str) and value]
    if "batch_size" in run.config:
        parts.append(f"batches of {numbers.count(run.config['batch_size'])} pairs")
    return shown(" · ".join(parts))


def _tiles(run: SavedRun) -> str:
    tiles: list[tuple[str, str]] = []
    if run.evaluations:
        last = run.evaluations[-1]["evaluation"]
        first = metrics.headline(last)
        if first is not None:
            names = dict.fromkeys((first[0], first[0].replace("R@1", "R@10")))
            tiles += [(numbers.percent(last[name]), metrics.words(name)) for name in names if name in last]
    if run.training:
        last = run.training[-1]
        tiles.append((numbers.short(last.get("loss")), "final loss"))
        if last.get("pairs"):
            took = f" in {numbers.duration(last['seconds'])}" if last.get("seconds") else ""
            tiles.append((numbers.count(last["pairs"]), f"pairs{took}"))
        if speeds := known(run, "pairs_per_second"):
            tiles.append((numbers.count(statistics.median_high(speeds)), "pairs a second"))
        if memory := known(run, "memory_bytes"):
            tiles.append((numbers.size(max(memory)), "peak memory"))
    return pages.tiles(tiles)


def _warnings(run: SavedRun) -> str:
    lost = [record["step"] for record in run.training if record.get("loss") is None]
    if not run.training:
        return pages.warning("The folder has no metrics.jsonl with training steps, so there are no curves.")
    if lost:
        return pages.warning(
            f"The loss was not finite at {len(lost)} steps, first at step {lost[0]}; the curve has gaps there."
        )
    return ""


def _evaluation(run: SavedRun) -> str:
    """The last evaluation."""
    if not run.evaluations:
        return ""
    last = run.evaluations[-1]
    return pages.section(f"Evaluation after step {numbers.count(last['step'])}", pages.table(metrics.table(last["evaluation"])))


def setting(run: SavedRun) -> Table | None:
    """Date, hardware, versions, sizes and time: what a citation of the numbers needs; None if the run has not written them."""
    about, machine = run.environment, run.environment.get("machine", {})
    if not about:
        return None
    resumed = f", last resumed {about['last_start']}" if about["last_start"] != about["started"] else ""
    gpu = f"{about['processes']} × {machine['gpu']}" if about["device"] == "cuda" else ""
    sizes = about["parameters_of"]
    shared = sum(sizes.values()) > about["parameters"]
    separate = ", ".join(f"{side} tower {numbers.count(count)}" for side, count in sizes.items())
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
            f"{numbers.count(about['parameters'])}, of which {numbers.count(about['trained_parameters'])} trained ({towers})",
        ),
        ("precision", about["precision"]),
        ("data", f"{about['samples']:,} pairs"),
        ("steps", f"{about['steps']:,} of {about['pairs_per_step']:,} pairs"),
        ("time", "" if seconds is None else numbers.duration(seconds)),
        ("time by phase", ", ".join(f"{name} {share:.1f} %" for name, share in phases)),
    ]
    return Table(["", ""], [[name, told] for name, told in rows if told], names=(1,))


def _setting(run: SavedRun) -> str:
    found = setting(run)
    return "" if found is None else pages.section("Setting", pages.table(found))


def _gallery(run: SavedRun, queries: Sequence[str], load: Callable[[Path], Pair]) -> str:
    title = "Search results"
    if run.test_data is None:
        return pages.section(title, pages.faint("Not shown: the run has no data."))
    try:
        pair = load(run.folder)
        small = run.test_set(size=image_size(pair.name, pair.options))
        found = gallery(pair, small, run.test_set(size=PICTURE) if run.test_data[0] == "emoji" else small, queries)
    except (OSError, ValueError, ImportError) as error:
        return pages.section(title, pages.faint(f"Not shown: {shown(str(error))}"))
    told = (
        f"The best matches among {found.searched:,}"
        + (f" of {found.of:,}" if found.searched < found.of else "")
        + f" samples of {shown(run.test_data[0])}"
        + (f", {run.test_data[1]} split" if run.test_data[1] else ", the training data" if run.tests_on_training_data else "")
        + ", with their similarity. "
        + ("After the given queries, queries are" if queries else "Queries are")
        + " captions drawn at random; a green frame marks the sample that a caption belongs to. By chance its rank would "
        + f"be {(found.searched + 1) // 2:,}."
    )
    return pages.section(title, pages.faint(told), _rows(found))


def _rows(found: Gallery) -> str:
    rows = []
    for query, matches, rank in zip(found.queries, found.found, found.ranks, strict=True):
        told = "" if rank is None else f' <span class="score">own sample at rank {rank:,} of {found.searched:,}</span>'
        texts = " texts" if matches and isinstance(matches[0].shown, str) else ""
        cells = "".join(_match(match) for match in matches)
        rows.append(
            f'<section class="card query"><h3>{_query(query)}{told}</h3><div class="found{texts}">{cells}</div></section>'
        )
    return "".join(rows)


def _query(query: Shown) -> str:
    return escape(query) if isinstance(query, str) else f'<img alt="" src="{_picture(query)}">'


def _match(match: Found) -> str:
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
    parts = [pages.code(shown(text)) for text in (run.command, run.config_text.strip()) if text]
    missing = pages.faint("The folder has neither command.txt nor config.toml.")
    return pages.section("Command and configuration", *(parts or [missing]))


def _credits(run: SavedRun) -> str:
    named = [run.training_data, *([run.test_data[0]] if run.test_data else [])]
    credits = dict.fromkeys(credit for spec in named for credit in data.credits(spec))
    others = dict.fromkeys(spec for spec in named if spec and not data.credits(spec))
    lines = [*credits, *(f"{shown(spec)}: owners and licence unknown." for spec in others)]
    return pages.section("Data", pages.items(lines)) if lines else ""
