"""Find the likeliest texts given the updates, the defense and public texts."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fl_privacy import effects
from fl_privacy.attacks.adaptive.constraints import estimate_noise_std
from fl_privacy.attacks.attack import Report, even_share, part_of, seconds_left, timely
from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings, known_lengths
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, failed
from fl_privacy.attacks.gradient_inversion.labels import policy_for
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.attacks.gradient_inversion.word_order import LanguageModel
from fl_privacy.attacks.likelihood.attack import Likelihood, likelihood_of_victims, sentences
from fl_privacy.attacks.likelihood.channel import UNLIKELY, Channel
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import VictimGradients, VictimModel, differentiable_twice, number_of_steps
from fl_privacy.progress import counted
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction, Tensors

MEMBER = "likeliest text"
_STARTS = 3  # searches at once
_ANNEALED = 1 / 12  # steps, as a share of the evaluations
_FIRST, _FINAL = 10.0, -15.0  # temperatures of the annealing, in nats; below 0, mixtures of words are penalized
_RATE, _SPREAD, _HELD = 0.3, 0.3, 4.0  # Adam's rate; first logits: weight of word frequencies, gain of start's words
_REFRESHED = 8  # steps between updates of the likeliest neighbors
_BEGINNINGS = 400  # texts that are compared for the starts
_SOFT = 1.0  # gradient, as a share of the root mean square, whose Adam step counts half in slopes
_CHUNK = 16  # texts compared at a time
_EPS = 1e-8  # of Adam
_CLASSES = 8  # largest number of classes that are each tried on a whole chunk of texts
_MOST_TEXTS, _MOST_LABELS = 4, 100  # largest numbers of texts in a batch, and of label combinations that are tried
_ROWS = "rows"  # key of the positions' rows in the first step


class _FirstStep(VictimGradients):
    """Computes a client's only step up to a factor: the gradient, or Adam's normalized step."""

    def __init__(self, victim_model: VictimModel, gradients: VictimGradients) -> None:
        self._gradients, self._plan, self.soft = gradients, victim_model.plan, 0.0
        self.positions: str | None = None  # tensor whose rows are also returned by text

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        each = self._gradients(inputs.flatten(0, 1)[:, None], labels.flatten()[:, None])
        by_batch = {name: value.reshape(*labels.shape, *value.shape[1:]) for name, value in each.items()}
        found = {name: self.of(value.mean(1)) for name, value in by_batch.items()}
        if self.positions is not None:
            rows = by_batch[self.positions] / labels.shape[1]
            found[_ROWS] = self.of(rows[:, :, : inputs.shape[2]].flatten(1, 2))
        return found

    def of(self, value: Tensor) -> Tensor:
        if self._plan.shares == "gradient" or self._plan.optimizer == "sgd":
            return value
        if not self.soft:
            return value / (value.abs() + _EPS)
        usual = value.detach().flatten(1).square().mean(1).sqrt().view(-1, *[1] * (value.dim() - 1))
        return value / (value.square() + (self.soft * usual).square() + _EPS**2).sqrt()


@dataclass(frozen=True, eq=False)
class _TextLikelihood:
    likelihood: Likelihood
    steps: Sequence[_FirstStep]
    source: WordEmbeddings
    white: tuple[float, float | None] | None  # standard deviation and clipping norm, if Gaussian noise is all
    words: Tensor | None  # (n, d) words' rows in a single update, sums of positions' rows over the texts

    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with differentiable_twice(), torch.no_grad():
            return torch.cat([self._of(own, labels) for own in torch.split(tokens, max(1, _CHUNK // len(labels)))])

    def gains(self, words: Tensor, there: Tensor, labels: Tensor, soft: float) -> Tensor:
        """Return the first-order gain in log likelihood (M, B, L, n) of putting each of n words at L positions.

        ``words``: (M, B, L, d) mean embeddings of M guesses. ``there``: (M, B, L) ``True`` for positions with a word.
        ``soft``: term added to Adam's denominator, as a share of the gradient's root mean square.
        """
        inputs = torch.cat([words, there[..., None].to(words)], -1).requires_grad_()
        for step in self.steps:
            step.soft = soft
        with differentiable_twice():
            loss, rows = self._terms(inputs, labels)
            (slope,) = torch.autograd.grad(loss.sum(), inputs)
        for step in self.steps:
            step.soft = 0.0
        found = -slope[..., :-1] @ self.source.table.T
        if self.words is not None and self.white:
            found = found + (rows.detach() @ self.words.T / self.white[0] ** 2).view_as(found)
        return found

    def _of(self, tokens: Tensor, labels: Tensor) -> Tensor:
        there = (tokens >= 0)[..., None].to(self.source.table)
        inputs = torch.cat([self.source.table[tokens.clamp_min(0)] * there, there], -1)
        loss, rows = self._terms(inputs, labels)
        if self.words is None or not self.white:
            return loss
        tokens = tokens.flatten(1)
        same = (tokens[:, :, None] == tokens[:, None, :]) & (tokens >= 0)[:, None]
        first, factor = (tokens >= 0) & ~same.tril(-1).any(2), self.likelihood.states[0][0].factor
        sums = factor * self.steps[0].of(same.to(rows) @ rows / factor)
        apart = (sums * (sums / 2 - self.words[tokens.clamp_min(0)])).sum(2)
        return loss + (apart * first).sum(1) / self.white[0] ** 2

    def _terms(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        terms, rows = [], inputs
        for guesser, channels in self.likelihood.states:
            uploads = guesser(inputs, labels.to(inputs.device).expand(len(inputs), -1))
            terms += [self._of_channel(channel, uploads) for channel in channels]
            rows = uploads.get(_ROWS, rows)
        return torch.stack(terms).sum(0), rows

    def _of_channel(self, channel: Channel, uploads: Tensors) -> Tensor:
        if self.white is None:
            return channel.loss(uploads)
        std, norm = self.white
        products = torch.stack([uploads[n].flatten(1) @ seen[0] for n, seen in channel.observed.items()]).sum(0)
        lengths = torch.stack([torch.linalg.vector_norm(uploads[n].flatten(1), dim=1) for n in channel.observed])
        squares = lengths.square().sum(0)
        scale = 1.0 if norm is None else (norm / squares.clamp_min(1e-30).sqrt()).clamp(max=1)
        return (scale * scale * squares / 2 - scale * products) * channel.uploads / std**2


@dataclass(eq=False)
class _TextSearch:
    """S parallel searches for one victim's texts (S, B, L), padded with -1 to L tokens."""

    likelihood: _TextLikelihood
    language: LanguageModel | None
    texts: Tensor
    labels: Tensor  # (B,)
    inside: slice  # positions whose words may change
    rng: torch.Generator
    losses: Tensor = field(init=False)  # (S,) negative log posterior density

    def __post_init__(self) -> None:
        self.losses = self.of(self.texts)

    def keep(self, number: int) -> None:
        best = self.losses.argsort()[:number]
        self.texts, self.losses = self.texts[best], self.losses[best]

    def of(self, texts: Tensor) -> Tensor:
        found, each = self.likelihood.losses(texts, self.labels), texts.flatten(0, 1).cpu()
        if self.language is None:
            return found
        return found + (self.language.surprise(each) * (each >= 0).sum(1)).view(len(texts), -1).sum(1).to(found)

    def anneal(self, iterations: int, report: Report) -> list[float]:
        """Optimize each position's distribution of words, take the likeliest; return the least loss at each step."""
        table, there, before = self.likelihood.source.table, self.texts >= 0, self.texts
        place, ends = torch.arange(self.texts.shape[-1], device=table.device), there.sum(-1, keepdim=True)
        begin, end = self.inside.start or 0, self.inside.stop or 0
        fixed = (place < begin) | (place >= ends + end)
        own = self.texts.clamp_min(0)[..., None]
        logits = 0.1 * torch.randn((*self.texts.shape, len(table)), generator=self.rng).to(table)
        if self.language is not None:
            logits = logits + _SPREAD * self.language.usual.log().to(table)
        logits = logits.scatter_add(3, own, torch.full_like(own, _HELD, dtype=table.dtype)).requires_grad_()
        optimizer, history, seconds = torch.optim.Adam([logits], lr=_RATE), list[float](), seconds_left()
        for step in timely(range(iterations)):
            share = max(step / iterations, 1 - seconds_left() / seconds if 0 < seconds < math.inf else 0.0)
            if step % _REFRESHED == 0:
                context = torch.zeros_like(logits)
                for row, text in enumerate(self.texts.flatten(0, 1) if self.language else []):
                    assert self.language is not None
                    end = int(ends.flatten()[row])
                    context.flatten(0, 1)[row, :end] = self.language.in_context(text[:end].tolist()).to(context)
            log_chances = logits.detach().log_softmax(-1)
            chances = log_chances.exp()
            means = torch.where(fixed[..., None], table[own[..., 0]], chances @ table) * there[..., None]
            gains = self.likelihood.gains(means, there, self.labels, _SOFT * (1.2 - share))
            slope = (_FIRST + share * (_FINAL - _FIRST)) * log_chances - gains - context
            slope = slope - (chances * slope).sum(-1, keepdim=True)
            logits.grad = slope * chances / chances.clamp_min(1e-4).sqrt()
            optimizer.step()
            self.texts = torch.where(fixed | ~there, self.texts, logits.detach().argmax(-1))
            history.append(float(self.of(self.texts).min()) if step % _REFRESHED == 0 else history[-1])
            report(share)
        self.texts = torch.cat([self.texts, before])
        self.losses = self.of(self.texts)
        return [*history, float(self.losses.min())]


def why_not_searched(observation: Observation) -> str | None:
    """Return the reason why :class:`LikeliestText` can't attack ``observation``, in one line, or ``None``."""
    model, plan, parts = observation.model, observation.plan, observation.knowledge.defense
    size = observation.upload.num_examples
    if getattr(model, "next_token", True) or size > _MOST_TEXTS:
        return f"Up to {_MOST_TEXTS} texts with a class each are expected, but got others; use attack=auto."
    if not parts or any(isinstance(part.effect, UNLIKELY) for part in parts):
        return "A defense with a known likelihood is expected, but got none; use attack=auto."
    if plan.shares != "gradient" and plan.optimizer != "sgd":
        if size > 1:
            return "A single text is expected behind Adam's step, but got several; use attack=auto."
        inner = [e.added if isinstance(e := part.effect, effects.NoisedLayers) else e for part in parts]
        early = [isinstance(e, effects.ClippedExamples) or getattr(e, "at", "") == "gradient" for e in inner]
        if any(early) or (plan.optimizer == "adam" and plan.weight_decay):
            return "Noise and weight decay are expected after Adam's step, but come before it; use attack=auto."
    return (
        None
        if plan.shares == "gradient" or number_of_steps(size, plan) == 1
        else "A single local step is expected, but got several; use attack=auto."
    )


@dataclass(frozen=True, kw_only=True)
class LikeliestText(GroupAttack):
    """Attack that finds the texts with the largest posterior density, from all updates and a prior of words.

    The likelihood follows from the defense, known or inferred from the update
    (:mod:`fl_privacy.attacks.likelihood.channel`). Searches start from public texts, whose trigrams are the prior, or
    from random words. A distribution of words at each position is optimized at a falling temperature (relaxed as in Guo
    et al. 2021). Clients must train one step: with SGD on up to four texts, with Adam on one.
    """

    evaluations: int = 4800  # evaluations of loss and gradient for each victim
    device: str | None = None  # ``None``: that of the sent model's values

    def see(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        return undo_evident_defenses(observations)

    def prepared(self, group: Group, seed: int) -> Prepared:
        """Prepare ``group``, with steps' directions as gradients; ``NotAttackableError`` if it can't be attacked."""
        if (reason := why_not_searched(group.first)) is not None:
            raise NotAttackableError(reason)
        settings = Settings(
            objective=L2(), compile="off", local_steps="first_order", labels=policy_for(group.first), device=self.device
        )
        with cpu_threads(1):
            prepared = prepare(settings, group, seed)
        steps = [_FirstStep(one.victim_model, one.gradients) for one in prepared.rounds]
        rounds = [replace(one, gradients=step) for one, step in zip(prepared.rounds, steps, strict=True)]
        return replace(prepared, rounds=rounds)

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        prepared = self.prepared(group, seed)
        results = {p: failed(group.observations[p], why) for p, why in prepared.failures.items()}
        for done, victim in enumerate(counted(MEMBER, prepared.victims)):
            shown = part_of(report, done / len(prepared.victims), (done + 1) / len(prepared.victims))
            with even_share(len(prepared.victims) - done), cpu_threads(1):
                try:
                    results[victim.position] = self._searched(begin_search(prepared, victim), victim, shown)
                except NotAttackableError as error:
                    results[victim.position] = failed(victim.observation, str(error))
        return results

    def _searched(self, search: _TextSearch, victim: PreparedVictim, report: Report) -> Reconstruction:
        history = search.anneal(max(10, round(_ANNEALED * self.evaluations)), report)
        search.keep(1)
        observation = victim.observation
        if not search.losses.isfinite().all():
            return failed(observation, "A finite likelihood is expected, but got none; check the update.")
        return Reconstruction(
            id=observation.id,
            batch=Batch(search.texts[0].cpu(), search.labels.cpu()),
            loss=float(search.losses[0]),
            history=tuple(history),
            label_source=victim.label_source if victim.label_source == "known" else "inferred",
            countermeasures=sentences(search.likelihood.likelihood, "text", same="text"),
            member=MEMBER,
        )


def begin_search(prepared: Prepared, victim: PreparedVictim) -> _TextSearch:
    """Begin searches at the public texts of largest likelihood, or at random words without public texts."""
    observation, likelihood, size = victim.observation, _likelihood(prepared, victim), prepared.shape[0]
    table, longest = likelihood.source.table, prepared.shape[1]
    rng = derive_generator(prepared.seed, MEMBER, str(observation.id))
    lengths, public = known_lengths(observation), observation.knowledge.public_images
    inside, language, last = slice(0, None), None, None
    if public is None:
        drawn = torch.randint(len(table), (_BEGINNINGS, longest), generator=rng)
        ends = torch.randint(min(2, longest), longest + 1, (_BEGINNINGS,), generator=rng)
    else:
        public = torch.nn.functional.pad(public.cpu(), (0, max(0, longest - public.shape[1])), value=-1)[:, :longest]
        drawn = public[torch.randperm(len(public), generator=rng)[:_BEGINNINGS]].clone()
        ends, language = (drawn >= 0).sum(1), LanguageModel(public, len(table))
        final = drawn.gather(1, (ends - 1).clamp_min(0)[:, None])
        same_first, same_last = bool((drawn[:, 0] == drawn[0, 0]).all()), bool((final == final[0]).all())
        inside, last = slice(int(same_first), -1 if same_last else None), final[0] if same_last else None
        drawn = torch.where(drawn < 0, torch.randint(len(table), drawn.shape, generator=rng), drawn)
    joined = torch.arange(len(drawn))[:, None]
    if size > 1:
        joined = torch.randint(len(drawn), (_BEGINNINGS, size), generator=rng)
    drawn, ends = drawn[joined], ends[joined]
    if lengths is not None:
        ends = lengths.cpu().expand_as(ends)
        if last is not None:
            drawn.scatter_(2, ends[..., None] - 1, last.expand(*ends.shape, 1))
    drawn = drawn.masked_fill(torch.arange(longest) >= ends[..., None], -1).to(table.device)
    labels = _likely_labels(prepared, victim, likelihood, drawn)
    search = _TextSearch(likelihood, language, drawn, labels, inside, rng)
    search.keep(_STARTS)
    previous = observation.knowledge.previous
    if previous is not None and not previous.is_floating_point() and len(previous) >= size:
        known = torch.nn.functional.pad(previous[:size], (0, max(0, longest - previous.shape[1])), value=-1)
        ordered = known[list(itertools.permutations(range(size))), :longest].to(table.device)
        losses = search.of(ordered)
        search.texts[-1], search.losses[-1] = ordered[losses.argmin()], losses.min()
    return search


def _likely_labels(prepared: Prepared, victim: PreparedVictim, likelihood: _TextLikelihood, drawn: Tensor) -> Tensor:
    """Return the known classes (B,), else the combination with the least mean loss over some of the texts ``drawn``.

    ``NotAttackableError`` if there are too many combinations, and the update reveals none.
    """
    (size, *_), labels = prepared.shape, victim.labels
    if labels is not None and labels.dim() == 1 and victim.label_source == "known":
        return labels.to(drawn.device)
    if size > 1 and math.comb(prepared.num_classes + size - 1, size) > _MOST_LABELS:
        if labels is None or labels.dim() != 1:
            raise NotAttackableError(
                f"Known classes are expected for {size} texts, too many to try; set threat_model=knows_labels."
            )
        return labels.to(drawn.device)
    combined = list(itertools.combinations_with_replacement(range(prepared.num_classes), size))
    few = drawn[: max(1, min(_CHUNK, _CHUNK * _CLASSES // len(combined)))]
    tried = [torch.tensor(each, device=drawn.device) for each in combined]
    return min(tried, key=lambda each: float(likelihood.losses(few, each).mean()))


def _likelihood(prepared: Prepared, victim: PreparedVictim) -> _TextLikelihood:
    likelihood, source = likelihood_of_victims(prepared, [victim]), prepared.settings.source
    if not all(channel.informative for _, channels in likelihood.states for channel in channels):
        raise NotAttackableError("A defense with a known likelihood is expected, but got none; use attack=auto.")
    assert isinstance(source, WordEmbeddings)
    steps = [own for guesser, _ in likelihood.states if isinstance(own := guesser.round.gradients, _FirstStep)]
    observation, words = victim.observation, None
    white, model, plan = _white_noise(observation), observation.model, observation.plan
    assert isinstance(model, TextModel)
    name, positions = model.word_weight, model.position_weight or ""
    alone, update = likelihood.uploads == 1 and not model.first_position, observation.update()
    if white and alone and {name, positions} <= update.keys() and update[name].shape[1] == update[positions].shape[1]:
        words = update[name].to(source.table)
        steps[0].positions = positions
        if plan.shares != "gradient" and plan.weight_decay:
            words = words - likelihood.states[0][0].factor * plan.weight_decay * source.table
    return _TextLikelihood(likelihood, steps, source, white, words)


def is_drowned(observation: Observation) -> bool:
    """Return whether Gaussian noise is most of an update's squared norm, so that descents fail."""
    white, values = _white_noise(observation), [value.double() for value in observation.update().values()]
    squares = sum(float(value.square().sum()) for value in values)
    return white is not None and 2 * white[0] ** 2 * sum(value.numel() for value in values) > squares


def _white_noise(observation: Observation) -> tuple[float, float | None] | None:
    """Return (standard deviation of the noise, clipping norm or ``None``) if the only defense is Gaussian noise.

    ``None`` for any other defense, for noise on each step's gradient, and for clipping by tensor or to an unknown norm.
    """
    parts = observation.knowledge.defense or ()
    effect = parts[0].effect if len(parts) == 1 else None
    normal = type(effect) in (effects.Noise, effects.Gaussian)
    if not isinstance(effect, effects.Noise) or not normal or effect.at == "gradient":
        return None
    std = estimate_noise_std(observation.update()) if effect.std is None else effect.std
    if not std or effect.clip is None:
        return (std, None) if std else None
    return (std, effect.clip.norm) if effect.clip.norm and effect.clip.scope == "global" else None
