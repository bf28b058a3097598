"""One key decides a run: the program's draws, the network's realisation and the injected faults."""

import jax
from jaxtyping import PRNGKeyArray


def program_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return jax.random.fold_in(key, 0)


def network_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return jax.random.fold_in(key, 1)


def faults_key(key: PRNGKeyArray) -> PRNGKeyArray:
    return jax.random.fold_in(key, 2)
