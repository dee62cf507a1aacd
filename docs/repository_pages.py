"""mkdocs hook: adds pages from outside docs/ to the site, and converts links from repository paths to site paths.

On the site, the files of docs/ are at the root; all other files keep their path in the repository. Links are written for the
repository, such as `../benchmarks/results/ring.md`, and are converted here. A page named in a docstring, such as
`docs/ring.md`, becomes a link as well.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/results/*.md",
    "benchmarks/results/*.svg",
    "examples/*.py",
)
LINK = re.compile(r"(\]\()([^)#\s]+)")  # up to an anchor, which stays
REMOTE_WORKER = "https://unpkg.com/iframe-worker/shim"
NAMED = re.compile(r"(?<![\w/>\"])docs/(\w+\.md)")  # in a sentence, not in code


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures from outside docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Converts the links of a page. A link to a file outside the site is left as it is, and a strict build reports it."""
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
    plot = posixpath.basename(here).replace(".md", ".svg")
    drawn = files.get_file_from_path(posixpath.join(posixpath.dirname(here), plot)) is not None
    return f"![{page.title}]({plot})\n\n{markdown}" if drawn else markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns page names in sentences into links."""

    def linked(match: re.Match[str]) -> str:
        file = files.get_file_from_path(match[1])
        if file is None or file.page is None:
            return match[0]
        return f'<a href="{file.url_relative_to(page.file)}">{file.page.title}</a>'

    return NAMED.sub(linked, html)


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:
    """Remembers the navigation for `llms.txt`."""
    config.extra["nav"] = nav
    return nav


def on_post_build(*, config: MkDocsConfig) -> None:
    """Writes `llms.txt`, which lists the pages for language models, in the order of the navigation."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for item in config.extra["nav"].items:
        pages = [item] if isinstance(item, Page) else [page for page in item.children if isinstance(page, Page)]
        lines += ["", f"## {item.title}", ""]
        lines += [f"- [{page.title}]({page.canonical_url})" for page in pages]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Replaces the remote script with which the theme searches pages that are opened as files."""
    return output.replace(REMOTE_WORKER, get_relative_url("frame_worker.js", page.url))


def on_post_template(output: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Replaces the same script in the error page, which is not a page of the navigation."""
    return output.replace(REMOTE_WORKER, "frame_worker.js")
