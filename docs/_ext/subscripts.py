"""Subscripts in running text: `x_i` is shown as x with a lowered i. Code, equations and signatures stay as they are."""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

# One letter, accented or squared perhaps, or deg; then a short index, or any in braces. Names of code do not match.
INDEXED = re.compile(
    r"(?<![A-Za-z0-9_.])((?:deg|[^\W\d_]|[∂∇ℓ])[\u0300-\u036f]?²?)"
    r"_(?:\{([^{}]{1,16})\}|(max|min|[^\W_ᵀ][\u0300-\u036f]?|[^\W_ᵀ]{2,3}))(?![A-Za-z0-9_])"
)
KEPT = (nodes.literal, nodes.FixedTextElement, nodes.math, nodes.math_block, nodes.raw, nodes.subscript)


def pieces(text: str) -> list[tuple[str, bool]]:
    """Return the parts of a text, each with True for an index."""
    found, start = [], 0
    for match in INDEXED.finditer(text):
        found += [(text[start : match.end(1)], False), (match.group(2) or match.group(3), True)]
        start = match.end()
    return [part for part in (*found, (text[start:], False)) if part[0]]


class Subscripts(SphinxPostTransform):
    """Lower the indices of a page."""

    default_priority = 700
    formats = ("html",)

    def run(self, **options: object) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if "_" in text and not _is_kept(text):
                made = [nodes.subscript(part, part) if index else nodes.Text(part) for part, index in pieces(text)]
                text.parent.replace(text, made)


def _is_kept(node: nodes.Node) -> bool:
    """True inside code, equations, and signatures."""
    above = node.parent
    while above is not None:
        if isinstance(above, KEPT) or above.tagname.startswith("desc_sig") or above.tagname == "desc_addname":
            return True
        above = above.parent
    return False


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Subscripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
