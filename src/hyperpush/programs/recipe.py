"""Recipes of programs, from which an engine builds the program anew inside each function that it compiles.

A program's leaves are closures over the numbers of a method. An engine that compiled a finished program would compile
it again for every step size. So the engine gets a recipe, and builds the program while the numbers are traced. Then a
new number needs no compilation. A node is identified by its path, and a leaf by its path and role, because closures are
built anew each time.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from hyperpush.base.fingerprint import fingerprint
from hyperpush.programs.nodes import Average, Node, Path, Role, Sequence, children

NUMBERS = (float, np.floating)  # types of leaves of a recipe that are numbers but not arrays


class ProgramRecipe(eqx.Module):
    """The program `build(*parts)`.

    Floats and arrays in the parts are arguments of the compiled function. Everything else is structure: functions,
    integers, strings, and the static fields of modules. A new structure is compiled anew. `build` must return the same
    tree of nodes for all numbers, and must not branch on them in Python.
    """

    build: Callable[..., Node] = eqx.field(static=True)
    parts: tuple[Any, ...]
    reads: str = eqx.field(static=True, default="")  # digest of the parts' functions and of the values that they read

    def program(self) -> Node:
        """Build the program from the parts' present numbers: floats on the host, tracers in compiled code."""
        return self.build(*self.parts)

    def traceable(self) -> "ProgramRecipe":
        """Return the recipe with weakly typed arrays in place of floats, so that results keep their types."""
        return with_arrays(self)

    def shapes(self) -> "ProgramRecipe":
        """Return the recipe with shapes and types in place of values, which is equal for equal structures."""
        return with_kinds(self)


def with_arrays(tree: Any) -> Any:
    """Return a tree with weakly typed arrays in place of floats; compiled code takes them as arguments."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([jnp.asarray(float(leaf)) if isinstance(leaf, NUMBERS) else leaf for leaf in leaves])


def with_kinds(tree: Any) -> Any:
    """Return a tree with shapes and types in place of numbers and arrays."""
    leaves, structure = jax.tree.flatten(tree)
    number = jax.ShapeDtypeStruct((), jnp.result_type(float), weak_type=True)
    kinds = [
        number
        if isinstance(leaf, NUMBERS)
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
        if eqx.is_array(leaf)
        else leaf
        for leaf in leaves
    ]
    return structure.unflatten(kinds)


def is_number(leaf: Any) -> bool:
    """Return True if a leaf of a recipe is a number that is not an array yet."""
    return isinstance(leaf, NUMBERS)


def program_of(method: Any, problem: Any) -> ProgramRecipe:
    """Return the recipe of a method's program for a problem."""
    functions = functions_in(method)
    return ProgramRecipe(_method_program, (method, problem), what_is_read(functions) if functions else "")


def what_is_read(given: Any) -> str:
    """Return a digest of functions and of the values that they read; it is part of the key of compiled code.

    The digest ignores numbers and arrays among the leaves of modules, because compiled code takes them as arguments.
    """
    return fingerprint(with_kinds(given), quick=True)


def functions_in(given: Any) -> list[Callable[..., Any]]:
    """Return the functions among the options of a method and of its parts."""
    found, waiting = [], [given]
    while waiting:
        each = waiting.pop()
        if isinstance(each, types.FunctionType | functools.partial):
            found.append(each)
        elif isinstance(each, eqx.Module):
            waiting += reversed(vars(each).values())
        elif isinstance(each, Mapping):
            waiting += reversed(list(each.values()))
        elif isinstance(each, tuple | list):
            waiting += reversed(each)
    return found


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
