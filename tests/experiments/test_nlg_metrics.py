"""The five scores against values by hand, and against what the challenge's own scripts print."""

import shutil

import pytest

from hyfreedp.experiments.tasks import nlg_metrics
from hyfreedp.experiments.tasks.nlg_metrics import bleu, nist, scores

needs_java = pytest.mark.skipif(not shutil.which("java"), reason="needs Java")
NAMES = ("BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr")

SHORT = "Zest is a cheap pub."
LONG = (
    "Zest is a cheap family friendly Italian pub near the old mill by the river in the city centre, and it has a "
    "customer rating of five out of five."
)
MANY = [
    f"In the {place} there is a {kind} called Zest."
    for place in ("city centre", "old town", "riverside area", "north", "harbour")
    for kind in ("pub", "cheap pub", "coffee shop", "place to eat")
]
# References, outputs, and what the challenge's own scripts print for them: measure_scores.py of tuetschek/e2e-metrics,
# with mteval-v13a-sig.pl under Perl 5.36 for BLEU and NIST (four decimals), and its COCO caption evaluation, METEOR
# 1.5 and Stanford tokeniser under Java 17 for the others; "&" was written "&amp;" for the former.
OFFICIAL = {
    "short outputs": (
        [[LONG, "Zest, a cheap Italian pub near the old mill, welcomes families."], [LONG.replace("Zest", "Plum")]],
        [SHORT, "Plum is a pub near the old mill."],
        (0.0754, 0.0074, 0.17012, 0.43659, 0.22263),
    ),
    "one to twenty references": (
        [MANY, [SHORT], MANY[:7], ["Plum is in the city centre.", "The pub Plum is cheap."]],
        [
            "There is a cheap pub called Zest in the city centre.",
            "Zest is a pub.",
            "In the old town there is a pub called Zest, a cheap one.",
            "Plum is a cheap pub in the north of the city centre.",
        ],
        (0.5714, 4.6668, 0.50177, 0.78592, 3.58617),
    ),
    "empty references": (
        [[SHORT, "", "A cheap pub is Zest."], ["Plum is by the river.", ""]],
        ["Zest is a pub.", "Plum is a pub by the river."],
        (0.4002, 3.1359, 0.41326, 0.86529, 2.11417),
    ),
    "punctuation and case": (
        [
            [
                'It\'s a "family-friendly" CAFE (near M&M); prices: £20-25.',
                "It is kid-friendly, isn't it? Rated 3.5 out of 5...",
            ],
            ["The Café Zest costs 1,000 or less - don't miss it!"],
        ],
        ["it's a Family-Friendly cafe near M & M, prices: £20-25", "The café zest COSTS 1,000 or less: do n't miss it"],
        (0.5240, 4.2730, 0.59773, 0.87500, 6.14792),
    ),
}
official = pytest.mark.parametrize(("references", "outputs", "expected"), OFFICIAL.values(), ids=OFFICIAL)


@official
def test_bleu_and_nist_are_the_scripts(references, outputs, expected):
    assert (bleu(references, outputs), nist(references, outputs)) == pytest.approx(expected[:2], abs=5.1e-5)


@needs_java
@pytest.mark.slow
@official
def test_every_score_is_the_scripts(references, outputs, expected):
    assert scores(references, outputs) == pytest.approx(dict(zip(NAMES, expected, strict=True)), abs=5.1e-5)


def test_without_java_there_is_no_score_by_another_tokenizer(monkeypatch):
    monkeypatch.setattr(nlg_metrics.shutil, "which", lambda name: None)
    found = scores([["the cat on the mat"]], ["the cat sat on the mat"])
    assert [found[name] for name in NAMES[2:]] == [None] * 3 and found["BLEU"] > 0
