"""The README's example runs as it stands, and does what it says; the command line it shows exists."""

import re
from pathlib import Path

import numpy as np

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_lowers_everybodys_cost():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    costs = np.asarray(scope["result"].outer_costs).mean(axis=1)
    assert costs[-1] < costs[0]
    assert scope["estimate"].rounds == 2000
    assert np.all(np.isfinite(scope["estimate"].value))
