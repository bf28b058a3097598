"""What inner solvers and estimators share: conjugate gradients with Ritz values, and steps by tracked gradients."""
