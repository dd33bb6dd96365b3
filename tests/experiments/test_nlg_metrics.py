"""The five scores against values by hand, and against the challenge's own where its example is at hand."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import together

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
    "long outputs": (
        [[SHORT, "Zest is a pub."], ["Plum is a cheap restaurant by the river."]],
        [LONG, LONG.replace("Zest", "Plum")],
        (0.0949, 0.7899, 0.29941, 0.36966, 0.00131),
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
    "no match": (
        [["Zest serves food.", "Eat at Zest."], ["Plum is by the river."]],
        ["cheap coffee nearby", "ask again tomorrow"],
        (0.0690, 0.0, 0.0, 0.0, 0.0),
    ),
    "repeated words": (
        [
            ["the pub is the best pub in the city", "a pub in the city"],
            ["Plum is by the river , Plum is cheap ."],
        ],
        ["the the the pub pub pub pub", "Plum Plum Plum is is cheap cheap . . ."],
        (0.1108, 2.3269, 0.26868, 0.44687, 1.43522),
    ),
    "punctuation and case": (
        [
            [
                'It\'s a "family-friendly" CAFE (near M&M); prices: £20-25.',
                "It is kid-friendly, isn't it? Rated 3.5 out of 5...",
            ],
            ["The Café Zest costs 1,000 or less - don't miss it!"],
        ],
        [
            "it's a Family-Friendly cafe near M & M, prices: £20-25",
            "The café zest COSTS 1,000 or less: do n't miss it",
        ],
        (0.5240, 4.2730, 0.59773, 0.87500, 6.14792),
    ),
    "one word": (
        [["Zest"], ["Plum is by the river.", "Plum"]],
        ["Zest.", "Plum"],
        (0.7598, 0.4128, 1.0, 1.0, 2.09881),
    ),
    "an empty output": (
        [[SHORT], ["Plum is by the river.", "By the river there is Plum."]],
        ["", "Plum is by the river."],
        (0.3679, 0.4135, 0.49046, 0.5, 3.50489),
    ),
    "stems and synonyms": (
        [
            ["Families like dining at the restaurants nearby.", "It is a highly rated inexpensive restaurant."],
            ["The pub serves excellent food."],
        ],
        ["A family likes to dine at a nearby restaurant.", "The pubs are serving great foods."],
        (0.0700, 1.5909, 0.19011, 0.22031, 0.28030),
    ),
}
official = pytest.mark.parametrize(("references", "outputs", "expected"), OFFICIAL.values(), ids=OFFICIAL)


@pytest.fixture
def without_java(monkeypatch):
    monkeypatch.setattr(nlg_metrics.shutil, "which", lambda name: None)


@official
def test_bleu_and_nist_are_the_scripts(references, outputs, expected):
    assert (bleu(references, outputs), nist(references, outputs)) == pytest.approx(expected[:2], abs=5.1e-5)


@needs_java
@pytest.mark.slow
@official
def test_every_score_is_the_scripts(references, outputs, expected):
    assert scores(references, outputs) == pytest.approx(dict(zip(NAMES, expected, strict=True)), abs=5.1e-5)


def test_bleu_by_hand(without_java):
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples and 1 of 3 quadruples are in the reference, which is as long.
    measured = scores([["The cat sat on a mat"]], ["the cat sat on the mat"])
    assert measured["BLEU"] == pytest.approx((5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4), rel=1e-12)


def test_bleu_takes_the_closest_of_a_variable_number_of_references(without_java):
    measured = scores([["a b c d e f", "a b c d"], ["a b c d e"]], ["a b c d", "a b c d"])
    assert measured["BLEU"] == pytest.approx(math.exp(1 - 9 / 8), rel=1e-12)


def test_nist_by_hand():
    # 4 words in the references: a twice, b and c once. Information: a 1 bit, b 2 bits, b after a 1 bit.
    assert nist([["a b", "a c"]], ["a b"]) == pytest.approx((1 + 2) / 2 + 1)
    # Two thirds of the length: half the score (that of a and b alone, as nothing else matches).
    third = nist([["a b c"]], ["a b"])
    assert third == pytest.approx(0.5 * ((math.log2(3) + math.log2(3)) / 2 + 0))


@together("more", [[], ["a b"], ["a b"] * 2, ["a b", "", ""], ["a b"] * 19])
def test_nist_holds_the_length_against_the_mean_number_of_references(more):
    """2 n + 4 words in n + 1 references of two instances: (2 n + 4) / ((n + 1) / 2) words are expected."""
    references, outputs = [["a b", *more], ["c d e f"]], ["a b", "c d e"]
    count = 1 + sum(map(bool, more))
    expected = (2 * count + 4) / ((count + 1) / 2)
    ratio = min(1.0, 5 / expected)
    penalty = math.exp(math.log(0.5) * (math.log(ratio) / math.log(1.5)) ** 2)
    assert nist(references, outputs) == pytest.approx(penalty * information(references, outputs), rel=1e-12)


def information(references, outputs):
    """NIST before its penalty, slow and obvious: bits of the matched n-grams, per n-gram of the outputs."""
    corpus = [text.split() for texts in references for text in texts]
    total = 0.0
    for n in range(1, 6):
        bits, count = 0.0, 0
        for texts, output in zip(references, outputs, strict=True):
            grams = [tuple(output.split()[i : i + n]) for i in range(len(output.split()) - n + 1)]
            count += len(grams)
            for gram in set(grams):
                there = max(occurrences(gram, text.split()) for text in texts)
                everywhere = sum(occurrences(gram, words) for words in corpus)
                before = sum(occurrences(gram[:-1], words) if n > 1 else len(words) for words in corpus)
                if there:
                    bits += min(grams.count(gram), there) * math.log2(before / everywhere)
        total += bits / count if count else 0.0
    return total


def occurrences(gram, words):
    return sum(tuple(words[i : i + len(gram)]) == gram for i in range(len(words) - len(gram) + 1))


def test_nist_of_nothing_is_zero():
    assert nist([["a b"]], [""]) == 0.0 and nist([[""]], ["a"]) == 0.0


def test_rouge_by_hand(without_java):
    # The longest common subsequence is "the cat on the mat": 5 of 6 words of the output, 5 of 5 of the reference.
    precision, recall, beta = 5 / 6, 1.0, 1.2
    expected = (1 + beta**2) * precision * recall / (recall + beta**2 * precision)
    assert scores([["the cat on the mat"]], ["the cat sat on the mat."])["ROUGE_L"] == pytest.approx(expected)


def test_cider_by_hand(without_java):
    """An output equal to its reference has cosine 1 for every n, and CIDEr is ten times their mean."""
    texts = ["one two three four five", "six seven eight nine ten"]
    assert scores([[text] for text in texts], texts)["CIDEr"] == pytest.approx(10)
    assert scores([[text] for text in texts], texts[::-1])["CIDEr"] == pytest.approx(0)


@needs_java
@pytest.mark.slow
def test_meteor_by_hand():
    """METEOR 1.5 for English: alpha 0.85, beta 0.2, gamma 0.6 (Denkowski and Lavie 2014, Tab. 1); all content words."""
    precision, recall = 3 / 4, 1.0
    mean = precision * recall / (0.85 * precision + 0.15 * recall)
    penalty = 0.6 * (1 / 3) ** 0.2  # one chunk of three matches
    measured = scores([["cat dog bird"]], ["cat dog bird fish"])
    assert measured["METEOR"] == pytest.approx(mean * (1 - penalty), abs=1e-4)


@needs_java
@pytest.mark.slow
def test_one_java_process_serves_all_texts_until_it_is_interrupted(monkeypatch):
    texts = {0: ["the cat on the mat"]}, {0: ["the cat sat on the mat"]}
    first = nlg_metrics._meteor(*texts)
    process = nlg_metrics._meteor_process()
    assert nlg_metrics._meteor(*texts) == first and nlg_metrics._meteor_process() is process

    def interrupted(*_):
        process.meteor_p.stdin.write(b"SCORE ||| a ||| b\n")  # whose answer nobody reads
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_stat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nlg_metrics._meteor(*texts)
    assert nlg_metrics._meteor(*texts) == first and nlg_metrics._meteor_process() is not process


@pytest.mark.whole
def test_a_java_process_that_dies_is_an_error_and_no_wait(tmp_path, monkeypatch):
    """Of one that answers once and ends; in a process of its own, which would otherwise wait at its end."""
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\nread line; echo 1 2 3\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    texts = {number: ["the cat"] for number in range(1000)}
    code = f"from hyfreedp.experiments.tasks import nlg_metrics; nlg_metrics._meteor({texts}, {texts})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Error" in done.stderr.splitlines()[-1], done.stderr


@needs_java
@pytest.mark.slow
def test_the_challenges_own_scores():
    folder = Path(os.environ.get("HYFREEDP_DATA", "")) / "e2e" / "metrics_example"
    if not folder.exists():
        pytest.skip("HYFREEDP_DATA has no e2e/metrics_example")
    references = (folder / "references.txt").read_text(encoding="utf-8").strip().split("\n\n")
    outputs = (folder / "outputs.txt").read_text(encoding="utf-8").splitlines()
    measured = scores([block.splitlines() for block in references], outputs)
    expected = {"BLEU": 0.7203, "NIST": 7.8212, "METEOR": 0.4801, "ROUGE_L": 0.7910, "CIDEr": 2.3039}
    assert measured == pytest.approx(expected, abs=5e-5)


@together(
    ("references", "outputs", "message"),
    [
        ([["a"], ["b"]], ["a"], "need one output for each instance, got 1 for 2"),
        ([], [], "need one output for each instance, got 0 for 0"),
        ([["a"], []], ["a", "b"], "every instance needs a reference, instance 2 has none"),
    ],
)
def test_texts_that_do_not_match_raise(references, outputs, message):
    with pytest.raises(ValueError, match=message):
        scores(references, outputs)
