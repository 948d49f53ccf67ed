"""The film on a run's page: played by style alone, small, and absent where pictures are."""

import re
from dataclasses import replace

import pytest
import torch

from fl_privacy.report import share_report, write_report
from fl_privacy.runs.folder import Attacker, RunFolder
from fl_privacy.types import Batch, Reconstruction
from fl_privacy.types.film import FRAMES, Frame, TextFrame
from tests.report.kinds import WORDS, text_score
from tests.report.test_report import Page
from tests.results.runs import config, score

VICTIMS = 4
MOST_BYTES = 700_000
"""Of a page with three victims of 32 x 32 pixels in color and noise, which is hard to pack."""


def filmed_run(out, *, adaptive=False, frames=FRAMES):
    """Record a run with a film of victims that come out of noise."""
    rng = torch.Generator().manual_seed(0)
    with RunFolder.open_or_create(out, label="filmed", config=config(), config_text="") as folder:
        for attacker in Attacker if adaptive else (Attacker.PLAIN,):
            scores = [score(1, victim, noise=0.05) for victim in range(VICTIMS)]
            for one in scores:
                folder.add_victim(one, attacker=attacker)
            folder.save_reconstructions(1, scores, attacker=attacker)
            found = []
            for one in scores:
                noise = torch.rand(one.originals[0].shape, generator=rng)
                steps = [k / max(1, frames - 1) for k in range(frames)]
                images = [((1 - s) * noise + s * one.guesses[0]).clamp(0, 1) * 255 for s in steps]
                film = tuple(Frame(3 * k, image.byte()) for k, image in enumerate(images))
                found.append(Reconstruction(id=one.id, batch=Batch(one.guesses, torch.zeros(1)), film=film, member="m"))
            folder.save_films(found, scores, pieces=list, attacker=attacker)
            folder.add_attack(round=1, victims=VICTIMS, seconds=1.0, attacker=attacker)
        folder.finish()
    return folder.path


def test_the_page_plays_the_first_victims_beside_the_loss(tmp_path):
    text = write_report([filmed_run(tmp_path)]).read_text()
    page = Page(text)
    (film,) = re.findall(r'<figure class="film">.*?</figure>', text, re.DOTALL)
    assert film.count('class="reel"') == 3 and film.count("by m") == 3
    assert film.count("Reconstruction after") == 3 * FRAMES and film.count('alt="Original.') == 3
    assert film.count('type="radio"') == 1 + FRAMES and film.count(" checked") == 1
    assert len(re.findall(r'id="c\d+-moment-\d+"', film)) == FRAMES
    assert not page.all("script") and len(set(page.ids)) == len(page.ids)
    assert len(text) < MOST_BYTES


@pytest.mark.parametrize(("adaptive", "films"), [(False, 1), (True, 2)])
def test_each_attacker_has_a_film_that_says_whose_it_is(tmp_path, adaptive, films):
    text = write_report([filmed_run(tmp_path, adaptive=adaptive, frames=4)]).read_text()
    assert text.count('<figure class="film">') == films
    assert text.count("<h3>Adaptive attacker</h3>") == int(adaptive)
    assert text.count("Reconstruction after") == films * 3 * FRAMES, "a shorter film waits"


def filmed_texts(out):
    """Record a run with a film of words that come into place one after the other."""
    with RunFolder.open_or_create(out, label="texts", config=config(), config_text="") as folder:
        scores = [text_score(victim, right=9) for victim in range(VICTIMS)]
        found = []
        for one in scores:
            folder.add_victim(replace(one, history=tuple(float(40 - k) for k in range(34))))
            film = tuple(TextFrame(3 * k, torch.tensor([*range(k), 99, k])) for k in range(FRAMES))
            found.append(Reconstruction(id=one.id, batch=Batch(one.guesses, torch.zeros(1)), film=film, member="tag"))
        folder.save_reconstructions(1, scores)
        folder.save_films(found, scores, pieces=lambda t: [WORDS[n] if n < len(WORDS) else "un" for n in t.tolist()])
        folder.add_attack(round=1, victims=VICTIMS, seconds=1.0)
        folder.finish()
    return folder.path


def test_a_film_of_texts_colors_tokens(tmp_path):
    text = write_report([filmed_texts(tmp_path)]).read_text()
    page = Page(text)
    (film,) = re.findall(r'<figure class="film">.*?</figure>', text, re.DOTALL)
    assert film.count('class="reel"') == 3 and film.count("<small>100 %</small>") == 3 and "<img" not in film
    first, middle = (re.findall(r"<p><small>.*?</p>", film, re.DOTALL)[moment] for moment in (0, 6))
    kinds = [re.findall(r'class="token (\w+)"', one) for one in (first, middle)]
    assert kinds == [["misplaced", "misplaced"], ["right"] * 6 + ["wrong", "misplaced"]]
    assert len(re.findall(r'id="c\d+-moment-\d+"', film)) == FRAMES and not page.all("script")


def test_copies_without_pictures_have_no_film(tmp_path):
    run = filmed_run(tmp_path)
    assert '<figure class="film">' not in share_report([run], tmp_path / "figures").read_text()
    assert not list((tmp_path / "figures").rglob("film-*"))
    assert '<figure class="film">' in share_report([run], tmp_path / "all", with_originals=True).read_text()


def test_a_film_without_its_losses_is_left_out(tmp_path):
    run = filmed_run(tmp_path)
    records = run / "metrics.jsonl"
    kept = [line for line in records.read_text().splitlines() if '"history"' not in line]
    records.write_text("\n".join(kept) + "\n")
    assert '<figure class="film">' not in write_report([run]).read_text()
