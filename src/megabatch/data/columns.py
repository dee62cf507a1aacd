"""The roles of a table's columns: image or query, text or document, hard negatives, label, score.

A column is found by its usual name, or named for its role: `columns={"image": "file", "text": "description"}`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

IMAGE_COLUMNS = ("image", "image_path", "filepath", "file_name", "filename", "path")
TEXT_COLUMNS = ("caption", "text", "title", "sentence", "raw_caption")
LABEL_COLUMNS = ("label", "class", "category")
PAIR_COLUMNS = (
    ("anchor", "positive"),
    ("query", "document"),
    ("query", "positive"),
    ("question", "answer"),
    ("text1", "text2"),
    ("sentence1", "sentence2"),
)

FIRST_ROLES, SECOND_ROLES = ("image", "query"), ("text", "document")
NEGATIVE, LABEL, SCORE = "negative", "label", "score"
SCORE_COLUMNS = ("score", "similarity_score", "similarity")
_NEGATIVES = re.compile(r"(hard_)?negatives?(_?\d+)?")  # usual names


class Columns(NamedTuple):
    """The names of columns by role."""

    pair: tuple[str, str]
    texts: bool  # whether both are texts
    negatives: tuple[str, ...]
    label: str | None
    score: str | None

    @property
    def all(self) -> list[str]:
        """All names, each once."""
        further = (name for name in (self.label, self.score) if name is not None)
        return list(dict.fromkeys((*self.pair, *self.negatives, *further)))


def choose(columns: Mapping[str, str] | Sequence[str] | None, names: list[str], table: str) -> Columns:
    """The columns of the table with these names. If columns are named, no others are used."""
    if columns is None:
        label, score = (next((name for name in usual if name in names), None) for usual in (LABEL_COLUMNS, SCORE_COLUMNS))
        return Columns(
            *_usual_columns(names, table), tuple(name for name in names if _NEGATIVES.fullmatch(name.lower())), label, score
        )
    by_role = _by_role(columns)
    unknown = [role for role in by_role if role not in (*FIRST_ROLES, *SECOND_ROLES, NEGATIVE, LABEL, SCORE)]
    sides = [[role for role in roles if role in by_role] for roles in (FIRST_ROLES, SECOND_ROLES)]
    if unknown or any(len(found) != 1 for found in sides):
        raise ValueError(f"columns must be image=NAME text=NAME or query=NAME document=NAME, got {_told_columns(by_role)}")
    missing = [name for name in by_role.values() if name not in names]
    if missing:
        raise ValueError(f"{table} has no column {' and no column '.join(missing)}; it has {', '.join(names) or 'none'}")
    chosen = by_role[sides[0][0]], by_role[sides[1][0]]
    if chosen[0] == chosen[1]:
        raise ValueError(f"columns must name two columns of pairs, got {chosen[0]} twice: {_told_columns(by_role)}")
    negatives = (by_role[NEGATIVE],) if NEGATIVE in by_role else ()
    return Columns(chosen, sides[0][0] == "query", negatives, by_role.get(LABEL), by_role.get(SCORE))


def _by_role(columns: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    """The names by role. Two names without roles are those of an image and a text."""
    found = columns if isinstance(columns, Mapping) else {}
    if isinstance(columns, list | tuple) and len(columns) == 2:
        found = {"image": columns[0], "text": columns[1]}
    if not found or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(
            f'columns must be two names, or names by role as in {{"image": "file", "text": "title"}}, got {columns!r}'
        )
    return found


def _told_columns(by_role: Mapping[str, str]) -> str:
    return " ".join(f"{role}={name}" for role, name in by_role.items())


def _usual_columns(names: list[str], table: str) -> tuple[tuple[str, str], bool]:
    """The two columns, and whether both are texts."""
    for pair in PAIR_COLUMNS:
        if set(pair) <= set(names):
            return pair, True
    image = next((name for name in IMAGE_COLUMNS if name in names), None)
    text = next((name for name in TEXT_COLUMNS if name in names), None)
    if image is None or text is None:
        first, second = [*names, "NAME", "NAME"][:2]
        raise ValueError(
            f"{table} has the columns {', '.join(names) or '(none)'}. Say which ones to use: --columns image={first} "
            f"text={second} for images and texts, --columns query={first} document={second} for texts"
        )
    return (image, text), False
