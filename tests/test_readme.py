"""Examples in the README and in the guides run as they stand, and do what they say; specs shown there can be read."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from hyperpush.spec.objects import read

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "docs/start.md", *sorted((ROOT / "docs/guides").glob("*.md"))]


def blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


LONG, SHORT = blocks(README)


def test_the_example_lowers_everybodys_cost_and_prints_what_it_says():
    scope: dict = {}
    exec(compile(LONG, "README.md", "exec"), scope)
    solution = scope["solution"]
    costs = solution.history.cost.mean(axis=1)
    assert costs[-1] < costs[0]
    (printed,) = re.findall(r"^    (Solution\(.*?per client\))$", README, flags=re.MULTILINE | re.DOTALL)
    printed = " ".join(printed.split())  # it takes two lines
    numbers = re.compile(r"[\d,.]+\d")
    assert numbers.sub("#", repr(solution)) == numbers.sub("#", printed)
    shown = [float(each.replace(",", "")) for each in numbers.findall(printed)]
    found = [float(each.replace(",", "")) for each in numbers.findall(repr(solution))]
    np.testing.assert_allclose(found, shown, rtol=1e-3)


def test_the_short_example_estimates():
    assert blocks((ROOT / "docs/index.md").read_text(encoding="utf-8")) == [SHORT]
    scope: dict = {}
    exec(compile(SHORT, "README.md", "exec"), scope)
    assert scope["estimate"].status.converged
    assert np.all(np.isfinite(scope["estimate"].value))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.stem in ("start", "extend") else pytest.mark.long)
        for page in PAGES
        if blocks(page.read_text(encoding="utf-8"))
    ],
    ids=lambda page: page.stem,
)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "page"}
    for block in blocks(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), scope)


def test_the_spec_is_the_same_call():
    (text,) = blocks((ROOT / "docs/start.md").read_text(encoding="utf-8"), "toml")
    spec = read(tomllib.loads(text))
    assert spec.verb == "solve"
    assert (spec.task.clients, spec.method.inner.steps, spec.network.clients) == (5, 500, 5)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_to_files(name):
    """Sphinx checks those within the site."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []
