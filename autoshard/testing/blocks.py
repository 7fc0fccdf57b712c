"""The blocks of drawn programs: functions that add lines of code to a drawn model.

A drawn model has one hidden value `h` [batch, length, width]. The lines of a block map `h` to a new `h`. A block is a
function of `draw` and the `SourceWriter` to which it adds its lines. To draw a new feature, write a function and add
it to `BLOCKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Draw = Callable[..., Any]
"""The function that `st.composite` passes: `draw(strategy)` returns a value."""

_ACTIVATIONS = ("F.gelu", "F.relu", "F.silu", "torch.tanh", "torch.sigmoid")


@dataclass(slots=True)
class SourceWriter:
    """Collects the source of a drawn model: the lines of `__init__` and `forward`, and the inputs.

    Args:
        batch, length, width: the shape of `h` after the lines so far, for one micro-batch.
        rows: size of dim 0 of the inputs: `batch` times the number of micro-batches.
        embedding_width: width of `self.embed`, or None if there is no embedding.
    """

    batch: int
    length: int
    width: int
    rows: int
    embedding_width: int | None = None
    _setup: list[str] = field(default_factory=list)
    _forward: list[str] = field(default_factory=list)
    _inputs: dict[str, str] = field(default_factory=dict)
    _count: int = 0

    def input(self, name: str, value: str) -> str:
        """Add an argument of `forward` and `value`, the code of its example value; return the argument's name."""
        self._inputs[name] = value
        return name

    def attribute(self, name: str, value: str) -> str:
        """Add the line `self.name = value` to `__init__`; return the text `self.name`."""
        self.statement(f"self.{name} = {value}")
        return f"self.{name}"

    def fresh(self, kind: str, value: str) -> str:
        """Add `self.kind_N = value` to `__init__`, and return the text `self.kind_N`. N makes the name unique."""
        self._count += 1
        return self.attribute(f"{kind}_{self._count}", value)

    def buffer(self, kind: str, value: str) -> str:
        """Register a buffer `kind_N` in `__init__`, and return the text `self.kind_N`. N makes the name unique."""
        self._count += 1
        self.statement(f"self.register_buffer('{kind}_{self._count}', {value})")
        return f"self.{kind}_{self._count}"

    def weight(self, *shape: int) -> str:
        """Add a parameter of a shape, and return the code that reads it. `h @ weight` has the scale of `h`."""
        sizes = ", ".join(map(str, shape))
        return self.fresh("weight", f"nn.Parameter(torch.randn({sizes}) / {shape[0]} ** 0.5)")

    def statement(self, line: str) -> None:
        """Add a line to `__init__` of the drawn model."""
        self._setup.append(line)

    def line(self, line: str) -> None:
        """Add a line to `forward` of the drawn model."""
        self._forward.append(line)

    def source(self, seed: int, trailer: Sequence[str] = ()) -> str:
        """Return the code of the drawn model: imports, its class, `model` and `inputs`, and the lines of `trailer`.

        `seed` is torch's seed before `model` and `inputs` are made.
        """
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "from torch import nn",
                "",
                "",
                "class Drawn(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self._setup),
                "",
                f"    def forward(self, {', '.join(self._inputs)}):",
                *(f"        {line}" for line in self._forward),
                "",
                "",
                f"torch.manual_seed({seed})",
                "model = Drawn()",
                f"inputs = ({''.join(f'{value}, ' for value in self._inputs.values())})",
                *trailer,
                "",
            ]
        )


def linear(draw: Draw, writer: SourceWriter) -> None:
    """Add a linear layer to a drawn width, which may differ from the width of `h`."""
    width = draw(st.sampled_from((writer.width, 8, 16)))
    layer = writer.fresh("linear", f"nn.Linear({writer.width}, {width}, bias={draw(st.booleans())})")
    writer.line(f"h = {layer}(h)")
    writer.width = width


def matmul_chain(draw: Draw, writer: SourceWriter) -> None:
    """Add one to three matrix products of `h` with parameters that belong to no layer."""
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.sampled_from((writer.width, 8, 16)))
        writer.line(f"h = h @ {writer.weight(writer.width, width)}")
        writer.width = width


def batched_matmul(draw: Draw, writer: SourceWriter) -> None:
    """Add attention with a single head, written as two batched matrix products and a softmax."""
    writer.line(f"scores = torch.bmm(h, h.transpose(1, 2)) * {writer.width**-0.5:.4f}")
    writer.line("h = torch.bmm(F.softmax(scores, dim=-1), h)")


def attention(draw: Draw, writer: SourceWriter) -> None:
    """Add scaled dot-product attention with a residual.

    Causal masks and shared keys (grouped queries) are drawn too.
    """
    length, width = writer.length, writer.width
    heads = draw(st.sampled_from([count for count in (2, 4, 3) if width % count == 0]))
    groups = draw(st.sampled_from([count for count in (heads, 1, 2) if heads % count == 0]))
    size = width // heads
    causal = draw(st.booleans())
    for name, count in (("q", heads), ("k", groups), ("v", groups)):
        layer = writer.fresh(name, f"nn.Linear({width}, {count * size}, bias={draw(st.booleans())})")
        writer.line(f"{name} = {layer}(h).view(-1, {length}, {count}, {size}).transpose(1, 2)")
    shared = ", enable_gqa=True" if groups != heads else ""
    writer.line(f"o = F.scaled_dot_product_attention(q, k, v, is_causal={causal}{shared})")
    projection = writer.fresh("o", f"nn.Linear({width}, {width}, bias=False)")
    writer.line(f"h = h + {projection}(o.transpose(1, 2).reshape(-1, {length}, {width}))")


def mlp(draw: Draw, writer: SourceWriter) -> None:
    """Add an MLP with a residual: norm, linear layer, activation, linear layer."""
    hidden = draw(st.sampled_from((2 * writer.width, 16)))
    activation = draw(st.sampled_from(_ACTIVATIONS))
    up = writer.fresh("up", f"nn.Linear({writer.width}, {hidden})")
    down = writer.fresh("down", f"nn.Linear({hidden}, {writer.width}, bias={draw(st.booleans())})")
    writer.line(f"h = h + {down}({activation}({up}({_norm(draw, writer)}(h))))")


def gated_mlp(draw: Draw, writer: SourceWriter) -> None:
    """Add a gated MLP with a residual. One product is cut into two chunks: the gate and the gated values."""
    hidden = draw(st.sampled_from((8, 16)))
    both = writer.fresh("gate_up", f"nn.Linear({writer.width}, {2 * hidden}, bias=False)")
    down = writer.fresh("down", f"nn.Linear({hidden}, {writer.width}, bias=False)")
    writer.line(f"gate, up = {both}(h).chunk(2, dim=-1)")
    writer.line(f"h = h + {down}(F.silu(gate) * up)")


def norm(draw: Draw, writer: SourceWriter) -> None:
    """Add a layer norm or RMS norm, with or without weights."""
    writer.line(f"h = {_norm(draw, writer)}(h)")


def _norm(draw: Draw, writer: SourceWriter) -> str:
    affine = draw(st.booleans())
    if draw(st.booleans()):
        return writer.fresh("norm", f"nn.LayerNorm({writer.width}, elementwise_affine={affine})")
    return writer.fresh("norm", f"nn.RMSNorm({writer.width}, eps=1e-5, elementwise_affine={affine})")


def mix_positions(draw: Draw, writer: SourceWriter) -> None:
    """Add a linear layer over the length, between two transposes."""
    layer = writer.fresh("mix", f"nn.Linear({writer.length}, {writer.length})")
    writer.line(f"h = {layer}(h.transpose(1, 2)).transpose(1, 2)")


def flattened(draw: Draw, writer: SourceWriter) -> None:
    """Add a matrix product of `h` with batch and length merged into one dim."""
    length, width = writer.length, writer.width
    view = draw(st.sampled_from((f"h.reshape(-1, {width})", "h.flatten(0, 1)")))
    writer.line(f"flat = {view} @ {writer.weight(width, width)}")
    writer.line(f"h = flat.view(-1, {length}, {width})")


def split_width(draw: Draw, writer: SourceWriter) -> None:
    """View the width as two dims, swap them, and merge them."""
    length, width = writer.length, writer.width
    writer.line(f"h = h.view(-1, {length}, 2, {width // 2}).transpose(2, 3)")
    writer.line(f"h = h.reshape(-1, {length}, {width})")


def permuted(draw: Draw, writer: SourceWriter) -> None:
    """Apply an activation to `h` with permuted dims, and permute the dims back."""
    writer.line(f"h = {draw(st.sampled_from(_ACTIVATIONS))}(h.permute(2, 0, 1)).permute(1, 2, 0)")


def reduction(draw: Draw, writer: SourceWriter) -> None:
    """Reduce `h` over one dim by mean, maximum or sum, broadcast the result, and combine it with `h`."""
    dim = draw(st.sampled_from((0, 1, 2)))
    forms = (
        "h = h - h.mean(dim={dim}, keepdim=True)",
        "h = h * torch.rsqrt(h.pow(2).mean(dim={dim}, keepdim=True) + 1e-3)",
        "h = h - h.amax(dim={dim}, keepdim=True)",
        "h = h / (1 + h.abs().sum(dim={dim}, keepdim=True))",
        "h = h + h.sum(dim={dim}).unsqueeze({dim}) * 0.1",
    )
    writer.line(draw(st.sampled_from(forms)).format(dim=dim))


def pointwise(draw: Draw, writer: SourceWriter) -> None:
    """Add an activation, a leaky ReLU by `torch.where`, or a polynomial of `h`."""
    forms = (
        *(f"h = {name}(h)" for name in _ACTIVATIONS),
        "h = torch.where(h > 0, h, 0.1 * h)",
        "h = h * h - 0.5",
    )
    writer.line(draw(st.sampled_from(forms)))


def scale_and_shift(draw: Draw, writer: SourceWriter) -> None:
    """Add `h * scale + shift` with parameters of shape [width]."""
    scale = writer.fresh("scale", f"nn.Parameter(torch.randn({writer.width}))")
    shift = writer.fresh("shift", f"nn.Parameter(torch.randn({writer.width}))")
    writer.line(f"h = h * {scale} + {shift}")


def softmax(draw: Draw, writer: SourceWriter) -> None:
    """Add `h + softmax(h)` or `h + log_softmax(h)`, over one dim."""
    name, dim = draw(st.sampled_from(("softmax", "log_softmax"))), draw(st.sampled_from((1, 2)))
    writer.line(f"h = h + F.{name}(h, dim={dim})")


def recurrent(draw: Draw, writer: SourceWriter) -> None:
    """Add one or two recurrent layers that run over the length, in one direction or in both."""
    kind = draw(st.sampled_from(("LSTM", "GRU", "RNN")))
    hidden, layers = draw(st.sampled_from((4, 8))), draw(st.sampled_from((1, 2)))
    both, batch_first, bias = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    options = f"num_layers={layers}, bidirectional={both}, batch_first={batch_first}, bias={bias}"
    layer = writer.fresh("recurrent", f"nn.{kind}({writer.width}, {hidden}, {options})")
    writer.line(f"h = {layer}(h)[0]" if batch_first else f"h = {layer}(h.transpose(0, 1))[0].transpose(0, 1)")
    writer.width = hidden * (2 if both else 1)


def experts(draw: Draw, writer: SourceWriter) -> None:
    """Add a mixture of experts with a residual: a router sends each position to its best experts.

    The experts' weights are multiplied as a batch, or gathered for each position.

    A chosen expert's weight falls to zero as another expert becomes better than it. So rounding may choose either of
    two almost equally good experts, without changing the result.
    """
    count, best, hidden = draw(st.sampled_from((4, 3))), draw(st.sampled_from((2, 3))), draw(st.sampled_from((8, 6)))
    width = writer.width
    router = writer.fresh("router", f"nn.Linear({width}, {count}, bias=False)")
    up = writer.fresh("up", f"nn.Parameter(torch.randn({count}, {width}, {hidden}) / {width} ** 0.5)")
    down = writer.fresh("down", f"nn.Parameter(torch.randn({count}, {hidden}, {width}) / {hidden} ** 0.5)")
    writer.line(f"shares = {router}(h).softmax(-1)")
    writer.line(f"best, chosen = shares.topk({best})")
    writer.line("best = best - best[..., -1:]")
    if draw(st.booleans()):
        writer.line("best = torch.zeros_like(shares).scatter(-1, chosen, best)")
        writer.line(f"inner = F.silu(torch.einsum('btd,edh->bteh', h, {up}))")
        writer.line(f"done = torch.einsum('bteh,ehd->bted', inner, {down})")
    else:
        writer.line(f"inner = F.silu(torch.einsum('btd,btedh->bteh', h, {up}[chosen]))")
        writer.line(f"done = torch.einsum('bteh,btehd->bted', inner, {down}[chosen])")
    writer.line("h = h + (best.unsqueeze(-1) * done).sum(2)")


def batch_norm(draw: Draw, writer: SourceWriter) -> None:
    """Add a batch norm over the width, with or without running statistics and weights."""
    affine, tracked = draw(st.booleans()), draw(st.booleans())
    options = f"eps=0.01, affine={affine}, track_running_stats={tracked}"
    layer = writer.fresh("batch_norm", f"nn.BatchNorm1d({writer.width}, {options})")
    if draw(st.booleans()):
        writer.line(f"h = {layer}(h.transpose(1, 2)).transpose(1, 2)")
    else:
        writer.line(f"h = {layer}(h.flatten(0, 1)).unflatten(0, (-1, {writer.length}))")


def running_mean(draw: Draw, writer: SourceWriter) -> None:
    """Add a buffer that tracks the mean of `h` in place, and subtract the buffer from `h`."""
    mean = writer.buffer("mean", f"torch.linspace(-1, 1, {writer.width})")
    writer.line(f"{mean}.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)")
    writer.line(f"h = h - {mean}")


def constant_buffer(draw: Draw, writer: SourceWriter) -> None:
    """Write a line that adds a constant table of shape [length, width] to `h`, or multiplies `h` by the table."""
    name = writer.buffer("table", f"torch.linspace(0.5, 1.5, {writer.length * writer.width})")
    table = f"{name}.view({writer.length}, {writer.width})"
    writer.line(draw(st.sampled_from(("h = h + {}", "h = h * {}"))).format(table))


def tied(draw: Draw, writer: SourceWriter) -> None:
    """Add two linear layers with one weight, or one linear layer and a product with its weight."""
    width = writer.width
    first = writer.fresh("tied", f"nn.Linear({width}, {width}, bias={draw(st.booleans())})")
    if draw(st.booleans()):
        writer.line(f"h = torch.tanh({first}(h)) @ {first}.weight")
        return
    second = writer.fresh("tied", f"nn.Linear({width}, {width})")
    writer.statement(f"{second}.weight = {first}.weight")
    writer.line(f"h = {second}(torch.tanh({first}(h)))")


def residual(draw: Draw, writer: SourceWriter) -> None:
    """Add an inner block with a residual around it."""
    width = writer.width
    writer.line("skip = h")
    draw(st.sampled_from((pointwise, norm, scale_and_shift, flattened, mix_positions)))(draw, writer)
    if writer.width == width:
        writer.line("h = skip + h")


def random_numbers(draw: Draw, writer: SourceWriter) -> None:
    """Add dropout, noise, random masks or a random permutation. Only `programs(draws=True)` draws this block.

    Rounding of other values cannot change which random numbers are drawn.
    """
    forms = (
        "h = F.dropout(h, 0.25)",
        "h = F.alpha_dropout(h, 0.2, training=True)",
        "h = F.rrelu(h, training=True)",
        "h = F.gumbel_softmax(h, dim=-1)",
        "h = h + 0.1 * torch.randn_like(h)",
        "h = h + 0.1 * torch.empty_like(h).exponential_()",
        "h = h * torch.rand({batch}, 1, {width})",
        "h = h * torch.empty_like(h).bernoulli_(0.6)",
        "h = h + torch.randint(0, 4, ({length}, 1)) / 4",
        "h = h[torch.randperm({batch})]",
        "h = h * torch.multinomial(torch.ones({batch}, {length}), {length}).unsqueeze(-1) / {length}",
    )
    sizes = {"batch": writer.batch, "length": writer.length, "width": writer.width}
    writer.line(draw(st.sampled_from(forms)).format(**sizes))


BLOCKS: tuple[Callable[[Draw, SourceWriter], None], ...] = (
    linear,
    matmul_chain,
    batched_matmul,
    attention,
    mlp,
    gated_mlp,
    norm,
    mix_positions,
    flattened,
    split_width,
    permuted,
    reduction,
    pointwise,
    scale_and_shift,
    softmax,
    recurrent,
    experts,
    batch_norm,
    running_mean,
    constant_buffer,
    tied,
    residual,
)
"""The blocks from which `programs` draws for one micro-batch. With `draws=True`, it draws `random_numbers` too."""
