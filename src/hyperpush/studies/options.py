"""Types of options that several studies have."""

from typing import Annotated, Literal

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
Positive = Annotated[float, Field(gt=0)]
Precision = Literal["float32", "float64"]
