"""Uses of second derivatives in penalties, inner steps, per-sample gradients and transforms of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, train


class Attends(nn.Module):
    """A residual block with RMS norm and attention by torch's math kernel, which has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm, self.out = nn.Linear(8, 24), nn.RMSNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.norm(y.transpose(1, 2).flatten(2) + x)).mean((1, 2))


class Recurrent(nn.Module):
    """A recurrent layer, and a score of its last output."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer, self.out = layer(8, 4, batch_first=True, **options), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1]).squeeze(1)


class Classifier(nn.Module):
    """A perceptron that returns the cross entropy of its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.gelu(self.first(x))), y, label_smoothing=0.1)


class Inside(nn.Module):
    """A module whose forward is a given function of a model and its inputs."""

    def __init__(self, function: Callable[..., Tensor], model: nn.Module) -> None:
        super().__init__()
        self.function, self.model = function, model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.model, *inputs)


def steps(compile: Compile, make: Callable[[], nn.Module], *inputs: Tensor, times: int = 2) -> Numbers:
    """Train for a few steps; return the losses and the final parameters."""
    torch.manual_seed(0)
    compiled = compile(make())
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    losses = train(optimizer, lambda: compiled(*inputs), times)
    return numbers(*losses, *compiled.parameters())


def rows() -> tuple[Tensor, Tensor]:
    """Return eight rows and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def sequences() -> Tensor:
    """Return four sequences of three vectors."""
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))


def penalty_of_parameters(compile: Compile) -> Numbers:
    """Return a penalty on a loss's gradients with respect to parameters, and the gradients of the penalty."""
    torch.manual_seed(0)
    compiled = compile(Classifier())
    parameters = list(compiled.parameters())
    gradients = torch.autograd.grad(compiled(*rows()), parameters, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    penalty.backward()
    return numbers(penalty, *(parameter.grad for parameter in parameters))


def penalty_inside(make: Callable[[], nn.Module]) -> Callable[[Compile], Numbers]:
    """Return a script that trains with the critic's loss of WGAN-GP, computed in forward."""

    def penalised(critic: nn.Module, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        score = critic(z).sum()
        (gradient,) = torch.autograd.grad(score, z, create_graph=True)
        return score / len(x) + (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    return lambda compile: steps(compile, lambda: Inside(penalised, make()), sequences())


def penalty_outside(compile: Compile) -> Numbers:
    """Return an input gradient, and the parameters' gradients of its square sum, computed outside the model."""
    torch.manual_seed(0)
    compiled = compile(Attends())
    z = sequences().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(z).sum(), z, create_graph=True)
    gradient.square().sum().backward()
    return numbers(gradient, *(p.grad for p in compiled.parameters() if p.grad is not None))


def inner_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of MAML: the loss of half of the rows after a step on the other half."""
    state = dict(model.named_parameters())
    loss = functional_call(model, state, (x[::2], y[::2]))
    gradients = torch.autograd.grad(loss, list(state.values()), create_graph=True)
    stepped = {name: value - 0.5 * g for (name, value), g in zip(state.items(), gradients, strict=True)}
    return functional_call(model, stepped, (x[1::2], y[1::2]))


def per_sample(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Return the mean over samples of the square sum of each sample's gradient."""

    def loss(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return functional_call(model, parameters, tuple(value[None] for value in sample)).sum()

    found = vmap(grad(loss), (None, *(0,) * len(inputs)))(dict(model.named_parameters()), *inputs)
    return sum(value.flatten(1).square().sum(1) for value in found.values()).mean()


def curvature(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss plus the square sum of its Hessian with respect to one input row."""
    second = jacrev(grad(lambda row: model(row[None], y[:1])))(x[0])
    return model(x, y) + second.square().sum()


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """Return the square sum of the Jacobian of scores with respect to inputs."""
    return jacrev(model)(x).square().sum()


class Ensemble(nn.Module):
    """Three classifiers with stacked parameters, run by one vmap."""

    def __init__(self) -> None:
        super().__init__()
        members = [Classifier() for _ in range(3)]
        self.one = (members[0].to("meta"),)
        stacked, _ = stack_module_state([Classifier() for _ in range(3)])
        self.stacked = nn.ParameterDict({name.replace(".", "_"): value for name, value in stacked.items()})
        self.names = tuple(stacked)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = {name: self.stacked[name.replace(".", "_")] for name in self.names}
        return vmap(lambda values: functional_call(self.one[0], values, (x, y)))(state).sum()


USES = (
    *on_both("a penalty on the gradient of cross-entropy", penalty_of_parameters),
    Use("a gradient penalty through attention and RMS norm", penalty_inside(Attends)),
    Use("a gradient penalty outside, through attention", penalty_outside),
    Use("a gradient penalty through an LSTM", penalty_inside(lambda: Recurrent(nn.LSTM, num_layers=2))),
    Use("a gradient penalty through a GRU", penalty_inside(lambda: Recurrent(nn.GRU))),
    Use("MAML on cross-entropy", lambda compile: steps(compile, lambda: Inside(inner_step, Classifier()), *rows())),
    Use(
        "per-sample gradients of cross-entropy",
        lambda compile: steps(compile, lambda: Inside(per_sample, Classifier()), *rows()),
    ),
    Use(
        "per-sample gradients of attention and RMS norm",
        lambda compile: steps(compile, lambda: Inside(per_sample, Attends()), sequences()),
    ),
    Use(
        "a Hessian of cross-entropy",
        lambda compile: steps(compile, lambda: Inside(curvature, Classifier()), *rows()),
    ),
    Use("a Jacobian of attention", lambda compile: steps(compile, lambda: Inside(jacobian, Attends()), sequences())),
    Use("an ensemble by vmap", lambda compile: steps(compile, Ensemble, *rows())),
)
