"""The page: what came out, how it got there, what it finds, and how to do it again."""

import base64
import io
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import megabatch
from megabatch.data import cache
from megabatch.data import load as data
from megabatch.data.images import to_pillow
from megabatch.display import numbers
from megabatch.evaluation.sheet import Found, Shown
from megabatch.report.curves import curves, known
from megabatch.report.gallery import PICTURE, Gallery, gallery
from megabatch.report.run import Run, read
from megabatch.towers.load import image_size
from megabatch.towers.saved import WEIGHTS, load_saved

NAME = "report.html"
PICTURE_LIMIT = 160  # pixels of a side of a photograph in the page


def write_report(folder: str | Path, queries: Sequence[str] = ()) -> Path:
    """Writes report.html into a run's folder and returns its path. Reads the folder, and for the gallery the data.

    Args:
        folder: of the run.
        queries: texts to search for; captions of the test data are added.
    """
    run = read(folder)
    sections = [_head(run), _tiles(run), _warnings(run), curves(run), _table(run), _gallery(run, queries), _again(run)]
    style, script = (resources.files("megabatch.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(run))}</title><style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n</main>\n<script>\n{script}</script></body></html>\n"
    )
    path = run.folder / NAME
    cache.write(path, lambda file: file.write(page.encode()))
    return path


def _title(run: Run) -> str:
    return run.folder.resolve().name


def _head(run: Run) -> str:
    parts = [str(run.config.get(key, "")) for key in ("model", "data") if isinstance(run.config.get(key), str)]
    if "batch_size" in run.config:
        parts.append(f"batches of {numbers.count(run.config['batch_size'])} pairs")
    told = " · ".join(part for part in parts if part)
    return f'<h1>{escape(_title(run))}</h1><p class="faint">{escape(told)}</p>'


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str]] = []
    if run.evaluations:
        last = run.evaluations[-1]["evaluation"]
        found = numbers.headline(last)
        if found is not None:
            tiles.append((numbers.percent(found[1]), numbers.words(found[0])))
            ten = found[0].replace("R@1", "R@10")
            if ten != found[0] and ten in last:
                tiles.append((numbers.percent(last[ten]), numbers.words(ten)))
    if run.training:
        last = run.training[-1]
        tiles.append((numbers.short(last.get("loss")), "loss at the end"))
        if last.get("pairs"):
            took = f" in {numbers.duration(last['seconds'])}" if last.get("seconds") else ""
            tiles.append((numbers.count(last["pairs"]), f"pairs{took}"))
        speeds = sorted(known(run, "pairs_per_second"))
        if speeds:
            tiles.append((numbers.count(speeds[len(speeds) // 2]), "pairs a second"))
        if memory := known(run, "memory_bytes"):
            tiles.append((numbers.size(max(memory)), "memory at most"))
    cells = [
        f'<div class="card tile{" first" if number == 0 else ""}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for number, (value, name) in enumerate(tiles)
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _warnings(run: Run) -> str:
    lost = [record["step"] for record in run.training if record.get("loss") is None]
    if not run.training:
        told = "The folder has no metrics.jsonl with training steps, so there are no curves."
    elif lost:
        told = f"The loss was not finite at {len(lost)} steps, first at step {lost[0]}; the curve has gaps there."
    else:
        return ""
    return f'<div class="card warning">{escape(told)}</div>'


def _table(run: Run) -> str:
    """The last evaluation: ways as rows, shares and ranks as columns; what is no retrieval below."""
    if not run.evaluations:
        return ""
    last = run.evaluations[-1]["evaluation"]
    header, rows, rest = numbers.as_table(last)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    told = ", ".join([f"After step {numbers.count(run.evaluations[-1]['step'])}", *rest])
    return f'<h2>What came out</h2><p class="faint">{escape(told)}.</p><div class="card table"><table>{table}</table></div>'


def _gallery(run: Run, queries: Sequence[str]) -> str:
    title = "<h2>What it finds</h2>"
    if not (run.folder / WEIGHTS).is_file() or run.test_data is None:
        missing = WEIGHTS if run.test_data is not None else "data to evaluate on"
        return f'{title}<p class="faint">Not shown: the run has no {missing}.</p>'
    try:
        pair = load_saved(run.folder)
        small = run.test_set(size=image_size(pair.name, pair.options))
        found = gallery(pair, small, run.test_set(size=PICTURE) if run.test_data[0] == "emoji" else small, queries)
    except (OSError, ValueError, ImportError) as error:
        return f'{title}<p class="faint">Not shown: {escape(str(error))}</p>'
    told = (
        f"The best matches among {found.searched:,}"
        + (f" of {found.of:,}" if found.searched < found.of else "")
        + f" samples of {run.test_data[0]}"
        + (f", {run.test_data[1]} split" if run.test_data[1] else "")
        + ", with their similarity. Queries are captions drawn at random"
        + (f", after {len(queries)} that were asked for" if queries else "")
        + "; what a caption belongs to has a green frame."
    )
    return f'{title}<p class="faint">{escape(told)}</p>{_rows(found)}'


def _rows(found: Gallery) -> str:
    rows = []
    for query, matches in zip(found.queries, found.found, strict=True):
        texts = " texts" if matches and isinstance(matches[0].shown, str) else ""
        cells = "".join(_match(match) for match in matches)
        rows.append(f'<section class="card query"><h3>{_query(query)}</h3><div class="found{texts}">{cells}</div></section>')
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
    kind = "png" if max(image.shape[1:]) <= PICTURE else "jpeg"  # drawings are sharp, photographs large
    picture.save(room, format=kind.upper())
    return f"data:image/{kind};base64,{base64.b64encode(room.getvalue()).decode()}"


def _again(run: Run) -> str:
    parts = ["<h2>How to do it again</h2>"]
    if run.command:
        parts.append(f'<pre class="card">{escape(run.command)}</pre>')
    if run.config_text:
        parts.append(f'<pre class="card">{escape(run.config_text.strip())}</pre>')
    if len(parts) == 1:
        parts.append('<p class="faint">The folder has neither command.txt nor config.toml.</p>')
    return "".join(parts) + _credits(run)


def _credits(run: Run) -> str:
    named = [run.training_data, *([run.test_data[0]] if run.test_data else [])]
    credits = dict.fromkeys(credit for spec in named for credit in data.credits(spec))
    others = dict.fromkeys(spec for spec in named if spec and not data.credits(spec))
    lines = [*credits, *(f"{spec}: its owners and licence are not known here." for spec in others)]
    listed = f"<h2>Data</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
    return f"{listed}<footer>Made by megabatch {escape(megabatch.__version__)}.</footer>"
