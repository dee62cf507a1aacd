"""Tables: the same cells as text, Markdown, HTML and in a terminal."""

import sys

import pytest

from megabatch import extras
from megabatch_train.display.tables import OURS, WRONG, TextTable

TABLE = TextTable(
    ["system", "time ms", ""], [["ours", 1.5, "a"], ["<b> & [red]", 12, "b"]], "Title", "Notes.", (0, 2), {0: OURS, 1: WRONG}
)


def test_text_aligns_names_left_and_numbers_right():
    assert TABLE.text().splitlines() == [
        "Title",
        "  system       time ms",
        "  ours             1.5  a",
        "  <b> & [red]       12  b",
        "Notes.",
    ]
    assert TextTable(["", ""], [["a", 1]]).text() == "  a  1"
    assert TextTable(["a", "b"], []).text() == "  a  b"


def test_headings_of_a_wide_table_are_wrapped():
    made = TextTable([f"heading number {i}" for i in range(9)], [[f"{i}" * 7 for i in range(9)]])
    lines = made.text().splitlines()
    assert [line.split() for line in lines[:2]] == [["heading"] * 9, ["number"] * 9]
    assert max(map(len, lines)) <= 82


def test_markdown():
    assert TABLE.markdown() == (
        "Title\n\n| system | time ms |  |\n|---|---:|---|\n| ours | 1.5 | a |\n| <b> & [red] | 12 | b |\n\nNotes."
    )
    assert TextTable(["a"], [[1]], names=()).markdown() == "| a |\n|---:|\n| 1 |"


def test_html_escapes_cells_and_marks_rows():
    made = TABLE.html()
    assert "<tr class=ours><td class=name>ours</td><td>1.5</td><td class=name>a</td></tr>" in made
    assert "<tr class=wrong><td class=name>&lt;b&gt; &amp; [red]</td>" in made


def test_a_terminal_gets_a_table_of_rich(monkeypatch, capsys):
    pytest.importorskip("rich", reason='pip install "megabatch[train]"')
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    TABLE.print()
    printed = capsys.readouterr().out
    for text in ("Title", "<b> & [red]", "time ms", "─", "Notes."):  # names are no markup
        assert text in printed
    monkeypatch.setattr(extras, "is_installed", lambda module: False)
    TABLE.print()
    assert capsys.readouterr().out == TABLE.text() + "\n"


@pytest.mark.parametrize("columns", [30, 50])
def test_a_narrow_terminal_wraps_names_and_cuts_no_number(monkeypatch, capsys, columns):
    pytest.importorskip("rich", reason='pip install "megabatch[train]"')
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    TextTable(["system", *"abcd"], [["a system with a long name", *(f"{i}.000001" for i in range(4))]]).print()
    shown = capsys.readouterr().out
    assert all(f"{i}.000001" in shown for i in range(4))
    assert "…" not in shown
