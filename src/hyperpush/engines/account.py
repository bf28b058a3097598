"""What a run takes: the bytes that devices send to each other, and a piece of a plan before anything runs."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from hyperpush import processes
from hyperpush.engines import planning
from hyperpush.engines.interpret import Carry, composes
from hyperpush.engines.layout import Plan
from hyperpush.engines.placement import Slice, Whole
from hyperpush.engines.routes import routes
from hyperpush.programs import Average, Exchange, Node, Path, Profile, Server


def foreseen(
    plan: Plan,
    program: Node,
    found: Profile,
    begun: Carry,
    largest: int,
    key: PRNGKeyArray,
    spread_over: int,
) -> planning.Piece:
    """What a program would take at most on so many processes; `largest`: bytes of its largest states."""
    n = plan.network.clients
    passes, agreed = at_most(found)
    sent = [(passes[s.body] * s.messages(plan.agreement), planning.size(s.message)) for s in found.sendings]
    rounds = sum(times for times, _ in sent)
    block = Slice(n, spread_over).block
    spread = replace(plan, placement=Slice(n, spread_over, routes(plan.network, spread_over, block)))
    held = 2 * largest + planning.size(plan.data)
    if spread_over > 1 and plan.faults is None:  # links that lose messages are not spread
        # Besides its own clients' part, a process holds what the experiment made for all and what it is handed.
        handed = largest if largest <= processes.GATHERED else 0
        held = held * block / n + planning.size((begun.states, plan.data)) + handed
    interpreter = replace(plan, placement=Whole(n), faults=None).interpreter()

    def once_through(carry: Carry) -> Carry:
        return interpreter.run(program, carry, key, jnp.zeros((), jnp.int32))

    return planning.Piece(
        call=", ".join(dict.fromkeys(loop.name for _, _, loop in found.loops)) or type(program).__name__,
        clients=n,
        parameters=largest // max(1, n * jnp.zeros(()).dtype.itemsize),
        rounds=rounds,
        bytes_per_round=sum(times * width for times, width in sent) / max(rounds, 1),
        megabytes_moved=moved_bytes(spread, found, agreed) / 2**20,
        megabytes_per_process=held / 2**20,
        operations=max(passes.values()) * planning.operations(once_through, begun),
    )


def at_most(found: Profile) -> tuple[Mapping[Path, int], dict[Path, int]]:
    """How often every body is passed if no loop ends early; those of agreed length apart, too."""
    passes = found.passes({body: loop.at_most for body, _, loop in found.loops})
    return passes, {body: passes[body] for body, _, loop in found.loops if loop.agreed}


def moved_bytes(plan: Plan, found: Profile, agreed: Mapping[Path, int]) -> int:
    """Bytes that devices send to each other: for each place that sends, rows of a message, times how often.

    Weights that go along with wide messages of dense networks, a small part of them, are not counted.
    """
    placement = plan.placement
    if isinstance(placement, Whole) or placement.devices == 1:
        return 0
    passes, total = found.passes(agreed), 0
    for place in found.sendings:
        width = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(place.message))
        rows, times, node = placement.rows_out, place.messages(plan.agreement), place.node
        by_receiver = isinstance(node, Exchange) and (
            node.reduce == "stack" or node.weights not in ("push", "gossip", "ones")
        )
        if isinstance(node, Server) or by_receiver:
            rows = (placement.devices - 1) * placement.block  # all see all
        elif isinstance(node, Average) and node.by == "exact":
            rows = placement.devices - 1
        elif isinstance(node, Average) and composes(plan.network, place.floats):
            rows, times = (placement.devices - 1) * placement.block, 1
        total += passes[place.body] * times * rows * width * placement.devices
    return total
