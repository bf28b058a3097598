"""Transform programs node by node."""

from collections.abc import Callable
from dataclasses import replace

from hyperpush.programs.nodes import Average, Node, Repeat, Scope, Sequence


def rewrite(node: Node, f: Callable[[Node], Node]) -> Node:
    """Return the program with `f(node)` in place of every node, lower nodes first."""
    if isinstance(node, Sequence):
        return f(Sequence(*(rewrite(child, f) for child in node.nodes), appended=node.appended))
    if isinstance(node, Repeat | Scope):
        return f(replace(node, body=rewrite(node.body, f)))
    return f(node)


def stepwise(node: Node) -> Node:
    """Return the program with every average written as single exchanges."""
    return rewrite(node, lambda each: each.stepwise() if isinstance(each, Average) else each)
