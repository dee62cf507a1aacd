"""The documentation site: a strict build passes, no link or anchor is dead, nothing is fetched, every public name is there."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import megabatch
from helpers import PATIENCE

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """Its links, what it loads, and what can be linked to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script", "iframe") and "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason='the site is built with the packages of the extra "docs"')
    folder = tmp_path_factory.mktemp("site")
    # As `make docs` does. With --quiet, warnings about docstrings would not count.
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_no_link_is_dead(pages):
    dead = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            lacks_anchor = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            if not target.exists() or (lacks_anchor and parts.fragment != "__top"):
                dead.append(f"{path.name}: {link}")
    assert not dead


def test_nothing_is_fetched(site, pages):
    outside = [link for page in pages.values() for link in page.loaded if urlsplit(link).netloc]
    assert not outside
    for path in site.rglob("*.css"):
        assert not re.findall(r"url\(\"?https?:", path.read_text()), path.name


def test_the_api_page_has_every_public_name(site, pages):
    anchors = pages[site / "api.html"].anchors
    assert not [name for name in megabatch.__all__ if f"megabatch.{name}" not in anchors]


def test_every_page_is_linked(pages):
    """The navigation has no raw tables of benchmarks. Other pages link to these."""
    linked = {(path.parent / unquote(urlsplit(link).path)).resolve() for path, page in pages.items() for link in page.links}
    assert not [path.name for path in pages if path not in linked]


def test_the_list_for_language_models_has_every_page_of_the_navigation(site, pages):
    text = (site / "llms.txt").read_text()
    assert text.startswith("# megabatch\n\n> ")
    links = re.findall(r"^- \[[^\]]+\]\(https://megabatch\.github\.io/megabatch/([^)]*)\)$", text, re.MULTILINE)
    assert len(links) == len(set(links)) == text.count("\n- ")
    assert all((site / (link or "index.html")).is_file() for link in links)
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {(link or "index.html").replace(".html", ".md") for link in links} == named


def test_formulas_are_set(site):
    how, losses = ((site / name).read_text() for name in ("how.html", "losses.html"))
    assert '<div class="formula"><i>L</i> = 1/(2<i>B</i>) · Σ<sub>i</sub> ( [row<sub>i</sub> − <i>s</i><sub>ii</sub>]' in how
    assert "<i>e</i><sup>(1+<i>β</i>)·<i>s</i><sub>ij</sub></sup>" in losses
    assert "<i>x̂</i><sub>d</sub>" in losses
    for text in (how, losses):
        in_sentences = re.sub(r"<(code|script)\b.*?</\1>|<[^>]*>", "", text, flags=re.DOTALL)
        assert not re.findall(r"\w+_\{|\b(?:[a-z]|row|col)_[a-z]{1,2}\b", in_sentences)


def test_what_is_no_formula_stays_as_typed(site):
    comparison, ring = ((site / name).read_text() for name in ("comparison.html", "ring.html"))
    assert "open_clip_torch 3.3.0, inf_cl 1.2.1" in comparison.replace("\n", " ")
    assert "<code>ValueError: the ranks of the group disagree" in ring
    assert not re.findall(r"<code>[^<]*<(?:sub|sup|i)>", comparison + ring)


def test_a_page_that_a_docstring_names_is_linked(site):
    api = (site / "api.html").read_text()
    assert 'See <a href="ring.html">The ring</a>' in api
    assert not re.findall(r"[^\w/>\"]docs/\w+\.md", api)


def test_results_have_their_plot(site):
    for name in ("loss_gpu", "loss_cpu", "ring"):
        assert f'src="{name}.svg"' in (site / f"benchmarks/results/{name}.html").read_text()


# Pages that describe the present state. The log names files as they were.
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_files_that_pages_name_exist(page):
    folders = ("src", "tests", "tools", "benchmarks", "examples", "docs")
    files = {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`([\w./-]+\.py)`", page.read_text("utf-8")))
    missing = [name for name in sorted(named) if not any(f"/{file}".endswith(f"/{name}") for file in files)]
    assert not missing, f"{page.name} names files that do not exist: {', '.join(missing)}"
