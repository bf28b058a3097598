"""The README's examples run as they stand, and do what they say; the spec it shows can be read."""

import re
import tomllib
from pathlib import Path

import numpy as np

from hyperpush.spec import read

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
LONG, SHORT = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_lowers_everybodys_cost_and_prints_what_it_says():
    scope: dict = {}
    exec(compile(LONG, "README.md", "exec"), scope)
    solution = scope["solution"]
    costs = solution.history.cost.mean(axis=1)
    assert costs[-1] < costs[0]
    (printed,) = re.findall(r"^    (Solution\(.*\))$", README, flags=re.MULTILINE)
    numbers = re.compile(r"[\d,.]+\d")
    assert numbers.sub("#", repr(solution)) == numbers.sub("#", printed)
    shown = [float(each.replace(",", "")) for each in numbers.findall(printed)]
    found = [float(each.replace(",", "")) for each in numbers.findall(repr(solution))]
    np.testing.assert_allclose(found, shown, rtol=1e-3)


def test_the_short_example_estimates():
    scope: dict = {}
    exec(compile(SHORT, "README.md", "exec"), scope)
    assert scope["estimate"].costs.rounds == 500
    assert np.all(np.isfinite(scope["estimate"].value))


def test_the_spec_is_the_same_call():
    (text,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    spec = read(tomllib.loads(text))
    assert spec.verb == "solve"
    assert (spec.task.clients, spec.method.inner.steps, spec.network.clients) == (5, 500, 5)
