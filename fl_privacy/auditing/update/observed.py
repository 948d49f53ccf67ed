"""What the change between two files shows of the training behind it, with one observation for each assumption."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.auditing.update.model import example_files, layers_in_words, named_as_in
from fl_privacy.errors import UserError
from fl_privacy.federation.interception.infer_plan import recognize_training
from fl_privacy.files.foreign import expanded
from fl_privacy.files.updates import SavedArrays, read_arrays
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import LocalPlan, ModelState, Observation, Upload, VictimId
from fl_privacy.types.modality import TEXTS, modality_of
from fl_privacy.types.user_gradients import examples_by_rank

MOST_UPDATES, _UNKNOWN_RATE = 1000, 0.01
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True, eq=False)
class SavedUpdate:
    """Values sent and uploaded, by the model's names; ``delta`` is the upload if it is a change."""

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


def pairs_of(before: Path, after: Path) -> Iterator[tuple[str, SavedArrays, SavedArrays]]:
    """Yield name, values before and values after of each update.

    ``after`` is a file or a folder of files. ``before`` is a file for all of them, or a folder with a file of the same
    name for each; if both are one folder, each file is followed by the next, as the rounds of a training.

    Raises:
        UserError: files are missing, or can't be read.
    """
    before, after = expanded(before), expanded(after)
    if not after.is_dir():
        if before.is_dir():
            raise UserError(f"BEFORE is expected to be a file, as AFTER is, but {before} is a folder; name a file.")
        yield after.stem, read_arrays(before), read_arrays(after)
        return
    files = example_files(after)[: MOST_UPDATES + 1]
    if before.resolve() == after.resolve():
        pairs = list(pairwise(files))
    elif before.is_dir():
        alike = {path.stem: path for path in example_files(before)}
        if lost := [path.name for path in files if path.stem not in alike]:
            raise UserError(f"BEFORE is expected to hold a file for each of AFTER, but has none for {lost[0]}; add it.")
        pairs = [(alike[path.stem], path) for path in files]
    else:
        pairs = [(before, path) for path in files]
    if not 0 < len(pairs) <= MOST_UPDATES:
        raise UserError(f"{after} is expected to hold updates, at most {MOST_UPDATES}, but holds {len(pairs)}.")
    for first, last in pairs:
        yield last.stem, read_arrays(first), read_arrays(last)


def update_of(network: nn.Module, name: str, before: SavedArrays, after: SavedArrays) -> SavedUpdate:
    """Put two files into the network's names, and say which layers they lack.

    Raises:
        UserError: they do not fit the network, or are equal.
    """
    if before.is_change:
        raise UserError("BEFORE is expected to hold weights, but holds a change (WEIGHT_DIFF); give the model as sent.")
    values, said = named_as_in(network, before.arrays, "BEFORE")
    moved, more = named_as_in(network, after.arrays, "AFTER")
    own = {n: p.detach() for n, p in network.named_parameters()}
    kept = {n: b.detach() for n, b in network.named_buffers()}
    if unsent := [n for n in moved if n in own and n not in values]:
        raise UserError(
            f"BEFORE is expected to hold all that AFTER has, but not {layers_in_words(unsent)}; give the model as"
            " it was sent."
        )
    said += [*more, *before.said, *after.said]
    if absent := [n for n in own if n not in values]:
        said.append(
            f"{len(absent)} of {len(own)} parameters are in neither file ({layers_in_words(absent)}): the values that"
            " --model makes are taken, which must be those of the client."
        )
    if withheld := [n for n in own if n in values and n not in moved]:
        said.append(f"{len(withheld)} of {len(own)} parameters are not uploaded: {layers_in_words(withheld)}.")
    upload = {n: moved[n] for n in own if n in moved}
    buffers = {n: kept[n] if n not in moved else moved[n] for n in kept} if any(n in moved for n in kept) else {}
    sent = ModelState({n: values.get(n, own[n]) for n in own}, {n: values.get(n, kept[n]) for n in kept})
    if after.is_change:
        buffers = {n: sent.buffers[n] + moved[n] if n in moved else sent.buffers[n] for n in buffers}
    found = SavedUpdate(name, sent, upload, buffers, after.is_change, after.steps, tuple(said))
    if not any(bool(change.any()) for change in found.change.values()):
        raise UserError(f"{name}: AFTER is expected to differ from BEFORE, but no parameter does; nothing was trained.")
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Inferred:
    """What an update shows of its training, as far as it does.

    Attributes:
        steps: number of local steps that batch norm counted, or that the file states.
        examples: number of examples of one step, from the rank of a layer's change.
        rate: learning rate times steps.
        classes: (K,) share of each class.
    """

    num_classes: int
    steps: int | None
    examples: int | None
    rate: float | None
    classes: Tensor | None


def inferred(network: nn.Module, update: SavedUpdate, shape: tuple[int, ...], num_classes: int) -> Inferred:
    """Infer what can be inferred before an attack.

    The change of the output layer's bias is -rate (p - c): p are the outputs, c the shares of classes. For classes that
    the batch lacks it is -rate p, which gives the rate, and then c.
    """
    counted = [int((v - update.sent.buffers[n]).max()) for n, v in update.buffers.items() if n.endswith(_COUNTER)]
    steps = min((count for count in counted if 0 < count < 1_000_000), default=update.steps)
    text = modality_of(network) is TEXTS
    gradient = {n: -c for n, c in update.change.items()}
    examples = None if text else examples_by_rank(network, shape, update.sent.parameters, gradient)
    bias = (output_layer(network, num_classes) or (None, None))[1]
    known = Inferred(num_classes=num_classes, steps=steps, examples=examples, rate=None, classes=None)
    if bias not in gradient or text or num_classes < 2:
        return known
    likely = _outputs(network, update.sent, shape)
    step = gradient[bias].double()
    absent = step > 0
    rate = float(step[absent].sum() / likely[absent].sum().clamp_min(1e-6))
    return replace(known, rate=rate, classes=(likely - step / rate).clamp_min(0)) if 0 < rate < 1e9 else known


@torch.no_grad()
def _outputs(network: nn.Module, sent: ModelState, shape: tuple[int, ...]) -> Tensor:
    """Return the mean outputs (K,) of random examples at the values sent."""
    examples = torch.rand((16, *shape), generator=torch.Generator().manual_seed(0))
    made: Tensor = functional_call(detached_copy(network).eval(), {**sent.parameters, **sent.buffers}, (examples,))
    return made.double().softmax(1).mean(0)


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
    """Build the observation of an update under an assumption on its number of examples and steps."""
    rate = found.rate / steps if lr is None and found.rate is not None else lr
    plan = LocalPlan(
        shares="delta" if update.is_change else "weights",
        lr=rate or _UNKNOWN_RATE,
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
    seen, said = recognize_training(observation, ("shares", "lr", "batch_size", "steps", "epochs"))
    return replace(seen, plan=replace(seen.plan, lr=plan.lr), notes=tuple(said))
