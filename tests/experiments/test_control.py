"""The control of notebook 06: the paper's method by both accountings, from several first rates."""

import pytest

from hyfreedp.experiments.accounting_of_the_paper import SOUND, Counting
from hyfreedp.experiments.runs.spec import Spec
from hyfreedp.experiments.runs.train import make_run
from hyfreedp.experiments.studies import loss_noise


@pytest.mark.filterwarnings("ignore:split was made elsewhere")
def test_a_claimed_run_has_the_noise_of_algorithm_2_and_tells_what_it_really_spends():
    settings = {"task": "digits", "epsilon": 8.0, "interval": 5, "steps": 100}
    (claimed, _), (sound, _) = (make_run(Spec(method=method, **settings)) for method in ("paper_claimed", "paper"))
    assert sound.guarantee and claimed.guarantee == (claimed.split.epsilon <= 8)
    assert Counting("rdp", "independent").epsilon(claimed.split) == pytest.approx(8.0, rel=1e-5)
    assert claimed.split.epsilon == pytest.approx(SOUND.epsilon(claimed.split), rel=1e-6)
    bare, _ = make_run(Spec(method="paper_noiseless_losses", **settings))
    assert bare.split.sigma_gradient == claimed.split.sigma_gradient and not bare.guarantee
    assert bare.split.sigma_loss == claimed.split.sigma_loss / 1e6
    recorded = loss_noise.recorded().loc["digits, MLP", 8.0]
    assert 100 * claimed.split.sigma_loss / 500 == pytest.approx(recorded.claimed_percent, rel=1e-4)
    assert 100 * sound.split.sigma_loss / 500 == pytest.approx(recorded.sound_percent, rel=1e-4)
    free, _ = make_run(Spec(method="paper_claimed", **settings | {"epsilon": float("inf")}))
    assert free.split.sigma_loss == 0
