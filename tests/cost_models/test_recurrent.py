"""tests cost_models/recurrent.py."""

from cost_models.compute import work_time
from cost_models.device import device
from cost_models.operators import work
from cost_models.work import TensorInfo


def tensor(*shape: int) -> TensorInfo:
    return TensorInfo(shape, 2, "bf16")


def lstm(steps: int, batch: int = 4):
    weights = [tensor(64, 8), tensor(64, 16), tensor(64), tensor(64)]
    return work(
        "aten.lstm.input", [tensor(steps, batch, 8), tensor(1, batch, 16), *weights], [tensor(steps, batch, 16)]
    )


def test_each_weight_meets_each_token_once():
    """An LSTM of width 16 on 8 features: 4 gates."""
    assert lstm(10).flops == 2 * 10 * 4 * (64 * 8 + 64 * 16)


def test_steps_wait_for_each_other():
    """Ten times the steps take ten times the launches."""
    h100 = device("h100_sxm")
    assert (lstm(10).steps, lstm(100).steps) == (10, 100)
    assert work_time(lstm(100), h100) >= 100 * h100.launch_latency_s


def test_backward_takes_twice_the_products():
    """Gradients of inputs and of weights."""
    inputs = [tensor(10, 4, 8), tensor(64, 8), tensor(64, 16)]
    forward = work("aten._cudnn_rnn.default", inputs, [tensor(10, 4, 16)])
    assert work("aten._cudnn_rnn_backward.default", inputs, [tensor(10, 4, 8)]).flops == 2 * forward.flops


def test_a_fused_cell_is_pointwise():
    """Its products are outside it."""
    gates = [tensor(4, 64), tensor(4, 64), tensor(4, 16)]
    assert work("aten._thnn_fused_lstm_cell.default", gates, [tensor(4, 16), tensor(4, 16)]).products == ()


def test_fused_attention_blocks():
    """Projections of 4 E^2 a token and 4 T E a token of attention; the feed-forward's weights too."""
    x = tensor(2, 10, 32)
    tokens, attention = 20, 4 * 2 * 10 * 10 * 32
    found = work(
        "aten._native_multi_head_attention.default",
        [x, x, x, tensor(96, 32), tensor(96)],
        [x],
        (None, None, None, 32, 4),
    )
    assert found.flops == 2 * tokens * 4 * 32 * 32 + attention == sum(product.flops for product in found.products)
    weights = [tensor(96, 32), tensor(32, 32), tensor(128, 32), tensor(32, 128)]
    layer = work("aten._transformer_encoder_layer_fwd.default", [x, *weights], [x], (None, 32, 4))
    assert layer.flops == 2 * tokens * (4 * 32 * 32 + 2 * 32 * 128) + attention
