"""No class name is used for two classes."""

import ast
from collections import defaultdict
from pathlib import Path

import hyperpush as hp


def test_no_public_class_has_the_name_of_another():
    places = defaultdict(list)
    root = Path(hp.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file.relative_to(root).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
