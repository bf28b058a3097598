"""Read settings from the environment: the cache folder for the index and for compiled code."""

import os
from functools import cache
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return the folder for compiled code and the index: `HYPERPUSH_CACHE`, or a folder in the user's cache folder."""
    given = os.environ.get("HYPERPUSH_CACHE")
    return Path(given) if given else platformdirs.user_cache_path("hyperpush") / "jax"


@cache  # so that it runs once per process
def keep_compiled_code() -> None:
    """Keep JAX's compiled code on disk for other processes, unless the user has set JAX's cache folder."""
    import jax  # not at the top: `hyperpush list` imports this module and must not wait for JAX

    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009, JAX defines it at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        # Programs that compile quickly are kept, too, because there are many of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
