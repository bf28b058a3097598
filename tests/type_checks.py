"""Run-time type checks of every signature in both packages, for jaxtyping's option in pyproject.toml.

The checker needs a module, because jaxtyping accepts a call, such as beartype with options, for one package only.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is accepted as a float
