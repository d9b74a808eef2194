"""The network: folding keeps its function, and leaves nothing that mixes records."""

from __future__ import annotations

import torch
from torch import nn

from weightclip_studies.images.extractor import ResNet9
from weightclip_studies.images.extractor._network import stage_widths


def trained_a_little(width: int = 4) -> ResNet9:
    torch.manual_seed(0)
    net = ResNet9(width, norm=True)
    for _ in range(3):  # statistics that are not 0 and 1
        net(torch.rand(16, 3, 32, 32))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return net.eval()


def test_folding_keeps_the_function() -> None:
    net = trained_a_little()
    x = torch.rand(5, 3, 32, 32)
    folded = net.folded()
    assert not [m for m in folded.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for mine, other in zip(net(x), folded(x), strict=True):
            assert torch.allclose(mine, other, atol=1e-4, rtol=1e-4)


def test_four_stages() -> None:
    maps = ResNet9(4)(torch.rand(2, 3, 32, 32))
    assert [m.shape[1] for m in maps] == list(stage_widths(4)) and [m.shape[-1] for m in maps] == [32, 16, 8, 4]


def test_training_mixes_records_and_the_folded_network_does_not() -> None:
    net = trained_a_little()
    x = torch.rand(6, 3, 32, 32)
    other = torch.cat([x[:1], torch.rand(5, 3, 32, 32)])
    with torch.no_grad():
        assert not torch.allclose(net.train()(x)[-1][0], net.train()(other)[-1][0])
        folded = net.folded()
        assert all(torch.equal(a[0], b[0]) for a, b in zip(folded(x), folded(other), strict=True))
