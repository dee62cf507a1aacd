"""Plots and pages: files that need nothing else, colours that follow the page."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from megabatch.display import pages, plots
from megabatch.display.tables import Table

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
    style = pages.page("", [])
    for variable in plots._VARIABLES.values():
        assert f"{variable}: #" in style


def test_a_page_is_whole_and_leaves_out_what_is_empty():
    table = Table(["a"], [["<1>"]], "title", "notes")
    parts = [pages.section("Empty", ""), "", pages.section("<Full>", pages.table(table)), pages.figures([("x", drawn())])]
    made = pages.page("A <page>", parts, subtitle="of & for")
    assert "Empty" not in made
    for text in ("<title>A &lt;page&gt;</title>", "<h2>&lt;Full&gt;</h2>", "of &amp; for", "&lt;1&gt;", "notes", "<svg "):
        assert text in made
    assert pages.tiles([]) == pages.figures([]) == ""


def test_a_figure_is_written_in_the_format_of_its_name(tmp_path):
    plots.save(drawn(), tmp_path / "a.png", tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text("utf-8")
    assert matplotlib.rcParams["svg.fonttype"] == "path"  # the caller's settings stay
