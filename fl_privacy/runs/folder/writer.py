"""Write the folder of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from fl_privacy.effects import Part
from fl_privacy.files import write_whole
from fl_privacy.measure.roc import Finding
from fl_privacy.runs.folder.claims import read_claims
from fl_privacy.runs.folder.identity import FORMAT, Identity, describe_environment, run_hash
from fl_privacy.runs.folder.leakage import described_facts
from fl_privacy.runs.folder.ongoing import CONFIG, IDENTITY, METRICS, SUMMARY, Teller, hold, is_finished, move_aside
from fl_privacy.runs.folder.pictures import film_of, write_films, write_pairs, write_rows, write_sentences
from fl_privacy.runs.folder.records import RecordWriter, dump_json, image_record, read_records
from fl_privacy.runs.folder.summary import Summary, summarize
from fl_privacy.runs.folder.verdict import judged
from fl_privacy.types.victim_ids import Attacker, VictimId

if TYPE_CHECKING:
    from torch import Tensor

    from fl_privacy.federation import Evaluation, RoundReport
    from fl_privacy.measure import VictimScore
    from fl_privacy.measure.distortion import Tracing, UpdateDistortion
    from fl_privacy.types import Reconstruction


class RunFolder:
    """Writes a run's records one by one, so that none is lost if the process dies; a ``finished`` run takes no more."""

    def __init__(self, path: Path, identity: Identity, *, lock: FileLock | None) -> None:
        self.path: Path = path
        self.identity: Identity = identity
        self.finished: bool = lock is None
        self._started = time.monotonic()
        self._lock = lock
        self._records = None if lock is None else RecordWriter(path / METRICS)
        self.teller: Teller = Teller(path)
        self._threats: tuple[str, ...] = ()

    @classmethod
    def open_or_create(
        cls,
        out: Path,
        *,
        label: str,
        config: Mapping[str, Any],
        config_text: str,
        undefended: bool = False,
        overwrite: bool = False,
    ) -> RunFolder:
        """Open or create the folder ``<out>/<label>-<hash>`` of the run with settings ``config``.

        An interrupted run is renamed (``...-interrupted-1``); so is a finished one if ``overwrite``
        (``...-previous-1``). ``UserError`` if another process is recording this run.
        """
        identity = Identity.of(label, config, undefended=undefended)
        path = out / folder_name(label, config)
        if is_finished(path) and not overwrite:
            return cls(path, identity, lock=None)
        with ExitStack() as unless_opened:
            lock = hold(path)
            unless_opened.callback(lock.release)
            if is_finished(path) and not overwrite:  # finished by the last holder of the lock
                return cls(path, identity, lock=None)
            if path.exists():
                move_aside(path, "previous" if is_finished(path) else "interrupted")
            path.mkdir(parents=True)
            write_whole(path / CONFIG, config_text)
            write_whole(path / IDENTITY, dump_json({"format": FORMAT, **vars(identity)}, indent=1))
            folder = cls(path, identity, lock=lock)
            unless_opened.pop_all()
        return folder

    def write_environment(self, *, seed: int) -> None:
        self._write("environment.json", describe_environment(seed=seed))

    def write_threat_model(self, sentences: Sequence[str]) -> None:
        self._threats = tuple(sentences)
        self._write("threat_model.json", list(sentences))

    def write_defense(self, parts: Iterable[Part]) -> None:
        self._write("defense.json", [{"name": part.name, "strength": part.strength} for part in parts])

    def write_partition(self, counts: Sequence[Sequence[int]], class_names: Sequence[str]) -> None:
        content = {"class_names": list(class_names), "counts": [[int(n) for n in row] for row in counts]}
        write_whole(self.path / "partition.json", dump_json(content))

    def add_privacy(
        self, *, delta: float, accountant: str, missing: str | None, unit: str | None = None, covered: bool = False
    ) -> None:
        self._append(kind="privacy", delta=delta, accountant=accountant, missing=missing, unit=unit, covered=covered)

    def add_round(
        self, report: RoundReport, evaluation: Evaluation | None = None, *, epsilon: float | None = None
    ) -> None:
        self._append(
            kind="round",
            round=report.round,
            accuracy=evaluation.accuracy if evaluation else None,
            test_loss=evaluation.loss if evaluation else None,
            train_loss=report.train_loss,
            clients=list(report.clients),
            excluded=dict(report.excluded),
            seconds=report.seconds,
            defense_seconds=report.defense_seconds,
            upload_bytes=report.upload_bytes,
            epsilon=epsilon,
        )

    def add_victim(self, score: VictimScore, *, attacker: Attacker = Attacker.PLAIN) -> None:
        for image in score.images:
            label = {} if score.labels is None else {"label": int(score.labels[image.image])}
            self._append(kind="image", attacker=attacker, **image_record(score, image), **label)
        if score.history:
            id, loss = score.id, list(score.history)
            self._append(kind="history", attacker=attacker, id=str(id), round=id.round, loss=loss)

    def add_update_distortion(self, id: VictimId, distortion: UpdateDistortion, solving: Mapping[str, float]) -> None:
        figures = {**asdict(distortion), **solving}
        self._append(kind="update_distortion", id=str(id), round=id.round, client=id.client, **figures)

    def add_tracing(self, tracing: Tracing, *, round: int, attacker: Attacker = Attacker.PLAIN) -> None:
        self._append(kind="tracing", attacker=attacker, round=round, **asdict(tracing))

    def add_attack(
        self,
        *,
        round: int,
        victims: int,
        seconds: float,
        batch_norm: str | None = None,
        attacker: Attacker = Attacker.PLAIN,
        countermeasures: Sequence[str] = (),
        candidates_from: str | None = None,
        uploads: str | None = None,
    ) -> None:
        figures = {"victims": victims, "seconds": seconds, "batch_norm": batch_norm, "candidates_from": candidates_from}
        figures |= {"uploads": uploads}
        self._append(kind="attack", attacker=attacker, round=round, countermeasures=list(countermeasures), **figures)

    def add_finding(self, finding: Finding) -> None:
        self._append(kind="inference", **finding.as_record())

    def save_reconstructions(
        self, round: int, scores: Sequence[VictimScore], *, attacker: Attacker = Attacker.PLAIN
    ) -> None:
        if scores:
            has_rows = any(score.rows is not None for score in scores)
            write = write_rows if has_rows else write_sentences if scores[0].sentences else write_pairs
            write(self.path / "reconstructions", round, scores, attacker)

    def save_films(
        self,
        found: Sequence[Reconstruction],
        scores: Sequence[VictimScore],
        *,
        pieces: Callable[[Tensor], Sequence[str]],
        attacker: Attacker = Attacker.PLAIN,
    ) -> None:
        films = [film_of(one, score, pieces) for one, score in zip(found, scores, strict=True)]
        if known := [film for film in films if film is not None]:
            write_films(self.path / "reconstructions", known, attacker)

    def finish(self, *, undefended_accuracy: float | None = None) -> Summary:
        if self._records is not None:
            self._records.close()
        records, _ = read_records(self.path / METRICS)
        summary = summarize(
            records,
            finished=True,
            undefended_accuracy=undefended_accuracy,
            total_seconds=time.monotonic() - self._started,
        )
        self.teller.clear()
        false = any(claim.is_false for claim in read_claims(self.path))
        facts = described_facts(self.identity, records, threats=self._threats)
        verdict = judged(summary, facts, claim_is_false=false)
        self._write(SUMMARY, {"verdict": verdict.as_plain(), **summary.as_json()})
        self.finished = True
        self.close()  # only now: the next holder of the lock finds a finished run
        return summary

    def close(self) -> None:
        try:
            if self._records is not None:
                self._records.close()
                self.teller.clear()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, name: str, content: object) -> None:
        write_whole(self.path / name, dump_json(content, indent=1))

    def _append(self, **record: Any) -> None:
        if self._records is None:
            raise RuntimeError(f"{self.path} holds a finished run; nothing can be added to it.")
        self._records.append(record)


def folder_name(label: str, config: Mapping[str, Any]) -> str:
    """Return the folder name ``LABEL-HASH`` of the run with settings ``config``."""
    return f"{label}-{run_hash(config)}"
