"""The papers' figures, tables and theorems: every command can be planned, and the numbers agree with docs/results."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.engines import planning, simulate
from hyperpush.hypergradients import oracles
from hyperpush.runs.run import plan_run
from hyperpush.spec.config import load_config
from hyperpush.spec.studies import experiments
from hyperpush_papers import papers
from hyperpush_papers.common.models.dense import MLP
from hyperpush_papers.common.models.lstm import LSTM
from hyperpush_papers.personalize.scenarios import MODELS

NUMBER = r"[−-]?\d[\d.,]*\d|\d"
DOCS = Path(__file__).parents[2] / "docs"
PAGE = papers.page()
ITEMS = list(papers.items().values())
COMMANDS = sorted({command for item in ITEMS for command in (*item.commands, item.by) if command})
RUNS = [command for command in COMMANDS if command != "hyperpush list --methods"]
# Small sizes, so that a plan takes no time; they change nothing that a command tests.
SMALL = {
    "personalize": ("clients=4", "examples=400"),
    "influence": ("images=60",),
    "meta": ("clients=2", "tasks=1", "shots=1", "queries=1", "test_tasks=2", "test_queries=1"),
    "tune": ("clients=3", "examples=20", "validation=20", "test=20"),
}


def arguments(command: str) -> tuple[str, list[str]]:
    """Return the study and the overrides of a command."""
    program, verb, study, *options = shlex.split(command)
    assert (program, verb, set(options[::2])) in (("hyperpush", "run", {"-s"}), ("hyperpush", "run", set()))
    return study, options[1::2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Create a folder with a few examples of every data set, in their published formats."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("mnist", "emnist", "cifar10", "cifar100", "a9a", "shakespeare/plays"):
        (folder / name).mkdir(parents=True)

    def idx(array: np.ndarray) -> bytes:
        return b"".join(size.to_bytes(4, "big") for size in (0x800 + array.ndim, *array.shape)) + array.tobytes()

    for stem, classes in {"mnist/train": 10, "mnist/t10k": 10, "emnist/emnist-byclass-train": 62}.items():
        images, labels = rng.integers(0, 256, (600, 28, 28), np.uint8), rng.integers(0, classes, 600, np.uint8)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(labels))
    for name, file, classes in (("cifar10", "data_batch_1", 10), ("cifar100", "train", 100)):
        labels, colors = np.arange(600) % classes, rng.integers(0, 256, (600, 3072), np.uint8)
        own = labels[:, None] if classes == 10 else np.stack([labels // 5, labels], 1)
        (folder / name / f"{file}.bin").write_bytes(np.concatenate([own.astype(np.uint8), colors], 1).tobytes())
    for file in ("a9a", "a9a.t"):
        (folder / "a9a" / file).write_text("".join(f"{'+-'[i % 2]}1 {1 + i % 123}:1\n" for i in range(200)))
    said = "\n".join(f"{role}\tWhat is said by a role of a play, {line}" for role in "ABCDE" for line in range(70))
    (folder / "shakespeare" / "plays" / "play.txt").write_text(f"A PLAY\nACT I\n{said}\n")
    return folder


class Enough(Exception):
    """Raised once there is a program to plan."""


@pytest.fixture
def first_program(monkeypatch, data):
    """Stop plans at the first program, with small data and models; options and tasks are checked before."""

    def stop(*_):
        raise Enough

    for module, name in ((planning, "prepare"), (simulate, "prepare"), (oracles, "minimize")):
        monkeypatch.setattr(module, name, stop)
    monkeypatch.setenv("HYPERPUSH_DATA", str(data))
    for name, inputs in (("emnist", 784), ("cifar10", 3072), ("cifar100", 3072)):
        model = MLP(inputs, MODELS[name][0].classes, (4,))
        monkeypatch.setitem(MODELS, name, (model, model))
    monkeypatch.setitem(MODELS, "shakespeare", (LSTM(80, hidden=4),) * 2)


# `make test` runs the first command of each study, `make test-long` also the others.
FIRST = {arguments(command)[0]: command for command in reversed(RUNS)}.values()


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=() if command in FIRST else pytest.mark.long) for command in RUNS],
    ids=lambda command: "-".join(re.findall(r"[^\W_]+", command)[2:12]),
)
def test_every_command_can_be_planned(command, first_program):
    study, given = arguments(command)
    experiment, config = load_config(study, given, experiments())
    if experiment.check:
        experiment.check(config)
    found = plan_run(*load_config(study, [*given, *SMALL.get(study, ())], experiments()))
    assert found["stopped"] == "Enough: "


def test_what_a_column_has_its_command_runs():
    """The rows of published tables of personal models are methods of the command for the same network or data."""
    for item in (papers.items()[name] for name in ("A.table1", "E.table1", "E.table4", "B.table2")):
        given = [dict(value.split("=", 1) for value in arguments(command)[1]) for command in item.commands]
        for cells in (item.published, item.measured):
            for column, rows in cells.items():
                (methods,) = (each["methods"] for each in given if column in (each["data"], each.get("network")))
                assert set(rows) <= set(json.loads(methods)), (item.name, column)


def test_every_item_is_told():
    for item in ITEMS:
        assert bool(item.commands) != bool(item.missing), item.name
        assert item.ours or item.says or item.missing, item.name
        assert re.fullmatch(r"[A-E]\.(figure|table|theorem)[1-9]\d*", item.name)
        assert f"\n### {item.name}: {item.what}\n" in PAGE
    assert "\n| logistic | 0.99 | 0.998 | 1.00 | 1.00 |\n" in PAGE
    assert {item.runs for item in papers.find("D.1")} == {"bilevel-quadratic, list --methods", "meta", "private"}


@pytest.mark.parametrize("item", [item for item in ITEMS if item.measured], ids=lambda item: item.name)
def test_our_numbers_are_those_of_the_results(item):
    lines = [set(re.findall(NUMBER, line)) for line in (DOCS / f"results/{item.page}.md").read_text().splitlines()]
    for cells in item.measured.values():
        for row, cell in cells.items():
            assert any(set(re.findall(NUMBER, cell)) <= line for line in lines), (item.name, row, cell)


def test_two_tables_that_print_the_same_numbers_agree():
    first, other = (papers.items()[name].published for name in ("E.table1", "E.table4"))
    assert first["random-directed"].items() <= other["emnist"].items()


def test_a_name_stands_for_a_paper_a_number_or_one_thing():
    assert [item.name for item in papers.find("E.1")] == ["E.table1", "E.figure1", "E.theorem1"]
    assert papers.find("e.Table 1") == papers.find("E.table1") == [papers.items()["E.table1"]]
    assert len(papers.find("D")) == 5
    with pytest.raises(InvalidInput, match=r"paper: got 'E.tabel4'; .* \(did you mean 'E.table4'\?\)"):
        papers.find("E.tabel4")
    with pytest.raises(InvalidInput, match=r"paper: got 'F\.1'; allowed: A, B, C, D, E"):
        papers.find("F.1")


def test_numbers_stand_side_by_side():
    item = papers.Item(
        "A.table9", "a table", published={"x": {"p": "1", "q": "2"}}, measured={"x": {"q": "3"}, "y": {"r": "4"}}
    )
    assert item.grid() == [
        ["", "x, published", "x, ours", "y, ours"],
        ["p", "1", None, None],
        ["q", "2", "3", None],
        ["r", None, None, "4"],
    ]
