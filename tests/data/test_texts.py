"""Texts become tokens, and words again."""

import os
from pathlib import Path

import pytest
import torch

from fl_privacy.data import Dirichlet, Iid, Vocabulary, load_text
from fl_privacy.errors import UserError

pytest.importorskip("tokenizers")

GOOD = ["a fine film", "a warm and funny film", "fine acting , warm music", "funny , warm and fine", "a joy of a film"]
BAD = [
    "a dull film",
    "a dull and tired plot",
    "tired acting , dull music",
    "poor , dull and tired",
    "a waste of a film",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.txt").write_text("\n".join(GOOD))
    for number, text in enumerate(BAD):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / f"{number}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize("tokenizer", ["wordpiece", "words", "bpe"])
def test_texts_of_a_folder_are_read_as_they_are(folder: Path, tokenizer: str) -> None:
    data = load_text("text_folder", root=str(folder), tokenizer=tokenizer, vocabulary_size=300)
    assert (len(data.train), len(data.test), data.train.class_names) == (8, 2, ("bad", "good"))
    vocabulary = data.train.vocabulary  # type: ignore[attr-defined]
    batch = data.train.batch(torch.arange(8))
    assert {" ".join(vocabulary.words(row)) for row in batch.inputs.tolist()} <= {*GOOD, *BAD}
    assert batch.inputs.dtype == torch.long and bool((batch.inputs == -1).any())
    one = data.train.batch(torch.tensor([0]))
    assert bool((one.inputs >= 0).all()), "a batch is as wide as its longest text"
    for partition in (Iid(), Dirichlet(alpha=100.0)):
        parts = partition(data.train, num_clients=2, seed=0)
        assert sorted(torch.cat(parts).tolist()) == list(range(8))


@pytest.mark.parametrize("tokenizer", ["wordpiece", "words", "bpe"])
def test_the_same_texts_give_the_same_tokens(folder: Path, tokenizer: str) -> None:
    one, other = (
        load_text("text_folder", root=str(folder), vocabulary_size=270, tokenizer=tokenizer) for _ in range(2)
    )
    assert torch.equal(one.train.tokens, other.train.tokens)  # type: ignore[attr-defined]


def test_a_language_model_learns_each_next_token(folder: Path) -> None:
    data = load_text("text_folder", root=str(folder), tokenizer="words", target="next_token")
    batch = data.train.batch(torch.arange(8))
    assert torch.equal(batch.labels[:, :-1][batch.inputs[:, 1:] >= 0], batch.inputs[:, 1:][batch.inputs[:, 1:] >= 0])
    assert bool((batch.labels[:, -1] == -100).all())
    assert data.train.num_classes == len(data.train.vocabulary)  # type: ignore[attr-defined]


def test_long_texts_are_cut_off_and_keep_their_ends(folder: Path) -> None:
    data = load_text("text_folder", root=str(folder), max_length=4)
    last = data.train.vocabulary.tokens.index("[SEP]")  # type: ignore[attr-defined]
    assert data.train.input_shape == (4,)
    assert bool((data.train.batch(torch.arange(8)).inputs[:, 3] == last).any())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_among_texts_keeps_nobody_waiting(folder: Path) -> None:
    before = len(load_text("text_folder", root=str(folder), max_length=4).train)
    os.mkfifo(next(path for path in sorted(folder.rglob("*")) if path.is_dir()) / "a.txt")
    assert len(load_text("text_folder", root=str(folder), max_length=4).train) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "text_folder"}, "data.root"),
        ({"name": "text_folder", "tokenizer": "no/such/file.json"}, "data.tokenizer"),
        ({"name": "text_folder", "max_length": 1}, "max_length"),
        ({"name": "nothing_there"}, "data.name"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, settings: dict[str, object], said: str) -> None:
    root = {"root": str(folder)} if said in ("max_length", "data.tokenizer") else {}
    with pytest.raises(UserError, match=said):
        load_text(**settings, **root)  # type: ignore[arg-type]


def test_words_are_joined_of_their_parts() -> None:
    parts = Vocabulary(("[CLS]", "play", "##ing", "ball"), frozenset({0}))
    assert parts.words([0, 1, 2, 3, -1]) == ["playing", "ball"]
    marked = Vocabulary(("\u0120play", "ing", "\u0120ball"))
    assert marked.words([0, 1, 2]) == ["playing", "ball"]
    numbers = parts.word_numbers(torch.tensor([[1, 2, 3], [3, -1, -1]]))
    assert numbers.shape == (2, 2) and int(numbers[0, 1]) == int(numbers[1, 0]) and int(numbers[1, 1]) == -1
