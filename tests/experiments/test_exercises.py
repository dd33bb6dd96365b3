"""Cells that check an answer: what they say."""

import pytest

from hyfreedp.experiments.book import exercises


@pytest.mark.parametrize(
    ("answer", "truth", "said"),
    [
        (3.05, 3.0, "**Right.**"),
        (-3.07, -3.0, "**Not yet.** It is too low."),
        (1e-9, 0.0, "**Not yet.** It is too high."),
        (0, 0.0, "**Right.**"),
    ],
)
def test_what_is_said_of_an_answer(answer, truth, said, monkeypatch):
    shown = []
    monkeypatch.setattr(exercises, "display", shown.append)
    exercises.check(answer, lambda: truth)
    assert [markdown.data for markdown in shown] == [said]
