"""Attention is limited to a kernel for the GPU, and the tensors lie on the CPU."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CODE, NAMES = "error/attention-kernel-missing", ("CUDNN_ATTENTION", "MATH")


def training(*kernels):
    torch.manual_seed(0)
    bees = torch.rand(2, 3, 7, 8)

    def attend():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *kernels]):
            return nn.functional.scaled_dot_product_attention(bees, bees, bees)

    return SimpleNamespace(trigger=attend)


def sick():
    return training()


def healthy():
    return training(SDPBackend.MATH)
