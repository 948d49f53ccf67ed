"""Runs the authors' public DAGER, as it is, on given texts: what ``dager_code.py`` calls by an older Python.

Not a command of its own: it reads ``asked.json`` in the folder that it is started in, and writes ``answered.json`` and
the gradients there. It needs the packages that the authors' ``environment.yml`` names, and none of ours.
"""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Rouge:
    """Stands for the metric of the hub, by which the program sorts what it has read."""

    def compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        """Compute the F1 of the words of the first pair."""
        guess, truth = predictions[0].split(), references[0].split()
        common = sum(min(guess.count(word), truth.count(word)) for word in set(guess))
        value = 2 * common / max(1, len(guess) + len(truth))
        return {"rouge1": SimpleNamespace(mid=SimpleNamespace(fmeasure=value))}


def main() -> None:
    asked = json.loads(Path("asked.json").read_text())
    import datasets  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    datasets.load_metric = lambda *args, **kwargs: Rouge()
    os.environ.setdefault("HF_TOKEN", "")
    torch.set_num_threads(1)
    sys.path.insert(0, asked["program"])
    sys.argv = ["attack.py", *asked["arguments"]]
    import attack  # noqa: PLC0415

    wrapper, answers = attack.ModelWrapper(attack.args), []
    head = getattr(wrapper.model, "score", None) or wrapper.model.classifier
    save_file({name: p.detach().contiguous().clone() for name, p in head.named_parameters()}, "head.safetensors")
    for number, texts in enumerate(asked["texts"]):
        labels = torch.tensor([asked["labels"][number]])
        batch = wrapper.tokenizer(texts, padding=True, return_tensors="pt")
        gradients = wrapper.compute_grads(batch, labels)
        names = [name for name, p in wrapper.model.named_parameters() if p.requires_grad]
        kept = {n: g.detach().contiguous().clone() for n, g in zip(names, gradients, strict=True) if g is not None}
        save_file(kept, f"gradients_{number}.safetensors")
        began, reason, read = time.process_time(), "", []
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                read, _ = attack.reconstruct(attack.args, "cpu", (texts, labels), Rouge(), wrapper)
            except Exception as error:  # noqa: BLE001
                reason = f"{type(error).__name__}: {error}"[:200]
        tokens = [
            row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        guessed = [wrapper.tokenizer(text, add_special_tokens=False)["input_ids"] for text in read]
        answers.append({"tokens": tokens, "guessed": guessed, "seconds": time.process_time() - began, "reason": reason})
        Path("answered.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
