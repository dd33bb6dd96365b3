"""What is drawn on axes, as numbers."""

import numpy as np


def line(axis, label):
    """x and y of the line with this label."""
    (found,) = (one for one in axis.lines if one.get_label() == label)
    return np.asarray(found.get_xdata(), dtype=float), np.asarray(found.get_ydata(), dtype=float)


def bars(axis, label):
    """x, y, and the lower and upper ends of the error bars with this label."""
    (found,) = (one for one in axis.containers if one.get_label() == label)
    segments = np.array(found.lines[2][0].get_segments())
    return *(np.asarray(data, dtype=float) for data in found.lines[0].get_data()), segments.min(1), segments.max(1)
