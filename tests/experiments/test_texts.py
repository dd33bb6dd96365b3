"""Texts as they are read and encoded: nothing lost, targets are exactly the reference."""

import gzip
import hashlib
import json

import pytest
import torch
from grammar import pairs, public_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hyfreedp.experiments.data import texts
from hyfreedp.experiments.data.encoding import IGNORED, encode, encode_prompts, own_tokenizer
from hyfreedp.experiments.data.texts import Pair, checksum_of, documents_from, e2e
from hyfreedp.experiments.store.paths import CHECKPOINTS

COMMITTED, OURS = CHECKPOINTS / "sentences.tokenizer.json", own_tokenizer()


def bare(**special):
    """Our vocabulary with other special tokens, or none."""
    return PreTrainedTokenizerFast(tokenizer_object=OURS.backend_tokenizer, **special)


GPT2_LIKE = bare(bos_token="<eos>", eos_token="<eos>")  # one special token, as GPT-2's tokenizer


ROWS = [[f"name[{i % 7}], near[A, B]", f'He said "yes", £{i}, Café\nof {i}'] for i in range(25)]
TEST_ROWS = [["a", "1"], ["b", "2"], ["a", "3"]]


def as_csv(rows):
    lines = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    return "\n".join(["mr,ref", *lines]).encode()


@pytest.fixture
def fake_e2e(tmp_path, monkeypatch):
    """Contents of a small release by file name, expected in ``tmp_path``."""
    files = {"trainset.csv": as_csv(ROWS), "testset_w_refs.csv": as_csv(TEST_ROWS)}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(texts, "E2E_CHECKSUMS", sums)
    monkeypatch.setenv("HYFREEDP_DATA", str(tmp_path))
    return files


@pytest.mark.parametrize(("folder", "packed"), [("e2e", True), ("e2e-dataset", False)])
def test_e2e_reads_every_row_and_keeps_meanings_together(fake_e2e, tmp_path, folder, packed):
    (tmp_path / folder).mkdir()
    for name, content in fake_e2e.items():
        if packed:
            (tmp_path / folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / folder / name).write_bytes(content)
    found = e2e()
    assert sorted((pair.meaning, pair.reference) for pair in found.train) == sorted(map(tuple, ROWS))
    assert found.test == [("a", ["1", "3"]), ("b", ["2"])]
    meanings = [pair.meaning for pair in found.train]
    assert meanings != [row[0] for row in ROWS]
    assert not set(meanings[: found.validation_start]) & set(meanings[found.validation_start :])


DOCUMENTS = ["First one, of two lines.", "Zweites, mit Ümlaut."]


def test_documents_are_read_from_both_kinds_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("\n\nFirst one,\n of two lines.\n \n\nZweites, mit Ümlaut.", encoding="utf-8")
    lines = [json.dumps({"id": 1, "text": DOCUMENTS[0], "abstract": "no"}), "", json.dumps({"abstract": DOCUMENTS[1]})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    for name in ("a.txt", "a.jsonl"):
        assert documents_from(str(tmp_path / name)) == DOCUMENTS
        assert checksum_of(str(tmp_path / name)) == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


CHARACTERS = st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr)


@settings(max_examples=20)
@given(st.text(CHARACTERS))
def test_any_text_comes_back(text):
    ids = OURS(text, add_special_tokens=False)["input_ids"]
    assert OURS.decode(ids) == text
    assert not set(ids) & set(OURS.all_special_ids)


def test_the_committed_tokenizer_is_what_the_code_makes():
    """Of public texts alone, in another process, whose hash seed was random: the same vocabulary, in the same order."""
    made = json.loads(public_tokenizer().backend_tokenizer.to_str())
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert made["model"] == committed["model"] and made["added_tokens"] == committed["added_tokens"]
    assert len(OURS) == 600
    assert OURS.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<sep>"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(("tool", "separator", "padding"), [(OURS, 3, 0), (GPT2_LIKE, 2, 2)])
def test_pairs_and_prompts_as_a_slow_twin_makes_them(tool, separator, padding):
    records = [*pairs("private", 40, seed=0), Pair("name[Ü]", "€"), Pair("", "a <eos> b")]
    tokens, labels = encode(tool, records, 256)
    ids, mask = encode_prompts(tool, [pair.meaning for pair in records])
    one, rows = OURS.backend_tokenizer.encode, []
    for pair in records:
        prompt, target = [*one(pair.meaning).ids, separator], [*tool(pair.reference)["input_ids"], 2]
        rows.append((prompt, target))
    longest, longest_prompt = max(len(p) + len(t) for p, t in rows), max(len(p) for p, _ in rows)
    assert tokens.shape == labels.shape == (42, longest) and ids.shape == mask.shape == (42, longest_prompt)
    for i, (prompt, target) in enumerate(rows):
        rest = longest - len(prompt) - len(target)
        assert tokens[i].tolist() == prompt + target + [padding] * rest
        assert labels[i].tolist() == [IGNORED] * len(prompt) + target + [IGNORED] * rest
        left = longest_prompt - len(prompt)
        assert ids[i].tolist() == [padding] * left + prompt
        assert mask[i].tolist() == [0] * left + [1] * len(prompt)
    assert {tensor.dtype for tensor in (tokens, labels, ids, mask)} == {torch.int64}
