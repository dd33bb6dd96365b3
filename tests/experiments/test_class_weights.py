"""The study of weights of classes: its tasks, and what chooses a rate."""

import pandas as pd
import pytest
import torch

from hyfreedp.experiments.data import bank
from hyfreedp.experiments.studies import class_weights as weights


@pytest.mark.parametrize("share", [0.24, 0.1])
def test_records_of_one_class_are_left_out_until_the_share_is_met(monkeypatch, share):
    x, y = torch.arange(1000.0)[:, None], (torch.arange(1000) % 8 == 0).long()  # 125 of 1,000
    monkeypatch.setattr(bank, "bank", lambda: (x, y))
    task = weights.Task("", lambda: bank.bank_with(share), share, 10, 1)
    chosen, labels = task.load()
    assert labels.double().mean().item() == pytest.approx(share, abs=1e-3)
    assert (labels.sum() == 125 or (1 - labels).sum() == 875) and len(chosen.unique()) == len(chosen)
    parts = [task.data(evaluation) for evaluation in ("test", "validation")]
    (whole, test), (train, validation) = ([part[0].flatten().tolist() for part in both] for both in parts)
    assert sorted(whole + test) == sorted(chosen.flatten().tolist())
    assert sorted(train + validation) == sorted(whole)
    assert len(test) == len(chosen) // 5 and len(validation) == len(whole) // 5


def test_rates_are_chosen_on_validation_data_alone_and_no_run_is_made_twice(monkeypatch, tmp_path):
    """The best rate is 0.01 on validation data and 0.1 on test data."""
    made = []

    def run_of(run):
        made.append(run)
        best = 0.01 if run[-1] == "validation" else 0.1
        return pd.DataFrame([dict(zip(weights.RUN, run, strict=True)) | {"balanced_accuracy": float(run[4] == best)}])

    monkeypatch.setattr(weights, "run_of", run_of)
    table = tmp_path / "weights.csv"
    rows = weights.record(table)
    tested = rows[rows.evaluation == "test"]
    ours = tested.contender.str.startswith("ours")
    assert set(tested.rate[ours]) == {0.0} and set(tested.rate[~ours]) == {0.01}
    assert len(made) == len(set(made)) == len(rows)
    del made[:]
    assert len(weights.record(table)) == len(rows) and not made


def test_largest_and_mean_of_the_weights_are_one():
    for share in (0.1, 0.24):
        shares = torch.tensor([1 - share, share])
        largest, mean = (weights.class_weights(share, kind) for kind in ("largest 1", "mean 1"))
        assert largest.max() == 1 and (shares * mean).sum().item() == pytest.approx(1)
        assert (shares * largest)[0].item() == pytest.approx((shares * largest)[1].item())
