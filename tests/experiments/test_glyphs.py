"""Rendered digits: in the form of scikit-learn's, reproducible, and truly ten different ones in every font."""

import numpy as np
from cases import together
from glyphs import fonts, glyphs
from PIL import Image, ImageDraw, ImageFont


def test_images_have_the_form_of_scikit_learns_digits():
    images, labels = glyphs(100, seed=0)
    assert images.shape == (100, 64) and images.dtype == np.float32 and labels.dtype == np.int64
    assert images.min() == 0 and images.max() == 1
    assert np.array_equal(images * 16, np.round(images * 16))
    assert np.array_equal(np.bincount(labels), [10] * 10)
    # Each fills the height or the width of its 8 x 8 pixels.
    ink = images.reshape(-1, 8, 8) > 0
    rows, columns = ink.any(axis=2), ink.any(axis=1)
    assert np.all((rows[:, 0] & rows[:, -1]) | (columns[:, 0] & columns[:, -1]))


@together("path", fonts())
def test_every_font_has_ten_different_digits_that_look_like_those_of_another(path):
    """A font of symbols would be no nearer to DejaVu's digits with the right label than with a wrong one."""

    def drawn(file):
        face = ImageFont.truetype(str(file), 48)
        pages = []
        for digit in range(10):
            page = Image.new("L", (64, 64))
            ImageDraw.Draw(page).text((32, 32), str(digit), fill=255, font=face, anchor="mm")
            pages.append(np.asarray(page.crop(page.getbbox()).resize((16, 16)), dtype=float).ravel())
        return np.array(pages)

    reference = next(file for file in fonts() if file.stem == "DejaVuSans")
    ours, theirs = drawn(path), drawn(reference)
    distances = np.linalg.norm(ours[:, None] - theirs, axis=2)
    assert (distances.argmin(axis=1) == np.arange(10)).sum() >= 6
    assert len({page.tobytes() for page in ours}) == 10
