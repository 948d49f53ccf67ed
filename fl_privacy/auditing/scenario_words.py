"""Infer a text's words, unordered, from changed rows of an uploaded embedding or layers that see single tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.attacks.text.bag_of_words import Bag, tokens_of_first_block
from fl_privacy.auditing.instrument.program import tensors_in
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_problem import OPTIMIZERS, NotAttackedError, WatchedReply, cleaned, optimizer_in_plan
from fl_privacy.auditing.scenario_scores import MOST_SHOWN
from fl_privacy.measure.answer import Answer, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import BAND, chance_of_words, combined, words_f1
from fl_privacy.measure.outcome import MARGIN_F1
from fl_privacy.models import TextModel
from fl_privacy.types import LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

LEAST_WORDS, MOST_TEXTS, _LONGEST = 100, 2000, 512
"""Smallest number of rows of a vocabulary's embedding, largest number of the clients' other texts used as distractors,
and largest number of tokens of a text."""

CHANGED, STANDS_OUT = 1e-3, 3.0
"""Smallest change of a word's row relative to the largest, and smallest ratio between the last word's row and the next
one if a head shares the embedding."""

READ_F1 = 0.8  # smallest F1 of the different words of a reconstructed text

NOTE = (
    "Words are inferred from layers that see a token and nothing else, such as the first block's adapters; words that"
    " all texts have, such as a template's, do not count."
)


def words_of(found: Sequence[tuple[WatchedReply, WatchedReply]], *, uploaded: bool) -> Answer | None:
    """Score the words inferred from changed rows of the embedding.

    ``None`` if clients train on no texts, or upload no embedding. ``found``: pairs of a client's usual reply and its
    reply after training on one text. ``uploaded``: ``False`` to use the gradient of the first step, not the upload.
    """
    read, texts, others = list[tuple[set[int], set[int]]](), list[list[set[int]]](), list[set[int]]()
    for client, again in found:
        own = _words(again.watched)
        if own is None:
            return None
        (name, table), tokens = own
        rows = _rows(again, name, uploaded=uploaded)
        if rows is not None:
            texts.append(each_words(tokens, table))
            read.append((set().union(*texts[-1]), set(rows)))
        for batch in client.watched.batches:
            if here := [t for t in _texts_in(batch) if int(t.min()) >= 0 and int(t.max()) < table.num_embeddings]:
                others += each_words(max(here, key=lambda t: int(t.max())), table)
    note = "Words are inferred from the rows of the embedding that changed; their order is not."
    return replace(scored_words(read, len(found), others[:MOST_TEXTS], texts), notes=(note,)) if read else None


def _texts_in(batch: Any) -> list[Tensor]:
    return [t for t in tensors_in(batch) if t.dtype in (torch.int64, torch.int32) and t.dim() == 2 and t.numel()]


def each_words(tokens: Tensor, table: nn.Embedding) -> list[set[int]]:
    """Return the set of words of each text in ``tokens`` (N, L), without the padding of the embedding ``table``."""
    return [set(text) - {table.padding_idx or 0} for text in tokens.tolist()]


def words_in_training(client: WatchedReply) -> tuple[set[int], set[int]] | None:
    """Return token ids that a client trained on, and those inferred from its upload; ``None`` if no attack applies."""
    seen = client.watched
    for name, table in sorted(_tables(seen), key=lambda pair: -pair[1].num_embeddings) if seen.batches else ():
        rows = _rows(client, name, uploaded=True) if name in seen.before else None
        words = None if rows is None else _loaded(seen, table)
        if rows is not None and words:
            return words, set(rows) - {table.padding_idx or 0}
    if texts_seen(seen) is None or {name for name, _ in seen.optimizers} - set(OPTIMIZERS):
        return None
    found = read_first_block(client, client.tensors(), client.matched.shares, examples=max(1, seen.loaded))
    return None if found is None else (found.truth, found.guess)


def _loaded(seen: Watched, table: nn.Embedding) -> set[int] | None:
    columns: dict[tuple[int, int], list[Tensor]] = {}
    for batch in seen.batches:
        for place, tensor in enumerate(tensors_in(batch)):
            if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() in (1, 2):
                columns.setdefault((tensor.dim(), place), []).append(tensor.flatten())
    whole = {key: torch.cat(parts) for key, parts in columns.items()}
    size, found = table.num_embeddings, {key: (int(t.min()), int(t.max())) for key, t in whole.items()}
    # numbers must cover the table, as labels do not
    fits = [key for key, (low, high) in found.items() if 0 <= low <= high < size and (key[0] == 2 or 2 * high >= size)]
    if not fits:
        return None
    tokens = whole[max(fits, key=lambda key: (key[0], found[key][1]))]
    return set(tokens.unique().tolist()) - {table.padding_idx or 0}


def _tables(seen: Watched) -> list[tuple[str, nn.Embedding]]:
    return [
        (f"parts.{number}.{path}.weight" if path else f"parts.{number}.weight", module)
        for number, part in enumerate(seen.modules)
        for path, module in part.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= LEAST_WORDS
    ]


def _words(seen: Watched) -> tuple[tuple[str, nn.Embedding], Tensor] | None:
    tables, whole = _tables(seen), _texts_in({} if seen.program is None else seen.program.constants)
    if not tables or not whole:
        return None
    name, table = max(tables, key=lambda pair: pair[1].num_embeddings)
    tokens = max(whole, key=lambda t: int(t.max()))
    if int(tokens.max()) >= table.num_embeddings or int(tokens.min()) < 0:
        return None
    return (name, table), tokens


def _rows(again: WatchedReply, name: str, *, uploaded: bool) -> list[int] | None:
    seen = again.watched
    if not uploaded:
        change = seen.gradients.get(name)
    else:
        value = again.tensors().get(name)
        before = seen.before[name].float()
        change = None if value is None else value if again.matched.shares != "weights" else _moved(value, before, seen)
    if change is None or not change.isfinite().all():
        return None
    if _is_tied(seen, name):
        return _standing_out(change.float())
    size = change.float().norm(dim=1)
    least = CHANGED * float(size.max()) if uploaded else 0.0  # the gradient is zero in rows without a word
    return (size > least).nonzero().flatten().tolist() if float(size.max()) > 0 else []


def _is_tied(seen: Watched, name: str) -> bool:
    part = seen.modules[int(name.split(".")[1])]
    table = next(module.weight for own, module in _tables(seen) if own == name)
    others = (module for module in part.modules() if not isinstance(module, nn.Embedding))
    return any(getattr(module, "weight", None) is table for module in others)


def _standing_out(change: Tensor) -> list[int]:
    size, order = (change - change.median(0).values).norm(dim=1).sort(descending=True)
    half = size[: len(size) // 2 + 1]
    ratios = half[:-1] / half[1:].clamp_min(1e-30)
    if not float(size[0]) or float(ratios.max()) < STANDS_OUT:
        return []
    return sorted(order[: int(ratios.argmax()) + 1].tolist())


def _moved(value: Tensor, before: Tensor, seen: Watched) -> Tensor:
    if float((value - before).norm(dim=1).median()) == 0.0:
        return value - before
    settings = dict(next(iter(seen.optimizers))[1]) if seen.optimizers else {}
    decay = float(settings.get("lr", 0.0)) * float(settings.get("weight_decay", 0.0) or 0.0)
    usual = ((value * before).sum(1) / before.square().sum(1).clamp_min(1e-30)).median()
    left = [value - factor * before for factor in ((1 - decay) ** seen.steps, float(usual))]
    return min(left, key=lambda change: float(change.norm(dim=1).median()))


def scored_words(
    read: Sequence[tuple[set[int], set[int]]],
    total: int,
    others: Sequence[set[int]] = (),
    texts: Sequence[Sequence[set[int]]] | None = None,
) -> Answer:
    """Score how many uploads reveal their words, given pairs ``read`` (true token ids, inferred token ids).

    ``total``: number of uploads, also of those without a pair. ``others``: words of other texts, as distractors.
    ``texts``: for each upload, the words of each of its texts; ``None`` if each upload has one text.
    """

    def same(one: set[int], other: set[int]) -> bool:
        return words_f1(one, other) >= READ_F1

    def chance(place: int, guess: set[int]) -> tuple[float, bool]:
        own = [read[place][0]] if texts is None else texts[place]
        foreign = [truth for k, (truth, _) in enumerate(read) if k != place and not same(truth, read[place][0])]
        found = chance_of_words(guess, own, pool := left or foreign)
        return found, bool(pool) and found > max(1 - BAND, 1.5 / (1 + len(pool)))

    def counted(good: Sequence[bool], chances: list[float]) -> Counts:
        right, of = sum(good), len(good)
        return Counts(recognizable=right, nothing=of - right, failures=total - of, groups=of, chance=combined(chances))

    left = list(others)
    for text in [truth for truth, _ in read] if texts is None else [text for each in texts for text in each]:
        if text in left:
            left.remove(text)  # further equal texts are equal by chance, or repeated
    turned = []  # for each text, the words read from the next upload of another text
    for place, (own, _) in enumerate(read):
        following = (read[(place + step) % len(read)] for step in range(1, len(read)))
        turned.append(next((guess for truth, guess in following if not same(truth, own)), None))
    controls = [0.0 if guess is None else words_f1(own, guess) for (own, _), guess in zip(read, turned, strict=True)]
    chances = [chance(place, guess) for place, (_, guess) in enumerate(read)]
    good = [
        words_f1(*pair) >= max(READ_F1, control + MARGIN_F1) and not is_chance
        for pair, control, (_, is_chance) in zip(read, controls, chances, strict=True)
    ]
    shown = [
        Shown(original=sorted(truth), guess=sorted(guess), reconstructed=own)
        for (truth, guess), own in zip(read, good, strict=True)
    ]
    apart = [control >= READ_F1 for control, guess in zip(controls, turned, strict=True) if guess is not None]
    counts, control = counted(good, [found for found, _ in chances]), counted(apart, []) if apart else None
    return Answer(kind="text", counts=counts, control=control, shown=shown[:MOST_SHOWN])


class SeenNetwork(TextModel):
    """Adapter of a transformer observed in an app to the interface :class:`TextModel`."""

    causal = False

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    @property
    def words(self) -> nn.Embedding:  # type: ignore[override]
        found: nn.Embedding = self.network.get_input_embeddings()
        return found

    @property
    def attention_weights(self) -> Sequence[tuple[str, ...]]:
        return ()

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        inputs = embeddings.to(self.words.weight.dtype)
        made: Tensor = self.network(inputs_embeds=inputs, attention_mask=there.long())[0]
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenTexts:
    """Token ids ``words`` (N, L) of loaded batches, -1 for padding; ``number``: transformer's place in the modules."""

    number: int
    words: Sequence[Tensor]

    def kinds(self) -> set[int]:
        return {int(t) for tokens in self.words for t in tokens.unique() if t >= 0}


def texts_seen(seen: Watched) -> SeenTexts | None:
    """Find the transformer that was trained, and its loaded batches of tokens; ``None`` if either is missing."""
    for number, part in enumerate(seen.modules):
        network = network_in(part)
        if network is None:
            continue
        size = network.get_input_embeddings().num_embeddings
        padding = getattr(getattr(network, "config", None), "pad_token_id", None)
        found = [t for batch in seen.batches if (t := _tokens(batch, size, padding)) is not None]
        if found:
            return SeenTexts(number=number, words=found)
    return None


def network_in(part: Any) -> Any:
    """Return the Hugging Face transformer that ``part`` is or has as a direct child; ``None`` if there is none."""
    for module in (part, *part.children()):
        if hasattr(module, "get_input_embeddings") and hasattr(module, "config"):
            return module if isinstance(module.get_input_embeddings(), nn.Embedding) else None
    return None


def _tokens(batch: Any, size: int, padding: int | None) -> Tensor | None:
    """Return a loaded batch's token ids (N, L), all below ``size``, -1 for ``padding``; ``None`` if it has none."""
    whole = _texts_in(batch)

    def counts_up(numbers: Tensor) -> bool:  # as positions (N, L) do, which restart at 0 for each text
        steps = numbers.diff(dim=1)
        return bool((numbers[:, 0] == 0).all()) and bool(((steps == 1) | (numbers[:, 1:] == 0)).all())

    numbers = [t for t in whole if int(t.min()) >= 0 and 1 < int(t.max()) < size and not counts_up(t)]
    if not numbers:
        return None
    tokens = max(numbers, key=lambda t: int(t.unique().numel())).long()
    masks = [t for t in whole if t is not tokens and t.shape == tokens.shape and set(t.unique().tolist()) <= {0, 1}]
    if masks:
        return tokens.masked_fill(masks[0] == 0, -1)
    return tokens if padding is None else tokens.masked_fill(tokens == padding, -1)


def template_of(clients: Sequence[Watched]) -> set[int]:
    """Return the token ids in all texts, presumably a template's, and -1 (padding); -1 alone for up to two texts."""
    rows = [set(row.tolist()) for seen in clients if (own := texts_seen(seen)) for t in own.words for row in t]
    return (set.intersection(*rows) if len(rows) > 2 else set()) | {-1}


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstBlock:
    """True tokens, and tokens inferred from a transformer's first block. ``said``: the method, or why it failed."""

    truth: set[int]
    guess: set[int]
    said: str


def read_first_block(again: WatchedReply, tensors: Tensors, shares: str, *, examples: int) -> FirstBlock | None:
    """Infer tokens from the tensors of a transformer's first block; ``None`` if there is no transformer.

    ``again``: reply with observed training. ``tensors``: values by observed parameter name. ``shares``: kind of
    ``tensors``: ``weights``, ``delta`` or ``gradient``. ``examples``: number of examples from which they were computed.
    """
    seen = again.watched
    texts = texts_seen(seen)
    if texts is None:
        return None
    network = network_in(cleaned(seen.modules[texts.number]).eval())
    if network is None:
        return None
    inside, part = f"parts.{texts.number}.", seen.modules[texts.number]
    if not hasattr(part, "get_input_embeddings"):
        inside += next(f"{path}." for path, child in part.named_children() if hasattr(child, "get_input_embeddings"))
    model = SeenNetwork(network.float())
    sent = {f"network.{n.removeprefix(inside)}": v.float() for n, v in seen.before.items() if n.startswith(inside)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in sent and parameter.shape == sent[name].shape:
                parameter.copy_(sent[name])
            sent[name] = parameter.detach().float()
    own = {f"network.{n.removeprefix(inside)}": v.float() for n, v in tensors.items() if n.startswith(inside)}
    own = {name: value for name, value in own.items() if name in sent and value.shape == sent[name].shape}
    longest = min(_LONGEST, max(t.shape[1] for t in texts.words))
    observation = Observation(
        id=VictimId(1, 0, 0),
        model=model,
        sent=ModelState(sent),
        upload=Upload(tensors=own, num_examples=max(1, examples)),
        plan=_plan(seen, shares, examples),
        input_shape=(longest,),
        num_classes=1,
    )
    (found,) = tokens_of_first_block(model, [observation], seed=0)
    guess, said = (set(found.tokens.tolist()), found.note) if isinstance(found, Bag) else (set[int](), found)
    return FirstBlock(truth=texts.kinds(), guess=guess, said=said)


def _plan(seen: Watched, shares: str, examples: int) -> LocalPlan:
    if shares == "gradient":
        return LocalPlan(shares="gradient")
    kinds = {name for name, _ in seen.optimizers}
    if len(kinds) != 1 or (kind := next(iter(kinds))) not in OPTIMIZERS:
        raise NotAttackedError(f"steps of {', '.join(sorted(kinds)) or 'no optimizer'} are not undone; use SGD or Adam")
    ((_, stated), _), steps = seen.optimizers.most_common(1)[0], max(1, seen.steps)
    return LocalPlan(steps=steps, batch_size=max(1, examples // steps), **optimizer_in_plan(shares, kind, dict(stated)))


def words_of_uploads(found: Sequence[tuple[WatchedReply, WatchedReply]], *, uploaded: bool) -> Answer | None:
    """Score words inferred from a transformer's first block, if any; for the arguments see :func:`words_of`."""
    read, texts, notes = list[tuple[set[int], set[int]]](), list[list[set[int]]](), list[str]()
    seen = {id(client.watched): client.watched for client, _ in found}
    template = template_of([client.watched for client, _ in found])
    for _, again in found:
        tensors: Tensors = again.tensors() if uploaded else again.watched.gradients
        shares = again.matched.shares if uploaded else "gradient"
        one = read_first_block(again, tensors, shares, examples=max(1, again.watched.loaded))
        if one is None:
            return None
        texts.append([text - template for text in _each_text(again.watched)])
        read.append((one.truth - template, one.guess - template))
        notes.append(one.said)
    others = [text - template for one in seen.values() for text in _each_text(one)][:MOST_TEXTS]
    words, right = sum(len(truth) for truth, _ in read), sum(len(guess & truth) for truth, guess in read)
    false = sum(len(guess - truth) for truth, guess in read)
    named = f"Of {words} different words of {len(read)} uploads {right} were named, and {false} that are not there."
    return replace(scored_words(read, len(read), others, texts), notes=(NOTE, named, *notes[:1]))


def _each_text(seen: Watched) -> list[set[int]]:
    texts = texts_seen(seen)
    return [set(row) - {-1} for tokens in (texts.words if texts else ()) for row in tokens.tolist()]
