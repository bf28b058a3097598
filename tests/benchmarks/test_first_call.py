"""The first call of the benchmarks is the README's."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_is_the_first_example_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)[:1]
    script = ast.parse((ROOT / "benchmarks/first_call.py").read_text(encoding="utf-8"))
    example = "\n".join(line for line in example.splitlines() if not line.startswith("import"))
    own = [each for each in script.body[1:] if not isinstance(each, ast.Import)]
    assert [ast.dump(each) for each in own] == [ast.dump(each) for each in ast.parse(example).body]
