"""What is tried first in a notebook, twelve times: each gives the right answer or one clear line."""

import copy
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from fl_privacy import Batch, LocalPlan, Observation, evaluate, reconstruct, show, to_dataframe
from fl_privacy.defenses import dp_noise, pruning, quantization, soteria
from fl_privacy.errors import UserError


def net_of(inputs: int = 64, outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.Sigmoid(), nn.Linear(32, outputs))


IMAGES, LABELS = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3])


def shared_by(net: nn.Module, images: Tensor = IMAGES, labels: Tensor = LABELS) -> tuple[Tensor, ...]:
    return torch.autograd.grad(cross_entropy(net(images), labels), list(net.parameters()))


def one_line(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_1_a_resnet_of_ones_own() -> None:
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=10).eval()
    images = torch.rand(1, 3, 32, 32)
    observation = Observation.of_gradients(net, shared_by(net, images), input_shape=(3, 32, 32))
    found = reconstruct(observation, "inverting_gradients", iterations=2)
    assert found.batch is not None and found.batch.inputs.shape == images.shape
    assert found.batch.labels.tolist() == [3]
    assert show(found, images).height >= 128


def trained(net: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net(IMAGES), LABELS).backward()
        optimizer.step()


@pytest.mark.parametrize("form", ["modules", "values", "arrays"])
def test_2_fedavg_of_five_steps(form: str) -> None:
    net = net_of()
    before = copy.deepcopy(net)
    trained(net, 5)
    plan = LocalPlan(shares="weights", lr=0.1, steps=5)
    given: dict[str, tuple[object, object, nn.Module | None]] = {
        "modules": (before, net, None),
        "values": (before.state_dict(), net.state_dict(), net),
        "arrays": (
            [value.numpy() for value in before.state_dict().values()],
            [value.numpy() for value in net.state_dict().values()],
            net,
        ),
    }
    first, last, model = given[form]
    observation = Observation.of_update(first, last, plan, model=model, input_shape=(1, 8, 8), num_examples=1)  # type: ignore[arg-type]
    found = reconstruct(observation, "exact")
    assert evaluate(found, Batch(IMAGES, LABELS)).images[0].values["psnr"] > 30


def test_2_an_update_that_is_none_says_so() -> None:
    net, plan = net_of(), LocalPlan(shares="weights", lr=0.1, steps=5)

    def observed(before: object, after: object, **options: object) -> Observation:
        return Observation.of_update(before, after, plan, **{"input_shape": (1, 8, 8), "num_examples": 1, **options})  # type: ignore[arg-type]

    assert "deepcopy" in one_line(lambda: observed(net, net))
    assert "are equal" in one_line(lambda: observed(net, net.state_dict()))
    assert "model=net" in one_line(lambda: observed(net.state_dict(), copy.deepcopy(net.state_dict())))
    after = copy.deepcopy(net)
    trained(after, 1)
    assert "num_examples=8" in one_line(lambda: observed(net, after, num_examples=0))
    assert "3 entries" not in one_line(lambda: observed(net, [torch.zeros(1)]))
    wrong = {**after.state_dict(), "1.weight": torch.zeros(3)}
    assert "(32, 64)" in one_line(lambda: observed(net, wrong))


def test_2_a_plan_of_several_steps_says_what_is_shared() -> None:
    assert "shares=weights" in one_line(lambda: LocalPlan(lr=0.1, steps=5))


def test_2_running_statistics_go_along() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    before, images = copy.deepcopy(net), torch.rand(4, 1, 8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cross_entropy(net(images), torch.arange(4)).backward()
    optimizer.step()
    plan = LocalPlan(lr=0.1)
    observation = Observation.of_update(before, net, plan, input_shape=(1, 8, 8), num_examples=4)
    assert set(observation.upload.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert observation.plan.shares == "weights" and observation.plan.buffers == "shared"
    only = dict(net.named_parameters())
    without = Observation.of_update(before, only, plan, input_shape=(1, 8, 8), num_examples=4)
    assert not without.upload.buffers and without.plan.buffers == "withheld"


def test_3_three_defenses_in_a_loop() -> None:
    net = net_of()
    gradients, read = shared_by(net), {}
    for defense in (dp_noise(clip_norm=1.0, scale=0.1), pruning(rate=0.9), quantization(bits=8)):
        defended = defense.apply(gradients)
        found = reconstruct(Observation.of_gradients(net, defended, input_shape=(1, 8, 8), batch_size=1), "analytic")
        read[defense.name] = evaluate(found, Batch(IMAGES, LABELS)).images[0].values["psnr"]
    assert read["dp_noise"] < 15
    assert read["quantization"] > 30
    assert float((pruning(rate=0.9).apply(gradients)[0] == 0).float().mean()) > 0.85
    again = [dp_noise(clip_norm=1.0, scale=0.1).apply(gradients, seed=seed)[0] for seed in (0, 0, 1)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])


def test_3_what_can_not_be_applied_says_why() -> None:
    net = net_of()
    gradients = shared_by(net)
    assert "model=net" in one_line(lambda: soteria().apply(gradients))
    changed = soteria().apply(gradients, model=net, batch=Batch(IMAGES, LABELS))
    assert len(changed) == len(gradients) and not torch.equal(changed[2], gradients[2])
    from fl_privacy.defenses import instahide  # noqa: PLC0415

    assert "fl-privacy run defense=instahide" in one_line(lambda: instahide().apply(gradients))
    assert "is str" in one_line(lambda: pruning(rate=0.5).apply(["a"]))


def test_4_regression() -> None:
    net, target = net_of(outputs=1), torch.tensor([[0.7]])
    gradients = torch.autograd.grad(mse_loss(net(IMAGES), target), list(net.parameters()))
    for loss in (nn.MSELoss(), lambda outputs, wanted: ((outputs - wanted) ** 2).mean()):
        observed = Observation.of_gradients(net, gradients, input_shape=(1, 8, 8), batch_size=1, loss=loss)
        found = reconstruct(observed)
        assert found.batch is not None
        torch.testing.assert_close(found.batch.inputs, IMAGES, atol=1e-4, rtol=0)
        assert found.batch.labels.item() == pytest.approx(0.7, abs=1e-3)


def test_5_binary_cross_entropy() -> None:
    net, target = net_of(outputs=1), torch.tensor([[1.0]])
    gradients = torch.autograd.grad(binary_cross_entropy_with_logits(net(IMAGES), target), list(net.parameters()))
    found = reconstruct(Observation.of_gradients(net, gradients, input_shape=(1, 8, 8), loss="bce"))
    assert found.batch is not None and found.batch.labels.item() == 1
    torch.testing.assert_close(found.batch.inputs, IMAGES, atol=1e-4, rtol=0)


def test_6_rows_of_a_table() -> None:
    torch.manual_seed(0)
    net, row = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2)), torch.randn(1, 12)
    gradients = shared_by(net, row, torch.tensor([1]))
    found = reconstruct(Observation.of_gradients(net, gradients, input_shape=(12,)))
    assert found.batch is not None and found.batch.labels.tolist() == [1]
    torch.testing.assert_close(found.batch.inputs, row, atol=1e-4, rtol=0)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


def test_7_an_lstm_on_words_is_refused_and_not_taken_for_private() -> None:
    net, tokens = Lstm(), torch.randint(50, (1, 6))
    gradients = shared_by(net, tokens, torch.tensor([1]))
    line = one_line(lambda: Observation.of_gradients(net, gradients, input_shape=(6,)))
    assert "numbers of words" in line and "TextModel" in line and "protects nobody" in line
    assert gradients[0].any(1).nonzero().flatten().tolist() == sorted(set(tokens.flatten().tolist()))


def test_8_a_network_of_hugging_face_on_words_is_refused_and_its_outputs_on_images_are_taken() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    net, tokens = transformers.BertForSequenceClassification(config).eval(), torch.randint(50, (1, 6))
    gradients = torch.autograd.grad(net(tokens, labels=torch.tensor([1])).loss, list(net.parameters()))
    assert "word_embeddings" in one_line(lambda: Observation.of_gradients(net, gradients, input_shape=(6,)))
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, num_labels=10,
    )  # fmt: skip
    vit = transformers.ViTForImageClassification(config).eval()
    shared = torch.autograd.grad(cross_entropy(vit(IMAGES).logits, LABELS), list(vit.parameters()))
    found = reconstruct(
        Observation.of_gradients(vit, shared, input_shape=(1, 8, 8), batch_size=1), "idlg", iterations=2
    )
    assert found.batch is not None and found.batch.labels.tolist() == [3]


def test_9_arrays_of_numpy() -> None:
    net = net_of()
    arrays = [gradient.numpy() for gradient in shared_by(net)]
    found = reconstruct(Observation.of_gradients(net, arrays, input_shape=(1, 8, 8)))
    score = evaluate(found, Batch(IMAGES.numpy(), LABELS.numpy()))  # type: ignore[arg-type]
    assert score.images[0].values["psnr"] > 50
    assert show(found, IMAGES.numpy()).height >= 128


def test_10_labels_that_nobody_tells() -> None:
    net = net_of()
    observation = Observation.of_gradients(net, shared_by(net), input_shape=(1, 8, 8))
    found = reconstruct(observation, "idlg", iterations=2)
    assert found.batch is not None and found.batch.labels.tolist() == [3] and found.label_source == "inferred"
    refused = reconstruct(observation, "inverting_gradients", labels="known", iterations=2)
    assert refused.batch is None and "observation.given(labels=labels)" in str(refused.failure)
    known = reconstruct(observation.given(labels=LABELS), "inverting_gradients", labels="known", iterations=2)
    assert known.label_source == "known"


def test_11_gray_images_without_a_channel() -> None:
    net, images = net_of(784), torch.rand(1, 28, 28)
    found = reconstruct(Observation.of_gradients(net, shared_by(net, images), input_shape=(28, 28)))
    assert found.batch is not None and found.batch.inputs.shape == images.shape
    assert evaluate(found, Batch(images, LABELS)).images[0].values["psnr"] > 50
    assert show(found, images).height >= 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_12_cuda_where_there_is_none() -> None:
    net = net_of()
    observation = Observation.of_gradients(net, shared_by(net), input_shape=(1, 8, 8))
    assert "PyTorch sees none" in one_line(lambda: reconstruct(observation, device="cuda"))
    assert reconstruct(observation, device="auto").batch is not None


def test_double_precision_is_kept() -> None:
    net, images = net_of().double(), IMAGES.double()
    observation = Observation.of_gradients(net, shared_by(net, images), input_shape=(1, 8, 8))
    for attack, options in (("auto", {}), ("idlg", {"iterations": 2})):
        found = reconstruct(observation, attack, **options)
        assert found.batch is not None and found.batch.inputs.dtype == torch.float64


def test_every_result_is_a_table_and_a_csv(tmp_path: Path) -> None:
    net = net_of()
    found = reconstruct(Observation.of_gradients(net, shared_by(net), input_shape=(1, 8, 8)))
    score = evaluate(found, Batch(IMAGES, LABELS))
    table = to_dataframe(score)
    assert table["psnr"].item() == score.images[0].values["psnr"] and "psnr" in repr(score)
    to_dataframe([score, score]).to_csv(tmp_path / "read.csv", index=False)
    assert len(pd.read_csv(tmp_path / "read.csv")) == 2
    assert "evaluate(found" in one_line(lambda: to_dataframe(found))  # type: ignore[arg-type]
