"""The paper's networks, the small networks of the literature, and heads on scattering features."""

from __future__ import annotations

from ._convnet import ConvNet as ConvNet
from ._mlp import MLP as MLP
from ._scattering_head import ScatteringHead as ScatteringHead
from ._small_cnn import SmallCNN as SmallCNN
from ._wide_resnet import WideResNet as WideResNet
