"""End the outer loop when a validation metric no longer improves, and return to where it was best."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.checks import whole, yes_or_no
from hyperpush.data.batches import Data, Ragged, everything
from hyperpush.errors import InvalidInput
from hyperpush.problem import Problem, check
from hyperpush.program import Average, Context, Exchange, Inbox, Local, Node, Repeat, Sequence


class Watched(Data):
    """A client's data with examples to measure on."""

    held: PyTree


class Watch(eqx.Module):
    """What a client has seen of the metric."""

    own: Float[Array, "*clients"]  # its own, where it stands
    mean: Float[Array, "*clients"]  # everybody's, the same number at all clients
    step: Int[Array, "*clients"]  # the outer steps taken; −1: not measured yet
    best_mean: Float[Array, "*clients"]
    best_step: Int[Array, "*clients"]
    params: PyTree  # where the mean was best
    hyper: PyTree

    @staticmethod
    def start(params: PyTree, hypers: PyTree, clients: int) -> "Watch":
        zero, never = jnp.zeros(clients), jnp.full(clients, -1, jnp.int32)
        return Watch(zero, zero, never, zero, never, params, hypers)


class EarlyStopping(eqx.Module):
    """Stop once the clients' mean `metric` has not improved for `patience` outer steps; keep where it was best.

    `metric(params, hyper, batch)` is one client's, measured on all its examples in `data` (clients on axis 0; None:
    those of the outer cost) after every inner solve. `mode` says whether `"min"` or `"max"` is better. Clients average
    it by `rounds` pushes of push-sum (more where the network mixes badly), each client alike or, with `weighted`, by
    its number of examples. They then take the largest of their averages, so that all judge by the same number,
    and vote on ending: links must be reliable.
    """

    metric: Callable[[PyTree, PyTree, PyTree], Float[Array, ""]] = eqx.field(static=True)
    data: PyTree
    patience: int = eqx.field(static=True)
    mode: Literal["min", "max"] = eqx.field(static=True, default="min")
    rounds: int = eqx.field(static=True, default=30)
    weighted: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if not callable(self.metric):
            raise InvalidInput("EarlyStopping.metric", self.metric, "a function of (params, hyper, batch)")
        whole("EarlyStopping.patience", self.patience, least=1)
        whole("EarlyStopping.rounds", self.rounds, least=1)
        yes_or_no("EarlyStopping.weighted", self.weighted)
        if self.mode not in ("min", "max"):
            raise InvalidInput("EarlyStopping.mode", self.mode, "'min' or 'max'")

    def checked(self, params: PyTree, hypers: PyTree, data: Data, clients: int) -> Data:
        """The clients' data with what the metric needs; refuse a metric or examples that cannot work."""
        held = data.outer if self.data is None else jax.tree.map(jnp.asarray, self.data)
        try:
            check(Problem(self.metric, self.metric), params, hypers, Data(held, held), clients)
        except InvalidInput as error:
            field = error.field.replace("problem.inner", "stop.metric").replace("inner_data", "stop.data")
            raise InvalidInput(field, error.given, error.allowed) from error
        return data if self.data is None else Watched(data.inner, data.outer, held)

    def program(self, agreement: int) -> Node:
        """Measure, average, agree and judge, on states with `params`, `hyper` and a `watch`.

        `agreement` is the number of rounds in which a maximum reaches everyone.
        """

        def examples(ctx: Context) -> PyTree:
            return ctx.data.held if isinstance(ctx.data, Watched) else ctx.data.outer

        def look(state: Any, **seen: Array) -> Any:
            return replace(state, watch=replace(state.watch, **seen))

        def measure(state: Any, ctx: Context):
            own = self.metric(state.params, state.hyper, everything(examples(ctx)))
            return look(state, own=own.astype(state.watch.own.dtype), step=state.watch.step + 1)

        def get(state: Any, ctx: Context):
            counts = examples(ctx).counts if self.weighted and isinstance(examples(ctx), Ragged) else 1
            mass = jnp.asarray(counts, state.watch.own.dtype)
            return mass * state.watch.own, mass

        def largest(state: Any, inbox: Inbox, ctx: Context):
            return look(state, mean=jnp.maximum(state.watch.mean, inbox.total))

        def judge(state: Any, ctx: Context):
            watch: Watch = state.watch
            improved = watch.mean < watch.best_mean if self.mode == "min" else watch.mean > watch.best_mean
            now = (watch.mean, watch.step, state.params, state.hyper)
            best = (watch.best_mean, watch.best_step, watch.params, watch.hyper)
            better = improved | (watch.step == 0)
            chosen = jax.tree.map(lambda new, old: jnp.where(better, new, old), now, best)
            return replace(state, watch=Watch(watch.own, watch.mean, watch.step, *chosen))

        average = Average(get, put=lambda state, mean, mass, ctx: look(state, mean=mean), rounds=self.rounds)
        agree = Exchange(lambda state, ctx: state.watch.mean, largest, weights="ones", reduce="max")
        return Sequence(Local(measure), average, Repeat(agree, agreement, name="agreement"), Local(judge))

    def ended(self, watch: Watch) -> Bool[Array, ""]:
        """Whether the client's patience is at an end."""
        return watch.step - watch.best_step >= self.patience
