"""A training that goes on where it was stopped: what server and clients hold after a round, in a folder of tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_privacy.defenses import ClientState
from fl_privacy.federation import RoundReport
from fl_privacy.federation.server import Evaluation, Server
from fl_privacy.types import ModelState

Course = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a training has come to.

    Attributes:
        round: the last one that was trained.
        states: what each client keeps for itself after it.
        report: of that round.
        course: a row of figures of the private layers for each round.
        cpu_seconds: of all rounds.
    """

    round: int = 0
    states: Mapping[int, ClientState]
    report: RoundReport | None = None
    course: Course = field(default_factory=list)
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class KeptTraining:
    """A folder that holds the last state of a training; a file appears whole or not at all."""

    folder: Path

    @property
    def exists(self) -> bool:
        return (self.folder / "training.json").exists()

    def save(self, server: Server, done: Done) -> None:
        """Replace what the folder holds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"parameters/{n}": t for n, t in server.state.parameters.items()}
        tensors |= {f"buffers/{n}": t for n, t in server.state.buffers.items()}
        for client, state in done.states.items():
            tensors |= {f"client-{client}/{n}": t for n, t in state.tensors.items()}
        name = f"round-{done.round}.safetensors"
        save_file({n: t.detach().contiguous().clone() for n, t in tensors.items()}, self.folder / name)
        about = {
            "file": name,
            "round": done.round,
            "clients": list(done.states),
            "report": asdict(done.report) if done.report else None,
            "course": list(done.course),
            "cpu_seconds": done.cpu_seconds,
        }
        unfinished = self.folder / "training.json.new"
        unfinished.write_text(json.dumps(about))
        unfinished.replace(self.folder / "training.json")
        for old in self.folder.glob("round-*.safetensors"):
            if old.name != name:
                old.unlink()

    def load(self, server: Server) -> Done:
        """Load the training that was saved; ``server`` gets its model back."""
        about = json.loads((self.folder / "training.json").read_text())
        tensors = load_file(self.folder / about["file"])
        server.state = ModelState(_below("parameters", tensors), _below("buffers", tensors))
        report = about["report"]
        if report and report["evaluation"]:
            report["evaluation"] = Evaluation(**report["evaluation"])
        return Done(
            round=about["round"],
            states={client: ClientState(_below(f"client-{client}", tensors)) for client in about["clients"]},
            report=RoundReport(**report) if report else None,
            course=about["course"],
            cpu_seconds=about["cpu_seconds"],
        )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}/"): t for n, t in tensors.items() if n.startswith(f"{prefix}/")}
