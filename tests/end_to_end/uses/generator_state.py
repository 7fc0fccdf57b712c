"""Uses of torch's generator around a model that draws: seeds repeat draws, and restored states continue them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both

Script = Callable[[Callable[[], Tensor]], Numbers]


class Noisy(nn.Module):
    """A layer with dropout on its input and noise on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(F.dropout(x, 0.5, training=True))
        return y + torch.randn_like(y)


def drawing(script: Script) -> Callable[[Compile], Numbers]:
    """Make a use from a script that gets a call of `Noisy`; its numbers must not depend on the draws."""

    def use(compile: Compile) -> Numbers:
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 64).view(8, 8)
        model = compile(Noisy(), example_inputs=(x,))
        return script(lambda: model(x).detach())

    return use


def same(*pairs: tuple[Tensor, Tensor]) -> Numbers:
    """Return 1 for each pair of equal tensors, else 0."""
    return numbers(*(float(torch.equal(one, other)) for one, other in pairs))


def same_seed(call: Callable[[], Tensor]) -> Numbers:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append((call(), call()))
    (a, b), (c, d) = found
    return same((a, c), (b, d), (a, b))


def seed_then_data(call: Callable[[], Tensor]) -> Numbers:
    found = []
    for _ in range(3):
        torch.manual_seed(3)
        found.append((torch.randn(40), call())[1])
    return same((found[0], found[1]), (found[1], found[2]))


def seed_and_data_in_turn(call: Callable[[], Tensor]) -> Numbers:
    def run() -> list[Tensor]:
        torch.manual_seed(5)
        return [(torch.randn(40), call())[1] for _ in range(3)]

    one, two = run(), run()
    return same(*zip(one, two, strict=True), (one[0], one[1]))


def fork(call: Callable[[], Tensor]) -> Numbers:
    torch.manual_seed(3)
    a, b, c = call(), call(), call()
    torch.manual_seed(3)
    d = call()
    with torch.random.fork_rng(devices=[]):
        inside = call(), call()
    return same((a, d), (b, inside[0]), (c, inside[1]), (call(), b), (call(), c))


def fork_with_a_seed(call: Callable[[], Tensor]) -> Numbers:
    evaluations, steps = [], []
    for _ in range(2):
        steps += [call(), call()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            torch.randn(64)
            evaluations.append(call())
    pairs = [(steps[i], steps[j]) for i in range(4) for j in range(i)]
    return same((evaluations[0], evaluations[1]), *pairs)


def state_set_again(call: Callable[[], Tensor]) -> Numbers:
    call()
    state = torch.get_rng_state()
    one = call(), call()
    torch.manual_seed(0)
    other = call()
    torch.set_rng_state(state)
    return same((call(), one[0]), (call(), one[1]), (other, one[0]))


def common_numbers(compile: Compile) -> Numbers:
    """Return the difference of a loss between two biases, with the same seed before each call."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).view(8, 8)
    layer = nn.Linear(8, 1)
    compiled = compile(nn.Sequential(nn.Dropout(0.5), layer), example_inputs=(x,))
    found = []
    for shift in (0.0, 1.0):
        with torch.no_grad():
            layer.bias.add_(shift)
        torch.manual_seed(11)
        found.append(compiled(x).mean())
    return numbers(found[1] - found[0])


def copies_draw_alike(compile: Compile) -> Numbers:
    """Run a model, its copy and the model again from the same seed; compare the outputs."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).view(8, 8)
    compiled = compile(Noisy(), example_inputs=(x,))
    compiled(x)
    other = copy.deepcopy(compiled)
    found = []
    for model in (compiled, other, compiled):
        torch.manual_seed(0)
        found.append(model(x))
    return same((found[0], found[1]), (found[0], found[2]))


USES = (
    *on_both("the same seed set again", drawing(same_seed)),
    Use("the same seed, then data", drawing(seed_then_data)),
    Use("the same seed, then data and calls in turn", drawing(seed_and_data_in_turn)),
    *on_both("a fork of the generator", drawing(fork)),
    *on_both("a fork with a seed of its own", drawing(fork_with_a_seed)),
    Use("a state of the generator set again", drawing(state_set_again)),
    Use("common random numbers", common_numbers),
    Use("a copy from the same seed", copies_draw_alike),
)
