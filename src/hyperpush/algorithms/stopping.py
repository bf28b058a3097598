"""End the outer loop when a metric no longer improves, and return the best step."""

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
    """Return a pair as a tuple of floats; other values are returned as they are, and refused later."""
    return tuple(map(as_number, given)) if isinstance(given, tuple | list) else given


class StoppingState(eqx.Module):
    """A client's record of the metric for early stopping."""

    own: Float[Array, ""]  # the client's own current metric
    mean: Float[Array, ""]  # mean of the metric over clients, equal at all clients
    step: Int[Array, ""]  # outer steps taken; −1: not measured yet
    best_mean: Float[Array, ""]
    best_step: Int[Array, ""]
    params: PyTree  # params at the best step
    hyper: PyTree  # hyper at the best step

    @staticmethod
    def start(params: PyTree, hyper: PyTree) -> "StoppingState":
        zero, never = jnp.zeros(()), jnp.full((), -1, jnp.int32)
        return StoppingState(zero, zero, never, zero, never, params, hyper)


class EarlyStopping(Configured):
    """Stop once the clients' mean metric has not improved for `patience` outer steps, and return the best step.

    Clients average the metric by push-sum and take the largest of their averages, so all judge by the same number. Then
    they vote on ending, so links must be reliable. These messages count as costs.

    On a private task every client's metric is a release: the mean over N examples within `bounds`, plus noise. One
    example moves that mean by at most (high − low)/N, which is the unit of the noise. Each step and the start cost one
    release. The best step and the vote use only released values.

    **Use it** as `stop=` of `PDBO` or `CDBO` with a data set that neither level fits. With `patience=steps + 1` it
    takes all steps and returns the best one. **Avoid it** on lossy links.

    Args:
        metric: `metric(params, hyper, batch)` returns one client's value per example, or a scalar. `"cost"` is the
            outer cost without its penalty.
        on: Name of the data set to measure on. A set that neither level fits shows overfitting. A set that a level fits
            causes a warning; `"test"` is refused.
        patience: Outer steps without a better mean before the end, at least 1. Noisy metrics need more.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are.
        pushes: Rounds of push-sum per measurement, at least 1. Slowly mixing networks need more.
        weighted: True weights clients by their number of examples; False weights them equally.
        bounds: (low, high) with low < high, for clipping each example's metric. Required on a private task, where the
            noise grows with high − low. (0, 1) suits accuracy and leaves it unchanged. None does not clip.

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
    agreement: int = eqx.field(static=True, default=0)  # rounds for a maximum to reach all clients; set by `bind`

    def __check_init__(self):
        if self.bounds is not None and all(map(is_number, self.bounds)) and not self.bounds[0] < self.bounds[1]:
            raise InvalidInput("EarlyStopping.bounds", self.bounds, "(low, high) with low < high, such as (0, 1)")

    def check_task(self, field: str, task: Any) -> None:
        """Refuse a data set that is missing or is the test set; warn about a set that a level fits."""
        check_choice(f"{field}.on", self.on, task)
        if task.privacy is not None and self.bounds is None:
            allowed = "(low, high) on a private task, such as (0, 1) for accuracy: noise hides a metric within bounds"
            raise InvalidInput(f"{field}.bounds", None, allowed)
        if callable(self.metric):
            task.check_metric(f"{field}.metric", self.metric, self.on)

    def program(self, problem: Problem) -> Node:
        """Return the node that measures and averages the metric and compares it with the best one so far.

        Its states have the fields `params`, `hyper` and `watch`.
        """
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
        """Return True if the client's patience is exhausted."""
        return watch.step - watch.best_step >= self.patience


def check_choice(field: str, on: object, task: Any) -> None:
    """Refuse to choose on a data set that is missing or is the test set; warn about a set that a level fits."""
    if on not in task.data.sets:
        raise unknown(field, on, task.data.sets)
    if on == "test":
        raise InvalidInput(field, on, "another data set, such as holdout: nothing may be chosen on the test examples")
    if on in (task.outer_on, "train"):
        level = "outer" if on == task.outer_on else "inner"
        text = f"{field}: {on!r} is what the {level} level fits, so overfitting goes unseen; use a holdout set"
        warnings.warn(text, stacklevel=4)
