"""Shakespeare's plays by speaking role: predict the next character of a role's speech.

Plays are read from `shakespeare/plays/*.txt` in the folder that HYPERPUSH_DATA names. A line of them is a name, a tab
and what is said; lines that start with a tab continue it; stage directions are in brackets.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.random import Generator

from hyperpush.base.checks import check_integer
from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.data import files
from hyperpush_papers.common.data.partition import Split
from hyperpush_papers.common.data.sources import Dataset

# The 80 characters of Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar 2018 (LEAF).
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 200
_NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}
_DIRECTIONS = re.compile(r"\[[^\[\]]*\]")
_SPOKEN = re.compile(r"([A-Za-z][^\t]*)\t.*")
_FIRST_WORDS = re.compile(r"[A-Z][A-Z ]*")  # of a name that goes on in the next line
_HEADING = re.compile(r"(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|DRAMATIS PERSONAE)\b")


class Role(NamedTuple):
    """A role of a play and its lines in the order in which they are spoken."""

    play: str
    name: str
    lines: tuple[str, ...]


def available() -> bool:
    """Return True if there are plays to read."""
    base = files.folder()
    return base is not None and any((base / "shakespeare" / "plays").glob("*.txt"))


def roles(least: int = 64) -> list[Role]:
    """All roles with at least `least` lines, by play and name."""
    check_integer("least", least, 1)
    folder = files.required_folder("shakespeare/plays/") / "shakespeare" / "plays"
    plays = sorted(folder.glob("*.txt"))
    if not plays:
        raise files.file_error(folder, "a folder with plays, *.txt", "no plays")
    return [role for play in plays for role in _of_play(play) if len(role.lines) >= least]


def _of_play(path: Path) -> list[Role]:
    try:
        text = files.unpack(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise files.file_error(path, f"text in UTF-8 ({error.reason})") from None
    said: dict[str, list[str]] = {}
    speaker, title, before = None, None, ""
    started = False  # the list of roles comes before the first act
    for line in _DIRECTIONS.sub("", text).splitlines():
        if not line.strip():
            continue
        title = title or line.strip()
        # A bar marks a speech of two roles together; it goes to the role named last.
        words = line.partition("\t")[2].strip("| \t")
        if _HEADING.match(line):
            started = started or line.startswith("ACT")
            speaker = None
        elif started and (spoken := _SPOKEN.fullmatch(line)):
            speaker = f"{before} {spoken[1]}".strip(": ")
            said.setdefault(speaker, []).append(words)
        elif speaker and line.startswith("\t") and words != title:  # every scene repeats the title
            said[speaker].append(words)
        before = line.strip() if _FIRST_WORDS.fullmatch(line) and not _HEADING.match(line) else ""
    named = ((name, tuple(line for line in lines if line)) for name, lines in sorted(said.items()))
    return [Role(path.stem, name, lines) for name, lines in named]


def windows(
    lines: Sequence[str], *, length: int = LENGTH, stride: int = 1
) -> tuple[UInt8[np.ndarray, "m length"], Int64[np.ndarray, " m"]]:
    """Every `stride`-th run of `length` characters and the character that follows it, as places in CHARACTERS.

    Characters that are not there count as spaces.
    """
    check_integer("length", length, 1)
    check_integer("stride", stride, 1)
    text = np.array([_NUMBERS.get(character, 1) for character in "\n".join(lines)], np.uint8)
    if len(text) <= length:
        return np.zeros((0, length), np.uint8), np.zeros(0, np.int64)
    runs = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
    return np.ascontiguousarray(runs[:, :-1]), runs[:, -1].astype(np.int64)


def load(
    clients: int, generator: Generator, *, least: int = 64, length: int = LENGTH, stride: int = 1
) -> tuple[Dataset, Split]:
    """Examples of `clients` random roles with at least `least` lines, and their split.

    A role's first 60 % of lines are for training, the next 20 % for validation, the last 20 % for testing; no run of
    characters crosses these bounds. Roles too short for an example in each part are not drawn.
    """
    check_integer("length", length, 1)
    able = [role for role in roles(least) if all(len("\n".join(part)) > length for part in _in_time(role.lines))]
    if not able:
        allowed = f"plays with roles of at least {least} lines, long enough for {length + 1} characters in each part"
        raise InvalidInput(files.FOLDER, "no such role", allowed)
    check_integer("clients", clients, 1, len(able))
    chosen = [able[place] for place in np.sort(generator.choice(len(able), clients, replace=False))]
    cut = [[windows(part, length=length, stride=stride) for part in _in_time(role.lines)] for role in chosen]
    pieces = [part for parts in cut for part in parts]
    inputs, labels = (np.concatenate([piece[place] for piece in pieces]) for place in (0, 1))
    ends = np.cumsum([len(piece[1]) for piece in pieces])
    numbers = np.split(np.arange(len(labels)), ends[:-1])
    note = f"Shakespeare's plays: {clients} of {len(able)} roles with at least {least} lines"
    data = Dataset("shakespeare", inputs, labels, len(CHARACTERS), note)
    return data, Split(numbers[::3], numbers[1::3], numbers[2::3])


def _in_time(lines: Sequence[str]) -> list[Sequence[str]]:
    first, second = round(0.6 * len(lines)), round(0.8 * len(lines))
    return [lines[:first], lines[first:second], lines[second:]]
