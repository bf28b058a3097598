"""Published accuracies in per cent, average / 10 % client, to stand beside ours.

"Personalized decentralized bilevel optimization over stochastic and directed networks", table 1 (EMNIST on four
networks) and table 4 (other data, random directed): 100 clients on EMNIST, 20 elsewhere. With a star: "Cooperative
personalized bilevel optimization over random directed networks", table 1. The numbers in table 2 of "Decentralized
hyper-gradient computation over time-varying directed networks" are not in the text at hand.
"""

SOURCE = (
    "Personalized decentralized bilevel optimization over stochastic and directed networks, tables 1 and 4; "
    "*: Cooperative personalized bilevel optimization over random directed networks, table 1"
)

NETWORKS = ("fully-connected", "static-undirected", "random-undirected", "random-directed")
_EMNIST = {
    "sgp": ("82.2 / 73.8", "82.3 / 74.1", "79.7 / 71.6", "79.7 / 72.5"),
    "fedprox": ("69.6 / 58.2",),
    "local": ("74.7 / 63.9", "74.7 / 63.9", "73.7 / 63.8", "73.7 / 63.8"),
    "fedavg+": ("83.0 / 75.1",),
    "clustered-fl": ("82.3 / 73.8",),
    "pfedme": ("76.2 / 65.7",),
    "fedem": ("83.9 / 75.9", "83.8 / 75.9"),
    "da": ("82.9 / 74.8", "83.0 / 75.5", "80.9 / 73.2", "80.8 / 72.9"),
    "mtl": ("83.9 / 76.5", "83.9 / 76.5", "81.6 / 73.8", "81.6 / 75.0"),
    "mtl-da": ("83.9 / 76.2", "84.0 / 77.3", "83.0 / 76.3", "82.2 / 74.5"),
}
_DATA = ("cifar10", "cifar100", "shakespeare", "emnist")
_DIRECTED = {
    "sgp": ("75.6 / 69.7", "38.8 / 31.4", "28.5 / 26.0"),
    "sgp-mtl": ("73.0 / 64.2", "34.4 / 27.7", "27.7 / 24.0", "80.9 / 73.2"),
    "local": ("62.5 / 41.1", "33.1 / 25.1", "25.3 / 17.5"),
    "local-mtl": ("64.2 / 38.3", "35.2 / 28.0", "25.5 / 20.0", "67.3 / 57.5"),
    "da": ("75.6 / 70.3", "42.1 / 37.1", "38.2 / 33.7"),
    "mtl": ("73.6 / 65.2", "41.4 / 35.1", "38.0 / 34.9"),
    "mtl-da": ("77.2 / 73.0", "43.3 / 36.7", "37.7 / 33.0"),
}
# Its SGP and Local train ensembles, too; its MTL (local) is the direct gradient's.
_STARRED = {
    "sgp-mtl": ("73.0 / 64.2", "42.9 / 35.6", "28.8 / 24.6", "81.3 / 73.5"),
    "local-mtl": ("67.2 / 46.5", "39.1 / 30.6", "27.0 / 20.9", "65.6 / 51.0"),
    "mtl-direct": ("73.0 / 64.2", "43.9 / 38.2", "38.9 / 34.8", "82.8 / 74.7"),
    "mtl": ("73.5 / 65.9", "44.1 / 38.7", "39.7 / 36.5", "82.8 / 75.2"),
}
_ALL = {
    **{("emnist", net, name): cell for name, row in _EMNIST.items() for net, cell in zip(NETWORKS, row, strict=False)},
    **{
        (data, "random-directed", name): cell
        for name, row in _DIRECTED.items()
        for data, cell in zip(_DATA, row, strict=False)
    },
}


def published(data: str, network: str, method: str) -> str | None:
    """What the papers report for a method, if they do."""
    cells = [_ALL.get((data, network, method))]
    if network == "random-directed" and data in _DATA and method in _STARRED:
        cells.append(f"{_STARRED[method][_DATA.index(data)]} *")
    return "; ".join(cell for cell in cells if cell) or None
