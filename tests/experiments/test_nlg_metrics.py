"""The five scores against values by hand, and against the challenge's own where its example is at hand."""

import math
import os
import shutil
from pathlib import Path

import pytest

from hyfreedp.experiments.tasks import nlg_metrics
from hyfreedp.experiments.tasks.nlg_metrics import nist, scores

needs_java = pytest.mark.skipif(not shutil.which("java"), reason="needs Java")


@pytest.fixture
def without_java(monkeypatch):
    monkeypatch.setattr(nlg_metrics.shutil, "which", lambda name: None)


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


@pytest.mark.parametrize("more", [[], ["a b"], ["a b"] * 2, ["a b", "", ""], ["a b"] * 19])
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
def test_the_challenges_own_scores():
    folder = Path(os.environ.get("HYFREEDP_DATA", "")) / "e2e" / "metrics_example"
    if not folder.exists():
        pytest.skip("HYFREEDP_DATA has no e2e/metrics_example")
    references = (folder / "references.txt").read_text(encoding="utf-8").strip().split("\n\n")
    outputs = (folder / "outputs.txt").read_text(encoding="utf-8").splitlines()
    measured = scores([block.splitlines() for block in references], outputs)
    expected = {"BLEU": 0.7203, "NIST": 7.8212, "METEOR": 0.4801, "ROUGE_L": 0.7910, "CIDEr": 2.3039}
    assert measured == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
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
