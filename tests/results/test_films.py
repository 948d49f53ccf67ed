"""Films as a run's folder keeps them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from fl_privacy.runs.folder import Attacker
from fl_privacy.runs.folder.pictures import TextFilm, film_of, read_films, write_films
from fl_privacy.types import Batch, Reconstruction
from fl_privacy.types.film import Frame, TextFrame
from tests.report.kinds import text_score
from tests.results.runs import score


def filmed(victim=0, frames=5):
    one = score(1, victim, noise=0.1)
    film = tuple(Frame(at, (one.originals[0] * 255 * at / frames).byte()) for at in range(frames))
    found = Reconstruction(id=one.id, batch=Batch(one.guesses, torch.zeros(1)), member="x", film=film)
    return film_of(found, one, list)


def test_films_come_back_as_they_were_and_are_their_owners(tmp_path):
    films = [filmed(0), filmed(1, frames=3)]
    (path,) = write_films(tmp_path / "reconstructions", films)
    write_films(tmp_path / "reconstructions", films[:1], Attacker.ADAPTIVE)
    assert path.stat().st_mode & 0o077 == 0
    found, problems = read_films(tmp_path / "reconstructions")
    assert not problems and [len(found[a]) for a in (Attacker.PLAIN, Attacker.ADAPTIVE)] == [2, 1]
    for one, other in zip(found[Attacker.PLAIN], films, strict=True):
        assert (one.id, one.image, one.member, one.at) == (other.id, other.image, other.member, other.at)
        assert all(np.array_equal(a, b) for a, b in zip(one.frames, other.frames, strict=True))


def test_more_films_than_two_digits_number_stay_whose_they_are(tmp_path):
    films = [
        replace(filmed(), id=f"round-1/client-{k}", frames=(np.full((1, 2, 2), k, np.uint8),) * 5) for k in range(102)
    ]
    write_films(tmp_path, films)
    found, _ = read_films(tmp_path)
    assert [(one.id, one.frames[0][0, 0, 0]) for one in found[Attacker.PLAIN]] == [
        (f"round-1/client-{k}", k) for k in range(102)
    ]


def test_what_was_not_filmed_or_not_matched_has_no_film():
    one = score(1, 0, noise=0.1)
    assert film_of(Reconstruction(id=one.id, batch=Batch(one.guesses, torch.zeros(1))), one, list) is None
    failed = score(1, 0, noise=0.1, failure="why")
    film = (Frame(0, torch.zeros(1, 2, 2, dtype=torch.uint8)),)
    assert film_of(Reconstruction(id=failed.id, batch=None, film=film), failed, list) is None


FRAMES = np.zeros((2, 1, 4, 4), np.uint8)
TOLD = '{"attacker": "plain", "films": [{"id": "round-1/client-0", "image": 0, "member": "", "at": [0, 1]}]}'


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"film-00": FRAMES}, None),
        ({"film-00": FRAMES}, "no JSON"),
        ({"film-00": FRAMES}, TOLD.replace("plain", "nobody")),
        ({"film-00": FRAMES}, TOLD.replace("[0, 1]", "[0]")),
        ({"film-00": FRAMES}, TOLD.replace("[0, 1]", "[0, -1]")),
        ({"film-00": FRAMES}, TOLD.replace('"image": 0', '"image": "0"')),
        ({"film-00": FRAMES.astype(np.float32)}, TOLD),
        ({"film-00": FRAMES[:, 0]}, TOLD),
        ({"film-00": FRAMES, "film-01": FRAMES}, TOLD),
        ({"film-00": np.zeros((200, 1, 1, 1), np.uint8)}, TOLD),
        ({"film-00": np.zeros((2, 1, 999, 1), np.uint8)}, TOLD),
        ({"film-01": FRAMES}, TOLD),
    ],
)
def test_a_damaged_film_is_told_in_a_line(tmp_path, tensors, told):
    save_file(tensors, tmp_path / "film-0001-plain.safetensors", None if told is None else {"told": told})
    found, problems = read_films(tmp_path)
    assert not found and len(problems) == 1 and "film-0001-plain.safetensors can't be read" in problems[0]


def filmed_text(victim=0):
    one = text_score(victim, right=3)
    film = tuple(TextFrame(at, torch.tensor([1, 2 + at, -1])) for at in range(4))
    found = Reconstruction(id=one.id, batch=Batch(one.guesses, torch.zeros(1)), member="tag", film=film)
    return film_of(found, one, lambda tokens: [f"w{number}" for number in tokens.tolist() if number >= 0])


def test_films_of_texts_are_kept_as_tokens(tmp_path):
    text = filmed_text()
    assert text.frames[3] == ("w1", "w5") and text.at == (0, 1, 2, 3)
    written = write_films(tmp_path / "reconstructions", [text, filmed(1), filmed_text(2)], Attacker.ADAPTIVE)
    assert [path.suffix for path in written] == [".safetensors", ".json"]
    assert not any(path.stat().st_mode & 0o077 for path in written)
    found, problems = read_films(tmp_path / "reconstructions")
    texts = [film for film in found[Attacker.ADAPTIVE] if isinstance(film, TextFilm)]
    assert not problems and texts == [text, filmed_text(2)] and len(found[Attacker.ADAPTIVE]) == 3


TEXT = {"id": "round-1/client-0", "image": 0, "member": "", "at": [0, 1], "frames": [["a"], ["b"]]}


@pytest.mark.parametrize(
    "change",
    [
        {"frames": [["a"]]},
        {"frames": "ab"},
        {"frames": [[1], ["b"]]},
        {"at": [0, -1]},
        {"id": 3},
        {"frames": [[]] * 99},
    ],
)
def test_a_damaged_film_of_texts_is_told_in_a_line(change, tmp_path):
    content = {"attacker": "plain", "films": [TEXT]}
    (tmp_path / "film-0001-plain.json").write_text(json.dumps(content))
    found, problems = read_films(tmp_path)
    assert len(found[Attacker.PLAIN]) == 1 and not problems
    (tmp_path / "film-0001-plain.json").write_text(json.dumps({**content, "films": [{**TEXT, **change}]}))
    found, problems = read_films(tmp_path)
    assert not found and len(problems) == 1 and "film-0001-plain.json can't be read" in problems[0]
