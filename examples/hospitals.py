"""Five hospitals train one model. Hospital D codes its labels the other way round; B has eight wrong records.

The audit names D, and in most seeds B, too: both are harmful by construction. No record leaves its
hospital. Run the demo with `make demo`; `--seed 1` assigns other records to the hospitals.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import hyperpush as hp

SHARES = {"A": 0.25, "B": 0.20, "C": 0.20, "D": 0.25, "E": 0.10}  # shares of the 569 records
TEST = 0.25  # share of a hospital's records that is held out; scores use these records with the right labels
PLANTED = 8  # number of B's training records with a wrong label; all of D's labels are swapped
CHECKED = 10  # training records per hospital with checked labels; hospital weights are learned on these records
L2, NETWORK = 0.01, hp.networks.Exponential(len(SHARES))


def deal(seed, plant=True):
    """Return training, checked and test records by hospital, and the row numbers of B's wrong records."""
    records, draw = load_breast_cancer(as_frame=True), np.random.default_rng(seed)
    frame = records.data.assign(benign=records.target)
    order, ends = draw.permutation(len(frame)), np.cumsum(list(SHARES.values()))
    train, checked, test = {}, {}, {}
    for name, rows in zip(SHARES, np.split(order, (ends[:-1] * len(order)).astype(int)), strict=True):
        held = int(TEST * len(rows))
        test[name], train[name] = frame.iloc[rows[:held]], frame.iloc[rows[held:]].reset_index(drop=True)
        checked[name] = train[name][:CHECKED].copy()
    wrong = draw.permutation(np.arange(CHECKED, len(train["B"])))[: PLANTED * plant]
    train["B"].loc[wrong, "benign"] ^= 1
    train["D"]["benign"] ^= int(plant)
    return train, checked, test, wrong


def split(frame):
    """Return the columns and the labels of a table."""
    return frame.drop(columns="benign"), frame["benign"].to_numpy()


def accuracy(predict, test):
    """Return the accuracy in percent, averaged over hospitals; `predict(name, columns)` returns labels."""
    return 100 * np.mean([np.mean(predict(name, split(own)[0]) == split(own)[1]) for name, own in test.items()])


def fit_alone(train, plant=True):
    """Fit one model per hospital. Predictions for D are converted from D's own label coding."""
    models = {}
    for name, own in train.items():
        models[name] = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (L2 * len(own)), max_iter=2000))
        models[name].fit(*split(own))
    return lambda name, columns: models[name].predict(columns) ^ int(plant and name == "D")


def pose(train, checked, seed):
    """Return a task of the hospitals' records with shared scaling, and a function from params to predictions."""
    # provides the scaling, the loss and the penalty
    plain = hp.tables.read(train, label="benign").task(NETWORK, key=seed, l2=L2)
    scale = plain.scaling.apply

    def examples(frames):
        mean = np.mean([len(own) for own in frames.values()])  # weighted so that all records count equally
        pairs = map(split, frames.values())
        return [(scale(x.to_numpy()), 1.0 * y, np.full(len(y), len(y) / mean)) for x, y in pairs]

    def penalty(params, hyper):
        return plain.penalty(params, jnp.log(L2))

    data = {"train": examples(train), "validation": examples(checked), "names": list(train)}
    start = jnp.zeros((1, data["train"][0][0].shape[1] + 1))
    task = hp.Task(inner=plain.inner, outer=plain.inner, penalty=penalty, params=start, hypers=0.0, **data)
    return task, lambda model: lambda name, x: (scale(x.to_numpy()) @ model[0, :-1] + model[0, -1] > 0).astype(int)


def train_without(task, removals, seed):
    """Train several models side by side, each without some hospitals and some of B's rows; return their params."""
    runs = [hp.influence.without(task, [("B", int(row)) for row in rows], names) for names, rows in removals]
    return hp.train(hp.influence.with_weights(task), hp.TreeNewton(), NETWORK, key=seed, runs=runs)


def learn_weights(task, seed):
    """Learn one weight per hospital by hypergradients that lower the mean loss on all hospitals' checked records."""

    def weighted(params, weight, batch):
        return 2 * jax.nn.sigmoid(weight) * task.inner(params, weight, batch)

    outer = hp.optimizer("adam", learning_rate=0.5)
    method = hp.PDBO(inner=hp.TreeNewton(), hypergradient=hp.TreeCG(), outer=outer, steps=10)
    return hp.solve(task.replace(inner=weighted), method, NETWORK, key=seed)


def main():
    """Assign records to hospitals, audit, compare models, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which records go where")
    parser.add_argument("--page", default="hospitals.html", help="the audit's page")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    train, checked, test, wrong = deal(given.seed)
    audit = hp.audit(hp.tables.read(train, label="benign"), NETWORK, key=given.seed, l2=L2, records=True)
    named = [each.party for each in audit.named]
    worst = [each for each in audit.records if each.party == "B"][:PLANTED]
    task, predict = pose(train, checked, given.seed)
    lines, others = [each.line for each in worst], [name for name in named if name != "B"]
    removals = [((), ()), (named, ()), (others, lines), (["D"], wrong)]
    models = train_without(task, removals, given.seed)
    together, dropped, cleaned, best = map(predict, np.asarray(models.params)[:, 0])
    learned = learn_weights(task, given.seed)
    rows = {
        "alone": fit_alone(train),
        "together": together,
        f"together, without {', '.join(named) or 'nobody'}, which the audit names": dropped,
        f"together, without {', '.join(others) or 'nobody'} and B's eight worst records": cleaned,
        "together, with weights learned by hypergradients": predict(np.asarray(learned.params)[0]),
        "if one knew which labels are wrong": best,
    }
    print("Test accuracy, %")
    for title, each in rows.items():
        print(f"  {accuracy(each, test):5.1f}  {title}")
    print("\nThe others' loss without a hospital, minus with it (below 0: it hurts; interval)")
    for row in audit.without:
        print(f"  {row.party}  {row.gain:+.3f}  ({row.low:+.3f} to {row.high:+.3f})  {row.verdict}")
    print("Named as harmful:", ", ".join(named) or "nobody")
    weights = 2 * jax.nn.sigmoid(learned.hypers)
    print("Learned weights:", ", ".join(f"{name} {own:.2f}" for name, own in zip(train, weights, strict=True)))
    planted = sum(each.line in wrong for each in worst)
    print(f"\nB's eight worst records ({planted} of them were planted)")
    for each in worst:
        print(f"  row {each.line:3}  {each.says}")
    print(f"\naudit: {audit.status}; {audit.costs}\nweights: {learned.status}; {learned.costs}")
    audit.plot().savefig(given.page.replace(".html", ".png"))
    print("page:", audit.page(given.page, overwrite=True))


if __name__ == "__main__":
    main()
