"""One environment for every test: four XLA devices on the CPU, no display, and a compilation cache of its own.

The jaxtyping option in pyproject.toml has every signature of the package checked by beartype.
"""

import os
from pathlib import Path

# JAX and matplotlib read these when they are first imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["MPLBACKEND"] = "Agg"
os.environ["HYPERPUSH_CACHE"] = str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
