"""The five scores of the E2E challenge: ``python -m hyfreedp.experiments.tasks.nlg_metrics REFERENCES OUTPUTS``.

They agree with the challenge's own scripts (Dusek, Novikova and Rieser 2020): BLEU and NIST as MT-Eval v13a with a
variable number of references, METEOR, ROUGE-L and CIDEr as the COCO caption evaluation with its tokeniser.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path

import sacrebleu
from nltk.tokenize import TreebankWordTokenizer
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, PTBTokenizer
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

# Wrong encodings that the challenge repairs in tables.
MENDED = {"Ł": "£", "Â£": "£", "Ã©": "é", "ã©": "é"}
LONGEST_NGRAM = 5
# Of NIST's length penalty: one half where the output has two thirds of the references' length.
PENALTY = -math.log(0.5) / math.log(1.5) ** 2


def scores(references: Sequence[Sequence[str]], outputs: Sequence[str]) -> dict[str, float | None]:
    """BLEU, NIST, METEOR, ROUGE_L and CIDEr of a system's outputs.

    Args:
        references: for each instance, at least one text.
        outputs: one text for each instance.

    Returns:
        The scores; METEOR is None where there is no Java. ROUGE_L and CIDEr are then computed with an approximation of
        their tokeniser, which needs Java too.

    Raises:
        ValueError: other than one output for each instance, or no instance, or one without references.
    """
    if len(references) != len(outputs) or not outputs:
        raise ValueError(f"need one output for each instance, got {len(outputs)} for {len(references)}")
    if empty := [number for number, texts in enumerate(references, start=1) if not texts]:
        raise ValueError(f"every instance needs a reference, instance {empty[0]} has none")
    streams = list(zip_longest(*references))  # sacrebleu wants None where an instance has fewer references
    bleu = sacrebleu.BLEU(lowercase=True, tokenize="13a").corpus_score(list(outputs), streams).score / 100
    java = shutil.which("java") is not None
    targets = _tokenized(list(references), java)
    candidates = _tokenized([[output] for output in outputs], java)
    return {
        "BLEU": bleu,
        "NIST": nist(references, outputs),
        "METEOR": _meteor(targets, candidates) if java else None,
        "ROUGE_L": float(Rouge().compute_score(targets, candidates)[0]),
        "CIDEr": float(Cider().compute_score(targets, candidates)[0]),
    }


def nist(references: Sequence[Sequence[str]], outputs: Sequence[str]) -> float:
    """NIST of MT-Eval v13a (Doddington 2002) as the challenge uses it.

    Its script fills up instances that have fewer references than others with empty ones. The length that an output is
    held against is thus the length of all references divided by the *largest* number of references of an instance.
    (nltk's NIST compares each output with its best reference alone and gives other numbers.)
    """
    tokenize = Tokenizer13a()
    candidates = [tokenize(text.lower()).split() for text in outputs]
    targets = [[tokenize(text.lower()).split() for text in texts] for texts in references]
    seen = Counter(
        gram
        for tokens in (tokens for texts in targets for tokens in texts)
        for n in range(1, LONGEST_NGRAM + 1)
        for gram in _ngrams(tokens, n)
    )
    seen[()] = words = sum(len(tokens) for texts in targets for tokens in texts)
    score = 0.0
    for n in range(1, LONGEST_NGRAM + 1):
        information, total = 0.0, 0
        for tokens, texts in zip(candidates, targets, strict=True):
            allowed: Counter[tuple[str, ...]] = Counter()
            for text in texts:
                allowed |= Counter(_ngrams(text, n))
            hits = Counter(_ngrams(tokens, n)) & allowed
            information += sum(count * math.log2(seen[gram[:-1]] / seen[gram]) for gram, count in hits.items())
            total += max(len(tokens) - n + 1, 0)
        score += information / total if total else 0.0
    length = sum(map(len, candidates)) * max(map(len, targets)) / words
    if length == 0:
        return 0.0
    return score * math.exp(-PENALTY * math.log(min(length, 1.0)) ** 2)


def _meteor(targets: dict[int, list[str]], candidates: dict[int, list[str]]) -> float:
    scorer = Meteor()  # starts a Java process and leaves it to the garbage collector
    try:
        return float(scorer.compute_score(targets, candidates)[0])
    finally:
        with scorer.meteor_p as process:
            process.kill()


def _ngrams(tokens: list[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(tokens[start:] for start in range(n)), strict=False)


def _tokenized(texts: Sequence[Sequence[str]], java: bool) -> dict[int, list[str]]:
    """Lower case, split like the Penn treebank, without punctuation."""
    if java:
        return PTBTokenizer().tokenize({i: [{"caption": text} for text in group] for i, group in enumerate(texts)})
    split = TreebankWordTokenizer().tokenize
    return {
        i: [
            # That tokeniser parts a full stop from its word only at the end of the text.
            " ".join(word for word in split(re.sub(r"\.(?=\s)", " .", text.lower())) if word not in PUNCTUATIONS)
            for text in group
        ]
        for i, group in enumerate(texts)
    }


def read_references(path: Path) -> list[list[str]]:
    """References of each instance.

    A ``.csv`` or ``.tsv`` file has a meaning representation and a reference on each row; consecutive rows with the same
    one are one instance. Any other file has one reference on each line and an empty line between instances; without
    empty lines, each line is an instance of its own.
    """
    if _is_table(path):
        return [[text for _, text in rows] for _, rows in groupby(_read_table(path), key=lambda row: row[0])]
    lines = _read_lines(path)
    blocks = [list(block) for filled, block in groupby(lines, key=bool) if filled]
    return [[line] for line in blocks[0]] if len(blocks) == 1 else blocks


def read_outputs(path: Path) -> list[str]:
    """One output for each instance: the second column of a ``.csv`` or ``.tsv`` file, or the lines of any other."""
    return [text for _, text in _read_table(path)] if _is_table(path) else _read_lines(path)


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".tsv")


def _read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]


def _read_table(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",") if row]
    for number, row in enumerate(rows, start=1):
        if len(row) != 2:
            raise ValueError(f"{path}: need two columns, meaning representation and text; row {number} has {len(row)}")
    if rows and re.match("mr|src|source|meaning", rows[0][0].strip(), re.IGNORECASE) and "[" not in rows[0][0]:
        rows = rows[1:]
    return [(source.strip(), _mended(text.strip())) for source, text in rows]


def _mended(text: str) -> str:
    for wrong, right in MENDED.items():
        text = text.replace(wrong, right)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Read two files and print five scores; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyfreedp.experiments.tasks.nlg_metrics", description=__doc__)
    parser.add_argument("references", type=Path, help="text (an empty line between instances), .csv or .tsv")
    parser.add_argument("outputs", type=Path, help="text (one output on each line), .csv or .tsv")
    parser.add_argument("--json", action="store_true", help="print JSON; METEOR is null without Java")
    options = parser.parse_args(arguments)
    try:
        measured = scores(read_references(options.references), read_outputs(options.outputs))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if measured["METEOR"] is None:
        print(
            "no java found: METEOR is left out, and ROUGE_L and CIDEr use an approximation of their tokeniser, so that "
            "they may differ from the challenge's",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(measured))
    else:
        for name, value in measured.items():
            print(f"{name + ':':9}" + ("not available" if value is None else f"{value:.4f}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
