"""webdataset shards of JPEGs for `train_speed.py` and `remote_reading.py`, made of Flickr8k or of noise."""

import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megabatch import extras

SIDE, QUALITY = 256, 94  # files of about 18 KB from Flickr8k's thumbnails, as img2dataset makes them of photographs
WORKERS = 16


def make(folder: Path, samples: int, shards: int, source: Path | None, side: int = 64) -> str:
    """Writes shards into a folder, once, and returns their pattern.

    Args:
        folder: created if need be; shards that are there already are used.
        samples: in all. Images come again, with other captions, once all have been used.
        shards: tar files.
        source: a folder with a `.bin` of encoded images and a `.json` with `captions` and `offsets`; None for noise.
        side: of an image of noise, in pixels.
    """
    pattern, done = str(folder / f"{{00000..{shards - 1:05d}}}.tar"), folder / f"{samples}_samples"
    if done.exists():
        return pattern
    folder.mkdir(parents=True, exist_ok=True)
    pairs = itertools.islice(_noise(side) if source is None else _flickr8k(source, samples), samples)
    for number in range(shards):
        count = samples // shards + (number < samples % shards)
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for i, (image, caption) in enumerate(itertools.islice(pairs, count)):
                key = f"{number:05d}{i:05d}"
                for name, data in ((f"{key}.jpg", image), (f"{key}.txt", caption.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    done.touch()
    return pattern


def _flickr8k(folder: Path, samples: int) -> Iterator[tuple[bytes, str]]:
    (about_file,) = folder.glob("*.json")
    about, data = json.loads(about_file.read_text()), about_file.with_suffix(".bin").read_bytes()
    captions, offsets = about["captions"], about["offsets"]
    pillow: Any = extras.load("PIL.Image", extra="open_clip", purpose="Making JPEGs")

    def enlarged(i: int) -> bytes:
        picture = pillow.open(io.BytesIO(data[offsets[i] : offsets[i + 1]])).convert("RGB")
        return _jpeg(picture.resize((SIDE, SIDE), pillow.Resampling.BICUBIC))

    with ThreadPoolExecutor(WORKERS) as pool:
        images = list(pool.map(enlarged, range(min(samples, len(captions)))))
    for way in itertools.count():
        for image, texts in zip(images, captions, strict=False):
            yield image, texts[way % len(texts)]


def _noise(side: int) -> Iterator[tuple[bytes, str]]:
    pillow: Any = extras.load("PIL.Image", extra="open_clip", purpose="Making JPEGs")
    for i in itertools.count():
        yield _jpeg(pillow.effect_noise((side, side), 100).convert("RGB")), f"picture {i} in words"


def _jpeg(picture: Any) -> bytes:
    room = io.BytesIO()
    picture.save(room, "JPEG", quality=QUALITY)
    return room.getvalue()
