"""Semantic operators, such as attention, dropout and experts, as operators of the torch library "autoshard".

Each operator has a reference in plain PyTorch. It is one node of a graph, so it has one sharding rule, and one kernel
may replace it. The table of Triton kernels, `autoshard.kernels.registry`, imports triton. This package does not import
the table. No module of this folder works on meshes or plans.
"""

from autoshard.kernels.attention import attention, attention_backward, attention_composite
from autoshard.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autoshard.kernels.ctc_loss import ctc_loss, ctc_loss_backward
from autoshard.kernels.dequantize import dequantize_nf4
from autoshard.kernels.dropout import dropout
from autoshard.kernels.exchange import EXCHANGING
from autoshard.kernels.exchanged_experts import (
    exchanged_experts,
    exchanged_experts_backward,
    exchanged_experts_keeping,
    exchanged_experts_kept_backward,
)
from autoshard.kernels.experts import experts, experts_backward
from autoshard.kernels.newton_schulz import muon_direction, orthogonalise
from autoshard.kernels.optimizers import (
    adam_update,
    amsgrad_update,
    momentum_update,
    muon_update,
    sgd_update,
    sum_of_squares,
)
from autoshard.kernels.philox import keep_mask, philox_4x32, random_words
from autoshard.kernels.random_numbers import random
from autoshard.kernels.recurrent import gru, gru_backward, lstm, lstm_backward, rnn, rnn_backward
from autoshard.kernels.rejection import binomial, gamma, poisson
from autoshard.kernels.ring_attention import ring_attention, ring_attention_backward
from autoshard.kernels.rms_norm import rms_norm_backward_reference, rms_norm_composite
from autoshard.kernels.split_cross_entropy import split_cross_entropy, split_cross_entropy_backward

__all__ = [
    "EXCHANGING",
    "adam_update",
    "amsgrad_update",
    "attention",
    "attention_backward",
    "attention_composite",
    "binomial",
    "cross_entropy",
    "cross_entropy_backward",
    "ctc_loss",
    "ctc_loss_backward",
    "dequantize_nf4",
    "dropout",
    "exchanged_experts",
    "exchanged_experts_backward",
    "exchanged_experts_keeping",
    "exchanged_experts_kept_backward",
    "experts",
    "experts_backward",
    "gamma",
    "gru",
    "gru_backward",
    "keep_mask",
    "lstm",
    "lstm_backward",
    "momentum_update",
    "muon_direction",
    "muon_update",
    "orthogonalise",
    "philox_4x32",
    "poisson",
    "random",
    "random_words",
    "ring_attention",
    "ring_attention_backward",
    "rms_norm_backward_reference",
    "rms_norm_composite",
    "rnn",
    "rnn_backward",
    "sgd_update",
    "split_cross_entropy",
    "split_cross_entropy_backward",
    "sum_of_squares",
]
