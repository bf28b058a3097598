"""Five papers: the command of each figure, table and theorem, the published numbers and our measurements.

`papers.toml` holds these data. Studies read published numbers from the file, `hyperpush papers` prints it, and a page
of the site shows it.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hyperpush.base.errors import unknown
from hyperpush.base.imports import plain_name

Cells = Mapping[str, Mapping[str, str]]  # by column and row


@dataclass(frozen=True)
class Item:
    """A figure, a table or a theorem of a paper; `papers.toml` explains each field."""

    name: str
    what: str
    commands: Sequence[str] = ()
    missing: str = ""
    says: str = ""
    ours: str = ""
    by: str = ""
    page: str = ""
    unit: str = ""
    published: Cells = field(default_factory=dict)
    measured: Cells = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of the item: letter of the paper, letter and number, letter and own name."""
        paper = self.name[0]
        return paper, f"{paper}.{re.sub(r'[^0-9]', '', self.name)}", self.name

    @property
    def runs(self) -> str:
        """Names of the studies that the item's commands run, without their options."""
        named = (re.sub(r"^hyperpush (run )?| -s .*", "", command) for command in self.commands)
        return ", ".join(dict.fromkeys(named))

    def grid(self) -> list[list[str | None]]:
        """Return published numbers and ours side by side: a line of titles, then the rows; empty without numbers."""
        kinds = {"published": self.published, "ours": self.measured}
        columns = dict.fromkeys(column for cells in kinds.values() for column in cells)
        shown = [(column, kind) for column in columns for kind, cells in kinds.items() if column in cells]
        rows = dict.fromkeys(row for column, kind in shown for row in kinds[kind][column])
        body = [[row, *(kinds[kind][column].get(row) for column, kind in shown)] for row in rows]
        return [["", *(f"{column}, {kind}" for column, kind in shown)], *body] if shown else []

    def sentences(self, page: str) -> Iterator[str]:
        """Return the notes beside commands and numbers; `page` formats the name of a results page."""
        told = {"Not reproduced": self.missing, "Numbers": self.unit, "The paper": self.says, "Ours": self.ours}
        told |= {"Measured by": self.by, "More": self.page and page.format(self.page)}
        return (f"{title}: {text}" for title, text in told.items() if text)


@dataclass(frozen=True)
class Paper:
    """A paper and its items."""

    letter: str
    title: str
    source: str
    items: tuple[Item, ...]

    @property
    def heading(self) -> str:
        """Citation of the paper."""
        return f'{self.letter}: "{self.title}" ({self.source})'


@cache
def papers() -> dict[str, Paper]:
    """All papers, by letter."""
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        letter: Paper(
            letter,
            own.pop("title"),
            own.pop("source"),
            tuple(Item(f"{letter}.{key}", **each) for key, each in own.items()),
        )
        for letter, own in read.items()
    }


@cache
def items() -> dict[str, Item]:
    """Return the items of all papers, by names such as `E.table1`."""
    return {item.name: item for paper in papers().values() for item in paper.items}


def find(asked: str) -> list[Item]:
    """Return the items of a name: a paper (`E`), a number in a paper (`E.1`), or one item (`E.table1`)."""
    plain = plain_name(asked).replace(" ", "")
    found = [item for item in items().values() if plain in map(plain_name, item.names)]
    if not found:
        paper = papers().get(plain[:1].upper())
        known = {name for item in paper.items for name in item.names[1:]} if paper else papers()
        raise unknown("paper", asked, known)
    return found


def page() -> str:
    """Return the page of the site with all papers, in Markdown."""
    lines = ["# Papers", "", "Which figure, table and theorem is which command, with published numbers beside ours."]
    lines += ["`hyperpush papers E.1` prints the same.", ""]
    for paper in papers().values():
        lines += [f"## {paper.heading}", ""]
        for item in paper.items:
            lines += [f"### {item.name}: {item.what}", ""]
            lines += [*(f"    {command}" for command in item.commands), ""]
            if grid := item.grid():
                shown = [[cell or "" for cell in row] for row in (grid[0], ["---"] * len(grid[0]), *grid[1:])]
                lines += [*(f"| {' | '.join(row)} |" for row in shown), ""]
            lines += [f"- {text}" for text in item.sentences("[{0}]({0}.md)")] + [""]
    return "\n".join(lines)
