"""Texts as they are read and encoded: nothing lost, targets are exactly the reference, bad input is said clearly."""

import gzip
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from cases import together
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hyfreedp.experiments.data import texts
from hyfreedp.experiments.data.encoding import (
    IGNORED,
    VOCABULARY,
    check_tokenizer,
    encode_documents,
    encode_pairs,
    encode_prompts,
    load_tokenizer,
    public_texts,
    save_tokenizer,
    train_tokenizer,
)
from hyfreedp.experiments.data.grammar import Pair, pairs
from hyfreedp.experiments.data.texts import checksum_of, documents_from, e2e, restaurants
from hyfreedp.experiments.store.paths import CHECKPOINTS

COMMITTED = CHECKPOINTS / "sentences.tokenizer.json"
OURS = load_tokenizer()
REAL = Path(os.environ.get("HYFREEDP_DATA", "nowhere"))


def bare(**special):
    """Our vocabulary with other special tokens, or none."""
    return PreTrainedTokenizerFast(tokenizer_object=OURS.backend_tokenizer, **special)


GPT2_LIKE = bare(bos_token="<eos>", eos_token="<eos>")  # one special token, as GPT-2's tokenizer


# Data sets


def test_restaurants_are_what_the_constants_say():
    found = restaurants()
    assert (len(found.train), found.validation_start, len(found.test)) == (
        texts.RESTAURANTS_TRAIN,
        4800,
        texts.RESTAURANTS_TEST,
    )
    parts = found.train[: found.validation_start], found.train[found.validation_start :]
    training, validation = ({pair.meaning for pair in part} for part in parts)
    test = {meaning for meaning, _ in found.test}
    assert not (training & validation or training & test or validation & test)
    assert all(len(set(references)) == len(references) > 1 for _, references in found.test)


ROWS = [[f"name[{i % 7}], near[A, B]", f'He said "yes", £{i}, Café\nof {i}'] for i in range(25)]
TEST_ROWS = [["a", "1"], ["b", "2"], ["a", "3"]]


def as_csv(rows):
    return "\n".join(
        ["mr,ref", *(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)]
    ).encode()


@pytest.fixture
def fake_e2e(tmp_path, monkeypatch):
    """Contents of a small release by file name, expected in ``tmp_path``."""
    files = {"trainset.csv": as_csv(ROWS), "testset_w_refs.csv": as_csv(TEST_ROWS)}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(texts, "E2E_CHECKSUMS", sums)
    monkeypatch.setattr(texts, "E2E_TRAIN", 25)
    monkeypatch.setattr(texts, "E2E_TEST", 2)
    monkeypatch.setattr(texts, "E2E_VALIDATION_START", 21)
    monkeypatch.setenv("HYFREEDP_DATA", str(tmp_path))
    return files


@pytest.mark.parametrize("folder", ["e2e", "e2e-dataset"])
@pytest.mark.parametrize("packed", [True, False])
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


def test_e2e_says_what_is_missing_damaged_or_another(fake_e2e, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"^The E2E data set's trainset\.csv is not in HYFREEDP_DATA=.*: set "):
        e2e()
    (tmp_path / "e2e").mkdir()
    packed = tmp_path / "e2e" / "trainset.csv.gz"
    packed.write_bytes(gzip.compress(fake_e2e["trainset.csv"])[:-9])
    with pytest.raises(ValueError, match=r"trainset\.csv\.gz is damaged: "):
        e2e()
    packed.write_bytes(gzip.compress(b"mr,ref\n"))
    with pytest.raises(
        ValueError, match=r"trainset\.csv\.gz is damaged or another file: the SHA-256 of trainset\.csv is "
    ):
        e2e()
    packed.write_bytes(gzip.compress(fake_e2e["trainset.csv"]))
    with pytest.raises(FileNotFoundError, match=r"testset_w_refs\.csv is not in"):
        e2e()
    (tmp_path / "e2e" / "testset_w_refs.csv").write_bytes(fake_e2e["testset_w_refs.csv"])
    monkeypatch.setattr(texts, "E2E_TRAIN", 24)
    with pytest.raises(ValueError, match=r"E2E must have \(24, 21, 2\) .* got \(25, 21, 2\)"):
        e2e()
    monkeypatch.delenv("HYFREEDP_DATA")
    with pytest.raises(FileNotFoundError, match=r"is not on this machine \(HYFREEDP_DATA is not set\): set "):
        e2e()
    monkeypatch.setenv("HYFREEDP_DATA", str(packed))
    with pytest.raises(FileNotFoundError, match=r"HYFREEDP_DATA must name a folder of data sets, got "):
        e2e()


@pytest.mark.skipif(not (REAL / "e2e").is_dir(), reason="HYFREEDP_DATA has no E2E")
def test_the_real_e2e():
    found = e2e()
    assert (len(found.train), len(found.test)) == (42_061, 630)
    assert len({pair.meaning for pair in found.train}) == 4862
    assert sum(len(references) for _, references in found.test) == 4693
    tokens, labels = encode_pairs(OURS, found.train, 256)
    index = next(i for i, pair in enumerate(found.train) if "£" in pair.reference and "é" in pair.reference)
    assert (
        OURS.decode(labels[index][labels[index] != IGNORED], skip_special_tokens=True) == found.train[index].reference
    )
    assert tokens.shape == labels.shape


# Documents

DOCUMENTS = ["First one, of two lines.", "Zweites, mit Ümlaut."]


def parquet_of(table):
    """A stand-in for pandas' reader, which needs pyarrow."""
    return lambda path: table


def test_documents_of_every_kind_of_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n\nFirst one,\n of two lines.\n \n\nZweites, mit Ümlaut.", encoding="utf-8")
    lines = [json.dumps({"id": 1, "text": DOCUMENTS[0], "abstract": "no"}), "", json.dumps({"abstract": DOCUMENTS[1]})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(pd, "read_parquet", parquet_of(pd.DataFrame({"id": [1, 2, 3], "abstract": [*DOCUMENTS, " "]})))
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        assert documents_from(str(tmp_path / name)) == DOCUMENTS
        assert checksum_of(str(tmp_path / name)) == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_a_real_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    pd.DataFrame({"text": DOCUMENTS}).to_parquet(tmp_path / "a.parquet")
    assert documents_from(str(tmp_path / "a.parquet")) == DOCUMENTS
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"b\.parquet is not a readable parquet file: "):
        documents_from(str(tmp_path / "b.parquet"))


def test_a_name_is_read_by_datasets(monkeypatch):
    class Module:
        @staticmethod
        def load_dataset(name, split):
            if name != "some/name":
                raise FileNotFoundError("no such data set")
            assert split == "train"
            return type("Table", (), {"column_names": ["abstract"], "__getitem__": lambda self, name: DOCUMENTS})()

    monkeypatch.setitem(sys.modules, "datasets", Module)
    assert documents_from("some/name") == DOCUMENTS
    assert checksum_of("some/name") == "name:some/name"
    with pytest.raises(ValueError, match=r"the package datasets cannot load 'other/name': no such data set"):
        documents_from("other/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"'some/name' is no file \(\.txt, \.jsonl, \.parquet\), .*: pip install datasets"
    ):
        documents_from("some/name")


@together(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty: it must hold documents"),
        ("a.txt", b"\n \n", r"a\.txt has no document: every text in it is blank"),
        ("a.txt", b"good\n\xff", r"a\.txt must be UTF-8, byte 5 is not"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', r"line 2 of .*a\.jsonl is not JSON: "),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n["b"]',
            r'line 3 of .*a\.jsonl must be an object with the key "text" or "abstract"',
        ),
        ("a.jsonl", b'{"body": "a"}', r'line 1 of .*a\.jsonl must have "text" or "abstract", it has \'body\''),
        ("a.jsonl", b"{}", r'line 1 of .*a\.jsonl must have "text" or "abstract", it has nothing'),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}', r"every document of .*a\.jsonl must be a text, number 2 is None"),
        ("a.jsonl", b'{"text": " "}', r"a\.jsonl has no document: every text in it is blank"),
        ("a.csv", b"a,b", r"a\.csv must end in \.txt, \.jsonl, \.parquet to be read as documents"),
    ],
)
def test_bad_documents_are_one_clear_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents_from(str(tmp_path / name))


def test_folders_missing_files_and_a_missing_package(tmp_path, monkeypatch):
    for read in (documents_from, checksum_of):
        with pytest.raises(ValueError, match=r"is a folder: name a file of it \(\.txt, \.jsonl, \.parquet\)"):
            read(str(tmp_path))
        with pytest.raises(FileNotFoundError, match=r"a\.txt does not exist: it must be a file of documents"):
            read(str(tmp_path / "a.txt"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")

    def without_pyarrow(path):
        raise ImportError("pyarrow")

    monkeypatch.setattr(pd, "read_parquet", without_pyarrow)
    with pytest.raises(ValueError, match=r"to read .*a\.parquet the package pyarrow is needed: pip install pyarrow"):
        documents_from(str(tmp_path / "a.parquet"))
    monkeypatch.setattr(pd, "read_parquet", parquet_of(pd.DataFrame({"body": ["a"]})))
    with pytest.raises(ValueError, match=r'a\.parquet must have "text" or "abstract", it has \'body\''):
        documents_from(str(tmp_path / "a.parquet"))


# Tokenizer


@settings(max_examples=50)
@given(st.text())
def test_any_text_comes_back(text):
    ids = OURS(text, add_special_tokens=False)["input_ids"]
    assert OURS.decode(ids) == text
    assert not set(ids) & set(OURS.all_special_ids)


@together("text", ["<sep>", "a <pad><eos> b", "Café £20-25 ", " two  spaces .", "is n't , or"])
def test_special_tokens_in_a_text_are_text_and_nothing_is_cleaned_up(text):
    ids = OURS(text, add_special_tokens=False)["input_ids"]
    assert OURS.decode(ids) == text == OURS.decode(ids, skip_special_tokens=True)


def test_the_committed_tokenizer_is_what_the_code_makes(tmp_path):
    """It was made in another process, whose hash seed was random: the same vocabulary, in the same order."""
    save_tokenizer(train_tokenizer(public_texts(), VOCABULARY), tmp_path / "made.json")
    committed, made = (json.loads(path.read_text(encoding="utf-8")) for path in (COMMITTED, tmp_path / "made.json"))
    assert made["model"] == committed["model"] and made["added_tokens"] == committed["added_tokens"]
    assert len(OURS) == VOCABULARY
    assert OURS.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<sep>"]) == [0, 1, 2, 3]


def test_private_words_have_not_shaped_the_vocabulary():
    """Words of the private domain alone take several tokens, those of the public one a single token."""
    assert [len(OURS(f" {word}")["input_ids"]) for word in ("hotel", "museum", "visitor")] == [1, 1, 1]
    assert all(len(OURS(f" {word}")["input_ids"]) > 1 for word in ("Italian", "restaurant", "customer", "children"))


def test_saving_and_loading(tmp_path):
    made = train_tokenizer(["low lower lowest"] * 5, 265)
    save_tokenizer(made, tmp_path / "t.json")
    again = load_tokenizer(tmp_path / "t.json")
    assert again.get_vocab() == made.get_vocab() and len(again) == 265
    assert again("lower <sep>")["input_ids"] == made("lower <sep>")["input_ids"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    for content in ("", "{}", "[1]", '{"model": {"vocab": {}}}'):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(ValueError, match=r"t\.json is no tokenizer: "):
            load_tokenizer(tmp_path / "t.json")
    foreign = re.sub("<sep>", "<other>", COMMITTED.read_text(encoding="utf-8"))
    (tmp_path / "t.json").write_text(foreign)
    with pytest.raises(ValueError, match=r"t\.json is no tokenizer of this project: it has no <sep>"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"size must be at least 260, got 100"):
        train_tokenizer(["a"], 100)


def test_padding_is_the_pad_token_or_the_end_token():
    assert check_tokenizer(OURS) == 0
    assert check_tokenizer(GPT2_LIKE) == 2
    with pytest.raises(ValueError, match=r"neither a pad token nor an end-of-sequence token: set tokenizer\.pad_token"):
        check_tokenizer(bare(bos_token="<bos>"))
    with pytest.raises(ValueError, match=r"no end-of-sequence token: set tokenizer\.eos_token"):
        encode_pairs(bare(pad_token="<pad>"), [Pair("a", "b")], 10)


# Sequences


@together(("tool", "separator", "padding"), [(OURS, 3, 0), (GPT2_LIKE, 2, 2)])
def test_pairs_and_prompts_as_a_slow_twin_makes_them(tool, separator, padding):
    records = [*pairs("private", 40, seed=0), Pair("name[Ü]", "€"), Pair("", "a <eos> b")]
    tokens, labels = encode_pairs(tool, records, 256)
    ids, mask = encode_prompts(tool, [pair.meaning for pair in records])
    one = OURS.backend_tokenizer.encode
    rows = []
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


@together(("tool", "start", "padding"), [(OURS, 1, 0), (GPT2_LIKE, 2, 2)])
def test_documents_are_targets_but_for_what_begins_them(tool, start, padding):
    tokens, labels = encode_documents(tool, ["hotel hotel", "The hotel is in the old town."], 100)
    for row, marks, text in zip(
        tokens.tolist(), labels.tolist(), ["hotel hotel", "The hotel is in the old town."], strict=True
    ):
        ids = OURS(text)["input_ids"]
        rest = tokens.shape[1] - len(ids) - 2
        assert row == [start, *ids, 2] + [padding] * rest
        assert marks == [IGNORED, *ids, 2] + [IGNORED] * rest


def test_sequences_that_do_not_fit_or_say_nothing_are_refused():
    good, long = Pair("name[a]", "a"), Pair("name[a]", "a hotel " * 20)
    length = len(OURS(long.meaning + long.reference)["input_ids"]) + 2
    message = r"no pair may have more tokens than the context length, {}: number 2 has {}$"
    with pytest.raises(ValueError, match=message.format(length - 1, length)):
        encode_pairs(OURS, [good, long], length - 1)
    whole = encode_pairs(OURS, [good, long], length)
    assert whole[0].shape == (2, length)
    for part, kept in zip(encode_pairs(OURS, [good, long], length - 5, cut=True), whole, strict=True):
        assert torch.equal(part, kept[:, : length - 5])
    with pytest.raises(ValueError, match="no pair may have more tokens"):  # no target would be left
        encode_pairs(OURS, [good, long], len(OURS(long.meaning)["input_ids"]) + 1, cut=True)
    with pytest.raises(
        ValueError, match=r"no document may have more tokens than the context length, 3: number 1 has \d+$"
    ):
        encode_documents(OURS, ["a hotel in the old town"], 3)
    with pytest.raises(ValueError, match=r"every reference must have a token, that of pair 2 has none"):
        encode_pairs(OURS, [good, Pair("name[a]", "")], 100)
    with pytest.raises(ValueError, match=r"every document must have a token, number 1 has none"):
        encode_documents(OURS, [""], 100)
    for encode in (
        lambda: encode_pairs(OURS, [], 10),
        lambda: encode_documents(OURS, [], 10),
        lambda: encode_prompts(OURS, []),
    ):
        with pytest.raises(ValueError, match=r"there must be at least one text to encode, got none"):
            encode()
