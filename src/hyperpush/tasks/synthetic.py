"""Generated data: heterogeneous binary classification, and quadratics with known solutions."""

import numpy as np
from numpy.random import Generator


def mixture_of_logistic(
    clients: int,
    examples: int,
    generator: Generator,
    *,
    features: int = 5,
    components: int = 3,
    concentration: float = 0.4,
    noise: float = 0.1,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[clients, examples, features]` and labels 0/1 `[clients, examples]` of a mixture of linear classifiers.

    Client i mixes `components` shared classifiers θ_c ~ U(−1, 1) with its own proportions π_i ~ Dirichlet: for each
    example c ~ π_i, x ~ U(−1, 1), y = round(sigmoid(x·θ_c + N(0, noise²))). After Marfoq, Neglia, Bellet, Kameni, Vidal
    2021 (appendix I.1.5). Draw training and validation examples in one call: they share the mixture.
    """
    classifiers = generator.uniform(-1, 1, (components, features))
    proportions = generator.dirichlet(np.full(components, concentration), clients)
    inputs = generator.uniform(-1, 1, (clients, examples, features))
    component = np.stack([generator.choice(components, examples, p=own) for own in proportions])
    scores = np.einsum("nmf,nmf->nm", inputs, classifiers[component]) + generator.normal(0, noise, (clients, examples))
    return inputs, (scores > 0).astype(np.float64)


def quadratics(
    clients: int, inner: int, outer: int, generator: Generator
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Strongly convex quadratics, different at every client: (data of the inner costs, data of the outer costs).

    f_i(x, λ) = ½xᵀA_i x − b_iᵀx + λᵀC_i x and F_i(x, λ) = ½‖D_i x − e_i‖² + ½‖λ − g_i‖²; see `problems/quadratic.py`.
    """
    factor = generator.normal(size=(clients, inner, inner)) / np.sqrt(inner)
    hessians = np.einsum("nij,nkj->nik", factor, factor) + 0.5 * np.eye(inner)
    first = {
        "hessian": hessians,
        "linear": generator.normal(size=(clients, inner)),
        "coupling": generator.normal(size=(clients, outer, inner)),
    }
    second = {
        "map": generator.normal(size=(clients, inner, inner)) / np.sqrt(inner),
        "target": generator.normal(size=(clients, inner)),
        "hyper_target": generator.normal(size=(clients, outer)),
    }
    return first, second
