"""Time of a round of SGP, HGP and FedAvg of all clients, with our convolutional network and with PyTorch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from images import images
from jax import lax
from measured import per_step
from script import Row

import hyperpush as hp
from hyperpush_papers.common.models import cnn, layers

TITLE, PROCESSES, FROM_DISK = "Our own network beside PyTorch (speed over PyTorch's; above 1 is faster)", 1, False
CLIENTS, EXAMPLES, PART, STEP_SIZE = 5, 64, 16, 0.001


def ours(method: str, convolution: str) -> Callable[[int], Any]:
    """Return a run of a number of rounds; convolutions are products of matrices (windows), or `lax.conv`."""
    setattr(cnn, "convolution", by_lax if convolution == "lax" else layers.convolution)  # noqa: B010
    task, network = images("emnist", CLIENTS, 0, EXAMPLES), hp.networks.RandomDirected(CLIENTS)
    engine = hp.Simulate(compile_fully=True)

    def run(rounds: int) -> Any:
        if method == "HGP":
            found = hp.hypergradient(task, hp.HGP(rounds, 1, STEP_SIZE), network, key=0, engine=engine, certify=False)
            return jax.tree.leaves(found.value)
        solver: Any = hp.SGP(rounds, STEP_SIZE)
        if method == "FedAvg":
            solver = hp.FedAvg(rounds, STEP_SIZE, batch_size=PART)
        return jax.tree.leaves(hp.train(task, solver, network, key=0, engine=engine, certify=False).task.params)

    return run


def by_lax(layer: Any, x: Any, stride: int = 1, pad: int = 0) -> Any:
    order, padding = ("NHWC", "HWIO", "NHWC"), [(pad, pad)] * 2
    made = lax.conv_general_dilated(x, layer["weight"], (stride, stride), padding, dimension_numbers=order)
    return made + layer["bias"] if "bias" in layer else made


def by_torch(method: str) -> Callable[[int], Any]:
    """Return a run of the same rounds in PyTorch: a loop over clients, which mixes flat vectors."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn import functional as f  # pyright: ignore[reportMissingImports]

    generator = np.random.default_rng(0)
    data = torch.tensor(generator.standard_normal((CLIENTS, EXAMPLES, 1, 28, 28)), dtype=torch.float32)
    labels = torch.tensor(generator.integers(0, 62, (CLIENTS, EXAMPLES)))
    shapes = [(32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (2048, 1024), (2048,), (62, 2048), (62,)]
    torch.manual_seed(0)
    start = [torch.randn(shape) * 0.02 for shape in shapes]
    sizes = [each.numel() for each in start]

    def loss(x: Any, scale: Any, inputs: Any, targets: Any) -> Any:
        a = f.relu(f.max_pool2d(f.conv2d(inputs, x[0], x[1]), 2))
        a = f.relu(f.max_pool2d(f.conv2d(a, x[2], x[3]), 2)).flatten(1)
        a = f.linear(f.relu(f.linear(a, x[4], x[5])), x[6], x[7])
        decay = sum((each**2).sum() for each in x)
        return f.cross_entropy(scale * a, targets) + 0.0005 * decay

    def flat(parts: Any) -> Any:
        return torch.cat([each.flatten() for each in parts])

    def split(vector: Any) -> Any:
        made = [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
        return [part.detach().requires_grad_() for part in made]

    def links() -> Any:
        up = torch.rand(CLIENTS, CLIENTS) < 0.6
        up.fill_diagonal_(True)
        return up / up.sum(0, keepdim=True)  # the weights with which a client sends sum to 1

    scale = torch.ones(62, requires_grad=True)

    def gradient(vector: Any, inputs: Any, targets: Any) -> Any:
        x = split(vector)
        return flat(torch.autograd.grad(loss(x, scale, inputs, targets), x))

    def product(vector: Any, along: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
        x = split(vector)
        inner = flat(torch.autograd.grad(loss(x, scale, inputs, targets), x, create_graph=True)) @ along
        *by_x, by_scale = torch.autograd.grad(inner, [*x, scale])
        return flat(by_x), by_scale

    def run(rounds: int) -> Any:
        z, mass = flat(start).repeat(CLIENTS, 1), torch.ones(CLIENTS)
        if method == "HGP":
            u = torch.stack([gradient(z[i], data[i], labels[i]) for i in range(CLIENTS)]) / CLIENTS
            v = torch.zeros(CLIENTS, 62)
            for _ in range(rounds):
                matrix = links()
                u, mass = matrix @ u, matrix @ mass
                found = [product(z[i], u[i] / mass[i], data[i], labels[i]) for i in range(CLIENTS)]
                u = u - STEP_SIZE * torch.stack([each[0] for each in found])
                v = v - STEP_SIZE * torch.stack([each[1] for each in found])
            return v.numpy()
        for _ in range(rounds):
            if method == "FedAvg":
                for i in range(CLIENTS):
                    for part in torch.randperm(EXAMPLES).split(PART):
                        z[i] -= STEP_SIZE * gradient(z[i], data[i, part], labels[i, part])
                z = z.mean(0).repeat(CLIENTS, 1)
            else:
                x = z / mass[:, None]
                z = z - STEP_SIZE * torch.stack([gradient(x[i], data[i], labels[i]) for i in range(CLIENTS)])
                matrix = links()
                z, mass = matrix @ z, matrix @ mass
        return z.numpy()

    return run


def compare(method: str) -> Row:
    """Return seconds per round of PyTorch and of ours, with windows and `lax.conv`; and our speeds over PyTorch's."""
    other = per_step(by_torch(method))
    row: Row = {"PyTorch_ms": 1e3 * other[0]}
    for convolution in ("windows", "lax"):
        wall, cpu = per_step(ours(method, convolution))
        row |= {f"{convolution}_ms": 1e3 * wall, f"{convolution}_speed": other[0] / wall}
        row[f"{convolution}_CPU_speed"] = other[1] / cpu
    return row


CASES: dict[str, Callable[[], Row]] = {method: partial(compare, method) for method in ("SGP", "HGP", "FedAvg")}
