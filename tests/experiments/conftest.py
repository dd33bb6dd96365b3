"""What tests of figures share."""

import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def figure_style():
    """The style of the notebooks, and no figure left open."""
    from hyfreedp.experiments.store import plots

    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")
