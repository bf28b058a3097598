"""End the outer loop when a metric no longer improves, and return to where it was best."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.checks import is_number
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.base.numbers import as_number
from hyperpush.base.options import Configured
from hyperpush.base.ranges import Count
from hyperpush.data.batches import count, full_batch
from hyperpush.programs import Average, Context, Exchange, Inbox, Local, Node, Repeat, Sequence
from hyperpush.task.problem import Problem


def _as_range(given: Any) -> Any:
    """Numbers as floats in a pair; what is no pair stays, to be refused."""
    return tuple(map(as_number, given)) if isinstance(given, tuple | list) else given


class StoppingState(eqx.Module):
    """What a client has seen of the metric."""

    own: Float[Array, ""]  # its own, where it stands
    mean: Float[Array, ""]  # everybody's, the same number at all clients
    step: Int[Array, ""]  # the outer steps taken; −1: not measured yet
    best_mean: Float[Array, ""]
    best_step: Int[Array, ""]
    params: PyTree  # where the mean was best
    hyper: PyTree

    @staticmethod
    def start(params: PyTree, hyper: PyTree) -> "StoppingState":
        zero, never = jnp.zeros(()), jnp.full((), -1, jnp.int32)
        return StoppingState(zero, zero, never, zero, never, params, hyper)


class EarlyStopping(Configured):
    """Stop once the clients' mean metric has not improved for `patience` outer steps, and return the best step.

    Clients average the metric by push-sum and take the largest of their averages, so that all judge by the same
    number. They then vote on ending, so links must be reliable. What is averaged is counted among the costs.

    On a private task every client's metric is a release: the mean of N examples' values within `bounds`, which one of
    them moves by at most (high − low)/N, plus noise in units of that. It costs as much as any other release, once for
    each step and once for the start. All that follows, the best step and the vote, is made of releases.

    **Use it** as `stop=` of `PDBO` or `CDBO` with a set that neither level fits. With `patience=steps + 1` it never
    stops, and returns the best of all steps. **Avoid it** where messages get lost.

    Args:
        metric: `metric(params, hyper, batch)`, one client's: one value per example or a scalar. `"cost"` is the
            outer cost without its penalty.
        on: The data set to measure on. One that neither level fits shows overfitting; the one that the outer level
            fits is allowed and warned of; `"test"` is refused.
        patience: Outer steps without a better mean before the end, at least 1. Noisy metrics need more.
        mode: Whether `"min"` or `"max"` is better.
        pushes: Rounds of push-sum per measurement, at least 1; more where the network mixes badly.
        weighted: Whether clients count by their number of examples, instead of all alike.
        bounds: (low, high), low < high: each example's metric is clipped to it. Required on a private task, where noise
            grows with high − low; (0, 1) fits accuracy, which it does not change. None clips nothing.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import hyperpush as hp
        >>> hp.EarlyStopping("cost", on="holdout", patience=5).mode
        'min'
    """

    metric: Callable[[PyTree, PyTree, PyTree], Float[Array, "..."]] | Literal["cost"]
    on: str = eqx.field(static=True)
    patience: Count = eqx.field(static=True)
    mode: Literal["min", "max"] = eqx.field(static=True, default="min")
    pushes: Count = eqx.field(static=True, default=30)
    weighted: bool = eqx.field(static=True, default=False)
    bounds: tuple[float, float] | None = eqx.field(default=None, converter=_as_range)
    agreement: int = eqx.field(static=True, default=0)  # rounds in which a maximum reaches everyone; the verb knows

    def __check_init__(self):
        if self.bounds is not None and all(map(is_number, self.bounds)) and not self.bounds[0] < self.bounds[1]:
            raise InvalidInput("EarlyStopping.bounds", self.bounds, "(low, high) with low < high, such as (0, 1)")

    def check_task(self, field: str, task: Any) -> None:
        """Refuse a data set that is not there or must not be chosen on; warn of the one that is fitted."""
        check_choice(f"{field}.on", self.on, task)
        if task.privacy is not None and self.bounds is None:
            allowed = "(low, high) on a private task, such as (0, 1) for accuracy: noise hides a metric within bounds"
            raise InvalidInput(f"{field}.bounds", None, allowed)
        if callable(self.metric):
            task.check_metric(f"{field}.metric", self.metric, self.on)

    def program(self, problem: Problem) -> Node:
        """Measure, average, agree and judge, on states with `params`, `hyper` and a `watch`."""
        metric = problem.outer if self.metric == "cost" else self.metric

        def look(state: Any, **seen: Array) -> Any:
            return replace(state, watch=replace(state.watch, **seen))

        def measure(state: Any, ctx: Context) -> Any:
            batch = full_batch(ctx.data.sets[self.on])
            own = problem.watch(metric, state.params, state.hyper, batch, self.on, self.bounds)
            return look(state, own=own.astype(state.watch.own.dtype), step=state.watch.step + 1)

        def get(state: Any, ctx: Context) -> tuple[Array, Array]:
            examples = count(ctx.data.sets[self.on]) if self.weighted else 1
            mass = jnp.asarray(examples, state.watch.own.dtype)
            return mass * state.watch.own, mass

        def largest(state: Any, inbox: Inbox, ctx: Context) -> Any:
            return look(state, mean=jnp.maximum(state.watch.mean, inbox.total))

        def judge(state: Any, ctx: Context) -> Any:
            watch: StoppingState = state.watch
            improved = watch.mean < watch.best_mean if self.mode == "min" else watch.mean > watch.best_mean
            now = (watch.mean, watch.step, state.params, state.hyper)
            best = (watch.best_mean, watch.best_step, watch.params, watch.hyper)
            better = improved | (watch.step == 0)
            chosen = jax.tree.map(lambda new, old: jnp.where(better, new, old), now, best)
            return replace(state, watch=StoppingState(watch.own, watch.mean, watch.step, *chosen))

        average = Average(get, put=lambda state, mean, mass, ctx: look(state, mean=mean), rounds=self.pushes)
        agree = Exchange(lambda state, ctx: state.watch.mean, largest, weights="ones", reduce="max")
        return Sequence(Local(measure), average, Repeat(agree, self.agreement, name="agreement"), Local(judge))

    def has_ended(self, watch: StoppingState) -> Bool[Array, ""]:
        """Whether the client's patience is at an end."""
        return watch.step - watch.best_step >= self.patience


def check_choice(field: str, on: object, task: Any) -> None:
    """Refuse to choose on a data set that is not there or must not decide anything; warn of the one that is fitted."""
    if on not in task.data.sets:
        raise unknown(field, on, task.data.sets)
    if on == "test":
        raise InvalidInput(field, on, "another data set, such as holdout: nothing may be chosen on the test examples")
    if on in (task.outer_on, "train"):
        level = "outer" if on == task.outer_on else "inner"
        text = f"{field}: {on!r} is what the {level} level fits, so overfitting goes unseen; use a holdout set"
        warnings.warn(text, stacklevel=4)
