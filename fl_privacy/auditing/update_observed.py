"""Infer the training behind the change between two files, and build an observation for each assumption."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.auditing.update_given import files_of, layers_in_words, named_as_in
from fl_privacy.errors import UserError
from fl_privacy.federation.interception.infer_plan import recognize_training
from fl_privacy.files.foreign import expanded
from fl_privacy.files.updates import SavedArrays, read_arrays
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import LocalPlan, ModelState, Observation, Upload, VictimId
from fl_privacy.types.modality import TEXTS, modality_of
from fl_privacy.types.user_gradients import examples_by_rank

MOST_UPDATES, UNKNOWN_RATE = 1000, 0.01
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True, eq=False)
class SentModel:
    """Model before the training: values in the file BEFORE (``held``: their names), else those of the network."""

    state: ModelState
    held: frozenset[str]
    said: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SavedUpdate:
    """One client's update, loaded from files: model before training (``sent``), and uploaded parameters and buffers.

    ``is_change``: ``True`` if ``upload`` is the change, ``False`` if it is the new values. ``steps``: number of local
    steps, if the file states it. ``said``: sentences for the page.
    """

    name: str
    sent: ModelState
    upload: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    is_change: bool
    steps: int | None
    said: tuple[str, ...]

    @cached_property
    def change(self) -> dict[str, Tensor]:
        return {n: t if self.is_change else t - self.sent.parameters[n] for n, t in self.upload.items()}


def updates_of(network: nn.Module, before: Path, after: Path) -> list[SavedUpdate]:
    """Read the updates of a file, or of a folder of files.

    ``before`` is a file for all of them, or a folder with a file of the same name for each. If both are the same
    folder, each file holds an update of the model in the previous file. ``UserError`` for missing or unfit files.
    """
    before, after = expanded(before), expanded(after)
    files = files_of(after) if after.is_dir() else [after]
    alike = {path.stem: path for path in files_of(before)} if before.is_dir() else {}
    if before.resolve() == after.resolve() and alike:
        pairs = list(pairwise(files))
    elif lost := [path.name for path in files if alike and path.stem not in alike]:
        raise UserError(f"BEFORE is expected to hold a file for each of AFTER, but has none for {lost[0]}; add it.")
    else:
        pairs = [(alike.get(path.stem, before), path) for path in files]
    if not 0 < len(pairs) <= MOST_UPDATES:
        raise UserError(f"{after} is expected to hold 1 to {MOST_UPDATES} updates, but has {len(pairs)}; give others.")
    sent = {first: sent_of(network, read_arrays(first)) for first in dict.fromkeys(first for first, _ in pairs)}
    found = []
    for first, last in pairs:
        read, ends = read_arrays(last), [re.findall(r"\d+", path.stem)[-1:] for path in (first, last)]
        if first.parent == last.parent and all(ends) and (gap := int(ends[1][0]) - int(ends[0][0])) > 1:
            gone = f"{gap - 1} round{'s are' if gap > 2 else ' is'} missing between {first.stem} and {last.stem}"
            read = replace(read, said=(*read.said, f"{gone}: their change is attacked as that of one round."))
        found.append(update_of(network, last.stem, sent[first], read))
    return found


def sent_of(network: nn.Module, before: SavedArrays) -> SentModel:
    """Return the model sent to the client, from the arrays in the file BEFORE; ``UserError`` if they do not fit."""
    if before.is_change:
        raise UserError("BEFORE is expected to hold weights, but holds a change (WEIGHT_DIFF); give the model as sent.")
    values, said = named_as_in(network, before.arrays, "BEFORE")
    parameters = {n: values.get(n, p.detach()) for n, p in network.named_parameters()}
    buffers = {n: values.get(n, b.detach()) for n, b in network.named_buffers()}
    if absent := [n for n in parameters if n not in values]:
        said.append(
            f"{len(absent)} of {len(parameters)} parameters are not in BEFORE ({layers_in_words(absent)}): those that"
            " --model makes are taken, which must be the client's."
        )
    return SentModel(ModelState(parameters, buffers), frozenset(values), (*said, *before.said))


def update_of(network: nn.Module, name: str, before: SentModel, after: SavedArrays) -> SavedUpdate:
    """Build the update ``name`` from files before and after training; ``UserError`` if they do not fit or are equal."""
    moved, said = named_as_in(network, after.arrays, "AFTER")
    sent = before.state
    upload = {n: moved[n] for n in sent.parameters if n in moved}
    if unsent := [n for n in upload if n not in before.held]:
        raise UserError(
            f"BEFORE is expected to hold all that AFTER has, but lacks {layers_in_words(unsent)}; give the model as"
            " sent."
        )
    if withheld := [n for n in sent.parameters if n in before.held and n not in moved]:
        said.append(f"{len(withheld)} of {len(before.held)} arrays are not uploaded: {layers_in_words(withheld)}.")
    uploaded = {n: moved[n] + (b if after.is_change else 0) for n, b in sent.buffers.items() if n in moved}
    buffers = {**sent.buffers, **uploaded} if uploaded else {}
    said = [*before.said, *said, *after.said]
    found = SavedUpdate(name, sent, upload, buffers, after.is_change, after.steps, tuple(said))
    if not any(bool(change.any()) for change in found.change.values()):
        raise UserError(f"{name}: AFTER is expected to differ from BEFORE, but does not; give the trained model.")
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Inferred:
    """Facts about the training that an update reveals.

    ``backwards``: ``True`` if the files seem swapped, since else the batch would hold all classes but one.
    """

    num_classes: int
    steps: int | None  # number of local steps that batch norm counted, or that the file states
    examples: int | None  # number of examples of one step, from the rank of a layer's change
    rate: float | None  # learning rate times steps; ``None`` if not inferred, like other fields
    classes: Tensor | None  # (K,) share of each class
    backwards: bool = False


def inferred(network: nn.Module, update: SavedUpdate, shape: tuple[int, ...], num_classes: int) -> Inferred:
    """Infer learning rate, numbers of steps and examples, and shares of classes before an attack."""
    counted = [int((v - update.sent.buffers[n]).max()) for n, v in update.buffers.items() if n.endswith(_COUNTER)]
    if min(counted, default=0) < 0:
        raise UserError(
            f"BEFORE is expected to be the earlier model, but batch norm counted {-min(counted)} fewer batches in"
            " AFTER; exchange the files."
        )
    steps = min((count for count in counted if 0 < count < 1_000_000), default=update.steps)
    text = modality_of(network) is TEXTS
    gradient = {n: -c for n, c in update.change.items()}
    examples = None if text else examples_by_rank(network, shape, update.sent.parameters, gradient)
    bias = (output_layer(network, num_classes) or (None, None))[1]
    known = Inferred(num_classes=num_classes, steps=steps, examples=examples, rate=None, classes=None)
    if bias not in gradient or text or num_classes < 2:
        return known
    noise = torch.rand((16, *shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = {**update.sent.parameters, **update.sent.buffers}
        likely = functional_call(detached_copy(network).eval(), values, (noise,)).double().softmax(1).mean(0)
    # the bias changes by -rate (p - c) for mean softmax outputs p and classes' shares c: absent ones give the rate
    step = gradient[bias].double()
    absent = step > 0
    known = replace(known, backwards=num_classes > 3 and int((step < 0).sum()) == num_classes - 1)
    rate = float(step[absent].sum() / likely[absent].sum().clamp_min(1e-6))
    return replace(known, rate=rate, classes=(likely - step / rate).clamp_min(0)) if 0 < rate < 1e9 else known


def observation_of(
    network: nn.Module,
    update: SavedUpdate,
    shape: tuple[int, ...],
    found: Inferred,
    *,
    examples: int,
    steps: int,
    lr: float | None,
    number: int,
) -> Observation:
    """Build what an attacker observes of ``update``, assuming ``steps`` local steps on ``examples`` examples.

    ``shape``: shape of an example. ``found``: facts inferred from the update. ``lr``: learning rate; ``None`` takes the
    rate in ``found``. ``number``: index of the update.
    """
    rate = found.rate / steps if lr is None and found.rate is not None else lr
    plan = LocalPlan(
        shares="delta" if update.is_change else "weights",
        lr=rate or UNKNOWN_RATE,
        steps=steps,
        batch_size=examples,
        buffers="shared" if update.buffers else "withheld",
    )
    observation = Observation(
        id=VictimId(0, number, None),
        model=network,
        sent=update.sent,
        upload=Upload(tensors=dict(update.upload), buffers=dict(update.buffers), num_examples=examples),
        plan=plan,
        input_shape=shape,
        num_classes=found.num_classes,
        loss=CROSS_ENTROPY if modality_of(network) is TEXTS else None,
    )
    if modality_of(network) is TEXTS:
        return observation
    seen, said = recognize_training(observation, ("shares", "lr", "batch_size", "steps", "epochs"))
    return replace(seen, plan=replace(seen.plan, lr=plan.lr), notes=tuple(said))
