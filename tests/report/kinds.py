"""A small run of every kind, recorded as the experiments record them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fl_privacy.measure import ImageScore, VictimScore
from fl_privacy.runs.folder import RunFolder
from fl_privacy.runs.folder.leakage import REHEARSED
from fl_privacy.types import Certainty, VictimId
from tests.report.test_inferred import finding
from tests.results.runs import config, defended, record, score

THREATS = [
    "The server is honest but curious: it follows the protocol and analyzes what it receives.",
    "Not tested: malicious parameters, malicious architecture, inconsistent models, Sybils.",
    "Each client uploads the gradient of one batch.",
    "The attack targets 6 extra batches of one example. Each client uploads its usual update of such a batch, as if"
    " it were all its data; the model is not trained on these uploads.",
    "The attacker knows the architecture, the values each client was sent, and how clients train.",
    "The attacker has no further knowledge of clients or their data.",
    "This is a simulation: all client randomness, including noise, is derived from the run's seed, which the attacker"
    " does not know. Deployed clients use secrets of their own.",
    "Privacy: no guarantee, since nothing is drawn at random.",
]
WORDS = ("the", "film", "was", "un", "##believ", "##ably", "long", "and", "I", "loved", "every", "minute")


def text_score(victim: int, *, right: int, failure: str | None = None) -> VictimScore:
    """Score a text with ``right`` reconstructed tokens."""
    guess = (*WORDS[:right], *("[UNK]",) * (len(WORDS) - right))
    share = right / len(WORDS)
    values = {
        "token_f1": share,
        "token_precision": share,
        "token_recall": share,
        "rouge_l": share,
        "exact_match": 0.0,
        "control_f1": 0.1,
    }
    return VictimScore(
        id=VictimId(1, 0, victim),
        images=(
            ImageScore(
                image=0,
                guess=None if failure else 0,
                values={} if failure else values,
                failure=failure,
                certainty=Certainty.PROVEN if right == len(WORDS) else Certainty.APPROXIMATE,
            ),
        ),
        originals=torch.arange(len(WORDS))[None],
        guesses=torch.arange(len(WORDS))[None],
        attack_loss=1 - share,
        sentences=((WORDS, None if failure else guess),),
    )


def texts(out: Path, *, label: str = "text", right: int = 9, accuracy: float | None = None) -> Path:
    """Record a run that attacked texts."""
    changes = {
        "data": {"name": "sst2"},
        "model": {"name": "bert_tiny"},
        "choices": {"defense": label, "attack": "dager"},
    }
    with _opened(out, label, changes) as folder:
        folder.write_threat_model(THREATS)
        scores = [text_score(k, right=min(len(WORDS), right + k % 4)) for k in range(6)]
        for one in scores:
            folder.add_victim(one)
        folder.save_reconstructions(1, scores)
        folder.add_attack(round=1, victims=6, seconds=3.0)
        if accuracy is not None:
            _train(folder, accuracy)
        folder.finish()
    return folder.path


def attack(out: Path, *, noise: float = 0.05, failures: int = 0, victims: int = 6) -> Path:
    """Record an attack without training."""
    with _opened(out, "attack", {"command": "attack"}) as folder:
        folder.write_threat_model(THREATS)
        scores = [
            score(0, k, noise=noise, failure="The model can't be differentiated twice." if k < failures else None)
            for k in range(victims)
        ]
        for one in scores:
            folder.add_victim(one)
        folder.save_reconstructions(0, scores)
        folder.add_attack(round=0, victims=victims, seconds=3.0)
        folder.finish()
    return folder.path


def audit(
    out: Path, *, known: bool = True, certainty: Certainty = Certainty.APPROXIMATE, rehearsed: bool = True
) -> Path:
    """Record an audit of somebody else's app.

    Its images are ``known`` or not, the attacker is of ``certainty``, and attacks uploads of the server's own if it was
    ``rehearsed``.
    """
    changes = {"command": "audit", "federation": {"strategy": "FedAvg", "rounds": 3, "plan": {}}}
    with _opened(out, "audit", changes) as folder:
        folder.write_threat_model([THREATS[0], THREATS[4], *[REHEARSED] * rehearsed])
        scores = [score(3, k, noise=0.05) for k in range(4)]
        if not known:
            blank = [ImageScore(image=0, guess=0, values={}, certainty=certainty)]
            scores = [replace(s, originals=None, labels=torch.tensor([3]), images=tuple(blank)) for s in scores]
        for one in scores:
            folder.add_victim(one)
        folder.save_reconstructions(3, scores)
        folder.add_attack(round=3, victims=4, seconds=3.0)
        folder.finish()
    return folder.path


def inference(out: Path, *, value: float = 0.3) -> Path:
    """Record a run that asked who took part and whose examples are, and attacked no image."""
    with _opened(out, "inference", {"inference": {"name": "membership"}}) as folder:
        folder.write_threat_model(THREATS)
        _train(folder, 0.6)
        for one in (finding(value), finding(0.4, about="source", chance=0.25)):
            folder.add_finding(one)
        folder.finish()
    return folder.path


def malicious(out: Path) -> Path:
    """Record an attack by a server that does not follow the protocol."""
    server = {"_target_": "fl_privacy.malicious.Imprint", "bins": 64}
    chosen = {"defense": "none", "attack": "none", "server": "imprint"}
    with _opened(out, "malicious", {"command": "attack", "server": server, "choices": chosen}) as folder:
        folder.write_threat_model([f"The server is malicious (malicious architecture). {WORDS[1]}", *THREATS[1:]])
        scores = [score(0, k, noise=0.001) for k in range(6)]
        scores = [replace(s, images=(replace(s.images[0], certainty=Certainty.PROVEN),)) for s in scores]
        for one in scores:
            folder.add_victim(one)
        folder.save_reconstructions(0, scores)
        folder.add_attack(round=0, victims=6, seconds=1.0)
        folder.finish()
    return folder.path


def nothing(out: Path) -> Path:
    """Record a training that nobody attacked."""
    with _opened(out, "nothing", {}) as folder:
        _train(folder, 0.6)
        folder.finish()
    return folder.path


def every_kind(out: Path) -> dict[str, Path]:
    """By name."""
    return {
        "run": record(out, label="run", changes=defended(scale=0.1), noise=0.3, adaptive=0.05, undefended_accuracy=0.7),
        "attack": attack(out),
        "audit": audit(out),
        "audit without truth": audit(out / "unknown", known=False),
        "text": texts(out),
        "inference": inference(out),
        "malicious": malicious(out),
    }


def _opened(out: Path, label: str, changes: Mapping[str, object]) -> RunFolder:
    settings = config(**changes)
    text = "\n".join(f"{key}: {value}" for key, value in settings.items())
    folder = RunFolder.open_or_create(out, label=label, config=settings, config_text=text)
    folder.write_environment(seed=0)
    return folder


def _train(folder: RunFolder, accuracy: float) -> None:
    from fl_privacy.federation import Evaluation  # noqa: PLC0415
    from tests.results.runs import round_report  # noqa: PLC0415

    for round in (1, 2, 3):
        tested = Evaluation(accuracy=accuracy * round / 3, loss=1.0 / round, num_examples=100)
        folder.add_round(round_report(round, clients=(0, 1)), tested)
