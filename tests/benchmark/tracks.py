"""A track of a few cells that takes seconds."""

from pathlib import Path

TINY = """
version: 3
about: A tiny one.
settings: [data=mnist_mini, model=lenet_dlg, federation.clients=2, page=false, candidates=40]
attack: [attack=inverting_gradients, attack.iterations=2, threat_model=adaptive]
early: 1
trainings:
  FedSGD: [federation=fedsgd, federation.rounds=2, federation.plan.batch_size=8, evaluate_every=2]
uploads:
  one image:
    training: FedSGD
    states: [untrained, early]
    attack: [victims=2]
    servers: {imprint: [server=imprint, server.bins=8]}
    server_states: [trained]
accuracy_loss: [5, 100]
defenses:
  Pruning: [defense=pruning, "defense.rate=0.5,0.99"]
left_out: {ats: for the test}
evaluators: {}
"""

OWN = '''
"""A defense that is not in the package."""

from fl_privacy.defenses import Defense
from fl_privacy.effects import Part


def mostly_sent(*, share: float = 0.9) -> Defense:
    """Scale what is sent."""

    def on_upload(tensors, state, rng):
        return {name: share * tensor for name, tensor in tensors.items()}

    return Defense(parts=(Part("mostly_sent", {"share": share}, strength="share"),), upload=(on_upload,))
'''


def write_track(folder: Path, text: str = TINY) -> str:
    """Write a track with ``text`` and return its path."""
    path = folder / "tiny_track.yaml"
    path.write_text(text)
    return str(path)


def write_defense(folder: Path, text: str = OWN, name: str = "mostly_mine.py") -> str:
    """Write a file with a defense and return its path."""
    path = folder / name
    path.write_text(text)
    return str(path)
