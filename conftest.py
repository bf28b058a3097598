"""Set up one environment for every test: four XLA devices on the CPU, no display, and a separate compilation cache.

`make test-long` also lets beartype check every signature of the package (TYPED in the Makefile).
"""

import gc
import os
from pathlib import Path

# JAX and matplotlib read these when they are first imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and run little, so LLVM skips expensive optimizations.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    )
)
os.environ["MPLBACKEND"] = "Agg"
# Tests and workers share one compilation cache, so each program is compiled once.
os.environ["HYPERPUSH_CACHE"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(__file__).parent / ".pytest_cache" / "jax"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


def pytest_collection_finish(session):
    """Collect garbage rarely: there is little of it, and every collection scans all traces that JAX keeps."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


MAPS = Path("/proc/self/maps")
MOST_MAPS = 25_000  # Linux allows a process 65,530 mappings; XLA crashes when it gets no more


def pytest_runtest_teardown(item, nextitem):
    """Free compiled code from time to time: it holds memory mappings, and a worker runs more than a thousand tests."""
    import jax  # imported only after the environment is set

    from hyperpush.engines.compiled import compile

    tested[0] += 1
    if tested[0] % 20 == 0 and MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MOST_MAPS:
        compile.clear()
        jax.clear_caches()


tested = [0]
