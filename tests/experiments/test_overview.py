"""The overview diagram: noise stands between what is raw and what is private."""

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Annotation

from hyfreedp.experiments.book import overview

pytestmark = pytest.mark.usefixtures("figure_style")


def test_no_arrow_crosses_from_raw_to_private():
    """Black boxes stand on the border: what enters one is raw, what leaves it is not."""
    axes = overview.draw().axes[0]
    black = [
        patch.get_x() < overview.BORDER < patch.get_x() + patch.get_width()
        for patch in axes.patches
        if isinstance(patch, FancyBboxPatch) and patch.get_facecolor() == to_rgba(overview.NOISE)
    ]
    assert sum(black) == 3  # gradient, losses, votes; the fourth is the legend's
    arrows = [text for text in axes.texts if isinstance(text, Annotation)]
    assert len(arrows) > 15
    assert not any(arrow.xyann[0] < overview.BORDER < arrow.xy[0] for arrow in arrows)
