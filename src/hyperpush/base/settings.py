"""What the environment decides: where the index and compiled code are kept between processes."""

import os
from functools import cache
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Where compiled code is kept: `HYPERPUSH_CACHE`, or the user's cache folder."""
    given = os.environ.get("HYPERPUSH_CACHE")
    return Path(given) if given else platformdirs.user_cache_path("hyperpush") / "jax"


@cache  # once a process
def keep_compiled_code() -> None:
    """Keep what JAX compiles for other processes, unless the user has told JAX where to keep it."""
    import jax  # here: `hyperpush list` asks for the folder and must not wait for JAX

    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009, JAX makes it when it runs
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones add up
