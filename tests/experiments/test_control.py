"""The control of notebook 06: the paper's method by both accountings, from several first rates."""

import pandas as pd
import pytest

from hyfreedp.experiments.accounting_of_the_paper import SOUND, Counting
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.tables import control


@pytest.mark.filterwarnings("ignore:split was made elsewhere")
def test_a_claimed_run_has_the_noise_of_algorithm_2_and_tells_what_it_really_spends():
    settings = {"task": "digits", "epsilon": 8.0, "interval": 5, "steps": 100}
    (claimed, _), (sound, _) = (make_run(Spec(method=method, **settings)) for method in ("paper_claimed", "paper"))
    assert sound.guarantee and claimed.guarantee == (claimed.split.epsilon <= 8)
    assert Counting("rdp", "independent").epsilon(claimed.split) == pytest.approx(8.0, rel=1e-5)
    assert claimed.split.epsilon == pytest.approx(SOUND.epsilon(claimed.split), rel=1e-6)
    assert claimed.split.sigma_loss != sound.split.sigma_loss
    bare, _ = make_run(Spec(method="paper_noiseless_losses", **settings))
    assert bare.split.sigma_gradient == claimed.split.sigma_gradient and not bare.guarantee
    assert bare.split.sigma_loss == claimed.split.sigma_loss / 1e6
    free, _ = make_run(Spec(method="paper_claimed", **settings | {"epsilon": float("inf")}))
    assert free.split.sigma_loss == 0


def test_both_accountings_are_judged_from_the_papers_start_and_from_the_best():
    places = [{"task": task, "model": "m", "tuning": "full", "epsilon": 8.0} for task in "abc"]
    points = {1e-4: -20.0, 1e-3: -0.2, 1e-2: -5.0}
    rows = [
        place
        | {"method": method, "first_rate": rate, "points": gap + i / 100, "epsilon_true": 15.0 if claimed else 8.0}
        for method, claimed in (("paper_claimed", True), ("paper", False))
        for i, place in enumerate(places)
        for rate, gap in points.items()
    ]
    found = control.verdicts(pd.DataFrame(rows), "digits")
    assert [one.outcome for one in found] == ["fails here", "reproduced"] * 2
    assert "15.00 for 8" in found[0].number and "8.00 for 8" in found[2].number
    alone = control.verdicts(pd.DataFrame([row for row in rows if row["first_rate"] == 1e-4]), "digits")
    assert len(alone) == 2
