"""Examples in the README and the guides run and print the documented output, and the specs shown there can be read."""

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
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


(CODE,) = blocks(README)
NUMBER = re.compile(r"[-+]?\d+\.\d+")


def test_the_example_names_the_harmful_party_and_prints_what_is_shown(capsys):
    exec(compile(CODE, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip().splitlines()
    after = README.split("```\n", 1)[1].strip("\n").split("\n\n")[0]
    shown = [line.removeprefix("    ") for line in after.splitlines()]
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in shown]
    found, said = ([float(each) for each in NUMBER.findall("\n".join(lines))] for lines in (printed, shown))
    np.testing.assert_allclose(found, said, atol=0.0101)  # allows 1 in the last digit shown


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
    """Check links to files outside of the site; Sphinx checks those inside."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []
