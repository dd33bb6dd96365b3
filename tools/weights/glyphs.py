"""Public pre-training data for small models: digits drawn with the fonts of matplotlib, none of them handwritten.

Images are made like scikit-learn's digits (Alpaydin and Kaynak, 1998): the digit is scaled to fill a bitmap of 32 x 32,
and the ones in each block of 4 x 4 are counted. No statistic of the real digits is used.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, map_coordinates
from tqdm import tqdm

CANVAS = 32
BLOCK = 4
SIDE = CANVAS // BLOCK  # of an image, in pixels
# Fonts with ordinary digits; the others, and DejaVu's "Display", have other symbols in their place, or none.
FAMILIES = ("DejaVu", "STIXGeneral", "cmb10", "cmr10", "cmss10", "cmti10", "cmtt10")


def fonts() -> list[Path]:
    """The font files, in a fixed order."""
    every = (Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("*.ttf")
    return sorted(path for path in every if path.stem.startswith(FAMILIES) and "Display" not in path.stem)


def glyphs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits in random fonts, strokes, slants, widths and wobbles.

    Args:
        count: number of images.

    Returns:
        Images, float32, shape (count, 64), in [0, 1] in steps of 1/16; and labels 0 to 9, int64, shape (count,), in
        random order and equal shares (the first ``count % 10`` digits have one more).
    """
    generator = np.random.default_rng(seed)
    layout = ImageFont.Layout.BASIC  # every build of Pillow has this one
    faces = [ImageFont.truetype(str(path), 2 * CANVAS, layout_engine=layout) for path in fonts()]
    labels = generator.permutation(np.arange(count) % 10)
    images = np.empty((count, SIDE * SIDE), dtype=np.float32)
    bar = tqdm(labels, desc="draw glyphs", unit="image", delay=1)
    for image, label in zip(images, bar, strict=True):
        bitmap = _bitmap(faces[generator.integers(len(faces))], str(label), generator)
        image[:] = bitmap.reshape(SIDE, BLOCK, SIDE, BLOCK).mean(axis=(1, 3)).ravel()
    return images, labels


def _bitmap(face: ImageFont.FreeTypeFont, text: str, generator: np.random.Generator) -> np.ndarray:
    """One character as zeros and ones, shape (CANVAS, CANVAS), scaled to fill its height (or width, if wide)."""
    side = 4 * CANVAS
    page = Image.new("L", (side, side))
    stroke = int(generator.integers(0, 4))  # pixels added to each side of a line
    ImageDraw.Draw(page).text((side / 2, side / 2), text, fill=255, font=face, anchor="mm", stroke_width=stroke)
    angle, shear = np.radians(generator.normal(0, 8)), generator.normal(0.1, 0.2)  # writing leans to the right
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    matrix = np.array([[1, shear], [0, 1]]) @ rotation
    pixels = _warped(np.asarray(page, dtype=np.float32), matrix, wobble=generator.normal(size=(2, side, side)))
    rows, columns = (np.flatnonzero((pixels > 127).any(axis=axis)) for axis in (1, 0))
    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    height, width = box[3] - box[1], (box[2] - box[0]) * generator.uniform(0.75, 1.25)
    scale = CANVAS / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    scaled = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR, box=box)
    canvas = Image.new("F", (CANVAS, CANVAS))
    canvas.paste(scaled, ((CANVAS - size[0]) // 2, (CANVAS - size[1]) // 2))
    return (np.asarray(canvas) > 127).astype(np.float32)


def _warped(pixels: np.ndarray, matrix: np.ndarray, wobble: np.ndarray) -> np.ndarray:
    """An image (H, W), transformed by a matrix (in row, column) about its centre, and by a smooth displacement.

    The displacement is white noise, ``wobble`` (2, H, W), smoothed and scaled to a standard deviation of H / 60 pixels.
    """
    height, width = pixels.shape
    smooth = np.stack([gaussian_filter(part, height / 12) for part in wobble])
    smooth *= height / 60 / smooth.std()
    centre = np.array([height, width]).reshape(2, 1, 1) / 2
    sources = np.einsum("ij,jhw->ihw", matrix, np.indices(pixels.shape) - centre) + centre + smooth
    return map_coordinates(pixels, sources, order=1)
