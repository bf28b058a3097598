"""Studies are found by name, and naming them loads nothing slow."""

import subprocess
import sys


def test_listing_studies_loads_no_jax():
    code = (
        "import sys; from hyperpush.studies.registry import experiments; found = experiments(); "
        "assert {'quickstart', 'tune', 'spec'} <= set(found); [each.config() for each in found.values()]; "
        "print([name for name in ('jax', 'matplotlib', 'equinox') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
