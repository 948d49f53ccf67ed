"""Reconstruct the words of texts and their numbers of occurrences, and for a single text often the order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.exact.certificate import model_as_sent
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, failed
from fl_privacy.attacks.gradient_inversion.targets import matched_per_uploaded
from fl_privacy.attacks.text import word_evidence
from fl_privacy.attacks.text.explanation import next_tokens
from fl_privacy.attacks.text.token_candidates import Lengths, readable_model
from fl_privacy.attacks.text.token_evidence import EvidenceCandidates, Pairs, entrances_of, found_pairs, views_of
from fl_privacy.effects import Noise, NoisedLayers
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction

_NEAR = 0.5  # share of a token's strongest evidence above which it also stood at another position


@dataclass(frozen=True, eq=False)
class Bag:
    """Words of one victim's texts, found in its update."""

    tokens: Tensor  # (k,) different tokens, the surest first
    times: Tensor  # (k,) number of occurrences of each
    exact: bool = False  # ``True`` if absent tokens can't have such rows
    ordered: Tensor | None = None  # (L,) a single text in order, if that is known
    note: str = ""  # sentence on the expected number of false tokens, unless found by rows

    @property
    def all(self) -> Tensor:
        return self.tokens.repeat_interleave(self.times)


def tokens_of_first_block(model: TextModel, observations: Sequence[Observation], seed: int) -> list[Bag | str]:
    """Infer each victim's tokens from the gradient of the first transformer block.

    Return for each a :class:`Bag`, or the reason why no token is found. All have one model and training plan.
    """
    model, first = model.eval(), observations[0]
    entrances = entrances_of(model, first.upload.tensors)
    if not entrances:
        return [_NO_ENTRANCE] * len(observations)
    lengths, positioned = [Lengths.of(o, model) for o in observations], any(one.positioned for one in entrances)
    longest, rng = max(own.longest for own in lengths), derive_generator(seed, "first block")
    candidates = EvidenceCandidates(model, longest, positioned=positioned, rng=rng)
    views, texts = [views_of(observation, entrances) for observation in observations], first.upload.num_examples
    found = found_pairs(views, candidates, texts=texts, most=texts * first.input_shape[0])
    return [_placed(pairs, own) for pairs, own in zip(found, lengths, strict=True)]


_NO_ENTRANCE = "An uploaded layer before any attention is expected, but got none; use attack=tag."
_FULL = "Layers with directions to spare are expected, but tokens or noise fill all of them; use attack=tag."


def _placed(pairs: Pairs | None, lengths: Lengths) -> Bag | str:
    if pairs is None or not (len(pairs.tokens) or any(pairs.directions)):
        return _FULL
    if not len(pairs.tokens):
        views = " and ".join(f"{k} of {n}" for k, n in zip(pairs.directions, pairs.widths, strict=True))
        return (
            f"Tokens with more in {views} directions than chance gives are expected, but none of"
            f" {pairs.candidates:,} pairs of token and position has more; use attack=tag."
        )
    expected = "fewer than 0.01" if pairs.expected_false < 0.01 else f"up to {pairs.expected_false:.2g}"
    note = (
        f"{pairs.candidates:,} pairs of token and position were compared; {expected} of the"
        f" {len(pairs.tokens)} tokens named are expected to be false by chance"
        f"{f', and {pairs.alike} may be named for no more than being like others of them' * bool(pairs.alike)}."
    )
    evidence = pairs.evidence
    if evidence.shape[1] == 1:
        return Bag(pairs.tokens, torch.ones_like(pairs.tokens), note=note)
    strongest = evidence.amax(1, keepdim=True)
    own_place = (evidence >= evidence.amax(0)) & (evidence >= _NEAR * strongest)
    if lengths.number > 1:
        return Bag(pairs.tokens, own_place.sum(1).clamp_min(1), note=note)
    length = lengths.longest
    if lengths.known is None:  # the last position that is some token's own
        places = own_place.any(0).nonzero().flatten()
        length = int(places[-1]) + 1 if len(places) else evidence.shape[1]
    ordered = pairs.tokens[evidence[:, :length].argmax(0)]
    return Bag(pairs.tokens, (ordered[:, None] == pairs.tokens).sum(0).clamp_min(1), ordered=ordered, note=note)


_USUAL = 0.5  # assumed share of the longest text's length, if lengths are unknown
_LONGEST_SIMULATED = 64
_SMOOTHED = 0.5  # number added to the count of each token in public texts


class BagReader:
    """Finds the words in updates that have the sent ``model``, training plan and number of texts in common."""

    def __init__(self, model: TextModel, first: Observation, seed: int) -> None:
        place = word_evidence.where_words_are(model, first.upload.tensors)
        assert place is not None
        self._model, self._seed = model, seed
        self._name, self._where = place
        self._expected: dict[tuple[object, ...], word_evidence.Expected] = {}

    def read(self, observations: Sequence[Observation]) -> list[Bag]:
        rows = word_evidence.word_rows(observations, self._name, self._where)
        return [self._bag(observation, rows.of(k)) for k, observation in enumerate(observations)]

    def _bag(self, observation: Observation, rows: word_evidence.WordRows) -> Bag:
        lengths, texts = Lengths.of(observation, self._model), observation.upload.num_examples
        spare = int(self._model.next_token)  # the last token of a language model has no row of its own
        total = None if lengths.known is None else sum(lengths.known) + spare * texts
        alone = texts == 1 and self._positions(observation) is not None
        if total is None and alone:
            total = lengths.longest + (spare if self._where != "embeddings" else 0)
        most = total if total is not None else texts * observation.input_shape[0]
        expected = total if total is not None else int(texts * max(2, _USUAL * observation.input_shape[0]))
        if self._where != "embeddings":
            found = word_evidence.words_of_head(rows, most)
            return self._counted(found, observation, rows, total)
        noise = _stated_noise(observation, self._name)
        whole = most if lengths.known is not None else texts * observation.input_shape[0]  # positions may be dropped
        model = (
            None
            if word_evidence.is_exact(rows, whole, noise)
            else self._simulated(observation, max(2, expected // texts))
        )
        odds = _probabilities(observation, self._model.words.num_embeddings, expected).to(rows.values.device)
        rng = derive_generator(self._seed, "words", str(observation.id))
        found = word_evidence.found_words(
            rows, odds=odds, most=most, texts=texts, expected=model, stated_noise=noise, rng=rng
        )
        return self._counted(found, observation, rows, total)

    def _counted(
        self, found: word_evidence.FoundWords, observation: Observation, rows: word_evidence.WordRows, total: int | None
    ) -> Bag:
        tokens = found.tokens
        if not len(tokens):
            return Bag(tokens, tokens, found.exact)
        if total is not None and len(tokens) > total:  # the positions' rows that showed it were dropped
            total = None
        ordered = self._ordered(observation, rows, tokens, total) if observation.upload.num_examples == 1 else None
        if ordered is not None:
            return Bag(tokens, (ordered[:, None] == tokens).sum(0).clamp_min(1), found.exact, ordered)
        common = self._simulated(observation, max(2, len(tokens) // observation.upload.num_examples)).common
        return Bag(tokens, word_evidence.repeated(found.energy[tokens], common=common, total=total), found.exact)

    def _ordered(
        self, observation: Observation, rows: word_evidence.WordRows, tokens: Tensor, total: int | None
    ) -> Tensor | None:
        positions = self._positions(observation)
        if positions is None or total is None or self._where != "embeddings":
            return None
        sign = 1.0 if observation.plan.shares == "gradient" else -1.0
        return tokens[word_evidence.placed(rows.values[0, tokens], sign * positions[:total].to(rows.values))]

    def _positions(self, observation: Observation) -> Tensor | None:
        name = self._model.position_weight
        rows = None if name is None else observation.update().get(name)
        if rows is None or (observation.plan.weight_decay and observation.plan.shares != "gradient"):
            return None
        return rows[self._model.first_position :]

    def _simulated(self, observation: Observation, length: int) -> word_evidence.Expected:
        known, length = observation.knowledge, min(length, observation.input_shape[0], _LONGEST_SIMULATED)
        labels = None if known.labels is None or known.labels.dim() > 1 else tuple(torch.unique(known.labels).tolist())
        key = (length, labels, id(known.public_images))
        if key not in self._expected:
            rng, texts = derive_generator(self._seed, "words", str(length)), observation.upload.num_examples
            self._expected[key] = word_evidence.simulated(
                self._model, length=length, public=known.public_images, labels=known.labels, texts=texts, rng=rng
            )
        return self._expected[key]


def _probabilities(observation: Observation, size: int, expected: int) -> Tensor:
    """Return the probability (``size``,) that each token occurs among ``expected`` tokens drawn like public texts."""
    public = observation.knowledge.public_images
    counts = torch.full((size,), _SMOOTHED, dtype=torch.float64)
    if public is not None:
        counts += public[public >= 0].long().cpu().bincount(minlength=size)
    return -torch.expm1(expected * torch.log1p(-(counts / counts.sum()).clamp_max(1 - 1e-9)))


def _stated_noise(observation: Observation, name: str) -> float | None:
    effects = [part.effect for part in observation.knowledge.defense or ()]
    there = [e.added for e in effects if isinstance(e, NoisedLayers) and name in e.noised(observation.upload.tensors)]
    parts = [e for e in effects + there if isinstance(e, Noise)]
    if not parts or any(effect.std is None for effect in parts):
        return None
    factor = matched_per_uploaded(observation.plan, observation.upload.num_examples, unrolls=False)
    stds = [float(e.std or 0.0) / (1.0 if e.at == "upload" else factor) for e in parts]
    return float(torch.tensor(stds, dtype=torch.float64).square().sum().sqrt())


_VICTIMS_AT_ONCE = 32
_ROWS_AT_ONCE = 1 << 27  # elements of rows held at a time


@dataclass(frozen=True, kw_only=True)
class BagOfWords(GroupAttack):
    """Attack that finds the words of texts, and their frequencies, from the rows of the embeddings' gradient (ours).

    Each token of the vocabulary has a row. Only tokens of the batch change theirs, even after pruning, rounding and
    several steps of any optimizer. Under noise, each row's likelihood is compared with that of noise drawn from the
    upload's own elements. At most a tenth of the found words are then expected to be false, and at most 0.5 for each
    text. A word's count follows from the norm of its row, or for a single text from the rows of the position embedding,
    which also give the order.

    If embeddings and output layer share weights, or if only the output layer is uploaded, words are rows with unusually
    large norms. No word is then found under noise or for a confident model, and found words are uncertain
    (``words_exact``). If neither gradient is uploaded, :mod:`fl_privacy.attacks.text.token_evidence` is used.
    """

    of_rounds = "apart"

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        first = group.first
        model = readable_model(model_as_sent(first))
        like = next(iter(first.sent.parameters.values()))
        copy = frozen_copy(first.model, first.assumed(), first.plan, device=like.device, dtype=torch.float32)
        quick = readable_model(copy)
        read: Callable[[Sequence[Observation]], Sequence[Bag | str]]
        size, read = _VICTIMS_AT_ONCE, partial(tokens_of_first_block, quick, seed=seed)
        sent = first.upload.tensors
        if isinstance(first.model, TextModel) and word_evidence.where_words_are(first.model, sent) is not None:
            size, read = max(1, _ROWS_AT_ONCE // model.words.weight.numel()), BagReader(quick, first, seed).read
        places, found = list(group.observations), dict[int, Reconstruction]()
        for some in (places[i : i + size] for i in range(0, len(places), size)):
            seen = [group.observations[place] for place in some]
            found |= {place: _made(o, model, bag) for place, o, bag in zip(some, seen, read(seen), strict=True)}
            report(len(found) / len(places))
        return found


def _made(observation: Observation, model: TextModel, bag: Bag | str) -> Reconstruction:
    if isinstance(bag, str):
        return failed(observation, bag)
    if not len(bag.tokens):
        return failed(observation, "Rows that stand out from the others are expected, but got none; use attack=tag.")
    texts = _as_texts(observation, model, bag)
    labels = next_tokens(texts) if model.next_token else torch.full((len(texts),), -1)
    batch, notes = Batch(texts.cpu(), labels.cpu()), (bag.note,) if bag.note else ()
    return Reconstruction(id=observation.id, batch=batch, words=bag.all.cpu(), words_exact=bag.exact, notes=notes)


def _as_texts(observation: Observation, model: TextModel, bag: Bag) -> Tensor:
    """Arrange the words of ``bag`` as token ids (N, L) of N texts, padded with -1.

    A single text keeps its order, if that is known; otherwise the words are divided evenly among the texts.
    """
    if bag.ordered is not None:
        return bag.ordered[None]
    number, words = observation.upload.num_examples, bag.all
    lengths = Lengths.of(observation, model)
    even = -(-len(words) // number)
    counts = [even] * number if lengths.known is None else [n + int(model.next_token) for n in lengths.known]
    texts = torch.full((number, max(counts)), -1, dtype=torch.long, device=words.device)
    begin = 0
    for row, length in enumerate(counts):
        part = words[begin : begin + length]
        texts[row, : len(part)] = part
        begin += length
    return texts
