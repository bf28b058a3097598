"""Random 32-bit words as a function of (key, step, index), independent of the block that computes them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int, PRNGKeyArray, UInt32


@functools.partial(jax.jit, inline=True)
def words(key: PRNGKeyArray, step: Int[ArrayLike, ""], index: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return a random word per index: the index, mixed with two words from (key, step).

    Links need good statistics, not secrecy. The hash is elementwise and short, because drawing links takes most of the
    time of a round on dense random networks. It takes half the time of 13 rounds of Threefry, and XLA cannot fuse
    the functions of jax.random on CPU.
    """
    root, step = jax.random.key_data(key), jnp.asarray(step).astype(jnp.uint32)
    first, second = mix_bits(mix_bits(step ^ root[0]) ^ root[1]), mix_bits(mix_bits(step ^ root[1]) ^ ~root[0])
    return mix_bits(mix_bits(index ^ first) ^ second)


def mix_bits(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute 32-bit words so that each output bit depends on all input bits: `triple32` (Wellons 2018).

    The constants come from a search for the least bias in the flips of output bits per input bit.
    """
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 14)
