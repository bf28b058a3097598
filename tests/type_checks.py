"""What checks every signature of both packages at run time, for jaxtyping's option in pyproject.toml.

It has a name of its own since jaxtyping takes a call, such as beartype with options, for one package only.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int may stand where a float is asked for
