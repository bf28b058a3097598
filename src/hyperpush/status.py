"""Whether to believe a result, and why."""

from dataclasses import dataclass

UNSOLVED = 0.1  # mean inner gradient, of the mean of the clients' own, above which an estimate says so


@dataclass(frozen=True)
class Status:
    """Whether to believe a result.

    Attributes:
        converged: True or False; None for methods of fixed length, which do not measure it.
        reason: Why it ended: `"tolerance"`, `"limit"`, `"fixed-length"`, ….
        residual: What was measured; None if nothing was.
        error: An estimate of the result's relative error; None where there is none.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.Status(converged=False, reason="limit", residual=0.3))
        ! not converged: limit
    """

    converged: bool | None = None
    reason: str = "fixed-length"
    residual: float | None = None
    error: float | None = None

    def __str__(self) -> str:
        if self.converged is False:
            return f"! not converged: {self.reason}"
        if self.converged:
            return f"converged ({self.reason})"
        said = self.reason.replace("-", " ")
        if self.residual is not None and self.residual > UNSOLVED:
            return f"{said}, ! the inner problem is not solved: its gradient is {self.residual:.2g} of its scale"
        return said
