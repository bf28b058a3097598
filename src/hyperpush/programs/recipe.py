"""Recipes of programs. An engine builds the program anew inside each function that it compiles.

A program's leaves are closures over the numbers of a method. An engine that compiled a finished program would compile
it again for every step size. It gets a recipe instead and builds the program where the numbers are traced, so a new
number compiles nothing. A node is named by its path, and a leaf by its path and role, because closures are built anew
each time.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.base.fingerprint import fingerprint
from hyperpush.programs.nodes import Average, Node, Path, Role, Sequence, children


class ProgramRecipe(eqx.Module):
    """The program `build(*parts)`.

    Floats and arrays in the parts are arguments of the compiled function. Everything else is structure: functions,
    integers, strings, and the static fields of modules. A new structure is compiled anew. `build` must return the same
    tree of nodes for all numbers, and must not branch on them in Python.
    """

    build: Callable[..., Node] = eqx.field(static=True)
    parts: tuple[Any, ...]
    reads: str = eqx.field(static=True, default="")  # digest of the values that the parts' functions read

    def program(self) -> Node:
        """Build the program from the parts' present numbers: floats on the host, tracers in compiled code."""
        return self.build(*self.parts)

    def traceable(self) -> "ProgramRecipe":
        """Return the recipe with weakly typed arrays in place of floats, so that results keep their types."""
        return with_arrays(self)

    def shapes(self) -> "ProgramRecipe":
        """Return the recipe with shapes and types in place of values: the key that tells structures apart."""
        return with_kinds(self)


def with_arrays(tree: Any) -> Any:
    """Return a tree with weakly typed arrays in place of floats; compiled code takes them as arguments."""
    return jax.tree.map(lambda leaf: jnp.asarray(float(leaf)) if is_number(leaf) else leaf, tree)


def with_kinds(tree: Any) -> Any:
    """Return a tree with shapes and types in place of numbers and arrays."""

    def kind(leaf: Any) -> Any:
        if is_number(leaf):
            return jax.ShapeDtypeStruct((), jnp.result_type(float), weak_type=True)
        if eqx.is_array(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
        return leaf

    return jax.tree.map(kind, tree)


def is_number(leaf: Any) -> bool:
    """Return True if a leaf of a recipe is a number that is not an array yet."""
    return isinstance(leaf, float | np.floating)


def program_of(method: Any, problem: Any) -> ProgramRecipe:
    """Return the recipe of a method's program for a problem."""
    functions = list(functions_in(method))
    return ProgramRecipe(_method_program, (method, problem), what_is_read(functions) if functions else "")


def what_is_read(given: Any) -> str:
    """Return a digest of functions and of the values that they read; it is part of the key of compiled code.

    Numbers and arrays among the leaves of modules are not in it, because compiled code takes them as arguments.
    """
    return fingerprint(with_kinds(given), quick=True)


def functions_in(given: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions among the options of a method and of its parts."""
    if isinstance(given, types.FunctionType | functools.partial):
        yield given
    inside = vars(given).values() if isinstance(given, eqx.Module) else ()
    inside = given.values() if isinstance(given, Mapping) else inside
    for each in given if isinstance(given, tuple | list) else inside:
        yield from functions_in(each)


def as_recipe(program: Node | ProgramRecipe) -> ProgramRecipe:
    """Return a recipe unchanged, and wrap a finished program into one."""
    return program if isinstance(program, ProgramRecipe) else ProgramRecipe(_get_program, (program,))


def at(program: Node, path: Path) -> Any:
    """Return the node at a path."""
    for place in path:
        program = children(program)[place if isinstance(program, Sequence) else 0]
    return program


def leaf_of(node: Node, role: Role) -> Callable[..., Any]:
    """Return the function of a node for a role."""
    if isinstance(node, Average):
        return {Role.ENTER: node.get, Role.LEAVE: node.each_answers().put, Role.UNTIL: node.ends}[role]
    return getattr(node, "f" if role == Role.LOCAL else role.name.lower())


def _method_program(method: Any, problem: Any) -> Node:
    return problem.protect(method.program(problem))


def _get_program(program: Node) -> Node:
    return program
