"""The small end-to-end networks on which private image classification is usually compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """A feature extractor and a dense classifier; build the two published ones by `for_mnist` and `for_cifar10`.

    Both are the networks of Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy"
    (2021), whose activation is tanh: bounded, with gain 1.

    Example:
        >>> import torch
        >>> SmallCNN.for_mnist()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> SmallCNN.for_cifar10()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    @classmethod
    def for_mnist(cls, num_classes: int = 10, activation: Callable[[], nn.Module] = nn.Tanh) -> Self:
        """26,010 parameters on 1 x 28 x 28 inputs (MNIST, Fashion-MNIST).

        The max-poolings overlap (2x2 windows, stride 1), as published: their l2 gain is 2 each.
        """
        features = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),  # 16 x 14 x 14
            activation(),
            nn.MaxPool2d(2, 1),  # 16 x 13 x 13
            nn.Conv2d(16, 32, 4, stride=2),  # 32 x 5 x 5
            activation(),
            nn.MaxPool2d(2, 1),  # 32 x 4 x 4
        )
        classifier = nn.Sequential(nn.Linear(512, 32), activation(), nn.Linear(32, num_classes))
        return cls(features, classifier)

    @classmethod
    def for_cifar10(cls, num_classes: int = 10, activation: Callable[[], nn.Module] = nn.Tanh) -> Self:
        """550,570 parameters on 3 x 32 x 32 inputs: three pairs of 3x3 convolutions, each with 2x2 average-pooling."""
        layers: list[nn.Module] = []
        c_in = 3
        for c_out in (32, 64, 128):
            layers += [nn.Conv2d(c_in, c_out, 3, padding=1), activation()]
            layers += [nn.Conv2d(c_out, c_out, 3, padding=1), activation(), nn.AvgPool2d(2)]
            c_in = c_out
        classifier = nn.Sequential(nn.Linear(128 * 4 * 4, 128), activation(), nn.Linear(128, num_classes))
        return cls(nn.Sequential(*layers), classifier)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
