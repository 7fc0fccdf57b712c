"""Work of recurrent layers and of fused blocks of attention."""

import pytest

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
    """An LSTM multiplies each weight of its 4 gates once with each token."""
    assert lstm(10).flops == 2 * 10 * 4 * (64 * 8 + 64 * 16)


def test_steps_wait_for_each_other():
    """A layer of 100 steps counts 100 launches, and one of 10 steps counts 10."""
    h100 = device("h100_sxm")
    assert (lstm(10).steps, lstm(100).steps) == (10, 100)
    assert work_time(lstm(100), h100) >= 100 * h100.launch_latency_s


def test_backward_takes_twice_the_products():
    """The backward of a recurrent layer counts twice the forward's FLOPs."""
    inputs = [tensor(10, 4, 8), tensor(64, 8), tensor(64, 16)]
    forward = work("aten._cudnn_rnn.default", inputs, [tensor(10, 4, 16)])
    assert work("aten._cudnn_rnn_backward.default", inputs, [tensor(10, 4, 8)]).flops == 2 * forward.flops


def test_a_fused_cell_is_pointwise():
    """A fused cell counts no product, because its products are separate calls."""
    gates = [tensor(4, 64), tensor(4, 64), tensor(4, 16)]
    assert work("aten._thnn_fused_lstm_cell.default", gates, [tensor(4, 16), tensor(4, 16)]).products == ()


def test_fused_attention_blocks():
    """A block has projections of 4 E^2 and attention of 4 T E per token, and the feed-forward's weights."""
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


def recurrent(name: str, gates: int, steps: int, batch: int = 8, hidden: int = 16, fed_back: int = 16):
    """Work of forward and backward of a layer in bf16."""
    inputs = tensor(batch, steps, gates * hidden)
    states = [tensor(batch, fed_back), *([tensor(batch, hidden)] if name == "lstm" else [])]
    weights = [tensor(gates * hidden, fed_back), *([tensor(fed_back, hidden)] if fed_back != hidden else [])]
    y = tensor(batch, steps, fed_back)
    forward = work(f"autoshard.{name}.default", [inputs, *states, *weights], [y, *states])
    backward = work(f"autoshard.{name}_backward.default", [y, *states, *weights, y], [inputs, *states, *weights])
    return forward, backward


@pytest.mark.parametrize(("name", "gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_semantic_layers_multiply_the_state_at_each_step(name: str, gates: int):
    """Each step of a layer has a product with the state. The backward has twice the FLOPs, in one product per step
    and one more."""
    forward, backward = recurrent(name, gates, 10)
    assert forward.flops == 2 * 10 * 8 * gates * 16 * 16
    assert backward.flops == 2 * forward.flops
    assert len(forward.products) == 10
    assert len(backward.products) == 11


def test_a_projection_is_one_more_product():
    """An LSTM with a projection counts one more product per step, with the projection's weight."""
    forward, backward = recurrent("lstm", 4, 10, fed_back=4)
    assert forward.flops == 2 * 10 * 8 * (64 * 4 + 4 * 16)
    assert backward.flops == 2 * forward.flops


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_time_grows_with_steps_more_than_with_rows(name: str):
    """Twice the steps take twice the time, and twice the rows take at most 20 % more."""
    h100, gates = device("h100_sxm"), {"lstm": 4, "gru": 3, "rnn": 1}[name]
    for place in (0, 1):
        times = {
            (steps, batch): work_time(recurrent(name, gates, steps, batch)[place], h100)
            for steps, batch in ((100, 8), (200, 8), (100, 16))
        }
        assert times[200, 8] == pytest.approx(2 * times[100, 8], rel=0.05)
        assert times[100, 16] < 1.2 * times[100, 8]
