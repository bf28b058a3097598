"""Placement of clients on devices: all on one device, or one block of clients on each device of a mesh."""

import abc
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from hyperpush.base.processes import AXIS as AXIS
from hyperpush.engines.compiled.routes import Routes
from hyperpush.networks import Links, combine, lowest

# Largest number of entries, over all clients, that are mixed at once. Larger messages are mixed in slices of columns.
SLICE_NUMBERS = 1 << 22
FEW = 16  # largest number of devices that exchange rows directly on the CPU


class Placed(eqx.Module):
    """Base class of the placements. Arrays in arguments and results belong to one block of clients."""

    clients: int = eqx.field(static=True)

    @property
    def block(self) -> int:
        """Number of clients on one device."""
        return self.clients

    @property
    def padded(self) -> int:
        """Number of clients on all devices, with padding."""
        return self.clients

    @property
    def has_padding(self) -> bool:
        return self.padded > self.clients

    @abc.abstractmethod
    def heard(self, links: Links) -> Bool[Array, "b n"]:
        """Return True for each link whose message arrives (row: receiver in the block, column: sender)."""

    @abc.abstractmethod
    def gather(self, values: PyTree) -> PyTree:
        """Return the rows of all clients on every device."""

    def combine_received(
        self, links: Links, weights: Float[Array, "b n"], values: PyTree, reduce: Literal["sum", "max"]
    ) -> PyTree:
        """Return the combined messages to each receiver, with the weights that receivers chose.

        Rows of `weights` are receivers, and columns are senders.
        """
        return combine(receiver_links(self.heard(links), weights), self.gather(values), self.block, reduce)

    def stack(self, links: Links, values: PyTree) -> PyTree:
        """Return the received messages of each client, one row per sender."""
        return rows_heard(self.heard(links), self.gather(values))


class SingleDevice(Placed):
    """All clients on one device."""

    def ids(self) -> Int[Array, " n"]:
        return jnp.arange(self.clients)

    def combine(self, links: Links, values: PyTree, reduce: Literal["sum", "max"]) -> PyTree:
        """Return the sum or maximum of the messages to each client, weighted by the links."""
        return combine(links, values, self.clients, reduce)

    def heard(self, links: Links) -> Bool[Array, "n n"]:
        return alive_rows(links, self.clients).T

    def transfer(self, operator: Float[Array, "n n"], values: PyTree) -> PyTree:
        """Return the product of an n×n operator with the clients' values."""
        return jax.tree.map(lambda v: jnp.tensordot(operator, v, 1, precision=jax.lax.Precision.HIGHEST), values)

    def mean(self, values: PyTree) -> PyTree:
        """Return the mean over all clients, without a client axis."""
        return jax.tree.map(lambda v: jnp.mean(v, axis=0), values)

    def max(self, values: Array) -> Array:
        return jnp.max(values)

    def any(self, flags: Bool[Array, " n"]) -> Bool[Array, ""]:
        return jnp.any(flags)

    def gather(self, values: PyTree) -> PyTree:
        return values

    def mine(self, values: PyTree) -> PyTree:
        return values


class Sharded(Placed):
    """One block of clients per device. The last devices may hold padding clients without links."""

    devices: int = eqx.field(static=True)
    routes: Routes | None = eqx.field(static=True, default=None)  # None: every device sends to every other

    @property
    def block(self) -> int:
        return -(-self.clients // self.devices)

    @property
    def padded(self) -> int:
        return self.block * self.devices

    def ids(self) -> Int[Array, " b"]:
        return jax.lax.axis_index(AXIS) * self.block + jnp.arange(self.block)

    def real(self) -> Bool[Array, " b"]:
        return self.ids() < self.clients

    def combine(self, links: Links, values: PyTree, reduce: Literal["sum", "max"]) -> PyTree:
        if self.routes is not None:
            return self.exchange(self.routes, links, values, reduce)

        def contribution(v):
            return pad(combine(links, v, self.clients, reduce), self.padded, 0)

        if reduce == "max":
            return jax.tree.map(lambda v: self.mine(jax.lax.pmax(contribution(v), AXIS)), values)
        width = sum(v[0].size for v in jax.tree.leaves(values))
        weights = None
        if self.direct and links.targets is None and width >= self.clients:  # wider than the weights to be sent
            own = pad(links.weights.T, self.padded, 0).T
            weights = jax.lax.all_to_all(own, AXIS, split_axis=1, concat_axis=0, tiled=True).T

        def one(v):
            mixed = self.sum_and_scatter(contribution, weights, self.only_real(v))
            return mixed.astype(v.dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else mixed

        return jax.tree.map(one, values)

    @property
    def direct(self) -> bool:
        """True if devices exchange rows directly: on the CPU, gloo's reduce-scatter takes more than twice the time."""
        return jax.default_backend() == "cpu" and self.devices <= FEW

    def exchange(self, routes: Routes, links: Links, values: PyTree, reduce: Literal["sum", "max"]) -> PyTree:
        """Return the combined messages over a network with few links: each device sends one sum per receiver."""
        me, table = jax.lax.axis_index(AXIS), jnp.asarray(routes.destinations(self.devices))
        if links.targets is None:
            to = table[me]
            reached = (to < self.clients) & links.alive[:, jnp.minimum(to, self.clients - 1)]
            weights = jnp.where(reached, links.weights[:, jnp.minimum(to, self.clients - 1)], 0)
            local = Links(links.own, weights, reached, None)
        else:
            places = jnp.asarray(routes.places(self.devices))[me]
            local = Links(links.own, links.weights, links.alive, places[links.targets])
        sent = values if reduce == "max" else jax.tree.map(self.only_real, values)
        buffer = combine(local, sent, table.shape[1], reduce)

        def deliver(rows: Array) -> Array:
            total, start = rows[: self.block], self.block
            for shift, size in zip(routes.shifts, routes.sizes, strict=True):
                part = jax.lax.ppermute(rows[start : start + size], AXIS, self.ring_shift(shift))
                to = table[(me - shift) % self.devices, start : start + size]
                place = jnp.where(to < self.clients, to - me * self.block, self.block)  # beyond the end: dropped
                at = total.at[place]
                total = at.add(part, mode="drop") if reduce == "sum" else at.max(part, mode="drop")
                start += size
            return total

        return jax.tree.map(deliver, buffer)

    def heard(self, links: Links) -> Bool[Array, "b n"]:
        rows = alive_rows(links, self.clients)
        everyone = jax.lax.all_gather(rows, AXIS, tiled=True)[: self.clients]
        return self.mine(pad(everyone.T, self.padded, 0))

    def transfer(self, operator: Float[Array, "n n"], values: PyTree) -> PyTree:
        columns = self.mine(pad(operator.T, self.padded, 0)).T
        weights = pad(self.mine(operator).T, self.padded, 0).T if self.direct else None

        def contribution(v):
            return pad(jnp.tensordot(columns, v, 1, precision=jax.lax.Precision.HIGHEST), self.padded, 0)

        def one(v):
            mixed = self.sum_and_scatter(contribution, weights, self.only_real(v))
            # Padding clients receive no messages and keep their values.
            return jnp.where(along(self.real(), v), mixed, v) if self.has_padding else mixed

        return jax.tree.map(one, values)

    def only_real(self, v: Array) -> Array:
        # Values of padding clients may overflow to infinity, and 0 · inf = NaN would reach all clients.
        return jnp.where(along(self.real(), v), v, 0) if self.has_padding else v

    def ring_shift(self, shift: int) -> list[tuple[int, int]]:
        """Return pairs (device, target), where the target is `shift` devices further around the ring."""
        return [(device, (device + shift) % self.devices) for device in range(self.devices)]

    def sum_and_scatter(self, contribution, weights: Float[Array, "b padded"] | None, v: Array) -> Array:
        """Return the sum of all devices' contributions; each device keeps the rows of its own clients.

        With `weights` (row: receiver in the block, column: any sender), devices send their clients' values instead of
        contributions. Then no device stores contributions for all clients.
        """
        flat = v.reshape(v.shape[0], -1)
        width = flat.shape[1]
        part = max(1, min(width, SLICE_NUMBERS // self.padded))

        def one(columns):
            me, n = jax.lax.axis_index(AXIS), self.block
            if weights is not None:
                wide = jnp.promote_types(columns.dtype, weights.dtype)
                total = jnp.zeros(columns.shape, wide)
                for shift in range(self.devices):
                    theirs = jax.lax.ppermute(columns, AXIS, self.ring_shift(shift)) if shift else columns
                    share = jax.lax.dynamic_slice_in_dim(weights, (me - shift) % self.devices * n, n, axis=1)
                    total += jnp.dot(share.astype(wide), theirs.astype(wide), precision=jax.lax.Precision.HIGHEST)
                return total
            if not self.direct:
                return jax.lax.psum_scatter(contribution(columns), AXIS, scatter_dimension=0, tiled=True)
            rows = contribution(columns)
            total = jax.lax.dynamic_slice_in_dim(rows, me * n, n)
            for shift in range(1, self.devices):
                theirs = jax.lax.dynamic_slice_in_dim(rows, (me + shift) % self.devices * n, n)
                total += jax.lax.ppermute(theirs, AXIS, self.ring_shift(shift))
            return total

        if part == width:
            return one(flat).reshape(v.shape)

        def some(number, mixed):
            start = jnp.minimum(number * part, width - part)  # the last slice may overlap the one before
            columns = one(jax.lax.dynamic_slice_in_dim(flat, start, part, axis=1))
            return jax.lax.dynamic_update_slice_in_dim(mixed, columns, start, axis=1)

        start = jnp.zeros(flat.shape, jax.eval_shape(one, flat[:, :part]).dtype)
        return jax.lax.fori_loop(0, -(-width // part), some, start).reshape(v.shape)

    def mean(self, values: PyTree) -> PyTree:
        def one(v):
            return jax.lax.psum(jnp.sum(self.only_real(v), axis=0), AXIS) / self.clients

        return jax.tree.map(one, values)

    def max(self, values: Array) -> Array:
        # Padding clients must not influence the maximum.
        return jax.lax.pmax(jnp.max(jnp.where(self.real(), values, lowest(values.dtype))), AXIS)

    def any(self, flags: Bool[Array, " b"]) -> Bool[Array, ""]:
        return jax.lax.pmax(jnp.any(flags & self.real()).astype(jnp.int32), AXIS) > 0

    def gather(self, values: PyTree) -> PyTree:
        return jax.tree.map(lambda v: jax.lax.all_gather(v, AXIS, tiled=True)[: self.clients], values)

    def mine(self, values: PyTree) -> PyTree:
        start = jax.lax.axis_index(AXIS) * self.block
        return jax.tree.map(lambda v: jax.lax.dynamic_slice_in_dim(pad(v, self.padded, 0), start, self.block), values)


Placement = SingleDevice | Sharded


def along(vector: Array, like: Array) -> Array:
    """Reshape a vector with one number per client to multiply `like`, which has the clients on axis 0."""
    return vector.reshape(vector.shape + (1,) * (like.ndim - 1))


def pad(v: Array, rows: int, value: float) -> Array:
    """Append rows filled with `value` to `v`, up to `rows` rows."""
    return jnp.pad(v, ((0, rows - v.shape[0]),) + ((0, 0),) * (v.ndim - 1), constant_values=value)


def alive_rows(links: Links, clients: int) -> Bool[Array, "b n"]:
    """Return a matrix `[b, n]`: True if the sender (row) has a live link to the receiver (column)."""
    if links.targets is None:
        return links.alive
    rows = jnp.zeros((links.alive.shape[0], clients), bool)
    return jax.vmap(lambda row, to, up: row.at[to].max(up))(rows, links.targets, links.alive)


def weight_rows(links: Links, clients: int) -> Array:
    """Return a matrix `[b, n]` with the weight of the link from each sender (row) to each receiver (column)."""
    if links.targets is None:
        return links.weights
    rows = jnp.zeros((links.weights.shape[0], clients), links.weights.dtype)
    return jax.vmap(lambda row, to, w: row.at[to].add(w))(rows, links.targets, links.weights)


def rows_heard(heard: Bool[Array, "r s"], values: PyTree) -> PyTree:
    """Return each sender's value as received by each receiver, `[r, s, …]`; zeros if no message was received."""
    return jax.tree.map(lambda v: jnp.where(heard.reshape(heard.shape + (1,) * (v.ndim - 1)), v[None], 0), values)


def receiver_links(heard: Bool[Array, "r s"], weights: Float[Array, "r s"]) -> Links:
    """Return links with the weights that receivers chose. Axis 0 is the sender, as in all `Links`."""
    alive = heard.T
    return Links(jnp.ones(alive.shape[0]), jnp.where(alive, weights.T, 0), alive, None)
