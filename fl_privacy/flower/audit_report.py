"""What an audit captured, from the first update to the page."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Result

from fl_privacy.effects import Description
from fl_privacy.errors import UserError
from fl_privacy.experiment.attack_by_name import attack_called
from fl_privacy.flower.audit_records import ProbedImages
from fl_privacy.flower.audited_model import AuditedModel
from fl_privacy.flower.records import to_tensor
from fl_privacy.interception import CaptureWriter, WaitingUpdates, changed, recognize_training
from fl_privacy.models import normalized
from fl_privacy.results.occupancy import CAPTURES
from fl_privacy.types import LocalPlan, ModelState, Observation, VictimId

logger = logging.getLogger(__name__)

ATTACK = "auto"
"""What audits attack with unless they are told otherwise."""


class NothingCapturedError(UserError):
    """An audit that captured nothing, which says nothing about privacy; ``result`` is that of the training."""

    result: Result | None = None


@dataclass(eq=False)
class AuditReport:
    """Writes captured updates down, attacks them when the training is done, and writes the page.

    Attributes:
        out: folder of the audits' folders.
        attack: a name with settings, or an attack.
        strategy: name of the one that trains.
        model: of the clients.
        victims: single images that clients are asked for in a round, at most.
        identified: clients that say which partition they hold.
    """

    out: Path
    attack: Any
    strategy: str
    model: AuditedModel
    victims: int

    def __post_init__(self) -> None:
        self._attack, self._attack_name = attack_called(self.attack)
        self._reset()

    def _reset(self) -> None:
        self._observations: WaitingUpdates | None = None
        self._found: Counter[str] = Counter()
        self._images: dict[VictimId, ProbedImages] = {}
        self._defense: Description = ()
        self._folder: Any = None
        self._writer: CaptureWriter | None = None
        self._told: frozenset[str] = frozenset()
        self.identified: set[int] = set()

    @contextmanager
    def opened(self, plan: LocalPlan, told: frozenset[str], audited: Sequence[int], rounds: int) -> Iterator[None]:
        """Record into a new folder; what an audit told alike left there before is moved aside.

        Args:
            plan: how clients train.
            told: which of its fields the user gave.
            audited: rounds.
            rounds: in all.
        """
        from fl_privacy.results import RunFolder  # noqa: PLC0415
        from fl_privacy.results.records import dump_json  # noqa: PLC0415

        self._reset()
        self._told = told
        config = self._config(plan, audited, rounds)
        try:
            folder = RunFolder.open_or_create(
                self.out,
                label=f"audit-{self.strategy}-{self.model.name}",
                config=config,
                config_text=dump_json(config, indent=1),
                overwrite=True,
            )
        except OSError as error:
            raise UserError(
                f"out is expected to be a folder that can be written, but {self.out} can't ({error.strerror})."
            ) from error
        with folder:
            captures = folder.path / CAPTURES
            self._folder, self._writer = folder, CaptureWriter(captures)
            self._observations = WaitingUpdates(captures, written=True)
            self._note()
            yield

    def captured(self, observation: Observation) -> None:
        """Take an update: find out how its client trained, and write it down."""
        assert self._writer is not None and self._observations is not None
        known, said = recognize_training(observation, self._told)
        self._found.update(said)
        self._writer.write(known)
        self._observations.append(known)

    def probed(self, victim: VictimId, images: ProbedImages) -> None:
        """Take what a client says of the images behind its answer to a probe."""
        self._images[victim] = images
        self._note()

    def defended(self, parts: Description) -> None:
        """Take what a client says of its defense."""
        if parts and not self._defense:
            self._defense = parts
            self._note()

    def finish(self, result: Result, seen: Counter[str]) -> str:
        """Attack what was captured and write the page; returns a line on both.

        Args:
            result: of the training.
            seen: what went wrong with replies, and how often.

        Raises:
            NothingCapturedError: there is nothing.
        """
        if not self._observations:
            raise self._nothing(result, seen)
        from fl_privacy.experiment.captured_app import AppReport, report_app  # noqa: PLC0415

        observations = self._with_clients_normalization()
        return report_app(
            AppReport(
                observations=observations,
                source=self.model.source,
                fingerprints={victim: tuple(i.fingerprints) for victim, i in self._images.items()},
                defense=self._defense,
                found=self._found,
                said=self._sources(),
                victims=self.victims,
                identified=frozenset(self.identified),
                rates_estimated=self._rates_estimated,
                problems=[f"{why} ({n} times)" if n > 1 else why for why, n in seen.items() if why],
            ),
            self._attack,
            self._attack_name,
            self._folder,
        )

    @property
    def _rates_estimated(self) -> bool:
        return "lr" not in self._told

    @property
    def _normalization(self) -> Any:
        """As the user told it, else as clients do, else as the data are."""
        of_clients = [images.normalization for images in self._images.values()]
        told = self.model.normalization
        return told if self.model.told or not of_clients else of_clients[0]

    def _sources(self) -> list[str]:
        """Where what is known of the images' normalization comes from."""
        if self.model.told:
            return ["How images are normalized was told."]
        clients = {images.normalization for images in self._images.values()}
        said = [f"Clients say that they normalize images by {one.in_words()}." for one in clients if one is not None]
        seen = self.model.source.normalization
        return said or ([f"The images of data are normalized by {seen.in_words()}."] if seen else [])

    def _with_clients_normalization(self) -> Sequence[Observation]:
        """The observations, by a model that normalizes as the clients say that they do."""
        assert self._observations is not None
        chosen, own = self._normalization, self.model.normalization
        if chosen == own:
            return self._observations
        model = self.model.network
        if own is not None:
            model._forward_pre_hooks.clear()
        network = model if chosen is None else normalized(model, chosen)
        return changed(self._observations, lambda observation: replace(observation, model=network))

    def _note(self) -> None:
        """What the captures themselves don't hold, for attacks on them later."""
        from fl_privacy.experiment.captured_app import Note, write_note  # noqa: PLC0415

        note = Note(
            model=self.model.path,
            normalization=self._normalization,
            defense=self._defense,
            fingerprints={str(victim): tuple(images.fingerprints) for victim, images in self._images.items()},
            rates_estimated=self._rates_estimated,
        )
        write_note(self._folder.path, note)

    def _nothing(self, result: Result, seen: Counter[str]) -> NothingCapturedError:
        from fl_privacy.experiment.weights import MODEL, write_weights  # noqa: PLC0415

        kept = ""
        if result.arrays is not None:
            path = self._folder.path / MODEL
            write_weights(path, ModelState({n: to_tensor(a.numpy()) for n, a in result.arrays.items()}))
            kept = f" The trained weights are in {path}."
        why = max(seen, key=lambda reason: seen[reason], default="") or "no client replied in the audited rounds"
        return NothingCapturedError(
            f"The audit is expected to capture updates, but captured none, which says nothing about privacy: {why};"
            f" audit rounds in which clients train, and see the warnings above.{kept}"
        )

    def _config(self, plan: LocalPlan, audited: Sequence[int], rounds: int) -> dict[str, Any]:
        normalization = self.model.normalization
        return {
            "command": "audit",
            "choices": {
                "data": self.model.source.name,
                "model": "custom",
                "federation": self.strategy,
                "attack": self._attack_name,
            },
            "data": {"name": self.model.source.name},
            "model": {
                "_target_": self.model.path,
                "input_shape": list(self.model.input_shape),
                "num_classes": self.model.num_classes,
                **({} if normalization is None else asdict(normalization)),
            },
            "federation": {"strategy": self.strategy, "rounds": rounds, "plan": asdict(plan)},
            "attack": {"name": self._attack_name},
            "intercept": {"uploads": "both", "rounds": list(audited)},
            "victims": self.victims,
            "batch_size": 1,
            "seed": 0,
        }
