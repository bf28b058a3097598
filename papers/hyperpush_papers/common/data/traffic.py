"""Speeds on roads: a week of 207 sensors in Los Angeles where it is at hand, otherwise generated ones."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from hyperpush_papers.common.data import files

SENSORS, DAYS = 40, 7  # of generated speeds
DAY = 288  # five-minute steps


class Traffic(NamedTuple):
    """Speeds by five minutes and sensor, and how near sensors are to each other by road (symmetric, 0 to 1)."""

    source: str
    speeds: Float[np.ndarray, "t n"]  # miles per hour, from midnight on
    nearness: Float[np.ndarray, "n n"]  # zeros on the diagonal


def traffic(source: Literal["auto", "los-loop", "synthetic"] = "auto", *, seed: int = 0) -> Traffic:
    """Speeds by sensor. `"auto"` takes the files if they are there.

    `"los-loop"` is the week of METR-LA that was published with T-GCN (Zhao et al. 2020). Its files `los_speed.csv` and
    `los_adj.csv` are in `traffic/los-loop/` of the folder in the environment variable HYPERPUSH_DATA. `seed` is for
    `"synthetic"`.
    """
    base = files.required_folder("traffic/los-loop/, or data=synthetic") if source == "los-loop" else files.folder()
    folder = None if base is None or source == "synthetic" else base / "traffic" / "los-loop"
    if folder is not None and (source == "los-loop" or folder.is_dir()):
        speeds, near = _table(folder / "los_speed.csv", 1), _table(folder / "los_adj.csv", 0)
        n = speeds.shape[1]
        if near.shape != (n, n) or not np.array_equal(near, near.T) or near.min() < 0:
            raise files.file_error(folder / "los_adj.csv", f"a symmetric table of {n}×{n} numbers, 0 or more")
        if len(speeds) < 3 * DAY or speeds.min() < 0:
            raise files.file_error(folder / "los_speed.csv", f"at least {3 * DAY} rows of speeds, 0 or more")
        return Traffic("los-loop", speeds, near * (1 - np.eye(n)))
    return synthetic(SENSORS, DAYS, seed)


def _table(path: Path, header: int) -> Float[np.ndarray, "rows columns"]:
    rows = files.unpack(path).decode("utf-8", "replace").splitlines()[header:]
    if not any(row.strip() for row in rows):  # of which numpy would warn
        raise files.file_error(path, "at least one row of numbers", "none")
    try:
        found = np.loadtxt(rows, delimiter=",", ndmin=2)
    except ValueError as error:
        raise files.file_error(path, f"numbers with commas between them ({error})") from None
    if not found.size or not np.isfinite(found).all():
        raise files.file_error(path, "finite numbers")
    return found


def synthetic(sensors: int, days: int, seed: int) -> Traffic:
    """Speeds that fall at rush hours, by an amount that is alike at near sensors, and jams that near sensors share.

    Sensors are at random places of a square; nearness is exp(−d²/0.15²) of their distance d, 0 below 0.1. A jam is an
    AR(1) process with correlation 0.97 between steps and a covariance that falls with distance.
    """
    generator = np.random.default_rng(seed)
    places = generator.uniform(size=(sensors, 2))
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    near = np.exp(-((apart / 0.15) ** 2))
    smooth = np.linalg.cholesky(np.exp(-apart / 0.3) + 1e-6 * np.eye(sensors))
    free, morning, evening = (smooth @ generator.normal(size=sensors) for _ in range(3))
    hour = np.arange(days * DAY) % DAY / (DAY / 24)

    def rush(at: float, strength: np.ndarray) -> np.ndarray:
        return np.exp(-((hour - at) ** 2) / 2 / 1.2**2)[:, None] * 12 * np.exp(0.5 * strength)

    jam, jams = np.zeros(sensors), []
    for noise in generator.normal(size=(days * DAY, sensors)):
        jam = 0.97 * jam + (1 - 0.97**2) ** 0.5 * smooth @ noise
        jams.append(jam)
    speeds = 62 + 3 * free - rush(8, morning) - rush(17.5, evening) - 6 * np.maximum(np.array(jams), 0)
    speeds = speeds + generator.normal(size=speeds.shape)
    weights = np.where(near < 0.1, 0, near) * (1 - np.eye(sensors))
    return Traffic("synthetic", np.clip(speeds, 1, 70), (weights + weights.T) / 2)
