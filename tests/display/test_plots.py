"""Plots and pages: files that need nothing else, colours that follow the page."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable

matplotlib = pytest.importorskip("matplotlib", reason='pip install "megabatch[train]"')


def drawn():
    figure, ((axes,),) = plots.figure("A & B", about="small print")
    plots.line(axes, [(512, 0.01), (65536, 3.0)], "<ours>", plots.GREEN)
    plots.line(axes, [], "nothing", plots.ORANGE)
    plots.batch_axis(axes, [65536, 512])
    plots.log_axis(axes)
    plots.legend(axes)
    return figure


def test_an_svg_has_text_and_the_colours_of_the_page():
    made = plots.svg(drawn(), 'A "plot"')
    root = ElementTree.fromstring(made)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"A & B", "small print", "<ours>", "512", "64k", "0.01", "batch, pairs"} <= texts
    assert "nothing" not in texts
    assert root.get("aria-label") == 'A "plot"'
    assert "var(--green)" in made
    assert not re.search("#[0-9a-f]{6}", made.replace("#ffffff", ""))  # every colour is the page's
    assert "<metadata" not in made
    assert made == plots.svg(drawn(), 'A "plot"')  # the same plot has the same bytes


def test_every_colour_of_the_plots_is_a_variable_of_the_page():
    style = plots.page("", [])
    for variable in plots._VARIABLES.values():
        assert f"{variable}: #" in style


def test_a_page_is_whole_and_leaves_out_what_is_empty():
    table = TextTable(["a"], [["<1>"]], "title", "notes")
    parts = [plots.section("Empty", ""), "", plots.section("<Full>", plots.table(table)), plots.figures([("x", drawn())])]
    made = plots.page("A <page>", parts, subtitle="of & for")
    assert "Empty" not in made
    for text in ("<title>A &lt;page&gt;</title>", "<h2>&lt;Full&gt;</h2>", "of &amp; for", "&lt;1&gt;", "notes", "<svg "):
        assert text in made
    assert plots.tiles([]) == plots.figures([]) == ""


def test_a_figure_is_written_in_the_format_of_its_name(tmp_path):
    plots.save(drawn(), tmp_path / "a.png", tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text("utf-8")
    assert matplotlib.rcParams["svg.fonttype"] == "path"  # the caller's settings stay


def test_names_of_lines_do_not_overlap():
    figure, (axes, _) = plots.panels("two panels", 2)
    ends = {"a": 1.0, "b": 1.01, "c": 5.0, "short": 3.0}
    for name, end in ends.items():
        plots.line(axes, [(0, 1.0), (2 if name == "short" else 10, end)], name, plots.GREEN)
    plots.label_lines(axes)
    placed = {text.get_text(): text.xyann for text in axes.texts}
    assert set(placed) == set(ends)
    assert placed["short"][0] < 0.3  # beside the end of its line
    heights = sorted(y for name, (x, y) in placed.items() if x > 1)
    least = 1.25 * plots.LABEL_POINTS / 72 / (0.75 * figure.get_figheight() / 2)
    assert all(b - a >= 0.999 * least for a, b in pairwise(heights))
