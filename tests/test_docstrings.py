"""The examples of all public docstrings run and print the documented output."""

import doctest
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest

import hyperpush
from hyperpush.methods.registry import registered

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = [
    each.name
    for each in pkgutil.walk_packages(hyperpush.__path__, "hyperpush.")
    if not any(part.startswith("_") for part in each.name.split("."))
]


# The common suites already run the classes in these modules.
SUITES = {
    each.__module__
    for kind in ("algorithms", "baselines", "big_fed", "hypergradients", "inner", "recipes")
    for name, each in registered(kind).items()
    if name != "FedEM"  # FedEM is in no suite
}

# These examples take long; separate tests run them.
OTHERS = {
    f"hyperpush.{name}" for name in ("verbs.check", "influence.label_noise", "influence.scores", "personalize.fit")
}


def examples(module):
    """Return the examples of a module, of its public functions and classes, and of their methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    # The tests' type checkers wrap functions, so that the finder does not know their module.
    own = {
        name: each
        for name, each in vars(module).items()
        if not name.startswith("_") and getattr(each, "__module__", None) == module.__name__
    }
    found = doctest.DocTestParser().get_doctest(module.__doc__ or "", {}, module.__name__, module.__file__, 0)
    tests = [found, *(test for name, each in own.items() for test in finder.find(inspect.unwrap(each), name, module))]
    return [test for test in tests if test.examples]


def with_examples():
    """Return the modules whose source contains examples; only these are imported."""
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and ">>>" in Path(spec.origin).read_text("utf-8"):
            yield pytest.param(name, marks=pytest.mark.long if name in SUITES | OTHERS else ())


@pytest.mark.parametrize("name", list(with_examples()))
def test_examples(name):
    module = importlib.import_module(name)
    tests = examples(module)
    assert tests, f"{name} has '>>>' but no example of anything public"
    said: list[str] = []
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        runner.run(test, out=said.append)
    assert not said, "".join(said)
