"""The site: pages written in Markdown, and a reference made from the docstrings. `make docs` builds it, offline."""

import ast
import inspect
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

from hyperpush_papers import papers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "hyperpush"
author = "The hyperpush contributors"
copyright = author
release = metadata.version("hyperpush")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# MathJax comes from the site's own _static folder, so equations need no network.
extensions += ["myst_nb", "sphinx-mathjax-offline", "markdown_docstrings", "subscripts"]
exclude_patterns = ["_ext", "_build", "jupyter_execute"]
templates_path = ["_templates"]

# Pages. Headings get anchors, so that pages can link to sections as they do on a code host.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_dmath_double_inline = False
math_number_all = False
math_eqref_format = "({number})"

# Tutorials run when the site is built; their outputs are kept in _build alone.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / ".jupyter_cache")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# Reference. Signatures show names and defaults; the Args sections say what they mean.
autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Looks. Everything that a page needs is in the theme's package: nothing is loaded from outside.
html_theme = "pydata_sphinx_theme"
html_title = "hyperpush"
html_context = {"default_mode": "auto"}  # else the theme complains on the console
html_show_search_summary = False  # it would fetch pages, which a browser refuses for a site opened from files
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 8,
}
html_sidebars: dict[str, list[str]] = {page: [] for page in ("index", "start", "choose", "architecture", "stability")}

NAMESPACES = ("tables", "networks", "tasks", "algorithms", "hypergradients", "personalize", "influence", "privacy")
NAMESPACES += ("big_fed", "hooks", "programs", "extend")


def public_names(module: ModuleType) -> list[str]:
    """Names a namespace offers: its `__all__`; else what it defines, or imports under the same name (`as`)."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return sorted(name for name in names if not name.startswith("_") and callable(getattr(module, name)))


def write_reference() -> None:
    """One page per namespace, with a table of its names. What two namespaces offer is described once."""
    import hyperpush

    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    top = [name for name in public_names(hyperpush) if name not in NAMESPACES and not name.startswith("_")]
    described = {id(getattr(hyperpush, name)): "top" for name in top}
    write_page(folder / "top.md", "hyperpush", "hp", "The names that most programs need.", top, {})
    listed = {f"hyperpush.{name}" for name in top}
    for space in NAMESPACES:
        module = getattr(hyperpush, space)
        things = {name: id(getattr(module, name)) for name in public_names(module)}
        elsewhere = {name: described[thing] for name, thing in things.items() if thing in described}
        here = [name for name in things if name not in elsewhere]
        described |= {things[name]: space for name in here}
        listed |= {f"{module.__name__}.{name}" for name in here}
        summary = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        write_page(folder / f"{space}.md", module.__name__, f"hp.{space}", summary, here, elsewhere)
    for page in (folder / "generated").glob("*.rst"):  # of names that are gone since the last build
        if page.stem not in listed:
            page.unlink()


def write_page(path: Path, module: str, title: str, summary: str, names: list[str], elsewhere: dict[str, str]) -> None:
    lines = [f"# {title}", "", summary, ""]
    if elsewhere:
        links = ", ".join(f"[{name}]({page}.md)" for name, page in elsewhere.items())
        lines += [f"Described on another page: {links}.", ""]
    lines += ["```{eval-rst}", ".. autosummary::", "   :toctree: generated", "   :nosignatures:", ""]
    lines += [f"   {module}.{name}" for name in names]
    lines += ["```", ""]
    write_if_new(path, "\n".join(lines))


def write_if_new(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
        path.write_text(text, encoding="utf-8")


def quiet_kernels() -> None:
    """Tutorials run with settings of their own: else each kernel warns that its sockets are not encrypted."""
    profile = HERE / "_build" / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    write_if_new(profile / "ipython_kernel_config.py", 'c.IPKernelApp.log_level = "ERROR"\n')
    os.environ["IPYTHONDIR"] = str(profile.parent)


quiet_kernels()
write_reference()
write_if_new(HERE / "results" / "papers.md", papers.page())
