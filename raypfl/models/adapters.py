"""Small modules inside a network, which can be trained in place of it."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualAdapter(nn.Module):
    """``y = x + conv1x1(norm(x))`` on feature maps ``[b, C, H, W]`` (Rebuffi et al. 2017; Xie et al. 2024).

    It begins as almost the identity: the convolution's weights are drawn from N(0, 1e-4^2), and its bias is zero.
    C^2 + 2 C parameters, and C more with a bias.
    """

    def __init__(self, channels: int, norm: nn.Module, bias: bool = True):
        super().__init__()
        self.norm = norm
        self.conv = nn.Conv2d(channels, channels, 1, bias=bias)
        nn.init.normal_(self.conv.weight, std=1e-4)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x))
