"""What an update of LoRA adapters gives away in the first round, where B is zero, and in later ones, where it is not.

    python experiments/lora_updates.py --network vit --out experiments/rows/lora_updates
    python experiments/lora_updates.py --network bert --out experiments/rows/lora_updates

A Vision Transformer of CIFAR-10 images and a BERT of SST-2 sentences with initial weights, whose adapters by peft
(rank 8, on queries and values) and head four clients train, one SGD step on 16 examples a round. Before round 1 and
after so many rounds, each of the victims' examples makes one step, and ``fl-privacy audit-update`` has both files.
The control is the same guesses' agreement with examples of other updates. Needs peft and transformers.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from row_file import Row, RowFile, takes_rows
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_privacy.auditing.update_audit import UpdateAuditRequest, audit_update
from fl_privacy.data import load_data, load_text
from fl_privacy.data.examples import LabelledExamples

LR, CLIENTS, BATCH, LENGTH, OTHERS = 0.1, 4, 16, 12, 300


def adapted(network: nn.Module, layers: list[str], head: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    adapters = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=layers, modules_to_save=[head])
    return get_peft_model(network, adapters).eval()  # type: ignore[arg-type,return-value]


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes)
    return adapted(ViTForImageClassification(config), ["q_proj", "v_proj"], "classifier")


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=2000, num_labels=2, max_position_embeddings=64, **sizes)
    return adapted(BertForSequenceClassification(config), ["query", "value"], "classifier")


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"vit": vit, "bert": bert}


def examples_of(network: str) -> LabelledExamples:
    if network == "vit":
        return load_data("cifar10_exact").test
    return load_text("sst2", vocabulary_size=2000, max_length=LENGTH).train


def outputs_of(net: nn.Module, inputs: Tensor) -> Tensor:
    if inputs.is_floating_point():
        return net(pixel_values=inputs).logits
    return net(input_ids=inputs.clamp_min(0), attention_mask=(inputs >= 0).long()).logits


def stepped(net: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the trained values after one SGD step on a batch; the network stays as it is."""
    own = {name: p for name, p in net.named_parameters() if p.requires_grad}
    loss = nn.functional.cross_entropy(outputs_of(net, inputs), labels)
    found = torch.autograd.grad(loss, list(own.values()))
    return {name: p.detach() - LR * g for (name, p), g in zip(own.items(), found, strict=True)}


def trained(net: nn.Module, examples: LabelledExamples, rounds: int, rng: torch.Generator) -> None:
    """Train the adapters for so many rounds of all clients, by the mean of their updates."""
    for _ in range(rounds):
        batches = (examples.batch(torch.randint(500, 900, (BATCH,), generator=rng)) for _ in range(CLIENTS))
        uploads = [stepped(net, batch.inputs, batch.labels) for batch in batches]
        mean = {name: torch.stack([one[name] for one in uploads]).mean(0) for name in uploads[0]}
        net.load_state_dict(mean, strict=False)


def as_peft(net: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict  # noqa: PLC0415

    state = {**net.state_dict(), **values}
    return {name: value.contiguous() for name, value in get_peft_model_state_dict(net, state).items()}  # type: ignore[arg-type]


def audited(network: str, rounds: int, victims: int, budget: str, place: Path) -> Row:
    examples, net = examples_of(network), NETWORKS[network]()
    trained(net, examples, rounds, torch.Generator().manual_seed(0))
    sizes = [float(value.abs().max()) for name, value in net.state_dict().items() if "lora_B" in name]
    save_file(as_peft(net, {}), place / "before.safetensors")
    for folder in ("updates", "truth"):
        (place / folder).mkdir()
    for number in range(victims):
        batch = examples.batch(torch.tensor([number]))
        save_file(
            as_peft(net, stepped(net, batch.inputs, batch.labels)), place / "updates" / f"victim-{number}.safetensors"
        )
        save(place / "truth" / f"victim-{number}.npz", batch.inputs, batch.labels)
    rest = examples.batch(torch.arange(victims, victims + OTHERS))
    save(place / "others.npz", rest.inputs, rest.labels)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom lora_updates import NETWORKS\n"
    (place / "net.py").write_text(f"{code}net = NETWORKS[{network!r}]\n")
    began = time.process_time()
    done = audit_update(
        UpdateAuditRequest(
            before=place / "before.safetensors",
            after=place / "updates",
            model=f"{place}/net.py:net",
            shape=tuple(rest.inputs.shape[1:]),
            examples=(1,),
            data=place / "truth",
            others=place / "others.npz",
            out=place / "out",
            budget=budget,
        )
    )
    (answer,) = done.answers
    counts, control = answer.counts, answer.control
    if counts is None:
        return {"largest_B": round(max(sizes), 6), "reason": answer.reason}
    return {
        "largest_B": round(max(sizes), 6),
        "reconstructed": counts.read,
        "of": counts.judged + counts.failures,
        "control": None if control is None else control.read,
        "words": f"{counts.words.read} of {counts.words.there}" if counts.words.there else None,
        "first_line": done.record().headline,
        "seconds": round(time.process_time() - began),
    }


def save(place: Path, inputs: Tensor, labels: Tensor) -> None:
    np.savez(place, inputs=inputs.numpy(), labels=labels.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=list(NETWORKS), nargs="+", default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 1, 10])
    parser.add_argument("--victims", type=int, default=6)
    parser.add_argument("--budget", default="quick")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    for network in options.network:
        for rounds in options.rounds:
            key = {"lora": network, "rounds_before": rounds, "victims": options.victims, "budget": options.budget}
            if kept.find(key) is None:
                with tempfile.TemporaryDirectory() as place:
                    row = audited(network, rounds, options.victims, options.budget, Path(place))
                print(kept.add(key, {name: value for name, value in row.items() if value is not None}), flush=True)


if __name__ == "__main__":
    main()
