"""What the first experiment says, from results that are given to it."""

from hyperpush.runs import saved
from hyperpush.runs.run import execute
from hyperpush.studies.personalize import study as personalize
from hyperpush.studies.quickstart.config import EXPERIMENT

SCORES = {  # validation, test, each client's
    "local": (0.9, 0.50, [0.5, 0.5]),
    "sgp": (0.9, 0.60, [0.5, 0.7]),
    "pl": (0.8, 0.65, [0.7, 0.6]),
    "mtl": (0.7, 0.95, [1.0, 0.9]),
}


def test_the_recipe_is_chosen_on_validation_and_its_test_score_is_said(tmp_path, monkeypatch):
    def given(config, run):
        assert config.methods == tuple(SCORES)
        rows = [
            {"method": name, "validation_accuracy": validation, "accuracy": test, "accuracy_p10": min(each)}
            for name, (validation, test, each) in SCORES.items()
        ]
        return {"rows": rows, "details": [{"method": name, "clients": each} for name, (_, _, each) in SCORES.items()]}

    monkeypatch.setattr(personalize, "run", given)
    result, run = execute(EXPERIMENT, EXPERIMENT.config(), tmp_path / "run")
    assert result["best"] == "pl"  # though mtl happens to be better on the test examples
    assert "(PL) wins: 65.0 %" in result["sentence"]
    assert "1 clients gain, 1 lose, and the 10 % client goes from 50.0 % to 60.0 %" in result["sentence"]
    assert [path.name for path in run.figures] == ["before-and-after.png"]
    assert saved.load(tmp_path / "run").result["best"] == "pl"
