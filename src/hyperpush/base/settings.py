"""Settings from the environment: the folder of the index and of compiled code."""

import os
from functools import cache
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return the folder of compiled code: `HYPERPUSH_CACHE`, or the user's cache folder."""
    given = os.environ.get("HYPERPUSH_CACHE")
    return Path(given) if given else platformdirs.user_cache_path("hyperpush") / "jax"


@cache  # once a process
def keep_compiled_code() -> None:
    """Keep compiled code of JAX for other processes, unless the user has set JAX's cache folder."""
    import jax  # here: `hyperpush list` needs the folder and must not wait for JAX

    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009, JAX defines it at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones add up
