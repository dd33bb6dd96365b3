"""The overview diagram: large enough to project, texts in boxes, constants of the presets."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Annotation

from hyfreedp import PRESETS
from hyfreedp.experiments.book import overview
from hyfreedp.votes import OPENING, PEAK, REVIEWS


@pytest.fixture
def figure():
    with plt.rc_context():
        figure = overview.draw()
        figure.canvas.draw()
        yield figure
        plt.close(figure)


def texts(figure):
    return [text for text in figure.axes[0].texts if text.get_text()]


def test_text_is_large_enough_to_project(figure):
    assert figure.get_size_inches()[0] == 10
    assert min(text.get_fontsize() for text in texts(figure)) >= 9


def test_no_text_leaves_its_box_or_overlaps_another(figure):
    renderer = figure.canvas.get_renderer()
    boxes = [patch.get_window_extent() for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    areas = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)]
    page = figure.bbox
    for name, area in areas:
        assert page.x0 < area.x0 and area.x1 < page.x1 and page.y0 < area.y0 and area.y1 < page.y1, name
        for box in boxes:
            inside = box.x0 < area.x0 and area.x1 < box.x1 and box.y0 < area.y0 and area.y1 < box.y1
            assert inside or not box.overlaps(area), f"{name!r} crosses the edge of a box"
    for index, (name, area) in enumerate(areas):
        for other, second in areas[index + 1 :]:
            assert not area.overlaps(second), f"{name!r} overlaps {other!r}"


def test_constants_are_those_of_the_presets(figure):
    shown = " ".join(text.get_text().replace("\n", " ") for text in texts(figure))
    for name in ("paper", "robust"):
        assert f"{PRESETS[name].gamma:g}$ ({name})" in shown
    assert f"every {PRESETS['paper'].interval} steps" in shown
    assert f"after {OPENING} steps, then {len(REVIEWS)} times up to {REVIEWS[-1]:.0%} of the run" in shown
    assert (
        f"start ${PEAK:g}/\\sqrt{{T}}$, {PRESETS['robust'].decay} decay" in shown and PRESETS["robust"].decay_start == 0
    )


def test_no_arrow_crosses_from_raw_to_private(figure):
    """Black boxes stand on the border: what enters one is raw, what leaves it is not."""
    axes = figure.axes[0]
    black = [
        patch.get_x() < overview.BORDER < patch.get_x() + patch.get_width()
        for patch in axes.patches
        if isinstance(patch, FancyBboxPatch) and patch.get_facecolor() == to_rgba(overview.NOISE)
    ]
    assert sum(black) == 3  # gradient, losses, votes; the fourth is the legend's
    arrows = [text for text in axes.texts if isinstance(text, Annotation)]
    assert len(arrows) > 15
    assert not any(arrow.xyann[0] < overview.BORDER < arrow.xy[0] for arrow in arrows)
