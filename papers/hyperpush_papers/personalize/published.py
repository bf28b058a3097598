"""Published accuracies, for comparison with ours."""

from hyperpush_papers.papers import items, papers

_LATER, _EARLIER = (papers()[letter].title for letter in "EA")
SOURCE = f"{_LATER}, tables 1 and 4; *: {_EARLIER}, table 1"
NETWORKS = tuple(items()["E.table1"].published)


def published_cell(data: str, network: str, method: str) -> str | None:
    """Return the papers' accuracies of a method in percent, mean / 10th percentile of clients; None without any."""
    found = [_find("E.table1", network, method)] if data == "emnist" else []
    if network == "random-directed":
        found.append(_find("E.table4", data, method))
        starred = _find("A.table1", data, method)
        found.append(starred and f"{starred} *")
    return "; ".join(dict.fromkeys(filter(None, found))) or None


def _find(table: str, row: str, method: str) -> str | None:
    """Return the cell of a method; the order of recipes in its name does not matter."""
    cells, parts = items()[table].published.get(row, {}), sorted(method.split("+"))
    return next((cell for name, cell in cells.items() if sorted(name.split("+")) == parts), None)
