"""For the documentation site: formulas as they are typed, `Σ_j exp s_ij`, set with indices below the line and powers above it.

In the repository a formula is an indented block, or stands in a sentence. Here a block with an index in it becomes a formula
instead of code. All of it is HTML: nothing runs, and nothing is fetched, when a page is read.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

HAT = "\u0302"  # as in x̂
NAME = rf"d?[A-Za-zŷθ]{HAT}?|[ΣΠ]|d?row|col|mean|softmax|weight"  # open_clip and inf_cl have to stay as they are
INDEX = re.compile(rf"(?<!\w)({NAME})_(\{{[^{{}}]*\}}|chunks?\b|[a-z]{{1,2}}\b'?|[A-Z0-9]\b)")
POWER = re.compile(r"\^(\{[^{}]*\}|−?\w+)")
LETTER = re.compile(rf"(?<![^\W\d])(?<![&'])(d?[A-Za-zŷθβτ]{HAT}?)(?![\w{HAT}])")  # by itself or after a number
BLOCK = re.compile(r'<div class="highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL)
TAG = re.compile(r"(<[^>]*>)")
AS_TYPED = ("code", "pre", "script", "style")


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its formulas set."""
    return _sentences(BLOCK.sub(_block, html))


def _block(match: re.Match[str]) -> str:
    text = match[1].strip("\n")
    if "<" in text or not INDEX.search(text):
        return match[0]  # code with its colours, or what a command prints
    letters = LETTER.sub(r"<i>\1</i>", text)
    return f'<div class="formula">{_set(letters)}</div>'


def _sentences(html: str) -> str:
    """Sets what is between tags, except in code."""
    parts, inside = [], 0
    for part in TAG.split(html):
        if part.startswith("<"):
            name = part.strip("</>").split()[0] if part.strip("</>") else ""
            inside += (name in AS_TYPED) * (-1 if part.startswith("</") else 1)
            parts.append(part)
        else:
            parts.append(part if inside else _set(part))
    return "".join(parts)


def _set(text: str) -> str:
    text = INDEX.sub(lambda match: f"{_name(match[1])}<sub>{match[2].strip('{}')}</sub>", text)
    return POWER.sub(lambda match: f"<sup>{match[1].strip('{}')}</sup>", text)


def _name(name: str) -> str:
    return f"<i>{name}</i>" if len(name.replace(HAT, "")) <= 2 and name[0] not in "ΣΠ" else name
