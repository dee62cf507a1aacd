"""Search in chunks finds what sorting everything finds; the sheet is drawn with all that it was given."""

import pytest
import torch

from helpers import unit
from megabatch_train.display.plots import GAP, PICTURE, QUERY_WIDTH, Found, draw_sheet
from megabatch_train.evaluation import search


@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunks_find_what_sorting_finds(k, chunk):
    queries, embeddings = unit(3, 9, seed=0), unit(50, 9, seed=1)
    scores, order = torch.sort(queries @ embeddings.T, dim=1, descending=True, stable=True)
    found = search(queries, iter(embeddings.split(chunk)), k)
    assert torch.equal(found.indices, order[:, :k])
    torch.testing.assert_close(found.scores, scores[:, :k])
    assert torch.equal(search(queries, embeddings, k).indices, order[:, :k])


def test_of_equal_ones_the_first_and_nan_last():
    embeddings = torch.ones(6, 2)
    embeddings[1] = torch.nan
    assert search(torch.ones(1, 2), embeddings.split(2), 6).indices.tolist() == [[0, 2, 3, 4, 5, -1]]


def test_messages():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        search(torch.ones(1, 2), torch.ones(3, 2), 0)
    with pytest.raises(ValueError, match=r"the dimension of the queries, 2, got shape \(3, 4\)"):
        search(torch.ones(1, 2), torch.ones(3, 4))
    with pytest.raises(ValueError, match="same length, at least 1, got 0 and 0"):
        draw_sheet("never.png", [], [])


def test_sheet_shows_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="sheets are drawn with Pillow")
    red = torch.tensor([255, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 10, 20)
    rows = [[Found(red, "a very long name that has to be broken", 0.5), Found("words", "x", 0.25)], []]
    path = tmp_path / "sheet.png"
    draw_sheet(path, ["a query", red], rows, title="Title", credits=["somebody " * 40])
    with image.open(path) as sheet:
        assert sheet.width == GAP + QUERY_WIDTH + 2 * (PICTURE + GAP) + GAP
        pixels = [sheet.getpixel((x, y)) for x in range(sheet.width) for y in range(sheet.height)]
        # The picture is twice as wide as high and fits its square, in the row and as the second query.
        assert sum(pixel == (255, 0, 0) for pixel in pixels) == pytest.approx(2 * PICTURE * PICTURE // 2, rel=0.05)
    assert [entry.name for entry in tmp_path.iterdir()] == ["sheet.png"]
