"""Digits from the gradients that clients share: what an honest-but-curious server reconstructs, in twenty lines."""

import torch
from torch.nn.functional import cross_entropy

from fl_privacy import Batch, Observation, evaluate, reconstruct, show
from fl_privacy.data import load_data
from fl_privacy.models import LeNet

torch.manual_seed(0)
digits = load_data("mnist_mini").test
images, labels = digits.images[::150][:6].float() / 255, digits.labels[::150][:6]
net = LeNet(in_channels=1, image_size=28, num_classes=10, init="uniform_0.5")

shared = []  # what clients share, each of one image
for number in range(len(images)):
    loss = cross_entropy(net(images[number : number + 1]), labels[number : number + 1])
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    shared.append(Observation.of_gradients(net, gradients, input_shape=(1, 28, 28), batch_size=1, number=number))

found = reconstruct(shared, "idlg", iterations=100)
for number, one in enumerate(found):
    score = evaluate(one, Batch(images[number : number + 1], labels[number : number + 1])).images[0]
    print(f"a {int(labels[number])}: PSNR {score.values['psnr']:.1f} dB")
show(found, images).save("attack.png")  # originals above, reconstructions below
