"""The result of an audit, which can be read as rows, saved as JSON, and shown as an HTML page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hyperpush.audits import shown
from hyperpush.audits.verdicts import Verdict
from hyperpush.base.errors import InvalidInput
from hyperpush.base.files import write_atomically
from hyperpush.base.panels import Panel, Pictured
from hyperpush.base.status import Status
from hyperpush.base.version import __version__
from hyperpush.networks import Network
from hyperpush.verbs.costs import Costs

FORMAT = 1  # format version of the JSON file
ROWS = ("join", "without", "cells", "named", "records")


@dataclass(frozen=True)
class Join:
    """One party's losses on its own held-out records, and the verdict on its gain by joining.

    Attributes:
        party: The party's name.
        records: Number of held-out records.
        alone: Mean loss of the model of the party's own records.
        together: Mean loss of the model of all parties' records.
        not_contributing: Mean loss of the model of all other parties' records.
        gain: alone − together; positive: joining helps.
        low: Lower end of the confidence interval of the gain.
        high: Upper end of the confidence interval of the gain.
        p: p-value, corrected for many comparisons.
        verdict: `"helps"`, `"hurts"` or `"cannot say"`.
        accuracy: The share of correctly predicted classes by model, which no verdict uses; empty for numbers.
        auc: The mean area under the ROC curve by model, over folds with both classes, which no verdict uses; empty
            unless there are two classes.
    """

    party: str
    records: int
    alone: float
    together: float
    not_contributing: float
    gain: float
    low: float
    high: float
    p: float
    verdict: Verdict
    accuracy: Mapping[str, float]
    auc: Mapping[str, float | None]


@dataclass(frozen=True)
class Without:
    """Gain or loss of all other parties when one party leaves.

    Attributes:
        party: The party that leaves.
        records: Number of held-out records of the other parties.
        gain: The others' mean loss without the party, minus their mean loss with it; positive: the party helps them.
        low: Lower end of the confidence interval of the gain.
        high: Upper end of the confidence interval of the gain.
        p: p-value, corrected for many comparisons.
        verdict: `"helps"`, `"hurts"` or `"cannot say"`.
        visible: The smallest effect that this test would detect in four of five cases.
    """

    party: str
    records: int
    gain: float
    low: float
    high: float
    p: float
    verdict: Verdict
    visible: float


@dataclass(frozen=True)
class Cell:
    """Gain or loss of one party (`party`) when another one (`leaver`) leaves; other fields as in `Without`."""

    leaver: str
    party: str
    records: int
    gain: float
    low: float
    high: float
    p: float
    verdict: Verdict


@dataclass(frozen=True)
class Named:
    """A party that a round of the audit named as harmful; fields as in `Without`, among the parties of that round."""

    round: int
    party: str
    gain: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Record:
    """Effect of one record on the other parties.

    Attributes:
        party: The owner of the record. Among real parties, only the owner learns this row.
        file: The file of the record; without a file, the party's name.
        line: The line in the file; without a file, the number of the row from 0.
        gain: Change of the others' summed loss without the record; positive: the record helps.
        says: The effect in words.
        round: The round that named the owner as harmful, whose model scores the record; 0 if the owner was not named.
    """

    party: str
    file: str
    line: int
    gain: float
    says: str
    round: int = 0


@dataclass(frozen=True, repr=False)
class AuditResult(Pictured):
    """Gains by joining a collaboration, and effects of each party and record on the others.

    Attributes:
        join: A row per party: its gain by joining.
        without: A row per party that leaves: the effect on all others in total.
        cells: A row per pair of parties: the effect on one when the other leaves.
        named: Harmful parties, named one at a time.
        records: Records of the parties not named, then of each named party, the most harmful first. Empty without
            `records=True`.
        warnings: Reasons for caution, one sentence each.
        costs: Messages and computations of each party, on average.
        pooled_bytes: Bytes of sending all rows once to a server, for comparison.
        status: The worst status of all trainings.
        network: The network of the messages.
        about: The settings of the audit: folds, level, l2, effects, loss.
        parties: Records and class shares by party.
        small: Parties with too few records, which take no part.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> draw = np.random.default_rng(0)
        >>> def party(count, flipped=False):
        ...     rows = draw.normal(size=(count, 2))
        ...     return rows, (rows.sum(1) + 0.3 * draw.normal(size=count) > 0) != flipped
        >>> tables = hp.tables.read({"a": party(60), "b": party(60), "c": party(60, flipped=True)}, label="y")
        >>> found = hp.audit(tables, l2=0.01)
        >>> [each.party for each in found.named]
        ['c']
    """

    join: tuple[Join, ...]
    without: tuple[Without, ...]
    cells: tuple[Cell, ...]
    named: tuple[Named, ...]
    records: tuple[Record, ...]
    warnings: tuple[str, ...]
    costs: Costs
    pooled_bytes: int
    status: Status
    network: Network
    about: Mapping[str, Any]
    parties: Sequence[Mapping[str, Any]]
    small: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole result as data for JSON."""
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("network", "costs")}
        rows = {
            name: [asdict(row) for row in kept.pop(name)] for name in ("join", "without", "cells", "named", "records")
        }
        costs = {name: value for name, value in asdict(self.costs).items() if name != "accesses"}
        kept |= {"status": asdict(self.status), "network": f"{type(self.network).__name__}({self.network.clients})"}
        return shown.finite({"format": FORMAT, "version": __version__, **rows, "costs": costs, **kept})

    def to_json(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the whole result as JSON, and return the path.

        Args:
            path: The file to write.
            overwrite: True replaces an existing file. False refuses it.

        Raises:
            InvalidInput: The file exists or cannot be written.
        """
        file = Path(path)
        if file.is_dir() or (file.exists() and not overwrite):
            raise InvalidInput("path", str(file), "a new file; overwrite=True replaces an existing one")
        try:
            write_atomically(file, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise InvalidInput("path", str(file), f"a file that can be written ({error.strerror})") from None
        return file

    def page(self, path: str | Path, overwrite: bool = False, *, title: str = "Audit of a collaboration") -> Path:
        """Write the audit as one HTML page, and the page's numbers as JSON beside it, which needs the extra `pages`.

        Args:
            path: The page, a name that ends in `.html`.
            overwrite: True replaces existing files. False refuses them.
            title: The heading.

        Raises:
            InvalidInput: A file exists or cannot be written, or the extra is missing. Nothing is half-written.
        """
        from hyperpush.pages.report import report

        return report(self, path, overwrite, title=title, about=shown.summary(self))

    def panels(self) -> list[Panel]:
        """Return the panels of a page: status, warnings, pictures, tables, and the limits of the numbers."""
        return shown.panels_of(self)

    def __repr__(self) -> str:
        return "\n".join([f"AuditResult: {self.status}; {self.costs}", *(f"  {line}" for line in shown.summary(self))])
