"""A spec with `[deploy]`, as a file that peers read."""

from pathlib import Path

import tomli_w

from hyperpush.deploy.options import Deployment, read


def deployed(path: Path, spec, count=None, **deploy) -> Deployment:
    """What a file with this spec and `[deploy]` describes, once it is written."""
    path.write_text(tomli_w.dumps({**spec, "deploy": deploy}))
    return read(path, count=count)
