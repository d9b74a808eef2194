"""The paper's networks, the small networks of the literature, and heads on scattering features."""

from __future__ import annotations

from ._convnet import ConvNet as ConvNet
from ._mlp import MLP as MLP
from ._wide_resnet import WideResNet as WideResNet
