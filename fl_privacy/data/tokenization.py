"""From texts to numbers of tokens, by the package tokenizers."""

import importlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_privacy.data.vocabulary import Vocabulary
from fl_privacy.errors import UserError
from fl_privacy.extras import minilm_folder

TRAINED = ("wordpiece", "words", "bpe")
"""Tokenizers that are made of the training texts."""

_UNKNOWN, _FIRST, _LAST = "[UNK]", "[CLS]", "[SEP]"

_LONGEST_PART = 12
"""Characters of a part of a word; whole words may be longer."""


def build_tokenizer(name: str, texts: Sequence[str], size: int) -> Any:
    """A tokenizer of the package ``tokenizers``.

    Args:
        name: ``wordpiece`` (lower case, [CLS] and [SEP] around a text, as BERT), ``words`` (whole lower-case words) or
            ``bpe`` (bytes, as GPT-2), made of ``texts``; ``minilm``; a file ``tokenizer.json`` or the folder of one;
            or the name of one on the Hugging Face hub.
        texts: what the first three are made of.
        size: most tokens that these have.

    Raises:
        UserError: the package is missing, or there is no such tokenizer.
    """
    library = importlib.import_module("tokenizers")
    if name in TRAINED:
        return _trained(library, name, texts, size)
    file = minilm_folder() / "tokenizer.json" if name == "minilm" else Path(name).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        found = library.Tokenizer.from_file(str(file)) if file.is_file() else library.Tokenizer.from_pretrained(name)
    except Exception as error:  # what the library raises has no class of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"data.tokenizer is expected to be {', '.join(TRAINED)}, minilm, a tokenizer.json or a name of the Hugging"
            f" Face hub, but {name!r} can't be had: {reason}."
        ) from error
    found.no_padding()
    found.no_truncation()
    return found


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The tokens of a tokenizer, by number."""
    by_token = tokenizer.get_vocab(with_added_tokens=True)
    tokens = ["" for _ in range(max(by_token.values()) + 1)]
    for token, number in by_token.items():
        tokens[number] = token
    added = json.loads(tokenizer.to_str())["added_tokens"]
    special = {entry["id"] for entry in added if entry["special"] and entry["content"] != _UNKNOWN}
    return Vocabulary(tuple(tokens), frozenset(special))


def to_tokens(tokenizer: Any, texts: Sequence[str], max_length: int) -> Tensor:
    """(N, L) int32 tokens of ``texts``, at most ``max_length`` of each, the last one kept where it is special; -1 fills
    up."""
    tokenizer.enable_truncation(max_length)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    tokenizer.no_truncation()
    tokens = torch.full((len(rows), max(1, max(map(len, rows), default=1))), -1, dtype=torch.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return tokens


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
    words = _word_counts(tokenizer, texts)
    if name == "words":
        kept = sorted(words, key=lambda word: (-words[word], word))[: size - 1]
        tokenizer.model = library.models.WordLevel(_numbered([_UNKNOWN, *kept]), unk_token=_UNKNOWN)
        return tokenizer
    vocabulary = _numbered([_UNKNOWN, _FIRST, _LAST, *_word_pieces(words, size - 3)])
    tokenizer.model = library.models.WordPiece(vocabulary, unk_token=_UNKNOWN)
    tokenizer.add_special_tokens([_UNKNOWN, _FIRST, _LAST])
    ends = [(token, vocabulary[token]) for token in (_FIRST, _LAST)]
    tokenizer.post_processor = library.processors.TemplateProcessing(single=f"{_FIRST} $A {_LAST}", special_tokens=ends)
    return tokenizer


def _word_counts(tokenizer: Any, texts: Sequence[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for text in texts:
        normal = tokenizer.normalizer.normalize_str(text)
        found.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return found


def _word_pieces(words: Mapping[str, int], size: int) -> list[str]:
    """All characters, then the beginnings and the other parts of words that spare most characters' tokens.

    Those of the package's own trainer come in an order of chance, from which no run could be repeated.
    """
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

    def spared(part: str) -> tuple[int, str]:
        return -parts[part] * (len(part.removeprefix("##")) - 1), part

    base = sorted(characters, key=lambda part: (-characters[part], part))[:size]
    return [*base, *sorted(parts, key=spared)[: size - len(base)]]


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
