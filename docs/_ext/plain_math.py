r"""Equations of docstrings, written in plain text for the terminal, as LaTeX for the site.

`x̄_i ← Σ_j p_{ij} x_j` becomes `\bar{x}_{i} \leftarrow \sum_{j} p_{ij} x_{j}`. Words become text, and each line of a
block stays a line.
"""

import re
import unicodedata

ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar", "\u0307": "dot"}
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀᵏᵐⁿ", "0123456789+-Tkmn")
LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₖₙ", "0123456789+-kn")
SYMBOLS = {
    "Σ": r"\sum ", "Π": r"\prod ", "∂": r"\partial ", "∇": r"\nabla ", "·": r"\cdot ", "×": r"\times ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∝": r"\propto ", "←": r"\leftarrow ",
    "→": r"\to ", "⋯": r"\cdots ", "…": r"\dots ", "∞": r"\infty ", "∈": r"\in ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "−": "-", "‖": r"\|", "⊙": r"\odot ", "⊗": r"\otimes ",
    "½": r"\tfrac12 ", "¼": r"\tfrac14 ", "∑": r"\sum ", "±": r"\pm ", "𝟙": r"\mathbb{1}",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\varepsilon ", "ζ": r"\zeta ",
    "η": r"\eta ", "θ": r"\theta ", "κ": r"\kappa ", "λ": r"\lambda ", "μ": r"\mu ", "ν": r"\nu ", "ξ": r"\xi ",
    "π": r"\pi ", "ρ": r"\rho ", "σ": r"\sigma ", "ς": r"\varsigma ", "τ": r"\tau ", "φ": r"\varphi ",
    "χ": r"\chi ", "ψ": r"\psi ", "ω": r"\omega ", "Γ": r"\Gamma ", "Δ": r"\Delta ", "Θ": r"\Theta ",
    "Λ": r"\Lambda ", "Φ": r"\Phi ", "Ψ": r"\Psi ", "Ω": r"\Omega ", "ϑ": r"\vartheta ",
    "ℓ": r"\ell ", "√": r"\surd ", "≲": r"\lesssim ", "%": r"\%", "#": r"\#",
    "{": r"\{", "}": r"\}", "&": r"\&", "$": r"\$", "~": r"\sim ", "\\": r"\backslash ",
}  # fmt: skip
FUNCTIONS = {"max", "min", "log", "exp", "cos", "sin", "det", "sup", "inf"}
SHORT = {"at", "to", "of", "in", "is", "by", "if", "on", "or", "as"}  # words of two letters, not products
MEANINGS = {"star": "^{*}", "gap": r"\qquad "}
NAMED = {"argmin", "argmax", "prox", "proj", "sign", "clip", "mean", "rank", "tr", "diag"}
TOKEN = re.compile(
    r"""
    (?P<code>\ ?`[^`]*`|\ ?[A-Za-z]{2,}(?:_[A-Za-z]{2,})+)
  | (?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀᵏᵐⁿ]+)
  | (?P<lowered>[₀₁₂₃₄₅₆₇₈₉₊₋ₖₙ]+)
  | (?P<sub>_(?:\{[^}]*\}|\([^()]*\)|[a-zα-ω0-9][\u0300-\u036f]?(?:→?[a-zα-ω0-9])*|[A-Z]))
  | (?P<sup>\^(?:\{[^}]*\}|\([^()]*\)|[−-]?\w+))
  | (?P<star>(?<=[\w\u0300-\u036f])\*(?!\s*\w))
  | (?P<gap>\ {2,})
  | (?P<word>\ ?[A-Za-z][A-Za-z0-9'’-]*(?:\ (?=[A-Za-z]{2}|a\ )[A-Za-z][A-Za-z'’-]*)*\ ?(?!\ ))
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def to_latex(lines: list[str]) -> list[str]:
    """A block of plain-text equations as the lines of a LaTeX array, one row per line."""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    rows = []
    for line in lines:
        if line.strip():
            deeper = (len(line) - len(line.lstrip()) - margin) // 4
            rows.append(r"\quad " * deeper + line_to_latex(line.strip()))
    if len(rows) == 1:
        return rows
    return [r"\begin{array}{l}", *(rf"{row} \\[2pt]" for row in rows[:-1]), rows[-1], r"\end{array}"]


def line_to_latex(line: str) -> str:
    """One line of plain-text mathematics as LaTeX."""
    text = unicodedata.normalize("NFD", line)
    out: list[str] = []
    where = 0
    while where < len(text):
        found = TOKEN.match(text, where)
        assert found is not None
        out.append(_token(found.lastgroup or "", found.group()))
        where = found.end()
        if where < len(text) and text[where] in ACCENTS:  # it belongs to the letter before it
            out[-1] = _accented(out[-1], ACCENTS[text[where]])
            where += 1
    return "".join(out).strip()


def _accented(before: str, accent: str) -> str:
    letter = before.rstrip()
    head, last = (letter[:-1], letter[-1]) if not letter.startswith("\\") else ("", letter)
    return rf"{head}\{accent}{{{last}}}"


def _token(kind: str, text: str) -> str:
    if kind == "code":
        return rf"\;\mathtt{{{_escape(text.strip(' `'))}}}"
    if kind == "raised":
        return "^{" + text.translate(RAISED).replace("T", r"\top") + "}"
    if kind == "lowered":
        return "_{" + text.translate(LOWERED) + "}"
    if kind in ("sub", "sup"):
        return text[0] + "{" + _index(text[1:]) + "}"
    if kind in MEANINGS:
        return MEANINGS[kind]
    return _word(text) if kind == "word" else SYMBOLS.get(text, text)


def _index(text: str) -> str:
    """A subscript or superscript: words are upright, anything else is mathematics."""
    inner = text[1:-1] if text[0] in "{(" else text
    return rf"\mathrm{{{inner}}}" if re.fullmatch(r"[a-z]{4,}", inner) else line_to_latex(inner)


def _word(text: str) -> str:
    """Letters: one is a variable, known functions are upright, two are a product, others are text."""
    name = text.strip()
    if len(name) == 1 or (len(name) == 2 and name not in SHORT):
        return name + " " * text.endswith(" ")
    if name in FUNCTIONS:
        return rf"\{name} "
    return rf"\operatorname{{{name}}}" if name in NAMED else rf"\text{{{text}}}"


def _escape(text: str) -> str:
    return re.sub(r"([_%#&{}$])", r"\\\1", text)


def is_math(block: str) -> bool:
    """True for a block of equations: mathematical symbols, but neither code nor a path."""
    return bool(re.search(r"[←∂∇Σ√≤≥≈∝∈≲‖ληθεφωΔ]|\bx_i\b|[⁺ᵀ]|v ←", block)) and not re.search(
        r"hp\.|=\s*\"|\[\w+\]|│", block
    )
