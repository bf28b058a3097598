"""A spec with `[deploy]`, as a file that peers read."""

from pathlib import Path

import tomli_w

from hyperpush.deploy.options import Deployment, read


def deployed(path: Path, spec, count=None, **deploy) -> Deployment:
    """Write a file with this spec and `[deploy]`, and return the deployment that it describes."""
    path.write_text(tomli_w.dumps({**spec, "deploy": deploy}))
    return read(path, count=count)
