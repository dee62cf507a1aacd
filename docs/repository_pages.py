"""For the documentation site: pages of the repository that are not in docs/, and links between pages as a repository has them.

On the site what is in docs/ lies at the root, and everything else where it lies in the repository. A link is written for the
repository, `../benchmarks/results/ring.md`, and is turned here into one that is right on the site. Docstrings name a page by
its place, `docs/ring.md`; that becomes a link, too.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/*.md", "benchmarks/results/*.png", "examples/*.py")
LINK = re.compile(r"(\]\()([^)#\s]+)")  # up to an anchor, which stays
NAMED = re.compile(r"(?<![\w/>\"])docs/(\w+\.md)")  # in a sentence, not in code


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures from outside."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that are right on the site; what is not on it stays, and a strict build names it."""
    here = page.file.src_uri
    in_repository = here if page.file.generated_by else f"docs/{here}"

    def on_site(match: re.Match[str]) -> str:
        start, link = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), link)).removeprefix("docs/")
        if ":" in link or files.get_file_from_path(target) is None:
            return match[0]
        return start + posixpath.relpath(target, posixpath.dirname(here) or ".")

    if not page.file.generated_by or "results" not in here:
        return LINK.sub(on_site, markdown)
    page.meta["hide"] = ["toc"]  # a table without headings takes the whole width
    plot = posixpath.basename(here).replace(".md", ".png")
    drawn = files.get_file_from_path(posixpath.join(posixpath.dirname(here), plot)) is not None
    return f"![{page.title}]({plot})\n\n{markdown}" if drawn else markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links to pages that sentences of it name."""

    def linked(match: re.Match[str]) -> str:
        file = files.get_file_from_path(match[1])
        if file is None or file.page is None:
            return match[0]
        return f'<a href="{file.url_relative_to(page.file)}">{file.page.title}</a>'

    return NAMED.sub(linked, html)
