"""The words of the texts behind an update, and how often each is there, without any descent."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.targets import matched_per_uploaded
from fl_privacy.attacks.text.lengths import Lengths
from fl_privacy.attacks.text.words.counts import repeated
from fl_privacy.attacks.text.words.evidence import Found, found_words, is_exact, words_of_head
from fl_privacy.attacks.text.words.expected import Expected, simulated
from fl_privacy.attacks.text.words.order import placed
from fl_privacy.attacks.text.words.rows import WordRows, where_words_are, word_rows
from fl_privacy.effects import Noise
from fl_privacy.models import TextModel
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation

_USUAL = 0.5
"""Share of the longest text that texts are long where nobody says."""
_LONGEST_SIMULATED = 64
_SMOOTHED = 0.5
"""Added to how often each token is in public texts."""


@dataclass(frozen=True, eq=False)
class Bag:
    """What was read of one victim.

    Attributes:
        tokens: (k,) different ones, the surest first.
        times: (k,) how often each is in the texts.
        exact: whether no other token can have such a row.
        ordered: (L,) the text, where there is one and the rows of its positions say where each word stands.
    """

    tokens: Tensor
    times: Tensor
    exact: bool
    ordered: Tensor | None = None

    @property
    def all(self) -> Tensor:
        """(n,) each token as often as it is there."""
        return self.tokens.repeat_interleave(self.times)


class BagReader:
    """Reads the words of victims of one model, one plan and one number of texts.

    Args:
        model: frozen, with the values sent, in single precision.
        first: one of the victims.
        seed: of the texts that are simulated where there is noise, and of the noise that rows are compared with.
    """

    def __init__(self, model: TextModel, first: Observation, seed: int) -> None:
        place = where_words_are(model, first.upload.tensors)
        assert place is not None
        self._model, self._seed = model, seed
        self._name, self._where = place
        self._expected: dict[tuple[object, ...], Expected] = {}

    def read(self, observations: Sequence[Observation]) -> list[Bag]:
        """Of each of ``observations``."""
        rows = word_rows(observations, self._name, self._where)
        return [self._bag(observation, rows.of(k)) for k, observation in enumerate(observations)]

    def _bag(self, observation: Observation, rows: WordRows) -> Bag:
        lengths, texts = Lengths.of(observation, self._model), observation.upload.num_examples
        spare = int(self._model.next_token)  # the last token of a language model has no row of its own
        total = None if lengths.told is None else sum(lengths.told) + spare * texts
        alone = texts == 1 and self._positions(observation) is not None
        if total is None and alone:
            total = lengths.longest + (spare if self._where != "embeddings" else 0)
        most = total if total is not None else texts * observation.input_shape[0]
        expected = total if total is not None else int(texts * max(2, _USUAL * observation.input_shape[0]))
        if self._where != "embeddings":
            found = words_of_head(rows, most)
            return self._counted(found, observation, rows, total)
        noise = _told_noise(observation)
        whole = most if lengths.told is not None else texts * observation.input_shape[0]  # positions may be dropped
        model = None if is_exact(rows, whole, noise) else self._simulated(observation, max(2, expected // texts))
        odds = _odds(observation, self._model.words.num_embeddings, expected).to(rows.values.device)
        found = found_words(
            rows,
            odds=odds,
            most=most,
            texts=texts,
            expected=model,
            told_noise=noise,
            rng=derive_generator(self._seed, "words", str(observation.id)),
        )
        return self._counted(found, observation, rows, total)

    def _counted(self, found: Found, observation: Observation, rows: WordRows, total: int | None) -> Bag:
        """How often the words are there, and for a single text in which order."""
        tokens = found.tokens
        if not len(tokens):
            return Bag(tokens, tokens, found.exact)
        if total is not None and len(tokens) > total:  # the positions' rows that told it were dropped
            total = None
        alone = observation.upload.num_examples == 1
        ordered = self._ordered(observation, rows, tokens, total) if alone else None
        return Bag(tokens, self._times(found, tokens, total, ordered, observation), found.exact, ordered)

    def _times(
        self, found: Found, tokens: Tensor, total: int | None, ordered: Tensor | None, observation: Observation
    ) -> Tensor:
        if ordered is not None:
            return (ordered[:, None] == tokens).sum(0).clamp_min(1)
        common = self._simulated(observation, max(2, len(tokens) // observation.upload.num_examples)).common
        return repeated(found.energy[tokens], common=common, total=total)

    def _ordered(self, observation: Observation, rows: WordRows, tokens: Tensor, total: int | None) -> Tensor | None:
        """The text, by the rows of its positions."""
        positions = self._positions(observation)
        if positions is None or total is None or self._where != "embeddings":
            return None
        sign = 1.0 if observation.plan.shares == "gradient" else -1.0
        own = sign * positions[:total].to(rows.values)
        return tokens[placed(rows.values[0, tokens], own)]

    def _positions(self, observation: Observation) -> Tensor | None:
        """(P, d) what the positions' rows were moved by, where there are some and not weight decay moves them."""
        name = self._model.position_weight
        rows = None if name is None else observation.update().get(name)
        if rows is None or (observation.plan.weight_decay and observation.plan.shares != "gradient"):
            return None
        return rows[self._model.first_position :]

    def _simulated(self, observation: Observation, length: int) -> Expected:
        known, length = observation.knowledge, min(length, observation.input_shape[0], _LONGEST_SIMULATED)
        labels = None if known.labels is None or known.labels.dim() > 1 else tuple(torch.unique(known.labels).tolist())
        key = (length, labels, id(known.public_images))
        if key not in self._expected:
            self._expected[key] = simulated(
                self._model,
                length=length,
                public=known.public_images,
                labels=known.labels,
                texts=observation.upload.num_examples,
                rng=derive_generator(self._seed, "words", str(length)),
            )
        return self._expected[key]


def _odds(observation: Observation, size: int, expected: int) -> Tensor:
    """(V,) probability of each token to be among so many ``expected`` ones, by how often it is in public texts."""
    public = observation.knowledge.public_images
    counts = torch.full((size,), _SMOOTHED, dtype=torch.float64)
    if public is not None:
        counts += public[public >= 0].long().cpu().bincount(minlength=size)
    return -torch.expm1(expected * torch.log1p(-(counts / counts.sum()).clamp_max(1 - 1e-9)))


def _told_noise(observation: Observation) -> float | None:
    """Standard deviation of the noise on each element of the upload, where the defense says it."""
    parts = [part.effect for part in observation.knowledge.defense or () if isinstance(part.effect, Noise)]
    if not parts or any(effect.std is None for effect in parts):
        return None
    factor = matched_per_uploaded(observation.plan, observation.upload.num_examples, unrolls=False)
    stds = [float(e.std or 0.0) / (1.0 if e.at == "upload" else factor) for e in parts]
    return float(torch.tensor(stds, dtype=torch.float64).square().sum().sqrt())
