"""mkdocs hook: typesets plain-text formulas such as `Σ_j exp s_ij` with subscripts and superscripts.

In the repository a formula is an indented block or part of a sentence. On the site, an indented block with an index becomes a
formula instead of code. The result is plain HTML, without scripts and without downloads.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

HAT = "\u0302"  # as in x̂
NAME = rf"d?[A-Za-zŷθ]{HAT}?|[ΣΠ]|d?row|col|mean|softmax|weight"  # must not match open_clip and inf_cl
INDEX = re.compile(rf"(?<!\w)({NAME})_(\{{[^{{}}]*\}}|chunks?\b|[a-z]{{1,2}}\b'?|[A-Z0-9]\b)")
POWER = re.compile(r"\^(\{[^{}]*\}|−?\w+)")
LETTER = re.compile(rf"(?<![^\W\d])(?<![&'])(d?[A-Za-zŷθβτ]{HAT}?)(?![\w{HAT}])")  # a single letter, possibly after a number
BLOCK = re.compile(r'<div class="highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL)
TAG = re.compile(r"(<[^>]*>)")
AS_TYPED = ("code", "pre", "script", "style")


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with its formulas typeset."""
    return _sentences(BLOCK.sub(_block, html))


def _block(match: re.Match[str]) -> str:
    text = match[1].strip("\n")
    if "<" in text or not INDEX.search(text):
        return match[0]  # highlighted code, or the output of a command
    letters = LETTER.sub(r"<i>\1</i>", text)
    return f'<div class="formula">{_set(letters)}</div>'


def _sentences(html: str) -> str:
    """Typesets the text between tags, except in code."""
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
