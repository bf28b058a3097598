"""Audit a collaboration: find which parties gain, which parties hurt others, and by which records."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from hyperpush.audits.doubts import find_doubts
from hyperpush.audits.joining import join_rows
from hyperpush.audits.leaving import cell_rows, judge_leavers, without_rows
from hyperpush.audits.naming import name_harmful
from hyperpush.audits.records import check_size, record_rows
from hyperpush.audits.result import AuditResult
from hyperpush.audits.rounds import AuditRounds
from hyperpush.audits.splits import split_records
from hyperpush.audits.watch import AuditWatch
from hyperpush.base.checks import check_boolean, check_integer, check_positive, no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.base.settings import keep_compiled_code
from hyperpush.base.status import Status, note_status
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.networks import Exponential, Network
from hyperpush.tables.heads import LinearHead
from hyperpush.tables.read import Tables
from hyperpush.tables.task import generator_of
from hyperpush.task.task import Task
from hyperpush.verbs.checks import check_engine_kind, check_key, check_network_kind
from hyperpush.verbs.hooks import Hook
from hyperpush.verbs.told import as_hooks

FEWEST = 20  # fewest records of a party that takes part
MOST_RETRAINED = 32  # number of params up to which models without a party are trained to the solution
NUMBER = 8  # bytes of a number


@no_type_check
def audit(
    tables: Tables,
    network: Network | None = None,
    *,
    key: PRNGKeyArray | int = 0,
    folds: int = 5,
    l2: float | None = None,
    level: float = 0.05,
    effects: Literal["auto", "retrain", "newton"] = "auto",
    records: bool = False,
    engine: Engine = Simulate(),
    hooks: Sequence[Hook] = (),
) -> AuditResult:
    """Audit a collaboration: is joining worth it for each party, which parties hurt the others, and by which records?

    Linear models are trained on all parties' records, on all except one party's, and on each party's own. Each training
    holds out one fold of the records. Verdicts compare losses of held-out records by paired tests, corrected for many
    comparisons. Harmful parties are named one at a time. No rows leave a party.

    **Use it** before or during a collaboration on tables. **Avoid it** with fewer than 20 records per party, or if a
    linear model cannot predict the labels.

    Args:
        tables: The result of `hp.tables.read`.
        network: The links among the parties, one client per party. None: `hp.networks.Exponential`.
        key: An integer or a JAX key; it determines folds and random links.
        folds: Parts of each party's records that are held out in turn, from 2 to 20.
        l2: The rate of the penalty ½·l2·‖w‖² on columns of deviation 1, above 0. None: models that measure gains by
            joining take the best of 1e-4, 1e-3, 0.01, 0.1 and 1, by three inner folds. Models that measure effects on
            others take 0.01.
        level: The share of false claims to accept among all claims, between 0 and 1.
        effects: `"retrain"`: models without a party are trained to the solution. `"newton"`: these models take one
            Newton step from the shared model, or three inexact steps above 128 params. `"auto"`: `"retrain"` up to 32
            params, else `"newton"`.
        records: True also scores each record's effect on the other parties.
        engine: The engine that hosts the parties: `hp.Simulate()`, `hp.Shard()` or `hp.Threads()`.
        hooks: Observers of the progress, such as `[hp.hooks.Bar()]`. They get the number of finished programs, and the
            rounds and bytes so far.

    Returns:
        An `AuditResult` with `join`, `without`, `cells`, `named`, `records`, `warnings`, `costs` and `status`.

    Raises:
        InvalidInput: An argument is invalid; the message names it and the allowed values.

    Example:
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> draw = np.random.default_rng(1)
        >>> def party(count):
        ...     rows = draw.normal(size=(count, 3))
        ...     return rows, rows.sum(1) + draw.normal(size=count) > 0
        >>> found = hp.audit(hp.tables.read({"a": party(40), "b": party(50), "c": party(60)}, label="y"), l2=0.01)
        >>> [(row.party, row.verdict) for row in found.without]
        [('a', 'cannot say'), ('b', 'cannot say'), ('c', 'cannot say')]
    """
    _check(tables, folds, l2, level, effects, records, engine)
    watch = AuditWatch(as_hooks(hooks))
    keep_compiled_code()
    network = Exponential(len(tables.names)) if network is None else network
    check_network_kind(network)
    if network.clients != len(tables.names):
        raise InvalidInput("network", f"{network.clients} clients", f"{len(tables.names)}, one per party")
    parties = tuple(place for place, count in enumerate(tables.counts) if count >= FEWEST)
    if len(parties) < 2:
        raise InvalidInput("tables", f"{len(parties)} parties with {FEWEST} records", "at least two of them")
    with jax.enable_x64(True):
        head = LinearHead.of(tables.schema, len(tables.schema.features))
        if records:
            check_size(head)
        own = split_records(tables, folds, generator_of(key))
        newton = effects == "newton" or (effects == "auto" and head.size > MOST_RETRAINED)
        rounds = AuditRounds(head, own, parties, network, check_key(key), engine, folds, l2, newton, watch)
        try:
            return _run(tables, rounds, float(level), records)
        finally:
            watch.finish()


def _run(tables: Tables, rounds: AuditRounds, level: float, records: bool) -> AuditResult:
    """Run all rounds of an audit, and return the result with its verdicts and warnings."""
    counts = np.zeros(rounds.clients)
    counts[list(rounds.parties)] = 1
    rounds.watch.expect(1 + records)
    found, alone = rounds.first(counts), rounds.alone()
    join, without = join_rows(tables, rounds, found, alone, level), without_rows(tables, rounds, found, level)
    cells = cell_rows(tables, rounds, found, level)
    named = name_harmful(rounds, judge_leavers(rounds, found, rounds.parties, level)[0], tables.names, level)
    rounds.watch.expect(len(named) * records)
    scored = record_rows(tables, rounds, named) if records else ()
    status = Status.of_all(rounds.statuses)
    note_status(status)
    doubts = find_doubts(tables, rounds, [row.together for row in join], status)
    small = [name for place, name in enumerate(tables.names) if place not in rounds.parties]
    if small:
        doubts.append(f"Fewer than {FEWEST} records, neither trained on nor judged: {', '.join(small)}.")
    return AuditResult(
        join=join,
        without=without,
        cells=cells,
        named=tuple(named),
        records=scored,
        warnings=(*tables.warnings, *doubts),
        costs=rounds.costs,
        pooled_bytes=NUMBER * sum(tables.counts) * (len(tables.schema.columns) + 1),
        status=status,
        network=rounds.network,
        about=_about(tables, rounds, level),
        parties=_facts(tables),
        small=tuple(small),
    )


def _about(tables: Tables, rounds: AuditRounds, level: float) -> dict[str, Any]:
    """Return the settings of the audit, for the result."""
    return {
        "label": tables.schema.label,
        "kind": tables.schema.kind,
        "folds": rounds.folds,
        "level": level,
        "l2": rounds.l2,
        "fixed_l2": rounds.fixed,
        "effects": "newton" if rounds.newton else "retrain",
        "newton_steps": rounds.steps if rounds.newton else 0,
        "params": rounds.head.size,
        "network": f"{type(rounds.network).__name__} of {rounds.clients} parties",
        "programs": rounds.programs,
    }


def _facts(tables: Tables) -> list[dict[str, Any]]:
    """Return the number of records and the label shares of each party."""
    classes = list(map(str, tables.schema.classes))
    shares = tables.shares if classes else np.zeros((len(tables.names), 0))
    return [
        {"party": name, "records": count, "shares": dict(zip(classes, map(float, own), strict=True))}
        for name, count, own in zip(tables.names, tables.counts, shares, strict=True)
    ]


def _check(tables: Any, folds: Any, l2: Any, level: Any, effects: Any, records: Any, engine: Any) -> None:
    if isinstance(tables, Task):
        given = "a private task" if tables.privacy is not None else "a task"
        allowed = "hp.tables.read(…); a private audit is refused, because every leave-one-out would be a release"
        raise InvalidInput("tables", given, allowed)
    if not isinstance(tables, Tables):
        raise InvalidInput("tables", type(tables).__name__, "what hp.tables.read returns")
    if not any(len(np.unique(own[~np.isnan(own)])) > 1 for own in np.concatenate(tables.inputs).T):
        raise InvalidInput("tables", "only constant columns", "at least one column that varies")
    check_integer("folds", folds, minimum=2, maximum=20)
    check_positive("l2", l2, optional=True)
    check_positive("level", level)
    if level >= 1:
        raise InvalidInput("level", level, "a number between 0 and 1")
    if effects not in ("auto", "retrain", "newton"):
        raise InvalidInput("effects", effects, "'auto', 'retrain' or 'newton'")
    check_boolean("records", records)
    check_engine_kind(engine)
    if engine.no_tree or engine.hosts_one:
        raise InvalidInput("engine", type(engine).__name__, "hp.Simulate(), hp.Shard() or hp.Threads() without faults")
