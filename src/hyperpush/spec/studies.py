"""Find studies by name: `spec`, which runs a TOML file with `[task]`, and the studies of installed distributions."""

from collections.abc import Iterator, Mapping

from hyperpush.base.errors import HyperpushError
from hyperpush.base.extensions import STUDIES, distribution, extensions, load_extension
from hyperpush.runs.experiment import Experiment
from hyperpush.spec.experiment import SPEC


class Studies(Mapping[str, Experiment]):
    """Mapping from names to studies. A study is imported at its first use; listing the names imports none."""

    def __init__(self):
        self._points = extensions(STUDIES)

    def __getitem__(self, name: str) -> Experiment:
        if name == SPEC.name:
            return SPEC
        point = self._points[name]
        found = load_extension(point, Experiment)
        if found.name != name:
            raise HyperpushError(f"{name} of {distribution(point)} cannot be used: the study calls itself {found.name}")
        return found

    def __contains__(self, name: object) -> bool:
        return name == SPEC.name or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({SPEC.name, *self._points}))

    def __len__(self) -> int:
        return len({SPEC.name, *self._points})


def experiments() -> Mapping[str, Experiment]:
    """Return all installed studies by name."""
    return Studies()
