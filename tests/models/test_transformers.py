"""ViT-S/16: parameter counts, adapters, and attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.common.messages import unmarked
from raypfl.learning.privacy import PrivacySettings
from raypfl.models import FlatModel
from raypfl.models.architectures.transformer import Attention, ViTS16
from tests.support.federation import FP64, Federation, assert_close

SMALL = {"size": 8, "width": 12, "depth": 2, "heads": 3, "patch": 4, "adapter_size": 5}


def small(adapters: str = "bottleneck") -> nn.Module:
    return ViTS16((2, 4, 4), 3, adapters=adapters, **SMALL)


def test_a_vit_s_16_has_the_published_number_of_parameters_and_599050_of_them_adapt():
    with torch.device("meta"):
        plain = ViTS16((3, 32, 32), 10)
        adapted = ViTS16((3, 32, 32), 10, adapters="bottleneck")

    counts = [sum(p.numel() for p in network.parameters()) for network in (plain, adapted)]
    assert counts == [21_669_514, 21_669_514 + 595_200]
    model = FlatModel(small, 0, torch.float32, trained="adapters, output layer")
    assert model.num_parameters == 2 * (2 * 12 * 5 + 12 + 5) + 39 and not model.num_buffers
    assert set(FlatModel(small, 0, torch.float32).names("input layer")) == {
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
    }


def test_attention_is_torchs_and_adapters_begin_as_the_identity():
    attention = Attention(12, 3)
    x = torch.randn(2, 7, 12)
    reference = nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(attention.qkv.weight)
        reference.in_proj_bias.copy_(attention.qkv.bias)
        reference.out_proj.weight.copy_(attention.proj.weight)
        reference.out_proj.bias.copy_(attention.proj.bias)

    torch.testing.assert_close(attention(x), reference(x, x, x)[0])
    adapted = small()
    plain = small("none")
    x = torch.randn(2, 2, 4, 4)
    plain.load_state_dict({n: t for n, t in adapted.state_dict().items() if "adapter" not in n})

    assert torch.equal(adapted(x), plain(x))
    nn.init.normal_(adapted.blocks[0].adapter.up.weight)
    F.cross_entropy(adapted(x), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in adapted.named_parameters() if "0.adapter" in n)


def test_private_training_of_a_transformer_is_the_same_vectorised_and_sequential():
    rows = []
    for executor in ("vectorised", "sequential"):
        settings = PrivacySettings(noise=0.5, clip=0.1)
        fed = Federation(small, executor=executor, training=replace(FP64, epochs=1), privacy=settings)
        clients = fed.clients()
        rows.append(unmarked(clients.sgd(clients.loss, clients.initial, train="adapters, output layer")))
        assert not fed.warnings
    assert_close(rows[0], rows[1])


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"model.size is 30; it must be a multiple of model.patch, which is 16"):
        ViTS16((3, 32, 32), 10, size=30)
