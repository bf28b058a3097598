"""Make convolutions inside loops on the CPU as fast as those outside of loops.

XLA rewrites convolutions to the order of axes that its fast kernels need, but only outside of loops. Inside the body
of a loop, other orders run as scalar loops, ten to twenty times as slow. Other orders occur in each gradient with
respect to a kernel, and in all NCHW convolutions. So programs are lowered with the fast order written out: transpose,
convolve, transpose. The rule applies after differentiation and batching, so it covers gradients, batches and products.

Grouped convolutions also lack a fast kernel, so groups are computed one by one. A batch of clients with one kernel each
is such a grouped convolution.

JAX lacks a public name for lowering rules of one program. If a private name or keyword has moved, programs are lowered
without the rule.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

mlir: Any
PRIMITIVE: Any
PLAIN_RULE: Any
try:
    from jax._src.interpreters import mlir
    from jax._src.lax import convolution

    PRIMITIVE, PLAIN_RULE = convolution.conv_general_dilated_p, convolution._conv_general_dilated_lower
    SUPPORTED = (
        "override_lowering_rules" in mlir.LoweringParameters.__dataclass_fields__
        and "_private_parameters" in inspect.signature(jax.stages.Traced.lower).parameters
        and callable(mlir.lower_fun)
    )
except (ImportError, AttributeError, TypeError, ValueError):
    mlir = PRIMITIVE = PLAIN_RULE = None
    SUPPORTED = False

# Largest number of groups that are written out one by one; more groups run as a loop. 10 groups take 6 ms written out
# and 12 ms as a loop. 40 groups take 23 ms either way, but compile in 3.9 s written out and in 0.6 s as a loop.
MOST_GROUPS = 16


def lower(trace: Any) -> jax.stages.Lowered:
    """Lower a traced program; on the CPU, use the order of axes that is fast inside loops."""
    if not SUPPORTED or jax.default_backend() != "cpu":
        return trace.lower()
    rules = mlir.LoweringParameters(override_lowering_rules=((PRIMITIVE, _rule),))
    return trace.lower(_private_parameters=rules)


def _rule(ctx: Any, lhs: Any, rhs: Any, **options: Any) -> Any:
    """Lower a convolution; use JAX's own rule if the order of axes is already fast."""
    numbers, size = options["dimension_numbers"], len(options["dimension_numbers"].lhs_spec) - 2
    groups = max(options["feature_group_count"], options["batch_group_count"])
    if size == 0 or (tuple(map(tuple, numbers)) == _fast_order(size) and groups == 1):
        return PLAIN_RULE(ctx, lhs, rhs, **options)
    return mlir.lower_fun(partial(_convolve, **options), multiple_results=False)(ctx, lhs, rhs)


def _fast_order(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the axes (batch or output, feature or input, *space) of inputs, kernels and outputs: NHWC, HWIO, NHWC."""
    rows = (0, size + 1, *range(1, size + 1))
    return rows, (size + 1, size, *range(size)), rows


def _convolve(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    **options: Any,
) -> jax.Array:
    """Compute a convolution in the fast order of axes, group by group."""
    inputs, kernels, outputs = dimension_numbers
    rows = jnp.transpose(lhs, (inputs[0], *inputs[2:], inputs[1]))
    kernel = jnp.transpose(rhs, (*kernels[2:], kernels[1], kernels[0]))
    options["dimension_numbers"] = lax.ConvDimensionNumbers(*_fast_order(len(inputs) - 2))

    def convolve(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return PRIMITIVE.bind(rows, kernel, feature_group_count=1, batch_group_count=1, **options)

    groups, along = max(feature_group_count, batch_group_count), -1 if feature_group_count > 1 else 0
    if groups == 1:
        result = convolve(rows, kernel)
    elif groups <= MOST_GROUPS:
        pairs = zip(jnp.split(rows, groups, along), jnp.split(kernel, groups, -1), strict=True)
        result = jnp.concatenate([convolve(*pair) for pair in pairs], -1)
    else:
        parts = split_axis(rows, groups, along % rows.ndim), split_axis(kernel, groups, kernel.ndim - 1)
        made = jnp.moveaxis(lax.map(lambda pair: convolve(*pair), parts), 0, -2)
        result = made.reshape(*made.shape[:-2], -1)
    places = (outputs[0], *outputs[2:], outputs[1])
    return jnp.transpose(result, sorted(range(len(places)), key=places.__getitem__))


def split_axis(array: jax.Array, parts: int, axis: int) -> jax.Array:
    """Split an axis into equal parts, and stack the parts on a new first axis."""
    size = array.shape[axis] // parts
    return jnp.moveaxis(array.reshape(*array.shape[:axis], parts, size, *array.shape[axis + 1 :]), axis, 0)
