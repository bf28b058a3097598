"""Docstrings as the project writes them (Google sections, Markdown inside) turned into reStructuredText.

Sphinx reads docstrings as reStructuredText. There `x` is not code, an indented equation is a quotation whose letters
are markup, and a list has to follow a blank line. This extension translates, before napoleon takes the sections:

- `x` becomes inline code; stars, bars and trailing underscores outside of code are escaped, bold and italics stay;
- indented equations become LaTeX (`plain_math`), ```math blocks are LaTeX already;
- other indented blocks after a blank line, fenced blocks and tables become literal blocks;
- lists get the blank lines that they need.
"""

import re

from plain_math import is_math, to_latex
from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Note|Notes|Raises|Returns|Yields):\s*$")
ITEM = re.compile(r"(?:[-*+]|\d+\.)\s+")
BOLD = re.compile(r"(\*\*[^*\s](?:[^*]*[^*\s])?\*\*|(?<![\w*])\*[^*\s](?:[^*]*[^*\s])?\*(?![\w*]))")
LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)\s]+)\)")
LITERAL = 4  # columns by which an equation or a piece of code is indented


def translate(lines: list[str]) -> list[str]:
    """The docstring's lines as reStructuredText."""
    out: list[str] = []
    base = 0  # indentation of the text of the current section
    where = 0
    open_code = False
    marker: int | None = None  # indentation of the list item that the text is in
    while where < len(lines):
        line = lines[where]
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        after_blank = not out or not out[-1].strip()
        if not text:
            open_code = False
            out.append("")
            where += 1
            continue
        if indent == 0:
            base = 0
        if indent == 0 and SECTION.match(text):
            base, marker = LITERAL, None
            out.append(text)
            where += 1
            continue
        if text.startswith("```"):
            where = take_fence(lines, where, indent, out)
            continue
        if text.startswith(">>>"):
            where = take_doctest(lines, where, out)
            continue
        if text.startswith("|") or (marker is None and is_literal(lines, where, base)):
            where = take_literal(lines, where, indent, out)
            continue
        hangs = base == 0 and marker is None and indent > 0 and not after_blank and not ITEM.match(text)
        if hangs:  # a hanging paragraph is not a definition list
            line = text
        if ITEM.match(text):
            if marker is None and not after_blank:
                out.append("")
            marker = indent
        elif marker is not None and indent <= marker:
            if not after_blank:
                out.append("")
            marker = None
        inline, open_code = translate_inline(line, open_code)
        out.append(inline)
        where += 1
    return out


def is_literal(lines: list[str], where: int, base: int) -> bool:
    """True if an equation or a piece of code starts here: indented, after a blank line or a colon, not a list."""
    line, before = lines[where], lines[where - 1].strip() if where else ""
    indented = len(line) - len(line.lstrip()) >= base + LITERAL
    return indented and (not before or (base == 0 and before.endswith(":"))) and not ITEM.match(line.strip())


def take_fence(lines: list[str], where: int, indent: int, out: list[str]) -> int:
    """Copy a fenced block as a directive, and return the index of the line after it."""
    margin = " " * indent
    language = lines[where].strip().strip("`") or "text"
    out += ["", f"{margin}.. math::" if language == "math" else f"{margin}.. code-block:: {language}", ""]
    where += 1
    while where < len(lines) and not lines[where].strip().startswith("```"):
        out.append(f"    {lines[where]}" if lines[where].strip() else "")
        where += 1
    out.append("")
    return where + 1


def take_doctest(lines: list[str], where: int, out: list[str]) -> int:
    """Copy an example with its output, up to the next blank line."""
    if out and out[-1].strip():
        out.append("")
    while where < len(lines) and lines[where].strip():
        out.append(lines[where])
        where += 1
    return where


def take_literal(lines: list[str], where: int, indent: int, out: list[str]) -> int:
    """Copy an indented block, or a table, as a literal block or as equations; the place after it."""
    table = lines[where].strip().startswith("|")
    margin = " " * (indent if table else indent - LITERAL)
    block: list[str] = []
    while where < len(lines):
        line = lines[where]
        inside = line.strip().startswith("|") if table else len(line) - len(line.lstrip()) >= indent
        if line.strip() and not inside:
            break
        block.append(line)
        where += 1
    if not table and is_math("\n".join(block)):
        out += ["", f"{margin}.. math::", "", *(f"{margin}    {line}" for line in to_latex(block)), ""]
        return where
    out += ["", f"{margin}.. code-block:: text", ""]
    out += [f"    {line}" if line.strip() and table else line for line in block]
    if out[-1].strip():
        out.append("")
    return where


def translate_inline(line: str, open_code: bool) -> tuple[str, bool]:
    """One line of prose, and whether a piece of code goes on in the next line."""
    parts = re.split(r"(`+)", line)
    inside = open_code
    out = []
    for place, part in enumerate(parts):
        if not part.startswith("`"):
            out.append(part if inside else escape(part))
            continue
        inside = not inside
        follows_letters = re.search(r"\w$", parts[place - 1])
        before_letters = re.match(r"\w", parts[place + 1])
        if inside:
            out.append(r"\ ``" if follows_letters else "``")
        else:  # letters that directly follow code (`step`s) need an escaped space
            out.append(r"``\ " if before_letters else "``")
    return "".join(out), inside


def escape(text: str) -> str:
    """Return prose outside of code, with accidental reStructuredText markup escaped."""
    text = LINK.sub(r"\\x00\1\\x01\2\\x02", text)
    pieces = BOLD.split(text)
    for place in range(0, len(pieces), 2):
        piece = pieces[place].replace("*", r"\*").replace("|", r"\|")
        pieces[place] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", piece)
    text = "".join(pieces)
    return text.replace(r"\x00", "`").replace(r"\x01", " <").replace(r"\x02", ">`__")


def process(_app: object, _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    lines[:] = translate(lines)


def skip(_app: object, _what: str, _name: str, thing: object, _skipped: bool, _options: object) -> bool | None:
    """Members that come from elsewhere (a JAX function as a class attribute) are skipped."""
    module = getattr(thing, "__module__", None) or "hyperpush"
    return None if module.startswith("hyperpush") else True


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process, priority=400)  # napoleon's is 500
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
