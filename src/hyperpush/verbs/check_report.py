"""Result of `hp.check`, with its warnings and its printed report."""

import math
import sys
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, PyTree

from hyperpush.base import panels
from hyperpush.base.panels import Panel, Pictured
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.hypergradients.hgp import HGP
from hyperpush.verbs.results import Estimate

SERIES = 1e-4  # relative error of HGP's truncated series after the suggested number of steps


@dataclass(frozen=True)
class Check(Pictured):
    """An estimate at the solution of the inner problem, its reference values, and suggested settings.

    Attributes:
        estimator: The estimator that was checked.
        network: The network's name.
        tolerance: Largest relative error with which an estimate passes.
        estimate: The estimate at the solution; None if it diverged.
        solution: The inner solution, the params of the estimate, with clients on axis 0.
        solved: True if the solution and the params at the ends of all finite differences are minima.
        gradient_norm: Norm of the inner gradient at the solution.
        newton_step: Length of the longest Newton step from the solution or from an end of a finite difference, relative
            to the size of the params.
        given_gradient_norm: Norm of the inner gradient at the mean of the given params.
        given_distance: Largest distance of a client's given params from the solution.
        given_spread: Largest distance of a client's given params from their mean.
        given_effect: Relative ℓ2 distance from the closed form at the solution to the closed form at the given params.
        directions: Directions of the hypers, a pytree with leaves of shape [directions, clients, …].
        length: Length h of the finite differences.
        differences: Slopes of the outer cost at inner solutions along the directions, by finite differences.
        uncertainties: Absolute changes of these slopes if h is halved.
        predictions: Slopes along the directions according to the estimate.
        reference: The closed form of the target, computed by conjugate gradients.
        residual: Largest relative residual of these conjugate gradients.
        reference_error: Relative ℓ2 distance of the estimate from the reference.
        largest: Largest eigenvalue of the Hessian that the target inverts: the mean Hessian, or the clients' own.
        smallest: Smallest eigenvalue of the same Hessian.
        tenfold: Rounds in which the network's averaging error falls tenfold; None if it does not fall.
        own_smallest: Smallest eigenvalue of any client's own Hessian at the solution.
        sensitivity: Largest change |dx| of the solution per change |dλ| of the hypers along the directions.
        window: Rounds in which a message from any client reaches all other clients.
    """

    estimator: HypergradientEstimator
    network: str
    tolerance: float
    estimate: Estimate | None
    solution: PyTree
    solved: bool
    gradient_norm: float
    newton_step: float
    given_gradient_norm: float
    given_distance: float
    given_spread: float
    given_effect: float
    directions: PyTree
    length: float
    differences: Float[np.ndarray, " directions"]
    uncertainties: Float[np.ndarray, " directions"]
    predictions: Float[np.ndarray, " directions"]
    reference: PyTree
    residual: float
    reference_error: float
    largest: float
    smallest: float
    tenfold: float | None
    own_smallest: float
    sensitivity: float
    window: int

    @property
    def condition(self) -> float:
        """Condition number λ_max/λ_min of the Hessian; infinite if the Hessian is not positive definite."""
        return self.largest / self.smallest if self.smallest > 0 else math.inf

    @property
    def difference_error(self) -> float:
        """Relative error of the estimate's slopes: ‖predictions − differences‖ / ‖differences‖."""
        return relative_error(self.predictions, self.differences)

    @property
    def passed(self) -> bool:
        """True if the inner problem is solved and both relative errors of the estimate are within `tolerance`."""
        return self.solved and self.difference_error <= self.tolerance and self.reference_error <= self.tolerance

    @property
    def suggested_step_size(self) -> float | None:
        """Suggested step size 1/λ_max of the mean Hessian; None if λ_max is not above 0."""
        return 1 / self.largest if self.largest > 0 else None

    @property
    def suggested_steps(self) -> int | None:
        """Number of HGP's steps that gives a relative error of 1e-4 with the suggested step size.

        This number is log(1e-4)/log(1 − λ_min/λ_max), rounded up; None if HGP's series does not converge.
        """
        return None if self.suggested_step_size is None else self._steps(self.suggested_step_size, SERIES)

    def _steps(self, step_size: float, left: float) -> int | None:
        """Number of terms of Σ_m (I − ηH)^m after which the relative error is `left`; None if the series diverges.

        η is the step size and H the Hessian.
        """
        shrink = max(abs(1 - step_size * self.smallest), abs(1 - step_size * self.largest))
        if not shrink < 1:  # also if shrink is NaN
            return None
        return 1 if shrink <= left else math.ceil(math.log(left) / math.log(shrink))

    @property
    def warnings(self) -> list[str]:
        """Reasons why the estimate, or this check, may be wrong; those of the estimate's status come first."""
        said = [] if self.estimate is None else self.estimate.warnings
        said += self._warnings_of_the_problem()
        return said + self._warnings_of_the_estimate() + self._warnings_of_the_check() if self.solved else said

    def _warnings_of_the_problem(self) -> list[str]:
        said = []
        if not self.solved:
            said.append(
                f"The inner problem could not be solved (gradient norm {self.gradient_norm:.1e}, last Newton step "
                f"{self.newton_step:.1e}): is it convex, smooth, bounded from below? The rest here means nothing."
            )
        if self.smallest <= 1e-12 * self.largest:
            said.append(
                f"The mean Hessian is not positive definite (λ_min = {self.smallest:.2g}): the inner solution is not "
                "unique, and the hypergradient not defined."
            )
        return said

    def _warnings_of_the_estimate(self) -> list[str]:
        said, name, info = [], type(self.estimator).__name__, self.estimator.info
        if self.given_effect > self.tolerance:
            said.append(
                f"The given params are {self.given_distance:.1e} from the inner solution (gradient norm "
                f"{self.given_gradient_norm:.1e}); there the hypergradient is off by {self.given_effect:.1e}."
            )
        if self.estimate is None:
            said.append(f"{name} diverged (NaN or infinity).")
        step_size = self.estimator.option("step_size")
        if info.target == "global" and step_size is not None and step_size * self.largest > 2:
            said.append(f"Step size {step_size:.3g} exceeds 2/λ_max = {2 / self.largest:.3g}: {name} will diverge.")
        elif isinstance(self.estimator, HGP):
            said += self._warnings_of_hgp(self.estimator)
        if info.target == "global" and info.note:
            aims = f'aims at "{info.target}, {info.note}"'
            said.append(f"{name} {aims}: it differs from what it is compared with by design.")
        return said

    def _warnings_of_hgp(self, hgp: HGP) -> list[str]:
        step_size = float(hgp.step_size)
        said, needed = [], self._steps(step_size, self.tolerance)
        if needed is not None and needed > hgp.steps:
            said.append(f"{hgp.steps} steps cut the series off: with step size {step_size:.3g} it needs {needed}.")
        if hgp.averaging != "exact" and self.tenfold is not None:
            needed = math.ceil(-math.log10(self.tolerance) * self.tenfold)
            if needed > hgp.pushes:
                said.append(f"With pushes = {hgp.pushes} averages are far from the mean: take about {needed}.")
        return said

    def _warnings_of_the_check(self) -> list[str]:
        said, uncertain = [], norm(self.uncertainties) / (norm(self.differences) or sys.float_info.min)
        if uncertain > self.tolerance:
            said.append(
                f"The finite differences are uncertain by {uncertain:.1e}: is the outer cost smooth in the hypers?"
            )
        if self.residual > self.tolerance:
            said.append(f"The closed form is uncertain: its residual is {self.residual:.1e}.")
        if self.reference_error <= self.tolerance < self.difference_error:
            said.append(
                "The estimate follows the derivatives that the costs give, but not the costs: these derivatives are "
                "wrong (stop_gradient, rounding, a custom rule, …)."
            )
        return said

    def panels(self) -> list[Panel]:
        """Return the report's panels: the verdict with advice, the slopes by direction, and a table of all numbers."""
        verdict = f"{type(self.estimator).__name__} {'passed' if self.passed else 'failed'} at {self.tolerance:.0e}."
        labels = [str(number + 1) for number in range(len(self.differences))]
        slopes = {"finite differences": self.differences, "estimate": self.predictions}
        low, high = ({"finite differences": self.differences + sign * self.uncertainties} for sign in (-1, 1))
        rows = {**self._rows_of_the_problem(), **self._rows_of_the_estimate()}
        return [
            panels.text("Status", verdict, *self._advice(), tone="good" if self.passed else "bad"),
            panels.bars("Slopes of the outer cost by direction", labels, slopes, low=low, high=high),
            panels.table("Numbers", ("quantity", "value"), [[name, value] for name, value in rows.items()]),
        ]

    def __str__(self) -> str:
        """Return the printed report: the inner problem, the estimate, and what to change."""
        verdict = f"{'passed' if self.passed else 'FAILED'} at tolerance {self.tolerance:.0e}"
        rows = [f"  {name:<15}{text}" for name, text in self._rows_of_the_problem().items()]
        lines = [f"{self.estimator} on {self.network}: {verdict}", "the problem", *rows, "the estimate"]
        lines += [f"  {name:<15}{text}" for name, text in self._rows_of_the_estimate().items()]
        lines.append(f"  {'direction':<15}{'difference':>14}{'±':>9}{'estimate':>15}")
        for number, row in enumerate(zip(self.differences, self.uncertainties, self.predictions, strict=True)):
            lines.append(f"  {number + 1:<15}{row[0]:>14.6e}{row[1]:>9.0e}{row[2]:>15.6e}")
        return "\n".join([*lines, "what to change", *(f"  {sentence}" for sentence in self._advice())])

    def _rows_of_the_problem(self) -> dict[str, str]:
        own = f"; a client's own down to {self.own_smallest:.2g}{' (indefinite)' if self.own_smallest < 0 else ''}"
        rounds = self.tenfold and math.ceil(self.tenfold)
        contraction = "no step size lets training contract"
        if self.smallest > 0:
            contraction = f"at step size 1/λ_max training contracts by {1 - 1 / self.condition:.4g} per step"
        found = f"NOT SOLVED: a Newton step still moves the params by {self.newton_step:.1e}"
        if self.solved or self.smallest < 0:
            found = "solved" if self.solved else "NOT SOLVED: a saddle, as λ_min is negative"
        return {
            "conditioning": f"λ_max {self.largest:.4g}, λ_min {self.smallest:.4g}, κ {self.condition:.3g}{own}",
            "inner problem": f"{found}, gradient norm {self.gradient_norm:.1e}",
            "given params": f"{self.given_distance:.1e} from its solution, {self.given_spread:.1e} from their mean"
            f"; hypergradient there {self.given_effect:.1e} off",
            "sensitivity": f"|dx|/|dλ| up to {self.sensitivity:.3g} along the directions below",
            "range": f"the outer gradient is in the Hessian's range up to {self.residual:.1e}",
            "connection": f"whatever is sent reaches all within {self.window} rounds; averaging errors "
            + (f"fall tenfold in {rounds}" if rounds else "do not fall"),
            "contraction": contraction,
        }

    def _rows_of_the_estimate(self) -> dict[str, str]:
        rows = {
            "target": self.estimator.info.target,
            "closed form": f"estimate {self.reference_error:.1e} off (residual {self.residual:.1e})",
            "differences": f"estimate {self.difference_error:.1e} off (h = {self.length:.1e})",
        }
        if self.estimate is not None:
            cost = self.estimate.costs
            rows["status"] = (
                f"{self.estimate.status}{self.estimate.status.chosen and '; ' + self.estimate.status.chosen}"
            )
            rows["each client"] = (
                f"{cost.rounds} rounds, {cost.floats} numbers sent, {cost.hessian_products} Hessian products, "
                f"{cost.jacobian_products} Jacobian products, {cost.gradients} gradients"
            )
        return rows

    def _advice(self) -> list[str]:
        said = [f"! {sentence}" for sentence in self.warnings]
        if self.suggested_step_size is not None and self.suggested_steps is not None:
            said.append(
                f"for HGP: step_size {self.suggested_step_size:.4g}, steps {self.suggested_steps} for {SERIES:.0e}"
            )
        return said or ["nothing"]


def flatten(tree: PyTree) -> Float[np.ndarray, " size"]:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def norm(tree: PyTree) -> float:
    return float(np.linalg.norm(flatten(tree)))


def relative_error(tree: PyTree, truth: PyTree) -> float:
    """Return the relative ℓ2 error ‖tree − truth‖ / ‖truth‖; 0 if both are 0."""
    return norm(jax.tree.map(np.subtract, tree, truth)) / (norm(truth) or sys.float_info.min)
