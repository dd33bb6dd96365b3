"""The five scores of the E2E challenge.

They agree with the challenge's scripts (Dusek, Novikova and Rieser 2020): BLEU and NIST are those of MT-Eval v13a, with
a variable number of references; METEOR, ROUGE-L and CIDEr those of the COCO caption evaluation, with its tokeniser. The
archives of METEOR 1.5 and of the tokeniser that pycocoevalcap contains are the challenge's, byte for byte.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest

import sacrebleu
from nltk import ngrams
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

LONGEST_NGRAM = 5
# Of NIST's length penalty, which is 1/2 for outputs of two thirds of the references' length.
PENALTY = -math.log(0.5) / math.log(1.5) ** 2


def scores(references: Sequence[Sequence[str]], outputs: Sequence[str]) -> dict[str, float | None]:
    """BLEU, NIST, METEOR, ROUGE_L and CIDEr of a system's outputs.

    Args:
        references: one or more texts for each instance.
        outputs: one text for each instance.

    Returns:
        The scores; METEOR, ROUGE_L and CIDEr are None without Java, which METEOR and the tokeniser of all three need.

    Raises:
        ValueError: not one output for each instance, no instance, or one without references.
    """
    if len(references) != len(outputs) or not outputs:
        raise ValueError(f"need one output for each instance, got {len(outputs)} for {len(references)}")
    if empty := [number for number, texts in enumerate(references, start=1) if not texts]:
        raise ValueError(f"every instance needs a reference, instance {empty[0]} has none")
    found: dict[str, float | None] = {"BLEU": bleu(references, outputs), "NIST": nist(references, outputs)}
    if not shutil.which("java"):
        return found | dict.fromkeys(("METEOR", "ROUGE_L", "CIDEr"))
    targets, candidates = _tokenized(references), _tokenized([[output] for output in outputs])
    return found | {
        "METEOR": _meteor(targets, candidates),
        "ROUGE_L": float(Rouge().compute_score(targets, candidates)[0]),
        "CIDEr": float(Cider().compute_score(targets, candidates)[0]),
    }


def bleu(references: Sequence[Sequence[str]], outputs: Sequence[str]) -> float:
    """BLEU of MT-Eval v13a, from 0 to 1, with n-grams of up to four words and its smoothing.

    sacrebleu counts n-grams. Its score would be 0 if nothing matches, or if no output has four words. As in the script,
    an n without matches is smoothed, and an n for which no output has n words counts as perfect.
    """
    streams = list(zip_longest(*references))  # sacrebleu wants None where an instance has fewer references
    found = sacrebleu.BLEU(lowercase=True, tokenize="13a").corpus_score(list(outputs), streams)
    if found.sys_len == 0:
        return 0.0
    logarithm, smooth = min(0.0, 1 - found.ref_len / found.sys_len), 1.0
    for hits, total in zip(found.counts, found.totals, strict=True):
        if total and not hits:
            smooth *= 2
        if total:
            logarithm += math.log((hits or 1 / smooth) / total) / len(found.totals)
    return math.exp(logarithm)


def nist(references: Sequence[Sequence[str]], outputs: Sequence[str]) -> float:
    """NIST of MT-Eval v13a (Doddington 2002) as the challenge uses it.

    The length that all outputs are held against is that of all references, divided by the mean number of references of
    an instance; empty ones do not count. (nltk's NIST compares each output with its best reference alone and gives
    other numbers.)
    """
    tokenize = Tokenizer13a()
    candidates = [tokenize(text.lower()).split() for text in outputs]
    targets = [[tokenize(text.lower()).split() for text in texts] for texts in references]
    everything = [tokens for texts in targets for tokens in texts if tokens]
    seen = Counter(gram for tokens in everything for n in range(1, LONGEST_NGRAM + 1) for gram in ngrams(tokens, n))
    seen[()] = words = sum(map(len, everything))
    length = sum(map(len, candidates)) * (len(everything) / len(targets)) / words if words else 0.0
    if length == 0:
        return 0.0
    score = 0.0
    for n in range(1, LONGEST_NGRAM + 1):
        information, total = 0.0, 0
        for tokens, texts in zip(candidates, targets, strict=True):
            allowed: Counter[tuple[str, ...]] = Counter()
            for text in texts:
                allowed |= Counter(ngrams(text, n))
            hits = Counter(ngrams(tokens, n)) & allowed
            information += sum(count * math.log2(seen[gram[:-1]] / seen[gram]) for gram, count in hits.items())
            total += max(len(tokens) - n + 1, 0)
        score += information / total if total else 0.0
    return score * math.exp(-PENALTY * math.log(min(length, 1.0)) ** 2)


def _meteor(targets: dict[int, list[str]], candidates: dict[int, list[str]]) -> float:
    scorer = Meteor()
    try:
        return float(scorer.compute_score(targets, candidates)[0])
    finally:
        with suppress(OSError), scorer.meteor_p as process:  # which closes its pipes, one of them perhaps broken
            process.kill()
        if scorer.lock.locked():  # after an error, and its destructor would wait for it
            scorer.lock.release()


def _tokenized(texts: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """Lower case, split like the Penn treebank, without punctuation."""
    return PTBTokenizer().tokenize({i: [{"caption": text} for text in group] for i, group in enumerate(texts)})
