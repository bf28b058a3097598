"""Published accuracies to stand beside ours."""

from hyperpush.studies.papers import items, papers

_LATER, _EARLIER = (papers()[letter].title for letter in "EA")
SOURCE = f"{_LATER}, tables 1 and 4; *: {_EARLIER}, table 1"
NETWORKS = tuple(items()["E.table1"].published)


def published_cell(data: str, network: str, method: str) -> str | None:
    """What the papers report for a method, average / 10 % client in per cent, if they do."""
    found = [items()["E.table1"].published.get(network, {}).get(method)] if data == "emnist" else []
    if network == "random-directed":
        found.append(items()["E.table4"].published.get(data, {}).get(method))
        starred = items()["A.table1"].published.get(data, {}).get(method)
        found.append(starred and f"{starred} *")
    return "; ".join(dict.fromkeys(filter(None, found))) or None
