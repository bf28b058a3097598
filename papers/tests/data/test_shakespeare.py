"""Roles of a play written for this test, and windows of their text."""

import os

import numpy as np
import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.data import shakespeare

PLAY = """\tTHE PLAY


\tDRAMATIS PERSONAE

ANN\ta queen.
\tLords.


\tTHE PLAY


ACT I

SCENE I\tA room.

\t[Enter ANN
\tand BOB]

ANN\tGood [Aside] day.
\tHow do you do?

\t[Trumpets]

BOB\tWell.

ANTIPHOLUS
OF EPHESUS\tHo!

DON
ADRIANO\t|
\t|  Both at once.
ANN:\tAway!

\t[Exeunt]

\tTHE PLAY

ACT II

SCENE I\tA hall.

\tNobody says this.

BOB\tEnd # of it.
"""


@pytest.fixture
def plays(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    folder = tmp_path / "shakespeare" / "plays"
    folder.mkdir(parents=True)
    return folder


def test_roles_are_what_they_say_without_directions_and_titles(plays):
    (plays / "play.txt").write_text(PLAY)
    assert shakespeare.available()
    assert shakespeare.roles(1) == [
        ("play", "ANN", ("Good  day.", "How do you do?", "Away!")),
        ("play", "ANTIPHOLUS OF EPHESUS", ("Ho!",)),
        ("play", "BOB", ("Well.", "End # of it.")),
        ("play", "DON ADRIANO", ("Both at once.",)),
    ]
    assert [role.name for role in shakespeare.roles(2)] == ["ANN", "BOB"]
    plain = shakespeare.roles(1)
    (plays / "play.txt").write_text(PLAY, encoding="utf-8-sig")  # a byte-order mark before the title
    assert shakespeare.roles(1) == plain


def test_windows_are_followed_by_the_next_character():
    assert len(shakespeare.CHARACTERS) == len(set(shakespeare.CHARACTERS)) == 80
    inputs, labels = shakespeare.windows(["ab#", "cde"], length=3)

    def text(numbers):
        return "".join(shakespeare.CHARACTERS[number] for number in numbers)

    assert [text(row) for row in inputs] == ["ab ", "b \n", " \nc", "\ncd"]
    assert text(labels) == "\ncde"
    assert [text(row) for row in shakespeare.windows(["abcdef"], length=2, stride=2)[0]] == ["ab", "cd"]
    assert shakespeare.windows(["abc"], length=3)[0].shape == (0, 3)


def test_examples_are_split_in_time(plays):
    lines = {name: [f"{name.lower()}{number:02d}" for number in range(20)] for name in ("ANN", "BOB", "CY")}
    said = "\n\n".join(f"{name}\t{line}" for name, own in lines.items() for line in own)
    (plays / "play.txt").write_text(f"\tPLAY\n\nACT I\n\n{said}\n\nDEE\tToo short.\n")
    data, split = shakespeare.load(3, np.random.default_rng(0), least=20, length=6)
    again, _ = shakespeare.load(3, np.random.default_rng(0), least=20, length=6)
    np.testing.assert_array_equal(data.inputs, again.inputs)
    assert (data.classes, data.note) == (80, "Shakespeare's plays: 3 of 3 roles with at least 20 lines")
    for client, own in enumerate(lines.values()):
        for part, expected in zip(split, (own[:12], own[12:16], own[16:]), strict=True):
            inputs, labels = shakespeare.windows(expected, length=6)
            np.testing.assert_array_equal(data.inputs[part[client]], inputs)
            np.testing.assert_array_equal(data.labels[part[client]], labels)
    assert sum(len(own) for part in split for own in part) == len(data.labels)
    with pytest.raises(InvalidInput, match=r"clients: got 4; allowed: a whole number from 1 to 3"):
        shakespeare.load(4, np.random.default_rng(0), least=20, length=6)
    with pytest.raises(
        InvalidInput, match=r"HYPERPUSH_DATA: got 'no such role'; allowed: plays with roles of at least 21"
    ):
        shakespeare.load(1, np.random.default_rng(0), least=21, length=6)


def test_bad_input_is_named(plays, monkeypatch):
    assert not shakespeare.available()
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got '.*plays: no plays'; allowed: a folder with plays"):
        shakespeare.roles()
    (plays / "play.txt").write_bytes(b"ACT I\n\nANN\t\xff\xfe\n")
    with pytest.raises(InvalidInput, match=r"play\.txt'; allowed: text in UTF-8"):
        shakespeare.roles()
    with pytest.raises(InvalidInput, match=r"stride: got 0"):
        shakespeare.windows(["abc"], stride=0)
    monkeypatch.delenv("HYPERPUSH_DATA")
    with pytest.raises(InvalidInput, match=r"HYPERPUSH_DATA: got None; .*shakespeare/plays/"):
        shakespeare.roles()


@pytest.mark.skipif(not os.environ.get("HYPERPUSH_DATA"), reason="HYPERPUSH_DATA is not set")
def test_hamlet_says_most_in_hamlet():
    if not shakespeare.available():
        pytest.skip("no plays in HYPERPUSH_DATA")
    found = shakespeare.roles()
    assert 380 < len(found) < 430
    own = {role.name: role.lines for role in found if role.play == "hamlet"}
    assert max(own, key=lambda name: len(own[name])) == "HAMLET"
    assert "To be, or not to be: that is the question:" in own["HAMLET"]
    assert own["HAMLET"][0] == "A little more than kin, and less than kind."
